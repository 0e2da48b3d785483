"""Predicts image files: decoded on all cores, scored in batches, bad ones left out and named."""

import concurrent.futures
import csv
import glob
import itertools
import os
import pathlib
import re
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fashion_oct import evaluation, fashion_mnist, input_pipeline, oct_folder, saliency
from fashion_oct.errors import InputError

BATCH_SIZE = 32  # 32 images take VGG16's first block 32 x 224 x 224 x 64 floats = 411 MB
OVERLAY_SIDE = 512  # pixels of the longer side
_IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
_PNG, _JPEG, _NPY, _IDX, _GZIP = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"\x93NUMPY", b"\0\0", b"\x1f\x8b"


def predict_files(workdir: str, arguments: list[str], *, saliency_dir: str | None = None) -> int:
    """Writes a CSV row an image to standard output: file, class, the probability of each class.

    Args:
      workdir: the run folder whose model predicts.
      arguments: PNG, JPEG, IDX or .npy files, folders of PNG and JPEG files, patterns of both.
      saliency_dir: a new or empty folder, which gets a Grad-CAM overlay of each image, numbered as the rows are.

    Returns:
      The exit status: 1 if something was left out, else 0.

    Raises:
      InputError: no such run, or `saliency_dir` cannot be used.
    """
    if saliency_dir:
        _check_is_new(saliency_dir)
    class_names = evaluation.read_settings(workdir)["dataset"]["class_names"]
    model = evaluation.load_model(workdir)
    draw = _make_drawer(model, saliency_dir) if saliency_dir else None
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["file", "class", *class_names])
    num_rows = 0
    images = _Reader(model.input_shape[1:])
    for batch in _groups(images.read_all(arguments), BATCH_SIZE):
        pixels = np.stack([image.pixels for image in batch])
        probabilities = np.asarray(model.predict_on_batch(pixels))  # [B, C]
        labels = probabilities.argmax(axis=1)
        for image, label, row in zip(batch, labels, probabilities, strict=True):
            rows.writerow([_utf8(image.name), class_names[label], *(f"{p:.6f}" for p in row)])
        if draw:
            draw(batch, pixels, labels, num_rows)
        num_rows += len(batch)
    if not num_rows:
        print("error: no image was predicted, for the reasons above", file=sys.stderr)
    return 1 if images.num_bad else 0


class _Image(NamedTuple):
    name: str
    pixels: np.ndarray  # uint8 [H, W, C], what the model takes
    size: tuple[int, int]  # height, width of the original
    path: str | None = None  # of the original, where it is a file of its own


class _Reader:
    """Reads files as uint8 images of one shape; names the bad ones on standard error and counts them."""

    def __init__(self, image_shape: tuple[int, int, int]):
        self._image_shape = image_shape
        self.num_bad = 0

    def read_all(self, arguments: list[str]) -> Iterator[_Image]:
        """Yields the images of all arguments in order; checks headers and decodes ahead, on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for group in _groups(expand(arguments), 1024):
                opened = list(pool.map(self._open, group))
                sizes = [(path, size) for (path, _), size in zip(group, opened, strict=True) if isinstance(size, tuple)]
                decoded = self._decode(sizes)
                for (path, _), result in zip(group, opened, strict=True):
                    images = next(decoded) if isinstance(result, tuple) else result
                    if isinstance(images, Exception):
                        self.num_bad += 1
                        print(f"left out: {_one_line(path)}: {_reason(images)}", file=sys.stderr)
                    else:
                        yield from images

    def _open(self, found: tuple[str, str | None]) -> tuple[int, int] | Iterable[_Image] | Exception:
        """Returns the size of a PNG or JPEG, the images of another file, or what is wrong with it."""
        path, problem = found
        try:
            if problem:
                raise InputError(problem)
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise InputError("is no regular file")  # opening a pipe would wait for ever
            with open(path, "rb") as stream:
                start = stream.read(32)
            if start.startswith(_NPY):
                return self._name_each(path, _map_npy(path))
            if start.startswith((_IDX, _GZIP)):
                return self._name_each(path, fashion_mnist.read_idx(path))
            return check_image(path, start)
        except (OSError, ValueError) as error:
            return error

    def _decode(self, sizes: list[tuple[str, tuple[int, int]]]) -> Iterator[list[_Image] | Exception]:
        paths = tf.data.Dataset.from_tensor_slices(tf.constant([os.fsencode(path) for path, _ in sizes], tf.string))
        decoded = iter(
            paths.map(
                lambda path: input_pipeline.decode_image(tf.io.read_file(path), self._image_shape),
                num_parallel_calls=tf.data.AUTOTUNE,
            )
        )
        for path, size in sizes:
            try:
                yield [_Image(path, next(decoded).numpy(), size, path)]
            except tf.errors.OpError as error:  # of this file alone: the iterator goes on with the next one
                yield error

    def _name_each(self, path: str, images: np.ndarray) -> Iterable[_Image]:
        if images.ndim == 3:
            images = images[..., np.newaxis]
        if images.dtype != np.uint8 or images.shape[1:] != self._image_shape:
            wanted = ", ".join(map(str, self._image_shape))
            raise InputError(f"holds {images.dtype} of shape {images.shape}: give uint8 [N, {wanted}]")
        return (_Image(f"{path}[{number}]", image, image.shape[:2]) for number, image in enumerate(images))


def expand(arguments: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Turns files, folders and patterns into files.

    Folders are walked wholly, in sorted order, and give their PNG and JPEG files, going by the names; hidden files and
    folders are left out. A pattern is one only where no file has that name; `**` matches any folders.

    Yields:
      A path and None, or the argument and why it gives nothing.
    """
    for argument in arguments:
        is_pattern = glob.has_magic(argument) and not os.path.lexists(argument)
        matches = sorted(glob.glob(argument, recursive=True)) if is_pattern else [argument]
        if not matches:
            yield argument, "matches no file"
        for match in matches:
            if not os.path.isdir(match):
                yield match, None
                continue
            is_empty = True
            for path, problem in _walk(match):
                is_empty = False
                yield path, problem
            if is_empty and not is_pattern:
                yield argument, "is a folder without PNG or JPEG files"


