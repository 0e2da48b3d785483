"""A tf.data service of a dispatcher and two workers on loopback gives what this process would read itself."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from documents import snippets
from ports import free_ports

from fashion_oct import data_service, input_pipeline
from fashion_oct.errors import InputError

NUM_IMAGES = 37  # 8 images a step: batches run on across passes
DISPATCHER, WORKER = snippets("docs/data_service.md")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """PNGs of 6 x 5 random pixels; the label is the number of the file."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    paths = [folder / f"{i:02}.png" for i in range(NUM_IMAGES)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (6, 5), np.uint8)).save(path)
    return input_pipeline.FileExamples([str(path) for path in paths], np.arange(NUM_IMAGES), (6, 5, 1))


@pytest.fixture(scope="module")
def service():
    """The address of a dispatcher with two workers, in this process."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)]
    yield address
    del workers, dispatcher


def batches_of(examples, **arguments):
    """Returns the images and labels of 12 steps of 8 images, over 2.6 passes."""
    settings = {"global_batch_size": 8, "seed": 3, "num_steps": 12} | arguments
    return list(input_pipeline.make_training_dataset(examples, **settings).as_numpy_iterator())


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for (images, labels), (expected_images, expected_labels) in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(labels, expected_labels)
        np.testing.assert_array_equal(images, expected_images)


def test_served_batches_are_those_of_this_process(files, service):
    assert_same(batches_of(data_service.Served(files, service)), batches_of(files))


def test_served_batches_show_every_image_once_an_epoch(files, service):
    labels = np.concatenate([labels for _, labels in batches_of(data_service.Served(files, service))])
    for start in (0, NUM_IMAGES):
        assert sorted(labels[start : start + NUM_IMAGES]) == list(range(NUM_IMAGES))


def test_served_batches_start_at_any_step_and_may_be_mirrored(files, service):
    mirrored = input_pipeline.Mirrored(files)
    assert_same(batches_of(data_service.Served(mirrored, service), start_step=5), batches_of(mirrored, start_step=5))


def test_served_batches_are_dealt_out_to_workers_that_train(files, service):
    share = input_pipeline.Share(first_replica=2, num_own=2, num_replicas=4)
    assert_same(batches_of(data_service.Served(files, service), share=share), batches_of(files, share=share))


def test_a_file_that_the_workers_cannot_open_is_tried_here(files, service, tmp_path, caplog):
    """It is missing here, too: the error is the one that says so."""
    missing = input_pipeline.FileExamples([*files.paths[:-1], str(tmp_path / "none.png")], files.labels, (6, 5, 1))
    with pytest.raises(tf.errors.OpError, match="none"):
        batches_of(data_service.Served(missing, service))
    assert "decoding goes on here" in caplog.text


class Blocked(data_service.Served):
    """As if the worker that has the batch of row 2 had died: it never comes."""

    def _served(self, rows):
        return super()._served(rows).filter(lambda number, images, labels: number != 2)


def test_a_batch_that_does_not_come_is_decoded_here(files, service):
    begin = time.monotonic()
    assert_same(batches_of(Blocked(files, service, patience=2.0)), batches_of(files))
    assert time.monotonic() - begin < 20


def start_server(program, **ports):
    """Starts a program of docs/data_service.md in a process of its own, on other ports, and waits until it answers."""
    for port, other in ports.items():
        program = program.replace(port.removeprefix("port"), str(other))
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            data_service.check_is_there(f"localhost:{list(ports.values())[-1]}")
            return process
        except InputError:
            time.sleep(0.1)
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
def test_training_goes_on_when_a_worker_and_then_the_dispatcher_are_killed(files):
    """Real processes, as docs/data_service.md starts them: first a worker is killed, then the rest."""
    (port, *ports), processes = free_ports(3), []
    try:
        processes.append(start_server(DISPATCHER, port5050=port))
        for own in ports:
            processes.append(start_server(WORKER, port5050=port, port5051=own))
        examples, got = data_service.Served(files, f"localhost:{port}", patience=5.0), []
        settings = {"global_batch_size": 8, "seed": 3, "num_steps": 200}
        dataset = input_pipeline.make_training_dataset(examples, **settings)
        for step, batch in enumerate(dataset.as_numpy_iterator()):
            got.append(batch)
            if step == 3:
                processes[1].send_signal(signal.SIGKILL)
            if step == 23:
                processes[0].send_signal(signal.SIGKILL)
                processes[2].send_signal(signal.SIGKILL)
        assert_same(got, batches_of(files, **settings))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("address", ["localhost:1", "no.such.host.invalid:5050"])
def test_check_is_there_names_an_address_where_nothing_is(address):
    with pytest.raises(InputError, match=f"--data_service={address}.*docs/data_service.md"):
        data_service.check_is_there(address, timeout=2.0)


def test_check_is_there_finds_a_dispatcher(service):
    data_service.check_is_there(service)
