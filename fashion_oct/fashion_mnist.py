"""Fashion-MNIST: finds it, checks it and reads it. NumPy is enough, except for TensorFlow Datasets copies.

`load` takes the first of these places that holds the set:
  1. the folder that it is given: four IDX files (.gz or not), or a TensorFlow Datasets folder; nothing else then
  2. a prepared TensorFlow Datasets copy: $TFDS_DATA_DIR, else ~/tensorflow_datasets
  3. Keras' cache: $KERAS_HOME/datasets/fashion-mnist, else ~/.keras/datasets/fashion-mnist
  4. the folder of Debian's package dataset-fashion-mnist
  5. a download through TensorFlow Datasets into 2, if the data set's host answers at once
  6. the sample in this package: 6,000 training and 1,000 test images, with a warning
A place that holds a damaged file is an error that names the file: the next place is not tried.

Source: https://github.com/zalandoresearch/fashion-mnist; file format: http://yann.lecun.com/exdb/mnist.
"""

import dataclasses
import gzip
import io
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
import zlib

import numpy as np
from absl import logging

from fashion_oct import network, tfds_folder
from fashion_oct.errors import InputError

CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
SAMPLE_FOLDER = pathlib.Path(__file__).parent / "data"

_SIDE = 28
_IMAGES_MAGIC, _LABELS_MAGIC = 0x0803, 0x0801  # 08: unsigned bytes; 03, 01: the number of dimensions
_MAX_IMAGES = 1_000_000  # 17 times Fashion-MNIST; 784 MB, the most memory that a file may ask for
# signature, length and name of the first chunk, width and height. Source: PNG specification, 5.2 and 11.2.1
_PNG_START = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", _SIDE, _SIDE)
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_DEFLATE_RATIO = 1032  # 258 bytes from 2 bits
_IDX_REMEDY = "put the original file there, or name another folder with --data_dir"

# The smallest of the files that TensorFlow Datasets downloads.
_PROBE_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/t10k-labels-idx1-ubyte.gz"
_PROBE_SECONDS = 3.0
_DOWNLOAD_SECONDS = 300.0  # 31 MB at 1 Mbit/s take 250 s
_DOWNLOAD_PROGRAM = """
import sys
try:
    from tensorflow_datasets import builder
    fashion_mnist = builder("fashion_mnist")
    fashion_mnist.download_and_prepare()
except Exception as error:
    print(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    sys.exit(1)
print(fashion_mnist.data_dir)
"""


