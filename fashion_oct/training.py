"""One training run: strategy, data, model in scope, `fit`, test report, run folder."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import logging

from fashion_oct import (
    checkpoints,
    cluster,
    datasets,
    distribution,
    evaluation,
    feature_cache,
    files,
    image_cache,
    input_pipeline,
    models,
    reports,
    row_cache,
    run_folder,
    schedules,
    tensorboard_log,
)
from fashion_oct.errors import InputError, RunError
from fashion_oct.ledger import Ledger
from fashion_oct.options import Config
from fashion_oct.progress import Profile, Progress, Stopped
from fashion_oct.timing import TimeHistory, TimingSummary

_STEPS_PER_EXECUTION = 16  # on accelerators: their progress is seen several times a second all the same


def run(config: Config) -> int:
    """Trains, evaluates on the test split, writes the run folder, and prints the final lines.

    A run that was stopped or killed goes on at its last checkpoint; a finished one is left as it is.

    Returns:
      The exit status: 0, or 128 + the number of the signal that stopped it.

    Raises:
      InputError: a setting that does not fit the data, the devices or the workdir, and nothing has been written then;
        or an image that does not decode, which no header tells: the run folder then ends with the step before it.
      RunError: the loss is no finite number, or another worker was lost.
    """
    ledger = Ledger()
    if not config.workdir and cluster.find(config.cluster).num_workers > 1:
        raise InputError("--workdir is missing: several workers need one that they share")
    workdir = run_folder.choose(config)
    if run_folder.is_finished(workdir):
        print(f"this run is finished: its results are in {workdir}; a new one needs another --workdir")
        return 0
    if config.tensorboard:
        tensorboard_log.check_is_installed()
    if config.deterministic:
        distribution.enable_determinism()
    tf.keras.utils.set_random_seed(config.seed)
    strategy = distribution.make_strategy(config.num_gpus, config.virtual_devices, config.cluster)
    ledger.lap("start-up")
    with distribution.naming_lost_workers(strategy):
        return run_on(strategy, config, workdir=workdir, ledger=ledger)


def run_on(strategy: tf.distribute.Strategy, config: Config, *, workdir: pathlib.Path, ledger: Ledger) -> int:
    """Does what `run` does, on the devices of a strategy; of several workers the chief writes and prints."""
    task, is_chief = distribution.task_of(strategy), distribution.is_chief(strategy)
    splits = load_splits(config)
    ledger.lap("data preparation")
    plan = make_plan(config, strategy, num_train=len(splits.train))
    refuse_different_workers(strategy, config, plan)
    if is_chief:
        print(plan.sentence(), flush=True)
    model = build(config, strategy, splits.spec, plan)
    if is_chief:
        workdir.mkdir(parents=True, exist_ok=True)
    with checkpoints.lock_workdir(workdir) if is_chief else contextlib.nullcontext():
        if is_chief:
            run_folder.write_settings(workdir, config, dataclasses.asdict(plan), splits.describe())
        ledger.lap("model")
        try:
            timing = train_with_caches(model, config, strategy, plan, splits, workdir=workdir, ledger=ledger)
        except Stopped as stopped:
            line = f"stopped by {stopped.signal.name}: to go on, give --workdir={workdir} again"
            print(f"{task.prefix}{line}", file=sys.stderr)
            return 128 + stopped.signal
        if task.num_workers > 1:
            model = on_one_device(model)
        if is_chief:
            as_keras_3 = task.num_workers > 1 and cluster.keras_is_3()
            report = save_and_evaluate(model, plan, splits, workdir=workdir, ledger=ledger, as_keras_3=as_keras_3)
            if config.tensorboard:
                tensorboard_log.write_report(
                    workdir / "tensorboard", settings=dataclasses.asdict(config), report=report, plots=workdir / "plots"
                )
                ledger.lap("evaluation")
            files.write_json(
                workdir / run_folder.LAST_FILE, dataclasses.asdict(timing) | {"ledger_seconds": ledger.seconds}
            )
        distribution.gather(strategy, b"done")  # who leaves early is taken for lost
    if not is_chief:
        return 0
    print(reports.format_ledger(ledger.seconds, sum(ledger.seconds.values())), flush=True)
    print(final_lines(plan, timing, report, splits, workdir))
    return 0


def refuse_different_workers(strategy: tf.distribute.Strategy, config: Config, plan: "Plan") -> None:
    """Raises InputError where the workers would not train the same."""
    settings = f"{run_folder.lasting_settings(config)} {plan}"
    if len(set(distribution.gather(strategy, hashlib.sha256(settings.encode()).digest()))) > 1:
        raise InputError("the workers were given different settings or data: give all of them the same flags")


def on_one_device(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a copy of a model of several workers that this worker can use without the others."""
    copy = tf.keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile()  # Keras 2 would warn when it saves
    return copy


