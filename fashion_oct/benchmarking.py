"""Measures throughput against the number of replicas, with two control runs that say what limits it."""

import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from fashion_oct import (
    building,
    caching,
    datasets,
    distribution,
    feature_cache,
    files,
    input_pipeline,
    models,
    planning,
    reports,
    training,
)
from fashion_oct.errors import InputError, RunError, reason_of_failure
from fashion_oct.options import Config
from fashion_oct.timing import TimeHistory

INPUT_BOUND_BELOW = 0.97  # share of the resident batch's throughput that a pipeline should reach
FAST_PIPELINE = 4.0  # times the model: a pipeline that is as fast keeps nothing waiting
ARTICLE = 0  # the number of replicas that stands for the tutorial's whole loop
POINT_MARK = "benchmark point: "  # what the line starts with that a point's process answers with


def point_config(config: Config, num_replicas: int, *, is_strong: bool) -> Config:
    """Returns the settings of one point: GPUs where there are any, else logical CPU devices.

    Weak scaling keeps the per-replica batch; strong scaling keeps the global batch, that of one replica.
    """
    has_gpus = distribution.num_visible_gpus() > 0
    return dataclasses.replace(
        config,
        num_gpus=num_replicas if has_gpus else None,
        virtual_devices=None if has_gpus else num_replicas,
        per_replica_batch_size=None if is_strong else config.per_replica_batch_size,
        global_batch_size=(config.global_batch_size or config.per_replica_batch_size) if is_strong else None,
    )


