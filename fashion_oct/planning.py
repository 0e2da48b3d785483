"""What the machine makes of the settings of a run: devices, batches, steps, precision."""

import dataclasses
import sys

import tensorflow as tf

from fashion_oct import distribution, run_folder, schedules
from fashion_oct.errors import InputError
from fashion_oct.options import Config

_STEPS_PER_EXECUTION = 16  # on accelerators: their progress is seen several times a second all the same


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the machine makes of a Config: devices, batches, steps, precision."""

    devices: list[str]
    batch: distribution.BatchSizes
    steps_per_epoch: int
    num_steps: int
    epochs: int
    steps_per_execution: int
    learning_rate: float
    precision: str
    precision_reason: str

    def sentence(self) -> str:
        """Returns the one sentence that states all sizes."""
        batch = self.batch
        replicas = f"{batch.num_replicas} replica{'s' if batch.num_replicas > 1 else ''}"
        return (
            f"{replicas} ({', '.join(self.devices)}) x {batch.per_replica_batch_size} images = global batch "
            f"{batch.global_batch_size}; {self.steps_per_epoch} steps an epoch, {self.num_steps} steps in all; "
            f"{self.precision} ({self.precision_reason})"
        )


def make_plan(config: Config, strategy: tf.distribute.Strategy, *, num_train: int) -> Plan:
    """Works out batches, steps and precision.

    Raises:
      InputError: the batch does not fit the replicas or the split.
    """
    batch = distribution.batch_sizes(
        strategy.num_replicas_in_sync,
        per_replica_batch_size=config.per_replica_batch_size,
        global_batch_size=config.global_batch_size,
    )
    steps_per_epoch = batch.steps_per_epoch(num_train)
    devices = distribution.device_names(strategy)
    most = min(steps_per_epoch, config.steps or sys.maxsize)
    steps_per_execution = config.steps_per_execution or choose_steps_per_execution(devices, most)
    # an epoch is a whole number of executions: Keras 3 would run the last one in full, Keras 2 would shorten it
    steps_per_epoch = -(-steps_per_epoch // steps_per_execution) * steps_per_execution
    num_steps = min(config.epochs * steps_per_epoch, config.steps or sys.maxsize)
    if steps_per_execution > num_steps:
        raise InputError(
            f"--steps_per_execution={steps_per_execution} is more than the run's {num_steps} steps: lower it"
        )
    if steps_per_execution > 1 and devices[1:] and devices[0].startswith("CPU") and _is_keras_3():
        raise InputError(
            f"--steps_per_execution={steps_per_execution} on {len(devices)} virtual devices: TensorFlow's graph "
            "optimiser fails on it with Keras 3; give --steps_per_execution=1, or GPUs"
        )
    precision, reason = distribution.choose_precision(config.precision, strategy)
    return Plan(
        devices=devices,
        batch=batch,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        epochs=-(-num_steps // steps_per_epoch),
        steps_per_execution=steps_per_execution,
        learning_rate=schedules.scale_rate(
            config.learning_rate,
            global_batch_size=batch.global_batch_size,
            reference_batch_size=config.reference_batch_size or batch.global_batch_size,
            rule=config.lr_scaling,
        ),
        precision=precision,
        precision_reason=reason,
    )


def choose_steps_per_execution(devices: list[str], most: int) -> int:
    """Returns how many steps one call of the train function should do where that was not given.

    On CPUs 1: calls cost them nothing. On accelerators about 16 (`most` at most), in executions of nearly equal length:
    an epoch of 118 steps becomes 8 executions of 15, 2 steps longer, and not 8 of 16, 10 steps longer.
    """
    if devices[0].startswith("CPU"):
        return 1
    num_executions = -(-most // _STEPS_PER_EXECUTION)
    return -(-most // num_executions)


def _is_keras_3() -> bool:
    return run_folder.keras_version().startswith("3.")
