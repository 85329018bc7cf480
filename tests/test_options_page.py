"""docs/options.md lists every option of the training script once, with its default, in the groups of `--help`."""

import dataclasses
import pathlib
import re

import pytest

from jfsdp.trainer.groups import GROUPS, groups_of
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.rules import RULES

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


def test_every_option_is_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names.split()) == sorted(
        field.name for field in dataclasses.fields(TrainConfig)
    )


def test_the_page_lists_the_options_by_group_and_in_the_order_of_the_help():
    sections = [re.findall(r"\A(.*)$|^\| `--([a-z-]+)` \| `", part, re.M) for part in PAGE.read_text().split("\n## ")]
    page = {heading: [name for _, name in rows] for (heading, _), *rows in sections if rows}
    assert list(page.items()) == [
        (title[0].upper() + title[1:], [name.replace("_", "-") for name in names])
        for title, names in groups_of(TrainConfig).items()
    ]


@pytest.mark.parametrize(("name", "shown"), ROWS)
def test_the_default_on_the_page_is_the_option_s(name, shown):
    assert shown == spell(FIELDS[name].default)


@pytest.mark.parametrize("rule", RULES)
def test_the_page_says_the_rule_of_each_option_on_resume(rule):
    table = PAGE.read_text().split("## What a resumed run may change")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    for name in (option.replace("_", "-") for option in RULES[rule]):
        found = [(goes, left) for what, goes, left in rows[1:] if f"`--{name}`" in what]
        goes, left = found[0] if found else ("goes on", "default")  # all others
        if name.startswith("init-"):  # read again in a run with adapters only: a row of their own
            continue
        assert goes.startswith("refused") == (rule == "refused"), name
        assert ("says so" in goes) == (rule in ("said", "said, kept", "rounding")), name
        assert (left == "as the run had it") == rule.endswith("kept"), name
