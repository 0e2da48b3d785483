"""An OCT2017 folder: its images, its patients, what is wrong with it, and a split by patient.

The folder is laid out as its publishers' archives are: train/CLASS/CLASS-PATIENT-INDEX.jpeg, and the same under
test and val. This module holds the only parser of those names. It imports no TensorFlow; the standard library and
NumPy do for listing and checking, and Pillow (which comes with matplotlib) is needed only where pixels are compared.

  list_split   the images of one split for training and evaluation, headers checked
  leakage      which test images share a patient, or pixels, with the training split
  group_split  a class-stratified choice of whole patients
  scan         an audit of the whole folder; `report`, `summary` and `write_audit` tell it
  resplit      a patient-disjoint copy of the folder
  unpack       a .zip or .tar archive, safely; `download` fetches it first

Two kinds of files are no use and are told apart. A *bad* file is meant to be an image of the set but cannot be used
(truncated, no JPEG, in another class's folder): training stops at it or skips it, as --bad_images says. A *stray* file
is none of the set (.DS_Store, thumbnails, overlays, other names): it is left out and listed, and stops nothing.
"""

import collections
import concurrent.futures
import contextlib
import csv
import dataclasses
import errno
import functools
import hashlib
import os
import pathlib
import re
import shutil
import stat
import struct
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from fashion_oct import files
from fashion_oct.errors import InputError

SPLITS = ("train", "val", "test")

# Sides in pixels. OCT devices write B-scans of 496 to 2,048 a side. The upper bound is checked in the header, before
# any memory is taken: 8,192 x 8,192 pixels are 64 MiB of grey, and a scan 20,000 wide is a montage, not a B-scan.
MIN_SIDE, MAX_SIDE = 8, 8192
MAX_FILE_BYTES = 64 << 20  # a JPEG is smaller than its grey pixels
# Each scan takes a pass over the whole image, and ten bytes are enough for one: 64 MiB of them would take hours at the
# largest size, 100 take a second. Encoders write about ten.
MAX_SCANS = 100

WAYS_TO_GET_THE_DATA = (
    "There are three ways to get it: (1) `pip install kaggle`, save an API token from kaggle.com/settings, and run "
    "prepare with --download (or `kaggle datasets download -d paultimothymooney/kermany2018` yourself and unpack it); "
    "(2) download kaggle.com/datasets/paultimothymooney/kermany2018 in a browser and unpack it; (3) download Mendeley "
    "Data, doi 10.17632/rscbjbr9sj, and unpack it. Then pass the folder that holds train and test as --data_dir"
)

# The class may hold any character (spaces, Unicode, newlines, dashes), but not start with the dot of a hidden file.
_NAME = re.compile(r"([^.].*)-([0-9]+)-([0-9]+)\.jpe?g", re.IGNORECASE | re.DOTALL)
_NEARLY = re.compile(r".+-[0-9]+-[0-9]+", re.DOTALL)
_JUNK_FOLDERS = {"__macosx", "@eadir", "thumbnails", "thumbs"}
_NO_FIT = "its name does not fit CLASS-PATIENT-INDEX.jpeg"


# Names and folders


def parse_name(filename: str) -> tuple[str, str, int] | None:
    """Splits CLASS-PATIENT-INDEX.jpeg (or .jpg, in any case) into class, patient and index; None if it does not fit."""
    match = _NAME.fullmatch(filename)
    return (match[1], match[2], int(match[3])) if match else None


def _parse_listed(path: str) -> tuple[str, str, int]:
    """Splits the name of a file that was listed, and which therefore fits."""
    parsed = parse_name(os.path.basename(path))
    assert parsed is not None
    return parsed


def find_root(data_dir: str | os.PathLike) -> pathlib.Path:
    """Finds the folder that holds train: `data_dir` itself, or the one such folder at most two levels below it.

    Kaggle's archive unpacks to "OCT2017 /train" (with the space) and, deeper, to a second copy: the shallowest wins.

    Raises:
      InputError: there is no such folder, or there are several at the same depth.
    """
    level = [pathlib.Path(data_dir)]
    if not level[0].is_dir():
        raise InputError(f"the data folder {str(data_dir)!r} does not exist. {WAYS_TO_GET_THE_DATA}")
    for _ in range(3):
        found = [folder for folder in level if _split_folder(folder, "train")]
        if len(found) > 1:
            raise InputError(f"{str(data_dir)!r} holds several OCT folders: {_quoted(found)}; pass one as --data_dir")
        if found:
            return found[0]
        level = [folder / name for folder in level for name in _subfolders(folder)]
    raise InputError(f"{str(data_dir)!r} holds no folder train; pass the folder that holds train and test")


def class_folders(data_dir: str | os.PathLike) -> tuple[str, ...]:
    """Returns the class names: the folders of the training split, in sorted order."""
    train = _split_folder(find_root(data_dir), "train")
    assert train is not None  # by this find_root knows a root
    return tuple(_subfolders(train))


