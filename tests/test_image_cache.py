"""Decoded images are kept: the same batches, decoded once."""

import gc
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import image_cache, input_pipeline, row_cache
from fashion_oct.errors import InputError

SHAPE = (8, 10, 1)
NUM_IMAGES = 150  # decoded 64 at once: two full batches and a smaller one


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("jpegs")
    rng = np.random.default_rng(0)
    for i in range(NUM_IMAGES):
        pixels = rng.integers(0, 256, (rng.integers(9, 20), rng.integers(9, 20)), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.jpeg")
    return folder


def examples_of(folder, image_shape=SHAPE):
    paths = sorted(map(str, folder.glob("*.jpeg")))
    return input_pipeline.FileExamples(paths, np.arange(len(paths)) % 4, image_shape)


def all_of(dataset):
    return [np.concatenate(parts) for parts in zip(*dataset.as_numpy_iterator(), strict=True)]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_cached_images_give_the_batches_of_the_files(jpegs, where, tmp_path):
    examples = examples_of(jpegs)
    cached = image_cache.cached_images(examples, where=where, folder=tmp_path)
    arguments = {"global_batch_size": 40, "seed": 3, "num_steps": 10, "start_step": 2}
    for one, other in zip(
        input_pipeline.make_training_dataset(examples, **arguments),
        input_pipeline.make_training_dataset(cached, **arguments),
        strict=True,
    ):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
        assert other[0].shape == (40, *SHAPE)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_cached_images_have_the_shapes_and_types_of_the_files(jpegs, where, tmp_path):
    examples = examples_of(jpegs)
    cached = image_cache.cached_images(examples, where=where, folder=tmp_path)
    one, other = (input_pipeline.make_evaluation_dataset(e, global_batch_size=7) for e in (examples, cached))
    assert other.element_spec == one.element_spec


def replace_by_garbage(folder):
    """Overwrites all images; their names, sizes and times of change stay."""
    for path in folder.glob("*.jpeg"):
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_cached_images_on_disk_are_decoded_once(jpegs, tmp_path):
    copy = tmp_path / "jpegs"
    shutil.copytree(jpegs, copy)
    image_cache.cached_images(examples_of(copy), where="disk", folder=tmp_path / "cache")
    replace_by_garbage(copy)  # to decode an image again would be an error
    cached = image_cache.cached_images(examples_of(copy), where="disk", folder=tmp_path / "cache")
    images, labels = all_of(input_pipeline.make_evaluation_dataset(cached, global_batch_size=64))
    expected, expected_labels = all_of(input_pipeline.make_evaluation_dataset(examples_of(jpegs), global_batch_size=64))
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(labels, expected_labels)


def test_cached_images_go_on_after_a_file_that_did_not_decode(jpegs, tmp_path):
    copy = tmp_path / "jpegs"
    shutil.copytree(jpegs, copy)
    bad = copy / "140.jpeg"  # in the third batch
    good = bad.read_bytes()
    status = bad.stat()
    bad.write_bytes(bytes(len(good)))
    os.utime(bad, ns=(status.st_atime_ns, status.st_mtime_ns))
    examples = examples_of(copy)
    with pytest.raises(InputError, match=r"140\.jpeg"), input_pipeline.naming_bad_files(examples):
        image_cache.cached_images(examples, where="disk", folder=tmp_path / "cache")
    gc.collect()
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert row_cache.RowCache(folder, NUM_IMAGES, SHAPE, np.uint8).missing.tolist() == list(range(128, 150))


def touch(examples):
    os.utime(examples.paths[5], (1, 1))
    return examples


def lengthen(examples):
    status = os.stat(examples.paths[5])
    with open(examples.paths[5], "ab") as stream:
        stream.write(b"\0")
    os.utime(examples.paths[5], ns=(status.st_atime_ns, status.st_mtime_ns))
    return examples


def reverse(examples):
    return input_pipeline.FileExamples(examples.paths[::-1], examples.labels[::-1], SHAPE)


def resize(examples):
    return input_pipeline.FileExamples(examples.paths, examples.labels, (10, 8, 1))


def shorten(examples):
    return input_pipeline.FileExamples(examples.paths[:-1], examples.labels[:-1], SHAPE)


@pytest.mark.parametrize("change", [touch, lengthen, reverse, resize, shorten])
def test_identity_tells_other_files_apart(jpegs, change, tmp_path):
    shutil.copytree(jpegs, tmp_path / "jpegs")
    before = image_cache.identity(examples_of(tmp_path / "jpegs"))
    assert image_cache.identity(examples_of(tmp_path / "jpegs")) == before
    assert image_cache.identity(change(examples_of(tmp_path / "jpegs"))) != before


def test_identity_of_arrays_is_that_of_all_their_pixels():
    images = np.random.default_rng(0).integers(0, 256, (70, 3, 4, 1), np.uint8)
    other = images.copy()
    other[69, 2, 3, 0] ^= 1
    variants = [images, other, images[::-1], images.reshape(70, 4, 3, 1), images[:-1], images.reshape(140, 3, 2, 1)]
    names = [image_cache.identity(input_pipeline.ArrayExamples(v, np.zeros(len(v), int))) for v in variants]
    assert len(set(names)) == len(variants)
    assert image_cache.identity(input_pipeline.ArrayExamples(images.copy(), np.ones(70, int))) == names[0]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_identity_of_cached_images_is_that_of_their_files(jpegs, where, tmp_path):
    examples = examples_of(jpegs)
    cached = image_cache.cached_images(examples, where=where, folder=tmp_path)
    assert image_cache.identity(cached) == image_cache.identity(examples)


def test_cached_examples_keep_their_cache_from_eviction(jpegs, tmp_path):
    cached = image_cache.cached_images(examples_of(jpegs), where="disk", folder=tmp_path)
    gc.collect()
    assert row_cache.evict(tmp_path, limit_bytes=0) == []
    (name,) = (path.name for path in tmp_path.iterdir() if path.is_dir())
    assert name.startswith("images-")
    del cached
    gc.collect()
    assert row_cache.evict(tmp_path, limit_bytes=0) == [name]


def test_cached_examples_keep_bits_that_numpy_has_no_type_for():
    numbers = tf.constant([[1.5, -2.25], [3e38, 0.0078125]], tf.bfloat16)  # exact in 8 significant bits, but for 3e38
    bits = tf.bitcast(numbers, tf.uint16).numpy()
    cached = image_cache.CachedExamples(bits, np.array([0, 1], np.int32), tf.bfloat16, identity="x")
    rows, labels = input_pipeline.take(cached, np.array([1, 0]))
    np.testing.assert_array_equal(rows.astype(np.float32), tf.cast(numbers, tf.float32).numpy()[::-1])
    assert labels.tolist() == [1, 0]
