"""From the numbers of examples to batches: shuffled without a buffer, exact at any step.

Training reads one endless sequence of positions 0, 1, 2, ...: position p is in pass p // N, and each pass is its own
permutation of the N examples. Step k takes the positions k * B to (k + 1) * B - 1, so every batch is full, batches run
on across passes, no example is lost, and step k is a pure function of (seed, k).
"""

import contextlib
import dataclasses
import functools
import glob
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from fashion_oct import oct_folder
from fashion_oct.errors import InputError

_SHUFFLE, _VERSION = 1, 2  # added to the second number of a seed: keeps the random streams apart
_CORES_OF_UNTUNED_MAPS = 16


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """What a model and a report need to know of a dataset.

    Attributes:
      image_shape: (height, width, channels) of the uint8 images.
      class_names: the names of the labels 0, 1, ...
    """

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one of several workers reads: the images of its replicas, which are some in a row of all.

    Each element of its datasets is for one replica, the first to the last in turn.
    """

    first_replica: int
    num_own: int
    num_replicas: int

    def of_batch(self, size: int) -> list[range]:
        """Returns the places that each own replica has in a global batch of this size; the last replica may get fewer.

        The same as `MirroredStrategy` gives: 29 images to 8 replicas are 7 x 4 + 1.
        """
        each = -(-size // self.num_replicas)
        replicas = range(self.first_replica, self.first_replica + self.num_own)
        return [range(size)[replica * each : (replica + 1) * each] for replica in replicas]


class Examples(Protocol):
    """A split that batches can be taken from. `len()` is its number of examples."""

    labels: np.ndarray  # int32 [N]

    def __len__(self) -> int: ...

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """Turns a dataset of index batches, int64 [B], into one of (uint8 images [B, H, W, C], int32 labels [B])."""


class ArrayExamples:
    """Examples in memory: one gather a batch.

    Args:
      images: uint8 [N, H, W, C].
      labels: integers [N], from 0.

    Raises:
      InputError: other types or shapes, or counts that differ.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        images, labels = np.asarray(images), np.asarray(labels)
        if images.dtype != np.uint8 or images.ndim != 4:
            raise InputError(f"images are {images.dtype} of shape {images.shape}: give uint8 [N, H, W, C]")
        if not np.issubdtype(labels.dtype, np.integer) or labels.shape != (len(images),):
            raise InputError(
                f"labels are {labels.dtype} of shape {labels.shape}: give integers [{len(images)}], one an image"
            )
        self.images = images
        self.labels = labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`."""
        del batch_size  # that of `indices`
        with tf.device("CPU:0"):
            images, labels = tf.constant(self.images), tf.constant(self.labels)
        return indices.map(
            lambda index: (tf.gather(images, index), tf.gather(labels, index)), num_parallel_calls=tf.data.AUTOTUNE
        )


class FileExamples:
    """Examples in JPEG or PNG files, decoded when they are needed, on all cores.

    Args:
      paths: N files.
      labels: integers [N], from 0.
      image_shape: (height, width, channels) to decode and resize to.
    """

    def __init__(self, paths: Sequence[str], labels: np.ndarray, image_shape: tuple[int, int, int]):
        self.paths = list(paths)
        self.labels = np.asarray(labels).astype(np.int32)
        self.image_shape = image_shape

    @classmethod
    def from_pattern(
        cls, pattern: str, class_names: Sequence[str], image_shape: tuple[int, int, int]
    ) -> "FileExamples":
        """Returns the files that match, sorted, each of the class that its folder names.

        Args:
          pattern: such as "OCT2017/train/*/*.jpeg".
          class_names: the folders, in the order of the labels.
          image_shape: (height, width, channels) to decode and resize to.

        Raises:
          InputError: nothing matches, or a file lies in a folder of another name.
        """
        paths = sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise InputError(f"no file matches {pattern!r}: give a pattern such as 'OCT2017/train/*/*.jpeg'")
        names = [os.path.basename(os.path.dirname(path)) for path in paths]
        if unknown := sorted(set(names) - set(class_names)):
            raise InputError(f"{pattern!r} matches files in the folder {unknown[0]!r}: give labels among {class_names}")
        return cls(paths, np.array([class_names.index(name) for name in names]), image_shape)

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`."""
        paths, labels = self._tensors

        def load(index):
            return decode_image(tf.io.read_file(paths[index]), self.image_shape), labels[index]

        return indices.unbatch().map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size)

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Paths and labels, once for all datasets."""
        with tf.device("CPU:0"):
            return tf.constant(self.paths), tf.constant(self.labels)


