"""A run that goes on from a checkpoint ends with the bits of one that was never stopped; damage is found."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import resource
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import checkpoints, input_pipeline
from fashion_oct.checkpoints import Checkpoints
from fashion_oct.errors import InputError

STEPS_PER_EPOCH, EPOCHS, BATCH = 6, 3, 8
EXAMPLES = input_pipeline.ArrayExamples(
    np.random.default_rng(0).integers(0, 256, (50, 2, 2, 1), np.uint8), np.arange(50) % 3
)


@pytest.fixture(autouse=True)
def readable_dropout():
    """Lets Keras 2 keep the random state of Dropout in a variable, as Keras 3 always does."""
    experimental = getattr(tf.keras.backend, "experimental", None)
    if experimental:
        experimental.enable_tf_random_generator()
    yield
    if experimental:
        experimental.disable_tf_random_generator()
    tf.keras.mixed_precision.set_global_policy("float32")


def make_model(units=4, *, strategy=None, policy="float32", optimizer="Adam", seed=1, steps_per_execution=1):
    """A network with everything that has a state: moving averages, dropout, an optimizer, metrics."""
    tf.keras.mixed_precision.set_global_policy(policy)
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers
    with strategy.scope() if strategy else contextlib.nullcontext():
        images = layers.Input((2, 2, 1), dtype="uint8")
        x = layers.Flatten()(layers.Rescaling(1 / 255)(images))
        x = layers.BatchNormalization()(layers.Dense(units, activation="relu")(x))
        x = layers.Dense(3)(layers.Dropout(0.5)(x))
        model = tf.keras.Model(images, layers.Activation("softmax", dtype="float32")(x))
        model.compile(
            optimizer=getattr(tf.keras.optimizers, optimizer)(0.01),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
    return model


def batches(first_step=0, num_steps=STEPS_PER_EPOCH * EPOCHS):
    return input_pipeline.make_training_dataset(
        EXAMPLES, global_batch_size=BATCH, seed=3, start_step=first_step, num_steps=num_steps
    )


class Killed(Exception):
    pass


class Run(tf.keras.callbacks.Callback):
    """Counts steps, saves after some of them, is killed after one, and keeps each epoch's logs."""

    def __init__(self, store=None, *, saves=(), killed_after=None):
        super().__init__()
        self.store, self.saves, self.killed_after = store, saves, killed_after
        self.step, self.rows = 0, []

    def set_params(self, params):
        super().set_params(params)
        self.first_step = self.step  # of this fit
        self.first_epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        self.first_epoch = epoch if self.first_epoch is None else self.first_epoch
        self.before = self.first_step + (epoch - self.first_epoch) * self.params["steps"]

    def on_train_batch_end(self, batch, logs=None):
        self.step = self.before + batch + 1
        if self.step in self.saves and self.step % STEPS_PER_EPOCH:
            self.store.save(self.model, step=self.step, state={"rows": self.rows})
        if self.step == self.killed_after:
            raise Killed

    def on_epoch_end(self, epoch, logs=None):
        self.rows = [*self.rows, {"epoch": epoch, **{name: float(value) for name, value in logs.items()}}]
        if self.step in self.saves:
            self.store.save(self.model, step=self.step, state={"rows": self.rows})


def train(model, run, checkpoint=None, *, has_validation):
    """Trains to the end from a checkpoint or the start: the recipe of the module's docstring."""
    callbacks = [run]
    if checkpoint:
        run.step, run.rows = checkpoint.step, checkpoint.state["rows"]
        with model.distribute_strategy.scope():
            checkpoint.restore(model)
        if run.step % STEPS_PER_EPOCH:
            callbacks.append(checkpoints.RestoreMetrics(checkpoint, batches(0, 1)))
    for first_step, arguments in checkpoints.remaining_fits(run.step, steps_per_epoch=STEPS_PER_EPOCH, epochs=EPOCHS):
        validation = input_pipeline.make_evaluation_dataset(EXAMPLES, global_batch_size=10) if has_validation else None
        model.fit(
            batches(first_step), **arguments, callbacks=callbacks, validation_data=validation, verbose=0, shuffle=False
        )


def bits(variables):
    """Returns the bytes of every replica of every variable."""
    wrapped = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    return [part.numpy().tobytes() for v in wrapped for part in getattr(v, "values", [v])]


def state_of(model):
    return {
        "weights": bits(model.variables),
        "optimizer": bits(model.optimizer.variables),
        "metrics": bits(variable for metric in model.metrics for variable in metric.variables),
    }


