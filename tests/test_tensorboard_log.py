"""What is written can be read by TensorBoard's own reader."""

import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest
from ports import free_ports

from fashion_oct import options, training

SAMPLE = pathlib.Path(training.__file__).parent / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tensorboard") / "run"
    config = options.Config(
        data_dir=str(SAMPLE), workdir=str(workdir), num_gpus=0, per_replica_batch_size=500, epochs=2, tensorboard=True
    )
    assert training.run(config) == 0
    return workdir / "tensorboard"


def read(folder):
    """Returns the tags of a log folder by kind."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def test_the_curves_of_training_are_there(folder):
    log = read(folder / "train")
    tags = set(log.Tags()["tensors"])
    assert {"epoch_loss", "epoch_accuracy", "epoch_images_per_second", "learning_rate", "step_seconds_p99"} <= tags
    assert [event.step for event in log.Tensors("learning_rate")] == [0, 1]


def test_the_settings_and_the_test_report_are_there(folder):
    tags = set(read(folder / "test").Tags()["tensors"])
    assert {"test_accuracy", "test_loss", "confusion_matrix", "roc", "mistakes"} <= tags
    assert any("hparams" in tag for tag in tags)


@pytest.mark.slow
def test_tensorboard_shows_the_run_in_a_browser(folder, tmp_path):
    """The page of TensorBoard itself, in a headless Chromium; its picture is looked at by people (docs)."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={folder.parent}", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(port)
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            options += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--window-size=1280,1600"]
            page = f"http://localhost:{port}/?darkMode=false#timeseries"
            shown = subprocess.run(
                [chromium, *options, "--dump-dom", page], check=False, capture_output=True, text=True, timeout=120
            )
        finally:
            server.terminate()
    assert "epoch_accuracy" in shown.stdout, shown.stderr
    assert "confusion_matrix" in shown.stdout


def wait_for(port, *, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("localhost", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
