"""Batches: every image, full batches, exact at any step."""

import io

import numpy as np
import pytest
import tensorflow as tf

from fashion_oct import input_pipeline
from fashion_oct.errors import InputError


def numbered(num_examples):
    """Examples whose image i is filled with the value i and whose label is i."""
    images = np.broadcast_to(np.arange(num_examples, dtype=np.uint8)[:, None, None, None], (num_examples, 2, 3, 1))
    return input_pipeline.ArrayExamples(images.copy(), np.arange(num_examples))


def train_batches(examples, **arguments):
    arguments = {"global_batch_size": 8, "seed": 0, "num_steps": 29, **arguments}
    dataset = input_pipeline.make_training_dataset(examples, **arguments)
    return [(images.numpy(), labels.numpy()) for images, labels in dataset]


def labels_of(batches):
    return np.concatenate([labels for _, labels in batches])


def test_make_training_dataset_shows_every_image_once_a_pass():
    # 29 steps x 8 = 232 = 8 passes over 29 images: no batch size divides 29
    batches = train_batches(numbered(29))
    assert [labels.shape for _, labels in batches] == [(8,)] * 29
    passes = labels_of(batches).reshape(8, 29)
    assert (np.sort(passes, axis=1) == np.arange(29)).all()
    assert len({tuple(order) for order in passes}) == 8  # each pass in another order


def test_make_training_dataset_keeps_images_and_labels_together():
    for images, labels in train_batches(numbered(29)):
        assert images.dtype == np.uint8
        assert labels.dtype == np.int32
        assert (images == labels[:, None, None, None]).all()


@pytest.mark.parametrize("wrap", [lambda examples: examples, input_pipeline.Mirrored])
@pytest.mark.parametrize("start_step", [1, 3, 4, 28, 29])
def test_make_training_dataset_starts_at_any_step(start_step, wrap):
    rng = np.random.default_rng(0)
    examples = input_pipeline.ArrayExamples(rng.integers(0, 256, (29, 4, 4, 1), np.uint8), np.arange(29))
    whole = train_batches(wrap(examples))
    rest = train_batches(wrap(examples), start_step=start_step)
    assert len(rest) == 29 - start_step
    for (images, labels), (other_images, other_labels) in zip(whole[start_step:], rest, strict=True):
        np.testing.assert_array_equal(images, other_images)
        np.testing.assert_array_equal(labels, other_labels)


def test_make_training_dataset_repeats_with_the_seed_only():
    first, again, other = (labels_of(train_batches(numbered(29), seed=seed)) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_make_training_dataset_shuffles_uniformly():
    # Where example 0 stands and which one follows it, in 4,000 passes over 10 examples. A chi-square of 9 (8) degrees
    # of freedom stays below 27.9 (26.1) with p = 0.999.
    passes = labels_of(train_batches(numbered(10), num_steps=400, global_batch_size=100)).reshape(4000, 10)
    places = np.argmax(passes == 0, axis=1)
    counts = np.bincount(places, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 27.9
    followed = places < 9
    followers = np.bincount(passes[followed, places[followed] + 1], minlength=10)[1:]
    expected = followed.sum() / 9
    assert ((followers - expected) ** 2 / expected).sum() < 26.1


def test_make_training_dataset_flips_about_half_of_the_images():
    images = np.zeros((50, 1, 2, 1), np.uint8)
    images[:, :, 1] = 255  # the right pixel is bright; mirrored, the left one is
    examples = input_pipeline.Mirrored(input_pipeline.ArrayExamples(images, np.zeros(50, int)))
    batches = train_batches(examples, num_steps=40, global_batch_size=50)
    flipped = np.concatenate([batch[:, 0, 0, 0] == 255 for batch, _ in batches])
    assert all(set(image.ravel()) == {0, 255} for batch, _ in batches for image in batch)
    assert 900 < flipped.sum() < 1100  # 2,000 throws of a coin: 1,000 with a standard deviation of 22
    assert len({tuple(row) for row in flipped.reshape(40, 50)}) == 40  # anew in each pass


def test_mirrored_examples_are_the_images_and_then_their_mirror_images():
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 2), np.uint8)
    mirrored = input_pipeline.Mirrored(input_pipeline.ArrayExamples(images, np.arange(5)))
    shown, labels = input_pipeline.take(mirrored, np.array([0, 7, 4, 9]))
    np.testing.assert_array_equal(shown, [images[0], images[2][:, ::-1], images[4], images[4][:, ::-1]])
    assert labels.tolist() == [0, 2, 4, 4]
    assert len(mirrored) == len(mirrored.labels) == 10


