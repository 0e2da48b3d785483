"""The TensorFlow Datasets builder oct2017, and what `build` writes."""

import os
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from fashion_oct import benchmarking, datasets, oct2017
from fashion_oct import oct_folder as folders
from fashion_oct.errors import InputError
from fashion_oct.oct2017 import oct2017_dataset_builder

NUM_IMAGES = {"train": 7, "val": 2, "test": 3}


def write_folder(root, num_images):
    """Writes grey JPEGs of two classes in turn, each of its own patient, and one colour scan, train/CNV/CNV-1-1.jpeg.

    Patient 1 is in the training split, 101 in val, 201 in test.
    """
    for offset, (split, count) in zip((0, 100, 200), num_images.items(), strict=True):
        for number in range(count):
            name = ("CNV", "NORMAL")[number % 2]
            patient = offset + number + 1
            channels = 3 if patient == 1 else 1
            pixels = np.random.default_rng(patient).integers(0, 256, (16, 16 + number, channels), np.uint8)
            path = pathlib.Path(root, split, name, f"{name}-{patient}-1.jpeg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tf.io.encode_jpeg(pixels).numpy())
    return pathlib.Path(root)


@pytest.fixture(scope="module")
def oct2017_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "OCT2017", NUM_IMAGES)


@pytest.fixture(scope="module")
def built(oct2017_folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("shards")
    oct2017_dataset_builder.build(oct2017_folder, target)
    return tfds.builder_from_directory(target / "oct2017" / "1.0.0")


def test_builder_is_what_tfds_load_builds(oct2017_folder, tmp_path):
    dataset, info = tfds.load(
        "oct2017",
        data_dir=tmp_path,
        with_info=True,
        builder_kwargs={"version": "1.0.0"},
        download_and_prepare_kwargs={
            "download_dir": tmp_path / "downloads",
            "download_config": tfds.download.DownloadConfig(manual_dir=oct2017_folder),
        },
    )
    assert {name: len(list(split)) for name, split in dataset.items()} == NUM_IMAGES
    assert info.features["label"].names == ["CNV", "NORMAL"]
    assert dataset["train"].element_spec["image"] == tf.TensorSpec([None, None, 1], tf.uint8)


def test_builder_splits_share_no_image(built):
    names = [built.info.metadata[split]["file_name"] for split in NUM_IMAGES]
    assert len(set().union(*names)) == sum(NUM_IMAGES.values())


def test_builder_has_description_citation_and_known_tags():
    metadata = oct2017.Builder.get_metadata()
    assert metadata.description.startswith("Optical coherence tomography")
    assert "10.1016/j.cell.2018.02.010" in metadata.citation
    assert metadata.tags == ["content.data-type.image", "content.subject.health", "ml.task.image-classification"]


def test_build_keeps_files_byte_for_byte(built, oct2017_folder):
    decoders = {"image": tfds.decode.SkipDecoding()}
    for example in built.as_data_source("train", decoders=decoders):
        file_name = example["file_name"].decode()
        class_name, patient, _ = folders.parse_name(file_name)
        assert example["image"] == (oct2017_folder / "train" / class_name / file_name).read_bytes()
        assert built.info.features["label"].int2str(example["label"]) == class_name
        assert example["patient"].decode() == patient


def test_build_metadata_tell_where_each_image_lies(built, oct2017_folder):
    source = built.as_data_source("train", decoders={"image": tfds.decode.SkipDecoding()})
    columns = built.info.metadata["train"]
    split = folders.list_split(oct2017_folder, "train")
    assert columns["file_name"] == [os.path.basename(path) for path in split.paths]
    assert columns["label"] == [0, 0, 0, 0, 1, 1, 1]
    assert [source[record]["file_name"].decode() for record in columns["record"]] == columns["file_name"]
    assert columns["record"] != sorted(columns["record"])


def test_build_leaves_bad_files_out_and_lists_them(tmp_path):
    root = write_folder(tmp_path / "OCT2017", NUM_IMAGES)
    (root / "train" / "CNV" / "CNV-3-1.jpeg").write_bytes(b"")
    message = oct2017_dataset_builder.build(root, tmp_path / "shards")
    assert message.startswith("train 6, val 2, test 3 images in ")
    assert message.endswith("; 1 that cannot be used left out")
    builder = tfds.builder_from_directory(tmp_path / "shards" / "oct2017" / "1.0.0")
    assert builder.info.metadata["train"]["bad"] == [[str(root / "train" / "CNV" / "CNV-3-1.jpeg"), "is empty"]]


def test_build_without_val_has_two_splits(tmp_path):
    root = write_folder(tmp_path / "OCT2017", NUM_IMAGES)
    shutil.rmtree(root / "val")
    assert oct2017_dataset_builder.build(root, tmp_path / "shards").startswith("train 7, test 3 images in ")


def test_build_that_fails_leaves_nothing_behind(tmp_path):
    root = write_folder(tmp_path / "OCT2017", NUM_IMAGES)
    for path in (root / "test" / "CNV").iterdir():
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"holds no usable CNV-PATIENT-INDEX\.jpeg"):
        oct2017_dataset_builder.build(root, tmp_path / "shards")
    assert not list((tmp_path / "shards").glob("**/*.*"))


def test_build_refuses_a_target_that_is_in_use(built, oct2017_folder):
    with pytest.raises(InputError, match=r"holds .*1\.0\.0 already; choose another folder or remove it"):
        oct2017_dataset_builder.build(oct2017_folder, pathlib.Path(built.data_dir).parents[1])


def test_build_refuses_a_target_inside_the_data_folder(oct2017_folder):
    with pytest.raises(InputError, match="lies inside the data folder"):
        oct2017_dataset_builder.build(oct2017_folder, oct2017_folder / "shards")
    assert not (oct2017_folder / "shards").exists()


def test_the_tutorials_pipeline_says_that_it_reads_no_records(built):
    splits = datasets.load("oct2017", data_dir=str(pathlib.Path(built.data_dir)))
    with pytest.raises(InputError, match="holds records: give the folder of files"):
        benchmarking._article_batches(splits, 2)
