"""What is trained, and on what: the model on images, decoded once or not, or its tail on cached features."""

import pathlib

import numpy as np
import tensorflow as tf
from absl import logging

from fashion_oct import (
    building,
    data_service,
    datasets,
    distribution,
    feature_cache,
    image_cache,
    input_pipeline,
    models,
    row_cache,
)
from fashion_oct.options import Config
from fashion_oct.planning import Plan


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
    if config.data_service:
        used[0] = data_service.Served(used[0], config.data_service)
    try:
        if may_cache_features(model, config, strategy):
            model, used = cache_features(model, config, strategy, plan, used)
    except OSError as error:
        logging.warning("training goes on without a cache of features in %s: %s", folder, error)
    row_cache.evict(folder, limit_bytes=int(config.cache_limit_gb * 1e9))
    return model, used[0], used[1] if len(used) > 1 else None


def may_cache_features(model: tf.keras.Model, config: Config, strategy: tf.distribute.Strategy) -> bool:
    """Says whether there is a frozen prefix, and one worker, who may keep its output."""
    if config.feature_cache == "off" or len(model.trainable_weights) == len(model.weights):
        return False
    if distribution.task_of(strategy).num_workers > 1:
        logging.info("several workers train without a cache of features")
        return False
    return True


def cache_features(
    model: tf.keras.Model,
    config: Config,
    strategy: tf.distribute.Strategy,
    plan: Plan,
    used: list[input_pipeline.Examples],
) -> tuple[tf.keras.Model, list[input_pipeline.Examples]]:
    """Returns the tail of the model and the features of the examples; "auto": if there are epochs, or a cache, to use.

    The features of validation images are there already; those of training images come while they are trained on.

    Raises:
      OSError: the cache cannot be written.
    """
    folder = cache_folder(config)
    with strategy.scope():
        prefix, tail = models.split_after_frozen_prefix(model)
        pays = plan.num_steps > plan.steps_per_epoch or feature_cache.exists(prefix, used[0], folder=folder)
        if config.feature_cache == "auto" and not pays:
            return model, used
        building.compile_model(tail, config, plan)
    features = [feature_cache.Features(prefix, examples, folder=folder, batch=plan.batch) for examples in used]
    for examples in features[1:]:
        examples.fill(np.arange(len(examples)))
    gigabytes = sum(examples.cache.nbytes for examples in features) / 1e9
    logging.info("the frozen prefix runs once: its output, %.2f GB, is kept in %s", gigabytes, folder)
    return tail, list(features)


def cache_images(config: Config, examples: input_pipeline.Examples) -> input_pipeline.Examples:
    """Returns examples whose images are decoded once, where they are files and `config.cache` asks for it."""
    if config.cache == "none" or not isinstance(examples, input_pipeline.FileExamples):
        return examples
    return image_cache.cached_images(examples, where=config.cache, folder=cache_folder(config))


def cache_folder(config: Config) -> pathlib.Path:
    """Returns where caches are kept."""
    return pathlib.Path(config.cache_dir) if config.cache_dir else row_cache.default_folder()
