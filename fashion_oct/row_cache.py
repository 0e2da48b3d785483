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
from absl import logging

_PRESENT = 1 << 32  # tells a row whose CRC-32 is 0 from one that is missing


def default_folder() -> pathlib.Path:
    """Returns $FASHION_OCT_CACHE, else fashion_oct in the user's folder for caches."""
    if folder := os.environ.get("FASHION_OCT_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fashion_oct"


class RowCache:
    """N rows of one shape and type on disk; in use, and so not evicted, until `close` or the end of the process.

    Attributes:
      rows: [N, *row_shape], a memory map; read only those that `missing` does not name.
      missing: which rows are not there: int64, ascending.
    """

    def __init__(self, folder: pathlib.Path, num_rows: int, row_shape: tuple[int, ...], dtype: np.dtype):
        """Opens the cache in `folder`, makes it if there is none, and checks every row that it has.

        Raises:
          OSError: it cannot be written, or the disk has no room for it.
        """
        self.folder = folder
        row_bytes = math.prod(row_shape) * np.dtype(dtype).itemsize
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / "lock", fcntl.LOCK_EX):  # another process may evict, or open the same cache
            is_new = not folder.exists()
            folder.mkdir(exist_ok=True)
            try:
                self._use_lock = _lock(folder / "use.lock", fcntl.LOCK_SH)
                _make_room(folder / "rows.bin", num_rows * row_bytes)
                _make_room(folder / "checksums.bin", num_rows * 8)
            except OSError:
                if is_new:
                    shutil.rmtree(folder)
                raise
            os.utime(folder)  # for eviction: this is the last use
        self.rows = np.memmap(folder / "rows.bin", dtype, "r+", shape=(num_rows, *row_shape))
        self._checksums = np.memmap(folder / "checksums.bin", np.uint64, "r+", shape=(num_rows,))
        self.missing = self._find_wrong(np.arange(num_rows))
        num_damaged = np.count_nonzero(self._checksums[self.missing])
        if num_damaged:
            logging.warning("%d rows of %s are damaged; they are computed again", num_damaged, folder)

    def _find_wrong(self, indices: np.ndarray) -> np.ndarray:
        """Returns those of the rows that are missing or damaged, on all cores: crc32 lets other threads run."""
        rows, checksums = self.rows.view(np.ndarray), self._checksums.view(np.ndarray)

        def is_wrong(part):
            return [not checksums[i] or checksums[i] != _sum(rows[i]) for i in part]

        with concurrent.futures.ThreadPoolExecutor() as pool:
            parts = pool.map(is_wrong, np.array_split(indices, 4 * (os.cpu_count() or 1)))
            return indices[np.concatenate([np.array(part, bool) for part in parts])]

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Keeps other processes from filling meanwhile; waits for one that does, and takes over what it has filled."""
        path = self.folder / "fill.lock"
        try:
            lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.info("waiting for another process that fills %s", self.folder)
            lock = _lock(path, fcntl.LOCK_EX)
        with lock:
            self.missing = self._find_wrong(self.missing)  # less, where another process has filled it meanwhile
            yield

    def write(self, indices: np.ndarray, rows: np.ndarray) -> None:
        """Stores rows and marks them as there.

        Args:
          indices: [K], must be the first K of `missing`.
          rows: [K, *row_shape].
        """
        self.rows[indices] = rows
        stored = self.rows.view(np.ndarray)
        self._checksums[indices] = [_sum(stored[i]) for i in indices]  # after the rows: a kill leaves them missing
        self.missing = self.missing[len(indices) :]

    def close(self) -> None:
        """Lets the cache go: from now on it may be evicted."""
        self._use_lock.close()


def is_complete(folder: pathlib.Path, num_rows: int) -> bool:
    """Says whether all rows of a cache were written; looks at no row, and makes nothing."""
    path = folder / "checksums.bin"
    return path.is_file() and np.count_nonzero(np.fromfile(path, np.uint64)) == num_rows


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
    return zlib.crc32(row) + _PRESENT


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
