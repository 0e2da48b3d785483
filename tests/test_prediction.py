"""Predicting files, folders and patterns: the rows, the order, and what becomes of bad files."""

import csv
import gzip
import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from fashion_oct import prediction
from fashion_oct.errors import InputError

layers = tf.keras.layers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose model calls an 8x8 image bright with probability sigmoid(20 (mean / 255 - 1/2))."""
    images = layers.Input((8, 8, 1), dtype="uint8")
    x = layers.Rescaling(1 / 255)(images)
    x = layers.Conv2D(1, 1, use_bias=False, name="convolution")(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = tf.keras.Model(images, layers.Softmax()(layers.Dense(2, name="logits")(x)))
    model.get_layer("convolution").set_weights([np.ones((1, 1, 1, 1))])
    model.get_layer("logits").set_weights([np.array([[0.0, 20.0]]), np.array([0.0, -10.0])])
    folder = tmp_path_factory.mktemp("run")
    model.save(folder / "model.keras")
    (folder / "config.json").write_text(json.dumps({"dataset": {"class_names": ["dark", "bright"]}}))
    return folder


@pytest.fixture
def predict(run, capsys):
    """Predicts and returns the exit status, the rows as dicts and the lines of standard error."""

    def call(*arguments, **options):
        capsys.readouterr()
        status = prediction.predict_files(str(run), [str(argument) for argument in arguments], **options)
        output, errors = capsys.readouterr()
        # what the JPEG library says of damaged data on its own is none of ours
        lines = [line for line in errors.split("\n") if line.startswith(("left out", "error"))]
        return status, list(csv.DictReader(io.StringIO(output, newline=""))), lines

    return call


def encoded(value=255, *, size=(16, 16), mode="L", kind="PNG", **options):
    stream = io.BytesIO()
    Image.new("L", size, value).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def write(path, contents=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded() if contents is None else contents)
    return path


def names(rows):
    return [row["file"] for row in rows]


def noise(kind):
    """An image with much data, so that a cut goes through it."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(stream, kind)
    return stream.getvalue()


def png_header(width, height):
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + bytes(40)


def test_predict_files_writes_a_row_an_image_in_order(predict, tmp_path):
    bright, dark = write(tmp_path / "b.png"), write(tmp_path / "a.jpeg", encoded(0, kind="JPEG"))
    status, rows, errors = predict(bright, dark)
    assert (status, errors) == (0, [])
    # logits 0 and 10: 1 / (1 + e^-10) = 0.999955
    assert rows == [
        {"file": str(bright), "class": "bright", "dark": "0.000045", "bright": "0.999955"},
        {"file": str(dark), "class": "dark", "dark": "0.999955", "bright": "0.000045"},
    ]


def test_predict_files_keeps_the_order_over_batches_and_bad_files(predict, tmp_path):
    values = np.random.default_rng(0).permutation(100)[:70]  # three batches
    for number, value in enumerate(values):
        write(tmp_path / f"{number:02d}.png", noise("PNG")[:-500] if number == 40 else encoded(int(value)))
    status, rows, errors = predict(tmp_path)
    kept = [number for number in range(70) if number != 40]
    assert (status, len(errors)) == (1, 1)
    assert names(rows) == [str(tmp_path / f"{number:02d}.png") for number in kept]
    logits = 20 * (values[kept] / 255 - 0.5)
    np.testing.assert_allclose([float(row["bright"]) for row in rows], 1 / (1 + np.exp(-logits)), atol=1e-6)


def test_predict_files_walks_folders_in_sorted_order_without_hidden_and_other_files(predict, tmp_path):
    wanted = [write(tmp_path / name) for name in ("A.PNG", "b/c.jpg", "b/d/e.JPEG", "f.png")]
    for name in (".hidden.png", ".folder/a.png", "__MACOSX/a.png", "notes.txt", "b/Thumbs.db"):
        write(tmp_path / name)
    status, rows, errors = predict(tmp_path)
    assert (status, errors) == (0, [])
    assert names(rows) == [str(path) for path in wanted]


def test_predict_files_expands_patterns_in_sorted_order(predict, tmp_path):
    for name in ("CNV-2.png", "CNV-1.png", "DME-1.png", "below/CNV-3.png"):
        write(tmp_path / name)
    assert names(predict(f"{tmp_path}/CNV-*.png")[1]) == [f"{tmp_path}/CNV-1.png", f"{tmp_path}/CNV-2.png"]
    assert len(predict(f"{tmp_path}/**/CNV-*")[1]) == 3


