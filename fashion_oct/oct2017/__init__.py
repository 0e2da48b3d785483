"""The TensorFlow Datasets builder `oct2017`; importing this package registers it."""

from .oct2017_dataset_builder import Builder  # relative: `tfds build` imports this folder as the package oct2017

__all__ = ["Builder"]
