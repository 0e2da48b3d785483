"""The report page, of run folders made by hand: what it holds, that nothing gets out of its text, and bad folders."""

import base64
import html.parser
import json
import re
import subprocess
import sys

import pytest

from fashion_oct import html_report, options, report
from fashion_oct.errors import InputError

Image = pytest.importorskip("PIL.Image")

EVIL = '<script>alert("1")</script>'
VOID = {"meta", "img"}


def settings(**changes):
    config = {"model": "convnet", "dataset": "fashion_mnist", "epochs": 2, "steps": None, "augment": False}
    dataset = {"source": "IDX files in /data", "is_sample": False, "num_train": 60000, "num_validation": 0}
    dataset |= {"num_test": 100, "image_shape": [28, 28, 1], "class_names": ["CNV", "DME"], "bad_images": []}
    plan = {"devices": ["GPU:0", "GPU:1"], "precision": "float32", "precision_reason": "asked for", "num_steps": 20}
    return {
        "config": config | changes.get("config", {}),
        "plan": plan,
        "dataset": dataset | changes.get("dataset", {}),
        "versions": {"tensorflow": "2.99.1"},
        "host": {"machine": "x86_64", "num_cpus": 2},
    }


def timing(**changes):
    values = {"num_replicas": 2, "per_replica_batch_size": 32, "global_batch_size": 64, "num_steps": 20}
    values |= {"num_discarded_steps": 1, "first_step_seconds": 1.5, "total_seconds": 6.0, "images_per_second": 1234.5}
    values |= {"step_seconds": {"mean": 0.25, "p50": 0.2, "p90": 0.3, "p99": 0.4, "max": 0.5}}
    return values | {"ledger_seconds": {"start-up": 2.0, "steps": 6.0}} | changes


def evaluation(**changes):
    per_class = {
        "CNV": {"sensitivity": 0.91, "specificity": 0.92, "precision": 0.93, "f1": 0.94, "auc": None},
        "DME": {"sensitivity": 0.81, "specificity": 0.82, "precision": 0.83, "f1": 0.84, "auc": 0.85},
    }
    values = {"num_examples": 100, "loss": 0.321, "accuracy": 0.9, "accuracy_ci95": [0.82564, 0.94477]}
    values |= {"confusion_matrix": [[45, 5], [5, 45]], "class_names": ["CNV", "DME"], "per_class": per_class}
    return values | {"mcc": 0.8, "macro_auc": None} | changes


@pytest.fixture
def make_run(tmp_path):
    """Writes a run folder; `plots` maps names to widths in pixels."""

    def make(name="run", *, config=None, times=None, test=None, plots=(), history="epoch,loss\n1,0.5\n2,0.123456789\n"):
        run = tmp_path / name
        (run / "plots").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(config or settings()), encoding="utf-8")
        (run / "timing.json").write_text(json.dumps(times or timing()), encoding="utf-8")
        (run / "evaluation.json").write_text(json.dumps(test or evaluation()), encoding="utf-8")
        (run / "history.csv").write_text(history, encoding="utf-8")
        for plot in plots:
            Image.new("L", (300, 150), 128).save(run / "plots" / f"{plot}.png")
        return run

    return make


