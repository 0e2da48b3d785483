"""Writes a trained model as SavedModel, TFLite and ONNX, and runs each on test images before it is given out.

Preprocessing is in the model and so in each file. The class names travel with each:

- savedmodel: as the output `class` and the asset labels.txt. It computes in the run's own precision.
- tflite: as labels.txt, zipped onto the end of the file, as in TensorFlow Lite's own metadata. Float32.
- onnx: as the metadata property `class_names`, a JSON list. Float32.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
import tempfile
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from fashion_oct import evaluation, files, input_pipeline, models
from fashion_oct.errors import InputError

BATCH_SIZE = 32  # that of `predict`: in batches of another size bfloat16 may be rounded otherwise
MIN_AGREEMENT = 0.999  # share of test images to which Keras gives the same class; for files that are not quantized

_KERAS, _KERAS_FLOAT32 = "model.keras", "model.keras in float32"


def export_run(
    workdir: str,
    formats: list[str],
    *,
    out: str | None = None,
    data_dir: str | None = None,
    num_images: int | None = None,
) -> int:
    """Exports the model of a finished run, checks each file on the test split and prints the result as a table.

    Args:
      workdir: the run folder.
      formats: among "savedmodel", "tflite" and "onnx".
      out: a new or empty folder, by default WORKDIR/export; filled only once every file has passed the check.
      data_dir: the dataset's folder, by default that of the run.
      num_images: test images to check with, evenly spread over the split; None means all.

    Returns:
      The exit status: 1 if a file that is not quantized disagrees with Keras, else 0.

    Raises:
      InputError: no such run, `out` is taken, the dataset is not the run's, or a package is missing.
    """
    target = pathlib.Path(out or pathlib.Path(workdir, "export")).absolute()
    if os.path.lexists(target) and not (target.is_dir() and not os.listdir(target)):
        raise InputError(f"--out={target} is a file or a folder that is not empty: remove it, or give a new folder")
    if "onnx" in formats:
        _import_for_onnx("tf2onnx", "onnxruntime")
    splits, _ = evaluation.load_splits_of_run(workdir, data_dir=data_dir)
    model = evaluation.load_model(workdir)
    num_images = min(num_images or len(splits.test), len(splits.test))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name[:80]}.", dir=target.parent) as temporary:
        folder = pathlib.Path(temporary, "new")  # a temporary folder itself can be read by its owner only
        folder.mkdir()
        with _errors_only():
            candidates = _write(model, splits.spec.class_names, formats, folder=folder)
        rows = _check(candidates, splits.test, num_images=num_images, folder=folder)
        print(as_table(rows))
        if bad := [row["file"] for row in rows if row["must_agree"] and row["agreement"] < MIN_AGREEMENT]:
            print(f"error: {', '.join(bad)}: less than {MIN_AGREEMENT:.1%} same class as Keras", file=sys.stderr)
            return 1
        summary = {"num_images": num_images, "num_test": len(splits.test), "source": splits.source}
        spec = {"image_shape": model.input_shape[1:], "class_names": splits.spec.class_names}
        files.write_json(folder / "export.json", summary | spec | {"files": rows})
        folder.rename(target)
    print(f"checked on {num_images:,} of {len(splits.test):,} test images: {splits.source}\nexported to {target}")
    return 0


def as_table(rows: list[dict]) -> str:
    """Returns the `files` of export.json as a table in plain text."""
    lines = [f"{'file':<28}{'size':>10}{'accuracy':>10}{'same class':>12}{'max difference':>16}  compared with"]
    for row in rows:
        size = "" if row["num_bytes"] is None else f"{row['num_bytes'] / 1e6:.2f} MB"
        line = f"{row['file']:<28}{size:>10}{row['accuracy']:>10.4f}"
        if row["compared_with"]:
            line += f"{row['agreement']:>12.2%}{row['max_difference']:>16.1e}  {row['compared_with']}"
        lines.append(line)
    return "\n".join(lines)


def write_saved_model(model: tf.keras.Model, labels: pathlib.Path, path: pathlib.Path) -> None:
    """Writes a SavedModel with two signatures, both giving class (string [B]) and probabilities (float32 [B, K]).

    `serving_default` takes encoded (string [B], the contents of JPEG or PNG files); `pixels` takes pixels
    (uint8 [B, H, W, C]).

    Args:
      model: computes there as it does here, whatever its precision.
      labels: the file of the K class names, one a line.
      path: the folder to write.
    """
    image_shape = model.input_shape[1:]

    @tf.function(input_signature=[tf.TensorSpec([None, *image_shape], tf.uint8, name="pixels")])
    def from_pixels(pixels):
        probabilities = model(pixels, training=False)
        class_names = tf.constant(_read_lines(labels))
        return {"class": tf.gather(class_names, tf.argmax(probabilities, axis=1)), "probabilities": probabilities}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="encoded")])
    def from_encoded(encoded):
        def decode(contents):
            return input_pipeline.decode_image(contents, image_shape)

        return from_pixels(tf.map_fn(decode, encoded, fn_output_signature=tf.TensorSpec(image_shape, tf.uint8)))

    module = _with_weights_of(model)
    module.labels = tf.saved_model.Asset(str(labels))
    tf.saved_model.save(module, str(path), signatures={"serving_default": from_encoded, "pixels": from_pixels})


def write_tflite(model: tf.keras.Model, labels: pathlib.Path, path: pathlib.Path, *, is_quantized: bool) -> None:
    """Writes a TFLite file: pixels (uint8 [B, H, W, C]) -> probabilities (float32 [B, K]).

    Args:
      model: computes in float32, since TFLite knows no bfloat16.
      labels: the file of the K class names, one a line.
      path: the file to write.
      is_quantized: keep the weights in 8 bits ("dynamic range").
    """
    converter = tf.lite.TFLiteConverter.from_concrete_functions([_trace(model)], _with_weights_of(model))
    converter.optimizations = [tf.lite.Optimize.DEFAULT] if is_quantized else []
    path.write_bytes(converter.convert())
    with zipfile.ZipFile(path, "a") as archive:
        archive.write(labels, "labels.txt")


def write_onnx(model: tf.keras.Model, labels: pathlib.Path, path: pathlib.Path) -> None:
    """Writes an ONNX file: pixels (uint8 [batch, H, W, C]) -> probabilities (float32 [batch, K]).

    Args:
      model: computes in float32.
      labels: the file of the K class names, one a line.
      path: the file to write.

    Raises:
      InputError: tf2onnx is missing.
    """
    (tf2onnx,) = _import_for_onnx("tf2onnx")
    function = _trace(model)
    pixels, probabilities = function.inputs[0].name, function.outputs[0].name
    # not `convert.from_function`, which takes constants like ImageNet's mean for inputs
    exported, _ = tf2onnx.convert.from_graph_def(
        tf2onnx.tf_loader.from_function(function, [pixels], [probabilities]),
        input_names=[pixels],
        output_names=[probabilities],
        tensors_to_rename={pixels: "pixels", probabilities: "probabilities"},
    )
    for value in (*exported.graph.input, *exported.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    exported.metadata_props.add(key="class_names", value=json.dumps(_read_lines(labels)))
    path.write_bytes(exported.SerializeToString())


class _Candidate(NamedTuple):
    file: str
    run: Callable[[np.ndarray], np.ndarray]  # uint8 [B, H, W, C] -> probabilities, float32 [B, K]
    compared_with: str | None
    must_agree: bool


def _write(
    model: tf.keras.Model, class_names: tuple[str, ...], formats: list[str], *, folder: pathlib.Path
) -> list[_Candidate]:
    labels = folder / "labels.txt"
    labels.write_text("".join(f"{name}\n" for name in class_names), encoding="utf-8")
    candidates = [_Candidate(_KERAS, model.predict_on_batch, None, must_agree=False)]
    reference, in_float32 = _KERAS, models.in_float32(model)
    if in_float32 is not model:  # says what the change of precision alone does
        reference = _KERAS_FLOAT32
        candidates.append(_Candidate(reference, in_float32.predict_on_batch, _KERAS, must_agree=False))
    if "savedmodel" in formats:
        path = folder / "savedmodel"
        write_saved_model(model, labels, path)
        candidates.append(_Candidate(path.name, _saved_model_runner(path), _KERAS, must_agree=True))
    if "tflite" in formats:
        for name, is_quantized in (("model_float32.tflite", False), ("model_dynamic_range.tflite", True)):
            write_tflite(in_float32, labels, folder / name, is_quantized=is_quantized)
            candidates.append(_Candidate(name, _tflite_runner(folder / name), reference, not is_quantized))
    if "onnx" in formats:
        path = folder / "model.onnx"
        write_onnx(in_float32, labels, path)
        candidates.append(_Candidate(path.name, _onnx_runner(path), reference, must_agree=True))
    return candidates


def _check(
    candidates: list[_Candidate], examples: input_pipeline.Examples, *, num_images: int, folder: pathlib.Path
) -> list[dict]:
    """Returns a row a candidate: all run on the same batches."""
    chosen = np.linspace(0, len(examples) - 1, num_images).astype(int)
    batches = input_pipeline.make_indexed_dataset(examples, chosen, global_batch_size=BATCH_SIZE)
    results = {}  # {file: [N, K]}
    with input_pipeline.naming_bad_files(examples):
        for candidate in candidates:
            logging.info("running %s on %d of %d test images", candidate.file, num_images, len(examples))
            results[candidate.file] = np.concatenate(
                [candidate.run(images) for images, _ in batches.as_numpy_iterator()]
            )
    rows = []
    for candidate in candidates:
        found = results[candidate.file]
        expected = results[candidate.compared_with or candidate.file]
        rows.append(
            {
                "file": candidate.file,
                "num_bytes": _num_bytes(folder / candidate.file),
                "accuracy": float((found.argmax(1) == examples.labels[chosen]).mean()),
                "compared_with": candidate.compared_with,
                "agreement": float((found.argmax(1) == expected.argmax(1)).mean()),
                "max_difference": float(np.abs(found - expected).max()),
                "must_agree": candidate.must_agree,
            }
        )
    return rows


def _num_bytes(path: pathlib.Path) -> int | None:
    paths = [path, *path.rglob("*")]
    return sum(path.stat().st_size for path in paths if path.is_file()) or None


def _saved_model_runner(path: pathlib.Path) -> Callable[[np.ndarray], np.ndarray]:
    loaded = tf.saved_model.load(str(path))

    def run(images):  # by way of the bytes of PNG files, which takes in both signatures
        encoded = tf.map_fn(tf.io.encode_png, tf.constant(images), fn_output_signature=tf.string)
        return loaded.signatures["serving_default"](encoded=encoded)["probabilities"].numpy()

    return run


def _tflite_runner(path: pathlib.Path) -> Callable[[np.ndarray], np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will move to another package, which we are not asking users for
        interpreter = tf.lite.Interpreter(str(path), num_threads=os.cpu_count())
    signature = interpreter.get_signature_runner()
    return lambda images: signature(pixels=images)["probabilities"]


def _onnx_runner(path: pathlib.Path) -> Callable[[np.ndarray], np.ndarray]:
    (onnxruntime,) = _import_for_onnx("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: session.run(["probabilities"], {"pixels": images})[0]


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Keeps back what TensorFlow and the converters tell of their insides: some 20 lines a model, none for users."""
    verbosity, level = logging.get_verbosity(), tf.get_logger().level
    logging.set_verbosity(logging.ERROR)
    tf.get_logger().setLevel("ERROR")
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        tf.get_logger().setLevel(level)


def _import_for_onnx(*names: str) -> list[types.ModuleType]:
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise InputError(f"--format=onnx: {error}; pip install 'fashion-oct[onnx]' brings what it needs") from error


def _trace(model: tf.keras.Model):
    """Returns the model as a concrete function: pixels (uint8 [B, H, W, C]) -> {"probabilities": float32 [B, K]}."""
    pixels = tf.TensorSpec([None, *model.input_shape[1:]], tf.uint8, name="pixels")

    @tf.function(input_signature=[pixels])
    def predict(pixels):
        return {"probabilities": model(pixels, training=False)}

    return predict.get_concrete_function()


def _with_weights_of(model: tf.keras.Model) -> tf.Module:
    """Returns what owns a model's variables, as TensorFlow wants it for saving, without all else that Keras saves."""
    module = tf.Module()
    # Keras 3 wraps its variables
    module.weights = [weight if isinstance(weight, tf.Variable) else weight.value for weight in model.weights]
    return module


def _read_lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
