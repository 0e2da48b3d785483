"""Devices, batches, precision."""

import os

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import distribution, input_pipeline
from fashion_oct.errors import InputError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"per_replica_batch_size": 512}, (1, 512, 512)),
        ({"global_batch_size": 512}, (1, 512, 512)),
    ],
)
def test_batch_sizes_of_one_replica(arguments, expected):
    batch = distribution.batch_sizes(1, **arguments)
    assert (batch.num_replicas, batch.per_replica_batch_size, batch.global_batch_size) == expected


def test_batch_sizes_multiplies_and_divides_by_the_replicas():
    assert distribution.batch_sizes(4, per_replica_batch_size=32).global_batch_size == 128
    assert distribution.batch_sizes(4, global_batch_size=128).per_replica_batch_size == 32


def test_batch_sizes_refuses_a_batch_that_the_replicas_do_not_divide():
    with pytest.raises(InputError, match=r"--global_batch_size=10 .* 3 replicas.* 9 or 12"):
        distribution.batch_sizes(3, global_batch_size=10)


@pytest.mark.parametrize(("num_examples", "expected"), [(60_000, 118), (512, 1), (513, 2), (1024, 2)])
def test_steps_per_epoch_rounds_up(num_examples, expected):
    assert distribution.batch_sizes(1, per_replica_batch_size=512).steps_per_epoch(num_examples) == expected


def test_steps_per_epoch_refuses_a_batch_larger_than_the_split():
    with pytest.raises(InputError, match=r"1024 images .* \(1000 images\)"):
        distribution.batch_sizes(2, per_replica_batch_size=512).steps_per_epoch(1000)


@pytest.mark.parametrize(
    ("num_replicas", "global_batch_size", "num_examples", "expected"),
    [
        (1, 16, 33, 16),  # one replica takes any last batch
        (2, 16, 32, 16),  # no last batch
        (2, 16, 33, 14),  # 33 = 2 x 16 + 1 -> 1 + 0; 33 = 2 x 14 + 5 -> 3 + 2
        (3, 12, 16, 9),  # 16 = 12 + 4 -> 2 + 2 + 0; 16 = 9 + 7 -> 3 + 3 + 1
    ],
)
def test_for_evaluation_leaves_no_replica_empty(num_replicas, global_batch_size, num_examples, expected):
    batch = distribution.batch_sizes(num_replicas, global_batch_size=global_batch_size)
    assert batch.for_evaluation(num_examples) == expected


def test_for_evaluation_refuses_fewer_examples_than_replicas():
    with pytest.raises(InputError, match=r"1 images .* 2 replicas"):
        distribution.batch_sizes(2, global_batch_size=16).for_evaluation(1)


def test_make_strategy_gives_one_device_by_default(one_device):
    strategy = distribution.make_strategy(num_gpus=0)
    assert strategy.num_replicas_in_sync == 1
    assert distribution.device_names(strategy) == ["CPU:0"]


def test_one_cpu_reads_batches_without_tuning_threads_which_a_deleted_iterator_may_wait_a_minute_for(monkeypatch):
    examples = input_pipeline.ArrayExamples(np.zeros((4, 2, 2, 1), np.uint8), np.zeros(4, np.int32))
    strategy = distribution.make_strategy(num_gpus=0)
    for cores, is_tuned in ((2, False), (16, False), (64, True)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        for batches in (
            input_pipeline.make_training_dataset(examples, global_batch_size=2, seed=0, num_steps=2),
            input_pipeline.make_evaluation_dataset(examples, global_batch_size=2),
        ):
            assert batches.options().autotune.enabled is is_tuned
            assert strategy.experimental_distribute_dataset(batches) is batches  # no iterator for each device


def test_make_strategy_mirrors_virtual_devices(two_devices):
    strategy = distribution.make_strategy(virtual_devices=2)
    assert strategy.num_replicas_in_sync == 2
    assert distribution.device_names(strategy) == ["CPU:0", "CPU:1"]
    assert distribution.is_chief(strategy)


def test_make_strategy_says_what_is_there_and_offers_virtual_devices(one_device):
    with pytest.raises(InputError, match=r"--num_gpus=9999, but TensorFlow sees \d+ .*--virtual_devices=9999"):
        distribution.make_strategy(num_gpus=9999)


@pytest.fixture
def four_gpus(monkeypatch):
    """TensorFlow believes that there are four GPUs; the list has those that it was told to use."""
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(4)]
    visible, growing = list(gpus), []

    def set_visible(devices, kind):
        visible[:] = devices

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else [])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(visible))
    monkeypatch.setattr(tf.config, "set_visible_devices", set_visible)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, enable: growing.append((gpu, enable)))
    return gpus, visible, growing


