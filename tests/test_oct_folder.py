"""Names, headers, odd files, leakage, splits by patient, archives: on small JPEGs and on the real sample."""

import csv
import dataclasses
import io
import json
import os
import stat
import struct
import tarfile
import time
import zipfile

import numpy as np
import pytest

from fashion_oct import oct_folder
from fashion_oct.errors import InputError

Image = pytest.importorskip("PIL.Image")


def jpeg_bytes(value=0, *, mode="L", size=(32, 24), **save_args):
    """A JPEG of noise; another `value`, other pixels."""
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    pixels = np.random.default_rng(value).integers(0, 256, shape, dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels, mode=mode).save(stream, "JPEG", **save_args)
    return stream.getvalue()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def small_set(tmp_path):
    """Two classes, patients 1..4: two training images a class and patient, one test image a class."""
    root = tmp_path / "OCT2017"
    for split, patients in (("train", (1, 2)), ("test", (3,))):
        for number, name in enumerate(("CNV", "NORMAL")):
            for patient in patients:
                for index in (1, 2):
                    image = jpeg_bytes(1000 * number + 10 * patient + index)
                    write(root / split / name / f"{name}-{10 * number + patient}-{index}.jpeg", image)
    return root


def replaced_frame(content, *, width=None, height=None, precision=None, code=None):
    """The JPEG with other numbers in its frame header (FF C0, length, precision, height, width)."""
    at = content.index(b"\xff\xc0")
    old_precision, old_height, old_width = struct.unpack(">BHH", content[at + 4 : at + 9])
    frame = struct.pack(">BHH", precision or old_precision, height or old_height, width or old_width)
    return content[: at + 1] + bytes([code or 0xC0]) + content[at + 2 : at + 4] + frame + content[at + 9 :]


# Names and folders


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CNV-1016042-1.jpeg", ("CNV", "1016042", 1)),
        ("DRUSEN-52917-12.JPEG", ("DRUSEN", "52917", 12)),
        ("NORMAL-7-3.jpg", ("NORMAL", "7", 3)),
        ("DRY AMD-7-3.jpeg", ("DRY AMD", "7", 3)),
        ("ドルーゼン-7-3.jpeg", ("ドルーゼン", "7", 3)),
        ("NEW\nLINE-7-3.jpeg", ("NEW\nLINE", "7", 3)),
        ("WET-AMD-7-3.jpeg", ("WET-AMD", "7", 3)),
        ("CNV-0042-1.jpeg", ("CNV", "0042", 1)),
    ],
)
def test_parse_name_reads_class_patient_and_index(name, expected):
    assert oct_folder.parse_name(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "CNV-1016042-1-overlay.jpeg",
        "CNV-1-1 (1).jpeg",
        "CNV-1-1.png",
        "CNV-1.jpeg",
        "CNV-1-x.jpeg",
        "-1-1.jpeg",
        "._CNV-1-1.jpeg",
        "CNV-1-1.jpeg.part",
        "CNV-1-1.jpeg\n",
        "CNV-\u0661-1.jpeg",  # an Arabic digit
    ],
)
def test_parse_name_refuses_what_nearly_fits(name):
    assert oct_folder.parse_name(name) is None


def test_find_root_takes_the_folder_itself_or_its_parent(small_set):
    assert oct_folder.find_root(small_set) == small_set
    assert oct_folder.find_root(small_set.parent) == small_set


def test_find_root_takes_the_shallowest_copy_of_kaggles_archive(small_set, tmp_path):
    kaggle = tmp_path / "kaggle"
    (kaggle / "oct2017" / "OCT2017 " / "train").mkdir(parents=True)
    (kaggle / "__MACOSX" / "train").mkdir(parents=True)
    small_set.rename(kaggle / "OCT2017 ")
    assert oct_folder.find_root(kaggle) == kaggle / "OCT2017 "


def test_find_root_refuses_two_folders_at_one_depth(tmp_path):
    for name in ("OCT", "chest_xray"):
        (tmp_path / name / "train").mkdir(parents=True)
    with pytest.raises(InputError, match=r"several OCT folders: .*OCT.*chest_xray"):
        oct_folder.find_root(tmp_path)


def test_find_root_of_a_missing_folder_tells_how_to_get_the_data(tmp_path):
    with pytest.raises(InputError, match=r"does not exist.*--download.*browser.*10\.17632/rscbjbr9sj"):
        oct_folder.find_root(tmp_path / "missing")


def test_find_root_without_train_names_the_remedy(tmp_path):
    with pytest.raises(InputError, match="holds no folder train; pass the folder that holds train and test"):
        oct_folder.find_root(tmp_path)


def test_find_root_ends_in_a_loop_of_links(tmp_path):
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(InputError, match="holds no folder train"):
        oct_folder.find_root(tmp_path)


# Listing a split


def test_list_split_orders_by_class_and_name(small_set):
    split = oct_folder.list_split(small_set, "train")
    names = [os.path.basename(path) for path in split.paths]
    assert split.class_names == ("CNV", "NORMAL")
    assert names[:4] == ["CNV-1-1.jpeg", "CNV-1-2.jpeg", "CNV-2-1.jpeg", "CNV-2-2.jpeg"]
    assert names[4:] == ["NORMAL-11-1.jpeg", "NORMAL-11-2.jpeg", "NORMAL-12-1.jpeg", "NORMAL-12-2.jpeg"]
    assert split.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert split.labels.dtype == np.int32
    assert split.patients == ["1", "1", "2", "2", "11", "11", "12", "12"]
    assert split.bad == []
    assert split.stray == []


