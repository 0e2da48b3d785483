"""Numbers in; the evaluation, CSV files, tables and plots out. Imports no TensorFlow.

The AUCs and the MCC come from scikit-learn and the plots from matplotlib (the extra `report`). Without scikit-learn
`evaluate_predictions` leaves those figures out and says so once; without matplotlib the `plot_*` functions raise
ImportError, which `has_matplotlib` foretells. Plots use no pyplot, so they need no display and keep no global state.
"""

import csv
import importlib
import importlib.util
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from absl import logging

from fashion_oct import files

MAX_MISTAKES = 24  # 4 rows of 6 on a page
_SMALLEST_FONT_SIZE = 9  # points: legible in print
# Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow that vanishes on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_LINE_STYLES = ("-", "--", "-.", ":")  # 7 colours and 4 styles: 28 pairs before one comes again
_BAR_STYLE = {"color": "#A6CEE3", "edgecolor": "black", "linewidth": 0.8, "width": 0.7}


# --- figures ---------------------------------------------------------------------------------------------------------


def wilson_interval(num_correct: int, num_examples: int, z: float = 1.959964) -> tuple[float, float]:
    """Returns the Wilson score interval (low, high) of a proportion; z = 1.959964 makes it the 95% one.

    Raises:
      ValueError: not 0 <= num_correct <= num_examples, or no example.
    Source: Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if not 0 <= num_correct <= num_examples or num_examples == 0:
        raise ValueError(
            f"num_correct={num_correct} of num_examples={num_examples}: give 0 <= num_correct <= num_examples, "
            "and at least one example"
        )
    p, n = num_correct / num_examples, num_examples
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half_width = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half_width), min(1.0, centre + half_width)  # the cut is for rounding errors only


def bootstrap_interval(
    correct: npt.ArrayLike, groups: npt.ArrayLike, *, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Returns the 95% percentile bootstrap interval (low, high) of the accuracy, drawing whole groups.

    The images of one patient are alike, so drawing images one by one would pretend to more evidence than there is.

    Args:
      correct: bool [N].
      groups: the group (patient) of each example, [N].
      num_resamples: how often as many groups as there are get drawn, with replacement.
      seed: the same seed gives the same interval.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; Field and Welsh, Bootstrapping
      clustered data, JRSS B 69 (2007).
    """
    _, group_of_example = np.unique(np.asarray(groups), return_inverse=True)
    num_examples = np.bincount(group_of_example)  # [G]
    num_correct = np.bincount(group_of_example, weights=np.asarray(correct, float))  # [G]
    num_groups = len(num_examples)
    drawn = np.random.default_rng(seed).integers(num_groups, size=(num_resamples, num_groups))  # [R, G]
    accuracies = num_correct[drawn].sum(axis=1) / num_examples[drawn].sum(axis=1)  # [R]
    low, high = np.percentile(accuracies, [2.5, 97.5])
    return float(low), float(high)


