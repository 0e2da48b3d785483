"""The snippets of the documents, for the tests that run them."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]


def snippets(name: str, language: str = "python") -> list[str]:
    """Returns the blocks of a language in a document, for example "docs/timing.md"."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
