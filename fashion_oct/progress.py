"""How far a run is: what is saved of it and when, how it goes on, and when it ends."""

import math
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from fashion_oct import checkpoints, distribution, reports
from fashion_oct.errors import RunError
from fashion_oct.ledger import Ledger
from fashion_oct.timing import TimeHistory

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS_BETWEEN_CHECKPOINTS = 300.0  # where an epoch takes longer


class Stopped(Exception):
    """Ends `fit` after the step in which a signal came, when its checkpoint has been written.

    Attributes:
      signal: which one.
    """

    def __init__(self, number: int):
        super().__init__()
        self.signal = signal.Signals(number)


class Progress(tf.keras.callbacks.Callback):
    """Counts the steps of a run, saves its state, and ends it: at its last step, at a signal, or at a NaN.

    Stands last in the list of callbacks. As a context around `fit` it turns the first signal into `Stopped`; a second
    one ends the process at once, as if there were no handler.

    Args:
      workdir: the run folder, in which history.csv and checkpoints/ are written.
      strategy: that trains; of several workers the chief writes, and all stop where one gets a signal.
      time_history: of the run.
      ledger: of the run.
      num_steps: steps of the whole run.
      steps_per_epoch: a whole number of executions.
      keep_checkpoints: see `checkpoints.Checkpoints`.
      checkpoint_steps: steps between checkpoints; None: one an epoch, and more where an epoch takes minutes.
      stops_on_nan: whether a loss that is no finite number ends the run.

    Attributes:
      step: steps done.
      num_steps: steps of the whole run.
      seconds: spent in callbacks, by their names in the ledger; others add theirs.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        strategy: tf.distribute.Strategy,
        time_history: TimeHistory,
        ledger: Ledger,
        num_steps: int,
        steps_per_epoch: int,
        keep_checkpoints: int,
        checkpoint_steps: int | None = None,
        stops_on_nan: bool = True,
    ):
        super().__init__()
        self._history_path = workdir / "history.csv"
        self._rows: list[dict[str, Any]] = []
        self._strategy, self._is_chief = strategy, distribution.is_chief(strategy)
        self._store = checkpoints.Checkpoints(workdir / "checkpoints", keep=keep_checkpoints, is_chief=self._is_chief)
        self._time_history, self._ledger = time_history, ledger
        self.num_steps, self._steps_per_epoch = num_steps, steps_per_epoch
        self._checkpoint_steps, self._stops_on_nan = checkpoint_steps, stops_on_nan
        self.step, self.seconds = 0, {"checkpoints": 0.0}
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._signal: int | None = None
        self._last_batch = -1
        self._handlers: dict[int, Any] = {}

    def restore(self, model: tf.keras.Model) -> checkpoints.Checkpoint | None:
        """Takes the newest good checkpoint, if there is one; to be called inside the strategy's scope."""
        checkpoint = self._store.newest()
        step = checkpoint.step if checkpoint else 0
        steps = [int.from_bytes(given, "big") for given in distribution.gather(self._strategy, step.to_bytes(8, "big"))]
        if len(set(steps)) > 1:
            raise RunError(
                f"the workers would go on after different steps ({steps}): give all of them the same --workdir, in a "
                "folder that they share"
            )
        if checkpoint is not None:
            checkpoint.restore(model)
            self.step = self._saved_step = checkpoint.step
            self._rows = checkpoint.state["history"]
            self._time_history.go_on(checkpoint.state["timing"])
            self._ledger.go_on(checkpoint.state["ledger"])
            logging.info("going on after step %d of %d", self.step, self.num_steps)
        return checkpoint

    def remaining_fits(self, epochs: int) -> Iterator[tuple[int, dict[str, int]]]:
        """Yields the first step and the arguments of each `fit` call that the run still needs."""
        for first_step, arguments in checkpoints.remaining_fits(
            self.step, steps_per_epoch=self._steps_per_epoch, epochs=epochs
        ):
            if self.step < self.num_steps:
                yield first_step, arguments
                self._time_history.go_on(self._time_history.state())

    def __enter__(self) -> "Progress":
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal = number

    def on_epoch_begin(self, epoch, logs=None):
        self._last_batch = -1

    def on_train_batch_end(self, batch, logs=None):
        # an epoch is a whole number of executions, so that the batch numbers are right on Keras 2 and 3
        self.step += batch - self._last_batch
        self._last_batch = batch
        loss = (logs or {}).get("loss", 0.0)
        if self._stops_on_nan and not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {self.step}: lower --learning_rate, or give --on_nan=ignore; "
                f"the checkpoint of step {self._saved_step} is kept"
            )
        if self.step >= self.num_steps:
            self.model.stop_training = True
        elif self.step % self._steps_per_epoch:  # else on_epoch_end does it
            signal_number, is_due = self._agree()
            if signal_number or is_due:
                self._save()
                self._stop_if_asked(signal_number)

    def on_epoch_end(self, epoch, logs=None):
        logs = {name: float(value) for name, value in (logs or {}).items()}
        rate = float(self.model.optimizer.learning_rate.numpy())  # float() does not take a mirrored variable
        self._rows.append({"epoch": epoch + 1, "learning_rate": rate, **logs})
        if self._is_chief:  # the whole file anew and atomically, unlike Keras' CSVLogger
            reports.write_csv(self._history_path, self._rows)
        signal_number, is_due = self._agree()
        if self._checkpoint_steps is None or is_due or signal_number or self.step >= self.num_steps:
            self._save(logs.get("val_accuracy"))
        self._stop_if_asked(signal_number)

    def _agree(self) -> tuple[int, bool]:
        """Returns a signal that a worker has got, or 0, and whether the chief's clock says that a checkpoint is due."""
        given = distribution.gather(self._strategy, bytes([self._signal or 0, self._is_due()]))
        return max(signal_number for signal_number, _ in given), bool(given[0][1])

    def _is_due(self) -> bool:
        if self._checkpoint_steps is None:
            return time.monotonic() - self._saved_at >= _SECONDS_BETWEEN_CHECKPOINTS
        return self.step - self._saved_step >= self._checkpoint_steps

    def _save(self, figure: float | None = None) -> None:
        begin = time.monotonic()
        state = {
            "history": self._rows,
            "timing": self._time_history.state(),
            "ledger": self._ledger.with_fit(self._time_history.summary(), self.seconds),
        }
        self._store.save(self.model, step=self.step, state=state, figure=figure)
        self._saved_step, self._saved_at = self.step, time.monotonic()
        self.seconds["checkpoints"] += self._saved_at - begin

    def _stop_if_asked(self, signal_number: int) -> None:
        if signal_number and self.step < self.num_steps:
            raise Stopped(signal_number)


