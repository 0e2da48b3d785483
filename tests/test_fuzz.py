"""Any bytes in any file: an image, an array or an error that is documented; no crash, no hang, no other error.

Bounded and derandomized: the same inputs every time. A failing one is shown, shrunk, by hypothesis.
"""

import gzip
import io
import os
import pathlib
import struct
import tarfile
import warnings
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fashion_oct import evaluation, fashion_mnist, input_pipeline, oct_folder, options, prediction
from fashion_oct.errors import InputError


def bounded(num_examples):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # files of earlier examples are overwritten
    return settings(
        max_examples=num_examples, deadline=None, derandomize=True, database=None, suppress_health_check=checks
    )


def mutations(originals):
    """Strategy: one of the originals, cut, with bytes set, bits flipped, parts removed, doubled or of another one."""
    place = st.floats(0, 1, exclude_max=True)
    edit = st.tuples(
        st.sampled_from(["set", "flip", "cut", "remove", "double", "splice", "insert"]),
        place,
        place,
        st.binary(min_size=1, max_size=6),
        st.sampled_from(originals),
    )
    return st.builds(mutate, st.sampled_from(originals), st.lists(edit, max_size=6))


def mutate(contents, edits):
    for kind, first, second, new, other in edits:
        start, end = (int(x * len(contents)) for x in sorted((first, second)))
        if kind == "set":
            contents = contents[:start] + new + contents[start + len(new) :]
        elif kind == "flip" and contents:
            contents = contents[:start] + bytes([contents[start] ^ (1 << new[0] % 8)]) + contents[start + 1 :]
        elif kind == "cut":
            contents = contents[:end]
        elif kind == "remove":
            contents = contents[:start] + contents[end:]
        elif kind == "double":
            contents = contents[:end] + contents[start:]
        elif kind == "splice":
            contents = contents[:start] + other[int(second * len(other)) :]
        elif kind == "insert":
            contents = contents[:start] + new + contents[start:]
    return contents


def one_line(error):
    return len(str(error).splitlines()) == 1


# IDX files


def idx(shape, magic):
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + bytes(i % 251 for i in range(np.prod(shape)))


IDX_FILES = [idx((2, 28, 28), 0x803), idx((40,), 0x801), gzip.compress(idx((2, 28, 28), 0x803), mtime=0)]


@bounded(200)
@given(contents=mutations(IDX_FILES) | st.binary(max_size=60))
def test_read_idx_gives_an_array_or_an_input_error(tmp_path, contents):
    path = tmp_path / "fuzzed"
    path.write_bytes(contents)
    try:
        array = fashion_mnist.read_idx(path)
    except InputError as error:
        assert str(error).startswith(str(path))
        assert one_line(error)
    else:
        assert (array.dtype, array.shape[1:]) in [(np.uint8, (28, 28)), (np.uint8, ())]


# Names

NAME_PARTS = st.sampled_from(["CNV", "-", "-1", "-0042", ".jpeg", ".JPG", ".", "\n", " ", "網", "\u0661", "9" * 60])


@bounded(300)
@given(name=st.text(max_size=80) | st.lists(NAME_PARTS, max_size=8).map("".join))
def test_parse_name_gives_parts_that_make_the_name_or_none(name):
    parsed = oct_folder.parse_name(name)
    if parsed is None:
        return
    class_name, patient, index = parsed
    stem, suffix = os.path.splitext(name)
    assert suffix.lower() in (".jpeg", ".jpg")
    assert stem.startswith(f"{class_name}-{patient}-")
    assert int(stem.removeprefix(f"{class_name}-{patient}-")) == index
    assert patient.isascii()
    assert not class_name.startswith(".")


# Images


def encoded(kind, mode="L", **options):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


JPEGS = [
    encoded("JPEG"),
    encoded("JPEG", "RGB"),
    encoded("JPEG", progressive=True),
    encoded("JPEG", "RGB", progressive=True, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0"),
]
PNGS = [encoded("PNG"), encoded("PNG", "RGBA"), encoded("PNG", "P"), encoded("PNG", "1")]
OTHERS = [encoded("GIF"), encoded("BMP")]


@pytest.fixture(scope="module")
def decode():
    """Decodes as training does: within a graph. Gives None where the bytes do not decode."""
    graph = tf.function(
        lambda contents: input_pipeline.decode_image(contents, (16, 16, 1)),
        input_signature=[tf.TensorSpec([], tf.string)],
    )

    def call(contents):
        try:
            return graph(tf.constant(contents)).numpy()
        except tf.errors.InvalidArgumentError:
            return None

    return call


@bounded(300)
@given(contents=mutations(JPEGS + PNGS[:1]))
def test_check_header_gives_a_header_or_a_reason(tmp_path, decode, contents):
    path = tmp_path / "CNV-1-1.jpeg"
    path.write_bytes(contents)
    header = oct_folder.check_header(path)
    if isinstance(header, str):
        assert header.isprintable()
        return
    # the decoder reads the same sides from it, or finds it damaged: no larger image can hide behind a small header
    try:
        height, width, _ = tf.io.extract_jpeg_shape(contents).numpy()
    except tf.errors.InvalidArgumentError:
        pass
    else:
        assert (width, height) == (header.width, header.height)
    image = decode(contents)
    assert image is None or image.shape == (16, 16, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        digest = oct_folder._pixel_sha256_or_none(str(path))
    assert digest is None or len(digest) == 32


@bounded(200)
@given(contents=mutations(JPEGS + PNGS + OTHERS) | st.binary(max_size=40))
def test_decode_image_gives_an_image_or_an_invalid_argument(decode, contents):
    image = decode(contents)
    assert image is None or (image.shape == (16, 16, 1) and image.dtype == np.uint8)


@bounded(150)
@given(contents=mutations(JPEGS + PNGS + OTHERS))
def test_check_image_gives_sides_within_the_limits_or_an_input_error(tmp_path, contents):
    path = tmp_path / "scan"
    path.write_bytes(contents)
    try:
        sides = prediction.check_image(str(path), contents[:32])
    except InputError as error:
        assert one_line(error)
    else:
        assert all(oct_folder.MIN_SIDE <= side <= oct_folder.MAX_SIDE for side in sides)


# Arrays


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


NPY_FILES = [npy(np.zeros((2, 8, 8), np.uint8)), npy(np.zeros(3, np.float32)), npy(np.array([None]))]


@bounded(150)
@given(contents=mutations(NPY_FILES) | st.binary(max_size=60).map(b"\x93NUMPY".__add__))
def test_map_npy_gives_an_array_or_an_input_error(tmp_path, contents):
    path = tmp_path / "images.npy"
    path.write_bytes(contents)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = prediction._map_npy(str(path))
    except InputError:
        pass
    else:
        assert not array.dtype.hasobject


# Settings and flags

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dataset", "class_names", "config", "plan"]), inner, max_size=3)
    ),
    max_leaves=6,
)
CONFIG = b'{"config": {"dataset": "oct2017"}, "plan": {}, "dataset": {"class_names": ["CNV", "DME"]}}'


