"""The frozen prefix runs once; what is trained on its output is the model."""

import gc
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import (
    building,
    caching,
    datasets,
    distribution,
    evaluation,
    feature_cache,
    image_cache,
    input_pipeline,
    ledger,
    options,
    planning,
    row_cache,
    run_folder,
    training,
)

SHAPE = (8, 6, 1)
BATCH = distribution.batch_sizes(2, global_batch_size=8)
NUM_CLASSES = 4


class Counted(input_pipeline.ArrayExamples):
    """Examples that note which of them were read."""

    identity = "counted"  # without it all are read to be hashed

    def __init__(self, num_examples, image_shape=SHAPE, seed=0):
        rng = np.random.default_rng(seed)
        images = rng.integers(0, 256, (num_examples, *image_shape), np.uint8)
        super().__init__(images, np.arange(num_examples) % NUM_CLASSES)
        self.seen = []

    def batches(self, indices, batch_size):
        def note(index):
            tf.numpy_function(lambda numbers: self.seen.extend(numbers.tolist()), [index], [])
            return index

        return super().batches(indices.map(note), batch_size)

    def computed(self):
        """Returns the numbers of the examples that were read since the last call, each once."""
        seen, self.seen = sorted(set(self.seen)), []
        return seen


def make_prefix(scale=1 / 255, weight=0.0, name="conv"):
    """A small prefix whose weights are the same in every process."""
    images = tf.keras.layers.Input(SHAPE, dtype="uint8")
    x = tf.keras.layers.Rescaling(scale)(images)
    convolution = tf.keras.layers.Conv2D(5, 3, activation="relu", name=name)
    x = tf.keras.layers.MaxPooling2D(2)(convolution(x))  # [B, 3, 2, 5]
    kernel = np.random.default_rng(1).normal(size=(3, 3, 1, 5)).astype(np.float32)
    convolution.set_weights([kernel, np.full(5, weight, np.float32)])
    convolution.trainable = False
    return tf.keras.Model(images, x)


def features_of(cached):
    batches = input_pipeline.make_evaluation_dataset(cached, global_batch_size=16)
    return np.concatenate([np.asarray(tf.cast(rows, tf.float32)) for rows, _ in batches])


def filled(prefix, examples, *, folder, batch):
    """Returns the features of all examples, computed where the cache lacks them."""
    features = feature_cache.Features(prefix, examples, folder=folder, batch=batch)
    features.fill(np.arange(len(examples)))
    return features


def rows_of(features):
    return features.cache[np.arange(len(features))]


def caches_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture
def policy(request):
    tf.keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"], indirect=True)
def test_cached_features_are_the_output_of_the_prefix(policy, tmp_path):
    examples, prefix = Counted(45), make_prefix()
    expected = prefix(examples.images)
    for _ in range(2):  # computed, then read
        cached = filled(prefix, examples, folder=tmp_path, batch=BATCH)
        rows, labels = input_pipeline.take(cached, np.arange(45))
        assert tf.as_dtype(rows.dtype) == expected.dtype
        # relative to the largest feature: in 16 bits another batch size may round otherwise
        tolerance = {"float32": 1e-6, "mixed_bfloat16": 2**-8, "mixed_float16": 2**-10}[policy]
        expected_rows = np.asarray(tf.cast(expected, tf.float32))
        np.testing.assert_allclose(rows.astype(np.float32), expected_rows, atol=tolerance * expected_rows.max())
        np.testing.assert_array_equal(labels, examples.labels)


def test_cached_features_are_computed_once(tmp_path):
    examples = Counted(45)
    first = filled(make_prefix(), examples, folder=tmp_path, batch=BATCH)
    assert examples.computed() == list(range(45))
    second = filled(make_prefix(), examples, folder=tmp_path, batch=BATCH)
    assert examples.computed() == []
    np.testing.assert_array_equal(rows_of(first), rows_of(second))


