"""Trains a model on one or many devices, evaluates it on the test split, and writes a run folder.

  python -m fashion_oct.train                                  the ConvNet on Fashion-MNIST
  python -m fashion_oct.train --virtual_devices=2              the same, mirrored over two logical CPU devices
  python -m fashion_oct.train --flagfile=configs/smoke.flags   a try of a few seconds

Its last lines give the total time, the throughput, and the test loss and accuracy.
"""

from absl import flags

from fashion_oct import cluster, options, quiet


def run(flag_values: flags.FlagValues, arguments: list[str]) -> int:
    """Trains with the given flags."""
    options.refuse_arguments(arguments)
    config = options.config_from_flags(flag_values)
    quiet.import_tensorflow(cluster.find(config.cluster))
    from fashion_oct import training

    return training.run(config)


def main() -> None:
    """The entry point."""
    options.run_command(run, options.define_train_flags, usage=__doc__)


if __name__ == "__main__":
    main()