@pytest.mark.parametrize(("asked", "num_taken"), [(None, 4), (4, 4), (3, 3), (1, 1), (0, 0)])
def test_gpus_that_are_not_asked_for_are_left_alone(four_gpus, asked, num_taken):
    gpus, visible, growing = four_gpus
    assert distribution._take_gpus(asked) == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"][:num_taken]
    assert visible == gpus[:num_taken]
    assert growing == [(gpu, True) for gpu in gpus[:num_taken]]


def test_the_cpu_of_a_machine_with_gpus_trains_under_the_default_strategy(four_gpus):
    strategy = distribution.make_strategy(num_gpus=0)
    assert distribution.num_visible_gpus() == 0
    assert not isinstance(strategy, tf.distribute.OneDeviceStrategy)
    with pytest.raises(InputError, match=r"--num_gpus=5, but TensorFlow sees 4 GPU\(s\) here: give at most 4"):
        distribution.make_strategy(num_gpus=5)


def test_precision_is_that_of_the_gpus_that_train(four_gpus, monkeypatch):
    gpus, visible, _ = four_gpus
    capabilities = dict(zip(gpus, [(9, 0), (9, 0), (7, 5), (6, 1)], strict=True))

    def details(gpu):
        return {"compute_capability": capabilities[gpu]}

    monkeypatch.setattr(tf.config.experimental, "get_device_details", details)
    monkeypatch.setattr(distribution, "_worker_devices", lambda strategy: ("/device:GPU:0",))
    for count, expected in ((2, "mixed_bfloat16"), (3, "mixed_float16"), (4, "float32")):
        visible[:] = gpus[:count]
        assert distribution.choose_precision("auto", None)[0] == expected


def test_gpus_that_tensorflow_has_not_started_with_are_refused(four_gpus, monkeypatch):
    def started(devices, kind):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", started)
    with pytest.raises(InputError, match=r"2 of 4 GPU\(s\) .* before its first use"):
        distribution.make_strategy(num_gpus=2)


def test_make_strategy_refuses_virtual_devices_after_the_start(one_device):
    one_device.run(lambda: None)
    with pytest.raises(InputError, match="has started with 2 logical CPU"):
        distribution.make_strategy(virtual_devices=64)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([(9, 0)], "mixed_bfloat16"),
        ([(8, 0), (8, 6)], "mixed_bfloat16"),
        ([(8, 0), (7, 5)], "mixed_float16"),
        ([(7, 0)], "mixed_float16"),
        ([(6, 1)], "float32"),
        ([(8, 0), None], "float32"),
    ],
)
def test_precision_of_gpus_follows_the_lowest_capability(capabilities, expected):
    assert distribution.precision_of_gpus(capabilities)[0] == expected


@pytest.mark.parametrize(
    ("flags_line", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16", "mixed_bfloat16"),
        ("flags\t\t: fpu amx_bf16 amx_tile", "mixed_bfloat16"),
        ("flags\t\t: fpu avx2 avx512f", "float32"),
        ("Features\t: fp asimd", "float32"),
    ],
)
def test_precision_of_cpu_takes_what_is_native(tmp_path, flags_line, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags_line}\nbugs\t: avx512_bf16_bug\n")
    assert distribution.precision_of_cpu(distribution.cpu_features(cpuinfo))[0] == expected


def test_cpu_features_is_empty_where_the_system_does_not_tell(tmp_path):
    assert distribution.cpu_features(tmp_path / "missing") == set()


def test_choose_precision_takes_what_was_asked_for(one_device):
    assert distribution.choose_precision("mixed_float16", one_device) == ("mixed_float16", "as asked for")