@pytest.fixture(scope="module")
def both_runs(one_device, two_devices, tmp_path_factory):
    """Gives a run in one go, and one with checkpoints after 9 and 12 steps that was killed after 15; each made once."""
    kinds = {
        "one": {"strategy": one_device, "steps_per_execution": 3},
        "two": {"strategy": two_devices, "policy": "mixed_bfloat16"},
    }

    @functools.cache
    def get(devices):
        kind, folder = kinds[devices], tmp_path_factory.mktemp(devices)
        model, run = make_model(**kind), Run()
        train(model, run, has_validation=devices == "one")
        with pytest.raises(Killed):
            killed = Run(Checkpoints(folder, keep=2), saves={9, 12}, killed_after=15)
            train(make_model(**kind), killed, has_validation=devices == "one")
        return kind, folder, state_of(model), run.rows

    return get


@pytest.mark.parametrize(
    ("devices", "step"),
    [
        ("one", 9),  # inside epoch 1
        ("one", 12),  # between the epochs 1 and 2
        ("two", 9),
    ],
)
def test_killed_run_goes_on_to_the_same_bits(both_runs, devices, step):
    kind, folder, final_state, rows = both_runs(devices)
    model, run = make_model(**kind, seed=99), Run()
    checkpoint = checkpoints.read(Checkpoints(folder, keep=2).path(step))
    train(model, run, checkpoint, has_validation=devices == "one")
    assert [row["epoch"] for row in run.rows] == [0, 1, 2]
    assert run.rows == rows
    assert state_of(model) == final_state


def test_a_tail_stands_for_its_own_layers_only(tmp_path):
    model = make_model()
    tail = tf.keras.Model(model.layers[-4].input, model.output)  # from Dropout on
    tail.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    tail.optimizer.build(tail.trainable_variables)
    Checkpoints(tmp_path, keep=1).save(tail, step=1, state={})
    names = [saved.name for saved in Checkpoints(tmp_path, keep=1).newest().variables if saved.group == "weights"]
    assert [name.split("/", 1)[-1].removesuffix(":0") for name in names if "dense" in name] == ["kernel", "bias"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, [(0, 0, 5, 10)]),
        (14, [(14, 1, 2, 6), (20, 2, 5, 10)]),
        (20, [(20, 2, 5, 10)]),
        (49, [(49, 4, 5, 1)]),
        (50, []),
    ],
)
def test_remaining_fits_do_the_rest(step, expected):
    calls = checkpoints.remaining_fits(step, steps_per_epoch=10, epochs=5)
    keys = ("initial_epoch", "epochs", "steps_per_epoch")
    assert [(first, *(arguments[key] for key in keys)) for first, arguments in calls] == expected


@pytest.fixture(scope="module")
def trained():
    model = make_model()
    model.fit(batches(), steps_per_epoch=5, verbose=0, shuffle=False)
    return model


def save(store, model, *steps, figures=()):
    for step, figure in itertools.zip_longest(steps, figures):
        store.save(model, step=step, state={"at": step}, figure=figure)


def test_newest_is_none_in_a_new_folder(tmp_path):
    store = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    assert store.newest() is None
    assert store.best is None


def test_state_comes_back_as_it_was(trained, tmp_path):
    state = {"rows": [{"loss": 0.1 + 0.2, "name": "größer\n"}], "none": None, "nan": float("nan"), "inf": float("inf")}
    Checkpoints(tmp_path, keep=1).save(trained, step=7, state=state)
    checkpoint = Checkpoints(tmp_path, keep=1).newest()
    assert checkpoint.step == 7
    assert repr(checkpoint.state) == repr(state)