@pytest.mark.parametrize("num_examples", [1, 33, 37])  # 33 = 32 + 1: fewer than the replicas
def test_two_devices_give_the_features_of_one(one_device, two_devices, num_examples, tmp_path):
    examples, rows = Counted(num_examples), []
    for strategy in (one_device, two_devices):
        batch = distribution.batch_sizes(strategy.num_replicas_in_sync, global_batch_size=8)
        with strategy.scope():
            prefix = make_prefix()
        folder = tmp_path / f"{batch.num_replicas}"
        rows.append(rows_of(filled(prefix, examples, folder=folder, batch=batch)))
        np.testing.assert_allclose(rows[-1], prefix(examples.images), atol=1e-5)
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


def test_one_device_and_two_share_a_cache(one_device, two_devices, tmp_path):
    examples = Counted(20)
    for strategy in (one_device, two_devices):
        with strategy.scope():
            prefix = make_prefix()
        filled(prefix, examples, folder=tmp_path, batch=BATCH)
    assert len(caches_in(tmp_path)) == 1


@pytest.mark.parametrize("damaged", [[3], [3, 17, 40]])
def test_cached_features_computes_damaged_rows_only(two_devices, damaged, tmp_path):
    examples = Counted(45)
    with two_devices.scope():
        prefix = make_prefix()
    before = rows_of(filled(prefix, examples, folder=tmp_path, batch=BATCH))
    path = tmp_path / caches_in(tmp_path)[0] / "rows.bin"
    data = bytearray(path.read_bytes())
    for row in damaged:
        data[row * 3 * 2 * 5 * 4 + 9] ^= 255
    path.write_bytes(data)
    examples.computed()
    after = filled(prefix, examples, folder=tmp_path, batch=BATCH)
    assert examples.computed() == damaged
    np.testing.assert_allclose(rows_of(after), before, atol=1e-6)


def other_images():
    examples = Counted(20, seed=1)
    examples.identity = "other"
    return {"examples": examples}


@pytest.mark.parametrize(
    "change",
    [
        other_images,
        lambda: {"prefix": make_prefix(weight=1e-6)},
        lambda: {"prefix": make_prefix(scale=1 / 127.5)},
    ],
    ids=["images", "weights", "scaling"],
)
def test_cached_features_of_something_else_are_another_cache(change, tmp_path):
    same = {"prefix": make_prefix(), "examples": Counted(20)}
    for arguments in (same, {**same, "prefix": make_prefix(name="other_name")}, {**same, **change()}):
        filled(**arguments, folder=tmp_path, batch=BATCH)
    assert len(caches_in(tmp_path)) == 2  # the name of a layer makes no difference


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"], indirect=True)
def test_cached_features_in_another_precision_are_another_cache(policy, tmp_path):
    filled(make_prefix(), Counted(20), folder=tmp_path, batch=BATCH)
    tf.keras.mixed_precision.set_global_policy("float32")
    filled(make_prefix(), Counted(20), folder=tmp_path, batch=BATCH)
    assert len(caches_in(tmp_path)) == 2