class EpochLines(tf.keras.callbacks.Callback):
    """Prints one line an epoch, with the time that is left: for pipes and log files, where a progress bar is noise.

    Args:
      progress: of the run, which stands after this one in the list of callbacks.
    """

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress, self._has_begun = progress, False

    def on_train_begin(self, logs=None):
        if not self._has_begun:  # a run that goes on inside an epoch has two
            self._has_begun, self._begin, self._first_step = True, time.monotonic(), self._progress.step

    def on_epoch_end(self, epoch, logs=None):
        step, num_steps = self._progress.step, self._progress.num_steps
        words = [f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.4f}" for name, value in logs.items()]
        line = f"epoch {epoch + 1} of {self.params['epochs']}, step {step} of {num_steps}: {', '.join(words)}"
        if step < num_steps:
            seconds = (num_steps - step) * (time.monotonic() - self._begin) / (step - self._first_step)
            line += f"; about {in_words(seconds)} left"
        print(line, flush=True)


def in_words(seconds: float) -> str:
    """Returns a time as people say it: 7 s, 3 min 20 s, 2 h 5 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


class Profile(tf.keras.callbacks.Callback):
    """Writes a trace of TensorFlow's profiler, of some of the fit's executions."""

    def __init__(self, folder: pathlib.Path, executions: range):
        super().__init__()
        self._folder, self._executions, self._num_done = folder, executions, 0

    def on_train_batch_begin(self, batch, logs=None):
        if self._num_done == self._executions.start:
            tf.profiler.experimental.start(str(self._folder))

    def on_train_batch_end(self, batch, logs=None):
        self._num_done += 1
        if self._num_done == self._executions.stop:
            tf.profiler.experimental.stop()

    def on_train_end(self, logs=None):
        if self._executions.start < self._num_done < self._executions.stop:
            tf.profiler.experimental.stop()