class Mirrored:
    """2N examples: N images, and then the same images flipped left to right.

    Trained on, each pass over the split takes one of the two versions of each image at random. There being only two,
    both can be cached.
    """

    num_versions = 2

    def __init__(self, examples: Examples):
        self.examples = examples
        self.labels = np.concatenate([examples.labels, examples.labels])

    def __len__(self) -> int:
        return 2 * len(self.examples)

    def batches(self, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """See `Examples`."""
        num_images = len(self.examples)
        batches = self.examples.batches(indices.map(lambda index: index % num_images), batch_size)

        def flip(index, batch):
            images, labels = batch
            # one gather from images and mirrored images: a quarter of the time of tf.where over every pixel
            both = tf.concat([images, tf.reverse(images, [2])], axis=0)  # [2B, H, W, C]
            size = tf.shape(images, tf.int64)[0]
            return tf.gather(both, tf.range(size) + size * (index // num_images)), labels

        return tf.data.Dataset.zip((indices, batches)).map(flip, num_parallel_calls=tf.data.AUTOTUNE)


def make_training_dataset(
    examples: Examples,
    *,
    global_batch_size: int,
    seed: int,
    num_steps: int,
    start_step: int = 0,
    share: Share | None = None,
) -> tf.data.Dataset:
    """Returns the batches of the steps `start_step` to `num_steps - 1`.

    The same as the dataset from step 0 after `skip(start_step)`, but at no cost.

    Args:
      examples: the training split; of `Mirrored` examples, each pass takes one of the two versions of each image.
      global_batch_size: images a step over all replicas; at most `len(examples)`.
      seed: of the shuffle and the augmentation.
      num_steps: steps of the whole run.
      start_step: the first step to give.
      share: of this worker, where there are several.

    Returns:
      A dataset of (uint8 [B, H, W, C], int32 [B]), B = `global_batch_size` always; of a share, that of a replica.
    """
    indices = training_indices(
        examples, global_batch_size=global_batch_size, seed=seed, num_steps=num_steps, start_step=start_step
    )
    batch_size, num_batches = global_batch_size, num_steps - start_step
    if share:
        batch_size, num_batches = batch_size // share.num_replicas, num_batches * share.num_own
        begin, end = (replica * batch_size for replica in (share.first_replica, share.first_replica + share.num_own))
        indices = indices.map(lambda index: index[begin:end]).rebatch(batch_size)
    return _finish(examples.batches(indices, batch_size), batch_size, num_batches=num_batches)


def training_indices(
    examples: Examples, *, global_batch_size: int, seed: int, num_steps: int, start_step: int = 0
) -> tf.data.Dataset:
    """Returns the numbers of the examples in the batches of `make_training_dataset`: int64 [B]."""
    num_versions = getattr(examples, "num_versions", 1)
    num_examples = len(examples) // num_versions
    indices = _shuffled(num_examples, global_batch_size, seed=seed, start_step=start_step)
    indices = indices.take(num_steps - start_step)
    if num_versions > 1:
        steps = tf.data.Dataset.range(start_step, num_steps)
        indices = tf.data.Dataset.zip((steps, indices)).map(
            lambda step, index: index + num_examples * _draw_versions(step, global_batch_size, num_versions, seed)
        )
    return indices


def make_evaluation_dataset(
    examples: Examples, *, global_batch_size: int, share: Share | None = None
) -> tf.data.Dataset:
    """Returns every example exactly once, in order; the last batch may be smaller.

    Args:
      examples: the split.
      global_batch_size: images at once over all replicas.
      share: of this worker, where there are several: they read every example once together.

    Returns:
      A dataset of (uint8 [B, H, W, C], int32 [B]); of a share, B is that of a replica.
    """
    numbers = np.arange(len(examples))
    if not share:
        return make_indexed_dataset(examples, numbers, global_batch_size=global_batch_size)
    batches = [numbers[start : start + global_batch_size] for start in range(0, len(numbers), global_batch_size)]
    parts = [batch[places] for batch in batches for places in map(list, share.of_batch(len(batch)))]
    dataset = make_indexed_dataset(
        examples, np.concatenate(parts), global_batch_size=global_batch_size // share.num_replicas
    )
    return dataset.rebatch([len(part) for part in parts])


def make_indexed_dataset(examples: Examples, indices: np.ndarray, *, global_batch_size: int) -> tf.data.Dataset:
    """Returns the examples with these numbers, in this order; the last batch may be smaller."""
    batches = tf.data.Dataset.from_tensor_slices(np.asarray(indices, np.int64)).batch(global_batch_size)
    return _finish(
        examples.batches(batches, global_batch_size), None, num_batches=-(-len(indices) // global_batch_size)
    )


def take(examples: Examples, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, uint8 [K, H, W, C], and labels, int32 [K], of the examples with these numbers."""
    images, labels = next(iter(make_indexed_dataset(examples, indices, global_batch_size=len(indices))))
    return images.numpy(), labels.numpy()


@contextlib.contextmanager
def naming_bad_files(*splits: Examples | None) -> Iterator[None]:
    """Turns the error of a file that does not decode, which names no file, into an InputError that names it.

    All files of the splits are read again, until the first bad one: about a second for a thousand.

    Args:
      *splits: what is read in the block; None is passed over.
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError, tf.errors.FailedPreconditionError) as error:
        for examples in splits:
            if isinstance(examples, FileExamples) and (path := _first_bad_file(examples)):
                raise InputError(f"{path!r} cannot be read or does not decode: repair or remove it") from error
        raise


def _first_bad_file(examples: FileExamples) -> str | None:
    num_good = 0
    try:
        for _ in make_evaluation_dataset(examples, global_batch_size=1):
            num_good += 1
    except tf.errors.OpError:
        return examples.paths[num_good]
    return None


def _shuffled(num_examples: int, batch_size: int, *, seed: int, start_step: int) -> tf.data.Dataset:
    """Returns the examples of the steps from `start_step` on, without end: int64 [batch_size].

    A permutation a pass, from stateless random numbers: exactly uniform, and known without the passes before it.
    (`tf.random.experimental.index_shuffle` would need no sorting, but its permutations of small splits are far from
    uniform, and it walks through 2^16 numbers for each.)
    """
    first_pass, offset = divmod(start_step * batch_size, num_examples)

    def permutation(number):
        key = tf.stack([tf.constant(seed, tf.int64), number * 8 + _SHUFFLE])
        order = tf.argsort(tf.random.stateless_uniform([num_examples], key, None, None, tf.int64))
        return tf.cast(order[tf.where(number == first_pass, offset, 0) :], tf.int64)

    passes = tf.data.Dataset.range(first_pass, tf.int64.max)
    return passes.map(permutation).prefetch(1).rebatch(batch_size, drop_remainder=True)


def _draw_versions(step: tf.Tensor, batch_size: int, num_versions: int, seed: int) -> tf.Tensor:
    key = tf.stack([tf.constant(seed, tf.int64), step * 8 + _VERSION])
    return tf.cast(tf.random.stateless_uniform([batch_size], key) * num_versions, tf.int64)  # [B], 0 ... versions - 1


def _finish(batches: tf.data.Dataset, batch_size: int | None, *, num_batches: int) -> tf.data.Dataset:
    def fix_shapes(images, labels):
        images.set_shape([batch_size, *images.shape[1:]])
        labels.set_shape([batch_size])
        return images, labels

    options = tf.data.Options()
    options.deterministic = True
    # Untuned, a parallel map makes as many calls at once as there are cores, 16 at most, and decodes as fast. Up to
    # there the tuning thread costs more than it brings: an iterator's deletion can wait a minute for it.
    options.autotune.enabled = (os.cpu_count() or 1) > _CORES_OF_UNTUNED_MAPS
    # Keras wants to know how many there are, which tf.data does not where files are decoded one by one
    batches = batches.map(fix_shapes).apply(tf.data.experimental.assert_cardinality(num_batches))
    return batches.with_options(options).prefetch(tf.data.AUTOTUNE)


def decode_image(contents: tf.Tensor, image_shape: tuple[int, int, int]) -> tf.Tensor:
    """Decodes a JPEG or PNG and resizes it (bilinear, as the tutorial did).

    Colour becomes grey by the standard weights where `image_shape` has one channel.

    Args:
      contents: the bytes of the file, a scalar string.
      image_shape: (height, width, channels) of the result.

    Returns:
      uint8 [H, W, C].

    Raises:
      tf.errors.InvalidArgumentError: the bytes are no image that can be decoded, or a side has more than
        `oct_folder.MAX_SIDE` pixels, which the header tells before memory is taken.
    """
    height, width, channels = image_shape
    sides = _read_sides(contents)
    with tf.control_dependencies([tf.debugging.assert_less_equal(sides, oct_folder.MAX_SIDE)]):
        contents = tf.identity(contents)
    image = tf.io.decode_image(contents, channels=channels, expand_animations=False)  # [h, w, C]
    resized = tf.image.resize(image, [height, width])  # float32 [H, W, C]
    resized.set_shape(image_shape)
    return tf.cast(tf.round(resized), tf.uint8)


def _read_sides(contents: tf.Tensor) -> tf.Tensor:
    """Reads height and width, or width and height, from the header of a PNG or JPEG: int32 [2]."""

    def of_png():  # Source: PNG specification, 11.2.1 (IHDR): the first chunk, sides of 1 to 2^31 - 1
        has_header = tf.strings.substr(contents, 12, 4) == b"IHDR"
        with tf.control_dependencies([tf.debugging.Assert(has_header, ["a PNG with a damaged header"])]):
            return tf.io.decode_raw(tf.strings.substr(contents, 16, 8), tf.int32, little_endian=False)

    def of_jpeg():  # by the library that decodes it: no second reading of the header could differ
        return tf.io.extract_jpeg_shape(contents)[:2]

    # the length, since TensorFlow's own error of a short one holds the bytes, which Python cannot show
    is_png = (tf.strings.substr(contents, 0, 8) == b"\x89PNG\r\n\x1a\n") & (tf.strings.length(contents) >= 24)
    return tf.cond(is_png, of_png, of_jpeg)
