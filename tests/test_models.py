"""The networks: sizes by hand, preprocessing inside, float32 probabilities."""

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import models


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
    without_scaling = tf.keras.Model(model.layers[1].output, model.output)
    expected = without_scaling(pixels.astype(np.float32) / 255)
    np.testing.assert_allclose(model(pixels), expected, atol=1e-6)


def test_convnet_stacks_the_layers_of_the_tutorial():
    kinds = [type(layer).__name__ for layer in models.convnet((28, 28, 1), 10).layers]
    convolutions = ["Conv2D", "MaxPooling2D", "Conv2D", "MaxPooling2D", "Conv2D"]
    assert kinds == ["InputLayer", "Rescaling", *convolutions, "Flatten", "Dense", "Dense", "Activation"]
