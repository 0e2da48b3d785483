"""Imports point only downward (README, part Development), and what must be light is light."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "fashion_oct"
LAYERS = [
    {"cluster", "errors", "files", "network", "tfds_folder"},
    {"options", "timing", "schedules", "distribution", "fashion_mnist", "oct_folder", "reports", "row_cache"},
    {"html_report"},
    {
        "models",
        "model_file",
        "input_pipeline",
        "datasets",
        "image_cache",
        "feature_cache",
        "data_service",
        "oct2017",
        "saliency",
    },
    {"checkpoints", "ledger", "progress", "run_folder", "tensorboard_log"},
    {"planning", "building", "caching", "evaluation", "prediction", "legacy_keras", "training"},
    {"benchmarking", "batch_study", "exporting"},
    {"quiet"},
    {"train", "evaluate", "predict", "prepare", "benchmark", "export", "report"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
# imports within a layer, each for a reason
SIDEWAYS = {
    ("cluster", "errors"),
    ("progress", "checkpoints"),
    ("progress", "ledger"),
    ("datasets", "input_pipeline"),
    ("image_cache", "input_pipeline"),
    ("feature_cache", "input_pipeline"),
    ("data_service", "image_cache"),
    ("data_service", "input_pipeline"),
    ("feature_cache", "image_cache"),
    ("building", "planning"),
    ("caching", "building"),
    ("caching", "planning"),
    ("legacy_keras", "building"),
    ("legacy_keras", "evaluation"),
    ("training", "building"),
    ("training", "caching"),
    ("training", "evaluation"),
    ("training", "legacy_keras"),
    ("training", "planning"),
    ("prediction", "evaluation"),
    ("saliency", "models"),
}


def imports_of(path):
    """Returns the modules of the package that a file imports, and every name that it imports from anywhere."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fashion_oct":
            inside |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("fashion_oct."):
            inside.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom):
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
    return inside, outside


def module_of(path):
    """Returns the name that a file has in LAYERS: the module, or the folder below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted({module_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"})


def files_of(module):
    return [path for path in PACKAGE.rglob("*.py") if module_of(path) == module]


def test_every_module_has_a_layer():
    assert set(MODULES) == set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    for other in set().union(*(imports_of(path)[0] for path in files_of(module))) - {module}:
        assert LEVEL[other] < LEVEL[module] or (module, other) in SIDEWAYS, f"{module} imports {other}"


def test_timing_can_be_copied_into_any_project():
    inside, outside = imports_of(PACKAGE / "timing.py")
    assert not inside
    assert outside - set(sys.stdlib_module_names) == {"tensorflow"}


@pytest.mark.parametrize("module", ["cluster", "errors", "files", "options", "reports", "oct_folder", "fashion_mnist"])
def test_importing_does_not_import_tensorflow(module):
    code = f"import sys, fashion_oct.{module}; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("call", "home"),
    [
        ("Strategy(", {"distribution"}),
        ("tf.config", {"distribution"}),
        (".scope()", {"building", "caching", "training", "benchmarking"}),
    ],
)
def test_calls_live_in_their_module(call, home):
    users = {module_of(path) for path in PACKAGE.rglob("*.py") if call in path.read_text(encoding="utf-8")}
    assert users == home
