"""Keeps TensorFlow's start-up notes away from users, and says in one line where a GPU is that it cannot use."""

import contextlib
import glob
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from absl import logging

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

        num_gpus = distribution.num_visible_gpus()
    nodes, is_hidden = _gpu_nodes(), os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if nodes and not num_gpus and not is_hidden:  # TensorFlow's own warning is below the level that is shown
        logging.warning(
            "this machine has a GPU (%s), but TensorFlow sees none and takes the CPU: pip install "
            "'tensorflow[and-cuda]' brings NVIDIA's libraries, CUDA_VISIBLE_DEVICES=-1 ends this warning",
            nodes[0],
        )


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


def _gpu_nodes() -> list[str]:
    return [node for pattern in _GPU_NODES for node in sorted(glob.glob(pattern))]


def _is_note(line: str) -> bool:
    if _NO_GPU.search(line):
        return not _gpu_nodes()
    return bool(_NOTES.match(line))