def measure_point(config: Config, *, num_steps: int, num_repeats: int, has_article: bool) -> dict:
    """Measures one number of replicas, in this process.

    Every repeat times `num_steps` steps of each kind, so that a machine that slows down slows all alike, and in a new
    order, since a kind is faster after one that let the cores rest:
      real       `fit` on the training pipeline; where the feature cache is used, of the tail on cached features
      resident   `fit` on one batch, repeated: the model alone
      pipeline   the training pipeline read without a model
      prefix, matmul    the frozen prefix and a large matrix product in its precision, in FLOP/s, each at its fastest
      article_pipeline, article    the tutorial's own pipeline and loop, where asked for; of VGG16 few steps

    Returns:
      num_replicas, batch sizes, steps_per_epoch, and for each kind the rates of the repeats, in images/second where
      nothing else is said; for "real" also the step-time percentiles of the median repeat.
    """
    strategy, splits, plan = _prepare(config)
    kinds = _kinds_of_ours(config, strategy, plan, splits, num_steps)
    if has_article:
        kinds |= _kinds_of_article(config, strategy, splits, plan.batch.global_batch_size, num_steps)
    results = _measure_in_turn(kinds, num_repeats)
    median_repeat = sorted(results["real"], key=lambda summary: summary["images_per_second"])[num_repeats // 2]
    return {
        **dataclasses.asdict(plan.batch),
        "devices": plan.devices,
        "precision": plan.precision,
        "steps_per_epoch": plan.steps_per_epoch,
        "rates_of_repeats": {
            kind: [result["images_per_second"] if isinstance(result, dict) else result for result in values]
            for kind, values in results.items()
        },
        "step_seconds": median_repeat["step_seconds"],
    }


def _measure_in_turn(kinds: dict[str, Callable], num_repeats: int) -> dict[str, list]:
    for measure in kinds.values():
        measure()  # traces, fills caches; not counted
    results: dict[str, list] = {kind: [] for kind in kinds}
    for repeat in range(num_repeats):
        for kind in random.Random(repeat).sample(list(kinds), len(kinds)):
            results[kind].append(kinds[kind]())
    return results


def _prepare(config: Config) -> tuple[tf.distribute.Strategy, datasets.Splits, planning.Plan]:
    tf.keras.utils.set_random_seed(config.seed)
    strategy = distribution.make_strategy(config.num_gpus, config.virtual_devices)
    splits = training.load_splits(config)
    return strategy, splits, planning.make_plan(config, strategy, num_train=len(splits.train))


def _kinds_of_ours(config, strategy, plan: planning.Plan, splits: datasets.Splits, num_steps: int) -> dict:
    model = building.build(config, strategy, splits.spec, plan)
    trained, train, _ = caching.use_caches(model, config, strategy, plan, splits)
    size = plan.batch.global_batch_size
    order = {"global_batch_size": size, "seed": config.seed, "num_steps": num_steps}
    real = input_pipeline.make_training_dataset(train, **order)
    kinds: dict[str, Callable[[], dict | float]] = {}
    if isinstance(train, feature_cache.Features):
        train.fill(np.unique(list(input_pipeline.training_indices(train, **order).as_numpy_iterator())))
        images = input_pipeline.make_evaluation_dataset(splits.train, global_batch_size=size).repeat()
        flops, dtype = models.forward_flops(train.prefix), train.prefix.compute_dtype
        kinds["prefix"] = lambda: flops * _time_prefix(strategy, train, images, size, _few(num_steps))
        kinds["matmul"] = lambda: plan.batch.num_replicas * _time_matmul(dtype)
    resident = tf.data.Dataset.from_tensors(next(iter(real))).repeat()
    return kinds | {
        "real": lambda: _time_fit(trained, real, size, num_steps),
        "resident": lambda: _time_fit(trained, resident, size, num_steps),
        "pipeline": lambda: _time_pipeline(strategy, real, size, num_steps - 1),
    }


def _kinds_of_article(config, strategy, splits: datasets.Splits, size: int, num_steps: int) -> dict:
    batches, model = _article_batches(splits, size), _article_model(config, splits, strategy)
    loop_steps = num_steps if config.model == "convnet" else _few(num_steps)
    return {
        "article_pipeline": lambda: _time_pipeline(strategy, batches, size, num_steps),
        "article": lambda: _time_fit(model, batches, size, loop_steps),
    }


def _few(num_steps: int) -> int:
    return max(3, num_steps // 20)  # of VGG16 on images, a step of which takes seconds on a CPU


def run_article(config: Config) -> None:
    """Trains as the tutorial did, for `config.epochs`: its pipeline, its loop, float32; evaluates nothing."""
    strategy, splits, plan = _prepare(config)
    batches = _article_batches(splits, plan.batch.global_batch_size)
    model = _article_model(config, splits, strategy)
    model.fit(batches, epochs=config.epochs, steps_per_epoch=plan.steps_per_epoch, verbose=2, shuffle=False)


def compare_whole_runs(config: Config, folder: pathlib.Path) -> str:
    """Times whole processes: `train` from an empty cache, again from the full one, and the tutorial's loop.

    Args:
      config: of the runs.
      folder: gets the run folders, whole_runs.json, and meanwhile the cache.

    Raises:
      RunError: one of them failed.
    """
    flags = dataclasses.replace(config, workdir=None, cache_dir=str(folder / "cache")).to_flags().splitlines()
    python = [sys.executable, "-m"]
    commands = {
        "ours, empty cache": [*python, "fashion_oct.train", *flags, f"--workdir={folder / 'empty_cache'}"],
        "ours, full cache": [*python, "fashion_oct.train", *flags, f"--workdir={folder / 'full_cache'}"],
        "the tutorial's loop": [*python, "fashion_oct.benchmark", *flags, f"--point={ARTICLE}"],
    }
    seconds = {}
    for name, command in commands.items():
        print(f"running {name} ...", flush=True)
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"{name} failed: {reason_of_failure(done)}")
        seconds[name] = time.perf_counter() - begin
    shutil.rmtree(folder / "cache", ignore_errors=True)
    files.write_json(folder / "whole_runs.json", {"epochs": config.epochs, "seconds": seconds})
    slowest = seconds["the tutorial's loop"]
    lines = [f"{name:20} {value:8.1f} s  {slowest / value:5.2f} times as fast" for name, value in seconds.items()]
    return "\n".join([f"whole processes, {config.epochs} epochs:", *lines, f"written: {folder / 'whole_runs.json'}"])


def _time_fit(model: tf.keras.Model, batches: tf.data.Dataset, size: int, num_steps: int) -> dict:
    history = TimeHistory(size, num_discarded_steps=max(2, num_steps // 10))
    model.fit(batches, epochs=1, steps_per_epoch=num_steps, callbacks=[history], verbose=0, shuffle=False)
    return dataclasses.asdict(history.summary())


def _time_pipeline(strategy: tf.distribute.Strategy, batches: tf.data.Dataset, size: int, num_steps: int) -> dict:
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    next(iterator)
    start = time.perf_counter()
    for _ in range(num_steps):
        next(iterator)
    return {"images_per_second": num_steps * size / (time.perf_counter() - start)}


def _article_batches(splits: datasets.Splits, size: int) -> tf.data.Dataset:
    """Returns the tutorial's input function in current tf.data: float32 images and one-hot labels, made on the host."""
    labels = tf.keras.utils.to_categorical(splits.train.labels, splits.spec.num_classes)
    if isinstance(splits.train, input_pipeline.FileExamples):
        if not os.path.exists(splits.train.paths[0]):
            raise InputError(
                f"the tutorial's pipeline reads JPEG files, and {splits.source} holds records: give the folder of files"
            )
        height, width, _ = splits.train.image_shape

        def load(path, label):
            image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
            return tf.image.resize(tf.image.convert_image_dtype(image, tf.float32), [height, width]), label

        batches = tf.data.Dataset.from_tensor_slices((splits.train.paths, labels)).shuffle(len(labels)).repeat()
        return batches.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(size).prefetch(tf.data.AUTOTUNE)
    assert isinstance(splits.train, input_pipeline.ArrayExamples)
    images = splits.train.images.astype(np.float32) / 255
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images)).repeat()
    return batches.batch(size).prefetch(tf.data.AUTOTUNE)


def _time_prefix(strategy, features: feature_cache.Features, images, size: int, num_batches: int) -> float:
    """Returns images a second of the fastest of some batches, as when a cache is filled."""
    batches = iter(strategy.experimental_distribute_dataset(images.map(lambda images, labels: images)))
    features.run_prefix(next(batches))
    return size / min(timeit.repeat(lambda: features.run_prefix(next(batches)), number=1, repeat=num_batches))


def _time_matmul(dtype: str, sizes: Sequence[int] = (1024, 2048, 3072), num_products: int = 5) -> float:
    """Returns the FLOP/s of the fastest of some large square matrix products: what the device can do at best."""
    rates = []
    for size in sizes:
        left, right = (tf.cast(tf.random.stateless_normal([size, size], [1, i]), dtype) for i in (2, 3))

        @tf.function
        def multiply(left=left, right=right):
            return tf.linalg.matmul(left, right, transpose_b=True)[0, 0]

        multiply().numpy()
        seconds = timeit.repeat(lambda multiply=multiply: multiply().numpy(), number=1, repeat=num_products)
        rates.append(2 * size**3 / min(seconds))
    return max(rates)


def _article_model(config: Config, splits: datasets.Splits, strategy: tf.distribute.Strategy) -> tf.keras.Model:
    """Returns the tutorial's network in current Keras: float32, and no preprocessing inside."""
    policy = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy("float32")
    with strategy.scope():
        model = _article_vgg16(config, splits) if config.model == "vgg16" else _article_convnet(splits)
        model.compile(tf.keras.optimizers.Adam(1e-3), "categorical_crossentropy", metrics=["accuracy"])
    tf.keras.mixed_precision.set_global_policy(policy)
    return model


def _article_vgg16(config: Config, splits: datasets.Splits) -> tf.keras.Model:
    layers = tf.keras.layers
    weights = None if config.weights == "none" else config.weights
    base = tf.keras.applications.VGG16(
        include_top=False, weights=weights, input_shape=(*splits.spec.image_shape[:2], 3)
    )
    for layer in base.layers[:-4]:
        layer.trainable = False
    x = layers.Flatten()(base.output)
    return tf.keras.Model(base.input, layers.Dense(splits.spec.num_classes, activation="softmax")(x))


def _article_convnet(splits: datasets.Splits) -> tf.keras.Model:
    layers = tf.keras.layers
    num_channels = 3 if isinstance(splits.train, input_pipeline.FileExamples) else splits.spec.image_shape[2]
    return tf.keras.Sequential(
        [
            layers.Input((*splits.spec.image_shape[:2], num_channels)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(splits.spec.num_classes, activation="softmax"),
        ]
    )


def run_points(commands: dict[int, list[str]]) -> tuple[list[dict], dict[int, str]]:
    """Measures each number of replicas in a fresh process: devices are fixed once TensorFlow has started.

    Args:
      commands: the command line of each number of replicas.

    Returns:
      The points that could be measured, and the reason of each that could not.
    """
    points, failures = [], {}
    for num_replicas, command in commands.items():
        print(f"measuring {num_replicas} replica{'s' if num_replicas > 1 else ''} ...", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answers = [line for line in done.stdout.splitlines() if line.startswith(POINT_MARK)]
        if done.returncode or not answers:
            failures[num_replicas] = reason_of_failure(done)
            print(f"{num_replicas} replicas failed: {failures[num_replicas]}", file=sys.stderr)
        else:
            points.append(json.loads(answers[-1].removeprefix(POINT_MARK)))
    return points, failures


def summarise(points: list[dict]) -> list[dict]:
    """Returns for each point medians, a 95% interval over the repeats, speed-up S(n), efficiency E(n), control runs."""
    rows: list[dict] = []
    for point in points:
        rates = point["rates_of_repeats"]
        medians = {kind: float(np.median(values)) for kind, values in rates.items()}
        if not rows:  # S(n) is against one replica, or what the smallest point says of one
            of_one = medians["real"] / point["num_replicas"]
        speed_up = medians["real"] / of_one
        rows.append(
            {
                "num_replicas": point["num_replicas"],
                "per_replica_batch_size": point["per_replica_batch_size"],
                "global_batch_size": point["global_batch_size"],
                "precision": point["precision"],
                "shares_cores": len(point["devices"]) > 1 and point["devices"][0].startswith("CPU"),
                "images_per_second": medians["real"],
                "images_per_second_ci95": reports.median_interval(rates["real"]),
                "speed_up": speed_up,
                "efficiency": speed_up / point["num_replicas"],
                "epoch_seconds": point["steps_per_epoch"] * point["global_batch_size"] / medians["real"],
                # ratios of the same repeat: what slows the machine for a while slows both
                "of_resident": _median_ratio(rates["real"], rates["resident"]),
                "pipeline_images_per_second": medians["pipeline"],
                "resident_images_per_second": medians["resident"],
                "pipeline_of_article": _median_ratio(rates["pipeline"], rates.get("article_pipeline")),
                "of_article": _median_ratio(rates["real"], rates.get("article")),
                # 28 GFLOP an image for VGG16 of 224 x 224
                "prefix_flops_per_second": medians.get("prefix"),
                "prefix_of_matmul": _median_ratio(rates.get("prefix"), rates.get("matmul")),
                "step_seconds": point["step_seconds"],
            }
        )
    return rows


def _median_ratio(values: list[float] | None, others: list[float] | None) -> float | None:
    return float(np.median(np.divide(values, others))) if values and others else None


def verdict(row: dict) -> str:
    """Says in plain words what limits a point, by how much, and what to change."""
    share = row["of_resident"]
    spare = row["pipeline_images_per_second"] / row["resident_images_per_second"]
    where = f"{row['num_replicas']} replica{'s' if row['num_replicas'] > 1 else ''}"
    if share < INPUT_BOUND_BELOW and spare > FAST_PIPELINE:
        return (
            f"{where}: unclear, training reaches {share:.1%} of what the model alone does, though the pipeline alone "
            f"is {spare:.1f} times the model. The machine was busy, it seems: measure again, with more --repeats"
        )
    if share < INPUT_BOUND_BELOW:
        return (
            f"{where}: input-bound, training reaches {share:.1%} of what the model alone does (the pipeline alone: "
            f"{spare:.1f} times the model). Try --cache=disk, prepare --shards, --data_service or a larger batch"
        )
    advice = [] if row["precision"] != "float32" else ["--precision=mixed_bfloat16 where the device is fast at it"]
    if row["shares_cores"]:
        advice.append(
            "real devices: virtual ones share this machine's cores, so that a speed-up of 1 is all they can give"
        )
    else:
        advice.append("more devices")
    return (
        f"{where}: compute-bound, training reaches {share:.1%} of what the model alone does (the pipeline alone: "
        f"{spare:.1f} times the model). Try {' or '.join(advice)}"
    )


def report(folder: pathlib.Path, points: list[dict], failures: dict[int, str]) -> str:
    """Writes scaling.json, scaling.csv and scaling.png, and returns the table and the verdicts in words."""
    rows = summarise(points)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "scaling.json", {"points": rows, "measured": points, "failed": failures})
    if not rows:
        return f"no number of replicas could be measured; the reasons are in {folder / 'scaling.json'}"
    reports.write_csv(folder / "scaling.csv", [{k: v for k, v in row.items() if k != "step_seconds"} for row in rows])
    if reports.has_matplotlib():
        reports.plot_scaling(folder / "scaling.png", rows)
    lines = ["replicas  global batch  precision       images/s  (95% interval)     speed-up  efficiency"]
    for row in rows:
        low, high = row["images_per_second_ci95"]
        lines.append(
            f"{row['num_replicas']:8}  {row['global_batch_size']:12}  {row['precision']:14}  "
            f"{row['images_per_second']:8,.0f}  {f'({low:,.0f} to {high:,.0f})':17}  {row['speed_up']:8.2f}  "
            f"{row['efficiency']:10.1%}"
        )
        for kind, name in (("of_article", "training"), ("pipeline_of_article", "the pipeline alone")):
            if row[kind] is not None:
                lines.append(f"          {name}: {row[kind]:.2f} times the tutorial's own in the same run")
        if row["prefix_of_matmul"] is not None:
            lines.append(
                f"          the frozen prefix: {row['prefix_flops_per_second'] / 1e9:,.0f} GFLOP/s, "
                f"{row['prefix_of_matmul']:.0%} of a large matrix product in the same run"
            )
    return "\n".join([*lines, *(verdict(row) for row in rows), f"written: {folder}"])
