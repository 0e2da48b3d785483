"""Datasets by name: the oct2017 folder and its prepared copy are the same dataset."""

import pathlib
import shutil

import numpy as np
import pytest

from fashion_oct import datasets, input_pipeline
from fashion_oct.errors import InputError
from fashion_oct.oct2017 import oct2017_dataset_builder

NUM_PER_CLASS = 6


@pytest.fixture(scope="module")
def part(oct_folder, tmp_path_factory):
    """The first images of each class of the real sample; of test, those of one training patient more."""
    root = tmp_path_factory.mktemp("data") / "OCT2017"
    for split in ("train", "test"):
        for folder in (oct_folder / split).iterdir():
            (root / split / folder.name).mkdir(parents=True)
            for path in sorted(folder.iterdir())[:NUM_PER_CLASS]:
                shutil.copy(path, root / split / folder.name)
    leaked = sorted((oct_folder / "train" / "DME").iterdir())[0]
    shutil.copy(leaked, root / "test" / "DME" / leaked.name.replace("-1.", "-999."))
    (root / "train" / "CNV" / "CNV-12345-1.jpeg").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def both(part, tmp_path_factory):
    """The splits as read from the folder and from its prepared copy."""
    target = tmp_path_factory.mktemp("shards")
    oct2017_dataset_builder.build(part, target)
    settings = {"validation_fraction": 0.3, "bad_images": "skip", "image_size": 32}
    return [datasets.load("oct2017", data_dir=str(place), **settings) for place in (part, target)]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_load_prepared_gives_the_images_and_labels_of_the_folder(both, split):
    folder, prepared = (getattr(splits, split) for splits in both)
    assert len(prepared) == len(folder)
    np.testing.assert_array_equal(prepared.labels, folder.labels)
    order = np.random.default_rng(0).permutation(len(folder))
    for ours, expected in zip(input_pipeline.take(prepared, order), input_pipeline.take(folder, order), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_load_prepared_gives_the_training_steps_of_the_folder(both):
    settings = {"global_batch_size": 5, "seed": 3, "num_steps": 9, "start_step": 6}
    steps = [list(input_pipeline.make_training_dataset(splits.train, **settings)) for splits in both]
    assert len(steps[1]) == 3
    for (images, labels), (expected_images, expected_labels) in zip(*steps, strict=True):
        np.testing.assert_array_equal(images, expected_images)
        np.testing.assert_array_equal(labels, expected_labels)


def test_load_prepared_knows_files_patients_leaks_and_bad_files(both, part):
    folder, prepared = both
    assert prepared.spec == folder.spec
    assert prepared.test_files == folder.test_files
    assert prepared.test_patients == folder.test_patients
    np.testing.assert_array_equal(prepared.find_leaks(), folder.find_leaks())
    assert prepared.find_leaks().any()
    assert prepared.bad == ((str(part / "train" / "CNV" / "CNV-12345-1.jpeg"), "is empty"),)
    assert prepared.describe() | {"source": ""} == folder.describe() | {"source": ""}


def test_identity_of_prepared_examples_tells_splits_sizes_and_builds_apart(part, tmp_path):
    def identities(image_size):
        settings = {"bad_images": "skip", "image_size": image_size}
        splits = datasets.load("oct2017", data_dir=str(tmp_path), **settings)
        return {splits.train.identity, splits.test.identity}

    oct2017_dataset_builder.build(part, tmp_path)
    first = identities(32)
    assert first == identities(32)
    assert len(first | identities(64)) == 4
    shutil.rmtree(tmp_path / "oct2017")
    oct2017_dataset_builder.build(part, tmp_path)
    assert len(first | identities(32)) == 4


def test_load_prepared_stops_at_bad_files_as_the_folder_does(part, tmp_path):
    oct2017_dataset_builder.build(part, tmp_path)
    with pytest.raises(InputError, match=r"1 of 25 images cannot be used.*CNV-12345-1\.jpeg' is empty"):
        datasets.load("oct2017", data_dir=str(tmp_path))


@pytest.mark.parametrize("place", ["", "oct2017", "oct2017/1.0.0"])
def test_load_takes_each_folder_of_a_prepared_dataset(part, tmp_path, place):
    oct2017_dataset_builder.build(part, tmp_path)
    splits = datasets.load("oct2017", data_dir=str(tmp_path / place), bad_images="skip")
    assert len(splits.train) == 4 * NUM_PER_CLASS


def test_load_refuses_a_prepared_dataset_in_another_format(part, tmp_path):
    oct2017_dataset_builder.Builder(data_dir=tmp_path).download_and_prepare(
        download_dir=tmp_path / "downloads",
        download_config=oct2017_dataset_builder.tfds.download.DownloadConfig(manual_dir=part),
    )
    with pytest.raises(InputError, match=r"cannot be read as a prepared oct2017.*build it with `prepare --shards`"):
        datasets.load("oct2017", data_dir=str(tmp_path))


def test_load_refuses_a_folder_of_another_dataset(tmp_path):
    pathlib.Path(tmp_path, "dataset_info.json").write_text('{"name": "mnist"}')
    with pytest.raises(InputError, match="cannot be read as a prepared oct2017"):
        datasets.load("oct2017", data_dir=str(tmp_path))


def test_load_oct2017_needs_a_folder():
    with pytest.raises(InputError, match="--data_dir is missing"):
        datasets.load("oct2017")
