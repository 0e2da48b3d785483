"""Real processes are killed with SIGKILL: each run must end with the weights of the run that was left alone.

In CI a few kills; in full, 20 on each model:

    FASHION_OCT_KILLS=20 python -m pytest -m slow tests/faults -s
"""

import csv
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import fashion_oct

NUM_KILLS = int(os.environ.get("FASHION_OCT_KILLS", "4"))
SAMPLE = pathlib.Path(fashion_oct.__file__).parent / "data"
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# A process that kills itself in the middle of its n-th write of a file, or of a row of a cache.
DEADLY = """
import os, signal, sys
from fashion_oct import files, row_cache, train

number = int(os.environ["KILL_AT_WRITE"])
def deadly(function):
    def call(*arguments):
        global number
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
if os.environ["KILL_IN"] == "files":
    files.os.fsync = deadly(os.fsync)  # everything is written, nothing is renamed
else:
    row_cache.os.pwrite = deadly(os.pwrite)  # rows of the batch are written, no checksum
train.main()
"""

pytestmark = pytest.mark.slow


def convnet_flags(tmp_path):
    return [f"--data_dir={SAMPLE}", "--global_batch_size=500", "--epochs=2", "--checkpoint_steps=4"]


def vgg16_flags(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 4)):
        for label, name in enumerate(("CNV", "DME", "DRUSEN", "NORMAL")):
            folder = tmp_path / "OCT2017" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60 * (label + 1), (40, 50), np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}-{1000 * label + 100 * (split == 'test') + i}-1.jpeg")
    return [
        "--model=vgg16", f"--data_dir={tmp_path / 'OCT2017'}", "--weights=none", "--image_size=32", "--epochs=4",
        "--global_batch_size=8", "--checkpoint_steps=5",
    ]  # fmt: skip


def start(workdir, flags, kill_in=None, at_write=0):
    program = ["-c", DEADLY] if kill_in else ["-m", "fashion_oct.train"]
    environment = os.environ | {"KILL_IN": kill_in or "", "KILL_AT_WRITE": str(at_write)}
    command = [sys.executable, *program, *flags, f"--workdir={workdir}", f"--cache_dir={workdir}-cache", "--num_gpus=0",
               "--deterministic"]  # fmt: skip
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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


@pytest.mark.parametrize(("model", "num_places"), [("convnet", 2), ("vgg16", 3)])
def test_runs_that_are_killed_end_with_the_same_bits(model, num_places, tmp_path, capsys):
    flags = {"convnet": convnet_flags, "vgg16": vgg16_flags}[model](tmp_path)
    begin = time.monotonic()
    reference = start(tmp_path / "reference", flags)
    _, errors = reference.communicate(timeout=300)
    assert reference.returncode == 0, errors
    seconds, expected = time.monotonic() - begin, result_of(tmp_path / "reference")
    rng, workdir, table = random.Random(0), None, []
    num_runs = 0
    while len(table) < NUM_KILLS:
        workdir = tmp_path / f"run{num_runs}"
        num_runs += 1
        for _ in range(min(4, NUM_KILLS - len(table))):  # kills of one run
            place = ("moment", "files", "rows")[len(table) % num_places]
            if place == "moment":
                process = start(workdir, flags)
                try:
                    process.communicate(timeout=rng.uniform(0.3, 1.0) * seconds)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
            else:
                process = start(workdir, flags, place, at_write=rng.randint(1, 6))
            process.communicate(timeout=300)
            if process.returncode == 0:  # it was done before it was killed
                break
            assert process.returncode == -signal.SIGKILL
            table.append(place)
        process = start(workdir, flags)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert result_of(workdir) == expected
    with capsys.disabled():
        kinds = ", ".join(f"{table.count(kind)} {words}" for kind, words in
                          (("moment", "at a random moment"), ("files", "while a file was written"),
                           ("rows", "while the feature cache was written")) if kind in table)  # fmt: skip
        print(f"\n{model}: tried {len(table)} kills ({kinds}), survived {len(table)}, lost 0")
