"""Which of several processes this one is: by TF_CONFIG, or by Slurm. Imports no TensorFlow."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os

from absl import logging

from fashion_oct.errors import InputError

SOURCES = ("auto", "slurm")


@dataclasses.dataclass(frozen=True)
class Task:
    """This process among the workers of a run, numbered from 0, which is the chief."""

    worker: int = 0
    num_workers: int = 1

    @property
    def prefix(self) -> str:
        """What the lines of a worker begin with; those of the chief, and of a process alone, with nothing."""
        return f"worker {self.worker}: " if self.worker else ""


def find(source: str = "auto") -> Task:
    """Returns which worker this process is.

    Args:
      source: "slurm" asks the environment of a Slurm step, "auto" TF_CONFIG; without it the process is alone.

    Raises:
      InputError: TF_CONFIG is damaged or names other tasks than a chief and workers; or this is no Slurm step.
    """
    if source == "slurm":
        try:
            return Task(int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"]))
        except (KeyError, ValueError) as error:
            raise InputError(
                f"--cluster=slurm, but this is no step of a Slurm job ({error}): start it by srun"
            ) from error
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return Task()
    try:
        settings = json.loads(text)
        hosts = settings.get("cluster", {})
        if not hosts:
            return Task()
        task_type, index = settings["task"]["type"], int(settings["task"]["index"])
        tasks = [(name, i) for name in ("chief", "worker") for i in range(len(hosts.get(name, [])))]
        if set(hosts) - {"chief", "worker"} or (task_type, index) not in tasks:
            raise ValueError(f"task {task_type} {index} of the cluster {sorted(hosts)}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"TF_CONFIG={text!r:.200} cannot be used ({error}): give "
            """{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}, or unset it"""
        ) from error
    return Task(tasks.index((task_type, index)), len(tasks))


def keras_is_3() -> bool:
    """Says whether the installed Keras is Keras 3, whatever TensorFlow takes."""
    return not importlib.metadata.version("keras").startswith("2.")


def use_legacy_keras() -> None:
    """Has TensorFlow take Keras 2 for `tf.keras`: Keras 3 cannot train on several workers. Before it is imported.

    Raises:
      InputError: TensorFlow's Keras is Keras 3, and the package tf-keras is not installed.
    """
    if not keras_is_3():
        return
    if importlib.util.find_spec("tf_keras") is None:
        raise InputError(
            "Keras 3 cannot train on several workers, and tf-keras is not installed: "
            "pip install 'fashion-oct[multiworker]'"
        )
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    logging.info("several workers: trains with tf-keras %s, not with Keras 3", importlib.metadata.version("tf_keras"))
