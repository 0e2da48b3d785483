"""The benchmark: arithmetic by hand, one real point on the bundled sample."""

import collections
import itertools
import json
import pathlib
import subprocess
import sys

import pytest

from fashion_oct import benchmark, benchmarking, options
from fashion_oct.errors import InputError

SAMPLE = pathlib.Path(benchmark.__file__).parent / "data"


def point(num_replicas, real, resident=(200, 200, 200), article=None, pipeline=1000):
    throughputs = {"real": list(real), "resident": list(resident), "pipeline": [pipeline] * 3}
    if article:
        throughputs["article"] = list(article)
    return {
        "num_replicas": num_replicas,
        "per_replica_batch_size": 10,
        "global_batch_size": 10 * num_replicas,
        "precision": "float32",
        "devices": [f"CPU:{i}" for i in range(num_replicas)],
        "steps_per_epoch": 6,
        "rates_of_repeats": throughputs,
        "step_seconds": None,
    }


def test_summarise_gives_speed_up_and_efficiency():
    rows = benchmarking.summarise([point(1, (90, 100, 120)), point(4, (250, 300, 310))])
    assert [row["images_per_second"] for row in rows] == [100, 300]  # medians
    assert [row["speed_up"] for row in rows] == [1, 3]
    assert [row["efficiency"] for row in rows] == [1, 0.75]
    # 6 steps x 10 images at 100 images/s; 6 steps x 40 images at 300 images/s
    assert [row["epoch_seconds"] for row in rows] == pytest.approx([0.6, 0.8])
    low, high = rows[0]["images_per_second_ci95"]
    assert 90 <= low <= 100 <= high <= 120


def test_summarise_compares_within_a_repeat():
    # the machine halves its speed in the second repeat: the ratio to the resident batch does not change
    rows = benchmarking.summarise([point(1, (98, 49, 98), resident=(100, 50, 100), article=(49, 24.5, 49))])
    assert rows[0]["of_resident"] == pytest.approx(0.98)
    assert rows[0]["of_article"] == pytest.approx(2)


def test_every_kind_is_measured_once_a_repeat_and_after_each_other():
    calls = []
    kinds = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    results = benchmarking._measure_in_turn(kinds, 60)
    repeats = [calls[i : i + 3] for i in range(3, len(calls), 3)]  # the first three trace, and are not counted
    assert len(repeats) == 60 and all(sorted(repeat) == list("abc") for repeat in repeats)
    assert sorted(itertools.chain(*results.values())) == list(range(4, 184))
    before = collections.Counter(pair for repeat in repeats for pair in itertools.pairwise(repeat))
    assert len(before) == 6 and min(before.values()) >= 10  # 20 of each on the average


@pytest.mark.parametrize(
    ("real", "pipeline", "expected"),
    [
        ((196, 196, 196), 1000, "compute-bound"),
        ((150, 150, 150), 150, "input-bound"),
        ((150, 150, 150), 1000, "unclear"),  # a pipeline of 5 times the model keeps nothing waiting
    ],
)
def test_verdict_says_what_limits(real, pipeline, expected):
    (row,) = benchmarking.summarise([point(1, real, pipeline=pipeline)])
    words = benchmarking.verdict(row)
    assert expected in words
    assert f"{real[0] / 200:.1%}" in words


def test_point_config_keeps_the_per_replica_batch_in_weak_scaling():
    weak = benchmarking.point_config(options.Config(per_replica_batch_size=32), 4, is_strong=False)
    assert (weak.per_replica_batch_size, weak.global_batch_size) == (32, None)
    strong = benchmarking.point_config(options.Config(per_replica_batch_size=32), 4, is_strong=True)
    assert (strong.per_replica_batch_size, strong.global_batch_size) == (None, 32)


@pytest.mark.parametrize("texts", [["0"], ["two"], [""], [], ["-1"], ["1.5"]])
def test_parse_numbers_refuses_what_is_no_number_of_replicas(texts):
    with pytest.raises(InputError, match="--replicas=1,2,4"):
        benchmark.parse_numbers("replicas", texts, at_least=1)


