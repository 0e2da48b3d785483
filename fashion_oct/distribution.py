"""Which devices train, how a batch is divided between them, and what precision they are fast at.

The only module that calls strategy constructors and `tf.config`.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from absl import logging

from fashion_oct import cluster
from fashion_oct.errors import InputError, RunError

_START_SECONDS = 600  # in which all workers must have come: their machines may start one after the other


def make_strategy(
    num_gpus: int | None = None, virtual_devices: int | None = None, cluster_source: str | None = None
) -> tf.distribute.Strategy:
    """Returns the strategy for the devices asked for.

    One GPU gives `OneDeviceStrategy`, several devices a `MirroredStrategy`, several workers a
    `MultiWorkerMirroredStrategy`, when all of them have come. The CPU alone gives TensorFlow's default strategy: the
    others hand batches over through an iterator for each device, which one CPU does not need, and whose deletion can
    wait a minute for its autotuning thread. Call it before TensorFlow has used a device.

    Args:
      num_gpus: GPUs to use; 0 is the CPU, None every visible GPU or else the CPU. Of several workers, on each of them.
      virtual_devices: makes this many logical CPU devices and mirrors over them, instead of GPUs.
      cluster_source: who names the workers, see `cluster.find`; None: there is one.

    Raises:
      InputError: more GPUs than there are; other devices than TensorFlow has started with; virtual devices of several
        workers.
    """
    num_workers = cluster.find(cluster_source).num_workers if cluster_source else 1
    if virtual_devices is not None:
        if num_workers > 1:
            raise InputError(
                f"--virtual_devices={virtual_devices}, but there are {num_workers} workers, which have one CPU device "
                "each: start more workers instead"
            )
        _take_gpus(0)
        devices = _logical_cpu_devices(virtual_devices)
    else:
        devices = _take_gpus(num_gpus) or ["CPU:0"]
    if num_workers > 1:
        return _multi_worker_strategy(cluster_source)
    if devices == ["CPU:0"]:
        return tf.distribute.get_strategy()
    if len(devices) == 1:
        return tf.distribute.OneDeviceStrategy(devices[0])
    return tf.distribute.MirroredStrategy(devices)


def num_visible_gpus() -> int:
    """Returns how many GPUs TensorFlow sees."""
    return len(tf.config.get_visible_devices("GPU"))


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Says whether this process writes the run folder: the chief of several hosts, or the only process."""
    return strategy.extended.should_checkpoint


def task_of(strategy: tf.distribute.Strategy) -> cluster.Task:
    """Returns which worker of the strategy this process is."""
    return cluster.find() if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) else cluster.Task()


