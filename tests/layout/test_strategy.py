"""Strategies as data: the presets, their other names, and the contradictions that are refused."""

import re
from pathlib import Path

import pytest

from jfsdp.layout.strategy import ALIASES, STRATEGIES, Split, Strategy, get_strategy, show

ROOT = Path(__file__).parents[2]

# Strategy -> param, grad accumulator, opt, reshard_after_forward.
TABLE = {
    "ddp": ("whole", "whole", "whole", True),
    "zero1": ("whole", "partial", "all", True),
    "zero2": ("whole", "all", "all", True),
    "full_shard": ("all", "all", "all", True),
    "shard_grad_op": ("all", "all", "all", False),
    "hybrid_shard": ("group", "group", "group", True),
    "hybrid_shard_zero2": ("group", "group", "group", False),
    "hfsdp": ("group", "all", "all", True),
    "hpz": ("all", "all", "all", "node"),
}

# What other libraries call them: PyTorch FSDP1, FSDP2, DeepSpeed.
OTHER_NAMES = {
    "NO_SHARD": "ddp",
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    "fully_shard": "full_shard",
    "hsdp": "hybrid_shard",
    "replicate": "ddp",
    "zero0": "ddp",
    "zero3": "full_shard",
    "zeropp": "hpz",
}
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "full_shard"}


def test_presets_are_the_table_of_the_design():
    rows = {s.name: (*map(show, (s.param, s.grad, s.opt)), s.reshard_after_forward) for s in STRATEGIES.values()}
    assert rows == TABLE


def test_the_table_in_the_documents_is_the_table_in_the_code():
    rows = documented()
    said = {"-": True, "true": True, "false": False, '"node"': "node"}
    assert {name: (*cells[2:5], said[cells[5].strip("`")]) for name, cells in rows.items()} == TABLE


def test_the_documents_give_every_other_name_beside_its_strategy():
    beside = {}
    for name, cells in documented().items():
        beside |= dict.fromkeys(re.findall(r"`(\w+)`", cells[1]), name)
        beside |= {int(number): name for number in re.findall(r"stage (\d)", cells[1])}
    assert beside == OTHER_NAMES | STAGES


def documented() -> dict[str, list[str]]:
    """The rows of the strategy table in docs/design.md, by the name in the first column."""
    lines = (ROOT / "docs" / "design.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): cells for cells in rows if len(cells) == 6 and cells[0].startswith("`")}


def test_presets_are_listed_under_their_own_names():
    assert all(strategy.name == name for name, strategy in STRATEGIES.items())


AXES = {"whole": (), "partial": (), "group": ("fsdp",), "all": ("replica", "fsdp")}


@pytest.mark.parametrize("name", TABLE)
def test_stages_name_the_axes_they_use(name):
    axes = tuple(STRATEGIES[name].axes(stage) for stage in ("param", "grad", "opt"))
    assert axes == tuple(AXES[split] for split in TABLE[name][:3])


def test_aliases_are_the_names_of_other_libraries():
    assert ALIASES == OTHER_NAMES


@pytest.mark.parametrize(("alias", "name"), (OTHER_NAMES | STAGES).items())
def test_aliases_give_the_strategy_that_they_stand_for(alias, name):
    assert get_strategy(alias) is STRATEGIES[name]


def test_aliases_do_not_shadow_presets():
    assert not ALIASES.keys() & STRATEGIES.keys()


def test_a_strategy_passes_through():
    own = Strategy("own", Split.WHOLE, Split.GROUP, Split.ALL)
    assert get_strategy(own) is own


@pytest.mark.parametrize("name", ["zero4", "", "Full_Shard", 4, -1, True, None, 3.0, ["ddp"]])
def test_an_unknown_name_lists_all_valid_ones(name):
    with pytest.raises(ValueError, match=re.escape(f"strategy {name!r} is unknown")) as error:
        get_strategy(name)
    listed = str(error.value).partition("strategies are ")[2].partition(", or the number of a DeepSpeed stage, 0 to 3")
    assert listed[0].split(", ") == [*STRATEGIES, *ALIASES]
    assert listed[1]


@pytest.mark.parametrize(
    ("param", "opt"), [(Split.ALL, Split.WHOLE), (Split.ALL, Split.GROUP), (Split.GROUP, Split.WHOLE)]
)
def test_optimizer_states_less_split_than_parameters_are_refused(param, opt):
    with pytest.raises(ValueError, match=rf"'odd': opt \({opt.value}\) is less split than param \({param.value}\)"):
        Strategy("odd", param, Split.WHOLE, opt)


@pytest.mark.parametrize(("name", "close"), [("full_shad", "full_shard"), ("zero_3", "zero3"), ("HSDP", None)])
def test_an_unknown_name_is_told_the_closest(name, close):
    hint = re.escape(f" (did you mean {close!r}?)") if close else ""
    with pytest.raises(ValueError, match=f"strategy {name!r} is unknown{hint}; the strategies are"):
        get_strategy(name)