def train_with_caches(
    model: tf.keras.Model,
    config: Config,
    strategy: tf.distribute.Strategy,
    plan: "Plan",
    splits: datasets.Splits,
    *,
    workdir: pathlib.Path,
    ledger: Ledger,
) -> TimingSummary:
    """Trains the model, or its tail on cached features; see `fit`."""
    with input_pipeline.naming_bad_files(splits.train, splits.validation):
        trained, train, validation = use_caches(model, config, strategy, plan, splits)
        ledger.lap("caches")
        return fit(trained, config, plan, train=train, validation=validation, workdir=workdir, ledger=ledger)


def save_and_evaluate(
    model: tf.keras.Model,
    plan: "Plan",
    splits: datasets.Splits,
    *,
    workdir: pathlib.Path,
    ledger: Ledger,
    as_keras_3: bool = False,
) -> dict:
    """Writes model.keras, of tf-keras where asked for in the format of Keras 3, and the test report; returns it."""
    if as_keras_3:
        save_as_keras_3(model, workdir)
    else:
        run_folder.save_model(model, workdir / "model.keras")
    ledger.lap("saving")
    global_batch_size = plan.batch.per_replica_batch_size * model.distribute_strategy.num_replicas_in_sync
    with input_pipeline.naming_bad_files(splits.test):
        report = evaluation.evaluate(model, splits, workdir=workdir, global_batch_size=global_batch_size)
    ledger.lap("evaluation")
    return report


