"""Exported models: what they take and give, that they say what Keras says, and that nothing half-done is left."""

import csv
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from documents import snippets

from fashion_oct import datasets, evaluation, export, exporting, input_pipeline, models, options, prediction
from fashion_oct.errors import InputError

Image = pytest.importorskip("PIL.Image")

CLASSES = ["DRUSEN", "Ödem", "CNV"]  # not in the order of the alphabet, and not all ASCII
SHAPE = (32, 32, 1)
SNIPPETS = snippets("docs/serving.md")
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("tf2onnx", "onnxruntime"))
FORMATS = list(export.FORMATS) if HAS_ONNX else ["savedmodel", "tflite"]
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="tf2onnx and onnxruntime are not installed")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """An OCT folder of noise in several sizes and brightnesses: one training and four test images a class."""
    folder = tmp_path_factory.mktemp("data")
    for label, name in enumerate(CLASSES):
        for split, count in (("train", 1), ("test", 4)):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                rng = np.random.default_rng([label, index, count])
                pixels = rng.integers(0, rng.integers(60, 256), (32 + 9 * index, 32 + 5 * label), np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{name}-{10 * label + index}-{count}.jpeg")
    return folder


@pytest.fixture(scope="module")
def scans(data_dir):
    """The test files in the order of the labels: paths, pixels uint8 [12, 32, 32, 1], labels [12]."""
    splits = datasets.load("oct2017", data_dir=str(data_dir), image_size=32, labels=",".join(CLASSES))
    return splits.test.paths, *input_pipeline.take(splits.test, np.arange(12))


@pytest.fixture(scope="module")
def make_run(data_dir, scans, tmp_path_factory):
    """Makes a run folder of an untrained model that calls the brighter scans one class and the darker ones others."""

    def make(network=models.convnet, *, policy="float32", **options):
        tf.keras.utils.set_random_seed(1)
        tf.keras.mixed_precision.set_global_policy(policy)
        try:
            model = network(SHAPE, len(CLASSES), **options)
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")
        logits = model.get_layer("logits")
        found = tf.keras.Model(model.input, logits.output)(scans[1])
        logits.set_weights([logits.get_weights()[0], -np.float32(found).mean(axis=0)])
        run = tmp_path_factory.mktemp("run")
        model.save(run / "model.keras")
        config = {"dataset": "oct2017", "data_dir": str(data_dir), "bad_images": "error", "image_size": 32}
        settings = {
            "config": config | {"labels": ",".join(CLASSES)},
            "plan": {"batch": {"global_batch_size": 4}},
            "dataset": {"class_names": CLASSES},
        }
        (run / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        return run

    return make


@pytest.fixture(scope="module")
def exported(make_run):
    """A run of the ConvNet, exported in all formats."""
    run = make_run()
    assert exporting.export_run(str(run), FORMATS) == 0
    return run


def read_rows(folder):
    return {row["file"]: row for row in json.loads((folder / "export.json").read_text(encoding="utf-8"))["files"]}


def run_tflite(path, pixels):
    return tf.lite.Interpreter(str(path)).get_signature_runner()(pixels=pixels)["probabilities"]


def load_model(run):
    return tf.keras.models.load_model(run / "model.keras", compile=False)


def test_export_run_writes_all_files_and_no_others(exported):
    files = {"export.json", "labels.txt", "model_dynamic_range.tflite", "model_float32.tflite", "savedmodel"}
    assert set(os.listdir(exported / "export")) == files | ({"model.onnx"} if HAS_ONNX else set())
    assert sorted(os.listdir(exported)) == ["config.json", "export", "model.keras"]
    assert (exported / "export" / "labels.txt").read_text(encoding="utf-8") == "DRUSEN\nÖdem\nCNV\n"


def test_export_run_gives_size_accuracy_and_agreement_of_each_file(exported, scans):
    _, pixels, labels = scans
    rows = read_rows(exported / "export")
    expected = load_model(exported).predict(pixels, verbose=0).argmax(axis=1)
    assert len(set(expected)) > 1  # or agreement would mean nothing
    for name in set(rows) - {"model_dynamic_range.tflite"}:
        assert rows[name]["accuracy"] == pytest.approx((expected == labels).mean())
        assert rows[name]["agreement"] == 1
        assert rows[name]["max_difference"] < 1e-5
    path = exported / "export" / "model_dynamic_range.tflite"
    quantized = run_tflite(path, pixels).argmax(axis=1)
    assert rows[path.name]["agreement"] == pytest.approx((quantized == expected).mean())
    # 8 bits a weight and not 32
    assert 4 * rows[path.name]["num_bytes"] < 1.2 * rows["model_float32.tflite"]["num_bytes"]
    assert rows[path.name]["num_bytes"] == path.stat().st_size


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_saved_model_equals_predict_on_files(make_run, scans, tmp_path, capsys, policy):
    run = make_run(policy=policy)
    assert exporting.export_run(str(run), ["savedmodel"], out=str(tmp_path / "out")) == 0
    capsys.readouterr()
    assert prediction.predict_files(str(run), scans[0]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    served = tf.saved_model.load(str(tmp_path / "out" / "savedmodel"))
    encoded = tf.stack([tf.io.read_file(path) for path in scans[0]])
    result = served.signatures["serving_default"](encoded=encoded)
    assert [name.decode() for name in result["class"].numpy()] == [row["class"] for row in rows]
    expected = [[float(row[name]) for name in CLASSES] for row in rows]
    np.testing.assert_allclose(result["probabilities"], expected, rtol=0, atol=1e-5)


def test_saved_model_needs_only_tensorflow(exported, scans):
    code = f"""
import sys
import tensorflow as tf
served = tf.saved_model.load("savedmodel")
encoded = tf.stack([tf.io.read_file(path) for path in {scans[0]}])
print(served.signatures["serving_default"](encoded=encoded)["probabilities"].numpy().tolist())
assert "fashion_oct" not in sys.modules
"""
    arguments = {"cwd": exported / "export", "capture_output": True, "text": True}
    output = subprocess.run([sys.executable, "-c", code], check=True, **arguments).stdout
    expected = load_model(exported).predict_on_batch(scans[1])
    np.testing.assert_allclose(json.loads(output), expected, rtol=0, atol=1e-5)


def test_saved_model_takes_pixels_and_png(exported, scans):
    pixels = scans[1][:3]
    served = tf.saved_model.load(str(exported / "export" / "savedmodel"))
    expected = load_model(exported).predict_on_batch(pixels)
    encoded = tf.stack([tf.io.encode_png(image) for image in pixels])
    for result in (served.signatures["pixels"](pixels=pixels), served.signatures["serving_default"](encoded=encoded)):
        assert [name.decode() for name in result["class"].numpy()] == [CLASSES[i] for i in expected.argmax(axis=1)]
        np.testing.assert_allclose(result["probabilities"], expected, rtol=0, atol=1e-6)


def test_saved_model_holds_the_class_names(exported):
    served = tf.saved_model.load(str(exported / "export" / "savedmodel"))
    path = served.labels.asset_path.numpy().decode()
    assert pathlib.Path(path).read_text(encoding="utf-8").splitlines() == CLASSES


@pytest.mark.parametrize("name", ["model_float32.tflite", "model_dynamic_range.tflite"])
def test_tflite_takes_any_number_of_pixels_and_holds_the_class_names(exported, scans, name):
    path = exported / "export" / name
    expected = load_model(exported).predict_on_batch(scans[1])
    for num in (1, 12):
        np.testing.assert_allclose(run_tflite(path, scans[1][:num]), expected[:num], atol=2e-2)
    assert tf.lite.Interpreter(str(path)).get_input_details()[0]["dtype"] == np.uint8
    assert zipfile.ZipFile(path).read("labels.txt").decode().splitlines() == CLASSES


def test_tflite_of_a_bfloat16_run_has_its_weights_in_float32(make_run, scans, tmp_path):
    run, out = make_run(policy="mixed_bfloat16"), tmp_path / "out"
    assert exporting.export_run(str(run), ["tflite"], out=str(out)) == 0
    in_float32 = models.convnet(SHAPE, len(CLASSES))
    in_float32.set_weights(load_model(run).get_weights())
    expected = in_float32.predict_on_batch(scans[1])
    np.testing.assert_allclose(run_tflite(out / "model_float32.tflite", scans[1]), expected, rtol=0, atol=1e-5)
    row = read_rows(out)["model_float32.tflite"]
    assert (row["compared_with"], row["agreement"]) == ("model.keras in float32", 1)
    # what the precision changes is said, whatever it is
    assert 1e-5 < read_rows(out)["model.keras in float32"]["max_difference"] < 0.1


@needs_onnx
def test_onnx_takes_any_number_of_pixels_and_holds_the_class_names(exported, scans):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported / "export" / "model.onnx"))
    (pixels,) = session.get_inputs()
    assert (pixels.name, pixels.shape, pixels.type) == ("pixels", ["batch", *SHAPE], "tensor(uint8)")
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == CLASSES
    expected = load_model(exported).predict_on_batch(scans[1])
    for num in (1, 12):
        (found,) = session.run(["probabilities"], {"pixels": scans[1][:num]})
        np.testing.assert_allclose(found, expected[:num], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_export_run_exports_vgg16(make_run, tmp_path, policy):
    run = make_run(models.vgg16, weights="none", policy=policy)
    assert exporting.export_run(str(run), FORMATS, out=str(tmp_path / "out")) == 0
    rows = read_rows(tmp_path / "out").values()
    checked = [(row["agreement"], row["max_difference"] < 1e-5) for row in rows if row["must_agree"]]
    assert checked == [(1, True)] * len(FORMATS)


def test_export_run_leaves_nothing_where_a_file_disagrees_with_keras(make_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "MIN_AGREEMENT", 1.5)  # more than there can be
    assert exporting.export_run(str(make_run()), ["tflite"], out=str(tmp_path / "out")) == 1
    output, errors = capsys.readouterr()
    assert "model_dynamic_range.tflite" in output  # the table is there to be read
    assert "error: model_float32.tflite: less than 150.0% same class as Keras" in errors
    assert os.listdir(tmp_path) == []


def test_export_run_refuses_a_folder_that_holds_something(exported):
    before = sorted(exported.rglob("*"))
    with pytest.raises(InputError, match="not empty"):
        exporting.export_run(str(exported), ["savedmodel"])
    assert sorted(exported.rglob("*")) == before


def test_export_run_fills_an_empty_folder_and_checks_as_many_images_as_told(make_run, tmp_path, scans, capsys):
    run = make_run()
    assert exporting.export_run(str(run), ["savedmodel"], out=str(tmp_path), num_images=3) == 0
    assert "checked on 3 of 12 test images" in capsys.readouterr().out
    # the first, the last and one between, so that each class is among them
    chosen = [0, 5, 11]
    correct = load_model(run).predict(scans[1], verbose=0).argmax(axis=1) == scans[2]
    assert read_rows(tmp_path)["savedmodel"]["accuracy"] == pytest.approx(correct[chosen].mean())


def test_export_run_says_what_onnx_needs_before_anything_is_done(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)  # as if it were not installed
    with pytest.raises(InputError, match=re.escape("pip install 'fashion-oct[onnx]'")):
        exporting.export_run(str(tmp_path / "no run"), ["onnx"])


def test_export_run_refuses_another_dataset(make_run, tmp_path):
    run = make_run()
    settings = evaluation.read_settings(run)
    settings["dataset"]["class_names"] = ["A", "B", "C"]
    (run / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="was trained on the classes"):
        exporting.export_run(str(run), ["savedmodel"], out=str(tmp_path / "out"))
    assert os.listdir(tmp_path) == []


def test_export_takes_several_formats_with_commas(make_run, tmp_path):
    arguments = ["export", f"--workdir={make_run()}", "--format=tflite,savedmodel", f"--out={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as exit_:
        options.run_command(export.run, export.define_flags, usage=export.__doc__, argv=arguments)
    assert exit_.value.code == 0
    assert {"savedmodel", "model_float32.tflite"} <= set(os.listdir(tmp_path / "out"))


def test_export_names_the_formats_there_are(tmp_path, capsys):
    arguments = ["export", f"--workdir={tmp_path}", "--format=tflite,h5"]
    with pytest.raises(SystemExit) as exit_:
        options.run_command(export.run, export.define_flags, usage=export.__doc__, argv=arguments)
    assert exit_.value.code == 2
    assert (
        capsys.readouterr().err == "error: --format='h5': give one or more of savedmodel, tflite, onnx, with commas\n"
    )


@pytest.mark.parametrize(
    "snippet", [SNIPPETS[0], SNIPPETS[1], pytest.param(SNIPPETS[2], marks=needs_onnx)], ids=export.FORMATS
)
def test_snippets_of_the_documentation_run(exported, scans, tmp_path, monkeypatch, capsys, snippet):
    shutil.copytree(exported / "export", tmp_path, dirs_exist_ok=True)
    shutil.copy(scans[0][0], tmp_path / "scan.jpeg")
    np.save(tmp_path / "pixels.npy", scans[1][:1])
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    name, numbers = capsys.readouterr().out.split(maxsplit=1)
    expected = load_model(exported).predict_on_batch(scans[1][:1])[0]
    assert name == CLASSES[expected.argmax()]
    np.testing.assert_allclose([float(number) for number in numbers.strip("[] \n").split()], expected, atol=1e-4)
