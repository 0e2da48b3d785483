"""Fashion-MNIST: real files of every kind, good and bad, and a real (local) network that answers or does not."""

import gzip
import hashlib
import http.server
import logging
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from ports import free_ports

from fashion_oct import fashion_mnist
from fashion_oct.errors import InputError

TRAIN_LABELS = np.array([9, 0, 3, 5], np.uint8)
TEST_LABELS = np.array([1, 8], np.uint8)


def make_images(num_images, *, first_value=0):
    """Images [N, 28, 28] whose image i has the value first_value + i in every pixel."""
    values = np.arange(first_value, first_value + num_images, dtype=np.uint8)
    return np.tile(values[:, np.newaxis, np.newaxis], (1, 28, 28))


def idx_bytes(array, *, magic=None):
    magic = magic or {3: 0x0803, 1: 0x0801}[array.ndim]
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def write_set(folder, *, is_gzip=True, train_labels=TRAIN_LABELS):
    """Writes the four files: 4 training images (values 0 to 3), 2 test images (values 100 and 101)."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = (make_images(4), train_labels, make_images(2, first_value=100), TEST_LABELS)
    for name, array in zip(fashion_mnist.IDX_NAMES, arrays, strict=True):
        if is_gzip:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array), mtime=0))
        else:
            (folder / name).write_bytes(idx_bytes(array))
    return folder


def assert_is_the_set(data):
    np.testing.assert_array_equal(data.train_images, make_images(4)[..., np.newaxis])
    np.testing.assert_array_equal(data.train_labels, TRAIN_LABELS)
    np.testing.assert_array_equal(data.test_images, make_images(2, first_value=100)[..., np.newaxis])
    np.testing.assert_array_equal(data.test_labels, TEST_LABELS)
    assert {array.dtype for array in (data.train_images, data.train_labels, data.test_images, data.test_labels)} == {
        np.dtype(np.uint8)
    }
    assert not data.is_sample


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, an absent Debian folder, and a proxy that refuses every connection: the sample alone is left."""
    (refusing_port,) = free_ports(1)
    for variable in ("TFDS_DATA_DIR", "KERAS_HOME", "no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{refusing_port}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", str(tmp_path / "debian"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def tfds():
    """TensorFlow Datasets; the test is skipped where it does not work.

    With TensorFlow 2.12, tensorflow-metadata above 1.17 breaks it: it asks for a newer protobuf than TensorFlow allows.
    """
    try:
        from tensorflow_datasets import builder_from_directory  # noqa: F401
    except ImportError as error:
        pytest.skip(f"TensorFlow Datasets does not work here: {error}")
    import tensorflow_datasets

    return tensorflow_datasets


@pytest.fixture(scope="session")
def tfds_folder(tmp_path_factory, tfds):
    """A TensorFlow Datasets folder with a small Fashion-MNIST, prepared by TensorFlow Datasets itself."""
    import tensorflow as tf

    def examples(images, labels):
        return tf.data.Dataset.from_tensor_slices({"image": images[..., np.newaxis], "label": labels.astype(np.int64)})

    folder = tmp_path_factory.mktemp("tfds")
    for name in ("fashion_mnist", "mnist"):
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            version="3.0.1",
            features=tfds.features.FeaturesDict(
                {"image": tfds.features.Image(shape=(28, 28, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
            ),
            split_datasets={
                "train": examples(make_images(4), TRAIN_LABELS),
                "test": examples(make_images(2, first_value=100), TEST_LABELS),
            },
            data_dir=folder,
            disable_shuffling=True,
        )
    return folder


class _Proxy(http.server.BaseHTTPRequestHandler):
    """An HTTP proxy that answers for the data set's host from `files`; `get` is called before each GET."""

    files = {}  # noqa: RUF012

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self.before_get()
        self._answer(with_body=True)

    def before_get(self):
        pass

    def log_message(self, *args):
        pass

    def _answer(self, *, with_body):
        body = self.files.get(self.path.rsplit("/", 1)[-1])
        self.send_response(403 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if with_body and body:
            self.wfile.write(body)


@pytest.fixture
def start_proxy(home, monkeypatch):
    """Starts a local proxy that serves files {name: bytes} and makes it the environment's proxy."""
    servers = []

    def start(files, *, before_get=lambda handler: None):
        handler = type("Proxy", (_Proxy,), {"files": files, "before_get": before_get})
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{servers[-1].server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def load_with_warnings(caplog):
    """Returns what load() gives, its warnings, and its seconds."""
    caplog.clear()
    start = time.monotonic()
    data = fashion_mnist.load()
    seconds = time.monotonic() - start
    return data, [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING], seconds


# --- read_idx ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_gzip", [False, True])
@pytest.mark.parametrize("array", [make_images(3), TRAIN_LABELS], ids=["images", "labels"])
def test_read_idx_tells_gzip_by_content(tmp_path, array, is_gzip):
    path = tmp_path / ("raw_content.gz" if not is_gzip else "gzip_content")  # the names say the opposite
    path.write_bytes(gzip.compress(idx_bytes(array)) if is_gzip else idx_bytes(array))
    np.testing.assert_array_equal(fashion_mnist.read_idx(path), array)


GOOD = idx_bytes(make_images(3))  # 16 + 3 x 784 = 2,368 bytes
GOOD_GZIP = gzip.compress(GOOD, mtime=0)
BAD_FILES = {
    "empty": (b"", r"starts with the bytes \(none\); expected 00 00 08 03 \(images\) or 00 00 08 01 \(labels\)"),
    "wrong magic": (idx_bytes(make_images(3), magic=0x0D03), "starts with the bytes 00 00 0d 03; expected 00 00 08 03"),
    "two dimensions": (struct.pack(">3I", 0x0802, 2, 2) + bytes(4), "starts with the bytes 00 00 08 02"),
    "a PNG": (b"\x89PNG\r\n\x1a\n" + bytes(50), "starts with the bytes 89 50 4e 47"),
    "cut in the magic": (GOOD[:3], "starts with the bytes 00 00 08; expected"),
    "cut in the header": (GOOD[:12], "ends within its header; expected 16 bytes of header"),
    "cut in the pixels": (GOOD[:-1], r"truncated; expected 2,352 bytes after the header, for the shape \(3, 28, 28\)"),
    "a byte too many": (GOOD + b"\0", "goes on after its last value; expected 2,352 bytes after the header"),
    "no images": (idx_bytes(make_images(0)), "promises 0 images or labels; expected 1 to 1,000,000"),
    "no labels": (idx_bytes(TRAIN_LABELS[:0]), "promises 0 images or labels; expected 1 to 1,000,000"),
    "absurd count": (struct.pack(">4I", 0x0803, 2**32 - 1, 28, 28), "promises 4,294,967,295 images or labels"),
    "32x32": (idx_bytes(np.zeros((1, 32, 32), np.uint8)), "images of 32 x 32 pixels; expected 28 x 28"),
    "truncated .gz": (GOOD_GZIP[:-30], "a truncated .gz file; expected a whole one"),
    ".gz without its CRC": (GOOD_GZIP[:-8], "a truncated .gz file; expected a whole one"),
    ".gz with a wrong CRC": (GOOD_GZIP[:-8] + bytes(4) + GOOD_GZIP[-4:], r"a damaged .gz file \(CRC check failed"),
    ".gz with wrong bits": (GOOD_GZIP[:10] + b"\xff" * 20 + GOOD_GZIP[30:], r"a damaged .gz file \(Error -3"),
    ".gz cut inside": (gzip.compress(GOOD[:-1]), "truncated; expected 2,352 bytes after the header"),
    ".gz with a byte too many": (gzip.compress(GOOD + b"\0"), "goes on after its last value"),
}


@pytest.mark.parametrize("content, message", BAD_FILES.values(), ids=BAD_FILES)
def test_read_idx_names_a_bad_file_and_what_was_expected(tmp_path, content, message):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path}: {message}.*: put the original file there, or name another") as error:
        fashion_mnist.read_idx(path)
    assert "\n" not in str(error.value)


def test_read_idx_names_a_missing_file(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}/nothing: not there, or not a file"):
        fashion_mnist.read_idx(tmp_path / "nothing")


def test_read_idx_refuses_a_pipe_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: not there, or not a file"):
        fashion_mnist.read_idx(tmp_path / "pipe")


@pytest.mark.parametrize(
    "num_images", [3, 999_999], ids=["zeros after the header's images", "too small for its header"]
)
def test_read_idx_inflates_no_bomb(tmp_path, num_images):
    path = tmp_path / "bomb.gz"
    # 100 kB on disk that inflate to 100 MB; 999,999 x 784 bytes would be 784 MB
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x0803, num_images, 28, 28) + bytes(100_000_000)))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"goes on after|truncated"):
        fashion_mnist.read_idx(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000


def test_read_idx_raises_only_input_errors_on_mutated_bytes(tmp_path):
    rng = random.Random(20170825)
    seeds = [GOOD, GOOD_GZIP, idx_bytes(TRAIN_LABELS), gzip.compress(idx_bytes(TRAIN_LABELS), mtime=0)]
    path = tmp_path / "mutated"
    num_read = num_refused = 0
    for _ in range(4000):
        content = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(min(len(content), rng.choice([20, 10_000])) or 1)
            kind = rng.randrange(4)
            if kind == 0:
                content[position : position + 1] = bytes([rng.randrange(256)])
            elif kind == 1:
                content[position:position] = rng.randbytes(rng.randint(1, 9))
            elif kind == 2:
                del content[position : position + rng.randint(1, 9)]
            else:
                del content[rng.randrange(len(content) + 1) :]
        path.write_bytes(content)
        try:
            array = fashion_mnist.read_idx(path)
        except InputError as error:
            assert str(path) in str(error)
            num_refused += 1
        else:
            assert array.dtype == np.uint8
            assert array.shape[1:] in ((), (28, 28))
            num_read += 1
    assert num_read > 100
    assert num_refused > 100


# --- load(data_dir) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_gzip", [False, True])
def test_load_reads_idx_files(tmp_path, home, is_gzip):
    data = fashion_mnist.load(str(write_set(tmp_path / "set", is_gzip=is_gzip)))
    assert_is_the_set(data)
    assert data.source == f"IDX files in {tmp_path / 'set'}"


def test_load_expands_the_home_in_data_dir(home):
    write_set(home / "set")
    assert_is_the_set(fashion_mnist.load("~/set"))


def test_load_of_idx_files_imports_no_tensorflow(tmp_path):
    write_set(tmp_path)
    program = (
        "import sys; from fashion_oct import fashion_mnist; fashion_mnist.load(sys.argv[1]); "
        "sys.exit('tensorflow' in sys.modules or 'tensorflow_datasets' in sys.modules)"
    )
    root = pathlib.Path(fashion_mnist.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, check=True)


def test_load_takes_data_dir_alone(tmp_path, home):
    write_set(home / ".keras/datasets/fashion-mnist")  # must not be fallen back on
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=f"--data_dir={tmp_path}/empty: holds no Fashion-MNIST; expected train-images"):
        fashion_mnist.load(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    "data_dir, reason", [("nothing", "No such file"), ("file", "Not a directory"), ("file/below", "Not a directory")]
)
def test_load_refuses_a_data_dir_that_is_no_folder(tmp_path, home, data_dir, reason):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=rf"--data_dir={tmp_path}/{data_dir}: cannot be read as a folder \({reason}"):
        fashion_mnist.load(str(tmp_path / data_dir))


