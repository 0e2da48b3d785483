"""Predicts the class of image files with the model of a finished run: one CSV row an image on standard output.

  python -m fashion_oct.predict --workdir=RUN FILE...

FILE is a PNG or a JPEG, many images in one IDX (.gz or not) or .npy file, a folder (all PNG and JPEG files below it, in
sorted order) or a quoted pattern ('scans/**/CNV-*.jpeg'). A bad file is named on standard error and left out; the exit
status is then 1. --saliency=DIR writes a Grad-CAM overlay of each image, numbered as the rows are: what in the scan
spoke for the predicted class.
"""

from absl import flags

from fashion_oct import options, quiet


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("workdir", None, "run folder that train wrote (required)", flag_values=flag_values)
    flags.DEFINE_string("saliency", None, "new folder for Grad-CAM overlays; default: none", flag_values=flag_values)


def run(flag_values: flags.FlagValues, arguments: list[str]) -> int:
    """Predicts with the given flags."""
    workdir = options.require(flag_values, "workdir")
    options.require_arguments(arguments, "files, folders or patterns to predict")
    quiet.import_tensorflow()
    from fashion_oct import prediction

    return prediction.predict_files(workdir, arguments, saliency_dir=flag_values["saliency"].value)


def main() -> None:
    """The entry point."""
    options.run_command(run, define_flags, usage=__doc__)


if __name__ == "__main__":
    main()
