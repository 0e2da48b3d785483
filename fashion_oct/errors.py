"""The two errors that are told in one line, without a traceback."""

import subprocess


class InputError(ValueError):
    """Bad input from the user: a flag, a file or a folder.

    Its message is one line that names the value, what is allowed and the remedy. Entry points print it
    without a traceback and exit with status 2.
    """


class RunError(RuntimeError):
    """A run cannot go on: its message says why and what is kept. Entry points exit with status 1."""


def reason_of_failure(done: subprocess.CompletedProcess) -> str:
    """Returns the line in which a process that failed said why.

    Args:
      done: with its standard error, as text.
    """
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    # Keras' messages go on for several lines after the one that says what it is
    return next((line for line in reversed(lines) if "rror: " in line), lines[-1])