def test_load_refuses_an_empty_data_dir():
    with pytest.raises(InputError, match="--data_dir=: cannot be read as a folder"):
        fashion_mnist.load("")


def test_load_names_the_one_file_that_is_missing(tmp_path):
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte.gz: not there, or not a file"):
        fashion_mnist.load(str(tmp_path))


def test_load_names_a_folder_in_place_of_a_file(tmp_path):
    write_set(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").mkdir()
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte.gz: not there, or not a file"):
        fashion_mnist.load(str(tmp_path))


def test_load_names_images_and_labels_of_different_counts(tmp_path):
    write_set(tmp_path, train_labels=TRAIN_LABELS[:3])
    message = (
        f"{tmp_path}/train-images-idx3-ubyte.gz: 4 images, but {tmp_path}/train-labels-idx1-ubyte.gz: 3 labels; "
        "expected as many"
    )
    with pytest.raises(InputError, match=message):
        fashion_mnist.load(str(tmp_path))


def test_load_names_the_file_and_position_of_label_11(tmp_path):
    write_set(tmp_path, train_labels=np.array([9, 0, 11, 5], np.uint8))
    message = r"train-labels-idx1-ubyte.gz: label 11 at position 2 \(the first is 0\); expected 0 to 9"
    with pytest.raises(InputError, match=message):
        fashion_mnist.load(str(tmp_path))


def test_load_tells_labels_where_images_belong(tmp_path):
    write_set(tmp_path, is_gzip=False)
    shutil.copy(tmp_path / "train-labels-idx1-ubyte", tmp_path / "train-images-idx3-ubyte")
    with pytest.raises(InputError, match="train-images-idx3-ubyte: holds labels; expected images"):
        fashion_mnist.load(str(tmp_path))


# --- TensorFlow Datasets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "fashion_mnist", "fashion_mnist/3.0.1"])
def test_load_reads_a_tfds_folder(tfds_folder, below):
    data = fashion_mnist.load(str(tfds_folder / below))
    assert_is_the_set(data)
    assert data.source == f"TensorFlow Datasets copy in {tfds_folder}/fashion_mnist/3.0.1"


def test_load_takes_the_newest_tfds_version(tfds_folder, tmp_path):
    shutil.copytree(tfds_folder / "fashion_mnist/3.0.1", tmp_path / "fashion_mnist/3.0.1")
    (tmp_path / "fashion_mnist/3.0.0").mkdir()  # damaged: reading it would be an error
    (tmp_path / "fashion_mnist/incomplete.ABC_3.0.2").mkdir()
    assert_is_the_set(fashion_mnist.load(str(tmp_path)))


def _truncate_records(folder):
    for path in folder.glob("*train.tfrecord*"):
        path.write_bytes(path.read_bytes()[:-20])


def _flip_record(folder):
    for path in folder.glob("*train.tfrecord*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


def _remove_records(folder):
    for path in folder.glob("*test.tfrecord*"):
        path.unlink()


def _break_info(folder):
    (folder / "dataset_info.json").write_text("{")


@pytest.mark.parametrize("damage", [_truncate_records, _flip_record, _remove_records, _break_info])
def test_load_names_a_damaged_tfds_folder(tfds_folder, tmp_path, damage):
    folder = tmp_path / "fashion_mnist/3.0.1"
    shutil.copytree(tfds_folder / "fashion_mnist/3.0.1", folder)
    damage(folder)
    with pytest.raises(InputError, match=f"^{folder}: expected an intact TensorFlow Datasets copy") as error:
        fashion_mnist.load(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [(8193, 8), (28, 29)])
def test_load_refuses_a_record_of_another_size_by_its_header(tfds_folder, tmp_path, size):
    import tensorflow as tf

    shutil.copytree(tfds_folder / "fashion_mnist/3.0.1", tmp_path / "fashion_mnist/3.0.1")
    (path,) = tmp_path.glob("fashion_mnist/3.0.1/*train.tfrecord*")
    examples = [tf.train.Example.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(path))]
    examples[1].features.feature["image"].bytes_list.value[0] = tf.io.encode_png(np.zeros((*size, 1), np.uint8)).numpy()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for example in examples:
            writer.write(example.SerializeToString())
    with pytest.raises(InputError, match="an image is no PNG of 28 x 28 pixels"):
        fashion_mnist.load(str(tmp_path))


def test_load_refuses_another_tfds_data_set(tfds_folder):
    with pytest.raises(InputError, match=r"mnist/3.0.1: expected an intact .* \(ValueError: it holds mnist\)"):
        fashion_mnist.load(str(tfds_folder / "mnist"))


# --- the order of the places --------------------------------------------------------------------------------------


def test_load_prefers_tfds_then_keras_then_debian(tfds_folder, tmp_path, home):
    shutil.copytree(tfds_folder / "fashion_mnist", home / "tensorflow_datasets/fashion_mnist")
    keras = write_set(home / ".keras/datasets/fashion-mnist")
    debian = write_set(tmp_path / "debian")
    sources = []
    for remove in (home / "tensorflow_datasets", keras, debian):
        sources.append(fashion_mnist.load().source)
        shutil.rmtree(remove)
    sources.append(fashion_mnist.load().source)
    assert sources == [
        f"TensorFlow Datasets copy in {home}/tensorflow_datasets/fashion_mnist/3.0.1",
        f"IDX files in {keras}",
        f"IDX files in {debian}",
        "bundled sample (6,000 + 1,000 images)",
    ]


def test_load_respects_tfds_data_dir(tfds_folder, home, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    assert fashion_mnist.load().source == f"TensorFlow Datasets copy in {tfds_folder}/fashion_mnist/3.0.1"


def test_load_respects_keras_home(tmp_path, home, monkeypatch):
    write_set(home / ".keras/datasets/fashion-mnist")
    folder = write_set(tmp_path / "keras_home/datasets/fashion-mnist")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras_home"))
    assert fashion_mnist.load().source == f"IDX files in {folder}"


def test_load_does_not_fall_back_from_a_damaged_place(tmp_path, home):
    damaged = write_set(home / ".keras/datasets/fashion-mnist") / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    write_set(tmp_path / "debian")
    with pytest.raises(InputError, match=f"{damaged}: a truncated .gz file"):
        fashion_mnist.load()


# --- the network, and the sample ----------------------------------------------------------------------------------


def test_load_without_a_network_gives_the_sample_and_one_warning(home, caplog):
    data, warnings, seconds = load_with_warnings(caplog)
    assert data.is_sample
    assert data.source == "bundled sample (6,000 + 1,000 images)"
    assert len(warnings) == 1
    for remedy in ("Connection refused", "apt install dataset-fashion-mnist", "--data_dir", "http_proxy"):
        assert remedy in warnings[0]
    assert seconds < 3


def test_load_does_not_wait_for_a_silent_host(home, monkeypatch, caplog):
    monkeypatch.setattr(fashion_mnist, "_PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never says a word
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{silent.getsockname()[1]}")
        data, warnings, seconds = load_with_warnings(caplog)
    assert data.is_sample
    assert len(warnings) == 1
    assert seconds < 2


def test_load_does_not_wait_for_a_silent_name_server(home, monkeypatch, caplog):
    monkeypatch.setattr(fashion_mnist, "_PROBE_SECONDS", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(5))
    data, warnings, seconds = load_with_warnings(caplog)
    assert data.is_sample
    assert "did not answer within 0.3 s" in warnings[0]
    assert seconds < 2


def test_load_takes_a_proxy_that_forbids_for_no_network(start_proxy, caplog):
    start_proxy({})
    data, warnings, _ = load_with_warnings(caplog)
    assert data.is_sample
    assert len(warnings) == 1
    assert "HTTP Error 403" in warnings[0]


@pytest.mark.usefixtures("tfds")
def test_load_ends_a_download_that_hangs(start_proxy, monkeypatch, caplog):
    monkeypatch.setattr(fashion_mnist, "_DOWNLOAD_SECONDS", 1.0)
    is_over = threading.Event()
    start_proxy({"t10k-labels-idx1-ubyte.gz": bytes(5148)}, before_get=lambda handler: is_over.wait(30))
    data, warnings, seconds = load_with_warnings(caplog)
    is_over.set()
    assert data.is_sample
    assert "the download did not end within 1 s" in warnings[0]
    assert seconds < 5


def original_files(folder):
    """Returns the publisher's four .gz files, byte for byte, from Debian's.

    Debian took the name and the time out of the gzip headers. These times (found by trying them all) give back the
    SHA-256 that TensorFlow Datasets expects.
    """
    times = (1504176606, 1504176606, 1504176627, 1504176627)  # 2017-08-31
    files = {}
    for name, seconds in zip(fashion_mnist.IDX_NAMES, times, strict=True):
        debian = (folder / f"{name}.gz").read_bytes()
        header = b"\x1f\x8b\x08\x08" + struct.pack("<I", seconds) + b"\x00\x03"
        files[f"{name}.gz"] = header + name.encode() + b"\0" + debian[10:]
    return files


@pytest.mark.slow
@pytest.mark.usefixtures("tfds")
def test_load_downloads_the_full_set_once(start_proxy, home, fashion_mnist_folder, monkeypatch, caplog):
    start_proxy(original_files(fashion_mnist_folder))
    downloaded, warnings, _ = load_with_warnings(caplog)
    version_folder = f"{home}/tensorflow_datasets/fashion_mnist/3.0.1"
    assert downloaded.source == f"TensorFlow Datasets copy in {version_folder}"
    assert warnings == []
    assert np.bincount(downloaded.train_labels).tolist() == [6000] * 10
    expected = fashion_mnist.load(str(fashion_mnist_folder))
    # TensorFlow Datasets shuffles when it prepares a copy: the same images, in another order
    assert {image.tobytes() for image in downloaded.test_images} == {i.tobytes() for i in expected.test_images}
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fashion_mnist.load().source == downloaded.source


@pytest.mark.usefixtures("tfds")
def test_load_takes_a_download_of_something_else_for_none(start_proxy, caplog):
    names = [f"{name}.gz" for name in fashion_mnist.IDX_NAMES]
    start_proxy(dict.fromkeys(names, b"<html>Please log in to this network</html>"))
    data, warnings, _ = load_with_warnings(caplog)
    assert data.is_sample
    assert len(warnings) == 1
    assert "the download failed (NonMatchingChecksumError: Artifact http://fashion-mnist" in warnings[0]


def test_sample_has_the_class_balance_and_size_promised():
    data = fashion_mnist.load(str(fashion_mnist.SAMPLE_FOLDER))
    assert np.bincount(data.train_labels).tolist() == [600] * 10
    assert np.bincount(data.test_labels).tolist() == [100] * 10
    assert sum(path.stat().st_size for path in fashion_mnist.SAMPLE_FOLDER.iterdir()) <= 3_000_000
    assert "Zalando SE" in (fashion_mnist.SAMPLE_FOLDER / "LICENSE").read_text(encoding="utf-8")


def test_sample_is_the_first_of_each_class_of_the_full_set(fashion_mnist_folder):
    full = fashion_mnist.load(str(fashion_mnist_folder))
    sample = fashion_mnist.load(str(fashion_mnist.SAMPLE_FOLDER))
    for label in range(10):
        np.testing.assert_array_equal(
            sample.train_images[sample.train_labels == label], full.train_images[full.train_labels == label][:600]
        )
        np.testing.assert_array_equal(
            sample.test_images[sample.test_labels == label], full.test_images[full.test_labels == label][:100]
        )


def test_load_of_the_full_set_gives_the_published_figures(fashion_mnist_folder):
    data = fashion_mnist.load(str(fashion_mnist_folder))
    assert data.train_images.shape == (60000, 28, 28, 1)
    assert data.test_images.shape == (10000, 28, 28, 1)
    assert np.bincount(data.train_labels).tolist() == [6000] * 10
    assert np.bincount(data.test_labels).tolist() == [1000] * 10
    assert data.train_labels[:3].tolist() + data.train_labels[-3:].tolist() == [9, 0, 0, 3, 0, 5]  # Keras' tutorial
    # The mean that everybody normalises with: 0.2860
    assert round(data.train_images.mean() / 255, 4) == 0.2860
    # `zcat t10k-images-idx3-ubyte.gz | tail -c +17 | sha256sum` and so on, worked out in a shell
    digests = [hashlib.sha256(array.tobytes()).hexdigest()[:8] for array in (data.train_images, data.test_images)]
    assert digests == ["2e487a6c", "c867c93f"]
