"""Figures against values worked out by hand, published ones and scikit-learn; plots decoded and looked into."""

import json
import math
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from fashion_oct import reports

# Six examples, two of each class: a, a, b, b, c, c.
LABELS = [0, 0, 1, 1, 2, 2]
PROBABILITIES = np.array(
    [
        [0.7, 0.2, 0.1],  # a, right
        [0.3, 0.6, 0.1],  # b, wrong
        [0.1, 0.8, 0.1],  # b, right
        [0.5, 0.4, 0.1],  # a, wrong
        [0.2, 0.2, 0.6],  # c, right
        [0.1, 0.4, 0.5],  # c, right
    ]
)
NAMES = ["a", "b", "c"]
PATIENTS = ["p", "p", "q", "r", "r", "s"]


def evaluate(labels=LABELS, probabilities=PROBABILITIES, class_names=NAMES, **options):
    return reports.evaluate_predictions(labels, probabilities, class_names=class_names, **options)


def auc_by_counting(is_positive, scores):
    """The share of (positive, negative) pairs in the right order; equals count half."""
    positives = [s for s, p in zip(scores, is_positive, strict=True) if p]
    negatives = [s for s, p in zip(scores, is_positive, strict=True) if not p]
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return wins / (len(positives) * len(negatives))


def random_predictions(num_examples=500, num_classes=4, seed=3):
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num_examples)
    scores = rng.normal(size=(num_examples, num_classes)) + 1.2 * np.eye(num_classes)[labels]
    return labels, np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


def assert_is_picture(path, width, height):
    """The file is a PNG of this size that shows something, and no temporary file lies beside it."""
    from PIL import Image

    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(path) as image:
        assert image.size == (width, height)
        assert np.asarray(image.convert("L")).std() > 5
    assert os.listdir(path.parent) == [path.name]


# --- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_correct", "num_examples", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_gives_the_values_of_newcombe_1998(num_correct, num_examples, low, high):
    assert reports.wilson_interval(num_correct, num_examples) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_ends_at_one_when_all_are_correct():
    low, high = reports.wilson_interval(20, 20)
    assert (low, high) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    assert high <= 1.0


