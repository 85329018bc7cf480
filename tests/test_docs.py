"""Every Python example in the README and the docs runs; those of a page go on from one another."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = {page.name: re.findall(r"```python\n(.*?)```", page.read_text(), re.S) for page in PAGES}


def test_there_are_examples():
    assert EXAMPLES["README.md"]


@pytest.mark.parametrize("page", [page for page in EXAMPLES if EXAMPLES[page]])
def test_examples_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for number, code in enumerate(EXAMPLES[page]):
        exec(compile(code, f"{page} example {number}", "exec"), names)