def test_list_split_takes_the_order_of_the_given_class_names(small_set):
    split = oct_folder.list_split(small_set, "test", class_names=("NORMAL", "CNV"))
    assert [os.path.basename(path)[:3] for path in split.paths] == ["NOR", "NOR", "CNV", "CNV"]
    assert split.labels.tolist() == [0, 0, 1, 1]


def test_list_split_refuses_a_missing_split(small_set):
    with pytest.raises(InputError, match="has no folder 'val'; it has 'test', 'train'"):
        oct_folder.list_split(small_set, "val")


def test_list_split_refuses_a_class_that_only_the_test_split_has(small_set):
    write(small_set / "test" / "AMD" / "AMD-9-1.jpeg", jpeg_bytes())
    oct_folder.list_split(small_set, "train")
    with pytest.raises(InputError, match="none of the classes 'CNV', 'NORMAL': 'AMD'"):
        oct_folder.list_split(small_set, "test")


def test_list_split_refuses_a_class_that_the_test_split_lacks(small_set):
    write(small_set / "train" / "AMD" / "AMD-9-1.jpeg", jpeg_bytes())
    with pytest.raises(InputError, match="has no folder for 'AMD'; it has 'CNV', 'NORMAL'"):
        oct_folder.list_split(small_set, "test")


def test_list_split_refuses_an_empty_class_folder(small_set):
    (small_set / "train" / "AMD").mkdir()
    with pytest.raises(InputError, match=r"AMD' holds no usable AMD-PATIENT-INDEX\.jpeg"):
        oct_folder.list_split(small_set, "train")


def test_list_split_refuses_a_class_of_bad_images_only(small_set):
    write(small_set / "train" / "AMD" / "AMD-1-1.jpeg", b"")
    with pytest.raises(InputError, match="AMD' holds no usable"):
        oct_folder.list_split(small_set, "train")


def test_list_split_refuses_a_train_folder_without_classes(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(InputError, match="the class names are nothing"):
        oct_folder.list_split(tmp_path, "train")


@pytest.mark.parametrize(
    "name", [".DS_Store", "._CNV-1-1.jpeg", "Thumbs.db", "CNV-1-1-overlay.jpeg", "thumb_CNV-1-1.jpeg"]
)
def test_list_split_leaves_out_a_stray_file(small_set, name):
    path = write(small_set / "train" / "CNV" / name, jpeg_bytes())
    split = oct_folder.list_split(small_set, "train")
    assert split.stray == [str(path)]
    assert split.bad == []
    assert len(split.paths) == 8


@pytest.mark.parametrize("name", ["__MACOSX", ".ipynb_checkpoints", "thumbnails"])
def test_list_split_takes_no_junk_folder_for_a_class(small_set, name):
    write(small_set / "train" / name / "CNV-1-1.jpeg", jpeg_bytes())
    assert oct_folder.list_split(small_set, "train").class_names == ("CNV", "NORMAL")


def test_list_split_names_an_image_in_another_classs_folder(small_set):
    path = write(small_set / "train" / "NORMAL" / "CNV-7-1.jpeg", jpeg_bytes())
    assert oct_folder.list_split(small_set, "train").bad == [(str(path), "is named CNV but lies in the folder NORMAL")]


def test_list_split_takes_upper_case_jpeg(small_set):
    path = write(small_set / "train" / "CNV" / "CNV-7-1.JPEG", jpeg_bytes())
    assert str(path) in oct_folder.list_split(small_set, "train").paths


@pytest.mark.parametrize("class_name", ["DRY AMD", "ドルーゼン", "NEW\nLINE"])
def test_list_split_takes_names_with_spaces_unicode_and_newlines(small_set, class_name):
    path = write(small_set / "train" / class_name / f"{class_name}-7-1.jpeg", jpeg_bytes())
    split = oct_folder.list_split(small_set, "train")
    assert split.patients[split.paths.index(str(path))] == "7"
    assert class_name in split.class_names


def test_list_split_refuses_a_class_folder_whose_name_is_not_utf8(small_set):
    (small_set / "train" / os.fsdecode(b"\xff")).mkdir()
    with pytest.raises(InputError, match=r"xff' is not UTF-8; rename it"):
        oct_folder.list_split(small_set, "train")


@pytest.mark.parametrize("target", ["CNV-7-1.jpeg", "missing.jpeg"])
def test_list_split_reports_links_that_lead_nowhere(small_set, target):
    path = small_set / "train" / "CNV" / "CNV-7-1.jpeg"
    path.symlink_to(target)  # the first is a link to itself
    ((bad, reason),) = oct_folder.list_split(small_set, "train").bad
    assert bad == str(path)
    assert reason.startswith("cannot be read: ")


def test_list_split_does_not_enter_folders_inside_a_class(small_set):
    folder = small_set / "train" / "CNV"
    (folder / "loop").symlink_to(folder)
    (folder / "CNV-8-1.jpeg").symlink_to(folder)
    write(folder / "more" / "CNV-9-1.jpeg", jpeg_bytes())
    split = oct_folder.list_split(small_set, "train")
    assert split.stray == [str(folder / "loop"), str(folder / "more")]
    assert split.bad == [(str(folder / "CNV-8-1.jpeg"), "is no regular file")]
    assert len(split.paths) == 8


def test_list_split_without_header_checks_trusts_the_names(small_set):
    path = write(small_set / "train" / "CNV" / "CNV-7-1.jpeg", b"")
    assert str(path) in oct_folder.list_split(small_set, "train", check_headers=False).paths
    assert oct_folder.list_split(small_set, "train").bad == [(str(path), "is empty")]


def test_refuse_bad_names_the_first_file_and_the_remedy(small_set):
    write(small_set / "train" / "CNV" / "CNV-7-1.jpeg", b"")
    split = oct_folder.list_split(small_set, "train")
    with pytest.raises(InputError, match=r"1 of 9 images .*CNV-7-1.jpeg' is empty; .*--bad_images=skip"):
        oct_folder.refuse_bad(split)
    oct_folder.refuse_bad(dataclasses.replace(split, bad=[]))


def test_list_split_matches_the_samples_manifest(oct_folder):
    from fashion_oct import oct_folder as module

    with open(oct_folder / "manifest.csv", newline="") as stream:
        expected = {
            (row["class"], row["file"], row["patient"]) for row in csv.DictReader(stream) if row["split"] == "test"
        }
    split = module.list_split(oct_folder, "test")
    found = {
        (split.class_names[label], os.path.basename(path), patient)
        for path, label, patient in zip(split.paths, split.labels, split.patients, strict=True)
    }
    assert len(split.paths) == 400
    assert found == expected


# Headers


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (jpeg_bytes(), (32, 24, "L")),
        (jpeg_bytes(mode="RGB", size=(642, 277)), (642, 277, "RGB")),
        (jpeg_bytes(progressive=True, size=(64, 48)), (64, 48, "L")),
        (jpeg_bytes(icc_profile=bytes(200_000)), (32, 24, "L")),  # four segments of 64 KiB before the frame
        (jpeg_bytes() + bytes(1000), (32, 24, "L")),  # padding after the end marker
        (jpeg_bytes() + bytes(5000), (32, 24, "L")),
        (b"\xff\xd8\xff\xff" + jpeg_bytes()[2:], (32, 24, "L")),  # fill bytes before the first marker
        (jpeg_bytes(size=(8, 8192)), (8, 8192, "L")),
    ],
)
def test_check_header_reads_size_and_mode(tmp_path, content, expected):
    assert oct_folder.check_header(write(tmp_path / "x.jpeg", content)) == expected