@pytest.mark.parametrize(("num_correct", "num_examples"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_interval_refuses_impossible_counts(num_correct, num_examples):
    with pytest.raises(ValueError, match=f"num_correct={num_correct} of num_examples={num_examples}"):
        reports.wilson_interval(num_correct, num_examples)


def test_bootstrap_interval_has_no_width_when_all_patients_are_alike():
    correct = [True, True, True, False] * 30  # each of the 30 patients: 3 of 4
    assert reports.bootstrap_interval(correct, np.repeat(np.arange(30), 4)) == (0.75, 0.75)


def test_bootstrap_interval_is_wider_than_wilson_when_a_patients_images_agree():
    # 40 patients of 10 images, all right or all wrong: 40 pieces of evidence, not 400.
    correct = np.repeat(np.arange(40) % 4 != 0, 10)
    low, high = reports.bootstrap_interval(correct, np.repeat(np.arange(40), 10))
    wilson_low, wilson_high = reports.wilson_interval(300, 400)
    # A mean of 40 draws: 0.75 +- 1.96 sqrt(0.75 x 0.25 / 40) = 0.75 +- 0.134; of 400: +- 0.042.
    assert (low, high) == pytest.approx((0.75 - 0.134, 0.75 + 0.134), abs=0.03)
    assert wilson_high - wilson_low == pytest.approx(0.085, abs=0.001)


def test_bootstrap_interval_weighs_patients_by_their_images():
    # x has 9 images, all right, y has 1, wrong. Drawing two gives xx: 1, xy: 9/10 (not 1/2, as of two images), yy: 0.
    correct, groups = [True] * 9 + [False], ["x"] * 9 + ["y"]
    intervals = [reports.bootstrap_interval(correct, groups, num_resamples=1, seed=seed) for seed in range(20)]
    assert set(intervals) == {(1.0, 1.0), (0.9, 0.9), (0.0, 0.0)}


def test_bootstrap_interval_depends_on_the_seed_alone():
    correct, groups = np.random.default_rng(0).random(300) < 0.8, np.arange(300) // 3
    first = reports.bootstrap_interval(correct, groups, seed=5)
    assert reports.bootstrap_interval(correct, groups, seed=5) == first
    assert reports.bootstrap_interval(correct, groups, seed=6) != first


# --- evaluate_predictions --------------------------------------------------------------------------------------------


def test_evaluate_predictions_counts_rows_by_the_true_class():
    evaluation = evaluate()
    assert evaluation["confusion_matrix"] == [[1, 1, 0], [1, 1, 0], [0, 0, 2]]
    assert evaluation["class_names"] == NAMES
    assert evaluation["num_examples"] == 6
    assert evaluation["accuracy"] == pytest.approx(4 / 6)


def test_evaluate_predictions_takes_the_mean_loss_of_the_true_class():
    expected = -sum(map(math.log, (0.7, 0.3, 0.8, 0.4, 0.6, 0.5))) / 6
    assert evaluate()["loss"] == pytest.approx(expected, abs=1e-12)


def test_evaluate_predictions_clips_the_loss_at_1e_minus_7():
    loss = evaluate([1], [[1.0, 0.0]], class_names=["a", "b"])["loss"]
    assert loss == pytest.approx(7 * math.log(10))


def test_evaluate_predictions_gives_the_loss_that_keras_gives():
    keras = pytest.importorskip("tensorflow").keras
    labels, probabilities = random_predictions()
    probabilities[:20] = np.eye(4)[(labels[:20] + 1) % 4]  # wrong and certain: these are clipped
    probabilities = probabilities.astype(np.float32)
    expected = float(keras.losses.SparseCategoricalCrossentropy()(labels, probabilities))
    assert evaluate(labels, probabilities, list("abcd"))["loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluate_predictions_works_out_one_class_against_the_rest():
    # Class a: 1 of 2 found; of the 4 others 1 taken for it; 2 predictions of it, 1 right.
    figures = evaluate()["per_class"]["a"]
    assert figures == {"sensitivity": 0.5, "specificity": 0.75, "precision": 0.5, "f1": 0.5, "auc": 0.875}
    # AUC: scores of a are 0.7 and 0.3, of the others 0.1, 0.5, 0.2, 0.1. Of 8 pairs only 0.3 < 0.5 is wrong: 7/8.


def test_evaluate_predictions_aucs_are_shares_of_ordered_pairs():
    labels, probabilities = random_predictions(num_examples=60)
    probabilities = probabilities.round(1)  # with many equals
    evaluation = evaluate(labels, probabilities, list("abcd"))
    expected = [auc_by_counting(labels == c, probabilities[:, c]) for c in range(4)]
    assert [figures["auc"] for figures in evaluation["per_class"].values()] == pytest.approx(expected)
    assert evaluation["macro_auc"] == pytest.approx(sum(expected) / 4)


def test_evaluate_predictions_agrees_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    labels, probabilities = random_predictions()
    predicted = probabilities.argmax(axis=1)
    evaluation = evaluate(labels, probabilities, list("abcd"))
    precision, sensitivity, f1, _ = metrics.precision_recall_fscore_support(labels, predicted)
    for name, expected in (("precision", precision), ("sensitivity", sensitivity), ("f1", f1)):
        assert [figures[name] for figures in evaluation["per_class"].values()] == pytest.approx(list(expected))
    assert evaluation["confusion_matrix"] == metrics.confusion_matrix(labels, predicted).tolist()
    assert evaluation["loss"] == pytest.approx(metrics.log_loss(labels, probabilities))


def test_evaluate_predictions_mcc_of_two_classes_follows_its_formula():
    # TP 2, FN 1, FP 1, TN 3: (2 x 3 - 1 x 1) / sqrt(3 x 3 x 4 x 4) = 5 / 12.
    predicted = np.array([1, 1, 0, 1, 0, 0, 0])
    evaluation = evaluate([1, 1, 1, 0, 0, 0, 0], np.eye(2)[predicted], ["no", "yes"])
    assert evaluation["mcc"] == pytest.approx(5 / 12)


def test_evaluate_predictions_without_patients_gives_wilsons_interval():
    evaluation = evaluate()
    assert evaluation["accuracy_ci95"] == list(reports.wilson_interval(4, 6))
    assert "num_patients" not in evaluation


def test_evaluate_predictions_with_patients_bootstraps_over_them():
    evaluation = evaluate(patients=PATIENTS)
    correct = [True, False, True, False, True, True]
    assert evaluation["accuracy_ci95"] == list(reports.bootstrap_interval(correct, PATIENTS))
    assert evaluation["num_patients"] == 4


def test_evaluate_predictions_holds_urgent_classes_together():
    # a or b against c: taking a for b is no mistake here, and none of the 6 crosses the line.
    assert evaluate(urgent_classes=("a", "b"))["urgent"] == {"sensitivity": 1.0, "specificity": 1.0}
    # a or c against b: of a, a, c, c one is taken for b; of b, b one is taken for a.
    assert evaluate(urgent_classes=("a", "c"))["urgent"] == {"sensitivity": 0.75, "specificity": 0.5}
    assert "urgent" not in evaluate()


def test_evaluate_predictions_gives_none_for_a_class_without_examples():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = evaluate(LABELS[:4], PROBABILITIES[:4])  # no c, and none predicted
    assert evaluation["per_class"]["c"] == {
        "sensitivity": None, "specificity": 1.0, "precision": None, "f1": None, "auc": None
    }  # fmt: skip
    assert evaluation["macro_auc"] is None
    assert evaluation["mcc"] == pytest.approx(0.0)  # 2 of 4 right, as by chance


def test_evaluate_predictions_gives_no_precision_to_a_class_never_predicted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = evaluate([0, 0, 1], [[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]], ["a", "b"])
    assert evaluation["per_class"]["b"] == {
        "sensitivity": 0.0, "specificity": 1.0, "precision": None, "f1": 0.0, "auc": 1.0
    }  # fmt: skip
    assert evaluation["mcc"] is None


def test_evaluate_predictions_survives_a_single_class():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = evaluate([0], [[0.9, 0.1]], ["a", "b"], patients=["p"], urgent_classes=["b"])
    assert evaluation["per_class"]["a"] == {
        "sensitivity": 1.0, "specificity": None, "precision": 1.0, "f1": 1.0, "auc": None
    }  # fmt: skip
    assert evaluation["urgent"] == {"sensitivity": None, "specificity": 1.0}
    assert evaluation["accuracy_ci95"] == [1.0, 1.0]


def test_evaluate_predictions_is_json_whatever_the_array_types():
    evaluation = evaluate(
        np.array(LABELS, np.uint8), PROBABILITIES.astype(np.float16), patients=np.array(PATIENTS), urgent_classes=["a"]
    )
    assert json.loads(json.dumps(evaluation, allow_nan=False)) == evaluation


def test_evaluate_predictions_counts_small_integer_labels_without_overflow():
    num_classes = 30  # 30 x 29 is beyond uint8
    labels = np.arange(num_classes, dtype=np.uint8)
    evaluation = evaluate(labels, np.eye(num_classes), [f"class {c}" for c in range(num_classes)])
    assert evaluation["confusion_matrix"] == np.eye(num_classes, dtype=int).tolist()


def test_evaluate_predictions_names_how_many_probabilities_are_not_finite():
    probabilities = PROBABILITIES.copy()
    probabilities[1] = np.nan
    probabilities[4, 2] = np.inf
    with pytest.raises(ValueError, match="4 of 18 probabilities, in 2 of 6 examples, are not finite"):
        evaluate(probabilities=probabilities)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS[:5]}, r"labels of shape \(5,\) and probabilities of shape \(6, 3\)"),
        ({"class_names": ["a", "b"]}, "for 2 class names"),
        ({"labels": [], "probabilities": np.zeros((0, 3))}, "at least one example"),
        ({"labels": [0, 0, 1, 1, 2, 3]}, "labels from 0 to 3: give 0 to 2"),
        ({"patients": ["p"]}, "1 patients for 6 examples"),
        ({"urgent_classes": ["a", "CNV"]}, r"urgent classes \['CNV'\]"),
    ],
)
def test_evaluate_predictions_refuses_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**change)