@bounded(100)
@given(contents=mutations([CONFIG]) | JSON.map(lambda value: str(value).replace("'", '"').encode()))
def test_evaluate_run_tells_damaged_settings_in_an_input_error(tmp_path, contents):
    (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(InputError) as error:  # no mutation makes the whole settings of a run of it
        evaluation.evaluate_run(str(tmp_path))
    assert "config.json" in str(error.value)


def run_flags(arguments):
    """Parses a command line as `train` does; returns the exit status and standard error."""

    def run(flag_values: flags.FlagValues, rest: list[str]) -> None:
        options.refuse_arguments(rest)
        options.config_from_flags(flag_values)

    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", errors)
        patch.setattr("sys.stdout", io.StringIO())
        with pytest.raises(SystemExit) as stop:
            options.run_command(run, options.define_train_flags, usage="usage", argv=["train", *arguments])
    return stop.value.code, errors.getvalue()


def assert_answers_in_a_line(arguments):
    status, errors = run_flags(arguments)
    if status != 0:
        assert status == 2
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1


FLAG_NAMES = ["model", "epochs", "learning_rate", "augment", "noaugment", "data_dir", "seed", "head", "verbosity", "x"]
ARGUMENTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12) | st.builds(
    "{}{}={}".format, st.sampled_from(["-", "--", ""]), st.sampled_from(FLAG_NAMES), st.text(max_size=8)
)


@bounded(100)
@given(arguments=st.lists(ARGUMENTS, max_size=4))
def test_run_command_answers_any_arguments_in_a_line(arguments):
    assert_answers_in_a_line(arguments)


FLAGFILE = b"# a comment\n--model=vgg16\n--epochs=3\n--augment\n--learning_rate=3e-4\n--data_dir=/data\n"


@bounded(100)
@given(contents=mutations([FLAGFILE]) | st.binary(max_size=40))
def test_run_command_answers_any_flagfile_in_a_line(tmp_path, contents):
    path = tmp_path / "run.flags"
    path.write_bytes(contents)
    assert_answers_in_a_line([f"--flagfile={path}"])


# Archives

MEMBER_NAMES = st.lists(
    st.sampled_from(["a", "b", "..", ".", "/", "\\", "C:", "\0", "\n", "網", "\udcff", " ", "x" * 260, "~"]),
    min_size=1,
    max_size=6,
).map("".join) | st.text(min_size=1, max_size=20)


def zip_of(names):
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
        warnings.simplefilter("ignore")  # of two members of one name
        for name in names:
            member = zipfile.ZipInfo("x")
            member.filename = name.encode(errors="replace").decode()  # whole: ZipInfo(name) would cut it
            archive.writestr(member, b"contents")
    return stream.getvalue()


def tar_of(names):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT, errors="surrogatepass") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 8
            archive.addfile(member, io.BytesIO(b"contents"))
    return stream.getvalue()


def assert_unpacks_inside_or_not_at_all(folder, contents):
    for old in folder.iterdir():
        if old.name != "work":
            raise AssertionError(f"{old} was written outside")
    work = folder / "work"
    work.mkdir(exist_ok=True)
    archive, out = work / "archive", work / "out"
    archive.write_bytes(contents)
    try:
        oct_folder.unpack(archive, out)
    except InputError:
        assert sorted(os.listdir(work)) == ["archive"]
        return
    assert sorted(os.listdir(work)) == ["archive", "out"]
    found = list(out.rglob("*"))
    assert all(path.is_file() or path.is_dir() for path in found)
    assert not any(path.is_symlink() for path in found)
    remove(out)


def remove(folder: pathlib.Path):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@bounded(150)
@given(names=st.lists(MEMBER_NAMES, min_size=1, max_size=3), make=st.sampled_from([zip_of, tar_of]))
def test_unpack_of_any_names_stays_inside(tmp_path, names, make):
    assert_unpacks_inside_or_not_at_all(tmp_path, make(names))


TWO_NAMES = ["a/b", "c"]
ARCHIVES = [zip_of(TWO_NAMES), tar_of(TWO_NAMES), tar_of(["網" * 60]), gzip.compress(tar_of(TWO_NAMES), mtime=0)]


@bounded(200)
@given(contents=mutations(ARCHIVES))
def test_unpack_of_any_bytes_stays_inside(tmp_path, contents):
    assert_unpacks_inside_or_not_at_all(tmp_path, contents)
