"""One training run: strategy, data, model in scope, `fit`, test report, run folder."""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from fashion_oct import (
    building,
    caching,
    checkpoints,
    cluster,
    data_service,
    datasets,
    distribution,
    evaluation,
    feature_cache,
    files,
    input_pipeline,
    legacy_keras,
    planning,
    reports,
    run_folder,
    tensorboard_log,
)
from fashion_oct.errors import InputError
from fashion_oct.ledger import Ledger
from fashion_oct.options import Config
from fashion_oct.planning import Plan
from fashion_oct.progress import EpochLines, Profile, Progress, Stopped
from fashion_oct.timing import TimeHistory, TimingSummary


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
    if config.data_service:
        data_service.check_is_there(config.data_service)
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
    plan = planning.make_plan(config, strategy, num_train=len(splits.train))
    refuse_different_workers(strategy, config, plan)
    if is_chief:
        print(plan.sentence(), flush=True)
    model = building.build(config, strategy, splits.spec, plan)
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
            model = legacy_keras.on_one_device(model)
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


def refuse_different_workers(strategy: tf.distribute.Strategy, config: Config, plan: Plan) -> None:
    """Raises InputError where the workers would not train the same."""
    settings = f"{run_folder.lasting_settings(config)} {plan}"
    if len(set(distribution.gather(strategy, hashlib.sha256(settings.encode()).digest()))) > 1:
        raise InputError("the workers were given different settings or data: give all of them the same flags")


def train_with_caches(
    model: tf.keras.Model,
    config: Config,
    strategy: tf.distribute.Strategy,
    plan: Plan,
    splits: datasets.Splits,
    *,
    workdir: pathlib.Path,
    ledger: Ledger,
) -> TimingSummary:
    """Trains the model, or its tail on cached features; see `fit`."""
    with input_pipeline.naming_bad_files(splits.train, splits.validation):
        trained, train, validation = caching.use_caches(model, config, strategy, plan, splits)
        ledger.lap("caches")
        return fit(trained, config, plan, train=train, validation=validation, workdir=workdir, ledger=ledger)


def save_and_evaluate(
    model: tf.keras.Model,
    plan: Plan,
    splits: datasets.Splits,
    *,
    workdir: pathlib.Path,
    ledger: Ledger,
    as_keras_3: bool = False,
) -> dict:
    """Writes model.keras, of tf-keras where asked for in the format of Keras 3, and the test report; returns it."""
    if as_keras_3:
        legacy_keras.save_as_keras_3(model, workdir)
    else:
        run_folder.save_model(model, workdir / "model.keras")
    ledger.lap("saving")
    global_batch_size = plan.batch.per_replica_batch_size * model.distribute_strategy.num_replicas_in_sync
    with input_pipeline.naming_bad_files(splits.test):
        report = evaluation.evaluate(model, splits, workdir=workdir, global_batch_size=global_batch_size)
    ledger.lap("evaluation")
    return report


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
    is_interactive = sys.stdout.isatty()
    callbacks = [time_history]
    if is_chief:
        if config.tensorboard:
            callbacks += tensorboard_log.callbacks(workdir / "tensorboard", time_history)
        callbacks += profile_callbacks(config, plan, workdir)
        if not is_interactive:
            callbacks.append(EpochLines(progress))
    callbacks.append(progress)
    with time_history, progress:
        for first_step, arguments in progress.remaining_fits(plan.epochs):
            order: dict[str, Any] = {
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
                    verbose=1 if is_chief and is_interactive else 0,
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
    train: input_pipeline.Examples, plan: Plan, order: dict[str, Any], *, seconds: dict[str, float]
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
    order: dict[str, Any],
    checkpoint: checkpoints.Checkpoint | None,
    strategy: tf.distribute.Strategy,
) -> checkpoints.RestoreMetrics | None:
    """Returns what gives the metrics their state in a `fit` that goes on inside an epoch."""
    if checkpoint is None or order["start_step"] % plan.steps_per_epoch == 0:
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