def save_as_keras_3(model: tf.keras.Model, workdir: pathlib.Path) -> None:
    """Writes model.keras in the format of Keras 3, for a model of tf-keras, whose own format Keras 3 does not read.

    A process of its own builds the network with Keras 3, on the CPU, and gives it the weights.
    """
    path = workdir / ".weights.tmp.npz"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TF_USE_LEGACY_KERAS", "TF_CONFIG")
    }
    program = f"from fashion_oct import training; training.convert({str(workdir)!r}, {str(path)!r})"
    try:
        np.savez(path, *model.get_weights())
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {"CUDA_VISIBLE_DEVICES": "-1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.unlink(missing_ok=True)
    if done.returncode:
        raise RunError(f"{workdir / 'model.keras'} cannot be written with Keras 3: {done.stderr[-500:]}")


def convert(workdir: str, weights: str) -> None:
    """Writes the model.keras of a run folder with the Keras of this process; see `save_as_keras_3`.

    Args:
      workdir: of the run, with config.json.
      weights: .npz file of the weights, in the order of `get_weights`.
    """
    settings = evaluation.read_settings(workdir)
    config = dataclasses.replace(Config(**settings["config"]), weights="none")
    dataset = settings["dataset"]
    spec = input_pipeline.DataSpec(tuple(dataset["image_shape"]), tuple(dataset["class_names"]))
    tf.keras.mixed_precision.set_global_policy(settings["plan"]["precision"])
    model = build_network(config, spec)
    with np.load(weights) as arrays:  # allow_pickle is False
        model.set_weights([arrays[f"arr_{i}"] for i in range(len(arrays.files))])
    run_folder.save_model(model, pathlib.Path(workdir) / "model.keras")


def load_splits(config: Config) -> datasets.Splits:
    """Loads the dataset that `config` names."""
    return datasets.load(
        config.dataset,
        data_dir=config.data_dir,
        validation_fraction=config.validation_fraction,
        bad_images=config.bad_images,
        image_size=config.image_size,
        labels=config.labels,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the machine makes of a Config: devices, batches, steps, precision."""

    devices: list[str]
    batch: distribution.BatchSizes
    steps_per_epoch: int
    num_steps: int
    epochs: int
    steps_per_execution: int
    learning_rate: float
    precision: str
    precision_reason: str

    def sentence(self) -> str:
        """Returns the one sentence that states all sizes."""
        batch = self.batch
        replicas = f"{batch.num_replicas} replica{'s' if batch.num_replicas > 1 else ''}"
        return (
            f"{replicas} ({', '.join(self.devices)}) x {batch.per_replica_batch_size} images = global batch "
            f"{batch.global_batch_size}; {self.steps_per_epoch} steps an epoch, {self.num_steps} steps in all; "
            f"{self.precision} ({self.precision_reason})"
        )


def make_plan(config: Config, strategy: tf.distribute.Strategy, *, num_train: int) -> Plan:
    """Works out batches, steps and precision.

    Raises:
      InputError: the batch does not fit the replicas or the split.
    """
    batch = distribution.batch_sizes(
        strategy.num_replicas_in_sync,
        per_replica_batch_size=config.per_replica_batch_size,
        global_batch_size=config.global_batch_size,
    )
    steps_per_epoch = batch.steps_per_epoch(num_train)
    devices = distribution.device_names(strategy)
    most = min(steps_per_epoch, config.steps or sys.maxsize)
    steps_per_execution = config.steps_per_execution or choose_steps_per_execution(devices, most)
    # an epoch is a whole number of executions: Keras 3 would run the last one in full, Keras 2 would shorten it
    steps_per_epoch = -(-steps_per_epoch // steps_per_execution) * steps_per_execution
    num_steps = min(config.epochs * steps_per_epoch, config.steps or sys.maxsize)
    if steps_per_execution > num_steps:
        raise InputError(
            f"--steps_per_execution={steps_per_execution} is more than the run's {num_steps} steps: lower it"
        )
    if steps_per_execution > 1 and devices[1:] and devices[0].startswith("CPU") and _is_keras_3():
        raise InputError(
            f"--steps_per_execution={steps_per_execution} on {len(devices)} virtual devices: TensorFlow's graph "
            "optimiser fails on it with Keras 3; give --steps_per_execution=1, or GPUs"
        )
    precision, reason = distribution.choose_precision(config.precision, strategy)
    return Plan(
        devices=devices,
        batch=batch,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        epochs=-(-num_steps // steps_per_epoch),
        steps_per_execution=steps_per_execution,
        learning_rate=schedules.scale_rate(
            config.learning_rate,
            global_batch_size=batch.global_batch_size,
            reference_batch_size=config.reference_batch_size or batch.global_batch_size,
            rule=config.lr_scaling,
        ),
        precision=precision,
        precision_reason=reason,
    )


def choose_steps_per_execution(devices: list[str], most: int) -> int:
    """Returns how many steps one call of the train function should do where that was not given.

    On CPUs 1: calls cost them nothing. On accelerators about 16 (`most` at most), in executions of nearly equal length:
    an epoch of 118 steps becomes 8 executions of 15, 2 steps longer, and not 8 of 16, 10 steps longer.
    """
    if devices[0].startswith("CPU"):
        return 1
    num_executions = -(-most // _STEPS_PER_EXECUTION)
    return -(-most // num_executions)


def _is_keras_3() -> bool:
    return run_folder.keras_version().startswith("3.")


def build(
    config: Config, strategy: tf.distribute.Strategy, spec: input_pipeline.DataSpec, plan: Plan
) -> tf.keras.Model:
    """Builds and compiles the model inside the strategy's scope."""
    tf.keras.mixed_precision.set_global_policy(plan.precision)
    with strategy.scope():
        model = build_network(config, spec)
        compile_model(model, config, plan)
    return model


def compile_model(model: tf.keras.Model, config: Config, plan: Plan) -> None:
    """Compiles a model for training; to be called inside the strategy's scope."""
    model.compile(
        optimizer=tf.keras.optimizers.Adam(learning_rate(config, plan)),
        # integer labels: the same loss as categorical cross-entropy of one-hot labels
        loss=tf.keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
        steps_per_execution=plan.steps_per_execution,
        jit_compile=config.jit_compile,
    )


def cache_folder(config: Config) -> pathlib.Path:
    """Returns where caches are kept."""
    return pathlib.Path(config.cache_dir) if config.cache_dir else row_cache.default_folder()


def cache_images(config: Config, examples: input_pipeline.Examples) -> input_pipeline.Examples:
    """Returns examples whose images are decoded once, where they are files and `config.cache` asks for it."""
    if config.cache == "none" or not isinstance(examples, input_pipeline.FileExamples):
        return examples
    return image_cache.cached_images(examples, where=config.cache, folder=cache_folder(config))


def use_caches(
    model: tf.keras.Model,
    config: Config,
    strategy: tf.distribute.Strategy,
    plan: Plan,
    splits: datasets.Splits,
) -> tuple[tf.keras.Model, input_pipeline.Examples, input_pipeline.Examples | None]:
    """Returns what is to be trained, and on what: the model on images, or its tail on cached features.

    A cache that cannot be written is no reason to stop: training goes on without it.
    """
    folder = cache_folder(config)
    if distribution.task_of(strategy).num_workers > 1 and config.feature_cache != "off":
        config = dataclasses.replace(config, feature_cache="off")
        if len(model.trainable_weights) < len(model.weights):
            logging.info("several workers train without a cache of features")
    used = [splits.train] if splits.validation is None else [splits.train, splits.validation]
    try:
        used = [cache_images(config, examples) for examples in used]
    except OSError as error:
        logging.warning("training goes on without a cache of images in %s: %s", folder, error)
    if config.augment:
        used[0] = input_pipeline.Mirrored(used[0])
    try:
        if wants_feature_cache(model, config, plan, used, folder):
            with strategy.scope():
                prefix, tail = models.split_after_frozen_prefix(model)
                compile_model(tail, config, plan)
            features = [feature_cache.Features(prefix, examples, folder=folder, batch=plan.batch) for examples in used]
            for examples in features[1:]:  # the training split is filled while it is trained on
                examples.fill(np.arange(len(examples)))
            model, used = tail, features
            gigabytes = sum(examples.cache.nbytes for examples in features) / 1e9
            logging.info("the frozen prefix runs once: its output, %.2f GB, is kept in %s", gigabytes, folder)
    except OSError as error:
        logging.warning("training goes on without a cache of features in %s: %s", folder, error)
    row_cache.evict(folder, limit_bytes=int(config.cache_limit_gb * 1e9))
    return model, used[0], used[1] if len(used) > 1 else None


def wants_feature_cache(model: tf.keras.Model, config: Config, plan: Plan, used: list, folder: pathlib.Path) -> bool:
    """Says whether the frozen prefix should run once: "auto" where there are epochs to save, or a cache to use."""
    has_prefix = len(model.trainable_weights) < len(model.weights)
    if config.feature_cache == "off" or not has_prefix:
        return False
    if config.feature_cache == "on" or plan.num_steps > plan.steps_per_epoch:
        return True
    prefix, _ = models.split_after_frozen_prefix(model)
    return feature_cache.exists(prefix, used[0], folder=folder)


def build_network(config: Config, spec: input_pipeline.DataSpec) -> tf.keras.Model:
    """Builds the network that `config.model` names. To add one: one function in models.py, and its call here."""
    if config.model == "convnet":
        return models.convnet(spec.image_shape, spec.num_classes)
    return models.vgg16(
        spec.image_shape,
        spec.num_classes,
        weights=config.weights,
        input_scaling=config.input_scaling,
        head=config.head,
    )


def learning_rate(config: Config, plan: Plan):
    """Returns the rate for the optimizer: a number where it is constant, else a schedule of the step."""
    warmup_steps = round(config.warmup_epochs * plan.steps_per_epoch)
    if config.lr_schedule == "constant" and not warmup_steps:
        return plan.learning_rate
    if warmup_steps >= plan.num_steps:
        raise InputError(
            f"--warmup_epochs={config.warmup_epochs} is {warmup_steps} steps, but the run has {plan.num_steps}: "
            "give fewer epochs of warm-up"
        )
    return schedules.WarmupThenDecay(
        plan.learning_rate, plan.num_steps, warmup_steps=warmup_steps, decay=config.lr_schedule
    )


def fit(
    model: tf.keras.Model,
    config: Config,
    plan: Plan,
    *,
    train: input_pipeline.Examples,
    validation: input_pipeline.Examples | None,
    workdir: pathlib.Path,
    ledger: Ledger,
) -> TimingSummary:
    """Trains the model, from the newest checkpoint in the run folder on.

    Returns:
      What it took, the processes before this one included.

    Raises:
      Stopped: by SIGINT or SIGTERM, after a checkpoint.
      RunError: the loss is no finite number.
    """
    strategy = model.distribute_strategy
    is_chief = distribution.is_chief(strategy)
    time_history = TimeHistory(
        plan.batch.global_batch_size, num_discarded_steps=config.num_discarded_steps, log_throughput=True
    )
    progress = Progress(
        workdir,
        strategy=strategy,
        time_history=time_history,
        ledger=ledger,
        num_steps=plan.num_steps,
        steps_per_epoch=plan.steps_per_epoch,
        keep_checkpoints=config.keep_checkpoints,
        checkpoint_steps=config.checkpoint_steps,
        stops_on_nan=config.on_nan == "stop",
    )
    with strategy.scope():
        checkpoint = progress.restore(model)
    validation_arguments = {}
    if validation is not None:
        size = plan.batch.for_evaluation(len(validation))
        validation_arguments["validation_data"] = deal_out(
            strategy, functools.partial(input_pipeline.make_evaluation_dataset, validation, global_batch_size=size)
        )
        if distribution.task_of(strategy).num_workers > 1:  # whose datasets do not tell their length
            validation_arguments["validation_steps"] = -(-len(validation) // size)
    callbacks = [time_history, *(profile_callbacks(config, plan, workdir) if is_chief else []), progress]
    if config.tensorboard and is_chief:
        callbacks[1:1] = tensorboard_log.callbacks(workdir / "tensorboard", time_history)
    with time_history, progress:
        for first_step, arguments in progress.remaining_fits(plan.epochs):
            order = {
                "global_batch_size": plan.batch.global_batch_size,
                "seed": config.seed,
                "num_steps": plan.epochs * plan.steps_per_epoch,
                "start_step": first_step,
            }
            filling = fill_ahead(train, plan, order, seconds=progress.seconds)
            restoring = restore_metrics(train, plan, order, checkpoint, strategy)
            with filling or contextlib.nullcontext():
                model.fit(
                    deal_out(strategy, functools.partial(input_pipeline.make_training_dataset, train, **order)),
                    **arguments,
                    **validation_arguments,
                    callbacks=[*filter(None, (filling, restoring)), *callbacks],
                    shuffle=False,  # the dataset is shuffled already; Keras 3 would warn
                    verbose=(1 if sys.stdout.isatty() else 2) if is_chief else 0,  # no terminal: one line an epoch
                )
    ledger.lap_fit(time_history.summary(), progress.seconds)
    return time_history.summary()


def deal_out(strategy: tf.distribute.Strategy, make_dataset: Callable[..., tf.data.Dataset]):
    """Returns the dataset for a strategy: of several workers each reads only its share.

    Args:
      strategy: that trains.
      make_dataset: makes it, of the argument `share` where there are several workers; see `input_pipeline.Share`.
    """
    if distribution.task_of(strategy).num_workers == 1:
        return make_dataset()

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        num_own = context.num_replicas_in_sync // context.num_input_pipelines
        share = input_pipeline.Share(context.input_pipeline_id * num_own, num_own, context.num_replicas_in_sync)
        return make_dataset(share=share)

    return strategy.distribute_datasets_from_function(make)


def fill_ahead(
    train: input_pipeline.Examples, plan: Plan, order: dict[str, int], *, seconds: dict[str, float]
) -> feature_cache.FillAhead | None:
    """Returns what computes the features that the steps of a `fit` read, where it trains on features."""
    if not isinstance(train, feature_cache.Features):
        return None
    num_steps = plan.num_steps - order["start_step"]
    indices = input_pipeline.training_indices(train, **order).take(num_steps)
    steps = np.stack(list(indices.as_numpy_iterator()))  # [num_steps, B]
    return feature_cache.FillAhead(train, steps, steps_per_execution=plan.steps_per_execution, seconds=seconds)


def restore_metrics(
    train: input_pipeline.Examples,
    plan: Plan,
    order: dict[str, int],
    checkpoint: checkpoints.Checkpoint | None,
    strategy: tf.distribute.Strategy,
) -> checkpoints.RestoreMetrics | None:
    """Returns what gives the metrics their state in a `fit` that goes on inside an epoch."""
    if order["start_step"] % plan.steps_per_epoch == 0:
        return None
    order = {**order, "num_steps": order["start_step"] + 1}
    one_batch = deal_out(strategy, functools.partial(input_pipeline.make_training_dataset, train, **order))
    return checkpoints.RestoreMetrics(checkpoint, one_batch)


def profile_callbacks(config: Config, plan: Plan, workdir: pathlib.Path) -> list[tf.keras.callbacks.Callback]:
    """Returns the callback that --profile asks for."""
    if not config.profile:
        return []
    first = -(-config.num_discarded_steps // plan.steps_per_execution)
    return [Profile(workdir / "profile", range(first, first + -(-config.profile // plan.steps_per_execution)))]


def final_lines(plan: Plan, timing: TimingSummary, report: dict, splits: datasets.Splits, workdir: pathlib.Path) -> str:
    """Returns what the run ends with, as the tutorial did: total time, throughput, test loss and accuracy."""
    on = f"with {plan.batch.num_replicas} device{'s' if plan.batch.num_replicas > 1 else ''}"
    if timing.step_seconds:
        speed = (
            f"{timing.images_per_second:,.0f} images/second {on} "
            f"(step p50 {1000 * timing.step_seconds['p50']:.1f} ms, p99 {1000 * timing.step_seconds['p99']:.1f} ms; "
            f"{timing.num_steps - timing.num_discarded_steps} timed steps)"
        )
    else:
        speed = f"no step was timed {on}: all {timing.num_steps} were discarded"
    return "\n".join(
        [
            f"total time {timing.total_seconds:.1f} s {on} for {timing.num_steps} steps",
            speed,
            evaluation.in_words(report),
            f"data: {splits.source}",
            f"run folder: {workdir}",
        ]
    )