def _split_folder(root: pathlib.Path, split: str) -> pathlib.Path | None:
    return next((root / name for name in _subfolders(root) if name.strip().lower() == split), None)


def _subfolders(folder: pathlib.Path) -> list[str]:
    """Returns the sorted names of the folders in `folder`, links to folders included, hidden ones and junk not."""
    return sorted(
        entry.name
        for entry in _entries(folder)
        if not entry.name.startswith(".") and entry.name.lower() not in _JUNK_FOLDERS and os.path.isdir(entry.path)
    )


def _entries(folder: pathlib.Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} cannot be read: {error.strerror}") from error


class _Listing(NamedTuple):
    images: list[str]  # paths
    bad: list[tuple[str, str]]  # path, reason
    stray: list[tuple[str, str]]  # path, reason


def _list_class(folder: pathlib.Path, class_name: str, class_names: Iterable[str]) -> _Listing:
    """Sorts the files of one class folder by their names alone. Folders inside it are never entered."""
    listing = _Listing([], [], [])
    other_classes = {name.lower() for name in class_names} - {class_name.lower()}
    for entry in sorted(_entries(folder / class_name), key=lambda entry: entry.name):
        name, path = entry.name, entry.path
        parsed = parse_name(name)
        named_class = parsed[0].lower() if parsed else None
        if entry.is_dir(follow_symlinks=False):
            listing.stray.append((path, "it is a folder"))
        elif parsed and named_class in other_classes:
            listing.bad.append((path, f"is named {parsed[0]} but lies in the folder {class_name}"))
        elif named_class != class_name.lower():
            listing.stray.append((path, _why_stray(name)))
        else:
            listing.images.append(path)
    return listing


def _why_stray(name: str) -> str:
    if name.startswith("."):
        return "it is a hidden file"
    if not name.lower().endswith((".jpeg", ".jpg")):
        return "its name does not end in .jpeg"
    return "it is an overlay, a thumbnail or a copy, going by its name" if _NEARLY.match(name) else _NO_FIT


def _printable(path: str) -> str:
    """Returns `path` with bytes that are no UTF-8 written as \\xNN, so that JSON and CSV can hold it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _quoted(names: Iterable) -> str:
    return ", ".join(repr(_printable(str(name))) for name in names) or "nothing"


# Reading a split


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The usable images of one split, ordered by class and name, and what was left out.

    Attributes:
      paths: N paths.
      labels: int32 [N], positions in `class_names`.
      patients: N patient numbers.
      class_names: C names.
      bad: path and reason of each file that is meant to be an image of the split but cannot be used.
      stray: path of each file that is no image of the set.
    """

    paths: list[str]
    labels: np.ndarray
    patients: list[str]
    class_names: tuple[str, ...]
    bad: list[tuple[str, str]]
    stray: list[str]


def list_split(
    data_dir: str | os.PathLike,
    split: str,
    *,
    class_names: Sequence[str] | None = None,
    check_headers: bool = True,
    workers: int | None = None,
    progress: bool = True,
) -> Split:
    """Lists the images of one split and checks the first and last bytes of each.

    Args:
      data_dir: the OCT2017 folder, or one that holds it.
      split: "train", "val" or "test".
      class_names: gives the labels their order; by default the sorted class folders of the training split.
      check_headers: False trusts every file whose name fits.
      workers: threads; by default one a core.
      progress: shows a progress bar where standard error is a terminal.

    Raises:
      InputError: the split is missing, its class folders are not exactly `class_names`, or a class has no usable image.
    """
    root = find_root(data_dir)
    if not (folder := _split_folder(root, split)):
        raise InputError(f"{str(root)!r} has no folder {split!r}; it has {_quoted(_subfolders(root))}")
    names = tuple(class_names) if class_names is not None else class_folders(root)
    _check_class_folders(folder, names)
    listings = [_list_class(folder, name, names) for name in names]
    paths = [path for listing in listings for path in listing.images]
    labels = np.repeat(np.arange(len(names), dtype=np.int32), [len(listing.images) for listing in listings])  # [N]
    bad = [pair for listing in listings for pair in listing.bad]
    if check_headers:
        headers = list(_parallel(check_header, paths, workers=workers, label=split if progress else None))
        bad += [(path, header) for path, header in zip(paths, headers, strict=True) if isinstance(header, str)]
        good = [place for place, header in enumerate(headers) if not isinstance(header, str)]
        paths, labels = [paths[place] for place in good], labels[good]
    for empty in (name for label, name in enumerate(names) if label not in labels):
        raise InputError(f"{str(folder / empty)!r} holds no usable {empty}-PATIENT-INDEX.jpeg; add some or remove it")
    stray = [path for listing in listings for path, _ in listing.stray]
    return Split(paths, labels, _patients(paths), names, bad, stray)


def _patients(paths: Iterable[str]) -> list[str]:
    """Returns the patient of each image; one string object a patient, however many images."""
    known: dict[str, str] = {}
    patients = (_parse_listed(path)[1] for path in paths)
    return [known.setdefault(patient, patient) for patient in patients]


