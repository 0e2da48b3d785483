"""The whole state of a training run in one file: written atomically, checked when read, restored bit for bit.

A checkpoint is a line of JSON (what the file holds, and the caller's own `state`), the raw bytes of all variables one
after the other, and the SHA-256 of all that. Nothing is ever unpickled. How a run goes on, at any step:

    checkpoints = Checkpoints(workdir / "checkpoints", keep=3)  # inside `with lock_workdir(workdir):`
    step = 0
    if checkpoint := checkpoints.newest():
        step = checkpoint.step
        checkpoint.restore(model)  # a fresh model, compiled as before; inside the strategy's scope
        if step % steps_per_epoch:
            callbacks.append(RestoreMetrics(checkpoint, one_batch))
    for first_step, arguments in remaining_fits(step, steps_per_epoch=steps_per_epoch, epochs=epochs):
        model.fit(batches_from(first_step), **arguments, callbacks=callbacks)

A callback calls `save` in `on_train_batch_end`, and for the end of an epoch in `on_epoch_end`, which comes after
validation. `callbacks` must be a list, or Keras 3 calls the former in a thread while the next step runs.

With Keras 2 the random state of Dropout lies where nobody can read it, unless
`tf.keras.backend.experimental.enable_tf_random_generator()` was called before the network was built.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from fashion_oct import distribution, files
from fashion_oct.errors import InputError

_FORMAT = "fashion_oct checkpoint 1"
_DIGEST_BYTES = 32  # of SHA-256


class Best(NamedTuple):
    """The step of the checkpoint with the highest figure of merit, and that figure."""

    step: int
    figure: float


class Checkpoints:
    """The checkpoints of one run: files named by their step, in a folder of their own.

    Attributes:
      best: which one has the highest figure of those saved, or None.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int, is_chief: bool = True):
        """Makes the folder if there is none, and removes what a writer that was killed has left in it.

        Args:
          folder: used by one process at a time, see `lock_workdir`.
          keep: how many of the newest checkpoints stay, besides the best one; at least 1.
          is_chief: of several workers, all of which call `save`, the others only read.

        Raises:
          OSError: the folder cannot be made or written.
        """
        self.best: Best | None = None
        self._folder = pathlib.Path(folder)
        self._keep, self._is_chief = keep, is_chief
        if not is_chief:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".*.tmp"):
            leftover.unlink()

    def path(self, step: int) -> pathlib.Path:
        """Returns the file of the checkpoint after `step` steps."""
        return self._folder / f"{step:08d}.ckpt"

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that are there, ascending."""
        return sorted(int(path.stem) for path in self._folder.glob("*.ckpt") if path.stem.isdecimal())

    def save(self, model: tf.keras.Model, *, step: int, state: dict[str, Any], figure: float | None = None) -> None:
        """Writes a checkpoint, and then removes those that need not be kept.

        Args:
          model: compiled. One that shares layers with a larger model stands for these layers only.
          step: steps done.
          state: what the caller needs to go on, whatever JSON takes (NaN and infinity, too).
          figure: of merit, higher is better; the checkpoint with the highest one is not removed.

        Raises:
          OSError: the disk is full or the folder read-only; all earlier checkpoints are then as they were.
        """
        best = self.best
        if figure is not None and figure > (best.figure if best else -np.inf):
            best = Best(step, figure)
        variables = _of_all_workers(
            [Saved(group, name, _values(variable)) for group, name, variable in _variables(model)],
            model.distribute_strategy,
        )
        if not self._is_chief:
            self.best = best
            return
        _write(self.path(step), {"step": step, "best": best, "state": state}, variables)
        self.best = best
        # later ones are damaged: `newest` has passed them over, and their steps are done again
        kept = {best.step if best else step, *[number for number in self.steps() if number <= step][-self._keep :]}
        for number in set(self.steps()) - kept:
            self.path(number).unlink()

    def newest(self) -> "Checkpoint | None":
        """Returns the newest good checkpoint; each damaged one that is newer is named in a warning.

        Raises:
          OSError: a file cannot be read at all. It is not passed over, since `save` would remove it then.
        """
        for step in reversed(self.steps()):
            try:
                checkpoint = read(self.path(step))
            except ValueError as error:
                logging.warning("%s; the checkpoint before it is taken, if there is one", error)
            else:
                self.best = checkpoint.best
                return checkpoint
        return None


@dataclasses.dataclass(frozen=True)
class Saved:
    """A variable as a checkpoint holds it.

    Attributes:
      group: "weights", "optimizer" or "metrics".
      name: without the numbers that Keras appends to tell a process's layers apart.
      values: one array, or one for each replica where these differ (sums of metrics, moving averages).
    """

    group: str
    name: str
    values: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds; see `Checkpoints.save`."""

    path: pathlib.Path
    step: int
    state: dict[str, Any]
    best: Best | None
    variables: list[Saved]

    def restore(self, model: tf.keras.Model) -> None:
        """Gives a compiled model the weights and the optimizer's state; to be called inside the strategy's scope.

        Raises:
          InputError: it is another network or has another optimizer. No variable is changed then.
        """
        optimizer = model.optimizer
        if not getattr(optimizer, "built", False):  # Keras 2 says it elsewhere, and lets us call it again
            optimizer.build(model.trainable_variables)
        self._assign(model, "weights", "optimizer")

    def restore_metrics(self, model: tf.keras.Model, batches: tf.data.Dataset) -> None:
        """Gives the compiled metrics their state; see `RestoreMetrics`, which knows the moment for it."""
        if len(_variables(model, "metrics")) != sum(saved.group == "metrics" for saved in self.variables):
            model.evaluate(batches, steps=1, verbose=0)  # the only public way to make Keras create them
        self._assign(model, "metrics")

    def _assign(self, model: tf.keras.Model, *groups: str) -> None:
        stored = [saved for saved in self.variables if saved.group in groups]
        present = _variables(model, *groups)
        theirs = [_describe(saved.name, saved.values[0]) for saved in stored]
        ours = [_describe(name, variable) for _, name, variable in present]
        if theirs != ours:
            a, b = next(pair for pair in itertools.zip_longest(theirs, ours, fillvalue="none") if pair[0] != pair[1])
            raise InputError(
                f"{self.path} is of another network or optimizer: it has {a} where here is {b}; "
                "give the settings of that run, or another --workdir"
            )
        parts = [_parts(variable) for _, _, variable in present]
        task = distribution.task_of(model.distribute_strategy)
        for saved, replicas in zip(stored, parts, strict=True):
            if len(saved.values) not in (1, task.num_workers * len(replicas)):
                raise InputError(
                    f"{self.path} has {saved.name} of {len(saved.values)} replicas, here are "
                    f"{task.num_workers * len(replicas)}: give as many devices, or another --workdir"
                )
        for saved, replicas in zip(stored, parts, strict=True):
            own = saved.values[task.worker * len(replicas) :] or saved.values  # else one value for all
            for value, replica in zip(itertools.cycle(own), replicas, strict=False):
                replica.assign(value)


