"""docs/options.md lists every option of the training script once, with its default."""

import dataclasses
import pathlib
import re

import pytest

from jfsdp.trainer.run.config import TrainConfig

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "options.md"
ROWS = re.findall(r"^\| `--([a-z-]+)` \| `(.*?)` \|", PAGE.read_text(), re.M)
FIELDS = {field.name.replace("_", "-"): field for field in dataclasses.fields(TrainConfig)}


def spell(default):
    """Write a default as the page does."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return {None: "none", (): "-", "": '""'}.get(default, str(default))


def test_the_page_lists_every_option_once_and_no_other():
    assert sorted(name for name, _ in ROWS) == sorted(FIELDS)


@pytest.mark.parametrize(("name", "shown"), ROWS)
def test_the_default_on_the_page_is_the_option_s(name, shown):
    assert shown == spell(FIELDS[name].default)