def png_bytes(mode):
    stream = io.BytesIO()
    Image.new(mode, (32, 24)).save(stream, "PNG")
    return stream.getvalue()


def cmyk_bytes():
    stream = io.BytesIO()
    Image.new("CMYK", (32, 24)).save(stream, "JPEG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\xff", "is not a JPEG"),
        (b"<html>404</html>", "is not a JPEG"),
        (png_bytes("L"), "is a PNG, not a JPEG; convert it"),
        (png_bytes("I;16"), "is a PNG, not a JPEG; convert it"),
        (cmyk_bytes(), "is CMYK; convert it to grey or RGB"),
        (jpeg_bytes(size=(1, 1)), "is 1x1 pixels; each side must be 8 to 8192"),
        (jpeg_bytes(size=(20_000, 16)), "is 20000x16 pixels; each side must be 8 to 8192"),
        (jpeg_bytes(size=(8, 8193)), "is 8x8193 pixels; each side must be 8 to 8192"),
        (
            replaced_frame(jpeg_bytes(), width=65_535, height=65_535),
            "is 65535x65535 pixels; each side must be 8 to 8192",
        ),
        (jpeg_bytes()[:-2], "is truncated: it has no end marker"),
        (jpeg_bytes(size=(200, 200))[:-5000], "is truncated: it has no end marker"),
        (jpeg_bytes()[:3], "is truncated: it ends inside its header"),
        (jpeg_bytes()[:90], "is truncated: it ends inside its header"),
        (b"\xff\xd8\xff\xd9\xff\xd9", "has a damaged header"),
        (b"\xff\xd8" + bytes(100), "has a damaged header"),
        (b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000 + b"\xff\xd9", "has a damaged header"),
        (replaced_frame(jpeg_bytes(), precision=12), "is a JPEG of a kind that common decoders do not read"),
        (replaced_frame(jpeg_bytes(), code=0xC3), "is a JPEG of a kind that common decoders do not read"),
    ],
)
def test_check_header_tells_why_an_image_is_refused(tmp_path, content, reason):
    found = oct_folder.check_header(write(tmp_path / "x.jpeg", content))
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_check_header_does_not_take_the_thumbnails_end_for_the_images(tmp_path):
    thumbnail = jpeg_bytes(size=(16, 16))
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    content = jpeg_bytes()
    whole = content[:2] + segment + content[2:]
    assert oct_folder.check_header(write(tmp_path / "whole.jpeg", whole)) == (32, 24, "L")
    assert oct_folder.check_header(write(tmp_path / "cut.jpeg", whole[:-2])) == "is truncated: it has no end marker"