def median_interval(values: npt.ArrayLike, *, num_resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Returns the 95% interval of the median of a few repeats, by percentile bootstrap."""
    values = np.asarray(values, float)
    drawn = np.random.default_rng(seed).integers(len(values), size=(num_resamples, len(values)))  # [R, N]
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)


def evaluate_predictions(
    labels: npt.ArrayLike,
    probabilities: npt.ArrayLike,
    *,
    class_names: Sequence[str],
    patients: Sequence | None = None,
    urgent_classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns what evaluation.json holds; a figure that is not defined (a class without examples) is None.

    Args:
      labels: the true classes, integers [N].
      probabilities: [N, C]; the largest of a row is the prediction, the first one of equals.
      class_names: C names, in the order of the labels.
      patients: the patient of each example, [N]; then the interval of the accuracy is bootstrapped over patients.
      urgent_classes: the names that are held together against the rest; which of them was predicted is no matter.

    Raises:
      ValueError: shapes that do not fit, a label or an urgent class not there, probabilities that are not finite.
    """
    labels, probabilities = np.asarray(labels), np.asarray(probabilities)
    _check_predictions(labels, probabilities, class_names, patients, urgent_classes)
    labels, probabilities = labels.astype(np.int64), probabilities.astype(np.float64)  # uint8 x 10 would overflow
    class_names, num_classes = [str(name) for name in class_names], len(class_names)
    predicted = probabilities.argmax(axis=1)
    pairs = np.bincount(num_classes * labels + predicted, minlength=num_classes**2)
    evaluation = {
        **_overall_figures(labels, probabilities, patients),
        "confusion_matrix": pairs.reshape(num_classes, num_classes).tolist(),  # rows: the true class
        "class_names": class_names,
        **_class_figures(labels, probabilities, class_names),
    }
    if urgent_classes:
        urgent = [class_names.index(name) for name in urgent_classes]
        figures = _two_way_figures(np.isin(labels, urgent), np.isin(predicted, urgent))
        evaluation["urgent"] = {name: figures[name] for name in ("sensitivity", "specificity")}
    return evaluation


def most_confident_mistakes(labels: npt.ArrayLike, probabilities: npt.ArrayLike, count: int) -> np.ndarray:
    """Returns the indices of up to `count` wrong predictions, the most confident first, equals by index."""
    probabilities = np.asarray(probabilities)  # [N, C]
    wrong = np.flatnonzero(probabilities.argmax(axis=1) != np.asarray(labels))
    order = np.argsort(-probabilities[wrong].max(axis=1), kind="stable")
    return wrong[order][:count]


def _check_predictions(labels, probabilities, class_names, patients, urgent_classes) -> None:
    num_examples, num_classes = len(labels), len(class_names)
    if labels.ndim != 1 or num_examples == 0 or probabilities.shape != (num_examples, num_classes):
        raise ValueError(
            f"labels of shape {labels.shape} and probabilities of shape {probabilities.shape} for {num_classes} class "
            "names: give labels [N], probabilities [N, number of class names] and at least one example"
        )
    if patients is not None and len(patients) != num_examples:
        raise ValueError(f"{len(patients)} patients for {num_examples} examples: give one for each example")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()}: give 0 to {num_classes - 1}")
    if unknown := [name for name in urgent_classes if name not in class_names]:
        raise ValueError(f"urgent classes {unknown}: give some of {list(class_names)}")
    is_bad = ~np.isfinite(probabilities.astype(np.float64))
    if is_bad.any():
        raise ValueError(
            f"{is_bad.sum()} of {is_bad.size} probabilities, in {is_bad.any(axis=1).sum()} of {num_examples} examples, "
            "are not finite: the model has diverged; train it with a lower learning rate"
        )


def _overall_figures(labels: np.ndarray, probabilities: np.ndarray, patients: Sequence | None) -> dict[str, Any]:
    num_examples = len(labels)
    correct = probabilities.argmax(axis=1) == labels
    of_true_class = np.clip(probabilities[np.arange(num_examples), labels], 1e-7, 1 - 1e-7)  # as Keras clips
    figures = {"num_examples": num_examples}
    if patients is None:
        interval = wilson_interval(int(correct.sum()), num_examples)
    else:
        figures["num_patients"] = len(np.unique(np.asarray(patients)))
        interval = bootstrap_interval(correct, patients)
    loss, accuracy = float(-np.log(of_true_class).mean()), float(correct.mean())
    return {**figures, "loss": loss, "accuracy": accuracy, "accuracy_ci95": list(interval)}


def _two_way_figures(is_true: np.ndarray, is_predicted: np.ndarray) -> dict[str, float | None]:
    """Returns the figures of one class (or group) against the rest; both arguments are bool [N]."""
    true_positives, num_true, num_predicted = (int(x.sum()) for x in (is_true & is_predicted, is_true, is_predicted))
    true_negatives = int((~is_true & ~is_predicted).sum())
    return {
        "sensitivity": _ratio(true_positives, num_true),
        "specificity": _ratio(true_negatives, len(is_true) - num_true),
        "precision": _ratio(true_positives, num_predicted),
        "f1": _ratio(2 * true_positives, num_true + num_predicted),  # the harmonic mean of precision and sensitivity
    }


