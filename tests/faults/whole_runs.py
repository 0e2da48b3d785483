"""Whole runs in real processes, for the tests beside this file."""

import csv
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import tensorflow as tf

import fashion_oct

SAMPLE = pathlib.Path(fashion_oct.__file__).parent / "data"
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def convnet_flags(folder):
    """Returns the flags of a ConvNet that takes 24 steps, with a checkpoint every 4."""
    return [f"--data_dir={SAMPLE}", "--global_batch_size=500", "--epochs=2", "--checkpoint_steps=4"]


def vgg16_flags(folder):
    """Returns the flags of a small VGG16 that takes 40 steps on cached features, and writes the images."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 4)):
        for label, name in enumerate(("CNV", "DME", "DRUSEN", "NORMAL")):
            place = folder / "OCT2017" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60 * (label + 1), (40, 50), np.uint8)
                Image.fromarray(pixels).save(place / f"{name}-{1000 * label + 100 * (split == 'test') + i}-1.jpeg")
    return [
        "--model=vgg16", f"--data_dir={folder / 'OCT2017'}", "--weights=none", "--image_size=32", "--epochs=4",
        "--global_batch_size=8", "--checkpoint_steps=5",
    ]  # fmt: skip


def start(workdir, flags, *, program=("-m", "fashion_oct.train"), environment=None, **arguments):
    """Starts a run with a feature cache of its own."""
    command = [sys.executable, *program, *flags, f"--workdir={workdir}", f"--cache_dir={workdir}-cache", "--num_gpus=0",
               "--deterministic"]  # fmt: skip
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **arguments,
    )


def finish(process):
    """Waits for a run, which must not fail, and returns its standard error."""
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def result_of(workdir):
    """Returns the hash of the trained weights, the history without its speeds, and the report."""
    digest = hashlib.sha256()
    for weights in tf.keras.models.load_model(workdir / "model.keras", compile=False).get_weights():
        digest.update(np.ascontiguousarray(weights))
    with open(workdir / "history.csv", newline="") as stream:
        rows = [{k: v for k, v in row.items() if k != "images_per_second"} for row in csv.DictReader(stream)]
    report = json.loads((workdir / "evaluation.json").read_text())
    num_steps = json.loads((workdir / "timing.json").read_text())["num_steps"]
    return digest.hexdigest(), rows, report, num_steps
