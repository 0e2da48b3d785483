"""The datasets by name: where they come from, their splits, and what the run folder says of them.

To add a dataset: one function here that returns `Splits`, and its name in `options.DATASETS`.
"""

import dataclasses
import os
from typing import Any

import numpy as np

from fashion_oct import fashion_mnist, oct_folder
from fashion_oct.errors import InputError
from fashion_oct.input_pipeline import ArrayExamples, DataSpec, Examples, FileExamples

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
      test_is_leaked: bool, says which test images are of patients of the training split; where patients are known.
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
    test_is_leaked: np.ndarray | None = None
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
) -> Splits:
    """Loads a dataset.

    Args:
      name: one of `options.DATASETS`.
      data_dir: its folder; None looks in the usual places.
      validation_fraction: the share of the training split to hold out.
      bad_images: "error" or "skip": what to do with files that cannot be used, of datasets that are files.
      image_size: pixels a side, of datasets whose images differ in size.

    Raises:
      InputError: the data is missing or damaged.
    """
    if name == "fashion_mnist":
        return _load_fashion_mnist(data_dir, validation_fraction)
    return _load_oct2017(data_dir, validation_fraction, bad_images, image_size)


def _load_fashion_mnist(data_dir: str | None, validation_fraction: float) -> Splits:
    data = fashion_mnist.load(data_dir)
    is_held_out = stratified_hold_out(data.train_labels, validation_fraction)
    train, validation = data.train_images, None
    labels = data.train_labels
    if is_held_out.any():
        validation = ArrayExamples(train[is_held_out], labels[is_held_out])
        train, labels = train[~is_held_out], labels[~is_held_out]
    return Splits(
        spec=DataSpec(image_shape=train.shape[1:], class_names=fashion_mnist.CLASS_NAMES),
        train=ArrayExamples(train, labels),
        validation=validation,
        test=ArrayExamples(data.test_images, data.test_labels),
        source=data.source,
        is_sample=data.is_sample,
    )


def _load_oct2017(data_dir: str | None, validation_fraction: float, bad_images: str, image_size: int) -> Splits:
    if data_dir is None:
        raise InputError(f"--data_dir is missing, the folder of OCT2017. {oct_folder.WAYS_TO_GET_THE_DATA}")
    train = oct_folder.list_split(data_dir, "train")
    test = oct_folder.list_split(data_dir, "test", class_names=train.class_names)
    if bad_images == "error":
        oct_folder.refuse_bad(train)
        oct_folder.refuse_bad(test)
    is_held_out = np.zeros(len(train.paths), bool)
    if validation_fraction:
        is_held_out = oct_folder.group_split(
            train.patients, train.labels, fraction=validation_fraction, seed=_HOLD_OUT_SEED
        )
    image_shape = (image_size, image_size, 1)

    def examples(split, chosen):
        return FileExamples([split.paths[i] for i in np.flatnonzero(chosen)], split.labels[chosen], image_shape)

    return Splits(
        spec=DataSpec(image_shape=image_shape, class_names=train.class_names),
        train=examples(train, ~is_held_out),
        validation=examples(train, is_held_out) if is_held_out.any() else None,
        test=examples(test, np.ones(len(test.paths), bool)),
        source=f"OCT2017 folder {data_dir}",
        urgent_classes=tuple(name for name in ("CNV", "DME") if name in train.class_names),
        test_files=[os.path.basename(path) for path in test.paths],
        test_patients=test.patients,
        test_is_leaked=oct_folder.leakage(train, test),
        bad=(*train.bad, *test.bad),
    )


def stratified_hold_out(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask [N]: `fraction` of the examples of each class, rounded, the same ones every time."""
    random = np.random.default_rng(_HOLD_OUT_SEED)
    is_held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        is_held_out[random.permutation(of_class)[: round(fraction * len(of_class))]] = True
    return is_held_out
