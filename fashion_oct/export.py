"""Writes the model of a finished run for use elsewhere, checked on the run's test split: WORKDIR/export/

  python -m fashion_oct.export --workdir=RUN --format=savedmodel,tflite,onnx

savedmodel: JPEG or PNG files, or pixels, in; class and probabilities out. tflite: float32, and with 8-bit weights.
onnx: needs pip install 'fashion-oct[onnx]'. The last two take pixels: uint8 images of the size that the run had.
Each file is run by its own runtime and compared with Keras: size, accuracy and agreement are printed, and written to
export.json. The folder appears when all is done. The exit status is 1 if a file that is not quantized gives another
class than Keras for more than 0.1% of the images; there is no folder then. How to serve them: docs/serving.md.
"""

from typing import Any

from absl import flags

from fashion_oct import options, quiet
from fashion_oct.errors import InputError

FORMATS = ("savedmodel", "tflite", "onnx")


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    to: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_string("workdir", None, "run folder that train wrote (required)", **to)
    flags.DEFINE_string("format", "savedmodel", f"one or more of {', '.join(FORMATS)}, with commas", **to)
    flags.DEFINE_string("out", None, "new folder to write; default: WORKDIR/export", **to)
    flags.DEFINE_string("data_dir", None, "folder of the dataset; default: that of the run", **to)
    flags.DEFINE_integer("num_images", None, "test images to check with; default: all", lower_bound=1, **to)


def run(flag_values: flags.FlagValues, arguments: list[str]) -> int:
    """Exports with the given flags."""
    options.refuse_arguments(arguments)
    workdir = options.require(flag_values, "workdir")
    formats = flag_values.format.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise InputError(f"--format={unknown[0]!r}: give one or more of {', '.join(FORMATS)}, with commas")
    quiet.import_tensorflow()
    from fashion_oct import exporting

    names = ("out", "data_dir", "num_images")
    return exporting.export_run(workdir, formats, **{name: flag_values[name].value for name in names})


def main() -> None:
    """The entry point."""
    options.run_command(run, define_flags, usage=__doc__)


if __name__ == "__main__":
    main()
