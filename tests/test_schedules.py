"""Learning rates against values worked out by hand."""

import pytest
import tensorflow as tf

from fashion_oct.schedules import WarmupThenDecay, scale_rate


def test_warmup_then_decay_is_constant_by_default():
    schedule = WarmupThenDecay(0.5, 10)
    assert [float(schedule(step)) for step in (0, 5, 9, 100)] == [0.5] * 4


def test_warmup_then_decay_rises_linearly():
    schedule = WarmupThenDecay(1.0, 100, warmup_steps=3)
    # (step + 1) / (3 + 1), then the peak
    assert [float(schedule(step)) for step in (0, 1, 2, 3, 50)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warmup_then_decay_falls_as_a_cosine():
    schedule = WarmupThenDecay(2.0, 12, warmup_steps=4, decay="cosine")
    # of the 8 steps after the warm-up: none, a quarter, a half, all; (1 + cos(pi / 4)) = 1.7071
    rates = [float(schedule(step)) for step in (4, 6, 8, 12)]
    assert rates == pytest.approx([2.0, 1.7071068, 1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("arguments", [{"decay": "linear"}, {"warmup_steps": 10}, {"warmup_steps": -1}])
def test_warmup_then_decay_refuses_bad_arguments(arguments):
    with pytest.raises(ValueError, match="give"):
        WarmupThenDecay(1.0, 10, **arguments)


def test_warmup_then_decay_survives_saving(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(WarmupThenDecay(0.1, 20, warmup_steps=4, decay="cosine")), "mse")
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    config = tf.keras.optimizers.serialize(loaded.optimizer)["config"]["learning_rate"]["config"]
    assert config == {"peak": 0.1, "num_steps": 20, "warmup_steps": 4, "decay": "cosine"}


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("sqrt", 0.2), ("linear", 0.4)])
def test_scale_rate_follows_the_rule(rule, expected):
    assert scale_rate(0.1, global_batch_size=2048, reference_batch_size=512, rule=rule) == pytest.approx(expected)


def test_scale_rate_lowers_the_rate_of_a_smaller_batch():
    assert scale_rate(0.1, global_batch_size=128, reference_batch_size=512, rule="sqrt") == pytest.approx(0.05)


def test_scale_rate_refuses_other_rules():
    with pytest.raises(ValueError, match="'cubic': give one of none, sqrt, linear"):
        scale_rate(0.1, global_batch_size=1, reference_batch_size=1, rule="cubic")