def refuse_bad(split: Split) -> None:
    """Raises InputError that names the first bad file of `split`, if it has one (--bad_images=error)."""
    if split.bad:
        path, reason = split.bad[0]
        num_images = len(split.bad) + len(split.paths)
        raise InputError(
            f"{len(split.bad)} of {num_images} images cannot be used, the first: {_quoted([path])} {reason}; "
            "repair or remove them, or leave them out with --bad_images=skip"
        )


def _check_class_folders(folder: pathlib.Path, names: tuple[str, ...]) -> None:
    found = _subfolders(folder)
    if not names or len(set(names)) < len(names):
        raise InputError(f"the class names are {_quoted(names)}; they must be the class folders, each once")
    if extra := sorted(set(found) - set(names)):
        raise InputError(
            f"{str(folder)!r} has folders that are none of the classes {_quoted(names)}: {_quoted(extra)}; the classes "
            "are the folders of train, or --labels: remove those folders, or add them there"
        )
    if missing := [name for name in names if name not in found]:
        raise InputError(f"{str(folder)!r} has no folder for {_quoted(missing)}; it has {_quoted(found)}")
    for path in (str(folder / name) for name in names):
        if _printable(path) != path:  # TensorFlow takes no other names
            raise InputError(f"the name of the folder {_quoted([path])} is not UTF-8; rename it")


def _parallel(function: Callable, items: Sequence, *, workers: int | None, label: str | None) -> Iterator:
    """Yields function(item) in order. Threads: reading, hashing and decoding release Python's lock.

    `label` heads the progress bar, which only a terminal shows; None shows none.
    """
    from tqdm import tqdm

    chunks = [items[start : start + 64] for start in range(0, len(items), 64)]
    pool = concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count())
    try:
        with tqdm(total=len(items), desc=label, unit="image", disable=None if label else True) as bar:
            for results in pool.map(lambda chunk: [function(item) for item in chunk], chunks):
                bar.update(len(results))
                yield from results
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C need not wait for the rest


# One file


class Header(NamedTuple):
    width: int
    height: int
    mode: str  # "L" or "RGB"


class _RefusedError(Exception):
    """This file cannot be used; the message is the reason."""


def check_header(path: str | os.PathLike) -> Header | str:
    """Reads a JPEG's size and colour mode from its first bytes and looks for the end marker in its last ones.

    Returns:
      The header, or, where the image cannot be used, the reason as text that follows the file's name: it cannot be
      read, is no regular file, is empty, larger than 64 MiB, no JPEG, damaged, truncated, CMYK, of more than 100 scans,
      or a side is not in 8..8192 pixels. Damage inside the image data is not looked for.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return "is no regular file"  # opening a pipe would wait for ever
        if not 0 < status.st_size <= MAX_FILE_BYTES:
            return "is empty" if not status.st_size else f"has {status.st_size} bytes; the limit is {MAX_FILE_BYTES}"
        with open(path, "rb", buffering=4096) as stream:
            header = _read_frame_header(stream)
            # Inside the image data a byte FF is followed by 00, so FF D9 can only be the end marker. It is in the last
            # bytes; only where it is not there, because of padding or for want of one, is all the data searched.
            start = stream.tell()
            for position in (max(start, status.st_size - 4096), start):
                stream.seek(position)
                if b"\xff\xd9" in stream.read(MAX_FILE_BYTES):
                    return header
            return "is truncated: it has no end marker"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except _RefusedError as error:
        return str(error)


def _read_frame_header(stream: BinaryIO) -> Header:
    """Walks the markers up to the frame header. Source: ITU-T T.81, B.1.1 and B.2.2."""
    start = stream.read(4)
    if not start.startswith(b"\xff\xd8"):
        kinds = {b"\x89PNG": "a PNG", b"GIF8": "a GIF", b"BM": "a BMP", b"II*\0": "a TIFF", b"MM\0*": "a TIFF"}
        kind = next((kind for magic, kind in kinds.items() if start.startswith(magic)), None)
        raise _RefusedError(f"is {kind}, not a JPEG; convert it" if kind else "is not a JPEG")
    stream.seek(2)
    for _ in range(1000):  # segments before the frame; a real file has about ten
        marker = stream.read(2)
        while marker == b"\xff\xff":  # fill bytes
            marker = marker[1:] + stream.read(1)
        size = stream.read(2)
        if len(size) < 2:
            raise _RefusedError("is truncated: it ends inside its header")
        code, num_bytes = marker[1], int.from_bytes(size, "big")
        # D9, DA: the image begins or ends without a frame. The others have no size: a decoder would go on right after
        # them, and could find another frame than this walk does.
        if marker[0] != 0xFF or code < 0x02 or 0xD0 <= code <= 0xDA or num_bytes < 2:
            break
        if 0xC0 <= code <= 0xCF and code not in (0xC4, 0xC8, 0xCC):
            header = _check_frame(code, stream.read(6))
            if code == 0xC2 or header.mode == "RGB":  # else there can only be one scan
                _check_scans(stream)
            return header
        stream.seek(num_bytes - 2, os.SEEK_CUR)
    raise _RefusedError("has a damaged header")


def _check_scans(stream: BinaryIO) -> None:
    start = stream.tell()
    num_scans = stream.read(MAX_FILE_BYTES).count(b"\xff\xda")
    if num_scans > MAX_SCANS:
        raise _RefusedError(f"has {num_scans} scans; the limit is {MAX_SCANS}")
    stream.seek(start)


def _check_frame(code: int, frame: bytes) -> Header:
    if len(frame) < 6:
        raise _RefusedError("is truncated: it ends inside its header")
    precision, height, width, num_components = struct.unpack(">BHHB", frame)
    if code > 0xC2 or precision != 8:  # C0 baseline, C1 extended, C2 progressive
        raise _RefusedError("is a JPEG of a kind that common decoders do not read (lossless, arithmetic or 12 bits)")
    if num_components not in (1, 3):
        kind = "CMYK" if num_components == 4 else f"of {num_components} colour components"
        raise _RefusedError(f"is {kind}; convert it to grey or RGB")
    if not (MIN_SIDE <= width <= MAX_SIDE and MIN_SIDE <= height <= MAX_SIDE):
        raise _RefusedError(f"is {width}x{height} pixels; each side must be {MIN_SIDE} to {MAX_SIDE}")
    return Header(width, height, "L" if num_components == 1 else "RGB")


def _pixel_sha256(path: str) -> bytes:
    """Decodes a JPEG to grey and hashes its size and pixels.

    libjpeg, and so every program that uses it, fills up image data that is damaged or ends early without an error;
    such an image counts as decoded.

    Raises:
      _RefusedError: it does not decode.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG"]) as image:
            image.draft("L", None)  # colour scans: the decoder returns their luma
            grey = image.convert("L")
    except Exception as error:  # Pillow raises many kinds
        raise _RefusedError(f"does not decode: {error}") from error
    digest = hashlib.sha256(f"{grey.width}x{grey.height}:".encode())
    digest.update(grey.tobytes())
    return digest.digest()


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise InputError(
            "comparing pixels needs Pillow, which is missing: pip install 'fashion-oct[report]', or use --nodecode"
        ) from error