def test_evaluate_predictions_without_scikit_learn_leaves_its_figures_out_and_says_so_once():
    program = """
import sys
sys.modules["sklearn"] = sys.modules["matplotlib"] = None  # as if they were not installed
from fashion_oct import reports
for _ in range(2):
    evaluation = reports.evaluate_predictions([0, 1], [[0.9, 0.1], [0.8, 0.2]], class_names=["a", "b"])
assert "mcc" not in evaluation and "macro_auc" not in evaluation, evaluation
assert evaluation["accuracy"] == 0.5 and evaluation["confusion_matrix"] == [[1, 0], [1, 0]], evaluation
assert set(evaluation["per_class"]["a"]) == {"sensitivity", "specificity", "precision", "f1"}, evaluation
assert not reports.has_matplotlib()
try:
    reports.plot_confusion_matrix("x.png", [[1]], ["a"])
except ImportError as error:
    assert "pip install 'fashion-oct[report]'" in str(error), error
else:
    raise AssertionError("no ImportError")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install 'fashion-oct[report]'") == 1


def test_reports_imports_neither_tensorflow_nor_the_report_extra():
    program = "import sys, fashion_oct.reports; print(*{'tensorflow', 'sklearn', 'matplotlib', 'PIL'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_most_confident_mistakes_sorts_by_the_predicted_probability():
    assert reports.most_confident_mistakes(LABELS, PROBABILITIES, 9).tolist() == [1, 3]  # 0.6, then 0.5
    assert reports.most_confident_mistakes(LABELS, PROBABILITIES, 1).tolist() == [1]


def test_most_confident_mistakes_keeps_equals_in_their_order():
    probabilities = np.tile([0.2, 0.8], (200, 1))  # so many that an unstable sort would mix them
    probabilities[150] = [0.1, 0.9]
    probabilities[1] = [0.8, 0.2]  # right
    assert reports.most_confident_mistakes([0] * 200, probabilities, 5).tolist() == [150, 0, 2, 3, 4]


def test_most_confident_mistakes_of_a_perfect_model_are_none():
    assert reports.most_confident_mistakes([0, 1], np.eye(2), 5).tolist() == []


# --- text ------------------------------------------------------------------------------------------------------------


def test_write_csv_takes_columns_as_they_first_appear(tmp_path):
    rows = [{"epoch": 0, "loss": np.float32(0.5)}, {"epoch": 1, "loss": np.float64(0.25), "note": 'a, "b"'}]
    reports.write_csv(tmp_path / "x.csv", iter(rows))
    assert (tmp_path / "x.csv").read_bytes() == b'epoch,loss,note\n0,0.5,\n1,0.25,"a, ""b"""\n'
    assert os.listdir(tmp_path) == ["x.csv"]


