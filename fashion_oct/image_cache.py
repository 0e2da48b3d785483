"""Decoded images, kept in memory or on disk: JPEGs are decoded once, not once an epoch."""

import hashlib
import json
import pathlib
import sys

import numpy as np
import tensorflow as tf
import tqdm

from fashion_oct import row_cache
from fashion_oct.input_pipeline import Examples, FileExamples, make_indexed_dataset

_VERSION = 1  # of what decoding means: another one makes all caches new
_BATCH_SIZE = 64  # images decoded between two writes


class CachedExamples:
    """Examples whose images are rows of a cache: decoded pixels, or features.

    Args:
      rows: [N, ...], in memory or a memory map.
      labels: int32 [N].
      dtype: what the rows hold, where NumPy has no such type (bfloat16 is kept as uint16).
    """

    def __init__(self, rows: np.ndarray, labels: np.ndarray, dtype: tf.DType):
        self.rows, self.labels, self._dtype = rows, labels, dtype

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`: rows instead of images."""
        del batch_size  # that of `indices`
        labels, shape = tf.constant(self.labels), [None, *self.rows.shape[1:]]

        def load(index):
            rows = tf.numpy_function(self.rows.__getitem__, [index], tf.as_dtype(self.rows.dtype), stateful=False)
            return tf.bitcast(tf.ensure_shape(rows, shape), self._dtype), tf.gather(labels, index)

        return indices.map(load, num_parallel_calls=tf.data.AUTOTUNE)


def cached_images(examples: Examples, *, where: str, folder: pathlib.Path) -> CachedExamples:
    """Returns the examples with their images decoded, once.

    Args:
      examples: images in files.
      where: "memory", or "disk" for a cache that other runs share.
      folder: where caches on disk are kept.

    Raises:
      OSError: the cache cannot be written, or the disk has no room.
    """
    if where == "memory":
        rows = np.empty((len(examples), *examples.image_shape), np.uint8)
        for start, images in _decode(examples, np.arange(len(examples))):
            rows[start : start + len(images)] = images
        return CachedExamples(rows, examples.labels, tf.uint8)
    cache = row_cache.RowCache(
        folder / f"images-{identity(examples)[:32]}", len(examples), examples.image_shape, np.uint8
    )
    if len(cache.missing):
        with cache.filling():
            for _, images in _decode(examples, cache.missing):
                cache.write(cache.missing[: len(images)], images)
    return CachedExamples(cache.rows, examples.labels, tf.uint8)


def _decode(examples: Examples, indices: np.ndarray):
    with tqdm.tqdm(total=len(indices), unit="images", desc="decoding", disable=not sys.stderr.isatty()) as bar:
        for images, _ in make_indexed_dataset(examples, indices, global_batch_size=_BATCH_SIZE):
            yield bar.n, images.numpy()
            bar.update(len(images))


def identity(examples: Examples) -> str:
    """Returns a hash that tells these images, in this order, from all others.

    Of images in files: path, size and time of the last change, and the shape that they are decoded to. Of arrays: all
    their bytes.
    """
    digest = hashlib.sha256(f"{_VERSION}".encode())
    if isinstance(examples, FileExamples):
        digest.update(repr(examples.image_shape).encode())
        for path in examples.paths:
            status = pathlib.Path(path).stat()
            entry = [str(pathlib.Path(path).resolve()), status.st_size, status.st_mtime_ns]
            digest.update(json.dumps(entry).encode())
    else:
        images = examples.rows if isinstance(examples, CachedExamples) else examples.images
        digest.update(repr(images.shape).encode())
        digest.update(np.ascontiguousarray(images))
    return digest.hexdigest()
