"""The snippets of the documents run as they stand."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from documents import ROOT, snippets


@pytest.fixture(scope="module")
def beginning():
    names = {}
    exec(snippets("docs/timing.md")[0], names)
    return names


@pytest.mark.parametrize("snippet", snippets("docs/timing.md")[1:], ids=lambda text: text.split("\n")[0][:40])
def test_timing_snippet_runs(snippet, beginning, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(snippet, dict(beginning))
    comments = re.findall(r"print\(.*\)  # (\S.*)$", snippet, re.MULTILINE)
    for expected in comments:
        if re.fullmatch(r"[\d\[\], ]+", expected):  # what the snippet says that it prints
            assert expected in capsys.readouterr().out.split("\n")


def test_readme_snippet_of_the_callback_runs(beginning):
    (snippet,) = snippets("README.md")
    names = dict(beginning, model=beginning["make_model"](), dataset=beginning["dataset"].take(4))
    exec(snippet.replace("512", "32"), names)
    assert names["time_history"].summary().num_steps == 20


@pytest.fixture
def flowers(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 5)):
        for label, name in enumerate(("daisy", "rose", "tulip")):
            folder = tmp_path / "flowers" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 80 * (label + 1), (60, 50, 3), np.uint8)).save(folder / f"{i}.jpg")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("network", ["MobileNetV3Small", "EfficientNetB0", "ResNet50"])
def test_own_data_and_model_trains(network, flowers, monkeypatch):
    monkeypatch.chdir(flowers)
    text = "\n".join(snippets("docs/own_data_and_model.md")).replace('weights="imagenet"', "weights=None")
    text = text.replace("MobileNetV3Small", network)
    if network == "ResNet50":
        text = text.replace("    base = ", "    x = tf.keras.applications.resnet50.preprocess_input(x)\n    base = ")
    names = {}
    exec(text, names)
    assert names["time_history"].summary().num_steps == 6  # 90 images, 32 a batch, 2 epochs
    assert names["features"].cache.find_missing(np.arange(90)).size == 0
    assert np.isfinite(names["probabilities"]).all()
    assert names["report"]["num_examples"] == 15
    weights = tf.keras.models.load_model("flowers.keras").get_weights()
    for saved, trained in zip(weights, names["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(saved, trained)


def test_commands_in_the_readme_parse():
    import shlex

    from absl import flags

    from fashion_oct import benchmark, evaluate, export, options, predict, prepare, report

    define = {
        "train": options.define_train_flags,
        "benchmark": benchmark.define_flags,
        "evaluate": evaluate.define_flags,
        "export": export.define_flags,
        "predict": predict.define_flags,
        "prepare": prepare.define_flags,
        "report": report.define_flags,
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"python -m fashion_oct\.(\w+)([^\n`|]*)", text)
    assert len(commands) > 10
    for command, arguments in commands:
        flag_values = flags.FlagValues()
        define[command](flag_values)
        words = shlex.split(arguments.replace("$rate", "1e-4"))
        flag_values([command, *(word for word in words if word != "--help")])  # an unknown flag or value raises


@pytest.mark.slow
def test_the_readme_s_commands_for_oct_run(oct_folder, vgg16_weights, tmp_path):
    """On a few scans of each class, in smaller batches, with two virtual devices where they ask for two GPUs."""
    for split, count in (("train", 5), ("test", 2)):
        for folder in (oct_folder / split).iterdir():
            here = tmp_path / "OCT2017" / split / folder.name
            here.mkdir(parents=True)
            patients = {path.name.split("-")[1]: path for path in sorted(folder.glob("*.jpeg"))}
            for path in list(patients.values())[:count]:
                (here / path.name).symlink_to(path)
    commands = "".join(snippets("README.md", language="bash"))
    assert commands.count("python -m fashion_oct.") == 4 and "--num_gpus=2" in commands  # one of them for three rates
    commands = commands.replace("--num_gpus=2", "--virtual_devices=2")
    commands = commands.replace(
        "fashion_oct.train", f"fashion_oct.train --weights={vgg16_weights} --per_replica_batch_size=8 --epochs=2"
    )
    environment = os.environ | {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "FASHION_OCT_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/evaluation.json")]
    assert [report["num_examples"] for report in reports] == [4] * 4  # a fifth of 7 patients a class: 1
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"rate_1e-5", "rate_1e-4", "rate_1e-3"}
    assert (tmp_path / "OCT2017_by_patient" / "train" / "CNV").is_dir()