def test_make_training_dataset_shows_every_mirrored_image_once_a_pass():
    passes = labels_of(train_batches(input_pipeline.Mirrored(numbered(29)))).reshape(8, 29)
    assert (np.sort(passes, axis=1) == np.arange(29)).all()


def test_make_evaluation_dataset_shows_every_image_once_in_order():
    dataset = input_pipeline.make_evaluation_dataset(numbered(29), global_batch_size=8)
    batches = [labels.numpy() for _, labels in dataset]
    assert [len(labels) for labels in batches] == [8, 8, 8, 5]
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(29))


def test_take_returns_the_examples_asked_for():
    images, labels = input_pipeline.take(numbered(9), np.array([7, 2]))
    assert labels.tolist() == [7, 2]
    assert images[:, 0, 0, 0].tolist() == [7, 2]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((3, 2, 2, 1), np.float32), np.zeros(3, int), "float32"),
        (np.zeros((3, 2, 2), np.uint8), np.zeros(3, int), r"\(3, 2, 2\)"),
        (np.zeros((3, 2, 2, 1), np.uint8), np.zeros(4, int), r"\(4,\)"),
        (np.zeros((3, 2, 2, 1), np.uint8), np.zeros((3, 10)), "float64"),
    ],
)
def test_array_examples_refuses_other_arrays(images, labels, message):
    with pytest.raises(InputError, match=message):
        input_pipeline.ArrayExamples(images, labels)


@pytest.fixture
def class_folders(tmp_path):
    """Four PNGs of 4 x 4 pixels, each filled with its own value."""
    values = {"CNV/b": 10, "CNV/a": 20, "NORMAL/d": 30, "NORMAL/c": 40}
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.png").write_bytes(encoded(np.full((4, 4), value, np.uint8), "PNG"))
    return tmp_path


def test_file_examples_from_pattern_take_their_labels_from_the_folders(class_folders):
    examples = input_pipeline.FileExamples.from_pattern(f"{class_folders}/*/*.png", ["NORMAL", "CNV"], (4, 4, 1))
    images, labels = input_pipeline.take(examples, np.arange(4))
    assert images[:, 0, 0, 0].tolist() == [20, 10, 40, 30]  # sorted by path
    assert labels.tolist() == [1, 1, 0, 0]


def test_file_examples_train_as_arrays_do(class_folders):
    files = input_pipeline.FileExamples.from_pattern(f"{class_folders}/*/*.png", ["CNV", "NORMAL"], (4, 4, 1))
    arrays = input_pipeline.ArrayExamples(*input_pipeline.take(files, np.arange(4)))
    settings = {"global_batch_size": 3, "num_steps": 8, "start_step": 2}
    for one, other in zip(train_batches(files, **settings), train_batches(arrays, **settings), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(("pattern", "message"), [("*/*.jpeg", "no file"), ("*/*.png", "NORMAL")])
def test_file_examples_from_pattern_refuse_what_does_not_fit(class_folders, pattern, message):
    with pytest.raises(InputError, match=message):
        input_pipeline.FileExamples.from_pattern(f"{class_folders}/{pattern}", ["CNV"], (4, 4, 1))


def encoded(pixels, kind):
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def test_decode_image_keeps_pixels_of_the_right_size():
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    image = input_pipeline.decode_image(encoded(pixels, "PNG"), (4, 4, 1))
    np.testing.assert_array_equal(image[..., 0], pixels)


def test_decode_image_makes_colour_grey_by_the_standard_weights():
    red = np.zeros((8, 8, 3), np.uint8)
    red[..., 0] = 255
    image = input_pipeline.decode_image(encoded(red, "JPEG"), (8, 8, 1))
    assert abs(int(image[4, 4, 0]) - 76) <= 2  # 0.299 x 255 = 76.2


def test_decode_image_resizes():
    image = input_pipeline.decode_image(encoded(np.full((10, 20), 77, np.uint8), "PNG"), (4, 5, 1))
    assert image.shape == (4, 5, 1)
    assert (image.numpy() == 77).all()


def test_decode_image_resizes_bilinearly():
    image = input_pipeline.decode_image(encoded(np.array([[0, 100]], np.uint8), "PNG"), (1, 4, 1))
    assert image.numpy().ravel().tolist() == [0, 25, 75, 100]  # bilinear, pixel centres at 1/4 and 3/4


def test_decode_image_refuses_what_is_no_image():
    with pytest.raises(tf.errors.InvalidArgumentError):
        input_pipeline.decode_image(b"no image", (4, 4, 1))
