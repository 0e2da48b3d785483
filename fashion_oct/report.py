"""Writes one HTML page about finished runs: settings, data, curves, test figures, where the time went.

  python -m fashion_oct.report RUN [RUN...] --out=report.html

RUN is a run folder that `train` has finished. The page holds its pictures and needs no other file and no network. With
several runs it begins with a table side by side, the best in bold. Needs no TensorFlow, so it answers at once.
"""

from absl import flags

from fashion_oct import html_report, options


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("out", "report.html", "page to write; an earlier one is replaced", flag_values=flag_values)


def run(flag_values: flags.FlagValues, arguments: list[str]) -> None:
    """Writes the page with the given flags."""
    options.require_arguments(arguments, "run folders to report on")
    print(html_report.write(arguments, options.require(flag_values, "out")))


def main() -> None:
    """The entry point."""
    options.run_command(run, define_flags, usage=__doc__)


if __name__ == "__main__":
    main()
