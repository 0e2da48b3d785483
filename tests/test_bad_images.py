"""Each oddity of an OCT2017 folder, from the folder to the batches: used, left out and counted, or named."""

import io
import json
import os
import pathlib

import numpy as np
import pytest
from PIL import Image

from fashion_oct import datasets, input_pipeline, options, training
from fashion_oct.errors import InputError

CLASSES = ("CNV", "NORMAL")
BATCH = 4


def encoded(*, size=(16, 16), mode="L", kind="JPEG"):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0]), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind)
    return stream.getvalue()


def encoded_16_bit_png():
    stream = io.BytesIO()
    Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16) * 256).save(stream, "PNG")
    return stream.getvalue()


def without_tables():
    """A JPEG that only decoding tells to be bad: the markers of its quantization tables are made into comments."""
    return encoded().replace(b"\xff\xdb", b"\xff\xfe")


@pytest.fixture
def folder(tmp_path):
    """An OCT2017 folder of two classes: 4 training images and 1 test image each."""
    root = tmp_path / "OCT2017"
    for name in CLASSES:
        for split, patients in (("train", (1, 2, 3, 4)), ("test", (5,))):
            (root / split / name).mkdir(parents=True)
            for patient in patients:
                (root / split / name / f"{name}-{patient}-1.jpeg").write_bytes(encoded())
    return root


def load(folder, **settings):
    return datasets.load("oct2017", data_dir=str(folder), image_size=16, **settings)


def trained_on(splits):
    """Returns the label of every image that one pass of training shows."""
    num_images = len(splits.train)
    batches = input_pipeline.make_training_dataset(splits.train, global_batch_size=1, seed=0, num_steps=num_images)
    shown = [(images.numpy(), labels.numpy()[0]) for images, labels in batches]
    assert all(images.shape == (1, 16, 16, 1) and images.any() for images, _ in shown)
    return sorted(int(label) for _, label in shown)


BAD = {
    "zero bytes": (b"", "is empty"),
    "truncated": (encoded()[:-60], "is truncated"),
    "no image": (b"no image", "is not a JPEG"),
    "PNG": (encoded(kind="PNG"), "is a PNG, not a JPEG"),
    "16-bit PNG": (encoded_16_bit_png(), "is a PNG, not a JPEG"),
    "CMYK": (encoded(mode="CMYK"), "is CMYK"),
    "one pixel": (encoded(size=(1, 1)), "is 1x1 pixels"),
    "20,000 wide": (encoded(size=(20000, 16)), "is 20000x16 pixels"),
    "link to itself": ("CNV-9-1.jpeg", "cannot be read: Too many levels of symbolic links"),
    "broken link": ("missing.jpeg", "cannot be read: No such file or directory"),
    "link to a folder above": ("../..", "is no regular file"),
    "in the folder of another class": (encoded(), "is named NORMAL but lies in the folder CNV"),
}


def put(path, contents):
    if isinstance(contents, str):
        path.symlink_to(contents)
    else:
        path.write_bytes(contents)
    return path


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("case", BAD)
def test_load_names_a_bad_file_before_the_first_step(folder, case, split):
    contents, reason = BAD[case]
    name = "NORMAL-9-1.jpeg" if "another class" in case else "CNV-9-1.jpeg"
    bad = put(folder / split / "CNV" / name, contents)
    with pytest.raises(InputError) as error:
        load(folder, bad_images="error")
    assert str(bad) in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize("case", BAD)
def test_load_skips_counts_and_lists_a_bad_file(folder, case):
    contents, reason = BAD[case]
    name = "NORMAL-9-1.jpeg" if "another class" in case else "CNV-9-1.jpeg"
    bad = put(folder / "train" / "CNV" / name, contents)
    splits = load(folder, bad_images="skip")
    assert trained_on(splits) == [0, 0, 0, 0, 1, 1, 1, 1]
    in_config = splits.describe()
    assert (in_config["num_train"], in_config["num_test"]) == (8, 2)
    ((path, told),) = in_config["bad_images"]
    assert pathlib.Path(path) == bad
    assert told.startswith(reason)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_load_names_a_file_without_read_permission(folder):
    put(folder / "train" / "CNV" / "CNV-9-1.jpeg", encoded()).chmod(0)
    with pytest.raises(InputError, match=r"CNV-9-1.jpeg' cannot be read: Permission denied"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("CNV-9-1.JPEG", encoded()),
        ("cnv-9-1.jpg", encoded()),
        ("CNV-9-1.jpeg", encoded(mode="RGB", size=(31, 17))),
        ("CNV-9-1.jpeg", "CNV-1-1.jpeg"),
    ],
    ids=["upper-case suffix", "lower-case class", "RGB of odd size", "link to another image"],
)
def test_load_uses_an_odd_but_good_file(folder, name, contents):
    put(folder / "train" / "CNV" / name, contents)
    splits = load(folder)
    assert trained_on(splits) == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert splits.bad == ()


