"""Predicts image files: decoded on all cores, scored in batches, bad ones left out and named."""

import concurrent.futures
import csv
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from fashion_oct import evaluation, fashion_mnist, input_pipeline
from fashion_oct.errors import InputError

BATCH_SIZE = 64


def predict_files(workdir: str, paths: list[str]) -> int:
    """Writes a CSV row an image to standard output: file, class, the probability of each class.

    Args:
      workdir: the run folder whose model predicts.
      paths: PNG, JPEG, IDX or .npy files.

    Returns:
      The exit status: 1 if a file was left out, else 0.

    Raises:
      InputError: no such run.
    """
    class_names = evaluation.read_settings(workdir)["dataset"]["class_names"]
    model = evaluation.load_model(workdir)
    rows = csv.writer(sys.stdout)
    rows.writerow(["file", "class", *class_names])
    images = _Reader(model.input_shape[1:])
    for batch in _batches(images.read_all(paths)):
        names, pixels = zip(*batch, strict=True)
        padding = BATCH_SIZE - len(batch)  # one batch size: the predict function is traced once
        probabilities = model.predict_on_batch(np.pad(np.stack(pixels), [(0, padding), (0, 0), (0, 0), (0, 0)]))
        for name, row in zip(names, np.asarray(probabilities), strict=False):
            rows.writerow([name, class_names[row.argmax()], *(f"{p:.6f}" for p in row)])
    return 1 if images.num_bad else 0


class _Reader:
    """Reads files as uint8 images of one shape; names the bad ones on standard error and counts them."""

    def __init__(self, image_shape: tuple[int, int, int]):
        self._image_shape = image_shape
        self.num_bad = 0

    def read_all(self, paths: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, image) in the order of `paths`; decodes ahead, on all cores."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for group in _groups(paths, BATCH_SIZE):  # bounds what is decoded ahead
                for path, result in zip(group, pool.map(self._read, group), strict=True):
                    if isinstance(result, Exception):
                        self.num_bad += 1
                        print(f"left out: {path}: {' '.join(str(result).split())}", file=sys.stderr)
                    else:
                        yield from result

    def _read(self, path: str) -> Iterable[tuple[str, np.ndarray]] | Exception:
        try:
            suffixes = pathlib.Path(path).suffixes
            if ".npy" in suffixes:
                return self._name_each(path, np.load(path, mmap_mode="r", allow_pickle=False))
            if any("idx" in suffix or "ubyte" in suffix for suffix in suffixes) or "-ubyte" in path:
                return self._name_each(path, fashion_mnist.read_idx(path))
            image = input_pipeline.decode_image(pathlib.Path(path).read_bytes(), self._image_shape)
            return [(path, image.numpy())]
        except (OSError, ValueError, tf.errors.OpError) as error:
            return error

    def _name_each(self, path: str, images: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        if images.ndim == 3:
            images = images[..., np.newaxis]
        if images.dtype != np.uint8 or images.shape[1:] != self._image_shape:
            wanted = ", ".join(map(str, self._image_shape))
            raise InputError(f"holds {images.dtype} of shape {images.shape}: give uint8 [N, {wanted}]")
        return ((f"{path}[{number}]", image) for number, image in enumerate(images))


def _batches(items: Iterator) -> Iterator[list]:
    while batch := list(itertools.islice(items, BATCH_SIZE)):
        yield batch


def _groups(items: list, size: int) -> Iterator[list]:
    return (items[start : start + size] for start in range(0, len(items), size))
