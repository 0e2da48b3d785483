"""Fixtures that the tests share: strategies on logical CPU devices, the real data where it is at hand."""

import os
import pathlib

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

SHARED_DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
DEBIAN_FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")
FAULTS: dict[str, list[int]] = {}  # of tests/faults, by kind: tried, survived


def pytest_configure():
    """Gives TensorFlow two logical CPU devices, before a test can start it with one."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session")
def one_device():
    """A strategy on one device, the one that trains on a CPU."""
    from fashion_oct import distribution

    return distribution.make_strategy(num_gpus=0)


@pytest.fixture(scope="session")
def two_devices():
    """A `MirroredStrategy` on two logical CPU devices."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="session")
def oct_folder():
    """The real OCT sample; the test is skipped where it is not at hand."""
    if not (SHARED_DATA / "OCT2017").is_dir():
        pytest.skip("the OCT sample is not at hand")
    return SHARED_DATA / "OCT2017"


@pytest.fixture(scope="session")
def vgg16_weights():
    """The published ImageNet weights of VGG16 without its top; the test is skipped where they are not at hand."""
    if not (SHARED_DATA / "vgg16_imagenet_notop.h5").is_file():
        pytest.skip("the ImageNet weights are not at hand")
    return SHARED_DATA / "vgg16_imagenet_notop.h5"


@pytest.fixture(scope="session")
def fashion_mnist_folder():
    """Debian's copy of the full Fashion-MNIST; the test is skipped where it is not installed."""
    if not DEBIAN_FASHION_MNIST.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    return DEBIAN_FASHION_MNIST


def pytest_runtest_logreport(report):
    """Adds what a test has tried, also one that ran in another process."""
    if report.when == "call":
        for fault, survived in (value for name, value in report.user_properties if name == "fault"):
            count = FAULTS.setdefault(fault, [0, 0])
            count[0] += 1
            count[1] += survived


def pytest_terminal_summary(terminalreporter):
    """Says of each fault how often it was tried, survived and lost."""
    if FAULTS:
        terminalreporter.section("faults")
        terminalreporter.line(f"{'fault':64}  tried  survived  lost")
        for fault, (tried, survived) in FAULTS.items():
            terminalreporter.line(f"{fault:64}  {tried:5}  {survived:8}  {tried - survived:4}")
