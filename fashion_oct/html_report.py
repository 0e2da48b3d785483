"""Run folders in; one HTML page out, which holds its pictures and needs no other file. Imports no TensorFlow.

What the files of a run hold is not trusted: sizes are bounded, every text is escaped and cut, and the page forbids
scripts and anything from elsewhere (Content-Security-Policy).
"""

import base64
import csv
import dataclasses
import html
import io
import json
import os
import pathlib
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fashion_oct import files
from fashion_oct.errors import InputError

PLOTS = {
    "history": "Learning curves",
    "confusion_matrix": "Confusion matrix of the test split",
    "roc": "ROC curves of the test split",
    "mistakes": "Most confident mistakes",
}
_MIB = 1 << 20
_MAX_BYTES = {
    "config.json": 64 * _MIB,  # as in evaluation.py: 100,000 bad images, named with their reasons, take 20 MB
    "evaluation.json": 16 * _MIB,  # the confusion matrix of 1,000 classes takes 10 MB
    "timing.json": _MIB,
    "history.csv": 4 * _MIB,  # 80 bytes an epoch
}
_MAX_PLOT_BYTES = 16 * _MIB
_MAX_CHARACTERS = 500  # of one text on the page
_MAX_BAD_IMAGES = 20  # named on the page
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
_PLOT_DPI, _CSS_DPI = 150, 96  # of reports.py, and of a browser's pixel
# What the texts of a page are made of when a file holds something else than a run's results.
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)

_STYLE = """
:root { color-scheme: light; --line: #d0d4da; --soft: #f4f6f8; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 68rem; margin: 0 auto;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 3px solid #0072b2; }
h3 { font-size: 1.1rem; margin: 1.75rem 0 .5rem; }
.warning { background: #fff4e5; border-left: 5px solid #d55e00; padding: .6rem .9rem; margin: 1rem 0; }
.key { font-size: 1.1rem; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
thead th { background: var(--soft); vertical-align: bottom; min-width: 5rem; }
tbody th { font-weight: 400; position: sticky; left: 0; background: #fff; }
.compare td, .compare thead th + th { min-width: 7rem; max-width: 16rem; overflow-wrap: anywhere; }
dl { columns: 19rem; column-gap: 2rem; margin: .5rem 0; }
dl div { display: flex; justify-content: space-between; gap: 1rem; break-inside: avoid;
  border-bottom: 1px solid var(--line); padding: .15rem 0; }
dt { color: #57606a; flex: none; }
dd { margin: 0; text-align: right; }
figure { margin: 1rem 0; break-inside: avoid; }
img { max-width: 100%; height: auto; }
figcaption, .note { color: #57606a; font-size: .9rem; }
summary { cursor: pointer; color: #0060a0; }
@page { margin: 1.5cm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; }
  nav ~ .run { break-before: page; }
  h2, h3 { break-after: avoid; }
  table, .warning { break-inside: avoid; }
  img { max-height: 22cm; object-fit: contain; min-width: 0 !important; }
}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What the files of a finished run hold.

    Attributes:
      name: the folder, as the user gave it.
      settings: config.json.
      timing: timing.json.
      evaluation: evaluation.json.
      history: the rows of history.csv, texts by column; empty without the file.
      plots: PNG files by their name in `PLOTS`; those that were not drawn are left out.
    """

    name: str
    settings: dict[str, Any]
    timing: dict[str, Any]
    evaluation: dict[str, Any]
    history: list[dict[str, str]]
    plots: dict[str, bytes]


def write(workdirs: Sequence[str], out: str) -> str:
    """Writes the page about finished runs, atomically, and returns what was done in words.

    Raises:
      InputError: a run folder is missing, unfinished or damaged, or `out` is no place for a page.
    """
    path = pathlib.Path(out)
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--out={out}: give a file name that ends in .html, in a folder that is there")
    page = render([read_run(workdir) for workdir in workdirs])
    with files.replacing(path) as stream:
        num_characters = stream.write(page)
    return f"report: {path} ({len(workdirs)} run{'s' * (len(workdirs) > 1)}, {num_characters / 1e6:.1f} MB)"


# --- reading ---------------------------------------------------------------------------------------------------------


