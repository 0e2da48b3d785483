"""The networks. Their input is uint8: preprocessing is a layer inside, so that no user of a model can forget it."""

import math
import os
import pathlib
import re

import tensorflow as tf

from fashion_oct import network
from fashion_oct.errors import InputError

layers = tf.keras.layers
_IMAGENET_WEIGHTS = "vgg16_weights_tf_dim_ordering_tf_kernels_notop.h5"


def convnet(image_shape: tuple[int, int, int], num_classes: int) -> tf.keras.Model:
    """Returns the tutorial's ConvNet: 93,322 parameters for 28x28x1 images and 10 classes.

    It computes the tutorial's outputs and gradients with fewer operations. Pooling drops the row and the column that an
    odd number leaves over, so that no output depends on the last two of 28: they are cut off at the start, which saves
    a sixth of the convolutions. And relu comes after pooling, of a quarter of the pixels: the largest of relus is the
    relu of the largest.

    Args:
      image_shape: (height, width, channels) of the uint8 images.
      num_classes: the width of the softmax, which is float32 under every precision policy.
    """
    images = layers.Input(image_shape, dtype="uint8", name="image")
    unseen = [(0, (side - 6) % 4) for side in image_shape[:2]]  # 4 p + 6 pixels give p after the second pooling
    x = layers.Cropping2D(unseen, name="without_unseen_border")(images)  # [B, 26, 26, 1]
    x = layers.Rescaling(1 / 255, name="to_unit_interval")(x)
    x = layers.Conv2D(32, 3)(x)  # [B, 24, 24, 32]
    x = layers.ReLU()(layers.MaxPooling2D(2)(x))  # [B, 12, 12, 32]
    x = layers.Conv2D(64, 3)(x)  # [B, 10, 10, 64]
    x = layers.ReLU()(layers.MaxPooling2D(2)(x))  # [B, 5, 5, 64]
    x = layers.Conv2D(64, 3, activation="relu")(x)  # [B, 3, 3, 64]
    x = layers.Flatten()(x)  # [B, 576]
    x = layers.Dense(64, activation="relu")(x)
    return tf.keras.Model(images, _softmax_head(x, num_classes), name="convnet")


def vgg16(
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    weights: str = "imagenet",
    input_scaling: str = "imagenet",
    head: str = "pooled",
) -> tf.keras.Model:
    """Returns VGG16 with a new softmax head; only its last block and the head are trained, as in the tutorial.

    The *frozen prefix* ends with block4_pool: `layers[:-4]` of VGG16 without its top.

    Args:
      image_shape: (height, width, channels) of the uint8 images, 1 channel (grey) or 3 (RGB).
      num_classes: the width of the softmax, which is float32 under every precision policy.
      weights: "imagenet", "none" (random), or the path of a .h5 or .weights.h5 file of VGG16 without its top.
      input_scaling: "imagenet" subtracts the mean of ImageNet's channels, as VGG16's own training did; "unit" divides
        by 255, as the tutorial did.
      head: "pooled" (global average pooling) or "flatten" (the tutorial's).

    Raises:
      InputError: the weights cannot be downloaded, are missing, or belong to another network.

    Source: Simonyan and Zisserman 2014, https://arxiv.org/abs/1409.1556.
    """
    if min(image_shape[:2]) < 32:
        size = f"{image_shape[0]} x {image_shape[1]}"
        raise InputError(f"--model=vgg16 needs images of at least 32 x 32, these are {size}: give --model=convnet")
    images = layers.Input(image_shape, dtype="uint8", name="image")
    x = _scale_for_vgg16(images, input_scaling)  # [B, 224, 224, 3]
    if weights == "imagenet":
        base = _vgg16_of_imagenet(x)
    else:
        base = tf.keras.applications.VGG16(include_top=False, weights=None, input_tensor=x)
        if weights != "none":
            _load_vgg16_weights(base, weights)
    for layer in base.layers[:-4]:  # up to block4_pool: [B, 14, 14, 512]
        layer.trainable = False
    x = base.output  # [B, 7, 7, 512]
    x = layers.Flatten()(x) if head == "flatten" else layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(images, _softmax_head(x, num_classes), name="vgg16")


