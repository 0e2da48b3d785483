"""Flags: what they mean, and that bad ones are told in one line, at once, without TensorFlow."""

import subprocess
import sys
import time

import pytest
from absl import flags

from fashion_oct import options
from fashion_oct.errors import InputError


def parse(*arguments):
    flag_values = flags.FlagValues()
    options.define_train_flags(flag_values)
    flag_values(["train", *arguments])
    return options.config_from_flags(flag_values)


def test_config_from_flags_takes_the_defaults_of_the_model():
    convnet, vgg16 = parse(), parse("--model=vgg16")
    assert (convnet.dataset, convnet.per_replica_batch_size, convnet.epochs) == ("fashion_mnist", 512, 5)
    assert (vgg16.dataset, vgg16.per_replica_batch_size) == ("oct2017", 64)


def test_config_from_flags_keeps_what_was_given():
    config = parse("--global_batch_size=96", "--epochs=2", "--learning_rate=0.5")
    assert (config.global_batch_size, config.per_replica_batch_size) == (96, None)
    assert (config.epochs, config.learning_rate) == (2, 0.5)


@pytest.mark.parametrize(
    "arguments", [("--per_replica_batch_size=4", "--global_batch_size=8"), ("--num_gpus=1", "--virtual_devices=2")]
)
def test_config_from_flags_refuses_contradictions(arguments):
    with pytest.raises(InputError, match="give one of the two"):
        parse(*arguments)


def test_to_flags_repeats_the_config(tmp_path):
    config = parse("--epochs=3", "--augment", "--global_batch_size=100", "--workdir=elsewhere", "--learning_rate=3e-4")
    flagfile = tmp_path / "flags.txt"
    flagfile.write_text(config.to_flags())
    again = parse(f"--flagfile={flagfile}", "--workdir=elsewhere")
    assert again == config


BAD_FLAGS = {
    "--model=resnet": "convnet|vgg16",
    "--dataset=mnist": "fashion_mnist|oct2017",
    "--global_batch_size=0": "positive",
    "--per_replica_batch_size=-5": "positive",
    "--epochs=0": "positive",
    "--epochs=two": "two",
    "--virtual_devices=0": "positive",
    "--num_gpus=-1": "non-negative",
    "--precision=float8": "mixed_bfloat16",
    "--learning_rate=0": "0",
    "--validation_fraction=1": "0.9",
    "--modle=convnet": "model",
    "stray": "stray",
    "--flagfile=missing.flags": "missing.flags",
    "--noaugment=1": "noaugment",
    "--learning_rate=nan": "finite",
    "--cache_limit_gb=inf": "finite",
    "--data_dir=a\0b": "null bytes",
}


@pytest.mark.parametrize("argument", BAD_FLAGS)
def test_run_command_tells_a_bad_flag_in_one_line(argument, capsys):
    def run(flag_values, arguments):
        options.refuse_arguments(arguments)
        options.config_from_flags(flag_values)
        raise AssertionError("the flag was taken")

    with pytest.raises(SystemExit) as stop:
        options.run_command(run, options.define_train_flags, usage="usage", argv=["train", argument])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert BAD_FLAGS[argument] in captured.err


def test_run_command_answers_ctrl_c_with_130(capsys):
    def run(flag_values, arguments):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        options.run_command(run, options.define_train_flags, usage="usage", argv=["train"])
    assert stop.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "prepare", "benchmark", "export", "report"])
def test_help_answers_without_tensorflow(command):
    code = (
        "import sys, fashion_oct\n"
        f"from fashion_oct import {command}\n"
        f"sys.argv = ['{command}', '--help']\n"
        f"try: {command}.main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'tensorflow' not in sys.modules, 'TensorFlow was imported'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"python -m fashion_oct.{command}" in result.stdout
    lines = result.stdout.splitlines()
    assert len(lines) <= 52  # a screen
    assert max(map(len, lines)) <= 120


def test_help_and_errors_answer_in_half_a_second():
    seconds = []
    for argument in ("--help", "--epochs=0", "--help", "--epochs=0", "--help"):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fashion_oct.train", argument], capture_output=True, check=False)
        seconds.append(time.perf_counter() - start)
    assert (
        min(seconds) < 0.5
    )  # the smallest of five: other processes disturb, the command does not get faster by chance