@pytest.mark.parametrize("class_name", ["with space", "Netzhaut-Ödem 网膜", "two\nlines"])
def test_load_takes_class_and_file_names_of_any_characters(folder, class_name):
    for split in ("train", "test"):
        (folder / split / class_name).mkdir()
        put(folder / split / class_name / f"{class_name}-9-1.jpeg", encoded())
    splits = load(folder)
    assert splits.spec.class_names == tuple(sorted([*CLASSES, class_name]))
    assert len(trained_on(splits)) == 9
    assert f"{class_name}-9-1.jpeg" in splits.test_files


@pytest.mark.parametrize("name", ["notes.txt", "CNV-9-1-overlay.jpeg", ".CNV-9-1.jpeg", "CNV-1-1 (copy).jpeg"])
def test_load_passes_over_a_stray_file(folder, name):
    put(folder / "train" / "CNV" / name, b"anything")
    splits = load(folder)
    assert len(splits.train) == 8
    assert splits.bad == ()


def test_load_passes_over_a_folder_with_an_images_name(folder):
    (folder / "train" / "CNV" / "CNV-9-1.jpeg").mkdir()
    assert trained_on(load(folder)) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_load_ends_where_links_between_folders_go_round(folder):
    (folder / "train" / "CNV" / "again").symlink_to(folder)
    assert trained_on(load(folder)) == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("bad_images", ["error", "skip"])
def test_load_refuses_an_empty_class_folder(folder, bad_images):
    for split in ("train", "test"):
        (folder / split / "DME").mkdir()
    with pytest.raises(InputError, match=r"train/DME' holds no usable"):
        load(folder, bad_images=bad_images)


def test_load_refuses_a_class_that_skipping_leaves_empty(folder):
    for path in (folder / "train" / "CNV").iterdir():
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"train/CNV' holds no usable"):
        load(folder, bad_images="skip")


@pytest.mark.parametrize("bad_images", ["error", "skip"])
def test_load_refuses_a_class_that_only_the_test_split_has(folder, bad_images):
    (folder / "test" / "DRUSEN").mkdir()
    put(folder / "test" / "DRUSEN" / "DRUSEN-9-1.jpeg", encoded())
    with pytest.raises(InputError, match="DRUSEN"):
        load(folder, bad_images=bad_images)


def test_naming_bad_files_names_the_file_that_does_not_decode(folder):
    bad = put(folder / "train" / "NORMAL" / "NORMAL-3-1.jpeg", without_tables())
    splits = load(folder)  # no header tells
    with pytest.raises(InputError) as error, input_pipeline.naming_bad_files(splits.train, None):
        trained_on(splits)
    assert str(bad) in str(error.value)


def test_naming_bad_files_names_a_file_that_vanished(folder):
    splits = load(folder)
    (folder / "train" / "CNV" / "CNV-2-1.jpeg").unlink()
    with pytest.raises(InputError, match=r"CNV-2-1\.jpeg"), input_pipeline.naming_bad_files(splits.train):
        trained_on(splits)


def test_naming_bad_files_passes_on_an_error_that_no_file_is_the_reason_of(folder):
    import tensorflow as tf

    splits = load(folder)
    with pytest.raises(tf.errors.InvalidArgumentError, match="another reason"):  # noqa: SIM117
        with input_pipeline.naming_bad_files(splits.train):
            tf.debugging.Assert(False, ["another reason"])


@pytest.fixture
def small_images(monkeypatch):
    """Makes training load 28x28 images: the network is then built in no time."""
    real = datasets.load
    monkeypatch.setattr(datasets, "load", lambda *names, **settings: real(*names, **{**settings, "image_size": 28}))


def config_of(folder, workdir, **settings):
    return options.Config(
        dataset="oct2017", data_dir=str(folder), workdir=str(workdir), per_replica_batch_size=None,
        global_batch_size=BATCH, num_gpus=0, precision="float32", steps=2, **settings,
    )  # fmt: skip


@pytest.mark.usefixtures("small_images")
@pytest.mark.parametrize("split", ["train", "test"])
def test_run_names_a_file_that_does_not_decode(folder, tmp_path, split):
    bad = put(next((folder / split / "CNV").iterdir()), without_tables())
    with pytest.raises(InputError) as error:
        training.run(config_of(folder, tmp_path / "run"))
    assert str(bad) in str(error.value)
    assert not list((tmp_path / "run").glob(".*"))  # no temporary file stays
    assert (tmp_path / "run" / "model.keras").exists() == (split == "test")  # what was trained is kept


@pytest.mark.usefixtures("small_images")
def test_run_writes_nothing_where_a_header_tells(folder, tmp_path):
    put(folder / "train" / "CNV" / "CNV-9-1.jpeg", b"")
    with pytest.raises(InputError):
        training.run(config_of(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("small_images")
def test_run_lists_skipped_files_in_its_settings_and_still_stops_at_one_that_no_header_tells(folder, tmp_path):
    skipped = put(folder / "train" / "CNV" / "CNV-9-1.jpeg", b"")
    bad = put(folder / "train" / "CNV" / "CNV-4-1.jpeg", without_tables())
    with pytest.raises(InputError) as error:
        training.run(config_of(folder, tmp_path / "run", bad_images="skip"))
    assert str(bad) in str(error.value)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["dataset"]["bad_images"] == [[str(skipped), "is empty"]]
    assert settings["dataset"]["num_train"] == 8
