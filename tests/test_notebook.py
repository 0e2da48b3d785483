"""docs/article.ipynb runs from its first cell to its last."""

import pathlib
import sys

import pytest

SHARED_DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
NOTEBOOK = pathlib.Path(__file__).resolve().parents[1] / "docs" / "article.ipynb"


@pytest.mark.slow
def test_article_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))  # the kernel's working folder is another one
    if SHARED_DATA.is_dir():  # else its last part says that there are no scans
        monkeypatch.setenv("OCT2017", str(SHARED_DATA / "OCT2017"))
        monkeypatch.setenv("VGG16_WEIGHTS", str(SHARED_DATA / "vgg16_imagenet_notop.h5"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises at the first cell with an error
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    num_pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert "read from the start and read at once: True" in text
    assert "error: " not in text
    assert num_pictures == (8 if SHARED_DATA.is_dir() else 5)
