"""The datasets by name: where they come from, their splits, and what the run folder says of them.

To add a dataset: one function here that returns `Splits`, and its name in `options.DATASETS`.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fashion_oct import fashion_mnist, oct_folder, tfds_folder
from fashion_oct.errors import InputError
from fashion_oct.input_pipeline import ArrayExamples, DataSpec, Examples, FileExamples, decode_image

_HOLD_OUT_SEED = 2018  # the held-out part is the same for every --seed, so that seeds can be compared


@dataclasses.dataclass(frozen=True)
class Splits:
    """The splits of a dataset.

    Attributes:
      spec: what a model needs to know.
      train: the training split, without what is held out.
      validation: what is held out of the training split; None without --validation_fraction.
      test: the test split.
      source: where the images came from, in words.
      is_sample: says that this is not the full dataset.
      urgent_classes: classes to be told from the rest in the test report; for most datasets none.
      test_files: the file name of each test image, where images are files.
      test_patients: the patient of each test image, where that is known.
      find_leaks: says which test images share a patient, or their pixels, with the training split: bool [N]; where
        patients are known. It decodes both splits, so it is called once, for the report.
      bad: file and reason of each image that was left out because it cannot be used.
    """

    spec: DataSpec
    train: Examples
    validation: Examples | None
    test: Examples
    source: str
    is_sample: bool = False
    urgent_classes: tuple[str, ...] = ()
    test_files: list[str] | None = None
    test_patients: list[str] | None = None
    find_leaks: Callable[[], np.ndarray] | None = None
    bad: tuple[tuple[str, str], ...] = ()

    def describe(self) -> dict[str, Any]:
        """Returns the dataset's entry of config.json."""
        return {
            "source": self.source,
            "is_sample": self.is_sample,
            "num_train": len(self.train),
            "num_validation": 0 if self.validation is None else len(self.validation),
            "num_test": len(self.test),
            "image_shape": list(self.spec.image_shape),
            "class_names": list(self.spec.class_names),
            "bad_images": [list(pair) for pair in self.bad],
        }


def load(
    name: str,
    *,
    data_dir: str | None = None,
    validation_fraction: float = 0.0,
    bad_images: str = "error",
    image_size: int = 224,
    labels: str | None = None,
) -> Splits:
    """Loads a dataset.

    Args:
      name: one of `options.DATASETS`.
      data_dir: its folder, for oct2017 also one that `prepare --shards` wrote; None looks in the usual places.
      validation_fraction: the share of the training split to hold out.
      bad_images: "error" or "skip": what to do with files that cannot be used, of datasets that are files.
      image_size: pixels a side, of datasets whose images differ in size.
      labels: class names in the order of the labels, with commas, of datasets whose classes are folders.

    Raises:
      InputError: the data is missing or damaged.
    """
    if name == "fashion_mnist":
        return _load_fashion_mnist(data_dir, validation_fraction)
    class_names = tuple(labels.split(",")) if labels else None
    return _load_oct2017(data_dir, validation_fraction, bad_images, image_size, class_names)


def _load_fashion_mnist(data_dir: str | None, validation_fraction: float) -> Splits:
    data = fashion_mnist.load(data_dir)
    is_held_out = stratified_hold_out(data.train_labels, validation_fraction)
    train, validation = data.train_images, None
    labels = data.train_labels
    if is_held_out.any():
        validation = ArrayExamples(train[is_held_out], labels[is_held_out])
        train, labels = train[~is_held_out], labels[~is_held_out]
    _, height, width, channels = train.shape
    return Splits(
        spec=DataSpec(image_shape=(height, width, channels), class_names=fashion_mnist.CLASS_NAMES),
        train=ArrayExamples(train, labels),
        validation=validation,
        test=ArrayExamples(data.test_images, data.test_labels),
        source=data.source,
        is_sample=data.is_sample,
    )


def _load_oct2017(
    data_dir: str | None,
    validation_fraction: float,
    bad_images: str,
    image_size: int,
    class_names: tuple[str, ...] | None,
) -> Splits:
    if data_dir is None:
        raise InputError(f"--data_dir is missing, the folder of OCT2017. {oct_folder.WAYS_TO_GET_THE_DATA}")
    train, train_examples = _list_oct2017(data_dir, "train", class_names=class_names)
    test, test_examples = _list_oct2017(data_dir, "test", class_names=train.class_names)
    if bad_images == "error":
        oct_folder.refuse_bad(train)
        oct_folder.refuse_bad(test)
    is_held_out = np.zeros(len(train.paths), bool)
    if validation_fraction:
        is_held_out = oct_folder.group_split(
            train.patients, train.labels, fraction=validation_fraction, seed=_HOLD_OUT_SEED
        )
    image_shape = (image_size, image_size, 1)
    has_files = _find_prepared(data_dir) is None  # the pixels of records are not compared, only patients
    return Splits(
        spec=DataSpec(image_shape=image_shape, class_names=train.class_names),
        train=train_examples(np.flatnonzero(~is_held_out), image_shape),
        validation=train_examples(np.flatnonzero(is_held_out), image_shape) if is_held_out.any() else None,
        test=test_examples(np.arange(len(test.paths)), image_shape),
        source=f"OCT2017 {'folder' if has_files else 'shards'} {data_dir}",
        urgent_classes=tuple(name for name in ("CNV", "DME") if name in train.class_names),
        test_files=[os.path.basename(path) for path in test.paths],
        test_patients=test.patients,
        find_leaks=functools.partial(oct_folder.leakage, train, test, pixels=has_files and _has_pillow()),
        bad=(*train.bad, *test.bad),
    )


