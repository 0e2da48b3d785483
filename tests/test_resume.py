"""A run that is stopped or killed goes on, and ends where it would have ended."""

import csv
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fashion_oct import checkpoints, evaluation, options, progress, run_folder, training
from fashion_oct.errors import InputError, RunError

SAMPLE = pathlib.Path(training.__file__).parent / "data"  # 6,000 + 1,000 real images


def config_of(workdir, **settings):
    defaults = {"global_batch_size": 500, "epochs": 3, "validation_fraction": 0.1, "num_gpus": 0}  # 11 steps an epoch
    settings = {"data_dir": str(SAMPLE), **defaults, **settings}
    return options.Config(workdir=str(workdir), per_replica_batch_size=None, **settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert training.run(config_of(workdir)) == 0
    return workdir


def stop_at(monkeypatch, step, error=None):
    """Has a signal, or an error, come in the step."""
    original = progress.Progress.on_train_batch_end

    def on_train_batch_end(self, batch, logs=None):
        if self.step + 1 == step:
            if error:
                raise error
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, batch, logs)

    monkeypatch.setattr(progress.Progress, "on_train_batch_end", on_train_batch_end)


def weights_of(workdir):
    return evaluation.load_model(workdir).get_weights()


def history_of(workdir):
    with open(workdir / "history.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return [{name: value for name, value in row.items() if name != "images_per_second"} for row in rows]


def assert_same_run(one, other):
    for weights, expected in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_array_equal(weights, expected)
    assert history_of(one) == history_of(other)
    reports = [json.loads((workdir / "evaluation.json").read_text()) for workdir in (one, other)]
    assert reports[0] == reports[1]


def test_a_run_that_was_stopped_ends_with_the_same_bits(undisturbed, tmp_path, monkeypatch, capsys):
    for step in (5, 11, 12, 16, 32):  # 11 is the end of an epoch, 33 that of the run
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            assert training.run(config_of(tmp_path / "run")) == 128 + signal.SIGTERM
        assert f"stopped by SIGTERM: to go on, give --workdir={tmp_path / 'run'} again" in capsys.readouterr().err
        assert checkpoints.Checkpoints(tmp_path / "run" / "checkpoints", keep=1).steps()[-1] == step
        assert not (tmp_path / "run" / "timing.json").exists()
    assert training.run(config_of(tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", undisturbed)
    timing = json.loads((tmp_path / "run" / "timing.json").read_text())
    assert timing["num_steps"] == 33
    # the first step of each fit: 0-5, 5-11, 11-12, 12-16, 16-22 and 22-32, 32-33
    assert timing["num_discarded_steps"] == 7
    sum_of_parts = timing["total_seconds"] + timing["validation_seconds"] + timing["other_seconds"]
    assert sum_of_parts == pytest.approx(timing["fit_seconds"])
    ledger = timing["ledger_seconds"]
    assert ledger["steps"] + ledger["tracing"] == pytest.approx(timing["total_seconds"])
    assert ledger["validation"] == pytest.approx(timing["validation_seconds"])
    assert all(seconds >= -1e-6 for seconds in ledger.values())
    of_fit = sum(ledger[name] for name in ("tracing", "steps", "validation", "checkpoints", "fit, other"))
    assert timing["fit_seconds"] == pytest.approx(of_fit, abs=2.0)


def test_a_run_goes_on_from_the_last_checkpoint_after_a_crash(undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 20, error=ZeroDivisionError())  # the last checkpoint is that of step 16
        with pytest.raises(ZeroDivisionError):
            training.run(config_of(tmp_path / "run", checkpoint_steps=8))
    assert training.run(config_of(tmp_path / "run", checkpoint_steps=8)) == 0
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_finished_run_says_so_and_is_left_alone(undisturbed, capsys):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    assert training.run(config_of(undisturbed)) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


def test_a_run_with_other_settings_is_refused_and_they_are_named(undisturbed):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    with pytest.raises(InputError, match=r"epochs=4 \(there 3\), seed=7 \(there 0\)"):
        training.run(config_of(undisturbed, epochs=4, seed=7))
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


def test_settings_that_do_not_change_the_result_may_change(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed, workdir)
    (workdir / run_folder.LAST_FILE).unlink()  # killed just before its end
    assert training.run(config_of(workdir, keep_checkpoints=5, cache_dir=str(tmp_path))) == 0
    assert_same_run(workdir, undisturbed)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty and holds no run"):
        training.run(config_of(tmp_path))
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_other_data_in_the_same_place_is_refused(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed, workdir)
    (workdir / run_folder.LAST_FILE).unlink()
    settings = json.loads((workdir / "config.json").read_text())
    settings["dataset"]["num_train"] = 5000
    (workdir / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"other data: num_train=5400 \(there 5000\)"):
        training.run(config_of(workdir))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(undisturbed, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        stop_at(patch, 26)
        training.run(config_of(tmp_path / "run"))
    newest = tmp_path / "run" / "checkpoints" / "00000026.ckpt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    assert training.run(config_of(tmp_path / "run")) == 0
    assert any("00000026.ckpt is damaged" in record.getMessage() for record in caplog.records)
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    workdir = tmp_path / "run"
    with checkpoints.lock_workdir(workdir), pytest.raises(InputError, match="is in use by another run"):
        training.run(config_of(workdir))


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    config = config_of(tmp_path / "run", learning_rate=1e20, checkpoint_steps=1)
    with pytest.raises(RunError, match=r"the loss is (nan|inf) at step \d+: lower --learning_rate"):
        training.run(config)
    assert not (tmp_path / "run" / "model.keras").exists()


def test_the_best_by_validation_is_kept(tmp_path):
    training.run(config_of(tmp_path / "run", epochs=5, keep_checkpoints=1, learning_rate=0.01, lr_schedule="constant"))
    accuracies = [float(row["val_accuracy"]) for row in history_of(tmp_path / "run")]
    best = 11 * (int(np.argmax(accuracies)) + 1)
    assert checkpoints.Checkpoints(tmp_path / "run" / "checkpoints", keep=1).steps() == sorted({best, 55})


def start(workdir, *flags):
    command = [
        sys.executable, "-m", "fashion_oct.train", f"--data_dir={SAMPLE}", f"--workdir={workdir}", "--epochs=1000",
        "--num_gpus=0", "--global_batch_size=500", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (workdir / "history.csv").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_with_a_checkpoint_and_one_line(tmp_path, number, status):
    workdir = tmp_path / "run"
    process = start(workdir)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    lines = [line for line in errors.splitlines() if not line.startswith("INFO")]
    assert lines == [f"stopped by {number.name}: to go on, give --workdir={workdir} again"]
    assert checkpoints.Checkpoints(workdir / "checkpoints", keep=1).newest().step >= 12


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(tmp_path):
    process = start(tmp_path / "run")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.0005)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 143)  # 143 where the first was done before the second came
