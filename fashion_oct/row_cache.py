"""Rows of numbers on disk that are costly to compute: each computed once, checked when it is read again.

A cache is a folder with two files: rows.bin (N rows of one size) and checksums.bin (N numbers: 0 for a row that is not
there yet, else its CRC-32 + 2^32). A row counts only if its checksum is right, so a fill that was killed goes on where
it was, and a flipped byte or a short file costs just the rows that it hit. Several processes may use one cache: the
first one to come fills it, the others wait; no cache that a process uses is evicted.
"""

import concurrent.futures
import contextlib
import fcntl
import math
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator
from typing import IO

import numpy as np
import numpy.typing as npt
from absl import logging

_PRESENT = 1 << 32  # tells a row whose CRC-32 is 0 from one that is missing


def default_folder() -> pathlib.Path:
    """Returns $FASHION_OCT_CACHE, else fashion_oct in the user's folder for caches."""
    if folder := os.environ.get("FASHION_OCT_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fashion_oct"


class RowCache:
    """N rows of one shape and type on disk; in use, and so not evicted, until `close` or the end of the process.

    Reads like an array of shape [N, *row_shape] that is indexed by numbers of rows: `cache[[3, 1, 4]]`. Its files are
    read and not mapped: a damaged disk is an OSError and no SIGBUS, and other threads run meanwhile.

    Attributes:
      shape: (N, *row_shape).
      dtype: of the rows.
    """

    def __init__(self, folder: pathlib.Path, num_rows: int, row_shape: tuple[int, ...], dtype: npt.DTypeLike):
        """Opens the cache in `folder`, or makes it if there is none.

        Raises:
          OSError: it cannot be written, or the disk has no room for it.
        """
        self.folder, self.shape, self.dtype = folder, (num_rows, *row_shape), np.dtype(dtype)
        self._row_bytes = math.prod(row_shape) * self.dtype.itemsize
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / "lock", fcntl.LOCK_EX):  # another process may evict, or open the same cache
            is_new = not folder.exists()
            folder.mkdir(exist_ok=True)
            try:
                self._use_lock = _lock(folder / "use.lock", fcntl.LOCK_SH)
                _make_room(folder / "rows.bin", num_rows * self._row_bytes)
                _make_room(folder / "checksums.bin", num_rows * 8)
            except OSError:
                if is_new:
                    shutil.rmtree(folder)
                raise
            os.utime(folder)  # for eviction: this is the last use
        self._file = open(folder / "rows.bin", "r+b", buffering=0)  # noqa: SIM115
        self._checksums = np.memmap(folder / "checksums.bin", np.uint64, "r+", shape=(num_rows,)).view(np.ndarray)
        self._is_good = np.zeros(num_rows, bool)  # written, or read and found right, by this process

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return len(self) * self._row_bytes

    def __getitem__(self, indices: np.ndarray | list[int]) -> np.ndarray:
        """Returns rows, [K, *row_shape]; those that were never written hold anything."""
        rows = np.empty((len(indices), *self.shape[1:]), self.dtype)
        for index, row in zip(indices, rows.view(np.uint8).reshape(len(indices), self._row_bytes), strict=True):
            if os.preadv(self._file.fileno(), [row.data], int(index) * self._row_bytes) != self._row_bytes:
                raise OSError(f"{self.folder / 'rows.bin'} has become shorter: remove {self.folder}")
        return rows

    @property
    def missing(self) -> np.ndarray:
        """Which rows are not there, int64, ascending; the first time, every row is read."""
        return self.find_missing(np.arange(len(self)))

    def has_rows(self, indices: np.ndarray) -> np.ndarray:
        """Says for each row whether it was once written; reads none, so it may be damaged: bool [K]."""
        return self._checksums[indices] != 0

    def find_missing(self, indices: np.ndarray) -> np.ndarray:
        """Returns those of the rows that are missing or damaged; each row is read once, on all cores."""
        unknown = indices[~self._is_good[indices]]
        if not len(unknown):
            return unknown

        def is_right(part):
            return [bool(self._checksums[i]) and self._checksums[i] == _sum(self[[i]]) for i in part]

        with concurrent.futures.ThreadPoolExecutor() as pool:  # crc32 lets other threads run
            parts = pool.map(is_right, np.array_split(unknown, 4 * (os.cpu_count() or 1)))
            self._is_good[unknown] = np.concatenate([np.array(part, bool) for part in parts])
        missing = indices[~self._is_good[indices]]
        if num_damaged := np.count_nonzero(self._checksums[missing]):
            logging.warning("%d rows of %s are damaged; they are computed again", num_damaged, self.folder)
            self._checksums[missing] = 0
        return missing

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Keeps other processes from filling meanwhile; waits for one that does. Ask for `missing` inside it."""
        path = self.folder / "fill.lock"
        try:
            lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.log_first_n(logging.INFO, "waiting for another process that fills %s", 1, self.folder)
            lock = _lock(path, fcntl.LOCK_EX)
        with lock:
            yield

    def write(self, indices: np.ndarray, rows: np.ndarray) -> None:
        """Stores rows and marks them as there.

        Args:
          indices: [K].
          rows: [K, *row_shape].
        """
        rows = np.ascontiguousarray(rows, self.dtype)
        for index, row in zip(indices, rows, strict=True):
            num_bytes = os.pwrite(self._file.fileno(), row.reshape(-1).view(np.uint8), int(index) * self._row_bytes)
            if num_bytes != self._row_bytes:
                raise OSError(f"{self.folder / 'rows.bin'} cannot be written in full: is the disk full?")
        self._checksums[indices] = [_sum(row) for row in rows]  # after the rows: a kill leaves them missing
        self._is_good[indices] = True

    def close(self) -> None:
        """Lets the cache go: from now on it may be evicted."""
        self._file.close()
        self._use_lock.close()


def exists(folder: pathlib.Path) -> bool:
    """Says whether there is a cache with some rows; looks at no row, and makes nothing."""
    path = folder / "checksums.bin"
    return path.is_file() and bool(np.fromfile(path, np.uint64).any())


def evict(parent: pathlib.Path, *, limit_bytes: int) -> list[str]:
    """Removes the caches below `parent` that were used the longest ago, until the rest fits the limit.

    Returns:
      The names of those that were removed. Caches that a process uses stay, and what cannot be removed.
    """
    removed = []
    with contextlib.suppress(OSError), _lock(parent / "lock", fcntl.LOCK_EX):
        folders = [folder for folder in parent.iterdir() if (folder / "rows.bin").exists()]
        sizes = {folder: (folder / "rows.bin").stat().st_size for folder in folders}
        for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns):
            if sum(sizes.values()) <= limit_bytes:
                break
            with contextlib.suppress(OSError), _lock(folder / "use.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder)
                del sizes[folder]
                removed.append(folder.name)
    return removed


def _sum(row: np.ndarray) -> int:
    return zlib.crc32(row.data) + _PRESENT


def _make_room(path: pathlib.Path, num_bytes: int) -> None:
    """Gives the file its size and its blocks: a full disk is met here, not as a crash while rows are written."""
    with open(path, "ab") as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            if size < num_bytes:
                os.posix_fallocate(stream.fileno(), 0, num_bytes)
            os.truncate(stream.fileno(), num_bytes)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({num_bytes:,} bytes are needed)", str(path)) from error


def _lock(path: pathlib.Path, kind: int) -> IO:
    """Locks a file until the stream that it returns is closed, or the process ends."""
    stream = open(path, "ab")  # noqa: SIM115
    try:
        fcntl.flock(stream, kind)
    except BaseException:
        stream.close()
        raise
    return stream