def test_bfloat16_variables_keep_their_bits(tmp_path):
    def make(seed):
        tf.keras.utils.set_random_seed(seed)
        model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(5, dtype="bfloat16")])
        model.compile(optimizer="adam", loss="mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model = make(0)
    model.layers[-1].bias.assign([1.5, -0.0, float("nan"), float("inf"), 1e-40])
    assert {tf.as_dtype(v.dtype).name for v in model.variables} == {"bfloat16"}
    Checkpoints(tmp_path, keep=1).save(model, step=1, state={})
    other = make(1)
    Checkpoints(tmp_path, keep=1).newest().restore(other)
    assert bits(other.variables) == bits(model.variables)


def test_loss_scale_of_float16_comes_back(tmp_path):
    def make():
        model = make_model(policy="mixed_float16")
        model.optimizer.build(model.trainable_variables)
        if hasattr(model.optimizer, "dynamic_scale"):  # Keras 3
            return model, model.optimizer.dynamic_scale
        return model, model.optimizer._loss_scale.current_loss_scale

    model, scale = make()
    scale.assign(512.0)
    Checkpoints(tmp_path, keep=1).save(model, step=3, state={})
    other, other_scale = make()
    Checkpoints(tmp_path, keep=1).newest().restore(other)
    assert float(other_scale.numpy()) == 512.0


def test_file_has_a_line_that_anybody_can_read(trained, tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    save(store, trained, 12)
    with open(store.path(12), "rb") as stream:
        header = json.loads(stream.readline())
    assert (header["step"], header["state"]) == (12, {"at": 12})
    assert header["variables"][0]["shape"] == [4, 4]


def size_of_header(data):
    return data.index(b"\n") + 1


# where a file of n bytes with a header of h is cut, or has a bit flipped
PLACES = {
    "first byte": lambda n, h: 0,
    "header": lambda n, h: h // 2,
    "end of the header": lambda n, h: h - 1,
    "first variable": lambda n, h: h,
    "middle": lambda n, h: (h + n) // 2,
    "last variable": lambda n, h: n - 33,
    "digest": lambda n, h: n - 32,
    "last byte": lambda n, h: n - 1,
}


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("place", PLACES)
def test_newest_passes_over_a_flipped_bit(trained, tmp_path, caplog, place, bit):
    store = Checkpoints(tmp_path, keep=2)
    save(store, trained, 10, 20)
    data = bytearray(store.path(20).read_bytes())
    data[PLACES[place](len(data), size_of_header(data))] ^= 1 << bit
    store.path(20).write_bytes(data)
    assert store.newest().step == 10
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{store.path(20)} is damaged: ")


@pytest.mark.parametrize("place", PLACES)
def test_newest_passes_over_a_file_cut_short(trained, tmp_path, caplog, place):
    store = Checkpoints(tmp_path, keep=2)
    save(store, trained, 10, 20)
    data = store.path(20).read_bytes()
    os.truncate(store.path(20), PLACES[place](len(data), size_of_header(data)))
    assert store.newest().step == 10
    assert len(warnings_of(caplog)) == 1


def test_newest_passes_over_bytes_at_the_end(trained, tmp_path, caplog):
    store = Checkpoints(tmp_path, keep=2)
    save(store, trained, 10, 20)
    with open(store.path(20), "ab") as stream:
        stream.write(b"x")
    assert store.newest().step == 10
    assert len(warnings_of(caplog)) == 1


def test_newest_is_none_where_all_are_damaged(trained, tmp_path, caplog):
    store = Checkpoints(tmp_path, keep=2)
    save(store, trained, 10, 20)
    for step in (10, 20):
        store.path(step).write_bytes(b"")
    assert store.newest() is None
    assert [warning.split()[0] for warning in warnings_of(caplog)] == [str(store.path(20)), str(store.path(10))]


def test_save_removes_the_damaged_one_that_was_passed_over(trained, tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    save(store, trained, 10, 20)
    os.truncate(store.path(20), 100)
    assert store.newest().step == 10
    save(store, trained, 15)
    assert store.steps() == [10, 15]


def test_checkpoints_clears_away_what_a_killed_writer_left(trained, tmp_path):
    save(Checkpoints(tmp_path, keep=1), trained, 10)
    code = """
import os, pathlib, sys
from fashion_oct import files
with files.replacing(pathlib.Path(sys.argv[1]) / "00000020.ckpt", "wb") as stream:
    stream.write(b"x" * 100)
    stream.flush()
    os._exit(0)  # as by kill -9: nothing is cleared away
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=pathlib.Path(__file__).parents[1])
    assert len(os.listdir(tmp_path)) == 2
    store = Checkpoints(tmp_path, keep=1)
    assert os.listdir(tmp_path) == ["00000010.ckpt"]
    assert store.newest().step == 10


@pytest.mark.parametrize(("keep", "left"), [(1, [50]), (3, [30, 40, 50]), (9, [10, 20, 30, 40, 50])])
def test_save_keeps_the_last_ones(trained, tmp_path, keep, left):
    store = Checkpoints(tmp_path, keep=keep)
    save(store, trained, 10, 20, 30, 40, 50)
    assert store.steps() == left


@pytest.mark.parametrize(
    ("figures", "best", "left"),
    [
        ([0.5, 0.9, 0.7, 0.8], 20, [20, 40]),
        ([0.5, None, None, None], 10, [10, 40]),
        ([0.5, 0.5, 0.6, 0.6], 30, [30, 40]),
        ([float("nan"), 0.1, float("nan"), None], 20, [20, 40]),
        ([0.1, 0.2, 0.3, 0.4], 40, [40]),
    ],
)
def test_save_keeps_the_best_one(trained, tmp_path, figures, best, left):
    store = Checkpoints(tmp_path, keep=1)
    save(store, trained, 10, 20, 30, 40, figures=figures)
    assert store.best.step == best
    assert store.steps() == left


def test_best_is_known_after_a_restart(trained, tmp_path):
    save(Checkpoints(tmp_path, keep=1), trained, 10, 20, figures=[0.9, 0.1])
    store = Checkpoints(tmp_path, keep=1)
    assert store.newest().step == 20
    assert store.best == (10, 0.9)
    save(store, trained, 30, figures=[0.8])
    assert store.steps() == [10, 30]


@pytest.mark.parametrize(
    "other", [{"units": 5}, {"optimizer": "SGD"}, {"optimizer": "RMSprop"}, {"policy": "mixed_float16"}]
)
def test_restore_refuses_another_network_or_optimizer(trained, tmp_path, other):
    save(Checkpoints(tmp_path, keep=1), trained, 10)
    model = make_model(**other, seed=5)
    before = bits(model.variables)
    with pytest.raises(InputError, match=r"00000010\.ckpt is of another network or optimizer"):
        Checkpoints(tmp_path, keep=1).newest().restore(model)
    assert bits(model.variables) == before


def test_restore_says_what_differs(trained, tmp_path):
    save(Checkpoints(tmp_path, keep=1), trained, 10)
    with pytest.raises(InputError, match=r"has \S*dense/kernel\S* float32\[4, 4\] where here is \S* float32\[4, 5\]"):
        Checkpoints(tmp_path, keep=1).newest().restore(make_model(5))


def test_restore_refuses_another_number_of_replicas(two_devices, tmp_path):
    model = make_model(strategy=two_devices)
    with two_devices.scope():
        model.optimizer.build(model.trainable_variables)
    mean = next(variable for variable in model.variables if variable.name.endswith(("moving_mean", "moving_mean:0")))
    mean = mean if isinstance(mean, tf.Variable) else mean.value
    mean.values[1].assign([1.0, 2.0, 3.0, 4.0])  # each replica has its own
    save(Checkpoints(tmp_path, keep=1), model, 2)
    with pytest.raises(InputError, match="of 2 replicas, here are 1"):
        Checkpoints(tmp_path, keep=1).newest().restore(make_model())


@contextlib.contextmanager
def small_files_only():
    """No file of this process may grow beyond 1 kB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_save_on_a_full_disk_leaves_the_earlier_ones(trained, tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    save(store, trained, 10, figures=[0.5])
    before = store.path(10).read_bytes()
    with small_files_only(), pytest.raises(OSError, match="File too large"):
        store.save(trained, step=20, state={}, figure=0.6)
    assert os.listdir(tmp_path) == ["00000010.ckpt"]
    assert store.path(10).read_bytes() == before
    assert store.best == (10, 0.5)


def test_save_refuses_a_state_that_json_does_not_take(trained, tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    with pytest.raises(TypeError):
        store.save(trained, step=1, state={"loss": np.float32(1)})
    assert os.listdir(tmp_path) == []


def test_newest_does_not_pass_over_a_file_that_cannot_be_read(trained, tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    save(store, trained, 10)
    store.path(20).mkdir()  # root may read every file
    with pytest.raises(OSError, match=r"00000020\.ckpt"):
        store.newest()


HOLD = """
import fcntl, sys, time
stream = open(sys.argv[1], "a")
fcntl.flock(stream, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


def test_lock_workdir_refuses_what_another_process_holds_until_it_is_killed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    command = [sys.executable, "-c", HOLD, tmp_path / "checkpoints" / "lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match="in use by another run"), checkpoints.lock_workdir(tmp_path):
            pass
        process.kill()
        process.wait()
        with checkpoints.lock_workdir(tmp_path):
            pass


def test_lock_workdir_says_who_holds_it(tmp_path):
    who = rf"--workdir={tmp_path} is in use by another run \(process {os.getpid()} on "
    with checkpoints.lock_workdir(tmp_path), pytest.raises(InputError, match=who), checkpoints.lock_workdir(tmp_path):
        pass


def test_lock_workdir_lets_go_at_the_end_of_the_block(tmp_path):
    for _ in range(2):
        with checkpoints.lock_workdir(tmp_path):
            pass
