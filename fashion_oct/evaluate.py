"""Writes the test report of a finished run again: evaluation.json and plots/ in its run folder.

python -m fashion_oct.evaluate --workdir=RUN
"""

from absl import flags

from fashion_oct import options, quiet


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("workdir", None, "run folder that train wrote (required)", flag_values=flag_values)
    flags.DEFINE_string("data_dir", None, "folder of the dataset; default: that of the run", flag_values=flag_values)


def run(flag_values: flags.FlagValues, arguments: list[str]) -> int:
    """Evaluates with the given flags."""
    options.refuse_arguments(arguments)
    workdir = options.require(flag_values, "workdir")
    quiet.import_tensorflow()
    from fashion_oct import evaluation

    print(evaluation.evaluate_run(workdir, data_dir=flag_values["data_dir"].value))
    return 0


def main() -> None:
    """The entry point."""
    options.run_command(run, define_flags, usage=__doc__)


if __name__ == "__main__":
    main()
