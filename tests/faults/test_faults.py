"""Whole runs meet what goes wrong on real machines: they end well after it, or say in one line why not.

Real processes, real files. What each is tried on is said in the table at the end.
"""

import importlib
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import whole_runs
from whole_runs import SAMPLE

pytestmark = pytest.mark.slow

# Trains while the clock goes an hour back at each look, as one that is set back again and again.
CLOCK_GOES_BACK = """
import time
real, looks = time.time, 0
def set_back():
    global looks
    looks += 1
    return real() - 3600 * looks
time.time = set_back
from fashion_oct import train
train.main()
"""


def checkpoints_of(workdir):
    """Returns the checkpoints of a run, the newest last."""
    return sorted(workdir.glob("checkpoints/*.ckpt"))


def wait_for_checkpoint(process, workdir, *, seconds=120):
    """Waits until a run has written a checkpoint."""
    deadline = time.monotonic() + seconds
    while not checkpoints_of(workdir):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def convnet(tmp_path_factory):
    """The result of a run that nothing disturbed, its flags, and the folder of one that SIGTERM stopped."""
    folder = tmp_path_factory.mktemp("convnet")
    flags = whole_runs.convnet_flags(folder)
    whole_runs.finish(whole_runs.start(folder / "reference", flags))
    stopped = whole_runs.start(folder / "stopped", flags)
    wait_for_checkpoint(stopped, folder / "stopped")
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 143, errors
    assert errors.splitlines()[-1] == f"stopped by SIGTERM: to go on, give --workdir={folder / 'stopped'} again"
    return whole_runs.result_of(folder / "reference"), flags, folder / "stopped"


@pytest.fixture
def stopped(convnet, tmp_path):
    """A copy of the folder of the stopped run."""
    return pathlib.Path(shutil.copytree(convnet[2], tmp_path / "run"))


def flip_a_bit(path, *, at):
    """Flips one bit of a file."""
    contents = bytearray(path.read_bytes())
    contents[int(at * len(contents))] ^= 4
    path.write_bytes(contents)


def cut_short(path, *, at):
    """Takes the end of a file away."""
    os.truncate(path, int(at * path.stat().st_size))


def test_sigterm(trying, convnet, stopped):
    expected, flags, _ = convnet
    with trying("SIGTERM"):
        whole_runs.finish(whole_runs.start(stopped, flags))
        assert whole_runs.result_of(stopped) == expected


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short])
@pytest.mark.parametrize("at", [0.001, 0.5, 0.999])
def test_damaged_checkpoint(trying, convnet, stopped, damage, at):
    expected, flags, _ = convnet
    with trying(f"the newest checkpoint: {damage.__name__.replace('_', ' ')}"):
        newest = checkpoints_of(stopped)[-1]
        damage(newest, at=at)
        errors = whole_runs.finish(whole_runs.start(stopped, flags))
        assert str(newest) in errors
        assert whole_runs.result_of(stopped) == expected


def test_full_disk(trying, convnet, stopped):
    """RLIMIT_FSIZE: no file can grow above 300 kB, which is less than a checkpoint has."""
    expected, flags, _ = convnet
    earlier = {path: path.read_bytes() for path in checkpoints_of(stopped)}
    with trying("no room for the next checkpoint (RLIMIT_FSIZE)"):
        process = whole_runs.start(
            stopped, flags, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        )
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert errors.splitlines()[-1].startswith("error: ")
        assert "File too large" in errors
        assert "Traceback" not in errors
        assert {path: path.read_bytes() for path in checkpoints_of(stopped)} == earlier
        assert not list(stopped.rglob("*.tmp*"))
        whole_runs.finish(whole_runs.start(stopped, flags))
        assert whole_runs.result_of(stopped) == expected


def test_second_run_in_the_same_folder(trying, convnet, tmp_path):
    expected, flags, _ = convnet
    with trying("two runs in one folder"):
        first = whole_runs.start(tmp_path / "run", flags)
        wait_for_checkpoint(first, tmp_path / "run")
        first.send_signal(signal.SIGSTOP)  # it is not done before the second one comes, however fast it is
        second = whole_runs.start(tmp_path / "run", flags)
        _, errors = second.communicate(timeout=120)
        first.send_signal(signal.SIGCONT)
        assert second.returncode == 2, errors
        assert str(first.pid) in errors.splitlines()[-1]
        whole_runs.finish(first)
        assert whole_runs.result_of(tmp_path / "run") == expected


