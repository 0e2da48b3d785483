"""One attack a test: what is read runs no code, writes nowhere else, and takes bounded memory and time."""

import io
import json
import os
import pathlib
import pickle
import struct
import tarfile
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from fashion_oct import datasets, evaluation, input_pipeline, oct_folder, prediction, tfds_folder
from fashion_oct.errors import InputError

layers = tf.keras.layers


def encoded(*, size=(16, 16), mode="L", kind="JPEG", **options):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0]), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def with_sides(jpeg, width, height):
    """The JPEG with other sides in its frame header (FF C0 or FF C2, length, precision, height, width)."""
    at = max(jpeg.find(b"\xff\xc0"), jpeg.find(b"\xff\xc2"))
    return jpeg[: at + 5] + struct.pack(">HH", height, width) + jpeg[at + 9 :]


def write(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)
    return path


# Model files


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that can be imported; the path it names exists once that was done."""
    sprung = tmp_path / "sprung"
    write(tmp_path / "modules" / "evil_module.py", f"open({str(sprung)!r}, 'w')\nFeature = dict".encode())
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return sprung


def save_run(folder, *, before=lambda x: x, num_outputs=2, shape=(8, 8, 1)):
    images = layers.Input(shape, dtype="uint8")
    x = layers.Flatten()(before(layers.Rescaling(1 / 255)(images)))
    folder.mkdir(exist_ok=True)
    model = tf.keras.Model(images, layers.Dense(num_outputs, activation="softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy")
    model.save(folder / "model.keras")
    (folder / "config.json").write_text(json.dumps({"dataset": {"class_names": ["dark", "bright"]}}))
    return folder


def architecture(folder):
    """Reads the configuration of a saved model: in Keras 2.12 an HDF5 file, in Keras 3 a zip."""
    path = folder / "model.keras"
    if zipfile.is_zipfile(path):
        return json.loads(zipfile.ZipFile(path).read("config.json"))
    with h5py.File(path) as file:
        return json.loads(file.attrs["model_config"])


def replace_architecture(folder, config):
    path = folder / "model.keras"
    if zipfile.is_zipfile(path):
        replace_members(path, {"config.json": json.dumps(config).encode()})
    else:
        with h5py.File(path, "a") as file:
            file.attrs["model_config"] = json.dumps(config)


def replace_members(path, new, *, without=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name not in without} | new
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, contents in members.items():
            archive.writestr(name, contents)


def layer_of(config, class_name):
    return next(layer for layer in config["config"]["layers"] if layer["class_name"] == class_name)


def test_load_model_loads_what_is_not_forged(tmp_path):
    config = architecture(save_run(tmp_path))
    replace_architecture(tmp_path, config)
    assert evaluation.load_model(tmp_path).output_shape == (None, 2)


def test_load_model_runs_no_lambda_layer(tmp_path, monkeypatch):
    sprung = tmp_path / "sprung"
    monkeypatch.setenv("SPRUNG", str(sprung))
    save_run(
        tmp_path, before=layers.Lambda(lambda x: (__import__("os").mkdir(__import__("os").environ["SPRUNG"]), x)[1])
    )
    sprung.rmdir()  # building the model has made it
    with pytest.raises(InputError, match="names 'Lambda'"):
        evaluation.load_model(tmp_path)
    assert not sprung.exists()


def test_load_model_imports_no_module(tmp_path, trap):
    config = architecture(save_run(tmp_path))
    layer_of(config, "Dense")["config"]["activation"] = {
        "class_name": "function", "config": "Feature", "module": "evil_module", "registered_name": "Feature"
    }  # fmt: skip
    layer_of(config, "Rescaling").update(module="evil_module", registered_name="Rescaling")
    replace_architecture(tmp_path, config)
    with pytest.raises(InputError, match="of the module 'evil_module'"):
        evaluation.load_model(tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize("class_name", ["function", "__lambda__", "TFOpLambda", "TFSMLayer", "JaxLayer"])
def test_load_model_refuses_a_class_that_no_model_needs(tmp_path, class_name):
    config = architecture(save_run(tmp_path))
    layer_of(config, "Dense")["config"]["activation"] = {"class_name": class_name, "config": {}, "module": "keras"}
    replace_architecture(tmp_path, config)
    with pytest.raises(InputError, match=f"names '{class_name}'"):
        evaluation.load_model(tmp_path)


def test_load_model_refuses_an_operation_other_than_indexing(tmp_path):
    config = architecture(save_run(tmp_path))
    layer_of(config, "Rescaling").update(class_name="SlicingOpLambda", config={"function": "io.write_file"})
    replace_architecture(tmp_path, config)
    with pytest.raises(InputError, match="names 'SlicingOpLambda'"):
        evaluation.load_model(tmp_path)


class Bomb:
    def __reduce__(self):
        return open, (os.environ["SPRUNG"], "w")


def test_load_model_unpickles_no_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRUNG", str(tmp_path / "sprung"))
    config = architecture(save_run(tmp_path))
    weights = io.BytesIO()
    np.savez(weights, layer=np.array(Bomb(), object))
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", "{}")
        archive.writestr("model.weights.npz", weights.getvalue())
    with pytest.raises(InputError, match=r"holds the files .*model\.weights\.npz"):
        evaluation.load_model(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_load_model_inflates_no_zip_bomb(tmp_path):
    config = architecture(save_run(tmp_path))
    with zipfile.ZipFile(tmp_path / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", "{}")
        archive.writestr("model.weights.h5", bytes(10_000_000))
    with pytest.raises(InputError, match="holds compressed files"):
        evaluation.load_model(tmp_path)


def test_load_model_refuses_weights_larger_than_the_file(tmp_path):
    path = save_run(tmp_path) / "model.keras"
    is_zip = zipfile.is_zipfile(path)
    weights = io.BytesIO(zipfile.ZipFile(path).read("model.weights.h5") if is_zip else path.read_bytes())
    with h5py.File(weights, "a") as file:
        file.create_dataset("more", (1 << 40,), "float32")  # 4 TiB of which none is written
    if is_zip:
        replace_members(path, {"model.weights.h5": weights.getvalue()})
    else:
        path.write_bytes(weights.getvalue())
    with pytest.raises(InputError, match="its weights take 4398046"):
        evaluation.load_model(tmp_path)


@pytest.mark.parametrize("contents", [b"", b"PK\5\6" + bytes(18), b"\x89HDF\r\n\x1a\n" + bytes(500), bytes(1000)])
def test_load_model_names_a_damaged_file(tmp_path, contents):
    path = write(save_run(tmp_path) / "model.keras", contents)
    with pytest.raises(InputError, match=f"^{path} cannot be loaded"):
        evaluation.load_model(tmp_path)


@pytest.mark.parametrize("forged", [{"num_outputs": 3}, {"shape": (8, 8, 2)}, {"shape": (8, 9000, 1)}])
def test_load_model_refuses_a_model_that_does_not_fit_the_run(tmp_path, forged):
    with pytest.raises(InputError, match="not images to 2 classes"):
        evaluation.load_model(save_run(tmp_path, **forged))


# Run folders

BAD_CONFIGS = {
    "a list": b"[]",
    "nothing": b"{}",
    "null": b'{"dataset": null}',
    "no names": b'{"dataset": {"class_names": []}}',
    "a text": b'{"dataset": {"class_names": "dark"}}',
    "numbers": b'{"dataset": {"class_names": [1, 2]}}',
    "lists": b'{"dataset": {"class_names": [["dark"], "bright"]}}',
    "deep": b"[" * 100_000,
    "long number": b"9" * 10_000,
    "no UTF-8": b"\xff\xfe",
    "cut": b'{"dataset',
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_read_settings_names_a_damaged_file(tmp_path, case):
    path = write(tmp_path / "config.json", BAD_CONFIGS[case])
    with pytest.raises(InputError, match=f"^{path} cannot be read"):
        evaluation.read_settings(tmp_path)


def test_read_settings_does_not_read_a_huge_file(tmp_path):
    os.truncate(write(tmp_path / "config.json", b"{}"), 1 << 40)  # sparse
    with pytest.raises(InputError, match="the limit is"):
        evaluation.read_settings(tmp_path)


def test_read_settings_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match=r"has no config\.json"):
        evaluation.read_settings(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset", "imagenet"),
        ("dataset", ["oct2017"]),
        ("data_dir", 5),
        ("data_dir", "a\0b"),
        ("labels", ["CNV"]),
        ("bad_images", "keep"),
        ("image_size", "224"),
        ("image_size", 10**9),
        ("image_size", 224.0),
        ("global_batch_size", 0),
        ("global_batch_size", None),
    ],
)
def test_evaluate_run_refuses_settings_that_no_run_has(tmp_path, name, value):
    config = {"dataset": "oct2017", "data_dir": None, "labels": None, "bad_images": "error", "image_size": 224}
    plan = {"batch": {"global_batch_size": 8}}
    (config if name in config else plan["batch"])[name] = value
    settings = {"config": config, "plan": plan, "dataset": {"class_names": ["CNV"]}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="does not hold the settings of a run"):
        evaluation.evaluate_run(str(tmp_path))


# TensorFlow Datasets folders


@pytest.mark.parametrize(
    "feature",
    [
        {"pythonClassName": "evil_module.Feature", "jsonFeature": {"json": "{}"}},
        {"python_class_name": "evil_module.Feature", "jsonFeature": {"json": "{}"}},
        {"type": "evil_module.Feature", "content": {}},
        {
            "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
            "jsonFeature": {"json": json.dumps({"image": {"type": "evil_module.Feature", "content": {}}})},
        },
    ],
    ids=["as written", "field name", "old form", "JSON in a text"],
)
@pytest.mark.parametrize("place", ["features.json", "dataset_info.json"])
def test_open_builder_imports_no_module(tmp_path, trap, feature, place):
    info = {"name": "fashion_mnist", "version": "3.0.1", "fileFormat": "tfrecord"}
    good = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict", "featuresDict": {}}
    contents = {"features.json": good, "dataset_info.json": info}
    contents[place] = feature if place == "features.json" else info | {"features": feature}
    for name, value in contents.items():
        (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"^{place} names the feature class 'evil_module\.Feature'"):
        tfds_folder.open_builder(tmp_path, "fashion_mnist")
    assert not trap.exists()


class Records:
    """Serialized examples in memory, as TensorFlow Datasets gives them."""

    def __init__(self, images):
        self._images = images

    def __getitems__(self, positions):
        return [self._serialized(self._images[position]) for position in positions]

    def _serialized(self, image):
        feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[image]))
        return tf.train.Example(features=tf.train.Features(feature={"image": feature})).SerializeToString()


def scan_bomb(num_scans):
    """A progressive JPEG of `num_scans` scans more, ten bytes each: a bit of the first coefficient, all of it zero."""
    return encoded(progressive=True)[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x10" * num_scans + b"\xff\xd9"


BAD_RECORDS = {
    "wide PNG": encoded(size=(8193, 8), kind="PNG"),
    "wide JPEG": encoded(size=(8193, 8)),
    "GIF": encoded(kind="GIF"),
    "BMP": encoded(kind="BMP"),
    "empty": b"",
    "scans": scan_bomb(101),
    "JPEG bomb": with_sides(encoded(), 22_000, 22_000),  # 484 megapixels, which TensorFlow would decode
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_record_examples_name_a_bomb(case):
    examples = datasets.RecordExamples(
        ["good.jpeg", "bad.jpeg"],
        np.zeros(2),
        (16, 16, 1),
        source=Records([encoded(), BAD_RECORDS[case]]),
        records=np.arange(2),
    )
    with pytest.raises(InputError, match=r"'bad\.jpeg' cannot be read or does not decode"):  # noqa: SIM117
        with input_pipeline.naming_bad_files(examples):
            input_pipeline.take(examples, np.arange(2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label", [0, 2]),
        ("label", [0, -1]),
        ("label", [0]),
        ("record", [0, 7]),
        ("record", [0, "1"]),
        ("file_name", ["a.jpeg", "../../b.jpeg"]),
        ("file_name", ["a.jpeg"]),
        ("patient", ["1", 2]),
    ],
)
def test_check_columns_refuses_what_the_records_cannot_have(name, value):
    good = {"file_name": ["a.jpeg", "b.jpeg"], "label": [0, 1], "record": [1, 0], "patient": ["1", "2"]}
    datasets._check_columns(good, num_classes=2, num_records=2)
    with pytest.raises((ValueError, TypeError)):
        datasets._check_columns(good | {name: value}, num_classes=2, num_records=2)


# Images


@pytest.mark.parametrize(
    "contents",
    [
        encoded(size=(8193, 8)),
        encoded(size=(8, 8193)),
        with_sides(encoded(), 22_000, 22_000),
        encoded(size=(8193, 8), kind="PNG"),
        encoded(size=(8, 8193), kind="PNG"),
    ],
    ids=["wide JPEG", "high JPEG", "JPEG bomb", "wide PNG", "high PNG"],
)
def test_decode_image_refuses_a_bomb_by_its_header(contents):
    with pytest.raises(tf.errors.InvalidArgumentError, match="8192"):
        input_pipeline.decode_image(tf.constant(contents), (16, 16, 1))


def test_decode_image_refuses_a_png_whose_header_is_not_the_first_chunk():
    png = encoded(size=(8193, 8), kind="PNG")
    hidden = png[:8] + struct.pack(">I4sII", 8, b"vpAg", 16, 16) + bytes(4) + png[8:]  # 16 where the sides would be
    with pytest.raises(tf.errors.InvalidArgumentError):
        input_pipeline.decode_image(tf.constant(hidden), (16, 16, 1))


@pytest.mark.parametrize("kind", ["GIF", "BMP"])
def test_decode_image_takes_no_other_kind(kind):
    with pytest.raises(tf.errors.InvalidArgumentError):
        input_pipeline.decode_image(tf.constant(encoded(kind=kind)), (16, 16, 1))


def hide_frame(marker):
    """A JPEG that a decoder takes for 22,000 x 22,000 pixels.

    A walk that gives `marker`, which has no size, the next two bytes for one comes to a second frame, of 16 x 16.
    """
    after = with_sides(encoded(), 22_000, 22_000)[2:-2]
    size = int.from_bytes(after[:2], "big")
    return (b"\xff\xd8\xff" + bytes([marker]) + after).ljust(4 + size, b"\0") + encoded()[2:]


@pytest.mark.parametrize("marker", [0x00, 0x01, 0xD0, 0xD7, 0xD8])
def test_check_header_finds_no_other_frame_than_a_decoder(tmp_path, marker):
    assert oct_folder.check_header(write(tmp_path / "x.jpeg", hide_frame(marker))) == "has a damaged header"


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_check_header_counts_scans(tmp_path, mode):
    contents = encoded(mode=mode, progressive=True)
    num_scans = contents.count(b"\xff\xda")
    more = b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x10"
    at_limit = contents[:-2] + more * (100 - num_scans) + b"\xff\xd9"
    assert oct_folder.check_header(write(tmp_path / "x.jpeg", at_limit)) == (16, 16, mode)
    above = contents[:-2] + more * (101 - num_scans) + b"\xff\xd9"
    assert oct_folder.check_header(write(tmp_path / "y.jpeg", above)) == "has 101 scans; the limit is 100"


@pytest.fixture
def small_set(tmp_path):
    """An OCT2017 folder of one class, with one good image a split."""
    for split in ("train", "test"):
        write(tmp_path / "OCT2017" / split / "CNV" / f"CNV-{len(split)}-1.jpeg", encoded())
    return tmp_path / "OCT2017"


BOMBS = {
    "60000": (with_sides(encoded(), 60_000, 60_000), "is 60000x60000 pixels; each side must be 8 to 8192"),
    "hidden": (hide_frame(0x01), "has a damaged header"),
    "scans": (scan_bomb(101), "scans; the limit is 100"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_training_names_a_bomb_or_skips_it(small_set, case):
    contents, reason = BOMBS[case]
    path = write(small_set / "train" / "CNV" / "CNV-9-1.jpeg", contents)
    with pytest.raises(InputError, match=rf"CNV-9-1\.jpeg' .*{reason}"):
        datasets.load("oct2017", data_dir=str(small_set), bad_images="error")
    splits = datasets.load("oct2017", data_dir=str(small_set), bad_images="skip")
    assert len(splits.train) == 1
    ((bad, told),) = splits.bad
    assert (bad, told.endswith(reason)) == (str(path), True)


def test_leakage_takes_a_bomb_for_an_image_that_does_not_decode(small_set):
    write(small_set / "train" / "CNV" / "CNV-9-1.jpeg", with_sides(encoded(), 60_000, 60_000))
    train, test = (oct_folder.list_split(small_set, split, check_headers=False) for split in ("train", "test"))
    assert oct_folder.leakage(train, test, pixels=True).tolist() == [True]  # the good ones show the same pixels


@pytest.mark.parametrize("case", BOMBS)
def test_predict_names_a_bomb_and_goes_on(tmp_path, capsys, case):
    contents, reason = BOMBS[case]
    run, bad, good = save_run(tmp_path), write(tmp_path / "bad.jpeg", contents), write(tmp_path / "x.jpeg", encoded())
    assert prediction.predict_files(str(run), [str(bad), str(good)]) == 1
    output, errors = capsys.readouterr()
    assert output.splitlines()[1].startswith(f"{good},")
    assert f"left out: {bad}: " in errors
    assert reason in errors


# Arrays, folders


def npy(header):
    text = (header + "\n").encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + bytes(64)


BAD_NPY = {
    "larger than the file": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 8, 8)}"),
    "larger than 64 bits": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4611686018427387904, 8, 8)}"),
    "of negative size": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 8, 8)}"),
    "of objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1, 8, 8)}"),
    "of no type": npy("{'descr': 'x', 'fortran_order': False, 'shape': (1, 8, 8)}"),
    "code": npy("__import__('os').abort()"),
    "deep": npy("(" * 5000),
    "cut": b"\x93NUMPY",
    "pickled": b"\x93NUMPY\1\0" + pickle.dumps({}),
}


@pytest.mark.parametrize("case", BAD_NPY)
def test_predict_names_a_forged_npy_and_goes_on(tmp_path, capsys, case):
    run, good = save_run(tmp_path), write(tmp_path / "x.jpeg", encoded())
    bad = write(tmp_path / "bad.npy", BAD_NPY[case])
    assert prediction.predict_files(str(run), [str(bad), str(good)]) == 1
    output, errors = capsys.readouterr()
    assert f"left out: {bad}: " in errors
    assert len(output.splitlines()) == 2


def test_expand_enters_folders_deeper_than_the_stack(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(1100):  # Python's stack has 1,000 frames
        os.mkdir("d")
        os.chdir("d")
    pathlib.Path("x.png").write_bytes(b"")
    os.chdir(tmp_path)
    try:
        ((path, problem),) = prediction.expand(["d"])
        assert (path, problem) == ("d/" * 1100 + "x.png", None)
    finally:  # pytest's own clearing up would not get so deep
        os.remove("d/" * 1100 + "x.png")
        os.removedirs("d/" * 1100)


# Archives


def make_tar(path, members, mode="w", **options):
    """Writes a tar of `TarInfo` and content; a size that was set is kept."""
    with tarfile.open(path, mode, **options) as archive:
        for member, contents in members:
            archive.addfile(member)
            archive.fileobj.write(contents.ljust(-len(contents) % 512 + len(contents), b"\0"))
            archive.offset += -len(contents) % 512 + len(contents)
    return path


def tar_member(name, *, size=0, kind=tarfile.REGTYPE, **headers):
    member = tarfile.TarInfo(name)
    member.size, member.type, member.pax_headers = size, kind, headers
    return member


def assert_refused(archive, message, **limits):
    with pytest.raises(InputError, match=message):
        oct_folder.unpack(archive, archive.parent / "out", **limits)
    assert os.listdir(archive.parent) == [archive.name]


def test_unpack_refuses_a_name_with_a_null_byte(tmp_path):
    member = tar_member("x", path="a\0b")
    assert_refused(make_tar(tmp_path / "archive", [(member, b"")], format=tarfile.PAX_FORMAT), "cannot be unpacked")


def test_unpack_refuses_a_negative_size(tmp_path):
    member = tar_member("x", size=-512)  # the next member would be this one again, without end
    archive = make_tar(tmp_path / "archive", [(member, b"")], format=tarfile.GNU_FORMAT)
    assert_refused(archive, "'x' of -512 bytes, which is no plain file")


def test_unpack_refuses_a_negative_size_in_an_extended_header(tmp_path):
    archive = make_tar(tmp_path / "archive", [(tar_member("x", size=-512), b"")], format=tarfile.PAX_FORMAT)
    assert_refused(archive, "'x' of -512 bytes")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_unpack_reads_no_huge_header(tmp_path, kind):
    member = tar_member("x", size=(1 << 20) + 1, kind=kind)
    archive = make_tar(tmp_path / "archive", [(member, bytes(member.size))], mode="w:gz")
    assert_refused(archive, "'x' of 1048577 bytes, which is no plain file")


def test_unpack_refuses_a_file_that_is_mostly_a_hole(tmp_path):
    member = tar_member("x", size=1 << 40, kind=tarfile.GNUTYPE_SPARSE)
    assert_refused(make_tar(tmp_path / "archive", [(member, b"")]), "unpacks to more than")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_unpack_inflates_no_bomb(tmp_path, kind):
    contents = bytes(2_000_000)  # to about 2,000 bytes
    if kind == "tar":
        archive = make_tar(tmp_path / "archive", [(tar_member("x", size=len(contents)), contents)], mode="w:gz")
    else:
        archive = tmp_path / "archive"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
            opened.writestr("x", contents)
    assert_refused(archive, "unpacks to more than")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_unpack_counts_folders(tmp_path, kind):
    archive = tmp_path / "archive"
    if kind == "tar":
        make_tar(archive, [(tar_member(f"d{i}", kind=tarfile.DIRTYPE), b"") for i in range(4)])
    else:
        with zipfile.ZipFile(archive, "w") as opened:
            for i in range(4):
                opened.writestr(f"d{i}/", b"")
    assert_refused(archive, "more than .* 3 files", max_files=3)


@pytest.mark.parametrize("names", [["a", "a/b"], ["a/b", "a"], ["x" * 300], ["a/" * 2500 + "b"]])
def test_unpack_refuses_names_that_no_folder_can_hold(tmp_path, names):
    archive = tmp_path / "archive"
    with zipfile.ZipFile(archive, "w") as opened:
        for name in names:
            opened.writestr(name, b"")
    assert_refused(archive, "cannot be unpacked")


def test_unpack_takes_the_folder_that_tar_writes_for_the_present_one(tmp_path):
    members = [(tar_member("./", kind=tarfile.DIRTYPE), b""), (tar_member("./a", size=3), b"abc")]
    oct_folder.unpack(make_tar(tmp_path / "archive", members), tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == b"abc"


def test_unpack_through_a_link_in_its_place_writes_behind_no_link(tmp_path):
    """A link and then a file below it: the link is refused, so that nothing is written where it leads."""
    (tmp_path / "elsewhere").mkdir()
    members = [(tar_member("a", kind=tarfile.SYMTYPE), b""), (tar_member("a/b", size=1), b"x")]
    members[0][0].linkname = str(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="'a', a link or a device"):
        oct_folder.unpack(make_tar(tmp_path / "archive", members), tmp_path / "out")
    assert os.listdir(tmp_path / "elsewhere") == []
