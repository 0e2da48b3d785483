"""One training run: strategy, data, model in scope, `fit`, test report, run folder."""

import contextlib
import dataclasses
import os
import pathlib
import platform
import sys
import time

import numpy as np
import tensorflow as tf
from absl import logging

import fashion_oct
from fashion_oct import (
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
    schedules,
)
from fashion_oct.errors import InputError
from fashion_oct.options import Config
from fashion_oct.timing import TimeHistory, TimingSummary


def run(config: Config) -> int:
    """Trains, evaluates on the test split, writes the run folder, and prints the final lines.

    Returns:
      The exit status: 0, or 130 after Ctrl-C.

    Raises:
      InputError: a setting that does not fit the data, the devices or the workdir, and nothing has been written then;
        or an image that does not decode, which no header tells: the run folder then ends with the step before it.
    """
    ledger = Ledger()
    workdir = choose_workdir(config)
    if config.deterministic:
        distribution.enable_determinism()
    tf.keras.utils.set_random_seed(config.seed)
    strategy = distribution.make_strategy(config.num_gpus, config.virtual_devices)
    ledger.lap("start-up")
    splits = load_splits(config)
    ledger.lap("data preparation")
    plan = make_plan(config, strategy, num_train=len(splits.train))
    print(plan.sentence(), flush=True)
    model = build(config, strategy, splits.spec, plan)
    workdir.mkdir(parents=True, exist_ok=True)
    write_settings(workdir, config, plan, splits)
    ledger.lap("model")
    with input_pipeline.naming_bad_files(splits.train, splits.validation):
        trained, train, validation = use_caches(model, config, strategy, plan, splits)
        ledger.lap("caches")
        time_history, is_finished = fit(trained, config, plan, train=train, validation=validation, workdir=workdir)
    timing = time_history.summary()
    ledger.lap_fit(timing)
    save_model(model, workdir / "model.keras")
    ledger.lap("saving")
    if is_finished:
        with input_pipeline.naming_bad_files(splits.test):
            report = evaluation.evaluate(model, splits, workdir=workdir, global_batch_size=plan.batch.global_batch_size)
        ledger.lap("evaluation")
    files.write_json(workdir / "timing.json", dataclasses.asdict(timing) | {"ledger_seconds": ledger.seconds})
    print(reports.format_ledger(ledger.seconds, sum(ledger.seconds.values())), flush=True)
    if is_finished:
        print(final_lines(plan, timing, report, splits, workdir))
        return 0
    print(
        f"interrupted after {timing.num_steps} of {plan.num_steps} steps; the weights of that moment are in "
        f"{workdir / 'model.keras'}",
        file=sys.stderr,
    )
    return 130


class Ledger:
    """Where the wall time of the process goes: every second since its start is in exactly one entry.

    Attributes:
      seconds: by name, in the order of the run.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - _seconds_since_process_start()

    def lap(self, name: str) -> None:
        """Books the time since the last lap under `name`."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now

    def lap_fit(self, timing: TimingSummary) -> None:
        """Books the time since the last lap as that of `fit`, by the callback's figures."""
        self.lap("fit, other")
        # the first execution does a step, too: what it takes beyond a usual one is tracing
        usual = timing.step_seconds["p50"] if timing.step_seconds else 0.0
        tracing = max((timing.first_step_seconds or 0.0) - usual, 0.0)
        parts = {"tracing": tracing, "steps": timing.total_seconds - tracing, "validation": timing.validation_seconds}
        rest = self.seconds.pop("fit, other") - sum(parts.values())
        self.seconds |= parts | {"fit, other": rest}


