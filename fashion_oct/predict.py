"""Predicts the class of image files with the model of a finished run: one CSV row an image on standard output.

  python -m fashion_oct.predict --workdir=RUN FILE...

FILE is a PNG, a JPEG, or many images in one IDX (.gz or not) or .npy file. A bad file is named on standard error and
left out; the exit status is then 1.
"""

from absl import flags

from fashion_oct import options


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("workdir", None, "run folder that train wrote (required)", flag_values=flag_values)


def run(flag_values: flags.FlagValues, arguments: list[str]) -> int:
    """Predicts with the given flags."""
    workdir = options.require(flag_values, "workdir")
    options.require_arguments(arguments, "files to predict")
    from fashion_oct import prediction

    return prediction.predict_files(workdir, arguments)


def main() -> None:
    """The entry point."""
    options.run_command(run, define_flags, usage=__doc__)


if __name__ == "__main__":
    main()
