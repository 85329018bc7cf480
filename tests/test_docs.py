"""Every Python example in the README and the docs runs."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    (page.name, number, code)
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize(("page", "number", "code"), EXAMPLES, ids=[f"{page}-{number}" for page, number, _ in EXAMPLES])
def test_example_runs(page, number, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{page} example {number}", "exec"), {"__name__": "example"})
