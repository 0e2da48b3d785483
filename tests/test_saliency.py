"""Grad-CAM against maps worked out by hand, on Keras models and on the project's own."""

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import models, saliency
from fashion_oct.errors import InputError

layers = tf.keras.layers


def tiny_model(head_weights):
    """A 1x1 convolution with the filters x and 2x, global average pooling, and two logits of the given weights."""
    images = layers.Input((2, 2, 1), dtype="uint8")
    x = layers.Rescaling(1.0)(images)
    x = layers.Conv2D(2, 1, use_bias=False, name="convolution")(x)
    x = layers.GlobalAveragePooling2D()(x)
    logits = layers.Dense(2, use_bias=False, name="logits")(x)
    model = tf.keras.Model(images, layers.Softmax()(logits))
    model.get_layer("convolution").set_weights([np.array([[[[1.0, 2.0]]]])])
    model.get_layer("logits").set_weights([np.array(head_weights)])
    return model


IMAGE = np.array([[0, 1], [2, 4]], np.uint8)[None, ..., None]
NO_EVIDENCE = np.zeros((2, 2))


def test_make_grad_cam_gives_the_map_worked_out_by_hand():
    # A_1 = x, A_2 = 2x, y_0 = 3 mean(A_1) + 1 mean(A_2), so dy_0/dA_1 = 3/4 and dy_0/dA_2 = 1/4 at every place:
    # map = 3/4 x + 1/4 2x = 5/4 x, and divided by its maximum x / 4. y_1 = -y_0: ReLU leaves nothing.
    grad_cam = saliency.make_grad_cam(tiny_model([[3.0, -3.0], [1.0, -1.0]]))
    maps = grad_cam(np.concatenate([IMAGE, IMAGE]), np.array([0, 1]))
    np.testing.assert_allclose(maps, [IMAGE[0, ..., 0] / 4, NO_EVIDENCE], atol=1e-6)


def test_make_grad_cam_weighs_the_feature_maps_against_each_other():
    # y_0 = 5 mean(A_1) - 2 mean(A_2): weights 5/4 and -2/4, map = 5/4 x - 1/2 2x = x / 4 > 0
    # y_1 = 1 mean(A_1) - 2 mean(A_2): weights 1/4 and -2/4, map = 1/4 x - 1/2 2x < 0
    grad_cam = saliency.make_grad_cam(tiny_model([[5.0, 1.0], [-2.0, -2.0]]))
    maps = grad_cam(np.concatenate([IMAGE, IMAGE]), np.array([0, 1]))
    np.testing.assert_allclose(maps, [IMAGE[0, ..., 0] / 4, NO_EVIDENCE], atol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_make_grad_cam_follows_the_definition_on_the_convnet(policy):
    tf.keras.utils.set_random_seed(0)
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = models.convnet((28, 28, 1), 10)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    reference = models.convnet((28, 28, 1), 10)  # in float32, which the maps of any policy are computed in
    reference.set_weights(model.get_weights())
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), np.uint8)
    maps = saliency.make_grad_cam(model)(images, np.array([7, 2, 5]))
    assert maps.shape == (3, 3, 3)
    convolution = [layer for layer in reference.layers if "conv2d" in layer.name][-1]
    both = tf.keras.Model(reference.inputs, [convolution.output, reference.get_layer("logits").output])
    for image, label, heat in zip(images, [7, 2, 5], maps, strict=True):  # one image at a time, through the whole model
        with tf.GradientTape() as tape:
            features, logits = both(image[None])
            logit = logits[0, label]
        weights = tape.gradient(logit, features).numpy().mean(axis=(0, 1, 2))
        expected = np.maximum((features[0].numpy() * weights).sum(axis=-1), 0)
        np.testing.assert_allclose(heat * expected.max(), expected, rtol=1e-4, atol=1e-6)


def test_make_grad_cam_explains_the_last_block_of_vgg16():
    tf.keras.utils.set_random_seed(0)
    model = models.vgg16((64, 64, 1), 4, weights="none")
    maps = saliency.make_grad_cam(model)(np.full((2, 64, 64, 1), 200, np.uint8), np.array([0, 3]))
    assert maps.shape == (2, 4, 4)  # 64 / 2^4: before the last pooling
    assert maps.dtype == np.float32
    assert ((maps >= 0) & (maps <= 1)).all()


def test_make_grad_cam_refuses_a_model_without_convolution():
    images = layers.Input((2, 2, 1))
    model = tf.keras.Model(images, layers.Dense(2, name="logits")(layers.Flatten()(images)), name="dense")
    with pytest.raises(InputError, match="dense"):
        saliency.make_grad_cam(model)


def test_overlay_leaves_the_image_where_the_map_is_zero():
    image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    np.testing.assert_array_equal(saliency.overlay(image, np.zeros((2, 2), np.float32)), np.repeat(image, 3, axis=2))


def test_overlay_is_half_red_where_the_map_is_one():
    drawn = saliency.overlay(np.full((4, 6, 1), 100, np.uint8), np.ones((2, 2), np.float32))
    # opacity 0.5: red 0.5 x 100 + 0.5 x 255 = 177.5, the others 0.5 x 100
    np.testing.assert_allclose(drawn.astype(float), np.broadcast_to([177.5, 50, 50], (4, 6, 3)), atol=0.5)


def test_overlay_puts_the_map_in_its_place():
    heat = np.zeros((2, 4), np.float32)
    heat[0, 3] = 1.0  # top right
    drawn = saliency.overlay(np.zeros((40, 80, 1), np.uint8), heat)
    row, column = np.unravel_index(drawn[..., 0].argmax(), (40, 80))
    assert row < 20
    assert column >= 60
    assert not drawn[:, :20].any()
