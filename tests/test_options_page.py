"""docs/options.md is what the fields of the options say: `python docs/make_options.py` writes its tables."""

import dataclasses
import importlib.util
import pathlib
import re

from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.resume_rules import RULES

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "options.md"


def make_options():
    spec = importlib.util.spec_from_file_location("make_options", PAGE.with_name("make_options.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    page = PAGE.read_text()
    assert make_options().render(page) == page, "python docs/make_options.py"


def test_every_option_is_on_the_page_with_a_rule():
    listed = re.findall(r"^\| `--([a-z0-9-]+)` \| `.*?` \|", PAGE.read_text(), re.M)
    assert sorted(listed) == sorted(field.name.replace("_", "-") for field in dataclasses.fields(TrainConfig))
    assert make_options().PYTHON.keys() <= {field.name for field in dataclasses.fields(TrainConfig)}
    assert {field.metadata["resume"] for field in dataclasses.fields(TrainConfig)} == set(RULES)
