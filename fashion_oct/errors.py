"""The two errors that are told in one line, without a traceback."""


class InputError(ValueError):
    """Bad input from the user: a flag, a file or a folder.

    Its message is one line that names the value, what is allowed and the remedy. Entry points print it
    without a traceback and exit with status 2.
    """


class RunError(RuntimeError):
    """A run cannot go on: its message says why and what is kept. Entry points exit with status 1."""