def _seconds_since_process_start() -> float:
    """Returns the age of this process; where the system does not tell (only Linux does), 0."""
    try:
        ticks = float(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22: starttime
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return 0.0


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
    # an epoch is a whole number of executions: Keras 3 would run the last one in full, Keras 2 would shorten it
    steps_per_epoch = -(-steps_per_epoch // config.steps_per_execution) * config.steps_per_execution
    num_steps = min(config.epochs * steps_per_epoch, config.steps or sys.maxsize)
    if config.steps_per_execution > num_steps:
        raise InputError(
            f"--steps_per_execution={config.steps_per_execution} is more than the run's {num_steps} steps: lower it"
        )
    devices = distribution.device_names(strategy)
    if config.steps_per_execution > 1 and devices[1:] and devices[0].startswith("CPU") and _is_keras_3():
        raise InputError(
            f"--steps_per_execution={config.steps_per_execution} on {len(devices)} virtual devices: TensorFlow's graph "
            "optimiser fails on it with Keras 3; give --steps_per_execution=1, or GPUs"
        )
    precision, reason = distribution.choose_precision(config.precision, strategy)
    return Plan(
        devices=devices,
        batch=batch,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        epochs=-(-num_steps // steps_per_epoch),
        precision=precision,
        precision_reason=reason,
    )


def _is_keras_3() -> bool:
    return tf.keras.__version__.startswith("3.")


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
        steps_per_execution=config.steps_per_execution,
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
            used = [
                feature_cache.cached_features(prefix, examples, folder=folder, batch=plan.batch) for examples in used
            ]
            model = tail
            gigabytes = sum(examples.rows.nbytes for examples in used) / 1e9
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
    num_versions = getattr(used[0], "num_versions", 1)  # of each image: so many epochs does the filling cost
    if config.feature_cache == "on" or plan.num_steps > num_versions * plan.steps_per_epoch:
        return True
    prefix, _ = models.split_after_frozen_prefix(model)
    return all(feature_cache.is_complete(prefix, examples, folder=folder) for examples in used)


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
        return config.learning_rate
    if warmup_steps >= plan.num_steps:
        raise InputError(
            f"--warmup_epochs={config.warmup_epochs} is {warmup_steps} steps, but the run has {plan.num_steps}: "
            "give fewer epochs of warm-up"
        )
    return schedules.WarmupThenDecay(
        config.learning_rate, plan.num_steps, warmup_steps=warmup_steps, decay=config.lr_schedule
    )


def fit(
    model: tf.keras.Model,
    config: Config,
    plan: Plan,
    *,
    train: input_pipeline.Examples,
    validation: input_pipeline.Examples | None,
    workdir: pathlib.Path,
) -> tuple[TimeHistory, bool]:
    """Trains the model; Ctrl-C stops it.

    Returns:
      The callback that timed it, and whether all steps were done.
    """
    batch_size = plan.batch.global_batch_size
    batches = input_pipeline.make_training_dataset(
        train,
        global_batch_size=batch_size,
        seed=config.seed,
        num_steps=plan.epochs * plan.steps_per_epoch,
    )
    validation_batches = None
    if validation is not None:
        validation_batches = input_pipeline.make_evaluation_dataset(
            validation, global_batch_size=plan.batch.for_evaluation(len(validation))
        )
    time_history = TimeHistory(batch_size, num_discarded_steps=config.num_discarded_steps, log_throughput=True)
    callbacks = [time_history, StopAtStep(plan.num_steps), HistoryFile(workdir / "history.csv")]
    with time_history, contextlib.suppress(KeyboardInterrupt):
        model.fit(
            batches,
            epochs=plan.epochs,
            steps_per_epoch=plan.steps_per_epoch,
            validation_data=validation_batches,
            callbacks=callbacks,
            shuffle=False,  # the dataset is shuffled already; Keras 3 would warn
            verbose=1 if sys.stdout.isatty() else 2,  # no terminal: one line an epoch
        )
    return time_history, time_history.summary().num_steps >= plan.num_steps


class StopAtStep(tf.keras.callbacks.Callback):
    """Ends `fit` after the execution that reaches `num_steps`."""

    def __init__(self, num_steps: int):
        super().__init__()
        self._num_steps = num_steps
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        # an epoch is a whole number of executions, so that the batch numbers are right on Keras 2 and 3
        if self._epoch * self.params["steps"] + batch + 1 >= self._num_steps:
            self.model.stop_training = True


class HistoryFile(tf.keras.callbacks.Callback):
    """Writes a CSV row an epoch, the whole file anew and atomically, unlike Keras' CSVLogger."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._path = path
        self._rows = []

    def on_epoch_end(self, epoch, logs=None):
        rate = float(self.model.optimizer.learning_rate.numpy())  # float() does not take a mirrored variable
        self._rows.append({"epoch": epoch + 1, "learning_rate": rate, **(logs or {})})
        reports.write_csv(self._path, self._rows)


def choose_workdir(config: Config) -> pathlib.Path:
    """Returns the run folder to write; makes nothing yet.

    Raises:
      InputError: it is a file, belongs to another run, or cannot be written.
    """
    name = f"{config.dataset}_{config.model}_{time.strftime('%Y%m%d-%H%M%S')}"
    workdir = pathlib.Path(config.workdir) if config.workdir else pathlib.Path("runs") / name
    if workdir.exists() and not workdir.is_dir():
        raise InputError(f"--workdir={workdir} is a file: give a new or an empty folder")
    if workdir.is_dir() and any(workdir.iterdir()):
        raise InputError(
            f"--workdir={workdir} is not empty, it may belong to another run: give a new or an empty folder"
        )
    parent = next(folder for folder in (workdir, *workdir.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"--workdir={workdir} cannot be made, {parent} is not a writable folder: give another place")
    return workdir


def write_settings(workdir: pathlib.Path, config: Config, plan: Plan, splits: datasets.Splits) -> None:
    """Writes config.json (every resolved setting, versions, devices, data) and flags.txt (repeats the run)."""
    settings = {
        "config": dataclasses.asdict(config),
        "plan": dataclasses.asdict(plan),
        "dataset": splits.describe(),
        "versions": {
            "fashion_oct": fashion_oct.__version__,
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": tf.keras.__version__,
            "numpy": np.__version__,
        },
        "host": {"machine": platform.machine(), "num_cpus": os.cpu_count()},
    }
    files.write_json(workdir / "config.json", settings)
    with files.replacing(workdir / "flags.txt") as stream:
        stream.write(f"# repeats this run: python -m fashion_oct.train --flagfile=flags.txt\n{config.to_flags()}")


def save_model(model: tf.keras.Model, path: pathlib.Path) -> None:
    """Saves the whole model in Keras' format, atomically."""
    temporary = path.with_name(f".{path.stem}.tmp.keras")  # Keras wants the suffix
    try:
        model.save(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