class RestoreMetrics(tf.keras.callbacks.Callback):
    """Gives the metrics their state in the first epoch's beginning, after Keras has set them to zero.

    For a run that goes on inside an epoch: the loss and accuracy of that epoch are then those of all its steps. Not for
    one that goes on between two epochs, when they have to begin at zero.

    Args:
      checkpoint: that the model was restored from.
      batches: a dataset of one batch, for Keras to create the metrics with where it has not.
    """

    def __init__(self, checkpoint: Checkpoint, batches: tf.data.Dataset):
        super().__init__()
        self._checkpoint: Checkpoint | None = checkpoint
        self._batches = batches

    def on_epoch_begin(self, epoch, logs=None):
        if self._checkpoint is not None:
            self._checkpoint.restore_metrics(self.model, self._batches)
        self._checkpoint = None


def remaining_fits(step: int, *, steps_per_epoch: int, epochs: int) -> list[tuple[int, dict[str, int]]]:
    """Returns the `fit` calls that do the rest of a run: inside an epoch the rest of it, and then the other epochs.

    After step 14 of 5 epochs of 10 steps: 6 steps of epoch 1 from step 14 on, then epochs 2 to 4 from step 20 on.

    Returns:
      For each call its first step and its arguments `initial_epoch`, `epochs` and `steps_per_epoch`.
    """
    epoch, num_done = divmod(step, steps_per_epoch)
    calls = []
    if num_done:
        rest = {"initial_epoch": epoch, "epochs": epoch + 1, "steps_per_epoch": steps_per_epoch - num_done}
        calls.append((step, rest))
        epoch += 1
    if epoch < epochs:
        others = {"initial_epoch": epoch, "epochs": epochs, "steps_per_epoch": steps_per_epoch}
        calls.append((epoch * steps_per_epoch, others))
    return calls


