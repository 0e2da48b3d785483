"""Looks into a model's file before Keras loads it: it must run no code, and take no more memory than it has bytes."""

import json
import pathlib
import zipfile
from typing import Any

import tensorflow as tf

# What models are made of besides layers, by the names that Keras 2 and 3 write.
_SAFE_CLASSES = {
    *("Functional", "Sequential", "GetItem", "SlicingOpLambda", "GlorotUniform", "HeNormal", "VarianceScaling"),
    *("RandomNormal", "RandomUniform", "TruncatedNormal", "Zeros", "Ones", "DTypePolicy", "Policy", "TensorShape"),
    *("__tensor__", "__numpy__", "__tuple__", "__slice__", "__ellipsis__", "__keras_tensor__"),
}
# These hold code, or files of other frameworks.
_UNSAFE_LAYERS = {"Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper"}


def check(path: pathlib.Path) -> None:
    """Raises ValueError where a model file could run code, or take much more memory than it has bytes.

    Safe mode is not enough: Keras 2.12 has none for HDF5, the format that it writes, and unpickles an .npz member; and
    before Keras 3.9 the module of any object is imported.
    """
    import h5py  # a requirement of Keras

    num_bytes = path.stat().st_size
    if not zipfile.is_zipfile(path):
        with h5py.File(path) as file:
            _check_objects(json.loads(file.attrs["model_config"]))
            _check_weights(file, num_bytes)
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if {member.filename for member in members} != {"metadata.json", "config.json", "model.weights.h5"}:
            raise ValueError(f"it holds the files {[member.filename for member in members][:10]}")
        if sum(member.file_size for member in members) > num_bytes:  # Keras does not compress
            raise ValueError("it holds compressed files")
        config = json.loads(archive.read("config.json"))
        config.pop("compile_config", None)  # the optimizer and so on, which compile=False leaves out
        _check_objects(config)
        with archive.open("model.weights.h5") as stream, h5py.File(stream) as file:
            _check_weights(file, num_bytes)


def _check_objects(value: Any) -> None:
    """Raises ValueError where the configuration of a model names a class that is not loaded."""
    if isinstance(value, dict):
        name, module = value.get("class_name"), value.get("module")
        is_known = (name in _SAFE_CLASSES or _is_layer(name)) and str(module).partition(".")[0] in (
            "keras",
            "tf_keras",
            "builtins",
            "None",
        )
        # Keras 2 has one layer for each operation; this one is x[...]
        if name == "SlicingOpLambda" and value["config"]["function"] != "__operators__.getitem":
            is_known = False
        if name is not None and not is_known:
            raise ValueError(f"it names {name!r} of the module {module!r}, which is not loaded")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_objects(item)


def _is_layer(name: Any) -> bool:
    layer = getattr(tf.keras.layers, name, None) if isinstance(name, str) else None
    return isinstance(layer, type) and issubclass(layer, tf.keras.layers.Layer) and name not in _UNSAFE_LAYERS


def _check_weights(file: Any, num_bytes: int) -> None:
    """Raises ValueError where an open HDF5 file of `num_bytes` promises more numbers than it holds."""
    sizes = []
    file.visititems(lambda _, item: sizes.append(getattr(item, "nbytes", 0)))  # of groups 0
    if sum(sizes) > num_bytes:
        raise ValueError(f"its weights take {sum(sizes)} bytes, but the file has {num_bytes}")
