"""The datasets by name: where they come from, their splits, and what the run folder says of them.

To add a dataset: one function here that returns `Splits`, and its name in `options.DATASETS`.
"""

import dataclasses
from typing import Any

import numpy as np

from fashion_oct import fashion_mnist
from fashion_oct.errors import InputError
from fashion_oct.input_pipeline import ArrayExamples, DataSpec, Examples

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
    """

    spec: DataSpec
    train: Examples
    validation: Examples | None
    test: Examples
    source: str
    is_sample: bool = False
    urgent_classes: tuple[str, ...] = ()

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
        }


def load(name: str, *, data_dir: str | None = None, validation_fraction: float = 0.0) -> Splits:
    """Loads a dataset.

    Args:
      name: one of `options.DATASETS`.
      data_dir: its folder; None looks in the usual places.
      validation_fraction: the share of the training split to hold out.

    Raises:
      InputError: the data is missing or damaged.
    """
    if name == "fashion_mnist":
        return _load_fashion_mnist(data_dir, validation_fraction)
    raise InputError(f"--dataset={name}: not known")


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


def stratified_hold_out(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask [N]: `fraction` of the examples of each class, rounded, the same ones every time."""
    random = np.random.default_rng(_HOLD_OUT_SEED)
    is_held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        is_held_out[random.permutation(of_class)[: round(fraction * len(of_class))]] = True
    return is_held_out