@dataclasses.dataclass(frozen=True, eq=False)
class FashionMnist:
    """Fashion-MNIST in memory.

    Attributes:
      train_images: uint8 [N, 28, 28, 1], 0 (background) to 255.
      train_labels: uint8 [N], an index into `CLASS_NAMES`.
      test_images: uint8 [M, 28, 28, 1].
      test_labels: uint8 [M].
      source: where the images came from, in words.
      is_sample: says that these are the 6,000 + 1,000 images of this package, not the full set.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str
    is_sample: bool = False


def load(data_dir: str | None = None) -> FashionMnist:
    """Loads Fashion-MNIST from the first place that has it (the list above).

    A TensorFlow Datasets copy starts TensorFlow's devices: make the strategy before.

    Args:
      data_dir: a folder with the four IDX files, a TensorFlow Datasets folder, or a version folder in one. If given,
        no other place is looked at.

    Raises:
      InputError: `data_dir` does not hold Fashion-MNIST, or a file in the first place found is missing, damaged or of
        something else.
    """
    if data_dir is not None:
        return _load_data_dir(data_dir)
    tfds_folder = os.environ.get("TFDS_DATA_DIR", os.path.join("~", "tensorflow_datasets"))
    keras_folder = os.path.join(os.environ.get("KERAS_HOME", os.path.join("~", ".keras")), "datasets", "fashion-mnist")
    for place in (tfds_folder, keras_folder, DEBIAN_FOLDER):
        data = _load_folder(pathlib.Path(os.path.expanduser(place)))
        if data is not None:
            return data
    try:
        downloaded = _download()
    except OSError as error:
        return _load_sample(str(error))
    return _load_tfds(downloaded)


def read_idx(path: str | os.PathLike) -> np.ndarray:
    """Reads an IDX file of 28x28 images or of labels, gzip-compressed or not (told by its content, not by its name).

    Any bytes are safe to read: never more is inflated than the header asks for, and a header that asks for more than
    the file can hold, or than 1,000,000 images, is refused before memory is taken.

    Returns:
      uint8, read-only: images [N, 28, 28] or labels [N], N >= 1. Labels of any value: `load` checks them.

    Raises:
      InputError: the file cannot be read, or is no such file from its first to its last byte.
    """
    path = pathlib.Path(path)
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise InputError(f"{path}: not there, or not a file; expected an IDX file: {_IDX_REMEDY}")
        with open(path, "rb") as raw:
            is_gzip = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            max_bytes = os.fstat(raw.fileno()).st_size * (_MAX_DEFLATE_RATIO if is_gzip else 1)
            with gzip.GzipFile(fileobj=raw) if is_gzip else raw as stream:
                return _read_idx_stream(stream, max_bytes=max_bytes)
    except _IdxError as error:
        raise InputError(f"{path}: {error}: {_IDX_REMEDY}") from None
    except EOFError:
        raise InputError(f"{path}: a truncated .gz file; expected a whole one: {_IDX_REMEDY}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: a damaged .gz file ({error}); expected an intact one: {_IDX_REMEDY}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected an IDX file: {_IDX_REMEDY}") from None


class _IdxError(Exception):
    """What is wrong with the bytes of an IDX file, and what was expected."""


def _read_idx_stream(stream: io.BufferedIOBase, *, max_bytes: int) -> np.ndarray:
    shape = _read_idx_header(stream)
    num_bytes = math.prod(shape)
    values = stream.read(num_bytes) if num_bytes <= max_bytes else b""
    if len(values) < num_bytes:
        raise _IdxError(f"truncated; expected {num_bytes:,} bytes after the header, for the shape {shape}")
    if stream.read(1):  # this also takes gzip to its end, where it checks the CRC
        raise _IdxError(f"goes on after its last value; expected {num_bytes:,} bytes after the header")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _read_idx_header(stream: io.BufferedIOBase) -> tuple[int, ...]:
    """Returns the checked shape: (N, 28, 28) or (N,)."""
    magic = stream.read(4)
    if int.from_bytes(magic, "big") not in (_IMAGES_MAGIC, _LABELS_MAGIC) or len(magic) < 4:
        raise _IdxError(
            f"starts with the bytes {magic.hex(' ') or '(none)'}; expected 00 00 08 03 (images) or 00 00 08 01 (labels)"
        )
    num_dims = magic[3]
    sizes = stream.read(4 * num_dims)
    if len(sizes) < 4 * num_dims:
        raise _IdxError(f"ends within its header; expected {4 + 4 * num_dims} bytes of header")
    shape = struct.unpack(f">{num_dims}I", sizes)
    if not 1 <= shape[0] <= _MAX_IMAGES:
        raise _IdxError(f"promises {shape[0]:,} images or labels; expected 1 to {_MAX_IMAGES:,}")
    if shape[1:] not in ((), (_SIDE, _SIDE)):
        raise _IdxError(f"images of {shape[1]} x {shape[2]} pixels; expected {_SIDE} x {_SIDE}")
    return shape


def _load_data_dir(data_dir: str) -> FashionMnist:
    folder = os.path.expanduser(data_dir)
    try:
        os.listdir(folder)
    except OSError as error:
        raise InputError(
            f"--data_dir={data_dir}: cannot be read as a folder ({error.strerror}); expected a folder with the four "
            f"Fashion-MNIST files, or none for the usual places"
        ) from None
    data = _load_folder(pathlib.Path(folder))
    if data is None:
        raise InputError(
            f"--data_dir={data_dir}: holds no Fashion-MNIST; expected {', '.join(IDX_NAMES)} (each with .gz or "
            "without), or a TensorFlow Datasets folder with fashion_mnist/VERSION in it"
        )
    return data


def _load_folder(folder: pathlib.Path) -> FashionMnist | None:
    """Loads what the folder holds; None if it holds neither IDX files nor a prepared TensorFlow Datasets copy."""
    names = _list_names(folder)
    if any(name in names or f"{name}.gz" in names for name in IDX_NAMES):
        return _load_idx(folder)
    version_folder = _find_tfds_version(folder)
    return None if version_folder is None else _load_tfds(version_folder)


def _list_names(folder: pathlib.Path) -> set[str]:
    """Returns the names in a folder; none for a folder that is not there or not ours to read."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _find_tfds_version(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder that holds the records: this one, or its newest version of fashion_mnist."""
    if _list_names(folder) & {"dataset_info.json", "features.json"}:
        return folder
    for parent in (folder / "fashion_mnist", folder):
        # TensorFlow Datasets gives a folder its version for a name once it is complete.
        versions = [name for name in _list_names(parent) if re.fullmatch(r"\d+\.\d+\.\d+", name, re.ASCII)]
        if versions:
            return parent / max(versions, key=lambda version: tuple(map(int, version.split("."))))
    return None


def _load_idx(folder: pathlib.Path) -> FashionMnist:
    names = _list_names(folder)
    paths = [folder / (name if name in names else f"{name}.gz") for name in IDX_NAMES]
    arrays = []
    for path, num_dims in zip(paths, (3, 1, 3, 1), strict=True):
        array = read_idx(path)
        if array.ndim != num_dims:
            kinds = {3: "images", 1: "labels"}
            raise InputError(f"{path}: holds {kinds[array.ndim]}; expected {kinds[num_dims]}: {_IDX_REMEDY}")
        arrays.append(array)
    train_images, train_labels, test_images, test_labels = arrays
    _check_split(train_images, train_labels, images_name=str(paths[0]), labels_name=str(paths[1]))
    _check_split(test_images, test_labels, images_name=str(paths[2]), labels_name=str(paths[3]))
    return FashionMnist(
        train_images[..., np.newaxis], train_labels, test_images[..., np.newaxis], test_labels, f"IDX files in {folder}"
    )