@pytest.fixture
def files(tmp_path):
    """Twelve small JPEGs."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(12):
        Image.fromarray(rng.integers(0, 256, (16, 12), np.uint8)).save(tmp_path / f"{i:02}.jpeg")
    return input_pipeline.FileExamples(sorted(map(str, tmp_path.glob("*.jpeg"))), np.arange(12) % NUM_CLASSES, SHAPE)


def test_cached_features_of_cached_images_are_those_of_the_files(files, tmp_path):
    folder = tmp_path / "caches"
    rows = rows_of(filled(make_prefix(), files, folder=folder, batch=BATCH))
    images = image_cache.cached_images(files, where="memory", folder=folder)
    assert feature_cache.exists(make_prefix(), images, folder=folder)
    other = rows_of(filled(make_prefix(), images, folder=tmp_path / "new", batch=BATCH))
    np.testing.assert_allclose(rows, other, atol=1e-6)


def test_cached_features_are_not_evicted_while_they_are_used(tmp_path):
    cached = filled(make_prefix(), Counted(20), folder=tmp_path, batch=BATCH)
    batches = input_pipeline.make_evaluation_dataset(cached, global_batch_size=16)
    del cached
    gc.collect()
    assert row_cache.evict(tmp_path, limit_bytes=0) == []  # the dataset alone keeps the cache
    assert sum(len(rows) for rows, _ in batches) == 20


def test_exists_looks_and_makes_nothing(tmp_path):
    prefix, examples = make_prefix(), Counted(40)
    assert not feature_cache.exists(prefix, examples, folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    features = feature_cache.Features(prefix, examples, folder=tmp_path, batch=BATCH)
    assert not feature_cache.exists(prefix, examples, folder=tmp_path)
    features.fill(np.array([7]))
    assert feature_cache.exists(prefix, examples, folder=tmp_path)


KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[2])
from test_feature_cache import *
write, num_written = row_cache.RowCache.write, 0
def deadly(cache, indices, rows):
    global num_written
    if num_written == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    write(cache, indices, rows)
    num_written += 1
row_cache.RowCache.write = deadly
filled(make_prefix(), Counted(100), folder=pathlib.Path(sys.argv[1]), batch=BATCH)
"""


@pytest.mark.slow
def test_cached_features_go_on_after_a_kill(tmp_path):
    tests = pathlib.Path(__file__).parent
    process = subprocess.run([sys.executable, "-c", KILLED, tmp_path, tests], check=False, cwd=tests.parent)
    assert process.returncode == -signal.SIGKILL
    examples = Counted(100)
    cached = filled(make_prefix(), examples, folder=tmp_path, batch=BATCH)
    assert examples.computed() == list(range(5 * 8, 100))  # one cache for both processes, which write 8 rows at a time
    np.testing.assert_allclose(rows_of(cached), make_prefix()(examples.images), atol=1e-5)


def config_of(**settings):
    settings = {"model": "vgg16", "dataset": "oct2017", "global_batch_size": 10, "epochs": 5, **settings}
    return options.Config(per_replica_batch_size=None, precision="float32", **settings)


def splits_of(train, validation=None, image_shape=SHAPE):
    spec = input_pipeline.DataSpec(image_shape, tuple("abcd"))
    return datasets.Splits(spec=spec, train=train, validation=validation, test=train, source="random pixels")


def small_model():
    """A model with a frozen prefix of 3 x 2 x 5 features."""
    prefix = make_prefix()
    x = tf.keras.layers.Conv2D(6, 2, activation="relu")(prefix.output)
    x = tf.keras.layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(prefix.input, tf.keras.layers.Dense(NUM_CLASSES, activation="softmax")(x))


def use_caches(config, strategy, train, validation=None):
    """Returns a small model, its plan, and what use_caches makes of it."""
    plan = planning.make_plan(config, strategy, num_train=len(train))
    tf.keras.utils.set_random_seed(5)
    with strategy.scope():
        model = small_model()
        building.compile_model(model, config, plan)
    return model, plan, *caching.use_caches(model, config, strategy, plan, splits_of(train, validation))


def trained_vgg16(config, strategy, examples, workdir):
    """Returns VGG16 after 20 steps, its weights before them, and what was trained on what."""
    plan = planning.make_plan(config, strategy, num_train=len(examples))
    tf.keras.utils.set_random_seed(5)
    splits = splits_of(examples, examples, image_shape=(32, 32, 1))
    model = building.build(config, strategy, splits.spec, plan)
    before = model.get_weights()
    trained, train, validation = caching.use_caches(model, config, strategy, plan, splits)
    with strategy.scope():
        # 0.01: the weights move by more than 1e-3, and rounding is not blown up
        trained.compile(tf.keras.optimizers.SGD(0.01), tf.keras.losses.SparseCategoricalCrossentropy())
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    training.fit(trained, config, plan, train=train, validation=validation, workdir=workdir, ledger=ledger.Ledger())
    return model, before, (trained is not model, type(train).__name__)