def test_check_header_refuses_a_huge_file_without_reading_it(tmp_path):
    path = write(tmp_path / "x.jpeg", jpeg_bytes())
    os.truncate(path, (64 << 20) + 1)  # sparse
    assert oct_folder.check_header(path) == "has 67108865 bytes; the limit is 67108864"


def test_check_header_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "x.jpeg")
    assert oct_folder.check_header(tmp_path / "x.jpeg") == "is no regular file"


def test_check_header_reports_an_unreadable_file(tmp_path):
    path = write(tmp_path / "x.jpeg", jpeg_bytes())
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # root reads everything
        os.seteuid(65_534)
    try:
        assert oct_folder.check_header(path) == "cannot be read: Permission denied"
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    "content",
    [
        jpeg_bytes(),
        jpeg_bytes(mode="RGB", progressive=True),
        jpeg_bytes() + bytes(5000),
        jpeg_bytes()[:-2],
        jpeg_bytes(size=(200, 200))[:-5000],
        cmyk_bytes(),
        replaced_frame(jpeg_bytes(), precision=12),
        replaced_frame(jpeg_bytes(), code=0xC3),
    ],
)
def test_check_header_refuses_what_tensorflow_does_not_decode(tmp_path, content):
    tf = pytest.importorskip("tensorflow")
    try:
        tf.io.decode_jpeg(content, channels=1)
        decodes = True
    except tf.errors.InvalidArgumentError:
        decodes = False
    assert isinstance(oct_folder.check_header(write(tmp_path / "x.jpeg", content)), oct_folder.Header) == decodes


def test_check_header_agrees_with_pillow_on_every_test_image(oct_folder):
    from fashion_oct import oct_folder as module

    for path in sorted((oct_folder / "test").glob("*/*.jpeg"))[::5]:
        with Image.open(path) as image:
            assert module.check_header(path) == (*image.size, image.mode)


# Leakage and groups


def test_leakage_marks_test_images_of_training_patients(small_set):
    write(small_set / "test" / "CNV" / "CNV-1-9.jpeg", jpeg_bytes(77))
    write(small_set / "test" / "NORMAL" / "NORMAL-2-9.jpeg", jpeg_bytes(78))  # patient 2 is a CNV patient in train
    train, test = (oct_folder.list_split(small_set, split) for split in ("train", "test"))
    leaks = oct_folder.leakage(train, test)
    marked = [os.path.basename(path) for path, leak in zip(test.paths, leaks, strict=True) if leak]
    assert marked == ["CNV-1-9.jpeg", "NORMAL-2-9.jpeg"]


def test_leakage_with_pixels_finds_a_copy_under_another_patient(small_set):
    content = (small_set / "train" / "CNV" / "CNV-1-1.jpeg").read_bytes()
    comment = content[:2] + b"\xff\xfe\x00\x04hi" + content[2:]  # other bytes, same pixels
    write(small_set / "test" / "CNV" / "CNV-99-1.jpeg", comment)
    train, test = (oct_folder.list_split(small_set, split) for split in ("train", "test"))
    assert not oct_folder.leakage(train, test).any()
    leaks = oct_folder.leakage(train, test, pixels=True)
    assert [os.path.basename(path) for path, leak in zip(test.paths, leaks, strict=True) if leak] == ["CNV-99-1.jpeg"]


def test_leakage_of_two_undecodable_images_is_no_match(small_set):
    for split, name in (("train", "CNV-5-1"), ("test", "CNV-6-1")):
        write(small_set / split / "CNV" / f"{name}.jpeg", jpeg_bytes().replace(b"\xff\xdb", b"\xff\xfe"))
    train, test = (oct_folder.list_split(small_set, split, check_headers=False) for split in ("train", "test"))
    assert not oct_folder.leakage(train, test, pixels=True).any()


def test_link_patients_joins_chains():
    # 3 and 1 share a, 1 and 2 share b; 4 shares only "no hash" with 5
    patients, hashes = ["3", "1", "1", "2", "4", "5"], [b"a", b"a", b"b", b"b", b"", b""]
    assert oct_folder.link_patients(patients, hashes) == ["1", "1", "1", "1", "4", "5"]


def test_group_split_keeps_groups_whole_and_classes_in_proportion():
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(400), generator.integers(1, 12, 400))
    labels = groups % 4
    held = oct_folder.group_split(groups, labels, fraction=0.2, seed=3)
    assert held.shape == groups.shape
    assert not set(groups[held]) & set(groups[~held])
    for label in range(4):
        # a group of at most 11 images decides: within 6 images of the target
        assert abs(held[labels == label].sum() - 0.2 * (labels == label).sum()) <= 6


def test_group_split_is_the_same_for_any_order_of_the_images():
    groups, labels = np.repeat(np.arange(50), 3), np.repeat(np.arange(50) % 2, 3)
    shuffled = np.random.default_rng(1).permutation(150)
    held = oct_folder.group_split(groups, labels, fraction=0.3, seed=7)
    again = oct_folder.group_split(groups[shuffled], labels[shuffled], fraction=0.3, seed=7)
    assert (held[shuffled] == again).all()


