"""What every strategy must put on the wire, against the formulas of docs/design.md; nothing is compiled here.

tests/plan/test_ledger.py compares the same numbers with what XLA compiled.
"""

import collections
import functools
import math
from typing import Any

import pytest

import jfsdp
from jfsdp.engine.movements import CALL, FORWARD, movements
from jfsdp.layout.layout import num_parameters
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.plan.traffic.ledger import make_ledger
from jfsdp.trainer.job import find_job
from tests.refusals import refusing
from tests.steps import fully_shard, spec_of

NUM, GROUP = 64, 8
SHARE, GROUP_SHARE = (NUM - 1) / NUM, (GROUP - 1) / GROUP
PARAMETERS, ROOT_PARAMETERS = 8_030_261_248, 1_050_677_248
GROUPS = (("replica", NUM // GROUP), ("fsdp", GROUP))
P, ROOT = PARAMETERS, ROOT_PARAMETERS


@functools.cache
def layout(strategy="full_shard", mesh=(("fsdp", NUM),), param_dtype="bfloat16", reduce_dtype=None, **options):
    job = find_job("llama-8b")
    if "per_unit" in options:
        options["per_unit"] = {unit: dict(policy) for unit, policy in options["per_unit"]}
    return fully_shard(
        job.model,
        mesh=make_abstract_mesh(dict(mesh)),
        strategy=strategy,
        units=job.units,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype, reduce_dtype),
        **options,
    ).layout


def moves_of(layout, calls=None, **step):
    return movements(layout, spec_of(layout, calls=calls, **step), calls)


def wire(layout, *names, **step):
    """Bytes by kind and devices in a group, or by other attributes of the movements."""
    total = {}
    for move in moves_of(layout, **step):
        key = tuple(getattr(move, name) for name in names or ("kind", "group_size"))
        total[key] = total.get(key, 0) + move.wire_bytes
    return total


def flat(gathered, scattered, size=2):
    """What is gathered and scattered over all devices, in elements of so many bytes."""
    return {("all-gather", NUM): size * gathered * SHARE, ("reduce-scatter", NUM): size * scattered * SHARE}


def grouped(gathered, scattered):
    """The same in groups; between the 8 groups an all-reduce of the shard, once."""
    inside = {("all-gather", GROUP): 2 * gathered * GROUP_SHARE, ("reduce-scatter", GROUP): 2 * scattered * GROUP_SHARE}
    return inside | {("all-reduce", NUM // GROUP): 2 * GROUP_SHARE * 2 * P / GROUP}


FOUR, KEPT, ONCE = {"accumulate": 4}, {"reshard_after_backward": False}, {"sync": "last"}
IN_GROUPS, SUMMED = {"mesh": GROUPS}, {("all-reduce", NUM): 4 * P * SHARE}
ROOT_ALONE = {"reshard_after_forward": GROUP, "per_unit": (("", (("reshard_after_forward", False),)),)}
HPZ = {("all-gather", NUM): 2 * P * SHARE, ("all-gather", GROUP): 2 * (P - ROOT) * GROUP_SHARE}
# The working copy is gathered in the group, and once per step between groups from the finer master. Gradients are
# scattered in the group, and what is left of them between groups: as many bytes as over all at once.
HFSDP = {("all-gather", GROUP): 2 * (2 * P - ROOT + P / GROUP) * GROUP_SHARE, ("reduce-scatter", GROUP): 2 * P * SHARE}
CASES: dict[str, Any] = {
    "ddp": ("ddp", {}, {}, SUMMED),
    "ddp, accumulated": ("ddp", {}, FOUR, {("all-reduce", NUM): 4 * 4 * P * SHARE}),
    "ddp once": ("ddp", {}, FOUR | ONCE, SUMMED),
    "zero1": ("zero1", {}, {}, flat(P, P)),
    "zero1, accumulated: once by its table": ("zero1", {}, FOUR, flat(P, P)),
    "zero2, accumulated": ("zero2", {}, FOUR, flat(P, 4 * P)),
    "full_shard": ("full_shard", {}, {}, {("all-gather", NUM): 29.551e9, ("reduce-scatter", NUM): 15.810e9}),
    "full_shard, reduced once": ("full_shard", {}, FOUR | ONCE, flat(4 * (2 * P - ROOT), P)),
    "full_shard kept": ("SHARD_GRAD_OP", {}, {}, flat(P, P)),
    "full_shard, accumulated": ("full_shard", {}, FOUR, flat(4 * (2 * P - ROOT), 4 * P)),
    "full_shard, parameters kept over microbatches": ("full_shard", {}, FOUR | KEPT, flat(P, 4 * P)),
    "full_shard, parameters kept, reduced once": ("full_shard", {}, FOUR | KEPT | ONCE, flat(P, P)),
    "replicas": ("full_shard", IN_GROUPS, FOUR, grouped(4 * (2 * P - ROOT), 4 * P)),
    "replicas, parameters kept over microbatches": ("full_shard", IN_GROUPS, FOUR | KEPT, grouped(P, 4 * P)),
    "replicas, kept": ("full_shard", IN_GROUPS | {"reshard_after_forward": False}, {}, grouped(P, P)),
    "zero1 with replicas, accumulated": ("zero1", IN_GROUPS, FOUR, grouped(P, P)),
    "zero2 with replicas, accumulated": ("zero2", IN_GROUPS, FOUR, grouped(P, 4 * P)),
    "ddp with replicas": ("ddp", IN_GROUPS, {}, SUMMED),
    "hfsdp": ("full_shard", IN_GROUPS | {"opt_over": ("replica", "fsdp")}, {}, HFSDP),
    "hpz": ("full_shard", ROOT_ALONE, {}, HPZ | {("reduce-scatter", NUM): 2 * P * SHARE}),
    "a resharded root": ("full_shard", {"per_unit": (("", (("reshard_after_forward", True),)),)}, {}, flat(2 * P, P)),
    "float32": ("full_shard", {"param_dtype": None}, {}, flat(2 * P - ROOT, P, 4)),
    "float32 zero1 keeps no copy, and gathers the master": ("zero1", {"param_dtype": None}, {}, flat(P, P, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_follow_the_formula(name):
    strategy, options, step, wanted = CASES[name]
    assert wire(layout(strategy, **options), **step) == pytest.approx(
        wanted, rel=1e-4 if name == "full_shard" else 1e-12
    )


def test_reducing_once_in_float32_doubles_the_reduction_alone():
    table = layout("zero1", reduce_dtype="float32")
    found = wire(table, "kind", "dtype", accumulate=4, sync="last")
    wanted = {("all-gather", "bfloat16"): 2 * P * SHARE, ("reduce-scatter", "float32"): 4 * P * SHARE}
    assert found == pytest.approx(wanted)


def test_frozen_leaves_are_gathered_and_not_reduced():
    table = layout(frozen="layers.mlp")
    trained = num_parameters([leaf for leaf in table.leaves if leaf.trainable])
    assert trained < P / 2
    assert wire(table)["reduce-scatter", NUM] == pytest.approx(2 * trained * SHARE)
    assert wire(table)["all-gather", NUM] == wire(layout())["all-gather", NUM]


def test_replicated_leaves_are_all_reduced_and_named():
    table = layout(min_size=5000)
    norms = 65 * 4096
    rows = [row for row in make_ledger(table, []).rows if row.what == "replicated"]
    assert sum(row.expected_bytes for row in rows) == pytest.approx(2 * 2 * norms * SHARE)
    assert {path for row in rows for path in row.paths} == {
        "layers.attn_norm.scale",
        "layers.mlp_norm.scale",
        "norm.scale",
    }
    rows = make_ledger(layout("ddp"), []).rows
    assert {row.what for row in rows} == {"gradients"}, "ddp splits nothing, so nothing is replicated against its will"


def test_padding_is_a_line_of_its_own_and_the_sum_is_that_of_the_stored_shapes():
    table = layout(mesh=(("fsdp", 24),))
    stored = sum(math.prod(leaf.stored_shape) for leaf in table.leaves)
    assert stored > P
    assert wire(table)["reduce-scatter", 24] == pytest.approx(2 * stored * 23 / 24)
    found: collections.Counter[str] = collections.Counter()
    for row in make_ledger(table, []).rows:
        found[row.what] += row.expected_bytes  # type: ignore[assignment]
    assert found["gradients"] == pytest.approx(2 * P * 23 / 24)
    assert found["padding"] == pytest.approx(
        2 * (stored - P) * 23 / 24 * 3 - (2 * (root_stored(table) - ROOT) * 23 / 24), rel=1e-9
    ), "gathered twice and scattered once, the root gathered once"


def root_stored(table):
    return sum(math.prod(leaf.stored_shape) for leaf in table.leaves if leaf.unit == "")


def test_a_unit_that_is_called_twice_moves_twice():
    once, twice = wire(layout(), "when"), wire(layout(), "when", calls={"layers": 2})
    layers = 2 * (P - ROOT) * SHARE
    for when in ((FORWARD,), (CALL,)):
        assert twice[when] - once[when] == pytest.approx(layers)


def test_calls_of_an_unknown_unit_are_refused():
    with refusing("calls:", "'layer'", "''", "'layers'"):
        moves_of(layout(), calls={"layer": 2})


def test_xla_sums_every_microbatch_over_every_axis():
    grouped = layout("full_shard", mesh=GROUPS)
    found = wire(grouped, accumulate=4, program="xla")
    last = wire(grouped, accumulate=4)
    assert found["all-reduce", NUM // GROUP] == pytest.approx(4 * last["all-reduce", NUM // GROUP])
    assert found["reduce-scatter", GROUP] == pytest.approx(last["reduce-scatter", GROUP])
    assert wire(layout("zero1"), accumulate=4, program="xla") == pytest.approx(wire(layout("zero2"), accumulate=4))


@pytest.mark.parametrize(("param_dtype", "size"), [("bfloat16", 2), (None, 4)])
def test_between_groups_only_the_shard_of_the_group_is_summed_and_once_in_every_precision(param_dtype, size):
    """A strategy by hand: accumulators of the group, optimizer states over all devices."""
    own = jfsdp.Strategy("own", jfsdp.Split.GROUP, jfsdp.Split.GROUP, jfsdp.Split.ALL)
    found = wire(layout(own, mesh=GROUPS, param_dtype=param_dtype), accumulate=4)
    assert found["reduce-scatter", GROUP] == pytest.approx(4 * size * P * GROUP_SHARE + size * P / GROUP * GROUP_SHARE)
    assert "all-reduce" not in {kind for kind, _ in found}
