"""What is written can be read by TensorBoard's own reader."""

import pathlib

import pytest

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
