"""Writing files so that a crash at any byte leaves the earlier file whole."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: str = "w", **open_args: Any) -> Iterator[IO]:
    """Opens a temporary file beside `path` and renames it to `path` when the block ends without an error.

    Args:
      path: the file to write; its folder must exist.
      mode: "w" (text, UTF-8) or "wb".
      **open_args: passed to `open`, for example `newline=""` for CSV.

    Raises:
      OSError: the folder cannot be written or the disk is full; `path` is then as it was.
    """
    path = pathlib.Path(path)
    if "b" not in mode:
        open_args.setdefault("encoding", "utf-8")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, mode, **open_args) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically. NaN and infinity are refused: they are no JSON."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with replacing(path) as stream:
        stream.write(text)


def _umask() -> int:
    mask = os.umask(0)  # the only portable way to read it is to set it
    os.umask(mask)
    return mask
