"""Opens a prepared TensorFlow Datasets folder without running what it names.

TensorFlow Datasets imports the module of every feature class that features.json or dataset_info.json names, and a
module can lie in the working folder. So the names are checked before.
"""

import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.\w+\.(FeaturesDict|Image|ClassLabel|Text)")


def open_builder(folder: str | os.PathLike, name: str) -> Any:
    """Returns the read-only builder of a version folder, such as fashion_mnist/3.0.1.

    Args:
      folder: holds features.json, dataset_info.json and the records.
      name: the dataset that it must be.

    Raises:
      ValueError: it is another dataset, or has features other than images, labels and text.
      Exception: the folder is damaged; TensorFlow Datasets raises many kinds.
    """
    from tensorflow_datasets import builder_from_directory

    for file in ("features.json", "dataset_info.json"):
        for feature in _feature_classes(json.loads((pathlib.Path(folder) / file).read_text(encoding="utf-8"))):
            if not _FEATURE.fullmatch(feature):
                raise ValueError(f"{file} names the feature class {feature!r}, which is not loaded")
    builder = builder_from_directory(folder)
    if builder.name != name:  # ask before reading: it may be larger than memory
        raise ValueError(f"it holds {builder.name}")
    return builder


def _feature_classes(value: Any) -> Iterator[str]:
    """Yields the names of all feature classes in parsed JSON, and in JSON that its strings hold."""
    if isinstance(value, dict):
        for key in ("pythonClassName", "python_class_name", *(["type"] if "content" in value else [])):
            if key in value:
                yield str(value[key])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _feature_classes(item)
    elif isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            inner = json.loads(value)
        except ValueError:  # no JSON, such as a citation in BibTeX
            return
        yield from _feature_classes(inner)
