"""The snippets of the documents run as they stand."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def snippets(name, language="python"):
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.fixture(scope="module")
def beginning():
    names = {}
    exec(snippets("docs/timing.md")[0], names)
    return names


@pytest.mark.parametrize("snippet", snippets("docs/timing.md")[1:], ids=lambda text: text.split("\n")[0][:40])
def test_timing_snippet_runs(snippet, beginning, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(snippet, dict(beginning))
    comments = re.findall(r"print\(.*\)  # (\S.*)$", snippet, re.MULTILINE)
    for expected in comments:
        if re.fullmatch(r"[\d\[\], ]+", expected):  # what the snippet says that it prints
            assert expected in capsys.readouterr().out.split("\n")


def test_readme_snippet_of_the_callback_runs(beginning):
    (snippet,) = snippets("README.md")
    names = dict(beginning, model=beginning["make_model"](), dataset=beginning["dataset"].take(4))
    exec(snippet.replace("512", "32"), names)
    assert names["time_history"].summary().num_steps == 20


def test_commands_in_the_readme_parse():
    import shlex

    from absl import flags

    from fashion_oct import benchmark, evaluate, export, options, predict, prepare, report

    define = {
        "train": options.define_train_flags,
        "benchmark": benchmark.define_flags,
        "evaluate": evaluate.define_flags,
        "export": export.define_flags,
        "predict": predict.define_flags,
        "prepare": prepare.define_flags,
        "report": report.define_flags,
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"python -m fashion_oct\.(\w+)([^\n`|]*)", text)
    assert len(commands) > 10
    for command, arguments in commands:
        flag_values = flags.FlagValues()
        define[command](flag_values)
        words = shlex.split(arguments.replace("$rate", "1e-4"))
        flag_values([command, *(word for word in words if word != "--help")])  # an unknown flag or value raises