def _class_figures(labels: np.ndarray, probabilities: np.ndarray, class_names: list[str]) -> dict[str, Any]:
    """Returns per_class and, where scikit-learn is installed, mcc and macro_auc."""
    predicted = probabilities.argmax(axis=1)
    per_class = {name: _two_way_figures(labels == c, predicted == c) for c, name in enumerate(class_names)}
    try:
        metrics = _import_extra("sklearn.metrics")
    except ImportError as error:
        logging.log_first_n(logging.WARNING, "The evaluation leaves out the AUCs and the MCC: %s", 1, error)
        return {"per_class": per_class}
    aucs = []
    for c, figures in enumerate(per_class.values()):
        is_true = labels == c
        is_defined = 0 < is_true.sum() < len(labels)
        figures["auc"] = float(metrics.roc_auc_score(is_true, probabilities[:, c])) if is_defined else None
        aucs.append(figures["auc"])
    # With a single class, true or predicted, the MCC is 0 / 0.
    is_defined = len(np.unique(labels)) > 1 and len(np.unique(predicted)) > 1
    mcc = float(metrics.matthews_corrcoef(labels, predicted)) if is_defined else None
    defined = [auc for auc in aucs if auc is not None]
    macro_auc = sum(defined) / len(aucs) if len(defined) == len(aucs) else None
    return {"per_class": per_class, "mcc": mcc, "macro_auc": macro_auc}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# --- text ------------------------------------------------------------------------------------------------------------


def write_csv(path: str | os.PathLike, rows: Iterable[Mapping], fieldnames: Sequence[str] | None = None) -> None:
    """Writes `rows` as CSV, atomically; without `fieldnames` the columns are the rows' keys as they first appear.

    Raises:
      ValueError: a row has a key that is not in `fieldnames`.
    """
    rows = list(rows)
    columns = fieldnames or list(dict.fromkeys(key for row in rows for key in row))
    # surrogateescape: a file name that is not UTF-8 comes out as the bytes it has on disk.
    with files.replacing(path, newline="", errors="surrogateescape") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def format_ledger(seconds_by_name: Mapping[str, float], wall_seconds: float) -> str:
    """Returns a plain-text table of where the wall time went, in the given order, then "other" and the total.

    A negative "other" says that some seconds were counted twice: it is shown, not hidden.

    Raises:
      ValueError: wall_seconds is not positive.
    """
    if not wall_seconds > 0:
        raise ValueError(f"wall_seconds={wall_seconds}: give a positive number of seconds")
    other_seconds = wall_seconds - sum(seconds_by_name.values())
    rows = [*seconds_by_name.items(), ("other", other_seconds), ("total", wall_seconds)]
    width = max(16, *(len(name) for name, _ in rows))
    lines = [f"{'wall time':<{width}}  {'seconds':>10}  {'share':>7}"]
    for name, seconds in rows:
        share = 100 * seconds / wall_seconds
        # Adding 0.0 turns the -0.0 of a rounding error into 0.0.
        lines.append(f"{name:<{width}}  {round(seconds, 2) + 0.0:>10,.2f}  {round(share, 1) + 0.0:>6.1f}%")
    return "\n".join(lines)


# --- plots -----------------------------------------------------------------------------------------------------------


