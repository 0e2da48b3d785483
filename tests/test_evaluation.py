"""The test report's warning about leaking patients, on predictions made by hand."""

import dataclasses

import numpy as np
import pytest

from fashion_oct import datasets, evaluation, input_pipeline

SPEC = input_pipeline.DataSpec(image_shape=(2, 2, 1), class_names=("CNV", "NORMAL"))


def splits_with(leaked):
    examples = input_pipeline.ArrayExamples(np.zeros((4, 2, 2, 1), np.uint8), np.array([0, 0, 1, 1]))
    return datasets.Splits(
        spec=SPEC,
        train=examples,
        validation=None,
        test=examples,
        source="made by hand",
        test_files=["CNV-1-1.jpeg", "CNV-2-1.jpeg", "NORMAL-3-1.jpeg", "NORMAL-4-1.jpeg"],
        test_patients=["1", "2", "3", "4"],
        find_leaks=lambda: np.array(leaked, bool),
    )


PROBABILITIES = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]])  # the second one is wrong


def test_leakage_warning_gives_the_accuracy_on_the_disjoint_rest():
    report = evaluation.leakage_warning(splits_with([True, False, True, False]), PROBABILITIES)
    assert "2 of 4 test images (50%)" in report["warning"]
    assert report["disjoint_rest"] == {"num_examples": 2, "accuracy": 0.5}  # of the second and fourth one is right


def test_leakage_warning_says_nothing_of_a_split_by_patient():
    assert evaluation.leakage_warning(splits_with([False] * 4), PROBABILITIES) == {}
    unknown = dataclasses.replace(splits_with([False] * 4), find_leaks=None)
    assert evaluation.leakage_warning(unknown, PROBABILITIES) == {}


def test_leakage_warning_has_no_accuracy_where_every_patient_leaks():
    report = evaluation.leakage_warning(splits_with([True] * 4), PROBABILITIES)
    assert report["disjoint_rest"] == {"num_examples": 0, "accuracy": None}


def test_in_words_begins_with_the_warning():
    report = evaluation.leakage_warning(splits_with([True, False, True, False]), PROBABILITIES)
    report |= {"loss": 0.5, "accuracy": 0.75, "accuracy_ci95": [0.3, 0.95], "num_examples": 4}
    first, second, third = evaluation.in_words(report).splitlines()
    assert first.startswith("WARNING: 2 of 4 test images")
    assert second == "accuracy on the other 2 images: 0.5000"
    assert "0.7500" in third


def test_prediction_rows_name_file_patient_and_classes():
    rows = evaluation.prediction_rows(splits_with([False] * 4), PROBABILITIES)
    assert rows[1] == {
        "file": "CNV-2-1.jpeg", "patient": "2", "class": "CNV", "predicted": "NORMAL", "p_CNV": 0.2, "p_NORMAL": 0.8,
    }  # fmt: skip


def test_load_finds_leaks_by_pixels_under_another_patient(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("CNV", "NORMAL"):
            (tmp_path / split / name).mkdir(parents=True)
    same, *others = (rng.integers(0, 256, (32, 32), np.uint8) for _ in range(4))
    image.fromarray(same).save(tmp_path / "train/CNV/CNV-1-1.jpeg")
    image.fromarray(others[0]).save(tmp_path / "train/NORMAL/NORMAL-2-1.jpeg")
    image.fromarray(same).save(tmp_path / "test/CNV/CNV-3-1.jpeg")
    image.fromarray(others[1]).save(tmp_path / "test/NORMAL/NORMAL-4-1.jpeg")
    splits = datasets.load("oct2017", data_dir=str(tmp_path), image_size=16)
    assert splits.find_leaks().tolist() == [True, False]