class Parsed(html.parser.HTMLParser):
    """The page as a browser sees it: elements with their attributes, visible text, rows of cells."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.words, self.rows, self.strong = [], [], [], [], []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())
        self.rows = [tuple(" ".join("".join(cell).split()) for cell in row) for row in self.rows]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("tr", "dl"):
            self.rows.append([])
        if tag in ("th", "td", "dt", "dd"):
            self.rows[-1].append([])
        if tag == "dt":
            self.rows.append([self.rows[-1].pop()])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if {"th", "td", "dt", "dd"} & set(self.open):
            self.rows[-1][-1].append(data)
            if "strong" in self.open:
                self.strong.append(data)


def parse(*runs):
    parsed = Parsed(html_report.render([html_report.read_run(run) for run in runs]))
    assert not parsed.open
    return parsed


# --- what the page holds ---------------------------------------------------------------------------------------------


def test_render_shows_the_figures_of_the_test_split_with_their_interval(make_run):
    page = parse(make_run())
    assert "Test accuracy 0.9000 (95% interval 0.8256 to 0.9448, Wilson), loss 0.3210" in page.text
    assert ("class", "sensitivity", "specificity", "precision", "f1", "auc") in page.rows
    assert ("CNV", "0.9100", "0.9200", "0.9300", "0.9400", "n/a") in page.rows
    assert ("MCC", "0.8000") in page.rows


def test_render_shows_seconds_and_shares_of_the_ledger(make_run):
    rows = parse(make_run()).rows  # 2 s and 6 s of 8 s
    assert rows[rows.index(("wall time", "seconds", "share")) + 1 :][:3] == [
        ("start-up", "2.00", "25.0%"),
        ("steps", "6.00", "75.0%"),
        ("total", "8.00", "100.0%"),
    ]


def test_render_shows_throughput_and_step_percentiles(make_run):
    rows = parse(make_run()).rows
    assert {("images a second", "1,234.5"), ("step p50, ms", "200.00"), ("step p99, ms", "400.00")} <= set(rows)


def test_render_shows_settings_versions_devices_and_data(make_run):
    rows = parse(make_run()).rows
    assert {("epochs", "2"), ("steps", "default"), ("augment", "false"), ("tensorflow", "2.99.1")} <= set(rows)
    assert {("devices", "GPU:0, GPU:1"), ("source", "IDX files in /data"), ("train images", "60,000")} <= set(rows)
    assert ("image, pixels", "28 x 28 x 1") in rows


def test_render_shows_the_figures_of_each_epoch(make_run):
    assert {("epoch", "loss"), ("1", "0.5"), ("2", "0.123457")} <= set(parse(make_run()).rows)


def test_render_embeds_the_plots_byte_by_byte(make_run):
    run = make_run(plots=list(html_report.PLOTS))
    images = [attributes for tag, attributes in parse(run).elements if tag == "img"]
    embedded = [base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) for image in images]
    assert embedded == [(run / "plots" / f"{name}.png").read_bytes() for name in html_report.PLOTS]
    assert (images[0]["width"], images[0]["height"]) == ("192", "96")  # 300 x 150 pixels of 1/150 inch, 96 to the inch


def test_render_says_how_a_missing_plot_is_drawn(make_run):
    run = make_run(plots=["history"])
    page = parse(run)
    assert page.text.count("there is no picture") == 3
    assert f"python -m fashion_oct.evaluate --workdir={run}" in page.text


def test_render_needs_no_picture_of_mistakes_where_there_are_none(make_run):
    run = make_run(plots=["history", "confusion_matrix", "roc"], test=evaluation(accuracy=1.0))
    page = parse(run)
    assert "No mistakes" in page.text
    assert "there is no picture" not in page.text


def test_render_warns_of_leaks_before_the_first_figure(make_run):
    rest = {"num_examples": 40, "accuracy": 0.75}
    page = parse(make_run(test=evaluation(warning="60 of 100 test images leak", disjoint_rest=rest)))
    warning = "Warning: 60 of 100 test images leak. Accuracy on the other 40 images: 0.7500"
    assert 0 < page.text.index(warning) < page.text.index("Test accuracy")


def test_render_warns_of_a_leak_that_leaves_no_image(make_run):
    rest = {"num_examples": 0, "accuracy": None}
    page = parse(make_run(test=evaluation(warning="all leak", disjoint_rest=rest)))
    assert "all leak. Accuracy on the other 0 images: none" in page.text


def test_render_warns_of_sample_data_and_names_images_left_out(make_run):
    bad = [[f"CNV-{k}.jpeg", "truncated"] for k in range(23)]
    page = parse(make_run(config=settings(dataset={"is_sample": True, "bad_images": bad})))
    assert "small sample" in page.text
    assert "Images left out because they cannot be used: 23." in page.text
    assert ("CNV-19.jpeg", "truncated") in page.rows
    assert ("CNV-20.jpeg", "truncated") not in page.rows
    assert "and 3 more" in page.text


def test_render_without_warnings_has_none(make_run):
    assert "Warning" not in parse(make_run()).text


def test_render_takes_a_run_without_timed_steps_scikit_learn_and_history(make_run):
    test = evaluation()
    del test["mcc"], test["macro_auc"]
    run = make_run(times=timing(images_per_second=None, step_seconds=None), test=test)
    (run / "history.csv").unlink()
    page = parse(run)
    assert ("images a second", "n/a") in page.rows
    assert "MCC" not in page.text
    assert "Figures by epoch" not in page.text


# --- several runs ----------------------------------------------------------------------------------------------------


def test_render_sets_the_best_of_several_runs_in_bold(make_run):
    fast = make_run("fast", times=timing(images_per_second=2000.0, ledger_seconds={"steps": 5.0}))
    good = make_run("good", test=evaluation(accuracy=0.95, loss=0.2))
    page = parse(fast, good)
    assert ("test accuracy", "0.9000", "0.9500") in page.rows
    assert ("total time of the run, s", "5.0", "8.0") in page.rows
    assert page.strong[:4] == ["0.9500", "0.2000", "2,000.0", "5.0"]  # the time of the steps is equal: none is best


def test_render_lists_only_the_settings_that_differ(make_run):
    page = parse(make_run("a"), make_run("b", config=settings(config={"epochs": 7})))
    side_by_side = page.rows[: page.rows.index(("source", "IDX files in /data"))]
    assert ("epochs", "2", "7") in side_by_side
    assert not [row for row in side_by_side if row[:1] in (("model",), ("steps",))]


@pytest.mark.parametrize(
    "other",
    [
        {"num_examples": 99},
        {"class_names": ["CNV", "NORMAL"]},
        {"warning": "leak", "disjoint_rest": {"num_examples": 1, "accuracy": 1.0}},
    ],
)
def test_render_calls_no_accuracy_best_where_the_test_data_differ(make_run, other):
    page = parse(make_run("a"), make_run("b", test=evaluation(accuracy=0.99, loss=0.1, **other)))
    assert "accuracy and loss do not compare" in page.text
    assert "0.9900" not in page.strong
    assert "0.1000" not in page.strong


def test_render_links_to_a_section_of_each_run(make_run):
    elements = parse(make_run("a"), make_run("b")).elements
    links = [attributes["href"] for tag, attributes in elements if tag == "a"]
    assert links == [f"#{attributes['id']}" for tag, attributes in elements if tag == "section"] == ["#run-1", "#run-2"]


def test_render_of_one_run_has_no_table_side_by_side(make_run):
    assert "Side by side" not in parse(make_run()).text


# --- nothing gets out of its text ------------------------------------------------------------------------------------


def with_texts(make_run, text):
    per_class = {text: {text: 0.5}}
    test = evaluation(class_names=[text], per_class=per_class, urgent={text: 1.0})
    test |= {"warning": text, "disjoint_rest": {"num_examples": 1, "accuracy": 0.5}}
    dataset = {"source": text, "class_names": [text], "bad_images": [[text, text]], "image_shape": [text]}
    config = settings(config={text: text, "model": text}, dataset=dataset)
    config["plan"] |= {"devices": [text], "precision": text, "precision_reason": text}
    config["versions"] = config["host"] = {text: text}
    times = timing(step_seconds={text: 1.0}, ledger_seconds={text: 1.0})
    name = text.replace("/", "_") + "' onerror='x"  # a folder's name has no slash
    return make_run(
        name, config=config, times=times, test=test, plots=["roc"], history=f"{text.replace(chr(34), '')}\n1"
    )


@pytest.mark.parametrize("count", [1, 2])
def test_render_escapes_every_text(make_run, count):
    page, tame = (parse(*[with_texts(make_run, text)] * count) for text in (EVIL, "tame"))
    assert page.text.count(EVIL) > 20
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in tame.elements}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_render_refers_to_nothing_outside_the_page(make_run):
    page = html_report.render([html_report.read_run(with_texts(make_run, EVIL))])
    elements = Parsed(page).elements
    targets = [value for _, attributes in elements for name, value in attributes.items() if name in ("src", "href")]
    assert targets
    assert all(target.startswith(("data:image/png;base64,", "#run-")) for target in targets)
    assert not re.search(r"url\(|@import", page)
    policy = {"http-equiv": "Content-Security-Policy"}.items()
    assert [a["content"] for tag, a in elements if tag == "meta" and policy <= a.items()] == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    ]


def test_render_is_made_for_phones_and_print(make_run):
    page = html_report.render([html_report.read_run(make_run())])
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in Parsed(page).elements
    assert "@media print" in page
    assert page.count("<table") == page.count('<div class="scroll" tabindex="0"><table') > 0


def test_write_takes_texts_that_are_no_utf_8_and_cuts_long_ones(make_run, tmp_path):
    source = "a\ud800\u202e\0\nb" + 600 * "c"
    run = make_run(config=settings(dataset={"source": source}))
    html_report.write([str(run)], str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"<dd>a????b{493 * 'c'}…</dd>" in text  # 500 characters in all


# --- bad input -------------------------------------------------------------------------------------------------------


def test_read_run_names_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="nowhere is no folder"):
        html_report.read_run(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "timing.json", "evaluation.json"])
def test_read_run_refuses_an_unfinished_run(make_run, name):
    run = make_run()
    (run / name).unlink()
    with pytest.raises(InputError, match=f"has no {name}: give the folder of a finished run"):
        html_report.read_run(run)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"\xff"),
        ("timing.json", b"[]"),
        ("timing.json", b'{"total_seconds": NaN}'),
        ("evaluation.json", b"[" * 100_000),
        ("history.csv", b"epoch,loss\n1\n"),
        ("history.csv", b"epoch\n1,2\n"),
        ("history.csv", b"\xff"),
        ("plots/roc.png", b"<svg/>"),
        ("plots/roc.png", b"\x89PNG\r\n\x1a\nIEND\xaeB`\x82"),
    ],
)
def test_read_run_names_a_damaged_file(make_run, name, content):
    run = make_run()
    (run / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{run / name} cannot be read")):
        html_report.read_run(run)


def test_read_run_refuses_a_plot_that_was_cut_short(make_run):
    run = make_run(plots=["roc"])
    plot = run / "plots" / "roc.png"
    plot.write_bytes(plot.read_bytes()[:-1])
    with pytest.raises(InputError, match="no whole PNG"):
        html_report.read_run(run)


@pytest.mark.parametrize("name", ["config.json", "timing.json", "evaluation.json", "history.csv", "plots/roc.png"])
def test_read_run_refuses_files_that_are_too_large(make_run, name):
    run = make_run()
    with open(run / name, "wb") as stream:
        stream.truncate((64 << 20) + 1)  # sparse: takes no disk
    with pytest.raises(InputError, match="it has more than"):
        html_report.read_run(run)


@pytest.mark.parametrize("key", ["config", "plan", "dataset", "versions", "host"])
@pytest.mark.parametrize("value", [None, 1, "text", ["x"]])
def test_render_refuses_settings_of_another_kind(make_run, key, value):
    run = make_run(config=settings() | {key: value})
    with pytest.raises(InputError, match=re.escape(f"{run} cannot be read")):
        parse(run)


@pytest.mark.parametrize("key", ["total_seconds", "ledger_seconds", "step_seconds", "images_per_second", "num_steps"])
@pytest.mark.parametrize("value", ["text", ["x"], {"x": "y"}])
def test_render_refuses_a_timing_of_another_kind(make_run, key, value):
    with pytest.raises(InputError, match="cannot be read"):
        parse(make_run(times=timing(**{key: value})))


@pytest.mark.parametrize("key", ["accuracy", "loss", "accuracy_ci95", "per_class", "num_examples"])
@pytest.mark.parametrize("value", ["text", ["x"], {"x": "y"}])
def test_render_refuses_an_evaluation_of_another_kind(make_run, key, value):
    with pytest.raises(InputError, match="cannot be read"):
        parse(make_run(test=evaluation(**{key: value})))


def test_render_refuses_numbers_beyond_all_bounds(make_run):
    with pytest.raises(InputError, match="OverflowError"):
        parse(make_run(test=evaluation(loss=10**400)))


@pytest.mark.parametrize("out", ["model.keras", "folder.html", "nowhere/page.html"])
def test_write_refuses_a_place_that_is_none_for_a_page(make_run, tmp_path, out):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InputError, match="--out="):
        html_report.write([str(make_run())], str(tmp_path / out))


def test_write_keeps_the_earlier_page_where_a_run_is_damaged(make_run, tmp_path):
    page, run = tmp_path / "page.html", make_run(test={"accuracy": 1})
    page.write_text("earlier")
    with pytest.raises(InputError):
        html_report.write([str(run)], str(page))
    assert page.read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


# --- the command -----------------------------------------------------------------------------------------------------


def command(*arguments):
    with pytest.raises(SystemExit) as exit_:
        options.run_command(
            report.run, report.define_flags, usage=report.__doc__, argv=["report", *map(str, arguments)]
        )
    return exit_.value.code


def test_report_writes_the_page_and_says_so(make_run, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert command(make_run("a"), make_run("b"), f"--out={out}") == 0
    assert capsys.readouterr().out == f"report: {out} (2 runs, 0.0 MB)\n"
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_report_tells_bad_input_in_one_line(tmp_path, capsys):
    assert command(tmp_path / "nowhere", f"--out={tmp_path / 'page.html'}") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_report_wants_a_run(capsys):
    assert command() == 2
    assert "no run folders" in capsys.readouterr().err


def test_report_imports_no_tensorflow():
    code = "import sys, fashion_oct.report; assert not {'tensorflow', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
