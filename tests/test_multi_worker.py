"""Several workers: real processes on the loopback give what one process gives, and a lost one ends the others."""

import csv
import importlib.util
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import yaml
from documents import ROOT, snippets
from ports import free_ports

import fashion_oct
from fashion_oct import cluster, distribution, evaluation, input_pipeline
from fashion_oct.errors import InputError

SAMPLE = pathlib.Path(fashion_oct.__file__).parent / "data"
HOSTS = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}

# The training command with plain SGD (Adam's division by tiny numbers makes rounding visible), and a worker that sends
# itself a signal after the step AT_STEP.
PROGRAM = """
import os
from fashion_oct import cluster, quiet, train
quiet.import_tensorflow(cluster.find("slurm" if "SLURM_PROCID" in os.environ else "auto"))
import tensorflow as tf
from fashion_oct import progress

class Progress(progress.Progress):
    def on_train_batch_end(self, batch, logs=None):
        if self.step + 1 == int(os.environ.get("AT_STEP", 0)):
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        super().on_train_batch_end(batch, logs)

tf.keras.optimizers.Adam, progress.Progress = tf.keras.optimizers.SGD, Progress
train.main()
"""
FLAGS = [
    f"--data_dir={SAMPLE}", "--global_batch_size=120", "--steps=50", "--learning_rate=0.05", "--precision=float32",
    "--validation_fraction=0.1", "--deterministic", "--checkpoint_steps=16", "--num_gpus=0",
]  # fmt: skip

needs_keras_2 = pytest.mark.skipif(
    cluster.keras_is_3() and importlib.util.find_spec("tf_keras") is None, reason="Keras 3 without tf-keras"
)


def start_command(command, folder, **environment):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | environment
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def start(workdir, flags, **environment):
    command = [sys.executable, "-c", PROGRAM, *flags, f"--workdir={workdir}"]
    return start_command(command, ROOT, **environment)


def finish(*processes):
    """Waits for the processes, at most 100 seconds for each; returns their exit statuses and what they wrote."""
    try:
        texts = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], texts


def run_two_workers(workdir, *, of_chief=None, of_worker_1=None):
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    processes = []
    for index in (0, 1):
        task = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})
        processes.append(start(workdir, FLAGS, TF_CONFIG=task, **((of_worker_1 if index else of_chief) or {})))
    return finish(*processes)


# What Slurm says to both of two tasks on this host, but for the number of the job.
SLURM_STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}


def run_two_slurm_tasks(workdir):
    step = SLURM_STEP | {"SLURM_JOB_ID": str(random.randrange(10_000))}
    return finish(*(start(workdir, [*FLAGS, "--cluster=slurm"], SLURM_PROCID=str(i), **step) for i in (0, 1)))


def history_of(workdir):
    with open(workdir / "history.csv", newline="") as stream:
        return [[float(row[name]) for name in ("loss", "accuracy", "val_loss", "val_accuracy")]
                for row in csv.DictReader(stream)]  # fmt: skip


def assert_same_run(one, other, *, tolerance):
    weights = zip(evaluation.load_model(one).get_weights(), evaluation.load_model(other).get_weights(), strict=True)
    for ours, theirs in weights:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    np.testing.assert_allclose(history_of(one), history_of(other), rtol=0, atol=tolerance)
    reports = [json.loads((workdir / "evaluation.json").read_text()) for workdir in (one, other)]
    assert reports[0]["confusion_matrix"] == reports[1]["confusion_matrix"]


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    """The run folder of two workers, and the standard output and error of each."""
    workdir = tmp_path_factory.mktemp("two_workers") / "run"
    statuses, texts = run_two_workers(workdir)
    assert statuses == [0, 0], texts
    return workdir, texts


