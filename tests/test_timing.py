"""TimeHistory on hooks driven by hand with a fake clock, and on real Keras fits."""

import ast
import csv
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
import types

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import timing
from fashion_oct.timing import TimeHistory

# TensorFlow takes logical devices only before its first operation
pytestmark = pytest.mark.usefixtures("two_devices")

KERAS_3 = hasattr(tf.keras, "ops")
SLEEP_SECONDS = 0.05  # a step of the tiny model takes about a millisecond


class FakeClock:
    """A clock that only `wait` moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


def drive(history, clock, seconds, *, steps_per_execution=1, steps=None):
    """Calls the hooks of one epoch by hand: an execution of each of `seconds`; the last one ends at batch `steps`."""
    history.on_epoch_begin(0)
    for i, execution_seconds in enumerate(seconds):
        first = i * steps_per_execution
        last = min(first + steps_per_execution, steps or math.inf) - 1
        history.on_train_batch_begin(first)
        clock.wait(execution_seconds)
        history.on_train_batch_end(last, logs={"loss": 1.0})
    history.on_epoch_end(0, logs={"loss": 1.0})


def driven(seconds, **kwargs):
    """The summary of one fit by hand of 10 images a step; `kwargs` are those of TimeHistory and of `drive`."""
    clock = FakeClock()
    of_drive = {key: kwargs.pop(key) for key in ("steps_per_execution", "steps") if key in kwargs}
    history = TimeHistory(10, clock=clock, **kwargs)
    history.on_train_begin()
    drive(history, clock, seconds, **of_drive)
    history.on_train_end()
    return history.summary()


def make_model(**compile_args):
    model = tf.keras.Sequential([tf.keras.layers.InputLayer((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", **compile_args)
    return model


def make_dataset(num_batches, batch_size=4):
    x = np.ones([num_batches * batch_size, 4], "float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch_size, drop_remainder=True)


def make_slow_dataset(num_batches):
    """Batches that take SLEEP_SECONDS each to read."""

    def slowly(x):
        time.sleep(SLEEP_SECONDS)
        return x

    dataset = make_dataset(num_batches)
    return dataset.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(slowly, [x], tf.float32), [4, 4]), y))


def fit(model, dataset, *callbacks, **fit_args):
    return model.fit(dataset, verbose=0, callbacks=list(callbacks), **fit_args)


class Sleeper(tf.keras.callbacks.Callback):
    """Sleeps in one hook of every batch, epoch or fit."""

    def __init__(self, hook, seconds=SLEEP_SECONDS):
        super().__init__()
        setattr(self, hook, lambda *args, **kwargs: time.sleep(seconds))


class BatchSleeper(tf.keras.callbacks.Callback):
    """Sleeps before and after every execution (Keras 2 calls only batch hooks that a class overrides)."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(SLEEP_SECONDS)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(SLEEP_SECONDS)


