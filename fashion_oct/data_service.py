"""Decodes training images on other machines, with TensorFlow's own tf.data service, in the order of one machine.

The service deals whole batches out to its workers, each batch to one of them, and they come back in any order. Here
they are put in order again; one that does not come, since its worker died, is decoded here. So a run ends with the same
bits with and without a service, whatever happens to it.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from absl import logging

from fashion_oct import image_cache, input_pipeline
from fashion_oct.errors import InputError

PATIENCE = 30.0  # seconds that a batch may be late
_MOST_AHEAD = 64  # batches that are kept for a late one


def check_is_there(address: str, *, timeout: float = 5.0) -> None:
    """Raises InputError where no dispatcher can be reached: TensorFlow itself would try for hours.

    Args:
      address: "host:port".
      timeout: seconds to wait.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--data_service={address}: no dispatcher can be reached there ({error}); start one "
            "(docs/data_service.md), or leave the flag out"
        ) from error


class Served:
    """Examples whose batches the workers of a tf.data service decode; see `input_pipeline.Examples`.

    Args:
      examples: files, or their mirror images too. The workers open them by the same names.
      address: "host:port" of the dispatcher.
      patience: seconds that a batch may be late before it is decoded here.
    """

    def __init__(self, examples: input_pipeline.Examples, address: str, *, patience: float = PATIENCE):
        self.examples, self.address, self.patience = examples, address, patience
        self.labels = examples.labels
        self.num_versions = getattr(examples, "num_versions", 1)

    @property
    def identity(self) -> str:
        """See `image_cache.identity`: the images are the same, wherever they are decoded."""
        return image_cache.identity(self.examples)

    def __len__(self) -> int:
        return len(self.examples)

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`; the batches are all of `batch_size`."""
        spec = self.examples.batches(indices, batch_size).element_spec

        def generate():
            rows = np.stack(list(indices.as_numpy_iterator()))  # int64 [K, B]
            yield from self._in_order(rows)

        signature = tuple(tf.TensorSpec([batch_size, *part.shape[1:]], part.dtype) for part in spec)
        return tf.data.Dataset.from_generator(generate, output_signature=signature)

    def _in_order(self, rows: np.ndarray) -> Iterator[tuple]:
        arrived: dict[int, tuple] = {}  # by row, those that came before their turn
        stream = _Stream(self._served(rows))
        try:
            for row in range(len(rows)):
                self._wait_for(row, arrived, stream)
                if row in arrived:
                    yield arrived.pop(row)
                elif not stream.end:
                    yield next(self._decoded_here(rows[row : row + 1]))
                else:
                    logging.warning("the data service at %s %s: decoding goes on here", self.address, stream.end)
                    yield from self._decoded_here(rows[row:])
                    return
        finally:
            stream.close()

    def _wait_for(self, row: int, arrived: dict[int, tuple], stream: "_Stream") -> None:
        """Takes what comes until the batch of the row is there, or late."""
        deadline = time.monotonic() + self.patience
        is_silent = True
        while row not in arrived and len(arrived) < _MOST_AHEAD and not stream.end:
            element = stream.receive(seconds=deadline - time.monotonic())
            if element is not None:
                is_silent = False
                if element[0] >= row:  # else it was late and has been decoded here
                    arrived[int(element[0])] = element[1:]
            elif time.monotonic() >= deadline:
                if is_silent:
                    stream.end = f"has not answered for {self.patience:.0f} s"
                return

    def _served(self, rows: np.ndarray) -> tf.data.Dataset:
        """Returns the batches of the rows in any order, each with the number of its row."""

        def decode(number, row):
            batches = self.examples.batches(tf.data.Dataset.from_tensors(row), rows.shape[1])
            return batches.map(lambda images, labels: (number, images, labels))

        numbered = tf.data.Dataset.from_tensor_slices((np.arange(len(rows)), rows))
        service = tf.data.experimental.service
        return numbered.flat_map(decode).apply(
            service.distribute(processing_mode=service.ShardingPolicy.DYNAMIC, service=f"grpc://{self.address}")
        )

    def _decoded_here(self, rows: np.ndarray) -> Iterator[tuple]:
        return self.examples.batches(tf.data.Dataset.from_tensor_slices(rows), rows.shape[1]).as_numpy_iterator()


class _Stream:
    """Reads a dataset in a thread: what hangs for ever there, as a lost dispatcher does, can be left behind here.

    Attributes:
      end: why no more comes, in words; empty while more may come.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self.end = ""
        self._queue: queue.Queue = queue.Queue(maxsize=2)
        self._is_closed = threading.Event()
        threading.Thread(target=self._read, args=(dataset,), daemon=True).start()

    def _read(self, dataset: tf.data.Dataset) -> None:
        try:
            for element in dataset.as_numpy_iterator():
                if not self._put(element):
                    return
            self._put("gave less than was asked for")
        except tf.errors.OpError as error:
            self._put(f"failed ({error.message})")

    def _put(self, item: tuple | str) -> bool:
        """Returns whether anybody still wants it."""
        while not self._is_closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.5)
                return True
        return False

    def receive(self, *, seconds: float) -> tuple | None:
        """Returns the next element, or None if none comes in time, or at the end."""
        try:
            item = self._queue.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if isinstance(item, str):
            self.end = item
            return None
        return item

    def close(self) -> None:
        """Lets the thread end."""
        self._is_closed.set()
