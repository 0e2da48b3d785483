"""The frozen prefix runs once: its output is computed for every image, kept on disk, and the tail trains on it."""

import hashlib
import json
import pathlib
import sys

import numpy as np
import tensorflow as tf
import tqdm

from fashion_oct import distribution, row_cache
from fashion_oct.image_cache import CachedExamples, identity
from fashion_oct.input_pipeline import Examples, make_indexed_dataset

_BATCHES_PER_WRITE = 4  # what a kill loses, at most


def cached_features(
    prefix: tf.keras.Model, examples: Examples, *, folder: pathlib.Path, batch: distribution.BatchSizes
) -> CachedExamples:
    """Returns the examples with the prefix's output instead of their images; computes what the cache lacks.

    Args:
      prefix: maps uint8 images [B, H, W, C] to features [B, ...]; predicts on all its replicas.
      examples: the split.
      folder: where caches are kept.
      batch: images at once.

    Raises:
      OSError: the cache cannot be written, or the disk has no room.
    """
    name, dtype = _name(prefix, examples), _dtype(prefix)
    stored = np.uint16 if dtype.size == 2 else dtype.as_numpy_dtype  # NumPy has no bfloat16 of its own
    cache = row_cache.RowCache(folder / name, len(examples), prefix.output_shape[1:], stored)
    if len(cache.missing):
        with cache.filling():
            _fill(cache, prefix, examples, batch)
    num_versions = getattr(examples, "num_versions", 1)
    return CachedExamples(cache.rows, examples.labels, dtype, identity=name, num_versions=num_versions, cache=cache)


def is_complete(prefix: tf.keras.Model, examples: Examples, *, folder: pathlib.Path) -> bool:
    """Says whether there is a cache with every row of these examples; makes none."""
    return row_cache.is_complete(folder / _name(prefix, examples), len(examples))


def _name(prefix: tf.keras.Model, examples: Examples) -> str:
    """Returns the cache's name: of the images, and of the prefix's layers, weights and precision."""
    digest = hashlib.sha256()
    for layer in prefix.layers:
        settings = {key: value for key, value in layer.get_config().items() if key not in ("name", "trainable")}
        digest.update(json.dumps([type(layer).__name__, settings], sort_keys=True, default=str).encode())
    for weights in prefix.get_weights():
        digest.update(np.ascontiguousarray(weights))
    return f"features-{identity(examples)[:32]}-{digest.hexdigest()[:32]}-{_dtype(prefix).name}"


def _dtype(prefix: tf.keras.Model) -> tf.DType:
    return tf.as_dtype(prefix.output.dtype)


def _fill(
    cache: row_cache.RowCache, prefix: tf.keras.Model, examples: Examples, batch: distribution.BatchSizes
) -> None:
    size = _BATCHES_PER_WRITE * batch.global_batch_size
    bar = tqdm.tqdm(total=len(cache.missing), unit="images", desc="frozen prefix", disable=not sys.stderr.isatty())
    with bar:
        while len(cache.missing):
            indices = cache.missing[:size]
            shown = np.resize(indices, max(len(indices), batch.num_replicas))  # each replica needs an image
            batch_size = batch.for_evaluation(len(shown))
            images = make_indexed_dataset(examples, shown, global_batch_size=batch_size)
            features = prefix.predict(images.map(lambda images, labels: images), verbose=0)[: len(indices)]
            cache.write(indices, np.asarray(features).view(cache.rows.dtype))
            bar.update(len(indices))