def test_write_csv_without_rows_writes_the_header(tmp_path):
    reports.write_csv(tmp_path / "x.csv", [], ["file", "class"])
    assert (tmp_path / "x.csv").read_text() == "file,class\n"


def test_write_csv_keeps_the_bytes_of_a_file_name_that_is_not_utf8(tmp_path):
    reports.write_csv(tmp_path / "x.csv", [{"file": b"caf\xe9.png".decode("utf-8", "surrogateescape")}])
    assert (tmp_path / "x.csv").read_bytes() == b"file\ncaf\xe9.png\n"


def test_write_csv_that_fails_leaves_the_earlier_file(tmp_path):
    (tmp_path / "x.csv").write_text("earlier")
    with pytest.raises(ValueError, match="surprise"):
        reports.write_csv(tmp_path / "x.csv", [{"file": 1}, {"surprise": 2}], ["file"])
    assert (tmp_path / "x.csv").read_text() == "earlier"
    assert os.listdir(tmp_path) == ["x.csv"]


def test_format_ledger_adds_the_rest_and_the_total():
    assert reports.format_ledger({"start-up": 2.0, "steps": 1500.0}, 1600.0).splitlines() == [
        "wall time            seconds    share",
        "start-up                2.00     0.1%",
        "steps               1,500.00    93.8%",
        "other                  98.00     6.1%",
        "total               1,600.00   100.0%",
    ]