# Leakage and splits by patient


def leakage(train: Split, test: Split, *, pixels: bool = False, workers: int | None = None) -> np.ndarray:
    """Marks the test images whose patient, or with `pixels` whose grey pixels, are in the training split too.

    With `pixels` every image of both splits is decoded once: about a millisecond an image and core.

    Returns:
      bool [N], in the order of `test.paths`.

    Raises:
      InputError: `pixels`, and Pillow is missing.
    """
    known = set(train.patients)
    leaks = np.array([patient in known for patient in test.patients], bool)
    if not pixels:
        return leaks
    _require_pillow()

    def hashes(paths: list[str], label: str) -> Iterator[bytes | None]:
        return _parallel(_pixel_sha256_or_none, paths, workers=workers, label=label)

    seen = set(hashes(train.paths, "train pixels")) - {None}
    return leaks | np.array([pixels in seen for pixels in hashes(test.paths, "test pixels")], bool)


def _pixel_sha256_or_none(path: str) -> bytes | None:
    with contextlib.suppress(_RefusedError):
        return _pixel_sha256(path)
    return None


def link_patients(patients: Sequence[str], pixel_hashes: Sequence[bytes]) -> list[str]:
    """Joins patients that share an image: returns for each image the first patient number of its joined patients.

    Args:
      patients: N patient numbers.
      pixel_hashes: N hashes; an empty one matches no other.
    """
    parent = {patient: patient for patient in patients}

    def find(patient: str) -> str:
        while parent[patient] != patient:
            parent[patient] = patient = parent[parent[patient]]
        return patient

    owner: dict[bytes, str] = {}
    for patient, pixels in zip(patients, pixel_hashes, strict=True):
        if pixels:
            first, second = sorted((find(patient), find(owner.setdefault(pixels, patient))))
            parent[second] = first
    return [find(patient) for patient in patients]


