"""What a command says before it begins: nothing, or that there is a GPU which TensorFlow does not see."""

import fnmatch
import subprocess
import sys

import pytest

from fashion_oct import distribution, quiet


def test_import_tensorflow_writes_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    program = "from fashion_oct import quiet; quiet.import_tensorflow(); import tensorflow as tf; tf.constant(1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(
    ("node", "num_visible", "hidden", "is_named"),
    [
        ("nvidia0", 0, None, True),
        ("nvidia0", 1, None, False),  # all is well
        ("nvidia0", 0, "-1", False),  # the user does not want it
        ("nvidia0", 0, "", False),
        ("nvidia0", 0, "0", True),
        (None, 0, None, False),
    ],
)
def test_import_tensorflow_names_a_gpu_that_it_does_not_see(
    node, num_visible, hidden, is_named, tmp_path, monkeypatch, caplog
):
    if node:
        (tmp_path / node).touch()
    monkeypatch.setattr(quiet, "_GPU_NODES", (f"{tmp_path}/nvidia[0-9]*",))
    monkeypatch.setattr(distribution, "num_visible_gpus", lambda: num_visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    quiet.import_tensorflow()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == is_named
    assert not is_named or (str(tmp_path / node) in warnings[0] and "tensorflow[and-cuda]" in warnings[0])


@pytest.mark.parametrize(
    ("line", "is_note"),
    [
        ("I0000 00:00:1.2 3 port.cc:153] oneDNN custom operations are on.", True),
        ("2026-11-30 01:02:03.4: I tensorflow/core/util/port.cc:113] oneDNN", True),
        ("2026-11-30 01:02:03.4: W tensorflow/tsl/framework/cpu_allocator.cc:82] Allocation exceeds 10%", False),
        ("E0000 00:00:1.2 3 cuda_platform.cc:51] failed call to cuInit: CUDA_ERROR_NO_DEVICE", True),
        ("E0000 00:00:1.2 3 cuda_dnn.cc:8579] Unable to register cuDNN factory", False),
        ("Traceback (most recent call last):", False),
    ],
)
def test_is_note_tells_notes_from_what_matters(line, is_note, monkeypatch):
    monkeypatch.setattr(quiet, "_GPU_NODES", ())
    assert quiet._is_note(line) is is_note


def test_a_failed_cuinit_is_told_where_there_is_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(quiet, "_GPU_NODES", (f"{tmp_path}/nvidia[0-9]*",))
    assert not quiet._is_note("E0000 00:00:1.2 3 cuda_platform.cc:51] failed call to cuInit: UNKNOWN ERROR (303)")


@pytest.mark.parametrize(
    ("node", "is_of_a_gpu"),
    [("nvidia0", True), ("nvidiactl", True), ("nvidia-uvm", True), ("dxg", True), ("null", False), ("nvme0", False)],
)
def test_any_node_of_a_gpu_s_driver_counts(node, is_of_a_gpu):  # a container may lack /dev/nvidia0, and cuInit says why
    assert any(fnmatch.fnmatch(f"/dev/{node}", pattern) for pattern in quiet._GPU_NODES) is is_of_a_gpu
