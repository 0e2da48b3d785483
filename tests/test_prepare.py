"""The prepare command: its flags, what it prints and writes, its exit status."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

from fashion_oct import datasets, prepare
from fashion_oct.errors import InputError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def small_set(tmp_path):
    """Two classes, five patients each, all in train but the last, which is in both splits."""
    for number, name in enumerate(("CNV", "NORMAL")):
        for patient in range(5):
            for split in ("train", "test") if patient == 4 else ("train",):
                folder = tmp_path / "OCT2017" / split / name
                folder.mkdir(parents=True, exist_ok=True)
                seed = [number, patient, split == "test"]
                pixels = np.random.default_rng(seed).integers(0, 256, (16, 24), dtype=np.uint8)
                index = 2 if split == "test" else 1
                Image.fromarray(pixels).save(folder / f"{name}-{10 * number + patient}-{index}.jpeg")
    return tmp_path / "OCT2017"


def run(*arguments):
    values = flags.FlagValues()
    prepare.define_flags(values)
    return prepare.run(values, values(["prepare", *map(str, arguments)])[1:])


def run_process(*arguments, **run_args):
    command = [sys.executable, "-m", "fashion_oct.prepare", *map(str, arguments)]
    root = os.path.dirname(os.path.dirname(prepare.__file__))
    environment = os.environ | {"PYTHONPATH": root}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **run_args)


def test_run_prints_the_audit_and_writes_it(small_set, tmp_path, capsys):
    run(f"--data_dir={small_set}", f"--out={tmp_path / 'audit'}")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{small_set}: 12 images, 12 of them usable"
    assert printed[1] == "  train: CNV 5, NORMAL 5 (10 patients)"
    assert "Patients in more than one split: 2; their images are 2 of the test images (100.0%)" in printed
    with open(tmp_path / "audit" / "manifest.csv", newline="") as stream:
        assert len(list(csv.DictReader(stream))) == 12
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["pixel_identical"]["num_groups"] == 0


def test_run_without_out_writes_into_oct_audit(small_set, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(f"--data_dir={small_set}")
    assert sorted(os.listdir(tmp_path / "oct_audit")) == ["audit.json", "manifest.csv"]


def test_run_with_nodecode_leaves_pixels_alone(small_set, tmp_path):
    run(f"--data_dir={small_set}", "--nodecode", f"--out={tmp_path / 'audit'}")
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["pixel_identical"] is None


def test_run_resplit_writes_a_split_without_shared_patients(small_set, tmp_path, capsys):
    run(f"--data_dir={small_set}", "--resplit=0.2", f"--out={tmp_path / 'new'}", "--seed=1")
    new_split = capsys.readouterr().out.split("The new split\n")[1]
    assert new_split.startswith(f"{tmp_path / 'new'}: 12 images, 12 of them usable\n")
    assert "Patients in more than one split: 0" in new_split
    assert sorted(os.listdir(tmp_path / "new")) == ["audit.json", "manifest.csv", "source_audit", "test", "train"]


def test_run_shards_writes_what_train_reads(small_set, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(f"--data_dir={small_set}", f"--shards={tmp_path / 'shards'}")
    assert capsys.readouterr().out.splitlines()[-1].startswith("Written: train 10, test 2 images in ")
    splits = datasets.load("oct2017", data_dir=str(tmp_path / "shards"))
    assert (len(splits.train), splits.test_files) == (10, ["CNV-4-2.jpeg", "NORMAL-14-2.jpeg"])
    assert sorted(os.listdir(tmp_path)) == ["OCT2017", "shards"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got no --data_dir; pass the OCT2017 folder as --data_dir=FOLDER"),
        (["--data_dir=x", "extra"], r"got \['extra'\]; pass the OCT2017 folder"),
        (["--data_dir=x", "--resplit=0.2"], "--resplit=0.2 needs --out=FOLDER"),
        (["--data_dir=x", "--resplit=0.2", "--out=y", "--nodecode"], "--resplit=0.2 needs --out=FOLDER, and --decode"),
        (["--data_dir=x", "--shards=y", "--out=z"], "got --shards=y and --out=z; pass them to two commands"),
        (["--data_dir=x", "--shards=y"], "the data folder 'x' does not exist"),
        (["--data_dir=x"], "the data folder 'x' does not exist"),
    ],
)
def test_run_refuses_bad_flags(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run(*arguments)
    assert os.listdir(tmp_path) == []


def test_run_refuses_an_out_folder_before_it_scans(small_set, tmp_path, capsys):
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        run(f"--data_dir={small_set}", "--resplit=0.2", f"--out={tmp_path}")
    assert capsys.readouterr().out == ""


def test_run_download_without_the_client_names_the_ways(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"needs the kaggle client.*three ways"):
        run(f"--data_dir={tmp_path / 'data'}", "--download")


def test_main_tells_bad_input_in_one_line_with_status_2(tmp_path):
    done = run_process(f"--data_dir={tmp_path / 'missing'}", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_main_imports_no_tensorflow_and_shows_no_bar_off_a_terminal(small_set, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    done = run_process(f"--data_dir={small_set}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_main_without_pillow_names_the_remedy(small_set, tmp_path):
    (tmp_path / "PIL.py").write_text("raise ImportError('as if it were not installed')")
    done = run_process(f"--data_dir={small_set}", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'fashion-oct[report]', or use --nodecode" in done.stderr
    assert run_process(f"--data_dir={small_set}", "--nodecode", cwd=tmp_path).returncode == 0