def test_use_caches_trains_the_weights_that_images_train(one_device, tmp_path):
    examples, results = Counted(40, (32, 32, 1)), {}
    for setting in ("off", "on"):
        config = config_of(feature_cache=setting, cache_dir=str(tmp_path / "caches"))
        results[setting] = trained_vgg16(config, one_device, examples, tmp_path)
    assert results["off"][2] == (False, "Counted")
    assert results["on"][2] == (True, "Features")
    model, before, _ = results["on"]
    reference = results["off"][0]
    num_frozen = 2 * 10  # kernels and biases of the ten convolutions before block5
    for i, (cached, without, initial) in enumerate(
        zip(model.get_weights(), reference.get_weights(), before, strict=True)
    ):
        np.testing.assert_allclose(cached, without, atol=1e-5, rtol=0)
        assert np.array_equal(cached, initial) == (i < num_frozen)  # frozen bit by bit; the rest has moved
    assert max(np.abs(one - other).max() for one, other in zip(model.get_weights(), before, strict=True)) > 1e-3
    # what is saved and evaluated is the whole model, with the trained tail
    run_folder.save_model(model, tmp_path / "model.keras")
    expected = reference(examples.images)
    np.testing.assert_allclose(
        tf.keras.models.load_model(tmp_path / "model.keras", compile=False)(examples.images), expected, atol=1e-5
    )
    probabilities = evaluation.predict_probabilities(model, examples, global_batch_size=10)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "is_filled", "expected"),
    [
        ({"epochs": 2}, False, True),
        ({"epochs": 1}, False, False),
        ({"epochs": 2, "steps": 4}, False, False),  # 40 images / 10 = 4 steps: one epoch
        ({"epochs": 1}, True, True),
        ({"epochs": 1, "feature_cache": "on"}, False, True),
        ({"epochs": 2, "feature_cache": "off"}, True, False),
        ({"epochs": 1, "augment": True}, False, False),
        ({"epochs": 2, "augment": True}, False, True),
    ],
)
def test_use_caches_takes_features_where_they_pay(two_devices, tmp_path, settings, is_filled, expected):
    examples = Counted(40)
    if is_filled:
        *_, train, _ = use_caches(config_of(feature_cache="on", cache_dir=str(tmp_path)), two_devices, examples)
        train.fill(np.arange(7))
    model, _, trained, train, _ = use_caches(config_of(cache_dir=str(tmp_path), **settings), two_devices, examples)
    assert (trained is not model) == isinstance(train, image_cache.CachedExamples) == expected


def test_use_caches_keeps_both_splits(one_device, tmp_path):
    train, validation = Counted(40), Counted(12, seed=1)
    validation.identity = "validation"
    config = config_of(cache_dir=str(tmp_path))
    model, _, trained, cached_train, cached_validation = use_caches(config, one_device, train, validation)
    assert (len(cached_train), len(cached_validation)) == (40, 12)
    probabilities = evaluation.predict_probabilities(trained, cached_validation, global_batch_size=5)
    np.testing.assert_allclose(probabilities, model(validation.images), atol=1e-5)


@pytest.mark.parametrize(
    ("cache", "expected"), [("none", []), ("memory", []), ("disk", ["images"])], ids=["none", "memory", "disk"]
)
def test_use_caches_keeps_decoded_images(one_device, files, cache, expected, tmp_path):
    folder = tmp_path / "caches"
    config = config_of(cache=cache, cache_dir=str(folder), feature_cache="off", global_batch_size=4)
    model, _, trained, train, _ = use_caches(config, one_device, files)
    assert trained is model
    assert isinstance(train, image_cache.CachedExamples) == (cache != "none")
    assert [name.split("-")[0] for name in caches_in(folder)] == expected if folder.exists() else not expected
    pairs = zip(*(input_pipeline.take(e, np.arange(12)) for e in (train, files)), strict=True)
    for cached, decoded in pairs:
        np.testing.assert_array_equal(cached, decoded)


