"""Strategies as data: the presets, their other names, and the contradictions that are refused."""

import re
from pathlib import Path

import pytest

from jfsdp.layout.strategy import ALIASES, STRATEGIES, Split, Strategy, get_strategy

ROOT = Path(__file__).parents[2]

# Strategy -> param, kept, grad accumulator, opt. ZeRO-1's accumulator would be "whole, not yet reduced"; engine auto
# cannot defer a reduction, so zero1 is zero2 here.
TABLE = {
    "ddp": ("whole", "whole", "whole", "whole"),
    "zero1": ("whole", "whole", "all", "all"),
    "zero2": ("whole", "whole", "all", "all"),
    "full_shard": ("all", "all", "all", "all"),
    "shard_grad_op": ("all", "whole", "all", "all"),
    "hybrid_shard": ("group", "group", "group", "group"),
    "hybrid_shard_zero2": ("group", "whole", "group", "group"),
    "hfsdp": ("group", "group", "all", "all"),
}


def test_presets_are_the_table_of_the_design():
    rows = {s.name: tuple(split.value for split in (s.param, s.kept, s.grad, s.opt)) for s in STRATEGIES.values()}
    assert rows == TABLE


def test_the_table_in_the_documents_is_the_table_in_the_code():
    rows = {}
    for line in (ROOT / "docs" / "design.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):
            names = re.findall(r"`(\w+)`", cells[0])
            rows |= {get_strategy(name).name: tuple(cells[2:]) for name in names}
    assert rows == TABLE


def test_presets_are_listed_under_their_own_names():
    assert all(strategy.name == name for name, strategy in STRATEGIES.items())


def test_splits_name_the_axes_they_use():
    assert Split.WHOLE.axes == ()
    assert Split.GROUP.axes == ("fsdp",)
    assert Split.ALL.axes == ("replica", "fsdp")


@pytest.mark.parametrize(("alias", "name"), [("zero3", "full_shard"), ("hsdp", "hybrid_shard")])
def test_aliases_give_the_strategy_that_they_stand_for(alias, name):
    assert get_strategy(alias) is STRATEGIES[name]


def test_aliases_do_not_shadow_presets():
    assert not ALIASES.keys() & STRATEGIES.keys()


def test_a_strategy_passes_through():
    own = Strategy("own", Split.WHOLE, Split.WHOLE, Split.GROUP, Split.ALL)
    assert get_strategy(own) is own


@pytest.mark.parametrize("name", ["zero4", "", "FULL_SHARD"])
def test_an_unknown_name_lists_all_valid_ones(name):
    with pytest.raises(ValueError, match=f"strategy {name!r} is unknown") as error:
        get_strategy(name)
    assert re.findall(r"\w+", str(error.value).partition("strategies are")[2]) == [*STRATEGIES, *ALIASES]


@pytest.mark.parametrize(
    ("param", "opt"), [(Split.ALL, Split.WHOLE), (Split.ALL, Split.GROUP), (Split.GROUP, Split.WHOLE)]
)
def test_optimizer_states_less_split_than_parameters_are_refused(param, opt):
    with pytest.raises(ValueError, match=rf"'odd': opt \({opt.value}\) is less split than param \({param.value}\)"):
        Strategy("odd", param, Split.WHOLE, Split.WHOLE, opt)
