"""Strategies as data: the presets, what other libraries' names mean, and the contradictions that are refused."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from jfsdp.layout.mesh import DATA_AXES, GROUP_AXES
from jfsdp.layout.strategy import NODE, OTHER_NAMES, STRATEGIES, Split, Strategy, get_strategy, show
from tests.refusals import refuses

ROOT = Path(__file__).parents[2]
FLAT, GROUPS, BOTH = {"fsdp": 8}, {"replica": 2, "fsdp": 4}, ("replica", "fsdp")
AXES = {"whole": (), "partial": (), "group": GROUP_AXES, "all": DATA_AXES}


def documented() -> dict[str, list[str]]:
    """The rows of the strategy table in docs/design.md, by the name in the first column."""
    lines = (ROOT / "docs" / "design.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): cells for cells in rows if len(cells) == 4 and cells[0].strip("`") in STRATEGIES}


def test_the_table_in_the_documents_is_the_table_in_the_code():
    rows = {s.name: [f"`{s.name}`", *map(show, (s.param, s.grad, s.opt))] for s in STRATEGIES.values()}
    assert documented() == rows
    for name, (_, *stages) in rows.items():
        assert [STRATEGIES[name].axes(stage) for stage in ("param", "grad", "opt")] == [AXES[one] for one in stages]


def test_the_documents_give_every_name_of_another_library():
    text = (ROOT / "docs" / "strategies.md").read_text()
    assert not [name for name in OTHER_NAMES if isinstance(name, str) and f"`{name}`" not in text]


# Name -> the strategy, its default for reshard_after_forward, and the mesh that it contradicts.
NAMES = {
    "NO_SHARD": ("ddp", True, None),
    "FULL_SHARD": ("full_shard", True, GROUPS),
    "SHARD_GRAD_OP": ("full_shard", False, GROUPS),
    "HYBRID_SHARD": ("full_shard", True, FLAT),
    "_HYBRID_SHARD_ZERO2": ("full_shard", False, FLAT),
    "fully_shard": ("full_shard", True, None),
    "hsdp": ("full_shard", True, FLAT),
    "zero0": ("ddp", True, None),
    "zero3": ("full_shard", True, GROUPS),
    "zeropp": ("full_shard", NODE, GROUPS),
    0: ("ddp", True, None),
    1: ("zero1", True, GROUPS),
    2: ("zero2", True, GROUPS),
    3: ("full_shard", True, GROUPS),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_libraries_are_translated_and_contradict_a_mesh(name):
    strategy, reshard, refused = NAMES[name]
    fits = FLAT if refused == GROUPS else GROUPS
    assert get_strategy(name, fits) == dataclasses.replace(STRATEGIES[strategy], reshard_after_forward=reshard)
    if refused is not None:
        meant = "mesh fsdp=8" if refused == GROUPS else "mesh replica=2,fsdp=4"
        refuses(lambda: get_strategy(name, refused), repr(name), f"use {meant}", f"strategy {strategy!r}")


def test_opt_over_splits_states_and_the_gradients_that_are_split():
    stages = {}
    for name in ("zero1", "zero2", "full_shard"):
        found = get_strategy(name, GROUPS, ["replica", "fsdp"])
        stages[name] = (found.param, found.grad, found.opt)
    whole, group = Split.WHOLE, Split.GROUP
    assert stages == {
        "zero1": (whole, Split.PARTIAL, Split.ALL),
        "zero2": (whole, Split.ALL, Split.ALL),
        "full_shard": (group, Split.ALL, Split.ALL),
    }
    assert get_strategy("hfsdp", GROUPS) == get_strategy("full_shard", GROUPS, BOTH)
    assert get_strategy("_HYBRID_SHARD_ZERO2", GROUPS, BOTH).reshard_after_forward is False


def test_opt_over_is_refused_where_the_strategy_says_it_or_it_is_too_coarse():
    own = Strategy("own", Split.WHOLE, Split.GROUP, Split.ALL)
    for strategy in ("ddp", own):
        refuses(lambda given=strategy: get_strategy(given, GROUPS, BOTH), "opt_over='replica,fsdp'", "leave it out")
    refuses(lambda: get_strategy("hfsdp", GROUPS, BOTH), "'hfsdp' means opt_over", "leave out")
    refuses(lambda: get_strategy("full_shard", GROUPS, ("replica",)), "opt (replica) is less split than param (group)")
    refuses(lambda: get_strategy("zero2", GROUPS, ("data",)), "grad=('data',)", DATA_AXES)


def test_an_unknown_name_lists_all_valid_ones_and_the_closest():
    names: list[Any] = ["zero4", "", 4, True, None, 3.0, ["ddp"]]
    for name in names:
        error = ValueError if isinstance(name, str) or type(name) is int else TypeError
        facts = (f"strategy {name!r} is unknown", *STRATEGIES, "HYBRID_SHARD", "0 to 3")
        refuses(functools.partial(get_strategy, name, FLAT), *facts, error=error)
    refuses(lambda: get_strategy("full_shad", FLAT), "did you mean 'full_shard'?")