def group_split(groups: npt.ArrayLike, labels: npt.ArrayLike, *, fraction: float, seed: int = 0) -> np.ndarray:
    """Chooses whole groups that hold about `fraction` of the images of each class, at least one and never all.

    Groups come in an order drawn by the seed; each is taken if that brings the held-out share of its classes nearer
    to `fraction`. The order hashes seed and group, so it is the same on every machine and NumPy version.

    Args:
      groups: [N], the group (patient) of each image.
      labels: [N], the class of each image: numbers or names.
      fraction: the share of images to hold out, in (0, 1).
      seed: another seed, another choice.

    Returns:
      bool [N]: True where an image is held out.

    Raises:
      InputError: `fraction` is out of range, or a class has too few groups to be on both sides.
    """
    if not 0 < fraction < 1:
        raise InputError(f"the fraction to hold out is {fraction}; it must lie between 0 and 1, such as 0.2")
    names, group_of = np.unique(np.asarray(groups).astype(str), return_inverse=True)  # [G], [N]
    classes, label_of = np.unique(np.asarray(labels), return_inverse=True)  # [C], [N]
    counts = np.zeros((len(names), len(classes)), np.int64)
    np.add.at(counts, (group_of, label_of), 1)  # [G, C] images
    order = sorted(range(len(names)), key=lambda g: hashlib.sha256(f"{seed}:{names[g]}".encode()).digest())

    held = np.zeros(len(names), bool)
    excess = np.full(len(classes), -fraction)  # [C] held-out share minus the wanted one
    shares = counts / counts.sum(0)  # [G, C]
    for group in order:
        if np.sum((excess + shares[group]) ** 2) < np.sum(excess**2):
            held[group] = True
            excess += shares[group]
    _fill_both_sides(held, counts, order)
    for side in (held, ~held):
        if not counts[side].any(0).all():
            short = classes[counts[side].any(0).argmin()]
            raise InputError(f"class {short} has too few patients to be on both sides of a split by patient")
    return held[group_of]


def _fill_both_sides(held: np.ndarray, counts: np.ndarray, order: Sequence[int]) -> None:
    """Where a class has no group on one side, moves its group with the fewest images there, in place."""
    for label in range(counts.shape[1]):
        members = [group for group in order if counts[group, label]]
        for side in (True, False):
            if len(members) > 1 and not (held[members] == side).any():
                held[min(members, key=lambda group: counts[group].sum())] = side


# The audit


class Row(NamedTuple):
    """One image of the folder. Hashes are SHA-256 digests, empty where they were not computed."""

    split: str
    class_name: str
    file: str
    patient: str
    num_bytes: int
    width: int
    height: int
    mode: str
    sha256: bytes
    pixel_sha256: bytes
    problem: str  # why the image cannot be used, or ""


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
    """What `scan` found: a row an image (bad ones included), path and reason of each stray file, gaps in the layout."""

    root: pathlib.Path
    folders: dict[str, pathlib.Path]  # of the splits
    rows: list[Row]
    stray: list[tuple[str, str]]
    gaps: list[str]
    has_pixels: bool

    def path(self, row: Row) -> str:
        return os.path.join(self.folders[row.split], row.class_name, row.file)


def scan(
    data_dir: str | os.PathLike, *, decode: bool = True, workers: int | None = None, progress: bool = True
) -> Audit:
    """Reads every file of an OCT2017 folder once: header, SHA-256 of its bytes, and with `decode` of its grey pixels.

    Raises:
      InputError: there is no such folder, or `decode` and Pillow is missing.
    """
    if decode:
        _require_pillow()
    root = find_root(data_dir)
    folders = {split: folder for split in SPLITS if (folder := _split_folder(root, split))}
    classes = {split: _subfolders(folder) for split, folder in folders.items()}
    class_names = sorted(set().union(*classes.values()))
    items = []  # (split, class, path, reason)
    stray = [pair for folder in sorted({pathlib.Path(data_dir), root}) for pair in _top_strays(folder, is_split=False)]
    for split, folder in folders.items():
        stray += _top_strays(folder, is_split=True)
        for name in classes[split]:
            listing = _list_class(folder, name, class_names)
            items += [(split, name, path, "") for path in listing.images]
            items += [(split, name, *pair) for pair in listing.bad]
            stray += listing.stray
    label = "decode" if decode else "read"
    inspect = functools.partial(_inspect, decode=decode)
    rows = list(_parallel(inspect, items, workers=workers, label=label if progress else None))
    usable = {(row.split, row.class_name) for row in rows if not row.problem}
    gaps = [f"there is no folder {split}" for split in ("train", "test") if split not in folders]
    gaps += [
        f"{split} has no usable image of {name}"
        for split in folders
        for name in class_names
        if (split, name) not in usable
    ]
    return Audit(root, folders, rows, stray, gaps, has_pixels=decode)


def _top_strays(folder: pathlib.Path, *, is_split: bool) -> list[tuple[str, str]]:
    """Returns hidden files and junk folders, and in a split's folder every file: images lie in class folders."""
    kept = set(_subfolders(folder))
    hidden = [entry for entry in _entries(folder) if entry.name not in kept]
    strays = []
    for entry in sorted(hidden, key=lambda entry: entry.name):
        if is_split or entry.name.startswith(".") or entry.name.lower() in _JUNK_FOLDERS:
            strays.append((entry.path, "it lies outside the class folders"))
    return strays


def _inspect(item: tuple[str, str, str, str], *, decode: bool) -> Row:
    split, class_name, path, problem = item
    name = os.path.basename(path)
    patient = _parse_listed(name)[1]
    header = problem or check_header(path)
    try:
        if isinstance(header, str):
            raise _RefusedError(header)
        with open(path, "rb") as stream:
            content = stream.read(MAX_FILE_BYTES)
        pixels = _pixel_sha256(path) if decode else b""
    except (OSError, _RefusedError) as error:
        return Row(split, class_name, name, patient, 0, 0, 0, "", b"", b"", str(error))
    digest = hashlib.sha256(content).digest()
    return Row(split, class_name, name, patient, len(content), *header, digest, pixels, "")