def test_predict_files_takes_an_existing_name_for_no_pattern(predict, tmp_path):
    path = write(tmp_path / "scan[1].png")
    write(tmp_path / "scan1.png")
    assert names(predict(path)[1]) == [str(path)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing-*.png", "matches no file"),
        ("missing.png", "cannot be read: No such file or directory"),
        ("empty-folder.jpeg", "is a folder without PNG or JPEG files"),
        ("pipe.png", "is no regular file"),
        ("loop.jpeg", "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_predict_files_names_what_is_no_file_and_predicts_the_rest(predict, tmp_path, name, reason):
    good = write(tmp_path / "good.png")
    (tmp_path / "empty-folder.jpeg").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.jpeg").symlink_to("loop.jpeg")
    status, rows, errors = predict(tmp_path / name, good)
    assert (status, names(rows)) == (1, [str(good)])
    assert errors == [f"left out: {tmp_path / name}: {reason}"]


BAD_CONTENTS = {
    "empty": (b"", "is empty"),
    "text": (b"no image", "is neither PNG nor JPEG, it begins with b'no image'; convert it"),
    "gif": (encoded(kind="GIF"), r"is neither PNG nor JPEG, it begins with b'GIF87a\x10\x00'; convert it"),
    "bmp": (encoded(kind="BMP"), "is neither PNG nor JPEG"),
    "truncated JPEG": (noise("JPEG")[:-500], "is truncated: it has no end marker"),
    # the markers of the quantization tables made into comments
    "JPEG without tables": (
        noise("JPEG").replace(b"\xff\xdb", b"\xff\xfe"),
        "does not decode: it is damaged or truncated",
    ),
    "truncated PNG": (noise("PNG")[:-500], "does not decode: it is damaged or truncated"),
    "PNG cut in its header": (encoded()[:20], "is a PNG with a damaged header"),
    "CMYK": (encoded(mode="CMYK", kind="JPEG"), "is CMYK; convert it to grey or RGB"),
    "one pixel": (encoded(size=(1, 1)), "is 1x1 pixels; each side must be 8 to 8192"),
    "wide PNG": (encoded(size=(20000, 8)), "is 20000x8 pixels; each side must be 8 to 8192"),
    "wide JPEG": (encoded(size=(20000, 8), kind="JPEG"), "is 20000x8 pixels; each side must be 8 to 8192"),
    "PNG bomb": (png_header(2**31 - 1, 2**31 - 1), "is 2147483647x2147483647 pixels"),
    "npy of another shape": (b"", "holds uint8 of shape (3, 9, 9, 1): give uint8 [N, 8, 8, 1]"),
    "npy of objects": (b"", "is a damaged .npy file, or holds Python objects"),
}


@pytest.mark.parametrize("case", BAD_CONTENTS)
def test_predict_files_names_a_bad_file_with_its_reason_and_predicts_the_rest(predict, tmp_path, case):
    contents, reason = BAD_CONTENTS[case]
    bad, good = write(tmp_path / "bad.png", contents), write(tmp_path / "good.png")
    if case.startswith("npy"):
        with open(bad, "wb") as stream:
            np.save(stream, np.zeros((3, 9, 9), np.uint8) if "shape" in case else np.array([None]))
    status, rows, errors = predict(bad, good)
    assert (status, names(rows), len(errors)) == (1, [str(good)], 1)
    assert errors[0].startswith(f"left out: {bad}: {reason}")


@pytest.mark.parametrize(
    "contents",
    [
        encoded(kind="PNG"),
        encoded(kind="JPEG", progressive=True),
        encoded(mode="RGB", kind="JPEG"),
        encoded(mode="RGBA"),
        encoded(mode="P"),
        encoded(mode="1"),
    ],
    ids=["PNG named .jpeg", "progressive", "RGB", "RGBA", "palette", "1 bit"],
)
def test_predict_files_decodes_by_content(predict, tmp_path, contents):
    status, rows, _ = predict(write(tmp_path / "scan.jpeg", contents))
    assert (status, rows[0]["bright"]) == (0, "0.999955")


def test_predict_files_takes_the_upper_bits_of_a_16_bit_png(predict, tmp_path):
    Image.fromarray(np.full((16, 16), 51 * 257, np.uint16)).save(tmp_path / "scan.png")
    # 51 of 255 = 0.2: logit 20 x -0.3 = -6, sigmoid 0.002473
    assert predict(tmp_path / "scan.png")[1][0]["bright"] == "0.002473"


@pytest.mark.parametrize(
    "name", ["with space.png", "Ä 网膜.png", 'two\nlines, "quoted".png', "-starts-with-a-dash.png"]
)
def test_predict_files_gives_any_name_back_in_its_row(predict, tmp_path, name):
    path = write(tmp_path / name)
    assert names(predict(path)[1]) == [str(path)]


def test_predict_files_names_a_bad_file_in_one_line(predict, tmp_path):
    path = write(tmp_path / "two\nlines.png", b"")
    assert predict(path)[2][0] == f"left out: {str(path)!r}: is empty"


def test_predict_files_escapes_names_that_are_not_utf8(predict, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.png"
    try:
        with open(path, "wb") as stream:
            stream.write(encoded())
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    status, rows, errors = predict(os.fsdecode(path))
    assert (status, errors) == (0, [])
    assert names(rows) == [f"{tmp_path}/\\xff.png"]


def test_predict_files_enters_no_folder_twice(predict, tmp_path):
    path = write(tmp_path / "below" / "scan.png")
    (tmp_path / "below" / "up").symlink_to(tmp_path)
    assert names(predict(tmp_path)[1]) == [str(path)]


def test_predict_files_says_when_nothing_was_predicted(predict, tmp_path):
    status, rows, errors = predict(tmp_path / "missing.png")
    assert (status, rows) == (1, [])
    assert errors[-1] == "error: no image was predicted, for the reasons above"


@pytest.mark.parametrize("kind", ["idx", "idx.gz", "npy"])
def test_predict_files_takes_each_image_of_an_array(run, capsys, monkeypatch, tmp_path, kind):
    # IDX holds 28x28 images, so that the model is another one
    images = layers.Input((28, 28, 1), dtype="uint8")
    x = layers.Flatten()(layers.Rescaling(1 / 255)(images))
    tf.keras.Model(images, layers.Dense(2, activation="softmax")(x)).save(tmp_path / "model.keras")
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    array = np.random.default_rng(0).integers(0, 256, (35, 28, 28), np.uint8)
    path = tmp_path / f"images.{kind}"
    if kind == "npy":
        np.save(path, array)
    else:
        contents = struct.pack(">IIII", 0x803, 35, 28, 28) + array.tobytes()
        path.write_bytes(gzip.compress(contents) if kind == "idx.gz" else contents)
    assert prediction.predict_files(str(tmp_path), [str(path)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert names(rows) == [f"{path}[{number}]" for number in range(35)]
    expected = tf.keras.models.load_model(tmp_path / "model.keras")(array[..., None]).numpy()
    np.testing.assert_allclose([[float(row["dark"]), float(row["bright"])] for row in rows], expected, atol=2e-6)


def test_predict_files_writes_a_numbered_overlay_a_row(predict, tmp_path):
    arguments = [
        write(tmp_path / "wide scan.png", encoded(size=(64, 32))),
        write(tmp_path / "bad.png", b""),
        write(tmp_path / "below" / "wide scan.png", encoded(0, size=(20, 20))),
    ]
    status, rows, _ = predict(*arguments, saliency_dir=str(tmp_path / "out"))
    assert (status, len(rows)) == (1, 2)
    assert sorted(os.listdir(tmp_path / "out")) == ["000001_wide_scan.png", "000002_wide_scan.png"]
    first, second = (Image.open(tmp_path / "out" / name) for name in sorted(os.listdir(tmp_path / "out")))
    assert (first.size, second.size) == ((512, 256), (512, 512))  # in the proportions of the original
    # the whole of the white image speaks for "bright": half white, half red. None of the black one speaks for "dark"
    assert first.getpixel((200, 100)) == (255, 128, 128)
    assert second.getpixel((200, 100)) == (0, 0, 0)


def test_predict_files_refuses_an_overlay_folder_that_holds_something(predict, tmp_path):
    write(tmp_path / "out" / "mine.png")
    with pytest.raises(InputError, match="not empty"):
        predict(write(tmp_path / "scan.png"), saliency_dir=str(tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == ["mine.png"]
