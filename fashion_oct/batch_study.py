"""How test accuracy changes as the global batch grows, with and without a rule for the learning rate.

This is what more replicas do to a run: each replica brings its own batch, and nothing else changes.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from fashion_oct import files, reports
from fashion_oct.errors import RunError, reason_of_failure
from fashion_oct.options import Config


def run_study(
    config: Config, folder: pathlib.Path, *, factors: Sequence[int], rules: Sequence[str], seeds: Sequence[int]
) -> str:
    """Trains once for each factor, rule and seed, each in a process of its own, and writes table and picture.

    Runs that are finished are not repeated: the same command goes on where it was stopped.

    Args:
      config: of the reference; its reference_batch_size is the batch that the factors multiply.
      folder: gets a run folder for each run, batch_study.csv, batch_study.json and batch_study.png.
      factors: of the batch, 1 for the reference.
      rules: values of --lr_scaling.
      seeds: values of --seed.

    Returns:
      The table in words.

    Raises:
      RunError: a run failed.
    """
    assert config.reference_batch_size is not None  # the flags' defaults give it
    rows = []
    for factor in factors:
        size = factor * config.reference_batch_size
        for rule in rules:
            accuracies = [_accuracy(config, folder, size, factor=factor, rule=rule, seed=seed) for seed in seeds]
            rows.append(
                {
                    "global_batch_size": size,
                    "factor": factor,
                    "lr_scaling": rule,
                    "mean_accuracy": float(np.mean(accuracies)),
                    "min_accuracy": min(accuracies),
                    "max_accuracy": max(accuracies),
                    "num_seeds": len(seeds),
                }
            )
    reports.write_csv(folder / "batch_study.csv", rows)
    files.write_json(folder / "batch_study.json", rows)
    if reports.has_matplotlib():
        reports.plot_batch_study(folder / "batch_study.png", rows)
    lines = ["global batch  rate      test accuracy (lowest to highest seed)"]
    lines += [
        f"{row['global_batch_size']:12}  {row['lr_scaling']:8}  {row['mean_accuracy']:.4f} "
        f"({row['min_accuracy']:.4f} to {row['max_accuracy']:.4f})"
        for row in rows
    ]
    return "\n".join([*lines, f"written: {folder}"])


def _accuracy(config: Config, folder: pathlib.Path, size: int, *, factor: int, rule: str, seed: int) -> float:
    rule = "none" if factor == 1 else rule  # at the reference batch all rules are one
    workdir = folder / f"batch_x{factor}_{rule}_seed{seed}"
    settings = dataclasses.replace(
        config,
        per_replica_batch_size=None,
        global_batch_size=size,
        lr_scaling=rule,
        seed=seed,
    )
    command = [sys.executable, "-m", "fashion_oct.train", *settings.to_flags().splitlines(), f"--workdir={workdir}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{workdir} failed: {reason_of_failure(done)}")
    accuracy = json.loads((workdir / "evaluation.json").read_text())["accuracy"]
    print(f"batch {settings.global_batch_size}, {rule}, seed {seed}: {accuracy:.4f}", flush=True)
    return accuracy