def test_format_ledger_shows_seconds_that_were_counted_twice():
    assert "other                  -1.00   -10.0%" in reports.format_ledger({"steps": 11.0}, 10.0)


def test_format_ledger_writes_no_negative_zero():
    assert "-0.0" not in reports.format_ledger({"steps": 10.0 + 1e-9}, 10.0)


def test_format_ledger_refuses_no_wall_time():
    with pytest.raises(ValueError, match="wall_seconds=0"):
        reports.format_ledger({}, 0)


# --- plots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_classes", "pixels"), [(4, 750), (10, 1260)])  # 5.0 and 8.4 inches x 150
def test_plot_confusion_matrix_draws_a_picture(tmp_path, num_classes, pixels):
    matrix = 90 * np.eye(num_classes, dtype=int) + 1
    reports.plot_confusion_matrix(tmp_path / "x.png", matrix.tolist(), [f"class {c}" for c in range(num_classes)])
    assert_is_picture(tmp_path / "x.png", pixels, pixels)


def test_plot_confusion_matrix_shades_the_diagonal_of_a_good_model_dark(tmp_path):
    from PIL import Image

    names = ["$a$ & _b", "no\nline", "c", "d"]
    reports.plot_confusion_matrix(tmp_path / "x.png", (99 * np.eye(4, dtype=int)).tolist(), names)
    with Image.open(tmp_path / "x.png") as image:
        shades = np.asarray(image.convert("L"))
    # The diagonal is a quarter of the matrix, which is about half of the page: 1/8 is dark, less the text on it.
    assert 0.08 < (shades < 80).mean() < 0.16


def test_plot_confusion_matrix_without_examples_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reports.plot_confusion_matrix(tmp_path / "x.png", [[0, 0], [0, 3]], NAMES[:2])
    assert (tmp_path / "x.png").exists()


def test_plot_roc_draws_a_picture_also_of_a_class_without_examples(tmp_path):
    labels, probabilities = random_predictions()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reports.plot_roc(tmp_path / "x.png", np.where(labels == 3, 0, labels), probabilities, ["a", "$b", "c", "d"])
    assert_is_picture(tmp_path / "x.png", 1575, 780)


@pytest.mark.parametrize(("num_images", "num_rows"), [(30, 4), (7, 2)])
def test_plot_mistakes_fills_a_page_of_at_most_four_rows(tmp_path, num_images, num_rows):
    images = np.random.default_rng(0).integers(256, size=(num_images, 28, 28, 1), dtype=np.uint8)
    names = ["Ankle boot"] * num_images
    reports.plot_mistakes(tmp_path / "x.png", images, names, names, [0.9] * num_images)
    assert_is_picture(tmp_path / "x.png", 1755, 75 + 360 * num_rows)  # (0.5 + 2.4 rows) x 150


def test_plot_mistakes_takes_colour_and_odd_captions(tmp_path):
    images = np.zeros((2, 20, 30, 3), np.uint8)
    captions = ["$x$ " * 20, "line\nbreak\udce9.png"]
    reports.plot_mistakes(tmp_path / "x.png", images, ["a", "b"], ["b", "a"], [1.0, 0.5], captions=captions)
    assert_is_picture(tmp_path / "x.png", 877, 465)  # 3 x 1.95 and 0.5 + 2.6 inches


def test_plot_mistakes_shows_the_image_itself(tmp_path):
    from PIL import Image

    for name, value in (("black.png", 0), ("white.png", 255)):
        reports.plot_mistakes(tmp_path / name, np.full((3, 8, 8, 1), value, np.uint8), NAMES, NAMES, [0.5] * 3)
    black, white = (np.asarray(Image.open(tmp_path / name).convert("L")) for name in ("black.png", "white.png"))
    assert (white > 250).mean() - (black > 250).mean() > 0.5  # the images cover over half of the page


