"""The frozen prefix runs once: its output is computed for every image, kept on disk, and the tail trains on it.

Training does not wait for a full cache: `FillAhead` computes what the next steps read, in the order of their first use,
so that the first epoch costs what it would cost without a cache, and what no step reads is never computed.
"""

import functools
import hashlib
import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
import tqdm

from fashion_oct import distribution, row_cache
from fashion_oct.image_cache import CachedExamples, identity
from fashion_oct.input_pipeline import Examples, make_indexed_dataset


class Features(CachedExamples):
    """Examples with the prefix's output, [N, ...], instead of their images; who reads a row waits until it is there.

    Args:
      prefix: maps uint8 images [B, H, W, C] to features [B, ...]; runs on all its replicas.
      examples: the split, N images.
      folder: where caches are kept.
      batch: images at once.

    Raises:
      OSError: the cache cannot be written, or the disk has no room.
    """

    rows: "_Awaited"

    def __init__(
        self, prefix: tf.keras.Model, examples: Examples, *, folder: pathlib.Path, batch: distribution.BatchSizes
    ):
        name, dtype = _name(prefix, examples), _dtype(prefix)
        stored = np.uint16 if dtype.size == 2 else dtype.as_numpy_dtype  # NumPy has no bfloat16 of its own
        cache = row_cache.RowCache(folder / name, len(examples), prefix.output_shape[1:], stored)
        num_versions = getattr(examples, "num_versions", 1)
        super().__init__(_Awaited(cache), examples.labels, dtype, identity=name, num_versions=num_versions)
        self.cache, self.prefix, self._examples, self._batch = cache, prefix, examples, batch

    num_parallel_calls = 2

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`."""
        options = tf.data.Options()
        # Threads of its own, more than can wait for a row at a time: those that wait must keep no one from computing
        # the row, nor from handing over the batch before it.
        options.threading.private_threadpool_size = 4 * self.num_parallel_calls
        return super().batches(indices, batch_size).with_options(options)

    def fill(self, indices: np.ndarray) -> None:
        """Computes those of the rows that are missing, with a progress bar, and lets them be read."""
        missing = self.cache.find_missing(indices)
        with tqdm.tqdm(total=len(missing), unit="images", desc="frozen prefix", disable=not sys.stderr.isatty()) as bar:
            for computed in self.compute(missing):
                bar.update(len(computed))
        self.rows.let_read(indices)

    def compute(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the numbers of rows, some at a time, in the order of `indices`, after each has been computed.

        What another process has filled meanwhile is not computed again.
        """
        if not len(indices):
            return
        size = self._batch.global_batch_size
        shown = np.resize(indices, -(-len(indices) // size) * size)  # full batches only: every replica gets its share
        batches = make_indexed_dataset(self._examples, shown, global_batch_size=size)
        strategy = self.prefix.distribute_strategy
        images = iter(strategy.experimental_distribute_dataset(batches.map(lambda images, labels: images)))
        for start in range(0, len(indices), size):
            chunk, batch = indices[start : start + size], next(images)
            with self.cache.filling():
                if len(self.cache.find_missing(chunk)):
                    features = self.run_prefix(batch)[: len(chunk)]
                    self.cache.write(chunk, features.view(self.cache.dtype))
            yield chunk

    def run_prefix(self, images) -> np.ndarray:
        """Returns the features, [B, ...], of a batch of images that the strategy has dealt out to the replicas."""
        parts = self.prefix.distribute_strategy.experimental_local_results(self._run_prefix(images))
        return np.concatenate([part.numpy() for part in parts])

    @functools.cached_property
    def _run_prefix(self):
        prefix, strategy = functools.partial(self.prefix, training=False), self.prefix.distribute_strategy

        @tf.function
        def run_prefix(images):
            return strategy.run(prefix, (images,))

        return run_prefix


class _Awaited:
    """Rows of a cache that are read only when `let_read` has named them.

    Who wants others waits while `is_filled` is true, and else gets an error: a pipeline that waits cannot be stopped.
    """

    def __init__(self, cache: row_cache.RowCache):
        self.cache, self.shape, self.dtype = cache, cache.shape, cache.dtype
        self._is_there, self._changed, self._is_filled = np.zeros(len(cache), bool), threading.Condition(), False

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        with self._changed:
            self._changed.wait_for(lambda: self._is_there[indices].all() or not self._is_filled)
            if not self._is_there[indices].all():
                raise RuntimeError("no one fills the cache of features: use FillAhead, or fill it before")
        return self.cache[indices]

    def let_read(self, indices: np.ndarray) -> None:
        with self._changed:
            self._is_there[indices] = True
            self._changed.notify_all()

    def set_filled(self, is_filled: bool) -> None:
        with self._changed:
            self._is_filled = is_filled
            self._changed.notify_all()


class FillAhead(tf.keras.callbacks.Callback):
    """Has the rows there that the next executions read; use it as a context around `fit`.

    Args:
      features: what `fit` trains on.
      steps: the rows of each step of the `fit`, int64 [num_steps, B].
      steps_per_execution: as the model was compiled with.
      seconds: gets what was spent on it, under "feature cache".

    Attributes:
      num_computed: rows that were not there.
    """

    def __init__(
        self,
        features: Features,
        steps: np.ndarray,
        *,
        steps_per_execution: int = 1,
        seconds: dict[str, float] | None = None,
    ):
        super().__init__()
        rows, positions = np.unique(steps, return_index=True)
        order = np.argsort(positions)
        self._rows, self._step_of = rows[order], positions[order] // steps.shape[1]  # by first use
        self._is_new = ~features.cache.has_rows(self._rows)
        self._features, self._steps_per_execution = features, steps_per_execution
        self._new = features.compute(self._rows[self._is_new])
        self._num_ready, self._num_executions = 0, 0
        self._seconds = {} if seconds is None else seconds
        self._seconds.setdefault("feature cache", 0.0)
        self.num_computed = 0

    def __enter__(self) -> "FillAhead":
        self._fill(self._steps_per_execution)  # Keras 3 reads a batch, to build the model, before its first hook
        return self

    def __exit__(self, *exception: object) -> None:
        self.on_train_end()

    def on_train_begin(self, logs=None):
        self._features.rows.set_filled(True)

    def on_train_end(self, logs=None):
        self._features.rows.set_filled(False)

    def on_train_batch_begin(self, batch, logs=None):
        if self._num_ready < len(self._rows):
            # this execution and the next one, so that the pipeline works while the device does; at first just this one
            num_executions = self._num_executions + (2 if self._num_executions else 1)
            self._fill(num_executions * self._steps_per_execution)
        self._num_executions += 1

    def _fill(self, num_steps: int) -> None:
        """Lets the first `num_steps` steps be read."""
        begin = time.perf_counter()
        end = int(np.searchsorted(self._step_of, num_steps))
        part, is_new = self._rows[self._num_ready : end], self._is_new[self._num_ready : end]
        num_new = np.count_nonzero(self._is_new[:end])
        while self.num_computed < num_new:
            self.num_computed += len(next(self._new))
        for damaged in self._features.compute(self._features.cache.find_missing(part[~is_new])):
            self._features.rows.let_read(damaged)
        self._features.rows.let_read(part)
        self._num_ready = end
        self._seconds["feature cache"] += time.perf_counter() - begin


def exists(prefix: tf.keras.Model, examples: Examples, *, folder: pathlib.Path) -> bool:
    """Says whether there is a cache with some rows of these examples; makes none."""
    return row_cache.exists(folder / _name(prefix, examples))


def _name(prefix: tf.keras.Model, examples: Examples) -> str:
    """Returns the cache's name: of the images, and of the prefix's layers, weights and precision."""
    digest = hashlib.sha256()
    for layer in prefix.layers:
        settings = {key: value for key, value in layer.get_config().items() if key not in ("name", "trainable")}
        digest.update(json.dumps([type(layer).__name__, settings], sort_keys=True, default=str).encode())
    for weights in prefix.get_weights():
        digest.update(np.ascontiguousarray(weights).data)
    return f"features-{identity(examples)[:32]}-{digest.hexdigest()[:32]}-{_dtype(prefix).name}"


def _dtype(prefix: tf.keras.Model) -> tf.DType:
    return tf.as_dtype(prefix.output.dtype)
