"""The one error that means: what you gave me is wrong."""


class InputError(ValueError):
    """Bad input from the user: a flag, a file or a folder.

    Its message is one line that names the value, what is allowed and the remedy. Entry points print it
    without a traceback and exit with status 2.
    """
