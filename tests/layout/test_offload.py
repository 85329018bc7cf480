"""Offload: which stages of which leaves wait in pinned host memory. And globs, which say of which units."""

import functools
from typing import Any

import jax
import pytest

import jfsdp
from jfsdp.layout.leaf import HOST
from jfsdp.layout.mesh import make_mesh
from jfsdp.layout.policy import OffloadPolicy
from jfsdp.layout.strategy import STRATEGIES
from jfsdp.layout.units import UnitInfo, matches_glob
from jfsdp.train import checks
from jfsdp.trainer.job import find_job
from tests import hlo
from tests.layout.tables import make_table
from tests.refusals import refusing

LEAVES: dict[str, Any] = {
    "block.w": (64, 64),
    "block.scale": (64,),
    "block.table": ((64, 64), "int32"),
    "frozen": (64, 64),
    "ignored": (64, 64),
}
LARGE = {"block.w", "block.table", "frozen"}
TRAINED = {"block.w"}

# Field of the policy -> the stages that it moves, and of which leaves.
MOVES = {
    "params": {("param", path) for path in LARGE} | {("work", path) for path in LARGE},
    "grads": {("grad", path) for path in TRAINED},
    "opt_state": {("opt", path) for path in TRAINED},
}


def on_host(strategy: str, offload: Any, **more: Any) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The (stage, path) pairs that are on the host, and all that there are."""
    layout = make_table(
        LEAVES,
        strategy,
        param_dtype="bfloat16",
        node_size=4,
        frozen="frozen",
        ignored="ignored",
        offload=offload,
        **more,
    )
    stages = {(name, leaf.path): stage for leaf in layout.leaves for name, stage in leaf.stages if stage}
    return {pair for pair, stage in stages.items() if stage.memory == HOST}, set(stages)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("field", MOVES)
def test_each_kind_of_state_is_offloaded_on_its_own(field, strategy):
    host, there = on_host(strategy, OffloadPolicy(**{field: True}))
    assert host == MOVES[field] & there


def test_leaves_below_min_size_and_ignored_leaves_stay():
    smaller, _ = on_host("full_shard", OffloadPolicy(params=True), min_size=64)
    assert {path for _, path in smaller} == LARGE | {"block.scale"}


def test_a_stack_is_measured_and_split_by_its_layer():
    units = {"": UnitInfo("", "Net", 0, ()), "layers": UnitInfo("layers", "Layer", 1, ("layers.scale", "layers.w"))}
    layout = make_table(
        {"layers.scale": (48, 64), "layers.w": (48, 64, 64)}, units=units, offload=OffloadPolicy(opt_state=True)
    )
    assert [(leaf.stage("opt").memory, leaf.dim) for leaf in layout.leaves] == [("device", None), (HOST, 1)]


def test_shardings_name_the_memory_and_on_device_does_not():
    mesh = make_mesh(replica=2, fsdp=4)
    layout = make_table({"w": (64, 64)}, mesh=mesh, offload=OffloadPolicy(opt_state=True))
    leaf = layout.by_path["w"]
    kinds = [layout.sharding(mesh, leaf, stage).memory_kind for stage in ("param", "opt")]
    default = jax.devices()[0].default_memory().kind
    assert kinds == [default, HOST]
    assert layout.on_device(mesh, leaf, "opt").memory_kind == default
    assert layout.abstract(mesh, leaf, "opt").sharding == layout.sharding(mesh, leaf, "opt")


@pytest.mark.parametrize("offload", [True, "opt_state", {"opt_state": True}])
def test_an_offload_policy_of_another_kind_is_refused(offload):
    with refusing("OffloadPolicy", error=TypeError):
        make_table({"w": (64, 64)}, offload=offload)


OFFLOADING: dict[str, Any] = {
    "names": jfsdp.SaveNames(offload=("mlp_hidden",)),
    "names and saved": jfsdp.SaveNames(save=("qkv",), offload=("mlp_hidden",)),
    jfsdp.UNIT_INPUT: jfsdp.SaveNames(offload=(jfsdp.UNIT_INPUT,)),
    "save_and_offload_only_these_names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["mlp_hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "offload_dot_with_no_batch_dims, with others": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    ),
}


@pytest.mark.parametrize("name", OFFLOADING)
def test_activations_are_offloaded_on_gpus_only_by_a_compiler_that_keeps_their_order(name, monkeypatch):
    job, gpus = find_job("llama-tiny"), jfsdp.make_mesh(devices=hlo.h100s(1))
    shard = functools.partial(jfsdp.fully_shard, job.model, units=job.units)
    monkeypatch.setattr(checks, "misorders_offloads", lambda: True)
    with pytest.raises(ValueError, match=r"'layers'.*46231.*0\.11\.1") as refused:
        shard(mesh=gpus, remat=OFFLOADING[name])
    assert ("mlp_hidden" if "names" in name.split() else name.partition(",")[0]) in str(refused.value)
    for remedy in ("full", jfsdp.SaveNames(save=("mlp_hidden",))):
        shard(mesh=gpus, remat=remedy)
    shard(remat=OFFLOADING[name])  # on CPUs
    monkeypatch.setattr(checks, "misorders_offloads", lambda: False)
    shard(mesh=gpus, remat=OFFLOADING[name])


# Pattern -> what it matches of the paths below.
PATHS = ["layers", "layers.0", "layers.0.mlp", "layers.0.mlp.up", "layers.10", "head", ""]
GLOBS = {
    "layers": ["layers"],
    "layers.*": ["layers.0", "layers.10"],
    "layers.?": ["layers.0"],
    "layers.[0-9].mlp": ["layers.0.mlp"],
    "layers.**": ["layers", "layers.0", "layers.0.mlp", "layers.0.mlp.up", "layers.10"],
    "layers.**.up": ["layers.0.mlp.up"],
    "layers.*.**": ["layers.0", "layers.0.mlp", "layers.0.mlp.up", "layers.10"],
    "**.mlp": ["layers.0.mlp"],
    "**.mlp.**": ["layers.0.mlp", "layers.0.mlp.up"],
    "**": PATHS,
    "*": ["layers", "head", ""],
    "": [""],
    "lay*": ["layers"],
    "LAYERS": [],
    "layers.**.**.up": ["layers.0.mlp.up"],
}


@pytest.mark.parametrize("pattern", GLOBS)
def test_a_star_stays_within_a_name_and_two_stand_for_any_number(pattern):
    assert [path for path in PATHS if matches_glob(pattern, path)] == GLOBS[pattern]
