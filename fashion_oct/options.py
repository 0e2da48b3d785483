"""The commands' shared flags, the frozen `Config` that they become, and how a command is run.

Imports no TensorFlow: `--help` and every flag error answer at once.
"""

import dataclasses
import logging as std_logging
import math
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from absl import flags, logging

from fashion_oct import cluster
from fashion_oct.errors import InputError, RunError

MODELS = ("convnet", "vgg16")
DATASETS = ("fashion_mnist", "oct2017")
LR_SCALINGS = ("none", "sqrt", "linear")
PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")

# What a flag that was not given means, by model. The recipe of vgg16 is configs/oct_vgg16.flags.
MODEL_DEFAULTS = {
    "convnet": {
        "weights": "none",
        "dataset": "fashion_mnist",
        "per_replica_batch_size": 512,
        "reference_batch_size": 512,
        "epochs": 5,
        "augment": False,
        "learning_rate": 1e-3,
        "lr_schedule": "constant",
        "warmup_epochs": 0.0,
    },
    "vgg16": {
        "weights": "imagenet",
        "dataset": "oct2017",
        "per_replica_batch_size": 64,
        "reference_batch_size": 64,
        "epochs": 10,
        "augment": True,
        "learning_rate": 2e-4,
        "lr_schedule": "cosine",
        "warmup_epochs": 1.0,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a training run, checked. `None` means: decided by the machine (see each flag's help)."""

    model: str = "convnet"
    dataset: str = "fashion_mnist"
    data_dir: str | None = None
    workdir: str | None = None
    weights: str = "none"
    input_scaling: str = "imagenet"
    head: str = "pooled"
    labels: str | None = None
    image_size: int = 224
    bad_images: str = "error"
    cache: str = "none"
    feature_cache: str = "auto"
    cache_dir: str | None = None
    cache_limit_gb: float = 100.0
    num_gpus: int | None = None
    virtual_devices: int | None = None
    cluster: str = "auto"
    data_service: str | None = None
    per_replica_batch_size: int | None = 512
    global_batch_size: int | None = None
    epochs: int = 5
    steps: int | None = None
    learning_rate: float = 1e-3
    lr_scaling: str = "none"
    reference_batch_size: int | None = None
    lr_schedule: str = "constant"
    warmup_epochs: float = 0.0
    augment: bool = False
    validation_fraction: float = 0.0
    precision: str = "auto"
    steps_per_execution: int | None = None
    jit_compile: bool = False
    num_discarded_steps: int = 1
    seed: int = 0
    deterministic: bool = False
    profile: int | None = None
    tensorboard: bool = False
    checkpoint_steps: int | None = None
    keep_checkpoints: int = 2
    on_nan: str = "stop"

    def __post_init__(self):
        """Checks what no single flag can know."""
        if self.model == "convnet" and self.weights != "none":
            raise InputError(f"--weights={self.weights}: there are none for --model=convnet, give --weights=none")
        if self.feature_cache == "on" and self.model == "convnet":
            raise InputError("--feature_cache=on, but --model=convnet has no frozen prefix: give --feature_cache=off")
        if self.per_replica_batch_size is not None and self.global_batch_size is not None:
            raise InputError(
                f"--per_replica_batch_size={self.per_replica_batch_size} and "
                f"--global_batch_size={self.global_batch_size} were both given: give one of the two"
            )
        if self.num_gpus is not None and self.virtual_devices is not None:
            raise InputError(
                f"--num_gpus={self.num_gpus} and --virtual_devices={self.virtual_devices} were both given: "
                "GPUs or virtual CPU devices, give one of the two"
            )

        if self.data_service is not None:
            self._check_data_service(self.data_service)

    def _check_data_service(self, address: str) -> None:
        given = f"--data_service={address}"
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not (port.isdecimal() and 0 < int(port) < 65536):
            raise InputError(f"{given}: give the dispatcher as HOST:PORT, such as --data_service=localhost:5050")
        if self.dataset == "fashion_mnist":
            raise InputError(f"{given}, but fashion_mnist has nothing to decode: leave the flag out")
        if self.cache != "none":
            raise InputError(f"{given}, but --cache={self.cache} decodes here: give one of the two")

    def to_flags(self) -> str:
        """Returns a flagfile that repeats the run (in a new workdir)."""
        lines = []
        for name, value in dataclasses.asdict(self).items():
            if value is None or name == "workdir":
                continue
            lines.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
        return "\n".join(lines) + "\n"


def define_train_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of a training run; their defaults by model are in `MODEL_DEFAULTS`."""
    add = _Definer(flag_values)
    add.enum("model", "convnet", MODELS, "the network to train")
    add.enum("dataset", None, DATASETS, "default: fashion_mnist for convnet, oct2017 for vgg16")
    add.string("data_dir", None, "folder of the dataset; default: looked for in the usual places")
    add.string("workdir", None, "run folder to write; default: runs/DATASET_MODEL_TIME")
    add.string("weights", None, "imagenet, none, or a .h5 file; default: imagenet for vgg16, none for convnet")
    add.string("labels", None, "oct2017: class names in the order of the labels, with commas; default: sorted folders")
    add.integer("image_size", 224, "oct2017: pixels a side that images are resized to", low=32, high=2048)
    add.enum("input_scaling", "imagenet", ("imagenet", "unit"), "vgg16: minus ImageNet's mean, or [0, 1]")
    add.enum("head", "pooled", ("pooled", "flatten"), "vgg16: what stands between the last block and the softmax")
    add.enum(
        "bad_images", "error", ("error", "skip"), "files that cannot be used: stop before the first step, or go on"
    )
    add.enum("cache", "none", ("none", "memory", "disk"), "where decoded images are kept, of datasets that are files")
    add.enum("feature_cache", "auto", ("auto", "on", "off"), "keep the frozen prefix's output; auto: where it pays")
    add.string("cache_dir", None, "folder of both caches; default: $FASHION_OCT_CACHE or ~/.cache/fashion_oct")
    add.number("cache_limit_gb", 100.0, "gigabytes that caches may take; the longest unused go first", low=0.0)
    add.integer("num_gpus", None, "GPUs to use, 0 for the CPU; default: every visible GPU, else the CPU", low=0)
    add.integer("virtual_devices", None, "logical CPU devices to mirror over, to try replicas without GPUs", low=1)
    add.enum(
        "cluster", "auto", cluster.SOURCES, "who names the workers; auto: TF_CONFIG if it is set, else there is one"
    )
    add.string(
        "data_service", None, "HOST:PORT of a tf.data service whose workers decode training images; default: none"
    )
    add.integer("per_replica_batch_size", None, "images a replica and step; default: 512 convnet, 64 vgg16", low=1)
    add.integer("global_batch_size", None, "images a step over all replicas, instead of the former", low=1)
    add.integer("epochs", None, "passes over the training split; default: 5 convnet, 10 vgg16", low=1)
    add.integer("steps", None, "stop after this many steps, whatever --epochs says", low=1)
    add.number("learning_rate", None, "peak learning rate of Adam; default: 1e-3 convnet, 2e-4 vgg16", low=1e-12)
    add.enum(
        "lr_scaling",
        "none",
        LR_SCALINGS,
        "multiply the rate by (global batch / reference batch) or its root",
    )
    add.integer("reference_batch_size", None, "global batch of --learning_rate; default: 512 convnet, 64 vgg16", low=1)
    add.enum(
        "lr_schedule",
        None,
        ("constant", "cosine"),
        "after the LR warm-up; default: constant convnet, cosine vgg16",
    )
    add.number("warmup_epochs", None, "epochs of LR warm-up, linear from 0; default: 0 convnet, 1 vgg16", low=0.0)
    add.boolean("augment", None, "flip training images left to right at random; default: only for vgg16")
    add.number("validation_fraction", 0.0, "share of the training split held out for validation", low=0.0, high=0.9)
    add.enum("precision", "auto", PRECISIONS, "auto: the device's fastest native one")
    add.integer("steps_per_execution", None, "steps in one call of the train function; default: 1 on CPUs", low=1)
    add.boolean("jit_compile", False, "compile the train function with XLA (slower on CPUs)")
    add.integer("num_discarded_steps", 1, "first steps left out of the timing (the first one traces)", low=0)
    add.integer("seed", 0, "seed of weights, shuffling and augmentation", low=0, high=2**31 - 1)
    add.boolean("deterministic", False, "the same bits in every run (slower on GPUs)")
    add.integer("checkpoint_steps", None, "steps between checkpoints; default: an epoch, or five minutes", low=1)
    add.integer("keep_checkpoints", 2, "newest checkpoints to keep, besides the best by validation", low=1)
    add.enum("on_nan", "stop", ("stop", "ignore"), "what a loss that is no finite number does")
    add.boolean("tensorboard", False, "write WORKDIR/tensorboard: curves, settings, test report")
    add.integer("profile", None, "write a profiler trace of this many steps to WORKDIR/profile, for TensorBoard", low=1)


def config_from_flags(flag_values: flags.FlagValues) -> Config:
    """Fills what was not given from the model's defaults.

    Raises:
      InputError: two flags contradict each other.
    """
    values: dict[str, Any] = {field.name: flag_values[field.name].value for field in dataclasses.fields(Config)}
    for name, default in MODEL_DEFAULTS[values["model"]].items():
        if values[name] is None and not (name == "per_replica_batch_size" and values["global_batch_size"]):
            values[name] = default
    return Config(**values)


def refuse_arguments(arguments: list[str]) -> None:
    """Raises InputError where a command that takes flags only was given something else."""
    if arguments:
        raise InputError(f"unexpected argument {arguments[0]!r}: this command takes flags only (--name=value)")


def require_arguments(arguments: list[str], what: str) -> None:
    """Raises InputError where a command was given nothing to work on."""
    if not arguments:
        raise InputError(f"no {what} were given: name them after the flags")


def require(flag_values: flags.FlagValues, name: str) -> str:
    """Returns the value of a flag that must be given; raises InputError without it."""
    flag = flag_values[name]
    if not flag.value:
        raise InputError(f"--{name} is missing: it must be given ({flag.help})")
    return flag.value


def run_command(
    run: Callable[[flags.FlagValues, list[str]], int | None],
    define_flags: Callable[[flags.FlagValues], None],
    *,
    usage: str,
    argv: list[str] | None = None,
    names_train_flags: bool = True,
) -> None:
    """Parses the command line, runs the command and exits with its status.

    Status 0: done; 1: failed while running; 2: bad input, told in one line without a traceback; 130: Ctrl-C.

    Args:
      run: gets the parsed flags and the remaining arguments; returns an exit status or None for 0.
      define_flags: defines the command's flags on the `FlagValues` it is given.
      usage: the entry point's docstring, printed by `--help`.
      argv: the command line, by default `sys.argv`.
      names_train_flags: whether `--help` lists those flags of train that the command takes, too.
    """
    flag_values = flags.FlagValues()
    define_flags(flag_values)
    add = _Definer(flag_values)
    add.integer("verbosity", 0, "log level: -1 warnings, 0 information, 1 debugging", low=-3, high=3)
    add.boolean("help", False, "show this help")
    prefix = ""
    try:
        arguments = _parse(flag_values, argv or sys.argv)
        if flag_values["help"].value:
            hidden = flags.FlagValues()
            if not names_train_flags:
                define_train_flags(hidden)
            print(_help_text(usage, flag_values, hidden=set(hidden)))
            sys.exit(0)
        if "cluster" in flag_values:
            prefix = cluster.find(flag_values.cluster).prefix
        _log_to_stderr(flag_values.verbosity, prefix)
        status = run(flag_values, arguments)
    except (flags.Error, InputError) as error:
        _exit_with(f"{error}", status=2, prefix=prefix)
    except KeyboardInterrupt:
        _exit_with("interrupted", status=130, prefix=prefix)
    except (OSError, RunError) as error:
        _exit_with(f"{error}", status=1, prefix=prefix)
    sys.exit(status or 0)


def _parse(flag_values: flags.FlagValues, argv: list[str]) -> list[str]:
    """Parses the command line and returns the arguments that are no flags."""
    try:
        arguments = flag_values(argv)[1:]
    except ValueError as error:  # absl's, of --noaugment=value and of a flagfile that is not UTF-8
        raise InputError(f"{error}: give --name=value, in a flagfile as UTF-8 text") from error
    for name, value in flag_values.flag_values_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name}={value}: give a finite number")
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"--{name}={value!r}: give a text without null bytes, which no file name has")
    return arguments


def _log_to_stderr(verbosity: int, prefix: str) -> None:
    """Has absl's log written as plain lines; its own handler would complain that the global flags were not parsed."""
    handler = std_logging.StreamHandler()
    handler.setFormatter(std_logging.Formatter(f"{prefix}%(levelname)s: %(message)s"))
    logger = logging.get_absl_logger()
    logger.handlers, logger.propagate = [handler], False
    logging.set_verbosity(verbosity)


def _exit_with(message: str, *, status: int, prefix: str) -> None:
    line = " ".join(message.split())  # one line, whatever the message holds
    print(prefix + (f"error: {line}" if status != 130 else line), file=sys.stderr)
    sys.exit(status)


def _help_text(usage: str, flag_values: flags.FlagValues, *, hidden: set[str]) -> str:
    lines = [usage.strip(), "", "Flags (or in a file, one a line: --flagfile=FILE):"]
    for name in flag_values:
        if name in hidden:
            continue
        flag = flag_values[name]
        default = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
        default = "" if default is None or default is False or default == "" else f" [{default}]"
        text = f"  --{name}: {flag.help}{default}"
        lines += textwrap.wrap(text, 118, subsequent_indent="      ")
    return "\n".join(lines)


class _Definer:
    """Short names for absl's definitions on one `FlagValues`."""

    def __init__(self, flag_values: flags.FlagValues):
        self._to: dict[str, Any] = {"flag_values": flag_values}

    def string(self, name, default, text):
        flags.DEFINE_string(name, default, text, **self._to)

    def boolean(self, name, default, text):
        flags.DEFINE_boolean(name, default, text, **self._to)

    def enum(self, name, default, choices, text):
        flags.DEFINE_enum(name, default, list(choices), text, **self._to)

    def integer(self, name, default, text, *, low, high=None):
        flags.DEFINE_integer(name, default, text, lower_bound=low, upper_bound=high, **self._to)

    def number(self, name, default, text, *, low, high=None):
        flags.DEFINE_float(name, default, text, lower_bound=low, upper_bound=high, **self._to)