def _check_split(images: np.ndarray, labels: np.ndarray, *, images_name: str, labels_name: str) -> None:
    if len(images) != len(labels):
        raise InputError(
            f"{images_name}: {len(images):,} images, but {labels_name}: {len(labels):,} labels; expected as many: "
            f"take both from the same copy of Fashion-MNIST"
        )
    (wrong,) = np.nonzero((labels < 0) | (labels >= len(CLASS_NAMES)))
    if len(wrong):
        raise InputError(
            f"{labels_name}: label {labels[wrong[0]]} at position {wrong[0]} (the first is 0); expected 0 to 9: "
            f"put Fashion-MNIST's labels there"
        )


def _load_tfds(folder: str | os.PathLike) -> FashionMnist:
    """Loads a prepared TensorFlow Datasets copy from its version folder."""
    try:
        import tensorflow as tf
        from tensorflow_datasets import decode
    except ImportError as error:
        raise InputError(
            f"{folder}: reading it takes the package tensorflow-datasets, which does not work here ({error}): "
            "reinstall it, or name a folder with IDX files with --data_dir"
        ) from error
    arrays = []
    try:
        builder = tfds_folder.open_builder(folder, "fashion_mnist")
        for split in ("train", "test"):
            examples = builder.as_dataset(split=split, decoders={"image": decode.SkipDecoding()}).take(_MAX_IMAGES)
            decoded = examples.map(_decode_tfds, num_parallel_calls=tf.data.AUTOTUNE).batch(_MAX_IMAGES)
            arrays += [array.numpy() for array in decoded.get_single_element()]
    except Exception as error:  # damaged JSON, protobufs, records and PNGs each raise another
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"{folder}: expected an intact TensorFlow Datasets copy of Fashion-MNIST, but reading it failed "
            f"({type(error).__name__}: {reason}): delete this folder to have it made again, or name another with "
            "--data_dir"
        ) from error
    splits = [f"{folder} (train)", f"{folder} (test)"]
    for name, images, labels in zip(splits, arrays[::2], arrays[1::2], strict=True):
        _check_split(images, labels, images_name=name, labels_name=name)
    train_images, train_labels, test_images, test_labels = (array.astype(np.uint8, copy=False) for array in arrays)
    return FashionMnist(train_images, train_labels, test_images, test_labels, f"TensorFlow Datasets copy in {folder}")


def _decode_tfds(example: dict) -> tuple:
    """Returns the image, uint8 [28, 28, 1], and the label of a record; no memory is taken for a larger image."""
    import tensorflow as tf

    png = example["image"]
    has_size = tf.strings.substr(png, 0, len(_PNG_START)) == _PNG_START
    with tf.control_dependencies([tf.debugging.Assert(has_size, [f"an image is no PNG of {_SIDE} x {_SIDE} pixels"])]):
        png = tf.identity(png)
    return tf.ensure_shape(tf.io.decode_png(png, channels=1), [_SIDE, _SIDE, 1]), example["label"]


def _download() -> str:
    """Has TensorFlow Datasets download and prepare its copy. Returns the version folder.

    In a process of its own, since only a process can be stopped: without a network, or with one that drops packets,
    TensorFlow Datasets retries for minutes.

    Raises:
      OSError: there is no network, or the download failed or took too long; the message says why.
    """
    network.check_host_answers(_PROBE_URL, _PROBE_SECONDS)
    logging.info("Downloading Fashion-MNIST (31 MB) through TensorFlow Datasets, for %g s at most", _DOWNLOAD_SECONDS)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DOWNLOAD_PROGRAM],
            # leave the GPUs to the training process, and standard error to the progress bar
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the download did not end within {_DOWNLOAD_SECONDS:g} s") from None
    last_line = (done.stdout.splitlines() or ["no message"])[-1]
    if done.returncode:
        raise OSError(f"the download failed ({last_line})")
    return last_line


def _load_sample(why_no_download: str) -> FashionMnist:
    """Loads the images of this package, and warns."""
    data = _load_idx(SAMPLE_FOLDER)
    counts = f"{len(data.train_labels):,} + {len(data.test_labels):,} images"
    logging.warning(
        "THIS IS NOT THE FULL FASHION-MNIST, only the sample bundled in the package (%s of 60,000 + 10,000). Accuracy "
        "will be lower than on the full set. No other copy was found, and it was not downloaded: %s. To get the full "
        "set: (1) on Debian or Ubuntu, apt install dataset-fashion-mnist; or (2) download the four files of "
        "https://github.com/zalandoresearch/fashion-mnist and pass their folder as --data_dir; or (3) run again with "
        "a network (http_proxy is respected), and TensorFlow Datasets downloads it.",
        counts,
        why_no_download,
    )
    return dataclasses.replace(data, source=f"bundled sample ({counts})", is_sample=True)