def test_use_caches_goes_on_without_one_where_the_disk_has_no_room(one_device, tmp_path, caplog):
    examples = Counted(700)
    config = config_of(cache_dir=str(tmp_path / "caches"), global_batch_size=100, epochs=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, hard))  # 700 rows of 3 x 2 x 5 x 4 = 120 bytes are 84,000
    try:
        model, plan, trained, train, _ = use_caches(config, one_device, examples)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (trained, train) == (model, examples)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"training goes on without a cache of features in {tmp_path / 'caches'}: ")
    assert "84,000 bytes are needed" in warning
    assert "\n" not in warning
    assert caches_in(tmp_path / "caches") == []
    arguments = {"train": train, "validation": None, "workdir": tmp_path, "ledger": ledger.Ledger()}
    assert training.fit(model, config, plan, **arguments).num_steps == 14


def test_use_caches_evicts_the_longest_unused(one_device, tmp_path):
    row_cache.RowCache(tmp_path / "features-old", 10, (1000,), np.uint8).close()
    config = config_of(cache_dir=str(tmp_path), cache_limit_gb=5000 / 1e9)  # the new one: 40 x 120 = 4,800 bytes
    *_, train, _ = use_caches(config, one_device, Counted(40))
    assert caches_in(tmp_path) == [train.identity]


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--model=convnet"], "no frozen prefix")],
)
def test_feature_cache_on_where_there_can_be_none_is_refused(flags, message, tmp_path):
    workdir, repository = tmp_path / "run", pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-m", "fashion_oct.train", "--feature_cache=on", f"--workdir={workdir}", *flags]
    process = subprocess.run(command, check=False, capture_output=True, text=True, cwd=repository)
    assert process.returncode == 2
    assert message in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert not workdir.exists()


def test_two_replicas_train_the_tail_as_one_does(one_device, two_devices, tmp_path):
    weights = []
    for strategy in (one_device, two_devices):
        config = config_of(feature_cache="on", cache_dir=str(tmp_path))
        model, plan, trained, train, _ = use_caches(config, strategy, Counted(45))
        with strategy.scope():
            trained.compile(tf.keras.optimizers.SGD(0.01), tf.keras.losses.SparseCategoricalCrossentropy())
        workdir = tmp_path / f"{strategy.num_replicas_in_sync}"
        workdir.mkdir()
        training.fit(trained, config, plan, train=train, validation=None, workdir=workdir, ledger=ledger.Ledger())
        weights.append(model.get_weights())
    for one, two in zip(*weights, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=0)


def fit_small(examples, strategy, tmp_path, *, prefix=None, epochs=2, steps_per_execution=1, callbacks=()):
    """Fits a tail, 5 steps an epoch, on features that are filled ahead; returns its weights and the callback."""
    with strategy.scope():
        prefix = prefix or make_prefix()
        tf.keras.utils.set_random_seed(5)
        inputs = tf.keras.layers.Input(prefix.output_shape[1:])
        outputs = tf.keras.layers.Dense(NUM_CLASSES, activation="softmax")(tf.keras.layers.Flatten()(inputs))
        tail = tf.keras.Model(inputs, outputs)
        tail.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps_per_execution)
    batch = distribution.batch_sizes(strategy.num_replicas_in_sync, global_batch_size=8)
    features = feature_cache.Features(prefix, examples, folder=tmp_path / "cache", batch=batch)
    order = {"global_batch_size": 8, "seed": 0, "num_steps": 5 * epochs}
    dataset = input_pipeline.make_training_dataset(features, **order)
    steps = np.stack(list(input_pipeline.training_indices(features, **order).as_numpy_iterator()))
    with feature_cache.FillAhead(features, steps, steps_per_execution=steps_per_execution) as fill_ahead:
        tail.fit(
            dataset, epochs=epochs, steps_per_epoch=5, verbose=0, shuffle=False, callbacks=[*callbacks, fill_ahead]
        )
    return tail.get_weights(), fill_ahead


