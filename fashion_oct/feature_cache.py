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
    cache, dtype = _open(prefix, examples, folder)
    if len(cache.missing):
        with cache.filling():
            _fill(cache, prefix, examples, batch)
    return CachedExamples(cache.rows, examples.labels, dtype)


def is_complete(prefix: tf.keras.Model, examples: Examples, *, folder: pathlib.Path) -> bool:
    """Says whether there is a cache with every row of these examples; makes none."""
    if not (folder / _name(prefix, examples)).is_dir():
        return False
    cache, _ = _open(prefix, examples, folder)
    is_full = not len(cache.missing)
    cache.close()
    return is_full


def bytes_per_image(prefix: tf.keras.Model) -> int:
    """Returns the size of a row: 14 x 14 x 512 x 2 = 200,704 bytes for VGG16 in 16 bits."""
    return int(np.prod(prefix.output_shape[1:])) * tf.as_dtype(prefix.compute_dtype).size


def _open(prefix: tf.keras.Model, examples: Examples, folder: pathlib.Path) -> tuple[row_cache.RowCache, tf.DType]:
    dtype = tf.as_dtype(prefix.compute_dtype)
    stored = np.dtype(np.uint16) if dtype.size == 2 else dtype.as_numpy_dtype  # NumPy has no bfloat16 of its own
    shape = tuple(prefix.output_shape[1:])
    return row_cache.RowCache(folder / _name(prefix, examples), len(examples), shape, stored), dtype


def _name(prefix: tf.keras.Model, examples: Examples) -> str:
    digest = hashlib.sha256(json.dumps([layer.name for layer in prefix.layers]).encode())
    for weights in prefix.get_weights():
        digest.update(np.ascontiguousarray(weights))
    return f"features-{identity(examples)[:32]}-{digest.hexdigest()[:32]}-{prefix.compute_dtype}"


def _fill(
    cache: row_cache.RowCache, prefix: tf.keras.Model, examples: Examples, batch: distribution.BatchSizes
) -> None:
    size = _BATCHES_PER_WRITE * batch.global_batch_size
    bar = tqdm.tqdm(total=len(cache.missing), unit="images", desc="frozen prefix", disable=not sys.stderr.isatty())
    with bar:
        while len(cache.missing):
            indices = cache.missing[:size]
            images = make_indexed_dataset(examples, indices, global_batch_size=batch.for_evaluation(len(indices)))
            features = prefix.predict(images.map(lambda images, labels: images), verbose=0)
            cache.write(indices, np.asarray(features).view(cache.rows.dtype))
            bar.update(len(indices))
