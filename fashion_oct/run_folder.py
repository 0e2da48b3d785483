"""The run folder: chosen, told from those of other runs, and described by config.json and flags.txt."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

import fashion_oct
from fashion_oct import files
from fashion_oct.errors import InputError
from fashion_oct.options import Config

LAST_FILE = "timing.json"  # a run that has written it is finished

# Settings that a run may go on with after a change: they leave its result as it is.
_MAY_CHANGE = {
    *(
        "workdir",
        "cluster",
        "data_service",
        "cache",
        "cache_dir",
        "cache_limit_gb",
        "checkpoint_steps",
        "keep_checkpoints",
        "profile",
    ),
    *("tensorboard", "on_nan"),
}


def choose(config: Config) -> pathlib.Path:
    """Returns the run folder to write: a new one, or that of the same run, to go on. Makes nothing.

    Raises:
      InputError: it is a file, belongs to another run, or cannot be written.
    """
    name = f"{config.dataset}_{config.model}_{time.strftime('%Y%m%d-%H%M%S')}"
    workdir = pathlib.Path(config.workdir) if config.workdir else pathlib.Path("runs") / name
    if workdir.exists() and not workdir.is_dir():
        raise InputError(f"--workdir={workdir} is a file: give a new or an empty folder")
    parent = next(folder for folder in (workdir, *workdir.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"--workdir={workdir} cannot be made, {parent} is not a writable folder: give another place")
    if (workdir / "config.json").exists():
        _refuse_other_settings(workdir, config)
    elif workdir.is_dir() and any(path.is_file() and not _is_ours(path) for path in workdir.rglob("*")):
        raise InputError(
            f"--workdir={workdir} is not empty and holds no run to go on with: give a new or an empty folder"
        )
    return workdir


def lasting_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that decide the result of a run."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _MAY_CHANGE}


def is_finished(workdir: pathlib.Path) -> bool:
    """Says whether a run folder holds a run that has ended."""
    return (workdir / LAST_FILE).exists()


def write_settings(workdir: pathlib.Path, config: Config, plan: dict[str, Any], dataset: dict[str, Any]) -> None:
    """Writes config.json (every resolved setting, versions, devices, data) and flags.txt (repeats the run).

    Where they are there already, looks whether the run may go on.

    Raises:
      InputError: they are those of another run, or the data or the devices have changed.
    """
    settings = {
        "config": dataclasses.asdict(config),
        "plan": plan,
        "dataset": dataset,
        "versions": {
            "fashion_oct": fashion_oct.__version__,
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras_version(),
            "numpy": np.__version__,
        },
        "host": {"machine": platform.machine(), "num_cpus": os.cpu_count()},
    }
    if (workdir / "config.json").exists():
        _refuse_other_settings(workdir, config)
        stored = _read(workdir)
        _refuse_others(workdir, stored.get("dataset", {}), json.loads(json.dumps(dataset)), "data")
        _refuse_others(workdir, stored.get("plan", {}), json.loads(json.dumps(plan)), "plan")
        if stored["versions"] != settings["versions"]:
            logging.warning("the run began with %s, it goes on with other versions", stored["versions"])
        return
    with files.replacing(workdir / "flags.txt") as stream:
        stream.write(f"# repeats this run: python -m fashion_oct.train --flagfile=flags.txt\n{config.to_flags()}")
    files.write_json(workdir / "config.json", settings)


def keras_version() -> str:
    """Returns the version of `tf.keras`."""
    # by the package that it is: `tf.keras.__version__` is missing in TensorFlow 2.13 to 2.15 and in tf-keras
    return importlib.metadata.version(tf.keras.Model.__module__.partition(".")[0])


def save_model(model: tf.keras.Model, path: pathlib.Path) -> None:
    """Saves the whole model in Keras' format, atomically."""
    temporary = path.with_name(f".{path.stem}.tmp.keras")  # Keras wants the suffix
    try:
        model.save(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_ours(path: pathlib.Path) -> bool:
    """Says whether a run that was killed before it wrote config.json can have left this file."""
    return path.name in ("lock", "flags.txt") or (path.name.startswith(".") and ".tmp" in path.name)


def _refuse_other_settings(workdir: pathlib.Path, config: Config) -> None:
    defaults = dataclasses.asdict(Config())  # for settings that the version that began the run did not have
    stored = {**defaults, **_read(workdir).get("config", {})}
    _refuse_others(workdir, stored, lasting_settings(config), "settings")


def _refuse_others(workdir: pathlib.Path, stored: dict, given: dict, what: str) -> None:
    differing = [
        f"{name}={given[name]} (there {stored.get(name)})" for name in given if stored.get(name) != given[name]
    ]
    if differing:
        raise InputError(
            f"--workdir={workdir} belongs to a run with other {what}: {', '.join(differing)}; "
            "give these as there to go on, or another --workdir"
        )


def _read(workdir: pathlib.Path) -> dict:
    try:
        return json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{workdir / 'config.json'} cannot be read ({error}): give another --workdir") from error
