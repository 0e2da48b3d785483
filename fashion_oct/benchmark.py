"""Measures training throughput and total time against the number of replicas, and says what limits them.

  python -m fashion_oct.benchmark --replicas=1,2
  python -m fashion_oct.benchmark --replicas=1 --baseline=article     beside the tutorial's own loop
  python -m fashion_oct.benchmark --model=vgg16 --whole_runs          total time, beside the tutorial's whole loop
  python -m fashion_oct.benchmark --batch_factors=1,2,4,8             test accuracy against the global batch

Takes the flags of train, too (python -m fashion_oct.train --help). Without GPUs the replicas are logical CPU devices.
Writes scaling.json, scaling.csv and scaling.png; expect a minute or two a number of replicas for the ConvNet on two
cores.
"""

import json
import pathlib
import sys
from typing import Any

from absl import flags

from fashion_oct import options, quiet
from fashion_oct.errors import InputError


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of this command, after those of train."""
    options.define_train_flags(flag_values)
    where: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_list("replicas", ["1", "2"], "numbers of replicas to measure", **where)
    flags.DEFINE_enum("scaling", "weak", ["weak", "strong"], "keep the per-replica (weak) or global batch", **where)
    flags.DEFINE_integer("timed_steps", 60, "steps of a repeat", lower_bound=5, **where)
    flags.DEFINE_integer("repeats", 5, "repeats of each kind of run", lower_bound=1, **where)
    flags.DEFINE_enum("baseline", "none", ["none", "article"], "measure the tutorial's own loop as well", **where)
    flags.DEFINE_boolean("whole_runs", False, "time whole runs of train and of the tutorial's loop instead", **where)
    flags.DEFINE_list("batch_factors", [], "instead: accuracy at these multiples of the reference batch", **where)
    flags.DEFINE_list("rules", ["none", "sqrt"], "values of --lr_scaling to compare", **where)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "seeds of that comparison", **where)
    flags.DEFINE_string("out", "runs/benchmark", "folder to write", **where)
    flags.DEFINE_integer("point", None, "internal: measure this number of replicas in this process", **where)


def run(flag_values: flags.FlagValues, arguments: list[str]) -> int:
    """Measures every number of replicas, or as a point's process one."""
    options.refuse_arguments(arguments)
    config = options.config_from_flags(flag_values)
    values: dict[str, Any] = {name: flag_values[name].value for name in flag_values}
    if values["batch_factors"]:
        return study_batches(config, values)
    measures_points = values["point"] is None and not values["whole_runs"]
    if measures_points and values["scaling"] == "weak" and config.global_batch_size is not None:
        raise InputError("--global_batch_size is for --scaling=strong: give --per_replica_batch_size, or that")
    replicas = parse_numbers("replicas", values["replicas"], at_least=1)
    quiet.import_tensorflow()
    from fashion_oct import benchmarking

    if values["point"] == benchmarking.ARTICLE:
        benchmarking.run_article(config)
        return 0
    if values["point"]:
        config = benchmarking.point_config(config, values["point"], is_strong=values["scaling"] == "strong")
        has_article = values["baseline"] == "article"
        point = benchmarking.measure_point(
            config, num_steps=values["timed_steps"], num_repeats=values["repeats"], has_article=has_article
        )
        print(benchmarking.POINT_MARK + json.dumps(point))
        return 0
    if values["whole_runs"]:
        print(benchmarking.compare_whole_runs(config, pathlib.Path(values["out"])))
        return 0
    command = [sys.executable, "-m", "fashion_oct.benchmark", *sys.argv[1:]]
    points, failures = benchmarking.run_points({n: [*command, f"--point={n}"] for n in replicas})
    print(benchmarking.report(pathlib.Path(values["out"]), points, failures))
    return 1 if failures else 0


def study_batches(config: options.Config, values: dict) -> int:
    """Trains at several batch sizes and compares test accuracies."""
    from fashion_oct import batch_study

    rules = values["rules"]
    if unknown := sorted(set(rules) - set(options.LR_SCALINGS)):
        raise InputError(f"--rules={','.join(rules)}: {unknown[0]!r} is none of {', '.join(options.LR_SCALINGS)}")
    words = batch_study.run_study(
        config,
        pathlib.Path(values["out"]),
        factors=parse_numbers("batch_factors", values["batch_factors"], at_least=1),
        rules=rules,
        seeds=parse_numbers("seeds", values["seeds"], at_least=0),
    )
    print(words)
    return 0


def parse_numbers(name: str, texts: list[str], *, at_least: int) -> list[int]:
    """Returns the numbers of a list flag, ascending, each once."""
    if not texts or not all(text.strip().isdigit() and int(text) >= at_least for text in texts):
        raise InputError(f"--{name}={','.join(texts)}: give whole numbers of at least {at_least}, as in --{name}=1,2,4")
    return sorted({int(text) for text in texts})


def main() -> None:
    """The entry point."""
    options.run_command(run, define_flags, usage=__doc__, names_train_flags=False)


if __name__ == "__main__":
    main()