def has_matplotlib() -> bool:
    """Says whether the `plot_*` functions can run; it does not import matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_confusion_matrix(path: str | os.PathLike, confusion_matrix: Sequence, class_names: Sequence[str]) -> None:
    """Draws counts [C, C] (rows: the true class) with their share of the row, which also sets the shade."""
    matrix = np.asarray(confusion_matrix)
    num_classes, row_sums = len(matrix), matrix.sum(axis=1, keepdims=True)
    shares = matrix / np.maximum(row_sums, 1)  # [C, C]; a row without examples stays 0
    side_inches = max(5.0, 2.2 + 0.62 * num_classes)
    figure = _new_figure(side_inches, side_inches)
    axes = figure.add_subplot()
    # The square root of the share, so that the few mistakes of a good model show.
    axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(num_classes, num_classes):
        share_line = f"\n{100 * shares[row, column]:.1f}%" if matrix[row, column] else ""
        axes.text(
            column,
            row,
            f"{matrix[row, column]:,}{share_line}",
            ha="center",
            va="center",
            fontsize=_SMALLEST_FONT_SIZE,
            color="white" if shares[row, column] > 0.36 else "black",  # sqrt(0.36) = 0.6: the darker shades
        )
    names = [_printable(name, 24) for name in class_names]
    axes.set_xticks(range(num_classes), names, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(range(num_classes), names, parse_math=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    num_correct, num_examples = int(np.trace(matrix)), int(matrix.sum())
    accuracy = 100 * num_correct / max(num_examples, 1)
    axes.set_title(f"{num_correct:,} of {num_examples:,} right ({accuracy:.2f}%)\nshares are of the row", fontsize=11)
    _save(figure, path)


def plot_roc(
    path: str | os.PathLike, labels: npt.ArrayLike, probabilities: npt.ArrayLike, class_names: Sequence[str]
) -> None:
    """Draws each class's ROC curve against the rest, and its upper left corner enlarged; [N] and [N, C]."""
    metrics = _import_extra("sklearn.metrics")
    labels, probabilities = np.asarray(labels), np.asarray(probabilities, np.float64)
    figure = _new_figure(10.5, 5.2)
    whole, corner = figure.subplots(1, 2)
    for c, name in enumerate(class_names):
        style = {"color": _COLOURS[c % len(_COLOURS)], "linestyle": _LINE_STYLES[c % len(_LINE_STYLES)]}
        is_true, name = labels == c, _printable(name, 24)  # noqa: PLW2901
        if not 0 < is_true.sum() < len(labels):
            whole.plot([], [], label=f"{name}: not defined", **style)
            continue
        false_positive_rate, sensitivity, _ = metrics.roc_curve(is_true, probabilities[:, c])
        auc = metrics.auc(false_positive_rate, sensitivity)
        for axes in (whole, corner):
            axes.plot(false_positive_rate, sensitivity, label=f"{name}: {auc:.4f}", linewidth=1.6, **style)
    for axes in (whole, corner):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, zorder=0)
        axes.set_xlabel("1 - specificity")
        axes.set_ylabel("sensitivity")
        axes.set_aspect("equal")
        axes.grid(color="0.9")
    whole.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), title="one class against the rest")
    corner.set(xlim=(-0.002, 0.2), ylim=(0.8, 1.002), title="upper left corner, five times enlarged")
    legend = whole.legend(title="AUC", loc="lower right", fontsize=_SMALLEST_FONT_SIZE, handlelength=3)
    for text in legend.get_texts():
        text.set_parse_math(False)
    _save(figure, path)


def plot_mistakes(
    path: str | os.PathLike,
    images: np.ndarray,
    true_names: Sequence[str],
    predicted_names: Sequence[str],
    probabilities: Sequence[float],
    *,
    captions: Sequence[str] | None = None,
) -> None:
    """Draws a page of wrong predictions, in the given order; what is beyond `MAX_MISTAKES` is left out.

    Args:
      path: the PNG to write.
      images: uint8 [K, H, W, C], C = 1 or 3; K = 0 gives a page that says so.
      true_names: K class names.
      predicted_names: K class names.
      probabilities: the probability of the predicted class, [K].
      captions: a line below each image, such as its file name, [K].
    """
    num_images = min(len(images), MAX_MISTAKES)
    num_columns = min(6, max(3, num_images))
    num_rows = max(1, math.ceil(num_images / num_columns))
    figure = _new_figure(1.95 * num_columns, 0.5 + num_rows * (2.6 if captions is not None else 2.4))
    figure.suptitle("Most confident mistakes" if num_images else "No mistakes", fontsize=13)
    for k, axes in enumerate(figure.subplots(num_rows, num_columns, squeeze=False).flat):
        axes.set(xticks=[], yticks=[])
        if k >= num_images:
            axes.set_axis_off()
            continue
        axes.imshow(np.squeeze(images[k]), cmap="gray", vmin=0, vmax=255)
        text = {"fontsize": _SMALLEST_FONT_SIZE, "parse_math": False}
        is_line, was_line = _printable(predicted_names[k], 17), _printable(true_names[k], 18)
        axes.set_title(f"{is_line} {100 * probabilities[k]:.1f}%\ntrue: {was_line}", **text)
        if captions is not None:
            axes.set_xlabel(_printable(captions[k], 24), **text)
    _save(figure, path)