def test_clock_set_back(trying, convnet, stopped):
    expected, flags, _ = convnet
    with trying("the clock is set back: files from the future, time.time falls"):
        for path in stopped.rglob("*"):
            os.utime(path, (time.time() + 1e6, time.time() + 1e6))
        whole_runs.finish(whole_runs.start(stopped, flags, program=("-c", CLOCK_GOES_BACK)))
        assert whole_runs.result_of(stopped) == expected
        ledger = json.loads((stopped / "timing.json").read_text())["ledger_seconds"]
        assert all(0 <= seconds < 600 for seconds in ledger.values()), ledger


@pytest.fixture(scope="module")
def vgg16(tmp_path_factory):
    """The folder of a run on cached features that nothing disturbed, and its flags."""
    folder = tmp_path_factory.mktemp("vgg16")
    flags = whole_runs.vgg16_flags(folder)
    whole_runs.finish(whole_runs.start(folder / "reference", flags))
    return folder, flags


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short])
def test_damaged_feature_cache(trying, vgg16, tmp_path, damage):
    folder, flags = vgg16
    with trying(f"the feature cache: {damage.__name__.replace('_', ' ')}"):
        shutil.copytree(folder / "reference-cache", tmp_path / "run-cache")
        (rows,) = (path for path in (tmp_path / "run-cache").rglob("rows*") if path.stat().st_size > 10_000)
        damage(rows, at=0.3)
        whole_runs.finish(whole_runs.start(tmp_path / "run", flags))
        assert whole_runs.result_of(tmp_path / "run") == whole_runs.result_of(folder / "reference")


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short])
@pytest.mark.parametrize("at", [0.01, 0.5, 0.99])
def test_damaged_model_file(trying, convnet, tmp_path, damage, at):
    """Either the model is the same, bit for bit, or evaluate refuses it in one line."""
    reference = convnet[2].parent / "reference"
    workdir = shutil.copytree(reference, tmp_path / "run")
    damage(workdir / "model.keras", at=at)
    with trying(f"model.keras: {damage.__name__.replace('_', ' ')}"):
        command = [sys.executable, "-m", "fashion_oct.evaluate", f"--workdir={workdir}"]
        done = subprocess.run(command, cwd=whole_runs.REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode:
            assert done.returncode == 2, done.stderr
            assert "model.keras" in done.stderr.splitlines()[-1]
            assert "Traceback" not in done.stderr
        else:
            assert whole_runs.result_of(workdir) == convnet[0]


def write(path, contents=b"no such file"):
    """Writes a file and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)
    return path


def oct_folder(folder, *, splits=("train", "test"), contents=None):
    """Writes a small OCT folder, with other contents than a JPEG where they are given; returns it."""
    from PIL import Image

    for number, split in enumerate(splits):
        for name in ("CNV", "NORMAL"):
            path = write(folder / split / name / f"{name}-{number}-1.jpeg", contents or b"")
            if contents is None:
                Image.fromarray(np.full((40, 40), 100 * number, np.uint8)).save(path)
    return folder


def idx_folder(folder, **changes):
    """Writes a copy of the bundled sample with some bytes changed, unpacked; returns it."""
    import gzip

    folder.mkdir()
    for path in SAMPLE.glob("*.gz"):
        contents = gzip.decompress(path.read_bytes())
        kind = "images" if "images" in path.name else "labels"
        (folder / path.name.removesuffix(".gz")).write_bytes(changes.get(kind, lambda same: same)(contents))
    return folder


def tiny_vgg16(folder):
    """Returns the flags of a VGG16 on two images, which it writes."""
    data_dir = oct_folder(folder / "d")
    return ["--model=vgg16", "--image_size=32", "--global_batch_size=2", f"--data_dir={data_dir}", "--epochs=3"]


VGG16 = ("--model=vgg16", "--weights=none", "--image_size=32")

# The kind of bad input: the command, its arguments (made from a temporary folder), a word that its one line must have.
BAD = {
    "a misspelt flag": ("train", lambda folder: ["--modle=vgg16"], "modle"),
    "an argument that is no flag": ("train", lambda folder: ["vgg16"], "vgg16"),
    "an unknown network": ("train", lambda folder: ["--model=resnet"], "convnet|vgg16"),
    "a number that is none": ("train", lambda folder: ["--epochs=two"], "two"),
    "a number below its limit": ("train", lambda folder: ["--steps=0"], "positive"),
    "a number above its limit": ("train", lambda folder: ["--validation_fraction=2"], "0.9"),
    "not a number (nan)": ("train", lambda folder: ["--learning_rate=nan"], "finite"),
    "a null byte": ("train", lambda folder: ["--data_dir=a\0b"], "null"),
    "two sizes of the batch": ("train", lambda f: ["--global_batch_size=8", "--per_replica_batch_size=8"], "one of"),
    "GPUs and virtual devices": ("train", lambda folder: ["--num_gpus=1", "--virtual_devices=2"], "one of the two"),
    "more GPUs than there are": ("train", lambda folder: ["--num_gpus=64"], "--num_gpus=64"),
    "weights for the ConvNet": ("train", lambda folder: ["--weights=imagenet"], "--weights"),
    "a flagfile that is missing": ("train", lambda folder: [f"--flagfile={folder}/none.flags"], "none.flags"),
    "a flagfile that is no text": ("train", lambda f: [f"--flagfile={write(f / 'a.flags', bytes(range(256)))}"], "UTF"),
    "a batch larger than the split": ("train", lambda f: [f"--data_dir={SAMPLE}", "--global_batch_size=7000"], "7000"),
    "a data service that is not there": (
        "train",
        lambda folder: ["--dataset=oct2017", f"--data_dir={oct_folder(folder / 'd')}", "--data_service=localhost:1"],
        "localhost:1",
    ),
    "a data service without a port": ("train", lambda f: ["--dataset=oct2017", "--data_service=here"], "HOST:PORT"),
    "a data folder that is missing": ("train", lambda folder: [f"--data_dir={folder}/none"], "none"),
    "a data folder that is a file": ("train", lambda folder: [f"--data_dir={write(folder / 'file')}"], "file"),
    "an IDX file cut short": (
        "train",
        lambda f: [f"--data_dir={idx_folder(f / 'd', images=lambda b: b[:-1])}"],
        "idx3",
    ),
    "an IDX file of another kind": (
        "train",
        lambda folder: [f"--data_dir={idx_folder(folder / 'd', labels=lambda b: bytes(4) + b[4:])}"],
        "idx1",
    ),
    "an OCT folder without test images": (
        "train",
        lambda folder: [*VGG16, f"--data_dir={oct_folder(folder / 'd', splits=['train'])}"],
        "test",
    ),
    "JPEGs that are none": (
        "train",
        lambda folder: [*VGG16, f"--data_dir={oct_folder(folder / 'd', contents=b'no image')}"],
        ".jpeg",
    ),
    "a class that is not there": (
        "train",
        lambda folder: [*VGG16, f"--data_dir={oct_folder(folder / 'd')}", "--labels=NORMAL,DRUSEN"],
        "DRUSEN",
    ),
    "weights that are missing": ("train", lambda f: [*tiny_vgg16(f), f"--weights={f}/none.h5"], "none.h5"),
    "weights that are no HDF5 file": (
        "train",
        lambda folder: [*tiny_vgg16(folder), f"--weights={write(folder / 'a.h5')}"],
        "a.h5",
    ),
    "a run folder that is a file": ("train", lambda folder: [f"--workdir={write(folder / 'run')}"], "is a file"),
    "a run folder with other files": ("train", lambda f: [f"--workdir={write(f / 'run/thesis.txt').parent}"], "empty"),
    "a run folder of other settings": (
        "train",
        lambda f: [f"--workdir={write(f / 'run/config.json', json.dumps({'config': {'seed': 7}}).encode()).parent}"],
        "seed=0 (there 7)",
    ),
    "a run folder with damaged settings": (
        "train",
        lambda folder: [f"--workdir={write(folder / 'run/config.json', b'{').parent}"],
        "config.json",
    ),
    "a run folder that is none, to evaluate": ("evaluate", lambda folder: [f"--workdir={folder}"], "config.json"),
    "no image to predict": ("predict", lambda folder: [f"--workdir={folder}"], "no "),
    "a format to export that is none": ("export", lambda folder: [f"--workdir={folder}", "--format=pt"], "savedmodel"),
    "no replicas to measure": ("benchmark", lambda folder: ["--replicas=0"], "--replicas=0"),
    "no folder to audit": ("prepare", lambda folder: [f"--data_dir={folder}/none"], "none"),
    "no run to report": ("report", lambda folder: [f"{folder}/none"], "none"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_flag_or_file(trying, kind, tmp_path, monkeypatch, capfd):
    command, arguments, word = BAD[kind]
    with trying("a bad flag or file (one line, status 2, nothing written)"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [command, *arguments(tmp_path)])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(f"fashion_oct.{command}").main()
        errors = [line for line in capfd.readouterr().err.splitlines() if "error: " in line or "Traceback" in line]
        assert stop.value.code == 2, errors
        assert len(errors) == 1
        assert word in errors[0]
        assert sorted(tmp_path.rglob("*")) == before
