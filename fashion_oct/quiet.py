"""Keeps TensorFlow's start-up notes away from users. Errors and warnings always come through."""

import contextlib
import glob
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from fashion_oct import cluster

# what TensorFlow 2.21 writes before its own logging is set up, so that TF_CPP_MIN_LOG_LEVEL cannot silence it
_NOTES = re.compile(
    r"I\d{4} |\d{4}-\d\d-\d\d [\d:.]+: I |WARNING: All log messages before absl::InitializeLog|To enable the following"
)
_NO_GPU = re.compile(r"failed call to cuInit")  # told as an error where there is no GPU, which is no error
_GPU_NODES = ("/dev/nvidia*", "/dev/dxg", "/dev/nvhost*", "/dev/nvmap")


def import_tensorflow(task: cluster.Task | None = None) -> None:
    """Imports TensorFlow and looks for devices, without the notes that it writes meanwhile.

    Args:
      task: which of several workers this process is, where it may be one.

    Raises:
      InputError: several workers need tf-keras, which is not installed.
    """
    if task and task.num_workers > 1:
        cluster.use_legacy_keras()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with _filtered_stderr():
        from fashion_oct import distribution

        distribution.num_visible_gpus()


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Holds back what is written to standard error, also by C++ code, and gives it out at the end without the notes."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            lines = held.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.write("".join(line for line in lines if not _is_note(line)))
            sys.stderr.flush()


def _is_note(line: str) -> bool:
    if _NO_GPU.search(line):
        return not any(glob.glob(pattern) for pattern in _GPU_NODES)
    return bool(_NOTES.match(line))