def plot_history(path: str | os.PathLike, history_rows: Sequence[Mapping]) -> None:
    """Draws loss, accuracy and images/second against the epoch (from 1 on); rows may come from history.csv (text)."""
    metrics = [name for name in ("loss", "accuracy", "images_per_second") if any(name in row for row in history_rows)]
    epochs = np.array([float(row.get("epoch", k)) for k, row in enumerate(history_rows, start=1)])
    figure = _new_figure(4.2 * max(1, len(metrics)), 3.6)
    for axes, metric in zip(figure.subplots(1, max(1, len(metrics)), squeeze=False).flat, metrics, strict=False):
        for k, (prefix, label) in enumerate((("", "training"), ("val_", "validation"))):
            values = np.array([_number(row.get(prefix + metric)) for row in history_rows])
            is_there = ~np.isnan(values)  # validation may run every few epochs only
            if is_there.any():
                style = {"color": _COLOURS[k], "linestyle": _LINE_STYLES[k], "marker": "os"[k], "markersize": 4}
                axes.plot(epochs[is_there], values[is_there], label=label, **style)
        axes.set(xlabel="epoch", title=metric.replace("images_per_second", "images a second"))
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(color="0.9")
        if metric == "images_per_second":
            axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        elif len(axes.lines) > 1:
            axes.legend(fontsize=_SMALLEST_FONT_SIZE)
    _save(figure, path)


def plot_scaling(path: str | os.PathLike, points: Sequence[Mapping]) -> None:
    """Draws throughput with the ideal line, scaling efficiency and total time against the number of replicas.

    Args:
      path: the PNG to write.
      points: one mapping a number of replicas: num_replicas, images_per_second, images_per_second_ci95 [low, high],
        speed_up, efficiency, epoch_seconds. All but the first two may be None: that mark is left out.

    Raises:
      ValueError: no points.
    """
    if not points:
        raise ValueError("no points to draw: give at least one number of replicas that was measured")
    points = sorted(points, key=lambda point: point["num_replicas"])
    figure = _new_figure(max(10.5, 2.0 * len(points)), 4.0)
    left, middle, right = figure.subplots(1, 3)
    _draw_throughput(left, points)
    _draw_efficiency(middle, points)
    seconds = [_number(point.get("epoch_seconds")) for point in points]
    bars = right.bar(range(len(points)), seconds, **_BAR_STYLE)
    right.bar_label(bars, ["" if math.isnan(value) else _three_digits(value) for value in seconds], padding=2)
    right.margins(y=0.12)
    right.set(ylim=(0, None), title="total time of an epoch, seconds")
    for axes in (left, middle, right):
        axes.set_xticks(range(len(points)), [point["num_replicas"] for point in points])
        axes.set(xlim=(-0.6, len(points) - 0.4), xlabel="replicas")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    _save(figure, path)


def plot_batch_study(path: str | os.PathLike, rows: Sequence[Mapping]) -> None:
    """Draws test accuracy against the global batch, a line for each rule of the learning rate.

    Args:
      path: the PNG to write.
      rows: global_batch_size, lr_scaling, mean_accuracy, min_accuracy and max_accuracy.
    """
    figure = _new_figure(6.4, 4.2)
    axes = figure.subplots()
    names = {"none": "same rate", "sqrt": "rate x root of the batch factor", "linear": "rate x batch factor"}
    for k, rule in enumerate(dict.fromkeys(row["lr_scaling"] for row in rows)):
        chosen = [row for row in rows if row["lr_scaling"] == rule]
        batches = [row["global_batch_size"] for row in chosen]
        means = np.array([row["mean_accuracy"] for row in chosen])
        errors = [means - [row["min_accuracy"] for row in chosen], [row["max_accuracy"] for row in chosen] - means]
        style = {"color": _COLOURS[k], "linestyle": _LINE_STYLES[k], "marker": "osD"[k], "capsize": 4}
        axes.errorbar(batches, means, errors, label=names.get(rule, rule), **style)
    axes.set_xscale("log", base=2)
    batches = sorted({row["global_batch_size"] for row in rows})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.set(xlabel="global batch, images", title="test accuracy: mean, lowest and highest seed")
    axes.grid(color="0.9")
    axes.legend(fontsize=_SMALLEST_FONT_SIZE)
    _save(figure, path)