@needs_keras_2
@pytest.mark.slow
def test_two_workers_give_what_one_process_with_two_devices_gives(two_workers, tmp_path):
    workdir, _ = two_workers
    flags = [flag for flag in FLAGS if flag != "--num_gpus=0"] + ["--virtual_devices=2"]
    statuses, texts = finish(start(tmp_path / "run", flags))
    assert statuses == [0], texts
    assert_same_run(workdir, tmp_path / "run", tolerance=1e-5)


@needs_keras_2
@pytest.mark.slow
def test_the_chief_alone_writes_and_prints(two_workers):
    workdir, ((output, _), (output_of_worker_1, errors_of_worker_1)) = two_workers
    assert "CPU:0 of worker 0, CPU:0 of worker 1" in output and f"run folder: {workdir}" in output
    assert output_of_worker_1 == ""
    lines = [line for line in errors_of_worker_1.splitlines() if "INFO" in line or "rror" in line]
    assert all(line.startswith("worker 1: ") for line in lines), lines
    assert not [path for path in workdir.rglob("*") if ".tmp" in path.name]


@needs_keras_2
@pytest.mark.slow
def test_a_lost_worker_ends_the_others_and_a_restart_goes_on_exactly(two_workers, tmp_path):
    workdir = tmp_path / "run"
    statuses, texts = run_two_workers(workdir, of_worker_1={"AT_STEP": "10", "SIGNAL": str(int(signal.SIGTERM))})
    assert statuses == [143, 143], texts
    assert [path.name for path in (workdir / "checkpoints").glob("*.ckpt")] == ["00000010.ckpt"]
    statuses, texts = run_two_workers(workdir, of_chief={"AT_STEP": "30", "SIGNAL": str(int(signal.SIGKILL))})
    assert statuses == [-signal.SIGKILL, 1], texts
    assert re.search(r"^worker 1: error: another worker was lost .* --workdir", texts[1][1], re.MULTILINE), texts
    assert "Traceback" not in texts[1][1]
    statuses, texts = run_two_slurm_tasks(workdir)
    assert statuses == [0, 0], texts
    assert "going on after step 26 of 50" in texts[0][1]
    assert_same_run(workdir, two_workers[0], tolerance=0.0)


def snippets_of_the_document():
    """The shell script, the Slurm script and the manifest's documents of docs/multi_worker.md."""
    _, shell, slurm = snippets("docs/multi_worker.md", "sh")
    (manifest,) = snippets("docs/multi_worker.md", "yaml")
    return shell, slurm, list(yaml.safe_load_all(manifest))


def container_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


# Starts what Slurm's srun would of two tasks on this host, with the variables by which TensorFlow finds the workers.
SRUN = f"""#!{sys.executable}
import os, random, subprocess, sys
step = {SLURM_STEP} | {{"SLURM_JOB_ID": str(random.randrange(10_000))}}
tasks = [subprocess.Popen(sys.argv[1:], env=os.environ | step | {{"SLURM_PROCID": str(i)}}) for i in (0, 1)]
sys.exit(max(task.wait(timeout=100) for task in tasks))
"""


@needs_keras_2
@pytest.mark.slow
@pytest.mark.parametrize("name", ["shell", "slurm", "kubernetes"])
def test_a_snippet_of_the_document_trains_on_two_workers(name, tmp_path):
    """As they stand, but for the hosts, the folder that is shared, and fewer steps on fewer images."""
    two_hosts, slurm, (_, job) = snippets_of_the_document()
    scripts = {"shell": [two_hosts], "slurm": [slurm], "kubernetes": container_of(job)["args"] * 2}[name]
    train, ports = "fashion_oct.train", iter(free_ports(2))
    changes = {
        host: f"127.0.0.1:{next(ports)}"
        for host in ("127.0.0.1:2222", "127.0.0.1:2223", "train-0.workers:2222", "train-1.workers:2222")
        if host in scripts[0]
    }
    assert name == "slurm" or len(changes) == 2
    changes |= {"/shared/": f"{tmp_path}/", train: f"{train} --data_dir={SAMPLE} --steps=8"}
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
    shell, processes = "sh" if name == "kubernetes" else "bash", []
    for index, text in enumerate(scripts):
        script = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], text)
        processes.append(start_command([shell, "-c", script], tmp_path, PATH=path, JOB_COMPLETION_INDEX=str(index)))
    statuses, texts = finish(*processes)
    assert set(statuses) == {0}, texts
    assert "of worker 0" in texts[0][0] and "of worker 1" in texts[0][0], texts
    (report,) = tmp_path.glob("runs/*/evaluation.json")
    assert json.loads(report.read_text())["num_examples"] == 1000