def read(path: pathlib.Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
      ValueError: the file is damaged, or of another format; the message names it and the reason.
      OSError: it cannot be read.
    """
    data = path.read_bytes()
    body = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
        raise ValueError(f"{path} is damaged: its {len(data):,} bytes do not have the checksum at their end")
    end = data.index(b"\n") + 1
    header = json.loads(data[:end])
    if header["format"] != _FORMAT:
        raise ValueError(f"{path} is a {header['format']!r}, this program reads {_FORMAT!r}")
    variables = []
    for entry in header["variables"]:
        dtype = tf.as_dtype(entry["dtype"]).as_numpy_dtype
        size = np.dtype(dtype).itemsize * math.prod(entry["shape"])
        values = []
        for _ in range(entry["num_values"]):
            values.append(np.frombuffer(data, np.uint8, size, end).view(dtype).reshape(entry["shape"]))
            end += size
        variables.append(Saved(entry["group"], entry["name"], values))
    best = Best(*header["best"]) if header["best"] else None
    return Checkpoint(path, header["step"], header["state"], best, variables)


@contextlib.contextmanager
def lock_workdir(folder: str | os.PathLike) -> Iterator[None]:
    """Keeps other processes from using a run folder, until the block or the process ends, however it ends.

    Raises:
      InputError: another run uses it.
      OSError: the folder is read-only.
    """
    path = pathlib.Path(folder) / "checkpoints" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise InputError(
                f"--workdir={folder} is in use by another run ({stream.read().strip() or 'just started'}): "
                "wait until it has ended, or give another folder"
            ) from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        yield


def _write(path: pathlib.Path, header: dict[str, Any], variables: list[Saved]) -> None:
    entries = [
        {
            "group": saved.group,
            "name": saved.name,
            "dtype": saved.values[0].dtype.name,
            "shape": saved.values[0].shape,
            "num_values": len(saved.values),
        }
        for saved in variables
    ]
    line = json.dumps({"format": _FORMAT} | header | {"variables": entries}) + "\n"
    digest = hashlib.sha256()
    with files.replacing(path, "wb") as stream:
        for part in (memoryview(line.encode()), *(_bytes(value).data for saved in variables for value in saved.values)):
            digest.update(part)
            stream.write(part)
        stream.write(digest.digest())


def _variables(model: tf.keras.Model, *groups: str) -> list[tuple[str, str, Any]]:
    """Returns (group, name, variable) of all that training changes, in the same order in every process."""
    optimizer = model.optimizer
    of_optimizer = list(optimizer.variables)
    if getattr(optimizer, "dynamic_counter", None) is not None:  # loss scaling of Keras 2, which `variables` leave out
        of_optimizer += [optimizer._loss_scale.current_loss_scale, optimizer.dynamic_counter]
    found = [("weights", _name(variable), variable) for variable in [*model.variables, *_random_states(model)]]
    kind = _without_numbers(getattr(optimizer, "inner_optimizer", optimizer).name)
    for variable in of_optimizer:
        # Keras 2 calls the same variable m/..., Adam/m/... or cond_1/Adam/m/..., depending on where it is made
        name = re.sub(f"^(cond/)?({kind}/)?", "", _without_numbers(variable.name))
        found.append(("optimizer", f"{kind}/{name}", variable))
    for metric in model.metrics:
        found += [
            ("metrics", f"{_without_numbers(metric.name)}/{_name(variable)}", variable) for variable in metric.variables
        ]
    return [entry for entry in found if not groups or entry[0] in groups]


def _random_states(model: tf.keras.Model) -> list[tf.Variable]:
    """Returns the states of Keras 2's generators; those of Keras 3 are among the model's variables."""
    generators = [getattr(layer, "_random_generator", None) for layer in model.layers]
    generators = [getattr(generator, "_generator", None) for generator in generators]
    return [generator.state for generator in generators if generator is not None]


def _name(variable: Any) -> str:
    return _without_numbers(getattr(variable, "path", variable.name))  # in Keras 3 only the path names the layer


def _without_numbers(name: str) -> str:
    """Returns dense/kernel for dense_7/kernel: a process numbers its layers, the same network may get other numbers."""
    return re.sub(r"_\d+(?=[_/:]|$)", "", name)


def _describe(name: str, value: Any) -> str:
    return f"{name} {tf.as_dtype(value.dtype).name}{list(value.shape)}"


def _parts(variable: Any) -> list[tf.Variable]:
    """Returns the variable of each replica; one where they are not mirrored."""
    if not isinstance(variable, tf.Variable):
        variable = variable.value  # what a variable of Keras 3 wraps
    return list(getattr(variable, "values", [variable]))


def _values(variable: Any) -> list[np.ndarray]:
    """Returns the value of each replica, or one where they have the same bits.

    They may differ: each replica sums up its own metrics, and moving averages over its own images.
    """
    values = [np.asarray(part.numpy()) for part in _parts(variable)]
    return values if any(np.any(_bytes(value) != _bytes(values[0])) for value in values[1:]) else values[:1]


def _of_all_workers(own: list[Saved], strategy: tf.distribute.Strategy) -> list[Saved]:
    """Returns the variables with the values of the replicas of all workers; with one worker what is given.

    Only metrics differ between workers: no network here has moving averages.
    """
    num_workers = distribution.task_of(strategy).num_workers
    if num_workers == 1:
        return own
    num_own = strategy.num_replicas_in_sync // num_workers

    def gathered(saved: Saved) -> Saved:
        shape = [num_own, *saved.values[0].shape]
        workers = distribution.gather(strategy, np.broadcast_to(np.stack(saved.values), shape).tobytes())
        values = [np.frombuffer(worker, saved.values[0].dtype).reshape(shape) for worker in workers]
        return dataclasses.replace(saved, values=list(np.concatenate(values)))

    return [gathered(saved) if saved.group == "metrics" else saved for saved in own]


def _bytes(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