def _has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def _list_oct2017(
    data_dir: str, name: str, *, class_names: Sequence[str] | None = None
) -> tuple[oct_folder.Split, Callable[[np.ndarray, tuple[int, int, int]], Examples]]:
    """Lists a split and gives what makes examples of some of its images, from their numbers and the image shape."""
    folder = _find_prepared(data_dir)
    if folder is None:
        split = oct_folder.list_split(data_dir, name, class_names=class_names)
    else:
        split, source, records = _open_prepared(folder, name)

    def examples(chosen, image_shape):
        arguments = [split.paths[i] for i in chosen], split.labels[chosen], image_shape
        if folder is None:
            return FileExamples(*arguments)
        return RecordExamples(*arguments, source=source, records=records[chosen])

    return split, examples


def _open_prepared(folder: str, name: str) -> tuple[oct_folder.Split, Sequence[bytes], np.ndarray]:
    """Returns a split of a prepared dataset, the source of its records, and the position of each image in that."""
    import tensorflow_datasets as tfds

    try:
        builder = tfds_folder.open_builder(folder, "oct2017")
        columns = builder.info.metadata[name]
        _check_columns(columns, builder.info.features["label"].num_classes, builder.info.splits[name].num_examples)
        split = oct_folder.Split(
            paths=[os.path.join(folder, name, file_name) for file_name in columns["file_name"]],  # for messages
            labels=np.array(columns["label"], np.int32),
            patients=columns["patient"],
            class_names=tuple(builder.info.features["label"].names),
            bad=[tuple(pair) for pair in columns["bad"]],
            stray=[],
        )
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        source = builder.as_data_source(name, deserialize_method=raw, file_format="array_record")
        return split, source, np.array(columns["record"])
    except Exception as error:  # TensorFlow Datasets raises many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # in one line
        raise InputError(
            f"{folder} cannot be read as a prepared oct2017 ({reason}); build it with "
            "`prepare --shards`, or `tfds build --file_format=array_record`"
        ) from error


def _check_columns(columns: dict[str, list], num_classes: int, num_records: int) -> None:
    """Raises ValueError where the columns of a prepared split cannot be those of its records."""
    num_images = len(columns["file_name"])
    for name, limit in (("label", num_classes), ("record", num_records)):
        if len(columns[name]) != num_images or not set(columns[name]) <= set(range(limit)):
            raise ValueError(f"the {name}s in metadata.json are not {num_images} numbers below {limit}")
    for name in ("file_name", "patient"):
        if len(columns[name]) != num_images or not all(os.path.basename(text) == text for text in columns[name]):
            raise ValueError(f"the {name}s in metadata.json are not {num_images} names")


def _find_prepared(data_dir: str) -> str | None:
    """Finds the version folder of a prepared oct2017: `data_dir`, or the newest one in it or in its folder oct2017."""
    for version in ("", "[0-9]*/", "oct2017/[0-9]*/"):
        if found := sorted(pathlib.Path(data_dir).glob(f"{version}dataset_info.json")):
            return os.path.abspath(found[-1].parent)
    return None


class RecordExamples(FileExamples):
    """Files that lie in the records of a prepared dataset, read in any order.

    Args:
      paths: N names, for messages: the folder of the prepared dataset, the split and the file.
      labels: integers [N], from 0.
      image_shape: (height, width, channels) to decode and resize to.
      source: gives the serialized tf.train.Examples at a list of positions as `source.__getitems__(positions)`.
      records: integers [N], the position of each example.
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: np.ndarray,
        image_shape: tuple[int, int, int],
        *,
        source: Any,
        records: np.ndarray,
    ):
        super().__init__(paths, labels, image_shape)
        self.source, self.records = source, records

    @property
    def identity(self) -> str:
        """A hash that tells these images, in this order, from all others (for `image_cache`)."""
        status = os.stat(pathlib.Path(self.paths[0]).parents[1] / "metadata.json")  # each build writes it anew
        entry = [status.st_size, status.st_mtime_ns, self.image_shape, self.paths]
        return hashlib.sha256(json.dumps(entry).encode()).hexdigest()

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`."""
        with tf.device("CPU:0"):
            labels = tf.constant(self.labels)

        def read(index):
            try:
                records = self.source.__getitems__(self.records[index].tolist())
            except Exception as error:  # as TensorFlow tells of a file that does not decode
                raise ValueError(f"damaged records ({error})") from error
            if any(record.count(b"\xff\xda") > oct_folder.MAX_SCANS for record in records):
                raise ValueError("a JPEG has too many scans")  # see MAX_SCANS: decoding it could take hours
            return np.array(records, object)

        def load(index):  # Python once a batch; the rest of the pipeline runs in TensorFlow
            records = tf.ensure_shape(tf.numpy_function(read, [index], tf.string), [None])
            features = tf.io.parse_example(records, {"image": tf.io.FixedLenFeature([], tf.string)})
            return features["image"], tf.gather(labels, index)

        def decode(contents, label):
            return decode_image(contents, self.image_shape), label

        encoded = indices.map(load, num_parallel_calls=tf.data.AUTOTUNE).unbatch()
        return encoded.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size)


def stratified_hold_out(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask [N]: `fraction` of the examples of each class, rounded, the same ones every time."""
    random = np.random.default_rng(_HOLD_OUT_SEED)
    is_held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        is_held_out[random.permutation(of_class)[: round(fraction * len(of_class))]] = True
    return is_held_out
