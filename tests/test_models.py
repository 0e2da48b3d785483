"""The networks: sizes by hand, preprocessing inside, float32 probabilities."""

import re

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import models
from fashion_oct.errors import InputError


@pytest.fixture(params=["float32", "mixed_bfloat16", "mixed_float16"])
def policy(request):
    tf.keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    tf.keras.mixed_precision.set_global_policy("float32")


def test_convnet_has_the_parameters_of_the_tutorial():
    # 3x3x1x32 + 32 = 320; 3x3x32x64 + 64 = 18,496; 3x3x64x64 + 64 = 36,928;
    # 576 x 64 + 64 = 36,928; 64 x 10 + 10 = 650; together 93,322
    assert models.convnet((28, 28, 1), 10).count_params() == 93_322


def test_convnet_gives_float32_probabilities_under_any_policy(policy):
    model = models.convnet((28, 28, 1), 10)
    probabilities = model(np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1), np.uint8))
    assert probabilities.dtype == tf.float32
    np.testing.assert_allclose(probabilities.numpy().sum(axis=1), 1, atol=1e-6)
    weights = {str(tf.as_dtype(variable.dtype).name) for variable in model.trainable_variables}
    assert weights == {"float32"}


def test_convnet_takes_bytes_and_scales_them_itself():
    model = models.convnet((28, 28, 1), 10)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 28, 28, 1), np.uint8)
    without_scaling = tf.keras.Model(model.get_layer("to_unit_interval").output, model.output)
    expected = without_scaling(pixels[:, :26, :26].astype(np.float32) / 255)  # what the network looks at
    np.testing.assert_allclose(model(pixels), expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(28, 28, 1), (25, 26, 3), (27, 32, 1)])
def test_convnet_computes_what_the_tutorial_s_network_does(shape):
    layers = tf.keras.layers
    tutorial = tf.keras.Sequential(
        [
            layers.Input(shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    ours = models.convnet(shape, 10)
    tutorial.set_weights(ours.get_weights())
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (8, *shape), np.uint8), rng.integers(0, 10, 8)
    results = []
    for model, images in ((ours, pixels), (tutorial, pixels.astype(np.float32) / 255)):
        with tf.GradientTape() as tape:
            probabilities = model(images)
            loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(labels, probabilities))
        variables = [w if isinstance(w, tf.Variable) else w.value for w in model.trainable_weights]
        gradients = tape.gradient(loss, variables)
        results.append([probabilities, *gradients])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.fixture(scope="module")
def small_vgg16():
    return models.vgg16((32, 32, 1), 4, weights="none", head="flatten")


def test_vgg16_has_the_parameters_of_the_tutorial():
    # VGG16's convolutions: 14,714,688; Flatten 7 x 7 x 512 = 25,088, x 4 + 4 = 100,356; together 14,815,044.
    # Trained: three convolutions of 3 x 3 x 512 x 512 + 512 = 2,359,808 and the head: 7,179,780
    model = models.vgg16((224, 224, 1), 4, weights="none", head="flatten")
    assert model.count_params() == 14_815_044
    assert sum(int(np.prod(weight.shape)) for weight in model.trainable_weights) == 7_179_780


def test_vgg16_pooled_head_is_smaller():
    model = models.vgg16((32, 32, 1), 4, weights="none", head="pooled")
    assert model.count_params() == 14_714_688 + 512 * 4 + 4


def test_vgg16_trains_the_last_block_and_the_head_only(small_vgg16):
    names = [layer.name for layer in small_vgg16.layers if layer.trainable and layer.weights]
    assert names == ["block5_conv1", "block5_conv2", "block5_conv3", "logits"]


def test_vgg16_keeps_the_frozen_prefix_bit_identical(small_vgg16):
    before = {weight.name + str(i): weight.numpy() for i, weight in enumerate(small_vgg16.weights)}
    small_vgg16.compile(tf.keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 1), np.uint8)
    small_vgg16.fit(images, np.arange(16) % 4, batch_size=4, epochs=1, verbose=0)
    for (name, old), new in zip(before.items(), small_vgg16.weights, strict=True):
        is_trained = any(new is weight for weight in small_vgg16.trainable_weights)
        assert np.array_equal(old, new.numpy()) != is_trained, name


