"""Decoded images, kept in memory or on disk: JPEGs are decoded once, not once an epoch."""

import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import tensorflow as tf
import tqdm

from fashion_oct import row_cache
from fashion_oct.input_pipeline import Examples, FileExamples, Mirrored, make_evaluation_dataset, make_indexed_dataset

_VERSION = 1  # of what decoding means: another one makes all caches new
_BATCH_SIZE = 64  # images decoded between two writes


class Rows(Protocol):
    """Reads like an array [N, ...] that is indexed by arrays of rows' numbers: an array, or `row_cache.RowCache`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, indices: np.ndarray, /) -> np.ndarray: ...


class CachedExamples:
    """Examples whose images are rows of a cache: decoded pixels, or features.

    Args:
      rows: [N, ...], in memory or on disk.
      labels: int32 [N].
      dtype: what the rows hold, where NumPy has no such type (bfloat16 is kept as uint16).
      identity: see `identity`.
      num_versions: how many rows there are of each image, see `Mirrored`.
    """

    num_parallel_calls = tf.data.AUTOTUNE

    def __init__(
        self,
        rows: Rows,
        labels: np.ndarray,
        dtype: tf.DType,
        *,
        identity: str,
        num_versions: int = 1,
    ):
        self.rows, self.labels, self.identity = rows, labels, identity
        self.num_versions, self._dtype = num_versions, dtype

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`: rows instead of images."""
        del batch_size  # that of `indices`
        with tf.device("CPU:0"):
            labels = tf.constant(self.labels)

        def read(index):
            return self.rows[index]

        def load(index):
            rows = tf.numpy_function(read, [index], tf.as_dtype(self.rows.dtype), stateful=False)
            rows = tf.ensure_shape(rows, [None, *self.rows.shape[1:]])
            return tf.bitcast(rows, self._dtype), tf.gather(labels, index)

        return indices.map(load, num_parallel_calls=self.num_parallel_calls)


def cached_images(examples: FileExamples, *, where: str, folder: pathlib.Path) -> CachedExamples:
    """Returns the examples with their images decoded, once.

    Args:
      examples: images in files.
      where: "memory", or "disk" for a cache that other runs share.
      folder: where caches on disk are kept.

    Raises:
      OSError: the cache cannot be written, or the disk has no room.
    """
    name = identity(examples)
    rows: np.ndarray | row_cache.RowCache
    if where == "memory":
        rows = np.empty((len(examples), *examples.image_shape), np.uint8)
        for indices, images in _decode(examples, np.arange(len(examples))):
            rows[indices] = images
    else:
        rows = row_cache.RowCache(folder / f"images-{name[:32]}", len(examples), examples.image_shape, np.uint8)
        if len(rows.missing):
            with rows.filling():  # less is missing now, where another process has filled meanwhile
                for indices, images in _decode(examples, rows.missing):
                    rows.write(indices, images)
    return CachedExamples(rows, examples.labels, tf.uint8, identity=name)


def _decode(examples: Examples, indices: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields numbers of examples, [K], and their images, [K, H, W, C]."""
    with tqdm.tqdm(total=len(indices), unit="images", desc="decoding", disable=not sys.stderr.isatty()) as bar:
        start = 0
        for images, _ in make_indexed_dataset(examples, indices, global_batch_size=_BATCH_SIZE):
            yield indices[start : start + len(images)], images.numpy()
            start += len(images)
            bar.update(len(images))


def identity(examples: Examples) -> str:
    """Returns a hash that tells these images, in this order, from all others.

    Of images in files: path, size and time of the last change, and the shape that they are decoded to. Of examples
    that have an attribute `identity`: that one. Of others: all their bytes.
    """
    if hasattr(examples, "identity"):
        return examples.identity
    if isinstance(examples, Mirrored):
        return hashlib.sha256(f"mirrored {identity(examples.examples)}".encode()).hexdigest()
    digest = hashlib.sha256(f"{_VERSION}".encode())
    if type(examples) is FileExamples:
        digest.update(repr(examples.image_shape).encode())
        for path in examples.paths:
            status = os.stat(path)
            entry = [os.path.abspath(path), status.st_size, status.st_mtime_ns]
            digest.update(json.dumps(entry).encode())
    else:
        for images, _ in make_evaluation_dataset(examples, global_batch_size=_BATCH_SIZE):
            digest.update(repr(images.shape[1:]).encode())
            digest.update(np.ascontiguousarray(images).data)
    return digest.hexdigest()
