"""Rows of numbers on disk that are costly to compute: each computed once, checked when it is read again.

A cache is a folder with two files: rows.bin (N rows of one size) and checksums.bin (N numbers: 0 for a row that is not
there yet, else its CRC-32 + 2^32). A row counts only if its checksum is right, so a fill that was killed goes on where
it was, and a flipped byte or a short file costs just the rows that it hit. Several processes may use one cache: the
first one to come fills it, the others wait; no cache that a process uses is evicted.
"""

import contextlib
import fcntl
import math
import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Iterator

import numpy as np
from absl import logging

_PRESENT = 1 << 32  # tells a row whose CRC-32 is 0 from one that is missing


def default_folder() -> pathlib.Path:
    """Returns $FASHION_OCT_CACHE, else fashion_oct in the user's folder for caches."""
    if folder := os.environ.get("FASHION_OCT_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fashion_oct"


class RowCache:
    """N rows of one shape and type on disk.

    Attributes:
      rows: [N, *row_shape], a memory map; read only those that `missing` does not name.
      missing: which rows are not there: int64, ascending.
    """

    def __init__(self, folder: pathlib.Path, num_rows: int, row_shape: tuple[int, ...], dtype: np.dtype):
        """Opens the cache in `folder`, makes it if there is none, and checks every row that it has.

        Raises:
          OSError: it cannot be written, or the disk has no room for it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._use_lock = _Lock(folder / "use.lock", fcntl.LOCK_SH)
        row_bytes = math.prod(row_shape) * np.dtype(dtype).itemsize
        _make_room(folder / "rows.bin", num_rows * row_bytes)
        _make_room(folder / "checksums.bin", num_rows * 8)
        self.rows = np.memmap(folder / "rows.bin", dtype, "r+", shape=(num_rows, *row_shape))
        self._checksums = np.memmap(folder / "checksums.bin", np.uint64, "r+", shape=(num_rows,))
        os.utime(folder)  # for eviction: this is the last use
        self.missing = self._check()

    def _check(self) -> np.ndarray:
        wrong = [i for i in range(len(self.rows)) if not self._checksums[i] or self._checksums[i] != _sum(self.rows[i])]
        num_damaged = int(np.count_nonzero(self._checksums[wrong]))
        if num_damaged:
            logging.warning("%d rows of %s are damaged; they are computed again", num_damaged, self.folder)
        return np.array(wrong, np.int64)

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Keeps other processes from filling meanwhile; waits for one that does, and takes over what it has filled."""
        with contextlib.closing(_Lock(self.folder / "fill.lock", fcntl.LOCK_EX)) as lock:
            if lock.waited:
                self.missing = self._check()
            yield
            self.rows.flush()
            self._checksums.flush()

    def write(self, indices: np.ndarray, rows: np.ndarray) -> None:
        """Stores rows and marks them as there.

        Args:
          indices: [K], must be the first K of `missing`.
          rows: [K, *row_shape].
        """
        self.rows[indices] = rows
        for index, row in zip(indices, rows, strict=True):
            self._checksums[index] = _sum(row)
        self.missing = self.missing[len(indices) :]

    def close(self) -> None:
        """Lets the cache go: from now on it may be evicted."""
        self._use_lock.close()


def evict(parent: pathlib.Path, *, limit_bytes: int) -> list[str]:
    """Removes the caches below `parent` that were used the longest ago, until the rest fits the limit.

    Returns:
      The names of those that were removed. Caches that a process uses stay.
    """
    folders = [folder for folder in parent.iterdir() if (folder / "rows.bin").exists()] if parent.is_dir() else []
    sizes = {folder: (folder / "rows.bin").stat().st_size for folder in folders}
    removed = []
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime):
        if sum(sizes.values()) <= limit_bytes:
            break
        with contextlib.suppress(BlockingIOError), _Lock(folder / "use.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder)
            del sizes[folder]
            removed.append(folder.name)
    return removed


def _sum(row: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(row).view(np.uint8)) + _PRESENT


def _make_room(path: pathlib.Path, num_bytes: int) -> None:
    """Gives the file its full size, so that a full disk is met here and not while rows are written."""
    size = path.stat().st_size if path.exists() else 0
    if size == num_bytes:
        return
    try:
        with open(path, "ab") as stream:
            os.truncate(path, num_bytes)
            if num_bytes:
                os.posix_fallocate(stream.fileno(), 0, num_bytes)
    except OSError:
        if not size:
            path.unlink(missing_ok=True)
        raise


class _Lock:
    """A lock on a file, held until `close` or the end of the process."""

    def __init__(self, path: pathlib.Path, kind: int):
        self._stream = open(path, "ab")  # noqa: SIM115
        self.waited = False
        try:
            fcntl.flock(self._stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if kind & fcntl.LOCK_NB:
                self._stream.close()
                raise
            logging.info("waiting for another process that uses %s", path.parent)
            start = time.monotonic()
            fcntl.flock(self._stream, kind)
            logging.info("waited %.0f s", time.monotonic() - start)
            self.waited = True

    def close(self) -> None:
        self._stream.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