def test_vgg16_computes_no_gradient_of_the_frozen_prefix(small_vgg16):
    variables = small_vgg16.trainable_variables
    variables = [getattr(variable, "_value", variable) for variable in variables]  # Keras 3 wraps them

    @tf.function
    def gradients(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(small_vgg16(images, training=True)[:, 0])
        return tape.gradient(loss, variables)

    images = tf.zeros((1, 32, 32, 1), tf.uint8)
    function = gradients.get_concrete_function(images)
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    kinds = [node.op for node in convert_variables_to_constants_v2(function).graph.as_graph_def().node]
    assert kinds.count("Conv2DBackpropFilter") == 3  # block 5
    assert kinds.count("Conv2DBackpropInput") == 2  # through block5_conv3 and block5_conv2, no further


@pytest.mark.parametrize("channels", [1, 3])
def test_vgg16_scales_as_its_own_training_did(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, channels), np.uint8)
    model = models.vgg16((32, 32, channels), 4, weights="none")
    scaled = tf.keras.Model(model.input, model.get_layer("minus_imagenet_mean").output)(pixels)
    rgb = np.repeat(pixels, 3, axis=-1) if channels == 1 else pixels
    expected = tf.keras.applications.vgg16.preprocess_input(rgb.astype(np.float32))
    np.testing.assert_allclose(scaled, expected, atol=1e-4)


def test_vgg16_scales_to_the_unit_interval_for_the_tutorial():
    model = models.vgg16((32, 32, 1), 4, weights="none", input_scaling="unit")
    scaled = tf.keras.Model(model.input, model.get_layer("to_unit_interval").output)
    np.testing.assert_allclose(scaled(np.full((1, 32, 32, 1), 51, np.uint8)), 0.2, atol=1e-6)


def test_vgg16_loads_the_published_weights(vgg16_weights):
    import h5py

    model = models.vgg16((32, 32, 1), 4, weights=str(vgg16_weights))
    with h5py.File(vgg16_weights) as file:
        for layer in ("block1_conv1", "block5_conv3"):
            stored = [file[layer][name][:] for name in file[layer].attrs["weight_names"]]
            for one, two in zip(model.get_layer(layer).get_weights(), stored, strict=True):
                np.testing.assert_array_equal(one, two)


def test_vgg16_loads_weights_from_a_weights_file(tmp_path):
    name = "vgg.weights.h5"
    other = tf.keras.applications.VGG16(include_top=False, weights=None, input_shape=(32, 32, 3))
    other.save_weights(tmp_path / name)
    model = models.vgg16((32, 32, 1), 4, weights=str(tmp_path / name))
    for layer in ("block1_conv1", "block5_conv3"):
        for one, two in zip(model.get_layer(layer).get_weights(), other.get_layer(layer).get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)


def another_network(path):
    layer = tf.keras.layers
    tf.keras.Sequential([layer.Input((8, 8, 3)), layer.Conv2D(4, 3), layer.Conv2D(4, 3)]).save_weights(path)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("missing.h5", lambda path: None),
        ("other.weights.h5", another_network),
        ("broken.h5", lambda path: path.write_bytes(b"no HDF5")),
        ("weights.txt", lambda path: path.write_text("no weights")),
    ],
)
def test_vgg16_names_a_weights_file_that_does_not_do(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(InputError, match=re.escape(name)) as error:
        models.vgg16((32, 32, 1), 4, weights=str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_vgg16_names_weights_where_imagenet_cannot_be_downloaded(tmp_path, monkeypatch, is_damaged):
    if is_damaged:  # Keras would download it again
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "vgg16_weights_tf_dim_ordering_tf_kernels_notop.h5").write_bytes(b"damaged")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(InputError, match="--weights=PATH") as error:
        models.vgg16((32, 32, 1), 4)
    assert "\n" not in str(error.value)