def report(audit: Audit) -> dict:
    """Returns the content of audit.json. Files are named relative to the folder; images by SPLIT/CLASS/FILE."""
    usable = [row for row in audit.rows if not row.problem]
    misnamed = [_relative(audit, path) for path, reason in audit.stray if reason == _NO_FIT]
    misnamed += [_name(row) for row in audit.rows if row.problem.startswith("is named ")]
    return {
        "folder": _printable(str(audit.root)),
        "num_images": len(audit.rows),
        "num_usable": len(usable),
        "gaps": audit.gaps,
        "counts": {
            split: dict(sorted(_counts(row.class_name for row in usable if row.split == split).items()))
            for split in audit.folders
        },
        "num_patients": {split: len({row.patient for row in usable if row.split == split}) for split in audit.folders},
        "modes": _counts(row.mode for row in usable),
        "sizes": _counts(f"{row.width}x{row.height}" for row in usable),
        "bad": [{"file": _name(row), "reason": row.problem} for row in audit.rows if row.problem],
        "misnamed": misnamed,
        "stray": [{"file": _relative(audit, path), "reason": reason} for path, reason in audit.stray],
        "byte_identical": _duplicates(usable, lambda row: row.sha256),
        "pixel_identical": _duplicates(usable, lambda row: row.pixel_sha256) if audit.has_pixels else None,
        "patients_in_several_splits": _shared_patients(usable),
    }


