"""The README and the pages of docs/, and the Python examples in them, in groups that different workers run."""

import pathlib
import re
from unittest import mock

import pytest

from jfsdp_models import llama  # pyright: ignore[reportMissingImports]

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = {page.name: found for page in PAGES if (found := re.findall(r"```python\n(.*?)```", page.read_text(), re.S))}

# Pages of a group have models in common. Those in `SLOW` show what other tests prove, and run in the proofs.
STEPS = ["training.md", "memory.md", "long-context.md", "context.md", "strategies.md", "programs.md"]
MODELS = ["models.md", "fine-tune.md", "adapters.md"]
OTHERS = [page for page in EXAMPLES if page not in STEPS + MODELS]
SLOW = ["programs.md", "strategies.md", "memory.md", "context.md", "long-context.md", "pipelines.md"]
SLOW += ["fine-tune.md", "adapters.md"]
# XLA compiles a step of one layer in a third of the time that it takes for the four of llama-tiny.
SMALLER = {"llama-tiny": llama.JOBS["llama-tiny"]["configure"](num_layers=1)}


def cases(group: list[str]) -> list:
    return [pytest.param(page, marks=[pytest.mark.proof] * (page in SLOW)) for page in group]


def run(page: str) -> None:
    """Run the examples of a page one after another, in one namespace."""
    names = {"__name__": "example"}
    with mock.patch.dict(llama.JOBS, SMALLER):
        for number, code in enumerate(EXAMPLES[page]):
            exec(compile(code, f"{page} example {number}", "exec"), names)