def test_group_split_of_another_seed_differs():
    groups, labels = np.arange(100), np.zeros(100, int)
    first, second = (oct_folder.group_split(groups, labels, fraction=0.5, seed=seed) for seed in (0, 1))
    assert first.sum() == second.sum() == 50
    assert (first != second).any()


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_group_split_puts_every_class_on_both_sides(fraction):
    groups, labels = ["a", "a", "a", "b", "c", "d"], ["X", "X", "X", "X", "Y", "Y"]
    held = oct_folder.group_split(groups, labels, fraction=fraction)
    assert {label for label, h in zip(labels, held, strict=True) if h} == {"X", "Y"}
    assert {label for label, h in zip(labels, held, strict=True) if not h} == {"X", "Y"}


def test_group_split_refuses_a_class_with_one_patient():
    with pytest.raises(InputError, match="class Y has too few patients"):
        oct_folder.group_split(["a", "b", "c", "c"], ["X", "X", "Y", "Y"], fraction=0.5)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 20.0, float("nan")])
def test_group_split_refuses_a_fraction_out_of_range(fraction):
    with pytest.raises(InputError, match="must lie between 0 and 1"):
        oct_folder.group_split(["a", "b"], [0, 0], fraction=fraction)


# The audit


@pytest.fixture(scope="module")
def real_audit(oct_folder):
    from fashion_oct import oct_folder as module

    return module.scan(oct_folder)


def test_scan_agrees_with_the_samples_manifest(real_audit):
    with open(real_audit.root / "manifest.csv", newline="") as stream:
        expected = {
            (row["split"], row["file"], row["sha256"], int(row["width"]), int(row["height"]), row["mode"])
            for row in csv.DictReader(stream)
        }
    found = {(row.split, row.file, row.sha256.hex(), row.width, row.height, row.mode) for row in real_audit.rows}
    assert len(real_audit.rows) == 1807
    assert found == expected


def test_scan_finds_the_samples_pixel_identical_patients(real_audit):
    with open(real_audit.root / "manifest.csv", newline="") as stream:
        expected = {row["file"]: row["group"] for row in csv.DictReader(stream)}
    linked = oct_folder.link_patients(
        [row.patient for row in real_audit.rows], [row.pixel_sha256 for row in real_audit.rows]
    )
    pairs = {(expected[row.file], group) for row, group in zip(real_audit.rows, linked, strict=True)}
    assert len(pairs) == len(set(expected.values())) == len(set(linked))  # one to one


def test_report_of_the_sample_finds_no_leak(real_audit):
    found = oct_folder.report(real_audit)
    assert found["counts"]["test"] == {"CNV": 100, "DME": 100, "DRUSEN": 100, "NORMAL": 100}
    assert found["modes"] == {"L": 1805, "RGB": 2}
    assert found["patients_in_several_splits"]["num_test_images"] == 0
    assert found["pixel_identical"]["num_groups_across_splits"] == 0


def test_report_counts_shared_patients_and_their_test_images(small_set):
    write(small_set / "test" / "CNV" / "CNV-1-9.jpeg", jpeg_bytes(77))
    found = oct_folder.report(oct_folder.scan(small_set, decode=False))
    shared = {"patients": ["1"], "num_test_images": 1, "share_of_test_images": 0.2}  # 1 of 5
    assert found["patients_in_several_splits"] == shared
    assert found["pixel_identical"] is None


def test_report_finds_byte_and_pixel_identical_images(small_set):
    content = (small_set / "train" / "CNV" / "CNV-1-1.jpeg").read_bytes()
    write(small_set / "train" / "CNV" / "CNV-1-3.jpeg", content)
    write(small_set / "test" / "CNV" / "CNV-99-1.jpeg", content[:2] + b"\xff\xfe\x00\x04hi" + content[2:])
    found = oct_folder.report(oct_folder.scan(small_set))
    assert found["byte_identical"] == {
        "num_groups": 1,
        "num_images": 2,
        "num_groups_across_splits": 0,
        "num_groups_of_several_patients": 0,
        "groups": [["train/CNV/CNV-1-1.jpeg", "train/CNV/CNV-1-3.jpeg"]],
    }
    assert found["pixel_identical"] == {
        "num_groups": 1,
        "num_images": 3,
        "num_groups_across_splits": 1,
        "num_groups_of_several_patients": 1,
        "groups": [["train/CNV/CNV-1-1.jpeg", "train/CNV/CNV-1-3.jpeg", "test/CNV/CNV-99-1.jpeg"]],
    }


def test_scan_lists_bad_misnamed_and_stray_files(small_set):
    train = small_set / "train"
    write(train / "CNV" / "CNV-7-1.jpeg", b"")
    write(train / "CNV" / "NORMAL-7-1.jpeg", jpeg_bytes(5))
    write(train / "CNV" / "scan.jpeg", jpeg_bytes())
    write(train / "CNV" / "CNV-1-1-overlay.jpeg", jpeg_bytes())
    write(train / "CNV" / ".DS_Store", b"x")
    write(train / "readme.txt", b"x")
    write(small_set / "__MACOSX" / "train" / "._x", b"x")
    found = oct_folder.report(oct_folder.scan(small_set))
    assert found["bad"] == [
        {"file": "train/CNV/CNV-7-1.jpeg", "reason": "is empty"},
        {"file": "train/CNV/NORMAL-7-1.jpeg", "reason": "is named NORMAL but lies in the folder CNV"},
    ]
    assert found["misnamed"] == ["train/CNV/scan.jpeg", "train/CNV/NORMAL-7-1.jpeg"]
    assert {entry["file"]: entry["reason"] for entry in found["stray"]} == {
        "__MACOSX": "it lies outside the class folders",
        "train/readme.txt": "it lies outside the class folders",
        "train/CNV/.DS_Store": "it is a hidden file",
        "train/CNV/CNV-1-1-overlay.jpeg": "it is an overlay, a thumbnail or a copy, going by its name",
        "train/CNV/scan.jpeg": "its name does not fit CLASS-PATIENT-INDEX.jpeg",
    }
    assert (found["num_images"], found["num_usable"]) == (14, 12)


