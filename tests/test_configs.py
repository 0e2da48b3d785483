"""Every flagfile parses, says only what differs from the defaults, and has a header."""

import pathlib

import pytest
from absl import flags

from fashion_oct import options

CONFIGS = sorted((pathlib.Path(__file__).resolve().parents[1] / "configs").glob("*.flags"))


def parse(*arguments):
    flag_values = flags.FlagValues()
    options.define_train_flags(flag_values)
    assert flag_values(["train", *arguments]) == ["train"]
    return options.config_from_flags(flag_values)


def test_there_are_configs():
    assert {"smoke.flags", "fashion_convnet.flags", "fashion_convnet_article.flags"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_parses(path):
    assert parse(f"--flagfile={path}").epochs >= 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_says_only_what_differs(path):
    lines = [line for line in path.read_text().splitlines() if line.startswith("--")]
    model = [line for line in lines if line.startswith("--model")]
    assert lines
    for line in lines:
        if line not in model:
            others = [other for other in lines if other != line]
            assert parse(*others) != parse(*lines), f"{line} is the default"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_has_a_header_with_its_command(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"python -m fashion_oct.train --flagfile=configs/{path.name}" in line for line in header)