def _draw_throughput(axes, points: Sequence[Mapping]) -> None:
    x, throughput = range(len(points)), np.array([float(point["images_per_second"]) for point in points])
    ideal = [throughput[0] * point["num_replicas"] / points[0]["num_replicas"] for point in points]
    axes.bar(x, throughput, **_BAR_STYLE)
    axes.plot(x, ideal, "D--", color=_COLOURS[1], markersize=5, linewidth=1.5, label="ideal")
    intervals = [point.get("images_per_second_ci95") for point in points]
    if all(intervals):
        errors = np.abs(np.array(intervals).T - throughput)  # [2, P]: the distances down and up
        axes.errorbar(x, throughput, errors, fmt="none", ecolor="black", capsize=4, label="95% interval")
    for k, value in enumerate(throughput):
        # At the foot of the bar: at its top are the interval and the ideal line.
        _annotate(axes, _three_digits(value), (k, 0), offset_points=4)
    axes.margins(y=0.12)
    axes.set(ylim=(0, None), title="throughput, images a second")
    axes.legend(loc="upper left", fontsize=_SMALLEST_FONT_SIZE)


def _draw_efficiency(axes, points: Sequence[Mapping]) -> None:
    percents = [100 * _number(point.get("efficiency")) for point in points]
    axes.axhline(100, color="black", linestyle="--", linewidth=1)
    axes.plot(percents, "o-", color=_COLOURS[0], linewidth=2)
    for k, (percent, point) in enumerate(zip(percents, points, strict=True)):
        if not math.isnan(percent):
            speed_up = "" if point.get("speed_up") is None else f"\n{point['speed_up']:.2f} x"
            _annotate(axes, f"{percent:.0f}%{speed_up}", (k, percent), offset_points=-9)
    axes.set(ylim=(0, 1.15 * np.nanmax([100, *percents])), title="scaling efficiency (%) and speed-up")


def _annotate(axes, text: str, position: tuple[float, float], *, offset_points: float) -> None:
    """Writes `text` above `position`, or below it where the offset is negative."""
    style = {"ha": "center", "va": "bottom" if offset_points > 0 else "top", "fontsize": _SMALLEST_FONT_SIZE}
    axes.annotate(text, position, (0, offset_points), textcoords="offset points", **style)


def _import_extra(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} cannot be imported ({error}); pip install 'fashion-oct[report]' brings it"
        ) from error


def _new_figure(width_inches: float, height_inches: float):
    return _import_extra("matplotlib.figure").Figure(
        figsize=(width_inches, height_inches), dpi=150, layout="constrained"
    )


def _save(figure, path: str | os.PathLike) -> None:
    with files.replacing(path, "wb") as stream:
        figure.savefig(stream, format="png")


def _printable(text: str, max_characters: int) -> str:
    """Returns `text` on one line, cut in its middle, with "?" for line breaks and bytes that are no text."""
    text = "".join(character if character.isprintable() else "?" for character in str(text))
    half = (max_characters - 1) // 2
    return text if len(text) <= max_characters else f"{text[:half]}…{text[-half:]}"


def _number(value: Any) -> float:
    return math.nan if value is None or value == "" else float(value)


def _three_digits(value: float) -> str:
    """Writes 12345.6 as "12,346", 6.314 as "6.31" and 0.0123 as "0.0123"."""
    num_decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{num_decimals}f}"
