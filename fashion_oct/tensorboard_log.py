"""What TensorBoard shows of a run: curves of training, its settings, and the test report."""

import importlib.util
import pathlib
from typing import Any

import tensorflow as tf

from fashion_oct.errors import InputError
from fashion_oct.timing import TimeHistory


def check_is_installed() -> None:
    """Raises InputError where the package tensorboard is missing; recent TensorFlow does not bring it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("--tensorboard needs the package tensorboard: pip install 'fashion-oct[tensorboard]'")


def callbacks(folder: pathlib.Path, time_history: TimeHistory) -> list[tf.keras.callbacks.Callback]:
    """Returns what writes the scalars of each epoch, to be put after `time_history` in the list of callbacks."""
    return [tf.keras.callbacks.TensorBoard(folder, write_graph=False), _OwnScalars(folder, time_history)]


def write_report(
    folder: pathlib.Path, *, settings: dict[str, Any], report: dict[str, Any], plots: pathlib.Path
) -> None:
    """Writes the settings as HParams, with the test figures beside them, and the plots of the test split as images.

    Args:
      folder: TensorBoard's log folder.
      settings: name to number, text or truth value; None is left out.
      report: what evaluation.json holds.
      plots: folder of the PNG files.
    """
    from tensorboard.plugins.hparams import api as hparams

    with tf.summary.create_file_writer(str(folder / "test")).as_default(step=0):
        hparams.hparams({name: value for name, value in settings.items() if value is not None})
        for name in ("accuracy", "loss", "mcc", "macro_auc"):
            if report.get(name) is not None:
                tf.summary.scalar(f"test_{name}", report[name])
        for path in sorted(plots.glob("*.png")):
            tf.summary.image(path.stem, tf.io.decode_png(path.read_bytes(), channels=3)[None])


class _OwnScalars(tf.keras.callbacks.Callback):
    """Writes the learning rate and the percentiles of the step times, which Keras' callback does not know."""

    def __init__(self, folder: pathlib.Path, time_history: TimeHistory):
        super().__init__()
        self._writer = tf.summary.create_file_writer(str(folder / "train"))
        self._time_history = time_history

    def on_epoch_end(self, epoch, logs=None):
        with self._writer.as_default(step=epoch):
            tf.summary.scalar("learning_rate", float(self.model.optimizer.learning_rate.numpy()))
            for name, seconds in (self._time_history.summary().step_seconds or {}).items():
                tf.summary.scalar(f"step_seconds_{name}", seconds)

    def on_train_end(self, logs=None):
        self._writer.flush()