def test_scan_finds_what_only_decoding_shows(small_set):
    content = jpeg_bytes().replace(b"\xff\xdb", b"\xff\xfe")  # the quantization table becomes a comment
    path = write(small_set / "train" / "CNV" / "CNV-7-1.jpeg", content)
    assert isinstance(oct_folder.check_header(path), oct_folder.Header)
    problems = {row.file: row.problem for row in oct_folder.scan(small_set).rows if row.problem}
    assert list(problems) == ["CNV-7-1.jpeg"]
    assert problems["CNV-7-1.jpeg"].startswith("does not decode: ")


def test_scan_reports_gaps_instead_of_stopping(small_set):
    write(small_set / "test" / "AMD" / "AMD-9-1.jpeg", jpeg_bytes())
    (small_set / "test" / "EMPTY").mkdir()
    gaps = oct_folder.scan(small_set).gaps
    assert gaps == [
        "train has no usable image of AMD",
        "train has no usable image of EMPTY",
        "test has no usable image of EMPTY",
    ]


def test_write_audit_writes_one_row_an_image_and_valid_json(small_set, tmp_path):
    write(small_set / "train" / "CNV" / "CNV-7-1.jpeg", b"")
    write(small_set / "train" / "CNV" / "a\nb.jpeg", b"")
    oct_folder.write_audit(oct_folder.scan(small_set), tmp_path / "deep" / "audit")
    with open(tmp_path / "deep" / "audit" / "manifest.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 13
    assert [row["problem"] for row in rows if row["file"] == "CNV-7-1.jpeg"] == ["is empty"]
    assert json.loads((tmp_path / "deep" / "audit" / "audit.json").read_text())["misnamed"] == ["train/CNV/a\nb.jpeg"]


def test_write_audit_escapes_names_that_are_not_utf8(small_set, tmp_path):
    write(small_set / "train" / "CNV" / os.fsdecode(b"\xff.jpeg"), b"")
    oct_folder.write_audit(oct_folder.scan(small_set), tmp_path / "audit")
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["misnamed"] == ["train/CNV/\\xff.jpeg"]


def test_write_audit_refuses_the_data_folder(small_set):
    audit = oct_folder.scan(small_set, decode=False)
    with pytest.raises(InputError, match="lies inside the data folder"):
        oct_folder.write_audit(audit, small_set / "audit")
    assert sorted(os.listdir(small_set)) == ["test", "train"]


def test_summary_keeps_odd_names_on_one_line(small_set):
    write(small_set / "train" / "CNV" / "a\nb.jpeg", b"")
    lines = oct_folder.summary(oct_folder.scan(small_set, decode=False)).splitlines()
    assert lines[-1] == "  'train/CNV/a\\nb.jpeg': its name does not fit CLASS-PATIENT-INDEX.jpeg"


def test_scan_of_many_files_takes_well_under_a_millisecond_each(tmp_path):
    content = jpeg_bytes()
    for split in ("train", "test"):
        first = write(tmp_path / split / "CNV" / "CNV-0-0.jpeg", content)
        for index in range(1, 2000):
            os.link(first, first.with_name(f"CNV-{index}-0.jpeg"))
    start = time.process_time()
    assert len(oct_folder.scan(tmp_path, decode=False).rows) == 4000
    # 84,495 files in 60 s on two cores leave 1.4 ms of one core's time a file
    assert time.process_time() - start < 4000 * 0.0014


# A new split


def resplit_set(tmp_path):
    """Patients 0..9 with one CNV and two NORMAL images each (patient 9: NORMAL in test); 3 and 4 share pixels."""
    root = tmp_path / "source"
    for patient in range(10):
        split = "test" if patient == 9 else "train"
        shared = 3 if patient == 4 else patient
        write(root / split / "CNV" / f"CNV-{patient}-1.jpeg", jpeg_bytes(shared))
        for index in (1, 2):
            write(root / split / "NORMAL" / f"NORMAL-{patient}-{index}.jpeg", jpeg_bytes(100 * index + patient))
    return root


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpeg"))


def test_resplit_shares_no_patient_and_keeps_every_image(tmp_path):
    source = oct_folder.scan(resplit_set(tmp_path))
    oct_folder.resplit(source, tmp_path / "out", fraction=0.2)
    train, test = (oct_folder.list_split(tmp_path / "out", split) for split in ("train", "test"))
    assert not oct_folder.leakage(train, test, pixels=True).any()
    assert len(train.paths) + len(test.paths) == 30
    assert len(test.paths) == 6  # 20% of each class: two patients, the pair 3 and 4 counting as two
    assert sorted(test.labels) == [0, 0, 1, 1, 1, 1]


def test_resplit_keeps_patients_that_share_pixels_together(tmp_path):
    source = oct_folder.scan(resplit_set(tmp_path))
    sides = set()
    for seed in range(12):
        result = oct_folder.resplit(source, tmp_path / f"out{seed}", fraction=0.3, seed=seed)
        (side,) = {row.split for row in result.rows if row.patient in ("3", "4")}
        sides.add(side)
    assert sides == {"train", "test"}  # both occur, so that the check above could fail


def test_resplit_is_the_same_for_the_same_seed(tmp_path):
    source = oct_folder.scan(resplit_set(tmp_path))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        oct_folder.resplit(source, tmp_path / name, fraction=0.2, seed=seed)
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b") != files_below(tmp_path / "c")
    assert (tmp_path / "a" / "manifest.csv").read_bytes() == (tmp_path / "b" / "manifest.csv").read_bytes()


def test_resplit_links_and_leaves_the_source_as_it_was(tmp_path):
    root = resplit_set(tmp_path)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*.jpeg")}
    oct_folder.resplit(oct_folder.scan(root), tmp_path / "out", fraction=0.2)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*.jpeg")} == before
    inodes = {path.stat().st_ino for path in (tmp_path / "out").rglob("*.jpeg")}
    assert inodes == {path.stat().st_ino for path in before}


def test_resplit_copies_where_links_are_refused(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(18, "Invalid cross-device link")

    source = oct_folder.scan(resplit_set(tmp_path))
    monkeypatch.setattr(os, "link", refuse)
    result = oct_folder.resplit(source, tmp_path / "out", fraction=0.2)
    for row in result.rows:
        assert os.stat(result.path(row)).st_nlink == 1
    assert len(files_below(tmp_path / "out")) == 30


def test_resplit_links_the_file_behind_a_link(tmp_path):
    root = resplit_set(tmp_path)
    path = root / "train" / "CNV" / "CNV-0-1.jpeg"
    path.rename(tmp_path / "elsewhere.jpeg")
    path.symlink_to(tmp_path / "elsewhere.jpeg")
    result = oct_folder.resplit(oct_folder.scan(root), tmp_path / "out", fraction=0.2)
    assert not any(os.path.islink(result.path(row)) for row in result.rows)


def test_resplit_writes_both_audits_and_leaves_out_bad_images(tmp_path):
    root = resplit_set(tmp_path)
    write(root / "train" / "CNV" / "CNV-77-1.jpeg", b"")
    oct_folder.resplit(oct_folder.scan(root), tmp_path / "out", fraction=0.2)
    new = json.loads((tmp_path / "out" / "audit.json").read_text())
    old = json.loads((tmp_path / "out" / "source_audit" / "audit.json").read_text())
    assert (new["num_images"], new["patients_in_several_splits"]["patients"]) == (30, [])
    assert [entry["file"] for entry in old["bad"]] == ["train/CNV/CNV-77-1.jpeg"]
    assert len(files_below(tmp_path / "out")) == 30


def test_resplit_keeps_both_images_of_one_name_and_drops_a_true_copy(tmp_path):
    root = resplit_set(tmp_path)
    write(root / "test" / "CNV" / "CNV-5-1.jpeg", jpeg_bytes(555))  # another image under a name that train has
    write(root / "test" / "CNV" / "CNV-6-1.jpeg", jpeg_bytes(6))  # the same image again
    oct_folder.resplit(oct_folder.scan(root), tmp_path / "out", fraction=0.2)
    names = [name.split("/")[-1] for name in files_below(tmp_path / "out")]
    assert [name for name in names if name.startswith("CNV-5-")] == ["CNV-5-1.jpeg", "CNV-5-2.jpeg"]
    assert [name for name in names if name.startswith("CNV-6-")] == ["CNV-6-1.jpeg"]


def test_resplit_refuses_a_folder_with_content_and_leaves_it(tmp_path):
    source = oct_folder.scan(resplit_set(tmp_path))
    write(tmp_path / "out" / "mine.txt", b"x")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        oct_folder.resplit(source, tmp_path / "out", fraction=0.2)
    assert os.listdir(tmp_path / "out") == ["mine.txt"]


def test_resplit_fills_an_empty_folder(tmp_path):
    (tmp_path / "out").mkdir()
    oct_folder.resplit(oct_folder.scan(resplit_set(tmp_path)), tmp_path / "out", fraction=0.2)
    assert len(files_below(tmp_path / "out")) == 30


def test_resplit_refuses_to_write_into_the_source(tmp_path):
    root = resplit_set(tmp_path)
    with pytest.raises(InputError, match="lies inside the data folder"):
        oct_folder.resplit(oct_folder.scan(root), root / "new", fraction=0.2)


def test_resplit_that_fails_leaves_nothing_behind(tmp_path):
    source = oct_folder.scan(resplit_set(tmp_path))
    os.remove(source.path(source.rows[5]))  # gone since the scan
    with pytest.raises(FileNotFoundError):
        oct_folder.resplit(source, tmp_path / "out", fraction=0.2)
    assert os.listdir(tmp_path) == ["source"]


# Archives


def make_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_tar(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_unpack_writes_the_files(tmp_path, make):
    archive = make(tmp_path / "archive", {"OCT2017 /train/CNV/CNV-1-1.jpeg": b"abc", "readme": b""})
    oct_folder.unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "OCT2017 " / "train" / "CNV" / "CNV-1-1.jpeg").read_bytes() == b"abc"
    assert (tmp_path / "out" / "readme").read_bytes() == b""


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil", "C:evil", "\\\\host\\share\\evil"]
)
def test_unpack_refuses_a_path_that_leads_outside(tmp_path, make, name):
    archive = make(tmp_path / "archive", {"fine": b"x", name: b"x"})
    with pytest.raises(InputError, match="leads outside the target folder"):
        oct_folder.unpack(archive, tmp_path / "deep" / "out")
    assert os.listdir(tmp_path / "deep") == []
    assert sorted(os.listdir(tmp_path)) == ["archive", "deep"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_unpack_refuses_links_and_devices_in_a_tar(tmp_path, kind):
    with tarfile.open(tmp_path / "archive", "w") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = kind, "/etc"
        archive.addfile(member)
    with pytest.raises(InputError, match="'link', a link or a device"):
        oct_folder.unpack(tmp_path / "archive", tmp_path / "out")
    assert os.listdir(tmp_path) == ["archive"]


def test_unpack_refuses_a_link_in_a_zip(tmp_path):
    member = zipfile.ZipInfo("link")
    member.create_system, member.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr(member, "/etc")
    with pytest.raises(InputError, match="'link', a link or a device"):
        oct_folder.unpack(tmp_path / "archive", tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize("limit", [{"max_bytes": 299}, {"max_files": 2}])
def test_unpack_stops_at_its_limits(tmp_path, make, limit):
    archive = make(tmp_path / "archive", {name: bytes(100) for name in "abc"})
    with pytest.raises(InputError, match="unpacks to more than"):
        oct_folder.unpack(archive, tmp_path / "out", **limit)
    assert os.listdir(tmp_path) == ["archive"]
    oct_folder.unpack(archive, tmp_path / "out", max_bytes=300, max_files=3)


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_unpack_of_a_damaged_archive_leaves_nothing(tmp_path, make):
    archive = make(tmp_path / "archive", {"a": os.urandom(5000), "b": os.urandom(5000)})
    archive.write_bytes(archive.read_bytes()[:6000])
    with pytest.raises(InputError, match="cannot be unpacked"):
        oct_folder.unpack(archive, tmp_path / "out")
    assert os.listdir(tmp_path) == ["archive"]


def test_unpack_refuses_a_folder_with_content(tmp_path):
    archive = make_zip(tmp_path / "archive", {"a": b"x"})
    write(tmp_path / "out" / "mine", b"x")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        oct_folder.unpack(archive, tmp_path / "out")


# Download, with a stand-in for the kaggle client on the search path


@pytest.fixture
def kaggle_home(tmp_path, monkeypatch):
    """An empty home folder, a search path that holds only bin/, and no key."""
    for name in ("KAGGLE_USERNAME", "KAGGLE_KEY", "KAGGLE_API_TOKEN", "KAGGLE_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def install_client(home, script):
    client = write(home / "bin" / "kaggle", f"#!/bin/sh\n{script}\n".encode())
    client.chmod(0o755)


def test_download_without_the_client_tells_the_three_ways(kaggle_home):
    with pytest.raises(InputError, match=r"needs the kaggle client.*three ways.*pip install kaggle.*browser.*Mendeley"):
        oct_folder.download(kaggle_home / "data")


def test_download_without_a_key_says_so(kaggle_home):
    install_client(kaggle_home, "exit 0")
    with pytest.raises(InputError, match=r"needs an API key for the kaggle client.*three ways"):
        oct_folder.download(kaggle_home / "data")


def test_download_unpacks_what_the_client_fetched(kaggle_home, monkeypatch):
    make_zip(kaggle_home / "served.zip", {"OCT2017 /train/CNV/CNV-1-1.jpeg": b"abc"})
    install_client(kaggle_home, f'echo "$@" > {kaggle_home}/arguments; cp {kaggle_home}/served.zip "$6"')
    write(kaggle_home / "home" / ".kaggle" / "kaggle.json", b"{}")
    oct_folder.download(kaggle_home / "data")
    waiting = f"{kaggle_home}/data.download"
    arguments = (kaggle_home / "arguments").read_text()
    assert arguments == f"datasets download -d paultimothymooney/kermany2018 -p {waiting}\n"
    assert files_below(kaggle_home / "data") == ["OCT2017 /train/CNV/CNV-1-1.jpeg"]
    assert not os.path.exists(waiting)


def test_download_that_fails_tells_the_three_ways(kaggle_home, monkeypatch):
    install_client(kaggle_home, "exit 3")
    monkeypatch.setenv("KAGGLE_API_TOKEN", "not a real one")
    with pytest.raises(InputError, match=r"failed with exit status 3.*three ways"):
        oct_folder.download(kaggle_home / "data")
    assert not (kaggle_home / "data").exists()


def test_download_refuses_a_folder_with_content(kaggle_home):
    write(kaggle_home / "data" / "mine", b"x")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        oct_folder.download(kaggle_home / "data")
