"""Models of several workers, which only legacy Keras trains, turned into those of one process and of Keras 3."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import tensorflow as tf

from fashion_oct import building, evaluation, input_pipeline, run_folder
from fashion_oct.errors import RunError, reason_of_failure
from fashion_oct.options import Config


def on_one_device(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a copy of a model of several workers that this worker can use without the others."""
    copy = tf.keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile()  # Keras 2 would warn when it saves
    return copy


def save_as_keras_3(model: tf.keras.Model, workdir: pathlib.Path) -> None:
    """Writes model.keras in the format of Keras 3, for a model of tf-keras, whose own format Keras 3 does not read.

    A process of its own builds the network with Keras 3, on the CPU, and gives it the weights.
    """
    path = workdir / ".weights.tmp.npz"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TF_USE_LEGACY_KERAS", "TF_CONFIG")
    }
    program = f"from fashion_oct import legacy_keras; legacy_keras.convert({str(workdir)!r}, {str(path)!r})"
    try:
        np.savez(path, *model.get_weights())
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {"CUDA_VISIBLE_DEVICES": "-1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.unlink(missing_ok=True)
    if done.returncode:
        raise RunError(f"{workdir / 'model.keras'} cannot be written with Keras 3: {reason_of_failure(done)}")


def convert(workdir: str, weights: str) -> None:
    """Writes the model.keras of a run folder with the Keras of this process; see `save_as_keras_3`.

    Args:
      workdir: of the run, with config.json.
      weights: .npz file of the weights, in the order of `get_weights`.
    """
    settings = evaluation.read_settings(workdir)
    config = dataclasses.replace(Config(**settings["config"]), weights="none")
    dataset = settings["dataset"]
    spec = input_pipeline.DataSpec(tuple(dataset["image_shape"]), tuple(dataset["class_names"]))
    tf.keras.mixed_precision.set_global_policy(settings["plan"]["precision"])
    model = building.build_network(config, spec)
    with np.load(weights) as arrays:  # allow_pickle is False
        model.set_weights([arrays[f"arr_{i}"] for i in range(len(arrays.files))])
    run_folder.save_model(model, pathlib.Path(workdir) / "model.keras")
