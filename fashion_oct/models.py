"""The networks. Their input is uint8: preprocessing is a layer inside, so that no user of a model can forget it."""

import tensorflow as tf

layers = tf.keras.layers


def convnet(image_shape: tuple[int, int, int], num_classes: int) -> tf.keras.Model:
    """Returns the tutorial's ConvNet: 93,322 parameters for 28x28x1 images and 10 classes.

    Args:
      image_shape: (height, width, channels) of the uint8 images.
      num_classes: the width of the softmax, which is float32 under every precision policy.
    """
    images = layers.Input(image_shape, dtype="uint8", name="image")
    x = layers.Rescaling(1 / 255, name="to_unit_interval")(images)  # [B, 28, 28, 1]
    x = layers.Conv2D(32, 3, activation="relu")(x)  # [B, 26, 26, 32]
    x = layers.MaxPooling2D(2)(x)  # [B, 13, 13, 32]
    x = layers.Conv2D(64, 3, activation="relu")(x)  # [B, 11, 11, 64]
    x = layers.MaxPooling2D(2)(x)  # [B, 5, 5, 64]
    x = layers.Conv2D(64, 3, activation="relu")(x)  # [B, 3, 3, 64]
    x = layers.Flatten()(x)  # [B, 576]
    x = layers.Dense(64, activation="relu")(x)
    return tf.keras.Model(images, _softmax_head(x, num_classes), name="convnet")


def _softmax_head(x, num_classes: int):
    # the logits are computed in the compute dtype, the softmax in float32: probabilities keep their digits
    x = layers.Dense(num_classes, name="logits")(x)
    return layers.Activation("softmax", dtype="float32", name="probabilities")(x)
