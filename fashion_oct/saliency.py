"""Grad-CAM: which parts of an image speak for a class.

Source: Selvaraju et al. 2017, https://arxiv.org/abs/1610.02391.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from fashion_oct import models
from fashion_oct.errors import InputError

OPACITY = 0.5  # of the colour where the map is 1; the scan stays visible under it


def make_grad_cam(model: tf.keras.Model) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Returns a function (images uint8 [B, H, W, C], labels int [B]) -> maps float32 [B, h, w] in [0, 1].

    A_k are the feature maps of the model's last convolution (after its activation) and y the logit of the label:
    weight_k = mean over the map of dy / dA_k, and map = ReLU(sum_k weight_k A_k), each image's divided by its maximum.
    A map is 0 everywhere where nothing speaks for the label. All is computed in float32, whatever the model's policy.

    Args:
      model: functional, with a layer "logits" before the softmax, as in `models`.

    Raises:
      InputError: the model has no convolution or no layer "logits".
    """
    model = models.in_float32(model)
    convolutions = [layer for layer in model.layers if isinstance(layer, tf.keras.layers.Conv2D)]
    if not convolutions or "logits" not in {layer.name for layer in model.layers}:
        raise InputError(f"the model {model.name!r} has no convolution or no layer 'logits': Grad-CAM needs both")
    features = convolutions[-1].output
    # two halves: no gradient is kept for the layers before the last convolution, which are nearly all of VGG16
    body = tf.keras.Model(model.inputs, features)
    head = tf.keras.Model(features, model.get_layer("logits").output)

    @tf.function(reduce_retracing=True)
    def grad_cam(images, labels):
        maps = body(images, training=False)  # [B, h, w, K]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(maps)
            logits = head(maps, training=False)  # [B, C]
            of_labels = tf.gather(logits, labels, batch_dims=1)  # [B]
        weights = tf.reduce_mean(tape.gradient(of_labels, maps), axis=[1, 2])  # [B, K]
        heat = tf.nn.relu(tf.einsum("bhwk,bk->bhw", maps, weights))
        return tf.math.divide_no_nan(heat, tf.reduce_max(heat, axis=[1, 2], keepdims=True))

    return lambda images, labels: grad_cam(tf.constant(images), tf.constant(labels, tf.int32)).numpy()


def overlay(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Lays a map over a grey image: from clear (0) over blue, green and yellow to red (1).

    Args:
      image: uint8 [H, W, 1].
      heat: float32 [h, w] in [0, 1], enlarged to the image (bicubic: a 14x14 map would show its grid).

    Returns:
      uint8 [H, W, 3].
    """
    heat = tf.image.resize(heat[..., np.newaxis], image.shape[:2], method="bicubic").numpy()
    heat = heat.clip(0, 1)  # [H, W, 1]; bicubic overshoots
    # each primary is a trapezoid around its place on the scale: the colours known as "jet", up to its bright red
    colour = (1.5 - np.abs(3.5 * heat - [3, 2, 1])).clip(0, 1)  # [H, W, 3]
    opacity = OPACITY * heat
    return np.round((1 - opacity) * image + opacity * 255 * colour).astype(np.uint8)