def test_plot_mistakes_of_a_perfect_model_says_so(tmp_path):
    reports.plot_mistakes(tmp_path / "x.png", np.zeros((0, 28, 28, 1), np.uint8), [], [], [])
    assert_is_picture(tmp_path / "x.png", 877, 435)


def test_plot_history_takes_the_text_of_a_csv_file(tmp_path):
    rows = [
        {"epoch": "0", "loss": "0.9", "val_loss": "1.0", "accuracy": "0.7", "images_per_second": "9000"},
        {"epoch": "1", "loss": "0.5", "val_loss": "", "accuracy": "0.8", "images_per_second": "9100"},
    ]
    reports.plot_history(tmp_path / "x.png", rows)
    assert_is_picture(tmp_path / "x.png", 1890, 540)  # 3 panels x 4.2 inches x 150


def test_plot_history_of_one_epoch_has_a_mark(tmp_path):
    reports.plot_history(tmp_path / "x.png", [{"epoch": 0, "loss": 0.0}])
    assert_is_picture(tmp_path / "x.png", 630, 540)


def test_plot_history_counts_epochs_from_one_as_history_csv_does(tmp_path):
    rows = [{"loss": 0.9}, {"loss": 0.5}, {"loss": 0.4}]
    reports.plot_history(tmp_path / "bare.png", rows)
    for first in (0, 1):
        numbered = [{"epoch": epoch, **row} for epoch, row in enumerate(rows, start=first)]
        reports.plot_history(tmp_path / f"from_{first}.png", numbered)
    bare = (tmp_path / "bare.png").read_bytes()
    assert bare == (tmp_path / "from_1.png").read_bytes()
    assert bare != (tmp_path / "from_0.png").read_bytes()


def scaling_point(num_replicas, images_per_second, **more):
    interval = [0.9 * images_per_second, 1.1 * images_per_second]
    point = {"speed_up": num_replicas, "efficiency": 1.0, "epoch_seconds": 10.0, "images_per_second_ci95": interval}
    return {**point, "num_replicas": num_replicas, "images_per_second": images_per_second, **more}


@pytest.mark.parametrize(("num_points", "width"), [(2, 1575), (8, 2400)])
def test_plot_scaling_draws_a_picture(tmp_path, num_points, width):
    reports.plot_scaling(tmp_path / "x.png", [scaling_point(n, 6000.0 * n) for n in range(1, num_points + 1)])
    assert_is_picture(tmp_path / "x.png", width, 600)


def test_plot_scaling_does_not_depend_on_the_order_of_the_points(tmp_path):
    points = [scaling_point(n, 6000.0 * n) for n in (1, 2)]
    reports.plot_scaling(tmp_path / "a.png", points)
    reports.plot_scaling(tmp_path / "b.png", points[::-1])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_plot_scaling_leaves_out_what_is_not_known(tmp_path):
    unknown = dict.fromkeys(("speed_up", "efficiency", "epoch_seconds", "images_per_second_ci95"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reports.plot_scaling(tmp_path / "x.png", [scaling_point(2, 900.0, **unknown)])
    assert_is_picture(tmp_path / "x.png", 1575, 600)


def test_plot_scaling_refuses_no_points(tmp_path):
    with pytest.raises(ValueError, match="no points"):
        reports.plot_scaling(tmp_path / "x.png", [])
    assert os.listdir(tmp_path) == []


def test_plots_leave_the_earlier_picture_when_drawing_fails(tmp_path):
    (tmp_path / "x.png").write_bytes(b"earlier")
    with pytest.raises(IndexError):
        reports.plot_mistakes(tmp_path / "x.png", np.zeros((2, 8, 8, 1), np.uint8), ["a"], ["b"], [0.9])
    assert (tmp_path / "x.png").read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["x.png"]