def test_run_points_reports_a_failure_and_goes_on(capsys):
    good = [sys.executable, "-c", f"print('{benchmarking.POINT_MARK}' + '{{\"num_replicas\": 1}}')"]
    bad = [sys.executable, "-c", "raise SystemExit('out of memory')"]
    points, failures = benchmarking.run_points({2: bad, 1: good})
    assert points == [{"num_replicas": 1}]
    assert failures == {2: "out of memory"}
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.slow
def test_benchmark_measures_replicas_beside_the_tutorial(tmp_path):
    command = [
        sys.executable, "-m", "fashion_oct.benchmark", "--replicas=1,2", f"--data_dir={SAMPLE}", f"--out={tmp_path}",
        "--timed_steps=8", "--repeats=2", "--per_replica_batch_size=64", "--baseline=article",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    scaling = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["num_replicas"] for row in scaling["points"]] == [1, 2]
    assert [row["global_batch_size"] for row in scaling["points"]] == [64, 128]
    assert all(len(values) == 2 for values in scaling["measured"][0]["rates_of_repeats"].values())
    assert set(scaling["measured"][0]["rates_of_repeats"]) == {
        "real", "resident", "pipeline", "article_pipeline", "article",
    }  # fmt: skip
    assert scaling["failed"] == {}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "bound" in done.stdout


@pytest.mark.slow
def test_whole_runs_are_timed_beside_the_tutorial(tmp_path):
    command = [
        sys.executable, "-m", "fashion_oct.benchmark", "--whole_runs", f"--data_dir={SAMPLE}", f"--out={tmp_path}",
        "--global_batch_size=500", "--epochs=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = json.loads((tmp_path / "whole_runs.json").read_text())["seconds"]
    assert set(seconds) == {"ours, empty cache", "ours, full cache", "the tutorial's loop"}
    assert all(value > 1 for value in seconds.values())
    assert "1.00 times as fast" in done.stdout
    assert (tmp_path / "full_cache" / "evaluation.json").exists()


@pytest.mark.slow
def test_batch_study_writes_a_row_a_batch_and_rule_and_goes_on_where_it_was_stopped(tmp_path):
    def study(factors, seeds):
        command = [
            sys.executable, "-m", "fashion_oct.benchmark", f"--data_dir={SAMPLE}", f"--out={tmp_path}", "--epochs=1",
            "--reference_batch_size=500", f"--batch_factors={factors}", f"--seeds={seeds}",
        ]  # fmt: skip
        subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads((tmp_path / "batch_study.json").read_text())

    rows = study("1,2", "0")
    assert [(row["global_batch_size"], row["lr_scaling"], row["num_seeds"]) for row in rows] == [
        (500, "none", 1), (500, "sqrt", 1), (1000, "none", 1), (1000, "sqrt", 1),
    ]  # fmt: skip
    assert rows[0]["mean_accuracy"] == rows[1]["mean_accuracy"]  # the reference: the same run
    reports = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/evaluation.json")}
    assert len(reports) == 3
    rates = {
        path.parent.name: json.loads((path.parent / "config.json").read_text())["plan"]["learning_rate"]
        for path in reports
    }
    expected = {"batch_x1_none_seed0": 1e-3, "batch_x2_none_seed0": 1e-3, "batch_x2_sqrt_seed0": 2**0.5 * 1e-3}
    assert rates == pytest.approx(expected)
    assert (tmp_path / "batch_study.png").stat().st_size > 10_000

    first, second = study("1", "0,1")
    assert {path: path.stat().st_mtime_ns for path in reports} == reports  # what was finished is not done again
    accuracies = [
        json.loads((tmp_path / f"batch_x1_none_seed{seed}" / "evaluation.json").read_text())["accuracy"]
        for seed in (0, 1)
    ]
    for row in (first, second):
        assert row["num_seeds"] == 2
        assert row["mean_accuracy"] == pytest.approx(sum(accuracies) / 2)
        assert (row["min_accuracy"], row["max_accuracy"]) == (min(accuracies), max(accuracies))