class Stopper(tf.keras.callbacks.Callback):
    """Raises in the third execution."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


# Arguments and the summary, by a fake clock.


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", None, True])
def test_time_history_refuses_a_batch_size_that_is_no_count(value):
    with pytest.raises(ValueError, match=r"global_batch_size is .*whole number of at least 1"):
        TimeHistory(value)


@pytest.mark.parametrize("value", [-1, 1.5, "1", False])
def test_time_history_refuses_discarded_steps_that_are_no_count(value):
    with pytest.raises(ValueError, match=r"num_discarded_steps is .*whole number of at least 0"):
        TimeHistory(8, num_discarded_steps=value)


def test_time_history_takes_numpy_counts():
    history = TimeHistory(np.int64(8), num_discarded_steps=np.int32(2))
    assert json.dumps(dataclasses.asdict(history.summary()))


def test_summary_before_any_fit_is_empty():
    summary = TimeHistory(8).summary()
    assert (summary.num_steps, summary.total_seconds, summary.fit_seconds) == (0, 0.0, 0.0)
    assert summary.first_step_seconds is summary.images_per_second is summary.step_seconds is None


def test_summary_leaves_the_first_step_out_of_throughput_but_not_of_the_total():
    summary = driven([5.0, 1.0, 2.0, 1.0])
    assert summary.first_step_seconds == 5.0
    assert summary.total_seconds == 9.0
    assert summary.images_per_second == 3 * 10 / 4.0  # 3 steps of 10 images in 4 s
    assert (summary.num_steps, summary.num_discarded_steps) == (4, 1)


def test_summary_times_everything_with_zero_discarded_steps():
    summary = driven([5.0, 1.0, 2.0], num_discarded_steps=0)
    assert summary.images_per_second == 3 * 10 / 8.0
    assert summary.num_discarded_steps == 0


def test_summary_discards_as_many_steps_as_asked():
    summary = driven([5.0, 3.0, 1.0, 1.0], num_discarded_steps=2)
    assert summary.images_per_second == 10.0
    assert summary.num_discarded_steps == 2


def test_summary_rounds_discarded_steps_up_to_whole_executions():
    # executions of 4, 4, 4 and 2 steps; 5 discarded steps reach into the second one
    summary = driven([9.0, 8.0, 4.0, 1.0], num_discarded_steps=5, steps_per_execution=4, steps=14)
    assert summary.num_discarded_steps == 8
    assert summary.images_per_second == 6 * 10 / 5.0


@pytest.mark.parametrize("num_discarded_steps", [3, 100])
def test_summary_has_no_throughput_where_nothing_is_timed(num_discarded_steps):
    summary = driven([1.0, 1.0, 1.0], num_discarded_steps=num_discarded_steps)
    assert summary.images_per_second is summary.step_seconds is None
    assert (summary.num_discarded_steps, summary.total_seconds) == (3, 3.0)


def test_step_seconds_are_those_worked_out_by_hand():
    step_seconds = driven([9.0, 4.0, 1.0, 3.0, 2.0, 5.0]).step_seconds
    # Sorted: 1 2 3 4 5 at positions 0 to 4. p90 at 0.90 x 4 = 3.6: 4.6; p99 at 3.96: 4.96.
    assert step_seconds == pytest.approx({"mean": 3.0, "p50": 3.0, "p90": 4.6, "p99": 4.96, "max": 5.0})


def test_step_seconds_weigh_executions_by_their_steps():
    # 4 steps in 4 s, 4 in 8 s, 2 in 8 s: 1 1 1 1 2 2 2 2 4 4. p90 at 0.9 x 9 = 8.1: 4; p50 at 4.5: 2; mean 20/10.
    step_seconds = driven([4.0, 8.0, 8.0], num_discarded_steps=0, steps_per_execution=4, steps=10).step_seconds
    assert step_seconds == pytest.approx({"mean": 2.0, "p50": 2.0, "p90": 4.0, "p99": 4.0, "max": 4.0})


@pytest.mark.parametrize("num_executions", [1, 2, 3, 10, 101])
def test_step_seconds_agree_with_numpy(num_executions):
    rng = np.random.default_rng(num_executions)
    seconds, steps = rng.exponential(size=num_executions), rng.integers(1, 9, num_executions)
    found = timing._step_statistics(list(seconds), [int(n) for n in steps])
    each_step = np.repeat(seconds / steps, steps)
    for percent in (50, 90, 99):
        assert found[f"p{percent}"] == pytest.approx(np.percentile(each_step, percent))
    assert (found["mean"], found["max"]) == (pytest.approx(each_step.mean()), pytest.approx(each_step.max()))


def test_summary_splits_the_wall_time_into_steps_validation_and_other():
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    history.set_model(None)  # fit begins here
    clock.wait(1.0)
    history.on_train_begin()
    drive(history, clock, [2.0, 3.0])
    history.on_test_begin()
    clock.wait(4.0)
    history.on_test_end()
    clock.wait(0.5)
    history.on_train_end()
    clock.wait(100.0)  # after fit
    summary = history.summary()
    assert (summary.total_seconds, summary.validation_seconds, summary.other_seconds) == (5.0, 4.0, 1.5)
    assert summary.fit_seconds == 10.5


def test_with_block_counts_what_comes_before_and_after_the_hooks():
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    with history:
        clock.wait(7.0)
        history.set_model(None)
        history.on_train_begin()
        drive(history, clock, [1.0])
        history.on_train_end()
        clock.wait(2.0)
    clock.wait(100.0)
    assert (history.summary().fit_seconds, history.summary().other_seconds) == (10.0, 9.0)


def test_with_block_without_a_fit_leaves_the_last_figures():
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    history.on_train_begin()
    drive(history, clock, [1.0])
    history.on_train_end()
    before = history.summary()
    with history:
        clock.wait(7.0)
    assert history.summary() == before


@pytest.mark.parametrize("goes_on_after_the_last", [True, False])
def test_with_block_counts_what_is_between_fits_that_go_on(goes_on_after_the_last):
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    with history:
        for is_last in (False, True):
            clock.wait(7.0)
            history.set_model(None)
            history.on_train_begin()
            drive(history, clock, [1.0, 2.0])
            history.on_train_end()
            clock.wait(0.5)  # other callbacks
            if goes_on_after_the_last or not is_last:
                history.go_on(history.state())
        clock.wait(0.25)
    clock.wait(100.0)
    summary = history.summary()
    assert (summary.num_steps, summary.total_seconds, summary.fit_seconds) == (4, 6.0, 2 * 10.5 + 0.25)


def test_go_on_without_a_fit_leaves_the_figures():
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    history.on_train_begin()
    drive(history, clock, [1.0, 2.0])
    history.on_train_end()
    state, summary = history.state(), history.summary()
    other = TimeHistory(10, clock=clock)
    other.go_on(state)
    with other:
        clock.wait(7.0)
    clock.wait(100.0)
    assert other.state() == state
    assert other.summary() == summary


def test_evaluation_outside_fit_is_not_counted():
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    history.on_train_begin()
    drive(history, clock, [1.0])
    history.on_train_end()
    before = history.summary()
    history.set_model(None)  # model.evaluate(callbacks=[history])
    history.on_test_begin()
    clock.wait(5.0)
    history.on_test_end()
    assert history.summary() == before


class SlowTensor:
    """A result for which the device needs 3 seconds."""

    def __init__(self, clock):
        self.numpy = lambda: clock.wait(3.0)


def test_hooks_by_hand_wait_for_the_tensors_of_the_logs():
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    history.on_train_begin()
    history.on_train_batch_begin(0)
    history.on_train_batch_end(0, logs={"loss": SlowTensor(clock)})
    assert history.times == [3.0]


def test_train_function_is_timed_until_its_logs_are_there():
    clock = FakeClock()
    history = TimeHistory(10, clock=clock)
    model = types.SimpleNamespace(train_function=lambda iterator: {"loss": SlowTensor(clock)})
    history.set_model(model)
    history.on_train_begin()
    history.on_train_batch_begin(0)
    clock.wait(0.5)  # another callback's on_train_batch_begin
    model.train_function(None)
    clock.wait(0.5)  # another callback's on_train_batch_end
    history.on_train_batch_end(0, logs={"loss": 1.0})
    assert history.times == [3.0]


def test_epoch_logs_get_the_throughput_of_their_own_timed_steps():
    clock = FakeClock()
    history = TimeHistory(10, log_throughput=True, clock=clock)
    history.on_train_begin()
    found = []
    for seconds in ([9.0, 1.0, 1.0], [2.0, 2.0]):
        history.on_epoch_begin(0)
        for batch, execution_seconds in enumerate(seconds):
            history.on_train_batch_begin(batch)
            clock.wait(execution_seconds)
            history.on_train_batch_end(batch)
        history.on_epoch_end(0, logs=(logs := {}))
        found.append(logs["images_per_second"])
    assert found == [10.0, 5.0]


# Real fits.


def test_fit_times_every_step():
    history = TimeHistory(4)
    fit(make_model(), make_dataset(5), history, epochs=3)
    assert len(history.times) == 15
    assert history.steps == [1] * 15
    assert history.times[0] > max(history.times[1:])  # tracing


@pytest.mark.parametrize("arrays", [False, True])
def test_fit_counts_the_steps_of_a_short_last_execution(arrays):
    history = TimeHistory(4)
    model = make_model(steps_per_execution=8)
    x = np.ones([80, 4], "float32")
    data = {"x": x, "y": x[:, :1], "batch_size": 4} if arrays else {"x": make_dataset(20)}
    model.fit(**data, epochs=2, verbose=0, callbacks=[history])
    assert history.steps == [8, 8, 4] * 2
    assert (history.summary().num_steps, history.summary().num_discarded_steps) == (40, 8)
    assert int(model.optimizer.iterations.numpy()) == 40


def test_fit_counts_the_steps_that_keras_really_made_on_a_repeated_dataset():
    history = TimeHistory(4)
    model = make_model(steps_per_execution=8)
    fit(model, make_dataset(20).repeat(), history, epochs=2, steps_per_epoch=20)
    # Keras 3 runs whole executions, beyond steps_per_epoch
    assert history.steps == ([8, 8, 8] if KERAS_3 else [8, 8, 4]) * 2
    assert int(model.optimizer.iterations.numpy()) == history.summary().num_steps


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 refuses several steps an execution on data of unknown size")
def test_fit_counts_the_steps_of_data_of_unknown_size():
    history = TimeHistory(4)
    fit(make_model(steps_per_execution=8), make_dataset(20).filter(lambda x, y: True), history, epochs=2)
    assert history.steps == [8, 8, 4] * 2


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 numbers a short last execution as it is")
@pytest.mark.parametrize("optimizer", ["gradient accumulation", "loss scaling"])
def test_fit_counts_steps_whatever_the_optimizer(optimizer):
    if optimizer == "gradient accumulation":
        optimizer = tf.keras.optimizers.SGD(gradient_accumulation_steps=3)
    else:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
    history, model = TimeHistory(4), make_model()
    model.compile(optimizer, "mse", steps_per_execution=8)
    fit(model, make_dataset(20).repeat(), history, epochs=2, steps_per_epoch=20)
    assert history.steps == [8, 8, 8] * 2  # not the 4 that steps_per_epoch would make of the last one


def test_fit_on_data_of_unknown_size_counts_no_step_for_the_end_of_data():
    history = TimeHistory(4)
    fit(make_model(), make_dataset(5).filter(lambda x, y: True), history, epochs=2)
    assert history.steps == [1] * 10


@pytest.mark.parametrize("position", ["before", "after"])
def test_fit_keeps_slow_callbacks_out_of_step_time(position):
    history = TimeHistory(4)
    callbacks = [BatchSleeper(), history] if position == "before" else [history, BatchSleeper()]
    fit(make_model(), make_dataset(5), *callbacks)
    assert statistics.median(history.times[1:]) < SLEEP_SECONDS / 2
    assert history.summary().other_seconds > 9 * SLEEP_SECONDS  # 5 x 2 sleeps, the last one perhaps after the end


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
def test_fit_counts_callbacks_between_epochs_as_other(hook):
    history = TimeHistory(4)
    fit(make_model(), make_dataset(2), history, Sleeper(hook), epochs=3)
    summary = history.summary()
    assert summary.other_seconds > 3 * SLEEP_SECONDS
    assert statistics.median(history.times[1:]) < SLEEP_SECONDS / 2


def test_fit_counts_the_wait_for_input_as_step_time():
    history = TimeHistory(4)
    dataset = make_slow_dataset(4)
    fit(make_model(), dataset, history)
    assert min(history.times[1:]) > SLEEP_SECONDS * 0.8


def test_fit_keeps_validation_apart():
    history = TimeHistory(4)
    validation = make_slow_dataset(4)
    fit(make_model(), make_dataset(3), history, validation_data=validation, epochs=2)
    assert history.summary().validation_seconds > 8 * SLEEP_SECONDS * 0.8
    assert statistics.median(history.times[1:]) < SLEEP_SECONDS / 2


def test_fit_starts_afresh_every_time():
    history, model = TimeHistory(4), make_model()
    fit(model, make_dataset(5), history, epochs=2)
    first_times = history.times
    fit(model, make_dataset(5), history, epochs=3, initial_epoch=2)
    assert (len(first_times), len(history.times)) == (10, 5)
    assert history.summary().num_steps == 5


@pytest.mark.parametrize("other_history", [False, True])
def test_fit_after_one_that_raised_is_timed_once(other_history):
    history, model = TimeHistory(4), make_model()
    with pytest.raises(KeyboardInterrupt):
        fit(model, make_dataset(5), history, Stopper())
    assert history.summary().num_steps == 3
    again = TimeHistory(4) if other_history else history
    fit(model, make_dataset(4), again)
    assert len(again.times) == 4
    assert len(history.times) == (3 if other_history else 4)


def test_set_model_takes_off_the_stopwatch_that_a_raised_fit_left():
    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        fit(model, make_dataset(5), TimeHistory(4), Stopper())
    TimeHistory(4).set_model(model)
    assert not hasattr(model.train_function, "untimed")


def test_fit_leaves_the_train_function_as_it_was():
    model = make_model()
    fit(model, make_dataset(2))
    train_function = model.train_function
    fit(model, make_dataset(2), TimeHistory(4))
    assert model.train_function is train_function


def test_with_block_restores_the_train_function_after_an_error():
    history, model = TimeHistory(4), make_model()
    with pytest.raises(KeyboardInterrupt), history:
        fit(model, make_dataset(5), history, Stopper())
    assert not hasattr(model.train_function, "untimed")
    assert history.summary().num_steps == 3


def test_fit_with_two_histories_gives_both_the_same_steps():
    one, two = TimeHistory(4), TimeHistory(4)
    fit(make_model(), make_dataset(5), one, two)
    assert one.steps == two.steps == [1] * 5
    assert all(outer >= inner for inner, outer in zip(one.times, two.times, strict=True))


def test_fit_with_a_bare_callback_times_every_step():
    history = TimeHistory(4)  # not in a list: Keras 3 then calls on_train_batch_end in another thread
    make_model(steps_per_execution=2).fit(make_dataset(11), verbose=0, callbacks=history)
    assert history.steps == [2, 2, 2, 2, 2, 1]
    assert min(history.times) > 0


def test_train_on_batch_of_another_callback_is_no_step():
    class Extra(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            x = np.ones([4, 4], "float32")
            self.model.train_on_batch(x, x[:, :1])

    history = TimeHistory(4)
    fit(make_model(), make_dataset(5), Extra(), history)
    assert history.steps == [1] * 5


def test_fit_run_eagerly_is_timed():
    history = TimeHistory(4)
    fit(make_model(run_eagerly=True), make_dataset(3), history)
    assert history.steps == [1] * 3


def test_fit_on_two_devices_states_replicas_and_batch_sizes(two_devices):
    history = TimeHistory(8)
    with two_devices.scope():
        model = make_model()  # Keras 3 fails here with several steps an execution, with or without this callback
    fit(model, make_dataset(3, batch_size=8), history)
    summary = history.summary()
    assert (summary.num_replicas, summary.per_replica_batch_size, summary.global_batch_size) == (2, 4, 8)
    assert history.steps == [1, 1, 1]


def test_per_replica_batch_size_is_that_of_the_fullest_replica(two_devices):
    history = TimeHistory(5)
    with two_devices.scope():
        history.on_train_begin()
    assert history.summary().per_replica_batch_size == 3  # 5 = 3 + 2


def test_with_block_accounts_for_the_wall_time_of_fit():
    history, model = TimeHistory(4), make_model()
    sleeper = Sleeper("on_epoch_end", seconds=0.5)
    begin = time.perf_counter()
    with history:
        fit(model, make_dataset(50), history, sleeper, validation_data=make_dataset(10), epochs=3)
    wall_seconds = time.perf_counter() - begin
    summary = history.summary()
    parts = (summary.total_seconds, summary.validation_seconds, summary.other_seconds)
    assert sum(parts) == pytest.approx(wall_seconds, rel=0.01)
    assert summary.total_seconds == pytest.approx(sum(history.times))
    assert min(parts) > 0
    assert summary.other_seconds > 1.5  # 3 x 0.5 s of sleep


class Span(tf.keras.callbacks.Callback):
    """Notes when Keras hands over the model and when training ends."""

    def set_model(self, model):
        super().set_model(model)
        self.begin = time.perf_counter()

    def on_train_end(self, logs=None):
        self.end = time.perf_counter()


def test_fit_without_a_block_accounts_for_the_time_from_set_model_to_train_end():
    # What Keras does before (1 to 140 ms seen) no callback can see, so the wall time of so short a fit is no measure.
    history, first, last = TimeHistory(4), Span(), Span()
    fit(make_model(), make_dataset(50), first, history, last, validation_data=make_dataset(10), epochs=3)
    assert history.summary().fit_seconds == pytest.approx(last.end - first.begin, rel=0.01)


def test_with_block_accounts_for_the_wall_time_of_a_model_not_yet_built(two_devices):
    with two_devices.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    dataset = make_slow_dataset(8)
    history = TimeHistory(4)
    begin = time.perf_counter()
    with history:
        fit(model, dataset, history, Sleeper("on_train_end", seconds=0.3))
    wall_seconds = time.perf_counter() - begin
    assert history.summary().fit_seconds == pytest.approx(wall_seconds, rel=0.01)


def test_log_throughput_reaches_history_and_csv(tmp_path):
    history = TimeHistory(4, log_throughput=True)
    csv_logger = tf.keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    logs = fit(make_model(), make_dataset(5), history, csv_logger, epochs=2).history
    second_epoch = 5 * 4 / sum(history.times[5:])
    assert logs["images_per_second"] == [pytest.approx(4 * 4 / sum(history.times[1:5])), pytest.approx(second_epoch)]
    with open(tmp_path / "log.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert float(rows[1]["images_per_second"]) == pytest.approx(second_epoch)


def test_log_throughput_is_nan_where_nothing_is_timed():
    history = TimeHistory(4, log_throughput=True, num_discarded_steps=6)
    logs = fit(make_model(), make_dataset(5), history, epochs=2).history["images_per_second"]
    assert math.isnan(logs[0])
    assert logs[1] == pytest.approx(4 * 4 / sum(history.times[6:]))


def test_fit_prints_nothing(capsys):
    fit(make_model(), make_dataset(3), TimeHistory(4, log_throughput=True), epochs=2)
    assert "images_per_second" not in "".join(capsys.readouterr())


def test_checkpoints_in_fit_are_saved_and_load(tmp_path):
    path = tmp_path / ("model.keras" if KERAS_3 else "model")  # Keras 2: a SavedModel, which looks at functions
    model = make_model()
    fit(model, make_dataset(3), TimeHistory(4), tf.keras.callbacks.ModelCheckpoint(str(path)))
    loaded = tf.keras.models.load_model(str(path))
    x = np.ones([1, 4], "float32")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_module_imports_only_the_standard_library_and_tensorflow():
    tree = ast.parse(pathlib.Path(timing.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name if isinstance(node, ast.Import) else node.module for node in imports for alias in node.names}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"tensorflow"}