def gather(strategy: tf.distribute.Strategy, data: bytes) -> list[bytes]:
    """Returns what each worker gives, in their order. All workers call it, with equally many bytes.

    It is an all-reduce of as many integers a worker, all but its own 0: sums of integers are exact.
    """
    task = task_of(strategy)
    if task.num_workers == 1:
        return [data]
    rows = np.zeros([task.num_workers, -(-len(data) // 4)], np.int32)
    nothing = np.zeros_like(rows)
    rows[task.worker] = np.frombuffer(data.ljust(4 * rows.shape[1], b"\0"), np.int32)
    first_replica = task.worker * strategy.num_replicas_in_sync // task.num_workers

    def give(context):
        return tf.constant(rows if context.replica_id_in_sync_group == first_replica else nothing)

    values = strategy.experimental_distribute_values_from_function(give)
    return [row.tobytes()[: len(data)] for row in strategy.reduce("SUM", values, axis=None).numpy()]


@contextlib.contextmanager
def naming_lost_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Turns TensorFlow's error of a worker that does not answer any more into a RunError.

    TensorFlow finds it out at once where the connection breaks, else by the heart-beat of all workers.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if task_of(strategy).num_workers == 1 or not isinstance(error, _LOST):
            raise
        raise RunError(
            f"another worker was lost ({type(error).__name__}): start all workers again with the same --workdir, to go "
            "on at the last checkpoint"
        ) from error


# what broken connections, missing heart-beats and a restarted peer are told as
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)


def enable_determinism() -> None:
    """Makes every TensorFlow operation give the same bits in every run."""
    tf.config.experimental.enable_op_determinism()


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """How many images a step takes: `global_batch_size = per_replica_batch_size * num_replicas`."""

    num_replicas: int
    per_replica_batch_size: int
    global_batch_size: int

    def steps_per_epoch(self, num_examples: int) -> int:
        """Returns the full batches of one epoch, rounded up: the last one runs on into the next pass.

        60,000 / 512 = 117.2 -> 118 steps: every image is seen at least once by the end of the first epoch.

        Raises:
          InputError: the batch is larger than the split.
        """
        if self.global_batch_size > num_examples:
            raise InputError(
                f"a global batch of {self.global_batch_size} images is larger than the training split "
                f"({num_examples} images): lower --per_replica_batch_size or --global_batch_size"
            )
        return -(-num_examples // self.global_batch_size)

    def for_evaluation(self, num_examples: int) -> int:
        """Returns the largest global batch, at most this one, with which no replica is ever left without an example.

        A last batch of r examples is dealt out in shares of ceil(r / n) to n replicas: 1 to two gives 1 + 0, 4 to three
        gives 2 + 2 + 0, and a convolution fails on an empty share.

        Raises:
          InputError: there are fewer examples than replicas.
        """
        for size in range(self.global_batch_size, 0, -self.num_replicas):
            rest = num_examples % size
            if rest == 0 or (self.num_replicas - 1) * -(-rest // self.num_replicas) < rest:
                return size
        raise InputError(f"{num_examples} images cannot be scored on {self.num_replicas} replicas: use fewer replicas")


def batch_sizes(
    num_replicas: int, *, per_replica_batch_size: int | None = None, global_batch_size: int | None = None
) -> BatchSizes:
    """Works out both batch sizes from the one that is given.

    Raises:
      InputError: the replicas do not divide the global batch.
    """
    if global_batch_size is None:
        assert per_replica_batch_size is not None  # one of the two is given
        return BatchSizes(num_replicas, per_replica_batch_size, per_replica_batch_size * num_replicas)
    if global_batch_size % num_replicas:
        lower = global_batch_size // num_replicas * num_replicas
        nearest = [str(size) for size in (lower, lower + num_replicas) if size]
        raise InputError(
            f"--global_batch_size={global_batch_size} cannot be divided by {num_replicas} replicas: "
            f"give a multiple of {num_replicas}, for example {' or '.join(nearest)}"
        )
    return BatchSizes(num_replicas, global_batch_size // num_replicas, global_batch_size)


def choose_precision(requested: str, strategy: tf.distribute.Strategy) -> tuple[str, str]:
    """Returns the Keras precision policy to use, and why.

    "auto" takes mixed_bfloat16 where the CPU (AVX512_BF16 or AMX) or the GPU (compute capability 8 and higher)
    multiplies it natively, mixed_float16 on GPUs of compute capability 7.x, else float32.
    """
    if requested != "auto":
        return requested, "as asked for"
    if "GPU" in _worker_devices(strategy)[0]:
        gpus = tf.config.get_visible_devices("GPU")
        capabilities = [tf.config.experimental.get_device_details(gpu).get("compute_capability") for gpu in gpus]
        return precision_of_gpus(capabilities)
    return precision_of_cpu(cpu_features())


def precision_of_gpus(capabilities: list[tuple[int, int] | None]) -> tuple[str, str]:
    """Returns (policy, reason) for GPUs of these compute capabilities, (major, minor) or None where unknown."""
    known = [capability for capability in capabilities if capability is not None]
    if len(known) < len(capabilities):
        return "float32", "the compute capability of a GPU is unknown"
    lowest = min(known)
    name = f"lowest compute capability {lowest[0]}.{lowest[1]}"
    if lowest >= (8, 0):
        return "mixed_bfloat16", name
    if lowest >= (7, 0):
        return "mixed_float16", name
    return "float32", name


def precision_of_cpu(features: set[str]) -> tuple[str, str]:
    """Returns (policy, reason) for a CPU with these features, as /proc/cpuinfo names them."""
    fast = sorted(features & {"avx512_bf16", "amx_bf16"})
    if fast:
        return "mixed_bfloat16", f"the CPU has {' and '.join(fast)}"
    return "float32", "the CPU has neither avx512_bf16 nor amx_bf16"


def cpu_features(cpuinfo: str | os.PathLike = "/proc/cpuinfo") -> set[str]:
    """Returns the CPU's features; empty where the system does not tell (only Linux does)."""
    try:
        lines = pathlib.Path(cpuinfo).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {feature for line in lines if line.startswith("flags") for feature in line.split(":", 1)[1].split()}


def device_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the devices that train, for example ["CPU:0", "CPU:1"], or ["CPU:0 of worker 0", "CPU:0 of worker 1"]."""
    names = [":".join(device.split(":")[-2:]) for device in _worker_devices(strategy)]
    num_workers = task_of(strategy).num_workers
    if num_workers == 1:
        return names
    return [f"{name} of worker {worker}" for worker in range(num_workers) for name in names]


def _multi_worker_strategy(cluster_source: str | None) -> tf.distribute.Strategy:
    if cluster_source == "slurm":
        # Ports by the job, so that two jobs can share a node. The figures of GPUs only keep the resolver from asking
        # nvidia-smi: Slurm has given each task its own.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=20_000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10_000,
            gpus_per_node=1000,
            gpus_per_task=1,
            auto_set_gpu=False,
        )
        hosts = resolver.cluster_spec().as_dict()
        task = {"type": resolver.task_type, "index": resolver.task_id}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": hosts, "task": task})
    # TensorFlow waits for an hour, in which no thread or signal handler of Python runs: this one ends it with status 1
    logging.info("waits for all workers, at most %d seconds", _START_SECONDS)
    faulthandler.dump_traceback_later(_START_SECONDS, exit=True)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _worker_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    try:
        return strategy.extended.worker_devices
    except RuntimeError:  # the default strategy has no such list
        return ("/device:CPU:0",)


def _take_gpus(count: int | None) -> list[str]:
    """Takes the first GPUs, or all, and hides the others: their memory stays free, and nothing is placed there."""
    gpus = tf.config.list_physical_devices("GPU")
    if count is not None and count > len(gpus):
        remedy = f"give at most {len(gpus)}" if gpus else "pip install 'tensorflow[and-cuda]' if there are some"
        raise InputError(
            f"--num_gpus={count}, but TensorFlow sees {len(gpus)} GPU(s) here: {remedy}, "
            f"or give --virtual_devices={count} to try {count} replicas on the CPU"
        )
    taken = gpus[:count]
    try:
        tf.config.set_visible_devices(taken, "GPU")
        for gpu in taken:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:  # TensorFlow has started
        raise InputError(
            f"{len(taken)} of {len(gpus)} GPU(s) were asked for, but TensorFlow has started with others: ask for them "
            "before its first use"
        ) from error
    return [f"GPU:{i}" for i in range(len(taken))]


def _logical_cpu_devices(count: int) -> list[str]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:  # TensorFlow has started: what it started with must do
        if len(tf.config.list_logical_devices("CPU")) < count:
            raise InputError(
                f"--virtual_devices={count}, but TensorFlow has started with "
                f"{len(tf.config.list_logical_devices('CPU'))} logical CPU device(s): ask for them before its first use"
            ) from error
    return [f"CPU:{i}" for i in range(count)]