def _walk(folder: str) -> Iterator[tuple[str, str | None]]:
    """Yields the image files below a folder; links are followed, but no folder is entered twice."""
    seen, waiting = set(), [folder]  # no recursion: folders may lie deeper than Python's stack
    while waiting:
        path = waiting.pop()
        if not os.path.isdir(path):
            yield path, None
            continue
        try:
            status = os.stat(path)
            names = sorted(os.listdir(path), reverse=True)
        except OSError as error:
            yield path, f"cannot be read: {error.strerror}"
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        children = [os.path.join(path, name) for name in names if not name.startswith(".") and name != "__MACOSX"]
        waiting += [child for child in children if child.lower().endswith(_IMAGE_SUFFIXES) or os.path.isdir(child)]


def check_image(path: str, start: bytes) -> tuple[int, int]:
    """Checks the header of a PNG or JPEG, told by content, so that decoding it takes bounded memory.

    Args:
      path: a regular file.
      start: its first bytes, at least 24 if it has them.

    Returns:
      Height and width in pixels.

    Raises:
      InputError: it is neither, or no such file can be used; the message is the reason.
    """
    if start and not start.startswith((_PNG, _JPEG)):
        raise InputError(f"is neither PNG nor JPEG, it begins with {start[:8]!r}; convert it")
    if not start.startswith(_PNG):
        header = oct_folder.check_header(path)
        if isinstance(header, str):
            raise InputError(header)
        return header.height, header.width
    if len(start) < 24 or start[12:16] != b"IHDR":
        raise InputError("is a PNG with a damaged header")
    width, height = struct.unpack(">II", start[16:24])  # Source: PNG specification, 11.2.1 (IHDR)
    if not all(oct_folder.MIN_SIDE <= side <= oct_folder.MAX_SIDE for side in (width, height)):
        limits = f"{oct_folder.MIN_SIDE} to {oct_folder.MAX_SIDE}"
        raise InputError(f"is {width}x{height} pixels; each side must be {limits}")
    if (num_bytes := os.path.getsize(path)) > oct_folder.MAX_FILE_BYTES:
        raise InputError(f"has {num_bytes} bytes; the limit is {oct_folder.MAX_FILE_BYTES}")
    return height, width


def _map_npy(path: str) -> np.ndarray:
    """Returns the array of a .npy file as a memory map: what its header promises beyond the file takes no memory."""
    try:
        with np.errstate(over="ignore"):  # of sizes that no file has
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # NumPy raises many kinds
        raise InputError(f"is a damaged .npy file, or holds Python objects: {error}") from error


def _check_is_new(folder: str) -> None:
    if os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        raise InputError(f"--saliency={folder} is a file or a folder that is not empty: give a new or an empty folder")


def _make_drawer(model: tf.keras.Model, folder: str) -> Callable[[list[_Image], np.ndarray, np.ndarray, int], None]:
    """Returns what writes overlays, given images, pixels [B, H, W, C], labels [B] and the number of rows before."""
    grad_cam = saliency.make_grad_cam(model)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(f"--saliency={folder} cannot be made ({error.strerror}): give another place") from error

    def draw(images: list[_Image], pixels: np.ndarray, labels: np.ndarray, num_rows: int) -> None:
        maps = grad_cam(pixels, labels)  # [B, h, w]
        for number, (image, heat) in enumerate(zip(images, maps, strict=True), start=num_rows + 1):
            drawn = saliency.overlay(_original(image), heat)
            stem = re.sub(r"[^\w.\[\]-]+", "_", pathlib.PurePath(_utf8(image.name)).stem)[:50]
            path = os.path.join(folder, f"{number:06d}_{stem}.png")
            pathlib.Path(path).write_bytes(tf.io.encode_png(drawn).numpy())

    return draw


def _original(image: _Image) -> np.ndarray:
    """Returns the image in grey and in its own proportions, `OVERLAY_SIDE` pixels on its longer side."""
    height, width = (max(1, round(OVERLAY_SIDE * side / max(image.size))) for side in image.size)
    contents = tf.io.encode_png(image.pixels) if image.path is None else pathlib.Path(image.path).read_bytes()
    return input_pipeline.decode_image(contents, (height, width, 1)).numpy()


def _groups(items: Iterable, size: int) -> Iterator[list]:
    items = iter(items)
    while group := list(itertools.islice(items, size)):
        yield group


def _reason(error: Exception) -> str:
    if isinstance(error, tf.errors.OpError):
        return "does not decode: it is damaged or truncated"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return " ".join(str(error).split())


def _one_line(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _utf8(name: str) -> str:
    """Returns a name with bytes that are no UTF-8 written as \\xNN, so that CSV can hold it."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