@pytest.mark.parametrize("strategy", ["one_device", "two_devices"])
def test_fill_ahead_trains_as_a_full_cache_does(strategy, request, tmp_path):
    strategy, examples, results = request.getfixturevalue(strategy), Counted(40), []
    with strategy.scope():
        prefix = make_prefix()
    for num_new in (40, 0):  # filled while training, then there
        weights, fill_ahead = fit_small(examples, strategy, tmp_path, prefix=prefix)
        assert fill_ahead.num_computed == num_new
        assert examples.computed() == list(range(num_new))
        results.append(weights)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fill_ahead_keeps_up_with_executions_of_several_steps(one_device, tmp_path):
    one, _ = fit_small(Counted(40), one_device, tmp_path / "one")
    other, fill_ahead = fit_small(Counted(40), one_device, tmp_path / "other", steps_per_execution=5)
    assert fill_ahead.num_computed == 40
    for weights, expected in zip(other, one, strict=True):
        np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_fill_ahead_computes_only_what_is_read(one_device, tmp_path):
    examples = Counted(80)  # 5 steps of 8 images read half of them
    _, fill_ahead = fit_small(examples, one_device, tmp_path, epochs=1)
    assert fill_ahead.num_computed == 40
    assert len(examples.computed()) == 40
    _, fill_ahead = fit_small(examples, one_device, tmp_path, epochs=2)
    assert fill_ahead.num_computed == 40
    assert len(examples.computed()) == 40


def test_fill_ahead_computes_damaged_rows_again(one_device, tmp_path, caplog):
    examples = Counted(40)
    expected, _ = fit_small(examples, one_device, tmp_path)
    (name,) = caches_in(tmp_path / "cache")
    path = tmp_path / "cache" / name / "rows.bin"
    data = bytearray(path.read_bytes())
    for row in (3, 38):
        data[row * 3 * 2 * 5 * 4 + 2] ^= 255
    path.write_bytes(data)
    examples.computed()
    weights, _ = fit_small(examples, one_device, tmp_path)
    assert examples.computed() == [3, 38]
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert sum(" are damaged" in record.getMessage() for record in caplog.records) in (1, 2)  # found in one step or two


def test_fill_ahead_starts_before_the_cache_is_full(one_device, tmp_path):
    seen = []

    class Watch(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            cache = row_cache.RowCache(tmp_path / "cache" / caches_in(tmp_path / "cache")[0], 40, (3, 2, 5), np.float32)
            seen.append(np.count_nonzero(cache.has_rows(np.arange(40))))

    fit_small(Counted(40), one_device, tmp_path, callbacks=[Watch()])
    assert seen == [
        8,
        24,
        32,
        40,
        40,
        40,
        40,
        40,
        40,
        40,
    ]  # 8 a step: its own, then those of the next


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_fill_ahead_lets_go_where_fit_ends_early(one_device, tmp_path, error):
    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise error("stop")

    with pytest.raises(error):  # and no pipeline waits for rows that never come
        fit_small(Counted(40), one_device, tmp_path, callbacks=[Stop()])


def test_features_that_no_one_fills_are_an_error(tmp_path):
    features = feature_cache.Features(make_prefix(), Counted(40), folder=tmp_path, batch=BATCH)
    features.fill(np.array([2, 5]))
    np.testing.assert_array_equal(input_pipeline.take(features, np.array([5, 2]))[1], [1, 2])
    with pytest.raises(tf.errors.UnknownError, match="no one fills the cache"):
        input_pipeline.take(features, np.array([5, 6]))
