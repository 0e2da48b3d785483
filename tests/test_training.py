"""Whole runs on small real data, and that N replicas give what one gives."""

import csv
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import (
    building,
    datasets,
    evaluation,
    input_pipeline,
    ledger,
    options,
    planning,
    reports,
    run_folder,
    training,
)
from fashion_oct.errors import InputError

SAMPLE = pathlib.Path(training.__file__).parent / "data"  # 6,000 + 1,000 real images


def config_of(**settings):
    return options.Config(data_dir=str(SAMPLE), per_replica_batch_size=None, precision="float32", **settings)


def train(workdir, **settings):
    config = config_of(**{"global_batch_size": 250, "num_gpus": 0, "workdir": str(workdir), "steps": 12, **settings})
    assert training.run(config) == 0
    return config


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run folder of 30 steps: 24 in the first epoch, 6 in the second."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    train(workdir, steps=30, validation_fraction=0.1, seed=3)
    return workdir


def test_run_writes_the_run_folder(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert names == {
        "config.json", "flags.txt", "history.csv", "timing.json", "evaluation.json", "model.keras", "plots",
        "checkpoints",
    }  # fmt: skip
    plots = {path.name for path in (finished_run / "plots").iterdir()}
    assert plots == {"history.png", "confusion_matrix.png", "roc.png", "mistakes.png"}


def test_run_records_settings_data_and_versions(finished_run):
    settings = read(finished_run / "config.json")
    assert settings["config"]["seed"] == 3
    assert settings["plan"]["batch"] == {"num_replicas": 1, "per_replica_batch_size": 250, "global_batch_size": 250}
    assert (settings["plan"]["steps_per_epoch"], settings["plan"]["num_steps"]) == (22, 30)  # 5,400 / 250 = 21.6
    assert (settings["dataset"]["num_train"], settings["dataset"]["num_validation"]) == (5400, 600)
    assert str(SAMPLE) in settings["dataset"]["source"]
    assert settings["versions"]["tensorflow"] == tf.__version__


def test_run_mirrors_over_two_devices(tmp_path):
    # in a process of its own: two MirroredStrategies in one process disturb each other's collectives
    train(tmp_path / "one", steps=5)
    command = [
        sys.executable, "-m", "fashion_oct.train", f"--data_dir={SAMPLE}", f"--workdir={tmp_path / 'two'}", "--steps=5",
        "--virtual_devices=2", "--global_batch_size=250", "--precision=float32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 replicas (CPU:0, CPU:1) x 125 images = global batch 250" in done.stdout
    assert read(tmp_path / "two" / "timing.json")["num_replicas"] == 2
    one, two = (read(tmp_path / name / "evaluation.json") for name in ("one", "two"))
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert two["num_examples"] == one["num_examples"] == 1000


def test_make_plan_refuses_what_tensorflow_cannot_do(two_devices):
    config = config_of(global_batch_size=20, steps_per_execution=4)
    if run_folder.keras_version().startswith("3."):
        with pytest.raises(InputError, match=r"2 virtual devices.*--steps_per_execution=1"):
            planning.make_plan(config, two_devices, num_train=100)
    else:
        assert planning.make_plan(config, two_devices, num_train=100).steps_per_epoch == 8  # 5 steps, up to 2 x 4


@pytest.mark.parametrize(
    ("devices", "most", "expected"),
    [
        (["CPU:0"], 118, 1),
        (["GPU:0", "GPU:1"], 118, 15),  # 8 executions: 118 / 8 = 14.75
        (["GPU:0"], 16, 16),
        (["GPU:0"], 5, 5),
        (["TPU:0"], 17, 9),  # 2 executions
    ],
)
def test_choose_steps_per_execution_is_for_accelerators(devices, most, expected):
    assert planning.choose_steps_per_execution(devices, most) == expected


def test_make_plan_scales_the_rate_to_the_batch(two_devices):
    config = config_of(global_batch_size=64, reference_batch_size=16, lr_scaling="sqrt", learning_rate=0.01)
    assert planning.make_plan(config, two_devices, num_train=100).learning_rate == pytest.approx(0.02)
    config = config_of(global_batch_size=64, reference_batch_size=16, learning_rate=0.01)
    assert planning.make_plan(config, two_devices, num_train=100).learning_rate == 0.01


def test_run_writes_a_profile_of_some_steps(tmp_path):
    train(tmp_path / "run", steps=5, profile=2)
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000


def test_run_refuses_images_that_are_too_small_for_vgg16(tmp_path):
    with pytest.raises(InputError, match="at least 32 x 32, these are 28 x 28"):
        train(tmp_path / "run", model="vgg16")


def test_run_counts_every_step_in_its_timing(finished_run):
    timing = read(finished_run / "timing.json")
    assert (timing["num_steps"], timing["num_discarded_steps"]) == (30, 1)
    assert timing["total_seconds"] >= timing["first_step_seconds"] > timing["step_seconds"]["p50"] > 0
    assert timing["images_per_second"] == pytest.approx(250 / timing["step_seconds"]["mean"])


def test_run_accounts_for_its_wall_time(tmp_path):
    arguments = [f"--data_dir={SAMPLE}", "--steps=30", "--global_batch_size=64", "--num_gpus=0"]
    command = [sys.executable, "-m", "fashion_oct.train", *arguments, f"--workdir={tmp_path / 'run'}"]
    start = time.monotonic()
    with subprocess.Popen([*command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        lines = [next(line for line in process.stdout if line.startswith("wall time"))]
        wall_seconds = time.monotonic() - start
        lines += process.stdout.readlines()
    ledger = read(tmp_path / "run" / "timing.json")["ledger_seconds"]
    assert set(ledger) == {
        "start-up", "data preparation", "model", "caches", "tracing", "steps", "validation", "checkpoints",
        "fit, other", "saving", "evaluation",
    }  # fmt: skip
    assert all(seconds >= -1e-6 for seconds in ledger.values())
    assert sum(ledger.values()) == pytest.approx(wall_seconds, rel=0.01)
    of_fit = sum(ledger[name] for name in ("tracing", "steps", "validation", "checkpoints", "fit, other"))
    timing = read(tmp_path / "run" / "timing.json")
    assert timing["fit_seconds"] == pytest.approx(of_fit, abs=0.5)
    parts = sum(timing[name] for name in ("total_seconds", "validation_seconds", "other_seconds"))
    assert timing["fit_seconds"] == pytest.approx(parts)
    assert any(line.startswith("evaluation ") for line in lines)


def test_run_writes_a_history_row_an_epoch(finished_run):
    with open(finished_run / "history.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-3)
    assert 0 <= float(rows[1]["val_accuracy"]) <= 1
    assert float(rows[0]["images_per_second"]) > 0


def test_run_scores_every_test_image(finished_run):
    report = read(finished_run / "evaluation.json")
    assert report["num_examples"] == 1000
    assert np.sum(report["confusion_matrix"], axis=1).tolist() == [100] * 10  # the sample holds 100 of each class
    assert report["accuracy"] == np.trace(report["confusion_matrix"]) / 1000
    assert report["accuracy"] > 0.5  # chance is 0.1


def test_run_evaluates_as_keras_does(finished_run):
    splits = datasets.load("fashion_mnist", data_dir=str(SAMPLE))
    model = evaluation.load_model(finished_run)
    model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    loss, accuracy = model.evaluate(splits.test.images, splits.test.labels, verbose=0)
    report = read(finished_run / "evaluation.json")
    assert report["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert report["loss"] == pytest.approx(loss, abs=1e-5)


def test_run_refuses_a_workdir_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        train(tmp_path / "file")
    with pytest.raises(InputError, match="writable"):
        train(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not pathlib.Path("/proc/self").is_dir(), reason="a folder where even root cannot write")
def test_run_refuses_a_workdir_that_cannot_be_written():
    with pytest.raises((InputError, OSError)):
        train(pathlib.Path("/proc/self/run"))


def test_run_leaves_nothing_behind_after_bad_input(tmp_path):
    for settings, message in [
        ({"global_batch_size": 7000}, "larger than the training split"),
        ({"warmup_epochs": 9.0}, "warm-up"),
        ({"steps_per_execution": 100}, "steps_per_execution"),
    ]:
        with pytest.raises(InputError, match=message):
            train(tmp_path / "run", **settings)
    assert os.listdir(tmp_path) == []


def test_evaluate_run_repeats_the_report(finished_run):
    before = read(finished_run / "evaluation.json")
    words = evaluation.evaluate_run(str(finished_run))
    assert read(finished_run / "evaluation.json") == before
    assert f"{before['accuracy']:.4f}" in words


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:999])])
def test_evaluate_run_names_a_model_that_is_missing_or_damaged(finished_run, tmp_path, damage):
    import shutil

    shutil.copytree(finished_run, tmp_path / "run")
    damage(tmp_path / "run" / "model.keras")
    with pytest.raises(InputError, match=r"model\.keras"):
        evaluation.evaluate_run(str(tmp_path / "run"))


def test_evaluate_run_refuses_what_is_no_run_folder(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        evaluation.evaluate_run(str(tmp_path))


def trained_weights(strategy, num_examples=203, num_steps=50):
    """Weights after SGD steps of 64 images, and probabilities; no batch divides 203 = 3 x 64 + 11 examples.

    The rate is small: rounding (1e-8) turns into 1e-5 where a step puts a ReLU or a pooling on its other side.
    """
    rng = np.random.default_rng(0)
    splits = datasets.load("fashion_mnist", data_dir=str(SAMPLE))
    chosen = rng.choice(6000, num_examples, replace=False)
    examples = input_pipeline.ArrayExamples(splits.train.images[chosen], splits.train.labels[chosen])
    config = config_of(global_batch_size=64)
    plan = planning.make_plan(config, strategy, num_train=num_examples)
    tf.keras.utils.set_random_seed(1)
    model = building.build(config, strategy, splits.spec, plan)
    with strategy.scope():
        model.compile(tf.keras.optimizers.SGD(0.003), tf.keras.losses.SparseCategoricalCrossentropy())
    dataset = input_pipeline.make_training_dataset(examples, global_batch_size=64, seed=0, num_steps=num_steps)
    model.fit(dataset, epochs=1, steps_per_epoch=num_steps, verbose=0, shuffle=False)
    return model.get_weights(), evaluation.predict_probabilities(model, examples, global_batch_size=64)


def test_two_replicas_train_and_evaluate_as_one_does(one_device, two_devices):
    weights, probabilities = trained_weights(one_device)
    mirrored_weights, mirrored_probabilities = trained_weights(two_devices)
    for one, two in zip(weights, mirrored_weights, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=0)
    # 203 examples: the last batch of 11 falls to the replicas as 6 + 5, the order must be kept
    np.testing.assert_allclose(probabilities, mirrored_probabilities, atol=1e-5)
    names, labels = [str(i) for i in range(10)], np.arange(203) % 10
    one, two = (
        reports.evaluate_predictions(labels, scores, class_names=names)
        for scores in (probabilities, mirrored_probabilities)
    )
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
    assert two["confusion_matrix"] == one["confusion_matrix"]


def test_a_one_device_strategy_trains_as_the_default_one_does(one_device):  # a GPU has the former, a CPU the latter
    weights, probabilities = trained_weights(one_device, num_steps=10)
    others, other_probabilities = trained_weights(tf.distribute.OneDeviceStrategy("CPU:0"), num_steps=10)
    for one, other in zip([*weights, probabilities], [*others, other_probabilities], strict=True):
        np.testing.assert_array_equal(one, other)


def trained_vgg16(strategy, num_steps=10):
    """Weights of a small VGG16 after SGD steps on 37 images; no batch of 8 divides them."""
    rng = np.random.default_rng(0)
    examples = input_pipeline.ArrayExamples(rng.integers(0, 256, (37, 32, 32, 1), np.uint8), np.arange(37) % 4)
    spec = input_pipeline.DataSpec(image_shape=(32, 32, 1), class_names=("CNV", "DME", "DRUSEN", "NORMAL"))
    config = config_of(model="vgg16", global_batch_size=8, feature_cache="off")
    plan = planning.make_plan(config, strategy, num_train=37)
    tf.keras.utils.set_random_seed(1)
    model = building.build(config, strategy, spec, plan)
    with strategy.scope():
        model.compile(tf.keras.optimizers.SGD(0.005), tf.keras.losses.SparseCategoricalCrossentropy())
    dataset = input_pipeline.make_training_dataset(examples, global_batch_size=8, seed=0, num_steps=num_steps)
    before = model.get_weights()
    model.fit(dataset, epochs=1, steps_per_epoch=num_steps, verbose=0, shuffle=False)
    return before, model.get_weights()


def test_two_replicas_train_vgg16_as_one_does(one_device, two_devices):
    before, one = trained_vgg16(one_device)
    _, two = trained_vgg16(two_devices)
    assert max(np.abs(new - old).max() for new, old in zip(one, before, strict=True)) > 1e-3
    for weights, mirrored in zip(one, two, strict=True):
        np.testing.assert_allclose(weights, mirrored, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_examples", [1, 2, 17, 33])
def test_predict_probabilities_scores_a_last_batch_smaller_than_the_replicas(two_devices, num_examples):
    splits = datasets.load("fashion_mnist", data_dir=str(SAMPLE))
    examples = input_pipeline.ArrayExamples(splits.test.images[:num_examples], splits.test.labels[:num_examples])
    plan = planning.make_plan(config_of(global_batch_size=16), two_devices, num_train=100)
    model = building.build(config_of(global_batch_size=16), two_devices, splits.spec, plan)
    probabilities = evaluation.predict_probabilities(model, examples, global_batch_size=16)
    np.testing.assert_allclose(probabilities, model(examples.images), atol=1e-5)


@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_run_sees_every_image_the_same_number_of_times(one_device, steps_per_execution, tmp_path):
    seen = []

    class Recorder(input_pipeline.ArrayExamples):
        def batches(self, indices, batch_size):
            def record(index):
                tf.numpy_function(lambda numbers: seen.append(numbers.copy()), [index], [])
                return index

            return super().batches(indices.map(record), batch_size)

    splits = datasets.load("fashion_mnist", data_dir=str(SAMPLE))
    examples = Recorder(splits.train.images[:100], splits.train.labels[:100])
    config = config_of(global_batch_size=20, epochs=3, steps_per_execution=steps_per_execution)
    plan = planning.make_plan(config, one_device, num_train=100)
    model = building.build(config, one_device, splits.spec, plan)
    training.fit(model, config, plan, train=examples, validation=None, workdir=tmp_path, ledger=ledger.Ledger())
    assert int(model.optimizer.iterations) == plan.num_steps == 15
    steps = {tuple(numbers) for numbers in seen}  # Keras 3 reads the first batch once more, to build the model
    assert len(steps) == 15
    assert np.bincount(np.concatenate(list(steps)), minlength=100).tolist() == [3] * 100