def test_the_manifest_of_the_document_fits_together():
    _, _, (service, job) = snippets_of_the_document()
    container, pod = container_of(job), job["spec"]["template"]["spec"]
    hosts = json.loads(re.search(r"TF_CONFIG='(.*\}), *\n", container["args"][0]).group(1) + "}")["cluster"]["worker"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(hosts)
    (port,) = container["ports"]
    name, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    assert hosts == [f"{name}-{i}.{subdomain}:{port['containerPort']}" for i in range(len(hosts))]
    assert pod["subdomain"] == subdomain and service["spec"]["selector"] == {"job-name": name}
    assert [m["name"] for m in container["volumeMounts"]] == [v["name"] for v in pod["volumes"]]


@pytest.mark.parametrize(("task_type", "index", "worker"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_find_numbers_the_chief_first(monkeypatch, task_type, index, worker):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": HOSTS, "task": {"type": task_type, "index": index}}))
    assert cluster.find() == cluster.Task(worker, 3)


@pytest.mark.parametrize("text", [None, "", "{}", '{"task": {"type": "worker", "index": 0}}'])
def test_find_takes_a_process_without_a_cluster_as_alone(monkeypatch, text):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    assert cluster.find() == cluster.Task(0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "3", '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}',
    ],
)  # fmt: skip
def test_find_refuses_a_damaged_tf_config(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(InputError, match=r"TF_CONFIG=.* cannot be used .*: give \{"):
        cluster.find()


def test_find_refuses_slurm_outside_of_a_step(monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(InputError, match=r"--cluster=slurm, .* start it by srun"):
        cluster.find("slurm")


def test_make_strategy_refuses_virtual_devices_of_several_workers(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": HOSTS, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(InputError, match="--virtual_devices=2, but there are 3 workers"):
        distribution.make_strategy(virtual_devices=2, cluster_source="auto")


def examples_of(count):
    images = np.arange(count, dtype=np.uint8).reshape(count, 1, 1, 1)
    return input_pipeline.ArrayExamples(images, np.arange(count))


def labels_of(dataset):
    return [labels.numpy().tolist() for _, labels in dataset]


def test_make_training_dataset_deals_each_batch_out_in_the_order_of_the_replicas():
    arguments = {"global_batch_size": 12, "seed": 3, "num_steps": 5, "start_step": 2}
    examples = examples_of(20)
    whole = labels_of(input_pipeline.make_training_dataset(examples, **arguments))
    shares = [input_pipeline.Share(first, 2, 4) for first in (0, 2)]  # 2 workers of 2 replicas of 3 images
    one, other = (labels_of(input_pipeline.make_training_dataset(examples, **arguments, share=s)) for s in shares)
    assert len(one) == len(other) == 3 * 2
    for step, batch in enumerate(whole):
        assert one[2 * step] + one[2 * step + 1] + other[2 * step] + other[2 * step + 1] == batch


def test_make_evaluation_dataset_deals_out_every_example_once():
    shares = [input_pipeline.Share(first, 2, 4) for first in (0, 2)]
    one, other = (
        labels_of(input_pipeline.make_evaluation_dataset(examples_of(15), global_batch_size=8, share=share))
        for share in shares
    )
    assert one == [[0, 1], [2, 3], [8, 9], [10, 11]]  # 15 = 8 + 7; 7 to four replicas: 2 + 2 + 2 + 1
    assert other == [[4, 5], [6, 7], [12, 13], [14]]