def write_audit(audit: Audit, folder: str | os.PathLike) -> None:
    """Writes audit.json and manifest.csv (one row an image; hashes in hexadecimal) into `folder`, which is made.

    Raises:
      InputError: `folder` lies inside the audited folder, which is never written to.
    """
    _refuse_inside(folder, audit.root)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "audit.json", report(audit))
    with files.replacing(folder / "manifest.csv", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in audit.rows:
            writer.writerow(
                cell.hex() if isinstance(cell, bytes) else _printable(cell) if isinstance(cell, str) else cell
                for cell in row
            )


def summary(audit: Audit) -> str:
    """Tells `report` in a few lines of plain words."""
    found = report(audit)
    lines = [f"{found['folder']}: {found['num_images']:,} images, {found['num_usable']:,} of them usable"]
    for split, counts in found["counts"].items():
        by_class = ", ".join(f"{_one_line(name)} {number:,}" for name, number in counts.items())
        lines.append(f"  {split}: {by_class or 'nothing'} ({found['num_patients'][split]:,} patients)")
    lines += [f"  {_one_line(gap)}" for gap in found["gaps"]]
    lines.append("Colour modes: " + _most_common(found["modes"]) + "; sizes: " + _most_common(found["sizes"]))
    for kind in ("byte", "pixel"):
        if same := found[f"{kind}_identical"]:
            lines.append(
                f"{kind.capitalize()}-identical: {same['num_groups']:,} groups of {same['num_images']:,} images; "
                f"{same['num_groups_across_splits']:,} reach across splits, "
                f"{same['num_groups_of_several_patients']:,} stand under several patients"
            )
    shared = found["patients_in_several_splits"]
    lines.append(
        f"Patients in more than one split: {len(shared['patients']):,}; their images are "
        f"{shared['num_test_images']:,} of the test images ({shared['share_of_test_images']:.1%})"
    )
    for title, entries in (("Bad files", found["bad"]), ("Stray files", found["stray"])):
        lines.append(f"{title}: {len(entries):,}" + (", such as" if entries else ""))
        lines += [f"  {_one_line(entry['file'])}: {entry['reason']}" for entry in entries[:5]]
    return "\n".join(lines)


def _name(row: Row) -> str:
    return _printable(f"{row.split}/{row.class_name}/{row.file}")


def _relative(audit: Audit, path: str) -> str:
    return _printable(os.path.relpath(path, audit.root))


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(collections.Counter(values).most_common())


def _most_common(counts: dict[str, int]) -> str:
    told = ", ".join(f"{name} {number:,}" for name, number in list(counts.items())[:4])
    return told + (f" and {len(counts) - 4} others" if len(counts) > 4 else "")


def _duplicates(rows: Iterable[Row], key: Callable[[Row], bytes]) -> dict:
    by_key = collections.defaultdict(list)
    for row in rows:
        by_key[key(row)].append(row)
    groups = [group for group in by_key.values() if len(group) > 1]
    return {
        "num_groups": len(groups),
        "num_images": sum(map(len, groups)),
        "num_groups_across_splits": sum(len({row.split for row in group}) > 1 for group in groups),
        "num_groups_of_several_patients": sum(len({row.patient for row in group}) > 1 for group in groups),
        "groups": [[_name(row) for row in group] for group in groups],
    }


def _shared_patients(rows: Sequence[Row]) -> dict:
    splits_of = collections.defaultdict(set)
    for row in rows:
        splits_of[row.patient].add(row.split)
    tests = [row for row in rows if row.split == "test"]
    num_shared = sum(len(splits_of[row.patient]) > 1 for row in tests)
    return {
        "patients": sorted(patient for patient, splits in splits_of.items() if len(splits) > 1),
        "num_test_images": num_shared,
        "share_of_test_images": num_shared / len(tests) if tests else 0.0,
    }


# A new split


def resplit(audit: Audit, out: str | os.PathLike, *, fraction: float, seed: int = 0) -> Audit:
    """Writes a copy of the folder whose test split, `fraction` of each class, shares no patient with its train split.

    All usable images of all splits are pooled. Patients that share pixel-identical images stay together, and so do the
    images of one patient under several classes. Files are hard links where the file system allows it, else copies; the
    source is only read. `out` also gets audit.json and manifest.csv of the new split and, in source_audit, of the
    source. It is complete or not there.

    Args:
      audit: from `scan` with `decode`.
      out: a folder that does not exist or is empty, outside the source.
      fraction: the share of the images in test, in (0, 1).
      seed: another seed, another split.

    Returns:
      The audit of the new folder.

    Raises:
      InputError: `out` cannot be used, or a class has too few patients.
    """
    if not audit.has_pixels:
        raise ValueError("resplit needs an audit with pixels; call scan(decode=True)")
    check_resplit(audit.root, out, fraction=fraction)
    rows = [row for row in audit.rows if not row.problem]
    patients = link_patients([row.patient for row in rows], [row.pixel_sha256 for row in rows])
    in_test = group_split(patients, [row.class_name for row in rows], fraction=fraction, seed=seed)
    moved = _without_clashes(
        (row, row._replace(split="test" if is_test else "train")) for row, is_test in zip(rows, in_test, strict=True)
    )
    with _new_folder(out) as folder:
        for split, class_name in {(new.split, new.class_name) for _, new in moved}:
            (folder / split / class_name).mkdir(parents=True)
        for old, new in moved:
            _link(audit.path(old), folder / new.split / new.class_name / new.file)
        root = pathlib.Path(out)
        folders = {split: root / split for split in ("train", "test")}
        result = Audit(root, folders, [new for _, new in moved], [], [], has_pixels=True)
        write_audit(result, folder)
        write_audit(audit, folder / "source_audit")
    return result


def check_resplit(root: pathlib.Path, out: str | os.PathLike, *, fraction: float) -> None:
    """Raises InputError where `resplit` would, as far as that is known before the folder is scanned."""
    if not 0 < fraction < 1:
        raise InputError(f"the fraction to hold out is {fraction}; it must lie between 0 and 1, such as 0.2")
    _refuse_inside(out, root)
    _refuse_existing(out)


def _without_clashes(pairs: Iterable[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """Gives a free index to an image whose name another one took, and drops it if both show the same pixels.

    Two splits may each hold a CNV-1-1.jpeg. Upper case counts as lower case, for file systems where it is.
    """
    kept = []
    taken: dict[tuple[str, str, str], bytes] = {}
    for old, new in pairs:
        file = new.file
        class_name, patient, index = _parse_listed(file)
        while (key := (new.split, new.class_name, file.lower())) in taken and taken[key] != new.pixel_sha256:
            index += 1
            file = f"{class_name}-{patient}-{index}.jpeg"
        if key not in taken:
            taken[key] = new.pixel_sha256
            kept.append((old, new._replace(file=file)))
    return kept


def _link(source: str, target: pathlib.Path) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, one without hard links, or a source that is not ours to link
        shutil.copyfile(source, target)


def _refuse_inside(out: str | os.PathLike, source: pathlib.Path) -> None:
    if pathlib.Path(out).resolve().is_relative_to(source.resolve()):
        raise InputError(f"--out={str(out)!r} lies inside the data folder, which is never written to; choose another")


def _refuse_existing(target: str | os.PathLike) -> None:
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise InputError(f"{str(target)!r} exists and is not an empty folder; choose another or remove it")


@contextlib.contextmanager
def _new_folder(target: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Gives a folder to fill that becomes `target` when the block ends without an error, and vanishes otherwise."""
    _refuse_existing(target)
    target = pathlib.Path(target).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name[:80]}.", dir=target.parent) as temporary:
        folder = pathlib.Path(temporary) / "new"
        folder.mkdir()
        yield folder
        if target.is_dir():
            target.rmdir()
        folder.rename(target)


# Getting the data


def download(target: str | os.PathLike) -> None:
    """Fetches the Kaggle archive through the kaggle client and unpacks it into `target`, a new folder.

    The archive (about 11 GB) waits in TARGET.download and is removed once it is unpacked, so that a second try need
    not fetch it again.

    Raises:
      InputError: `target` exists, or the client or its key is missing or does not work; it tells the ways to the data.
    """
    _refuse_existing(target)
    client = shutil.which("kaggle")
    if client is None or not _has_kaggle_key():
        missing = "an API key for the kaggle client" if client else "the kaggle client"
        raise InputError(f"--download needs {missing}, which was not found. {WAYS_TO_GET_THE_DATA}")
    waiting = pathlib.Path(f"{os.fspath(target).rstrip(os.sep)}.download")
    waiting.mkdir(parents=True, exist_ok=True)
    command = [client, "datasets", "download", "-d", "paultimothymooney/kermany2018", "-p", str(waiting)]
    status = subprocess.run(command, check=False).returncode
    archives = sorted(waiting.glob("*.zip"))
    if status or not archives:
        raise InputError(f"`{' '.join(command)}` failed with exit status {status}. {WAYS_TO_GET_THE_DATA}")
    unpack(archives[0], target)
    shutil.rmtree(waiting)


def _has_kaggle_key() -> bool:
    if {"KAGGLE_USERNAME", "KAGGLE_KEY"} <= os.environ.keys() or "KAGGLE_API_TOKEN" in os.environ:
        return True
    home = pathlib.Path.home()
    folders = [os.environ.get("KAGGLE_CONFIG_DIR"), home / ".kaggle", home / ".config" / "kaggle"]
    places = [pathlib.Path(folder) / name for folder in folders if folder for name in ("kaggle.json", "access_token")]
    return any(place.is_file() for place in places)


_MAX_RATIO = 100  # of what an archive unpacks to, to its own size; JPEGs hardly shrink
_MAX_TAR_HEADER_BYTES = 1 << 20  # of a long name; the system takes names of 4 KiB
# one name is a file and a folder, or no file can have it
_BAD_NAME_ERRORS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


def unpack(
    archive: str | os.PathLike, target: str | os.PathLike, *, max_bytes: int = 64 << 30, max_files: int = 1_000_000
) -> None:
    """Unpacks a .zip or .tar (plain or compressed) into the new folder `target`: wholly, or not at all.

    Raises:
      InputError: `target` exists and is not empty; the archive is damaged or neither kind; it holds a link, a device or
        a path that leads outside; or it unpacks to more than `max_bytes`, 100 times its own size, or `max_files`, the
        folders counted too (the set has 11 GB).
    """
    max_bytes = min(max_bytes, _MAX_RATIO * os.path.getsize(archive))
    num_bytes = num_files = 0
    with _new_folder(target) as folder:
        try:
            for name, size, content in _members(archive):
                num_bytes, num_files = num_bytes + size, num_files + 1
                if size < 0:
                    raise InputError(f"the archive holds {name!r} of {size} bytes")
                if num_bytes > max_bytes or num_files > max_files:
                    raise InputError(f"{str(archive)!r} unpacks to more than {max_bytes} bytes or {max_files} files")
                if content is not None:
                    path = _path_inside(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "wb") as stream:
                        shutil.copyfileobj(content, stream)
        except Exception as error:  # the standard library raises many kinds where an archive is damaged
            of_the_system = isinstance(error, OSError) and error.errno not in (None, *_BAD_NAME_ERRORS)  # disk full
            if isinstance(error, InputError) or of_the_system:
                raise
            raise InputError(f"the archive {str(archive)!r} cannot be unpacked: {error}; fetch it again") from error


def _members(archive: str | os.PathLike) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    """Yields name, size in bytes and content of each file of the archive, and of folders the name, 0 and None.

    Raises:
      InputError: there is something else in it.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for member in opened.infolist():
                kind = stat.S_IFMT(member.external_attr >> 16)
                if member.is_dir():
                    yield member.filename, 0, None
                    continue
                if kind not in (0, stat.S_IFREG):  # 0: written by a system without such modes
                    raise InputError(
                        f"the archive holds {member.filename!r}, a link or a device; only files are allowed"
                    )
                with opened.open(member) as content:
                    yield member.filename, member.file_size, content
        return
    with tarfile.open(archive, tarinfo=_TarMember) as tar:
        for entry in tar:
            if entry.isfile():
                yield entry.name, entry.size, tar.extractfile(entry)
            elif entry.isdir():
                yield entry.name, 0, None
            else:
                raise InputError(f"the archive holds {entry.name!r}, a link or a device; only files are allowed")


class _TarMember(tarfile.TarInfo):
    """Refuses a header that takes much memory: tarfile reads what is no file, such as a long name, as a whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_TarMember":
        member = super().frombuf(buf, encoding, errors)
        is_file = member.isreg() and member.type != tarfile.GNUTYPE_SPARSE
        if member.size < 0 or (member.size > _MAX_TAR_HEADER_BYTES and not is_file):
            raise InputError(f"the archive holds {member.name!r} of {member.size} bytes, which is no plain file")
        return member


def _path_inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    path = pathlib.PureWindowsPath(name)  # takes / and \ as separators, and knows drives: the strictest reading
    if path.drive or path.root or ".." in path.parts or not path.parts:
        raise InputError(f"the archive holds {name!r}, which leads outside the target folder; it was not unpacked")
    return folder.joinpath(*path.parts)
