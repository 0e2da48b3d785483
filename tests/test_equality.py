"""N replicas give what one gives: 1, 2, 3 and 4 devices, each number in a process of its own."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

import fashion_oct

SAMPLE = pathlib.Path(fashion_oct.__file__).parent / "data"

# Trains 50 SGD steps; no batch divides the examples: 203 = 8 x 24 + 11, 37 = 3 x 12 + 1. The rates are small: rounding
# (1e-8) turns into 1e-5 where a step puts a ReLU or a pooling on its other side.
TRAIN = """
import sys
import numpy as np
import tensorflow as tf
from fashion_oct import building, datasets, distribution, evaluation, input_pipeline, options, planning, reports

num_devices, path, sample = int(sys.argv[1]), sys.argv[2], sys.argv[3]
strategy = distribution.make_strategy(virtual_devices=num_devices)
assert strategy.num_replicas_in_sync == num_devices
rng = np.random.default_rng(0)
fashion = datasets.load("fashion_mnist", data_dir=sample)
chosen = rng.choice(6000, 203, replace=False)
cases = {
    "convnet": (fashion.train.images[chosen], fashion.train.labels[chosen], 10, 24, 0.003),
    "vgg16": (rng.integers(0, 256, (37, 32, 32, 1), np.uint8), np.arange(37) % 4, 4, 12, 0.0005),
}
saved = {}
for name, (images, labels, num_classes, batch, rate) in cases.items():
    examples = input_pipeline.ArrayExamples(images, labels)
    spec = input_pipeline.DataSpec(images.shape[1:], tuple("abcdefghij"[:num_classes]))
    config = options.Config(model=name, per_replica_batch_size=None, global_batch_size=batch, precision="float32")
    plan = planning.make_plan(config, strategy, num_train=len(examples))
    tf.keras.utils.set_random_seed(1)
    model = building.build(config, strategy, spec, plan)
    with strategy.scope():
        model.compile(tf.keras.optimizers.SGD(rate), tf.keras.losses.SparseCategoricalCrossentropy())
    batches = input_pipeline.make_training_dataset(examples, global_batch_size=batch, seed=0, num_steps=50)
    before = model.get_weights()
    model.fit(batches, epochs=1, steps_per_epoch=50, verbose=0, shuffle=False)
    moved = max(np.abs(new - old).max() for new, old in zip(model.get_weights(), before))
    assert moved > 5e-4, moved  # 50 times the tolerance
    saved |= {f"{name} {i:02}": weights for i, weights in enumerate(model.get_weights())}
    probabilities = evaluation.predict_probabilities(model, examples, global_batch_size=batch)
    report = reports.evaluate_predictions(labels, probabilities, class_names=spec.class_names)
    saved[f"{name} metrics"] = np.array([report["loss"], report["accuracy"]])
np.savez(path, **saved)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, results = tmp_path_factory.mktemp("equality"), {}
    for num_devices in (1, 2, 3, 4):
        path = folder / f"{num_devices}.npz"
        subprocess.run([sys.executable, "-c", TRAIN, f"{num_devices}", path, SAMPLE], check=True, timeout=600)
        results[num_devices] = dict(np.load(path, allow_pickle=False))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("model", ["convnet", "vgg16"])
@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_replicas_train_and_score_as_one_does(results, model, num_devices):
    one, many = results[1], results[num_devices]
    names = [name for name in one if name.startswith(model)]
    assert len(names) > 10
    for name in names:
        tolerance = 1e-6 if name.endswith("metrics") else 1e-5
        np.testing.assert_allclose(many[name], one[name], atol=tolerance, rtol=0, err_msg=name)