def split_after_frozen_prefix(model: tf.keras.Model) -> tuple[tf.keras.Model, tf.keras.Model]:
    """Returns the frozen prefix and the tail of a model, as two models that share its layers.

    Training the tail trains the model: their weights are the same variables.

    Raises:
      ValueError: no layer with weights is frozen, or the layers after the frozen ones are no chain.
    """
    frozen = [i for i, layer in enumerate(model.layers) if layer.weights and not layer.trainable]
    if not frozen:
        raise ValueError(f"no layer of {model.name} is frozen: there is no prefix to split off")
    end = frozen[-1]
    while not model.layers[end + 1].trainable or not model.layers[end + 1].weights:
        end += 1  # a pooling after the last frozen convolution belongs to the prefix: it makes the features smaller
    prefix = tf.keras.Model(model.input, model.layers[end].output, name=f"{model.name}_prefix")
    x = features = layers.Input(prefix.output_shape[1:], dtype=prefix.compute_dtype, name="features")
    for layer in model.layers[end + 1 :]:
        x = layer(x)
    tail = tf.keras.Model(features, x, name=f"{model.name}_tail")
    if len(tail.trainable_weights) != len(model.trainable_weights):
        raise ValueError(f"the layers of {model.name} after {model.layers[end].name} are no chain")
    return prefix, tail


def in_float32(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a model of the same weights that computes in float32: the model itself if it does already."""
    description = model.to_json()
    as_float32 = re.sub("mixed_b?float16", "float32", description)
    if as_float32 == description:
        return model
    copy = tf.keras.models.model_from_json(as_float32)
    copy.set_weights(model.get_weights())
    return copy


def forward_flops(model: tf.keras.Model) -> int:
    """Returns the floating-point operations of one image: 2 a multiplication and addition, of the convolutions only."""
    convolutions = [layer for layer in model.layers if isinstance(layer, layers.Conv2D)]
    return sum(
        # each of H x W x filters outputs takes kernel x kernel x channels multiplications
        2 * math.prod(layer.output.shape[1:]) * math.prod(layer.kernel.shape[:-1])
        for layer in convolutions
    )


def _scale_for_vgg16(images, input_scaling: str):
    x = layers.Concatenate(name="grey_to_rgb")([images] * 3) if images.shape[-1] == 1 else images
    if input_scaling == "unit":
        return layers.Rescaling(1 / 255, name="to_unit_interval")(x)
    if images.shape[-1] == 3:
        x = x[..., ::-1]  # VGG16 was trained on blue, green, red
    mean = [103.939, 116.779, 123.68]
    # float32: in 8 significant bits the mean would be rounded
    return layers.Normalization(mean=mean, variance=[1.0] * 3, dtype="float32", name="minus_imagenet_mean")(x)


def _vgg16_of_imagenet(x) -> tf.keras.Model:
    cache = pathlib.Path(os.environ.get("KERAS_HOME", pathlib.Path.home() / ".keras")) / "models"
    try:
        if not (cache / _IMAGENET_WEIGHTS).exists():
            network.check_host_answers(
                f"https://storage.googleapis.com/tensorflow/keras-applications/vgg16/{_IMAGENET_WEIGHTS}"
            )
        return tf.keras.applications.VGG16(include_top=False, weights="imagenet", input_tensor=x)
    except Exception as error:  # Keras raises a bare one where a damaged file cannot be downloaded again
        raise InputError(
            f"--weights=imagenet: the weights of VGG16 are not in {cache}, or are damaged, and cannot be downloaded "
            f"({' '.join(str(error).split())}); give --weights=PATH of {_IMAGENET_WEIGHTS}, or --weights=none"
        ) from error


def _load_vgg16_weights(base: tf.keras.Model, path: str) -> None:
    if not pathlib.Path(path).is_file():
        raise InputError(f"--weights={path} is no file: give the path of VGG16's weights, imagenet, or none")
    if not path.endswith(".h5"):
        raise InputError(f"--weights={path}: give a .h5 or .weights.h5 file, imagenet, or none")
    try:
        base.load_weights(path)
    except Exception as error:  # Keras and HDF5 raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"--weights={path} are not the weights of VGG16 without its top ({reason}): give those, imagenet, or none"
        ) from error


def _softmax_head(x, num_classes: int):
    # the logits are computed in the compute dtype, the softmax in float32: probabilities keep their digits
    x = layers.Dense(num_classes, name="logits")(x)
    return layers.Activation("softmax", dtype="float32", name="probabilities")(x)