def read_run(workdir: str | os.PathLike) -> RunFiles:
    """Reads the files of a finished run.

    Raises:
      InputError: the folder is missing, is that of no finished run, or one of its files is damaged or too large.
    """
    folder = pathlib.Path(workdir)
    if not folder.is_dir():
        raise InputError(f"{workdir} is no folder: give a run folder that train wrote")
    for name in ("config.json", "timing.json", "evaluation.json"):
        if not (folder / name).is_file():
            raise InputError(f"{workdir} has no {name}: give the folder of a finished run")
    plots = {name: folder / "plots" / f"{name}.png" for name in PLOTS}
    return RunFiles(
        name=str(workdir),
        settings=_read_json(folder / "config.json"),
        timing=_read_json(folder / "timing.json"),
        evaluation=_read_json(folder / "evaluation.json"),
        history=_read_csv(folder / "history.csv") if (folder / "history.csv").is_file() else [],
        plots={name: _read_png(path) for name, path in plots.items() if path.is_file()},
    )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path, _MAX_BYTES[path.name]).decode("utf-8"), parse_constant=_refuse_constant)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    try:
        text = _read(path, _MAX_BYTES[path.name]).decode("utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        # DictReader puts None where a row is longer or shorter than the header.
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("a row is longer or shorter than the header")
    except (ValueError, csv.Error) as error:
        raise _damaged(path, error) from error
    return rows


def _read_png(path: pathlib.Path) -> bytes:
    png = _read(path, _MAX_PLOT_BYTES)
    if not png.startswith(_PNG_START) or png[12:16] != b"IHDR" or not png.endswith(_PNG_END) or len(png) < 45:
        raise _damaged(path, ValueError("it is no whole PNG"))
    return png


def _read(path: pathlib.Path, max_bytes: int) -> bytes:
    try:
        with open(path, "rb") as stream:
            data = stream.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return data


def _damaged(path: pathlib.Path | str, error: Exception) -> InputError:
    reason = _printable(f"{type(error).__name__}: {error}")
    return InputError(f"{path} cannot be read ({reason}): give the folder of another run")


# --- the page --------------------------------------------------------------------------------------------------------


def render(runs: Sequence[RunFiles]) -> str:
    """Returns the page about one or more runs, which refers to nothing outside it.

    Raises:
      InputError: the files of a run do not hold what those of a run do.
    """
    sections, columns = [], []
    for number, run in enumerate(runs, start=1):
        try:
            columns.append(_column(run))
            sections.append(_section(run, number))
        except _DAMAGED as error:
            raise _damaged(run.name, error) from error
    heading = "Run report" if len(runs) == 1 else f"Report of {len(runs)} runs"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{heading}: {_text(", ".join(run.name for run in runs))}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{heading}</h1>
{_comparison(columns) if len(runs) > 1 else ""}
{"".join(sections)}
</body>
</html>
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    """One run in the table side by side; a figure that was not measured is None."""

    name: str
    accuracy: float
    loss: float
    images_per_second: float | None
    step_seconds: float
    run_seconds: float
    tested_on: tuple
    settings: dict[str, str]


def _column(run: RunFiles) -> _Column:
    config, evaluation, timing = run.settings["config"], run.evaluation, run.timing
    settings = {name: value for name, value in config.items() if name not in ("workdir", "cache_dir")}
    plan = {name: run.settings["plan"][name] for name in ("devices", "precision", "num_steps")}
    return _Column(
        name=run.name,
        accuracy=evaluation["accuracy"],
        loss=evaluation["loss"],
        images_per_second=timing["images_per_second"],
        step_seconds=timing["total_seconds"],
        run_seconds=sum(timing["ledger_seconds"].values()),
        # Runs whose test splits differ, or leak differently, are not compared by their accuracy.
        tested_on=(config["dataset"], *(evaluation.get(key) for key in ("num_examples", "class_names", "warning"))),
        settings={name: _value(value, none="default") for name, value in {**settings, **plan}.items()},
    )


def _comparison(columns: Sequence[_Column]) -> str:
    is_same_test = all(column.tested_on == columns[0].tested_on for column in columns)
    accuracies, losses = [c.accuracy for c in columns], [c.loss for c in columns]
    throughputs = [c.images_per_second for c in columns]
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()  # row and column
    for name, values, best, spec in (
        ("test accuracy", accuracies, max if is_same_test else None, ".4f"),
        ("test loss", losses, min if is_same_test else None, ".4f"),
        ("images a second", throughputs, max, ",.1f"),
        ("time of the steps, s", [c.step_seconds for c in columns], min, ",.1f"),
        ("total time of the run, s", [c.run_seconds for c in columns], min, ",.1f"),
    ):
        texts = [_figure(value, spec) for value in values]
        known = [value for value in values if value is not None]
        if best and known and len(set(texts)) > 1:  # where all are equal none is best
            best_text = _figure(best(known), spec)
            bold |= {(len(rows), k) for k, text in enumerate(texts, start=1) if text == best_text}
        rows.append([name, *texts])
    names = dict.fromkeys(name for column in columns for name in column.settings)
    for name in names:
        texts = [column.settings.get(name, "") for column in columns]
        if len(set(texts)) > 1:
            rows.append([name, *texts])
    header = ["", *(f"{k}: {column.name}" for k, column in enumerate(columns, start=1))]
    different = ["The runs were tested on different data: accuracy and loss do not compare."]
    links = "".join(f'<li><a href="#run-{k}">{_text(c.name)}</a></li>' for k, c in enumerate(columns, start=1))
    return f"""<nav><ol>{links}</ol></nav>
<h2>Side by side</h2>
{_warning([] if is_same_test else different)}
<div class="compare">{_table(header, rows, bold)}</div>
<p class="note">The best is bold. Below the figures: the settings that differ.</p>
"""


def _section(run: RunFiles, number: int) -> str:
    evaluation, timing = run.evaluation, run.timing
    speed = timing["images_per_second"]
    return f"""<section class="run" id="run-{number}">
<h2>{_text(run.name)}</h2>
{_warning(_warnings(run))}
<p class="key">Test accuracy <strong>{_figure(evaluation["accuracy"])}</strong> ({_interval(evaluation)}),
loss {_figure(evaluation["loss"])}; {_figure(speed, ",.1f")} images a second on
{_text(_value(run.settings["plan"]["devices"]))}.</p>
<h3>Data</h3>
{_data(run.settings["dataset"])}
<h3>Settings</h3>
<details open><summary>All {len(run.settings["config"])} settings; "default" was left to the machine</summary>
{_definitions((name, _value(value, none="default")) for name, value in run.settings["config"].items())}
</details>
<h3>Learning curves</h3>
{_plot(run, "history")}
{_history(run.history)}
<h3>Test split</h3>
{_test_figures(evaluation)}
{_plot(run, "confusion_matrix")}
{_plot(run, "roc")}
{_plot(run, "mistakes")}
<h3>Where the time went</h3>
{_ledger(timing["ledger_seconds"])}
<h3>Throughput</h3>
{_throughput(timing)}
<h3>Versions and devices</h3>
{_machine(run.settings)}
</section>
"""


def _warnings(run: RunFiles) -> list[str]:
    """Returns what a reader must know before the first figure."""
    warnings, dataset = [], run.settings["dataset"]
    if "warning" in run.evaluation:
        rest = run.evaluation["disjoint_rest"]
        accuracy = "none" if rest["accuracy"] is None else _figure(rest["accuracy"])
        warnings.append(
            f"{run.evaluation['warning']}. Accuracy on the other {rest['num_examples']:,} images: {accuracy}"
        )
    if dataset["is_sample"]:
        warnings.append("Trained on a small sample, not on the whole dataset: the figures say little about the latter.")
    if num_bad := len(dataset["bad_images"]):
        warnings.append(f"Images left out because they cannot be used: {num_bad:,}. They are named below.")
    return warnings


def _data(dataset: dict[str, Any]) -> str:
    pairs = [("source", dataset["source"])]
    pairs += [(f"{name} images", f"{dataset[f'num_{name}']:,}") for name in ("train", "validation", "test")]
    pairs += [("image, pixels", _value(dataset["image_shape"], separator=" x "))]
    pairs += [("classes", _value(dataset["class_names"]))]
    bad = [(file, reason) for file, reason in dataset["bad_images"]]
    if not bad:
        return _definitions(pairs)
    table = _table(["image left out", "reason"], bad[:_MAX_BAD_IMAGES])
    more = len(bad) - _MAX_BAD_IMAGES
    return _definitions(pairs) + table + (f'<p class="note">and {more:,} more in config.json</p>' if more > 0 else "")


def _history(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return ""
    table = _table([name.replace("_", " ") for name in rows[0]], [map(_short, row.values()) for row in rows])
    return f"<details><summary>Figures by epoch ({len(rows):,})</summary>{table}</details>"


def _test_figures(evaluation: dict[str, Any]) -> str:
    rows = [
        ("accuracy", f"{_figure(evaluation['accuracy'])} ({_interval(evaluation)})"),
        ("loss", _figure(evaluation["loss"])),
    ]
    if "macro_auc" in evaluation:  # needs scikit-learn
        rows += [("macro AUC", _figure(evaluation["macro_auc"])), ("MCC", _figure(evaluation["mcc"]))]
    if "urgent" in evaluation:
        rows += [(f"urgent cases, {name}", _figure(value)) for name, value in evaluation["urgent"].items()]
    rows += [("images", f"{evaluation['num_examples']:,}")]
    if "num_patients" in evaluation:
        rows += [("patients", f"{evaluation['num_patients']:,}")]
    per_class = evaluation["per_class"]
    names = list(dict.fromkeys(name for figures in per_class.values() for name in figures))
    classes = [[label, *(_figure(figures[name]) for name in names)] for label, figures in per_class.items()]
    return _definitions(rows) + _table(["class", *names], classes)


def _interval(evaluation: dict[str, Any]) -> str:
    low, high = evaluation["accuracy_ci95"]
    how = "bootstrap over patients" if "num_patients" in evaluation else "Wilson"
    return f"95% interval {_figure(low)} to {_figure(high)}, {how}"


def _ledger(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    rows = [(name, value) for name, value in [*seconds.items(), ("total", total)]]
    cells = [(name, _figure(value, ",.2f"), _figure(100 * value / total, ".1f") + "%") for name, value in rows]
    return _table(["wall time", "seconds", "share"], cells, bold={(len(cells) - 1, 1)})


def _throughput(timing: dict[str, Any]) -> str:
    rows = [
        ("replicas", f"{timing['num_replicas']:,}"),
        ("images a step: replica, all", f"{timing['per_replica_batch_size']:,}, {timing['global_batch_size']:,}"),
        ("steps, of these not timed", f"{timing['num_steps']:,}, {timing['num_discarded_steps']:,}"),
        ("time of all steps, s", _figure(timing["total_seconds"], ",.2f")),
        ("first step, s", _figure(timing["first_step_seconds"], ",.2f")),
        ("images a second", _figure(timing["images_per_second"], ",.1f")),
    ]
    steps = timing["step_seconds"] or {}  # None where no step was timed
    rows += [(f"step {name}, ms", _figure(1000 * value, ",.2f")) for name, value in steps.items()]
    return _definitions(rows)


def _machine(settings: dict[str, Any]) -> str:
    plan = settings["plan"]
    pairs = [*settings["versions"].items(), *settings["host"].items()]
    pairs += [("devices", plan["devices"]), ("precision", f"{plan['precision']}: {plan['precision_reason']}")]
    return _definitions((name, _value(value)) for name, value in pairs)


def _plot(run: RunFiles, name: str) -> str:
    caption = _text(PLOTS[name])
    if name not in run.plots:
        if name == "mistakes" and run.evaluation["accuracy"] == 1:
            return '<p class="note">No mistakes on the test split.</p>'
        command = f"<code>python -m fashion_oct.evaluate --workdir={_text(run.name)}</code>"
        return f'<p class="note">{caption}: there is no picture; {command} draws it where matplotlib is installed.</p>'
    png = run.plots[name]
    width, height = (pixels * _CSS_DPI // _PLOT_DPI for pixels in struct.unpack(">II", png[16:24]))  # of IHDR
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    # Below 60% of its size a plot's text is too small to read: on a phone wide ones scroll instead.
    size = f'width="{width}" height="{height}" style="min-width: {width * 6 // 10}px"'
    image = f'<img src="{source}" {size} alt="{caption} of {_text(run.name)}">'
    scroll = f'<div class="scroll" tabindex="0">{image}</div>'
    return f"<figure>{scroll}<figcaption>{caption}</figcaption></figure>"


# --- pieces of HTML --------------------------------------------------------------------------------------------------


def _table(header: Sequence[Any], rows: Iterable[Iterable[Any]], bold: Collection[tuple[int, int]] = ()) -> str:
    """Returns a table that scrolls where it is too wide; `bold` holds (row, column) from 0."""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    lines = []
    for r, row in enumerate(rows):
        first, *others = (f"<strong>{_text(x)}</strong>" if (r, c) in bold else _text(x) for c, x in enumerate(row))
        lines.append(f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'
    )


def _definitions(pairs: Iterable[tuple[str, Any]]) -> str:
    items = "\n".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in pairs)
    return f"<dl>{items}</dl>\n"


def _warning(sentences: Sequence[str]) -> str:
    return "".join(f'<p class="warning"><strong>Warning:</strong> {_text(sentence)}</p>\n' for sentence in sentences)


def _text(value: Any) -> str:
    """Returns a value as text that may stand anywhere in HTML, in the value of an attribute too."""
    return html.escape(_printable(value), quote=True)


def _printable(value: Any) -> str:
    """Returns `value` on one line, cut at its end, with "?" for line breaks and bytes that are no text."""
    text = str(value)
    cut = text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"
    return "".join(character if character.isprintable() else "?" for character in cut)


def _value(value: Any, *, none: str = "none", separator: str = ", ") -> str:
    """Returns a setting as it is written on the command line."""
    if isinstance(value, list):
        return separator.join(str(item) for item in value)
    return none if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _figure(value: float | None, spec: str = ".4f") -> str:
    return "n/a" if value is None else f"{value:{spec}}"


def _short(text: str) -> str:
    """Returns the text of a number with six digits, any other text as it is."""
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return text
