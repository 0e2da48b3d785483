"""The test report: every example scored once, all figures from its probabilities."""

import csv
import json
import os
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from fashion_oct import datasets, distribution, files, input_pipeline, model_file, oct_folder, options, reports
from fashion_oct.errors import InputError

_MAX_CONFIG_BYTES = 64 << 20  # 100,000 bad images, named with their reasons, take 20 MB


def predict_probabilities(
    model: tf.keras.Model, examples: input_pipeline.Examples, *, global_batch_size: int
) -> np.ndarray:
    """Returns the class probabilities of every example, in order: float32 [N, C].

    Args:
      model: predicts on all its replicas.
      examples: the split, N of them.
      global_batch_size: images at once over all replicas, at most.
    """
    num_replicas = model.distribute_strategy.num_replicas_in_sync
    batch = distribution.batch_sizes(num_replicas, global_batch_size=global_batch_size)
    # the last batch is dealt out evenly, too: a convolution fails on a replica without an image
    shown = np.resize(np.arange(len(examples)), -(-len(examples) // num_replicas) * num_replicas)
    batches = input_pipeline.make_indexed_dataset(examples, shown, global_batch_size=batch.global_batch_size)
    probabilities = model.predict(batches.map(lambda images, labels: images), verbose=0)
    if len(probabilities) != len(shown):
        raise RuntimeError(f"{len(probabilities)} predictions for {len(shown)} images")
    return probabilities[: len(examples)]


def read_settings(workdir: str | os.PathLike) -> dict:
    """Reads the config.json of a run folder.

    Returns:
      What the file holds. The names of the classes are there and are texts; nothing else is checked.

    Raises:
      InputError: this is no run folder, or the file is damaged.
    """
    path = pathlib.Path(workdir) / "config.json"
    if not path.is_file():
        raise InputError(f"--workdir={workdir} has no config.json: give a run folder that train wrote")
    try:
        if (num_bytes := path.stat().st_size) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, the limit is {_MAX_CONFIG_BYTES}")
        settings = json.loads(path.read_text(encoding="utf-8"))
        class_names = settings["dataset"]["class_names"]
        if not isinstance(class_names, list) or not class_names or {type(name) for name in class_names} != {str}:
            raise ValueError(f"its class names are {class_names!r:.200}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path} cannot be read ({reason}): give the folder of another run") from error
    return settings


def load_model(workdir: str | os.PathLike) -> tf.keras.Model:
    """Loads the model of a finished run, for predictions, without running code that the file could hold.

    Raises:
      InputError: there is none, it is damaged or compressed, has other layers than those of `model_file`, or does
        not map grey or RGB images to the classes of the run.
    """
    path = pathlib.Path(workdir) / "model.keras"
    if not path.is_file():
        raise InputError(f"--workdir={workdir} has no model.keras: give the folder of a finished run")
    num_classes = len(read_settings(workdir)["dataset"]["class_names"])
    try:
        model_file.check(path)
        model = tf.keras.models.load_model(path, compile=False, safe_mode=True)
        _check_shapes(model.input_shape, model.output_shape, num_classes)
    except Exception as error:  # Keras raises many kinds
        raise InputError(f"{path} cannot be loaded ({type(error).__name__}: {error}): train again") from error
    return model


def _check_shapes(input_shape: Any, output_shape: Any, num_classes: int) -> None:
    is_image = isinstance(input_shape, tuple) and len(input_shape) == 4 and input_shape[3] in (1, 3)
    is_bounded = is_image and all(side and side <= oct_folder.MAX_SIDE for side in input_shape[1:3])
    if not is_bounded or output_shape != (None, num_classes):
        raise ValueError(f"it maps {input_shape} to {output_shape}, not images to {num_classes} classes")


def evaluate_run(workdir: str, *, data_dir: str | None = None) -> str:
    """Evaluates a finished run on its test split and returns the result in words.

    Args:
      workdir: the run folder.
      data_dir: the dataset's folder, by default that of the run.

    Raises:
      InputError: no such run, or its dataset is not the one that it was trained on.
    """
    splits, global_batch_size = load_splits_of_run(workdir, data_dir=data_dir)
    with input_pipeline.naming_bad_files(splits.test):
        report = evaluate(
            load_model(workdir),
            splits,
            workdir=pathlib.Path(workdir),
            global_batch_size=global_batch_size,
        )
    return f"{in_words(report)}\ndata: {splits.source}\nreport: {pathlib.Path(workdir) / 'evaluation.json'}"


def load_splits_of_run(workdir: str | os.PathLike, *, data_dir: str | None = None) -> tuple[datasets.Splits, int]:
    """Loads the dataset of a finished run, and returns it with the run's global batch size.

    Args:
      workdir: the run folder.
      data_dir: the dataset's folder, by default that of the run.

    Raises:
      InputError: no such run, or its dataset is not the one that it was trained on.
    """
    settings = read_settings(workdir)
    config, global_batch_size = _evaluation_settings(settings, workdir)
    class_names = settings["dataset"]["class_names"]
    splits = datasets.load(
        config["dataset"],
        data_dir=data_dir or config["data_dir"],
        bad_images=config["bad_images"],
        image_size=config["image_size"],
        labels=config["labels"],
    )
    if list(splits.spec.class_names) != class_names:
        raise InputError(
            f"the run was trained on the classes {class_names}, but {splits.source} has "
            f"{list(splits.spec.class_names)}: give the run's own dataset"
        )
    return splits, global_batch_size


def _evaluation_settings(settings: dict, workdir: str | os.PathLike) -> tuple[dict, int]:
    """Returns the entry "config" of config.json, and the global batch size, checked as far as they are used here."""
    try:
        config, global_batch_size = settings["config"], settings["plan"]["batch"]["global_batch_size"]
        texts = [config[name] for name in ("data_dir", "labels") if config[name] is not None]
        is_good = (
            config["dataset"] in options.DATASETS
            and config["bad_images"] in ("error", "skip")
            and all(isinstance(text, str) and "\0" not in text for text in texts)
            and type(config["image_size"]) is type(global_batch_size) is int
            and 0 < config["image_size"] <= oct_folder.MAX_SIDE
            and global_batch_size > 0
        )
    except (LookupError, TypeError):
        is_good = False
    if not is_good:
        raise InputError(f"{workdir}/config.json does not hold the settings of a run: give the folder of another run")
    return config, global_batch_size


def in_words(report: dict) -> str:
    """Returns the line of a report that matters most."""
    low, high = report["accuracy_ci95"]
    warning = ""
    if "warning" in report:
        rest = report["disjoint_rest"]
        accuracy = "none" if rest["accuracy"] is None else f"{rest['accuracy']:.4f}"
        warning = f"WARNING: {report['warning']}\naccuracy on the other {rest['num_examples']:,} images: {accuracy}\n"
    return (
        f"{warning}test loss {report['loss']:.4f}, test accuracy {report['accuracy']:.4f} "
        f"(95% interval {low:.4f} to {high:.4f}, {report['num_examples']:,} images)"
    )


def evaluate(model: tf.keras.Model, splits: datasets.Splits, *, workdir: pathlib.Path, global_batch_size: int) -> dict:
    """Scores the test split, writes evaluation.json, predictions.csv and plots/ into the run folder.

    Returns:
      The report, which is what evaluation.json holds.
    """
    labels, names = splits.test.labels, splits.spec.class_names
    probabilities = predict_probabilities(model, splits.test, global_batch_size=global_batch_size)
    report = leakage_warning(splits, probabilities)
    report |= reports.evaluate_predictions(
        labels,
        probabilities,
        class_names=names,
        patients=splits.test_patients,
        urgent_classes=splits.urgent_classes,
    )
    files.write_json(workdir / "evaluation.json", report)
    if splits.test_files is not None:
        reports.write_csv(workdir / "predictions.csv", prediction_rows(splits, probabilities))
    try:
        draw_plots(workdir / "plots", splits, probabilities, report)
    except ImportError as error:
        logging.warning("some plots are not drawn: %s", error)
    return report


def leakage_warning(splits: datasets.Splits, probabilities: np.ndarray) -> dict:
    """Returns what the report must begin with where patients or pixels are in both splits, else an empty dict."""
    if splits.find_leaks is None or not (leaked := splits.find_leaks()).any():
        return {}
    warning = (
        f"{leaked.sum():,} of {len(leaked):,} test images ({leaked.mean():.0%}) share a patient or their pixels with "
        "the training split: the accuracy is too good. `prepare --resplit=0.2` writes a split by patient"
    )
    correct = (probabilities.argmax(axis=1) == splits.test.labels)[~leaked]
    return {
        "warning": warning,
        "disjoint_rest": {
            "num_examples": int((~leaked).sum()),
            "accuracy": float(correct.mean()) if len(correct) else None,
        },
    }


def prediction_rows(splits: datasets.Splits, probabilities: np.ndarray) -> list[dict]:
    """Returns the rows of predictions.csv: file, patient, true and predicted class, the probability of each class."""
    assert splits.test_files is not None and splits.test_patients is not None
    names = splits.spec.class_names
    return [
        {
            "file": file,
            "patient": patient,
            "class": names[label],
            "predicted": names[row.argmax()],
            **{f"p_{name}": round(float(p), 6) for name, p in zip(names, row, strict=True)},
        }
        for file, patient, label, row in zip(
            splits.test_files, splits.test_patients, splits.test.labels, probabilities, strict=True
        )
    ]


def draw_plots(folder: pathlib.Path, splits: datasets.Splits, probabilities: np.ndarray, report: dict) -> None:
    """Draws the curves of training, and of the test split confusion matrix, ROC curves and most confident mistakes."""
    folder.mkdir(exist_ok=True)
    if (history := folder.parent / "history.csv").exists():
        with open(history, encoding="utf-8", newline="") as stream:
            reports.plot_history(folder / "history.png", list(csv.DictReader(stream)))
    names = report["class_names"]
    reports.plot_confusion_matrix(folder / "confusion_matrix.png", report["confusion_matrix"], names)
    reports.plot_roc(folder / "roc.png", splits.test.labels, probabilities, names)
    mistakes = reports.most_confident_mistakes(splits.test.labels, probabilities, reports.MAX_MISTAKES)
    if len(mistakes):
        images, labels = input_pipeline.take(splits.test, mistakes)
        reports.plot_mistakes(
            folder / "mistakes.png",
            images,
            [names[label] for label in labels],
            [names[label] for label in probabilities[mistakes].argmax(axis=1)],
            probabilities[mistakes].max(axis=1),
            captions=None if splits.test_files is None else [splits.test_files[i] for i in mistakes],
        )
