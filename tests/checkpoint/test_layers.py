"""Layers in a stack read as a list, and in a list as a stack: NNX and Linen, with the states of Adam and Adafactor."""

import functools
import itertools
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import jfsdp
from tests.checkpoint.elastic import lived_in
from tests.models_small import Tower, linen_tower
from tests.pairwise import cover
from tests.refusals import refuses
from tests.states import logical
from tests.steps import fully_shard

LAYERS = 2
OPTIMIZERS = {"adam": optax.adam(1e-3), "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9)}
STORAGES: dict[str, dict[str, Any]] = {"by leaf": {}, "flat": {"program": "manual", "storage": "flat"}}


def four() -> jax.sharding.Mesh:
    return jfsdp.make_mesh(devices=jax.devices()[:4])


@functools.cache
def model(api: str, stacked: bool, storage: str) -> jfsdp.ShardedModel:
    nnx_tower: Any = functools.partial(Tower, stacked=stacked, num_layers=LAYERS)
    source = nnx_tower if api == "nnx" else linen_tower(stacked, LAYERS)
    return fully_shard(source, mesh=four(), min_size=8, **STORAGES[storage])


COLUMNS = {"api": ["nnx", "linen"], "optimizer": list(OPTIMIZERS), "stacked": [True, False], "storage": list(STORAGES)}
PAIRS = cover(COLUMNS)
CASES = [
    pytest.param(*case, marks=[] if case in PAIRS else [pytest.mark.proof])
    for case in itertools.product(*COLUMNS.values())
]


@pytest.mark.parametrize(("api", "optimizer", "stacked", "storage"), CASES)
def test_every_layer_is_found_in_the_other_form(api, optimizer, stacked, storage, tmp_path):
    tx, mark = OPTIMIZERS[optimizer], "." if api == "nnx" else "_"
    state = lived_in(model(api, stacked, "by leaf").init(tx, seed=1))
    jfsdp.checkpoint.save(tmp_path / "c", state)
    found = logical(jfsdp.checkpoint.restore(tmp_path / "c", like=model(api, not stacked, storage).abstract_state(tx)))
    given = logical(state)
    stacks, lists = (given, found) if stacked else (found, given)
    seen = set()
    for name, value in stacks.items():
        if ".blocks." not in name:
            assert value.tobytes() == lists[name].tobytes(), name
            continue
        for number in range(LAYERS):
            member = name.replace(".blocks.", f".blocks{mark}{number}.")
            row = value if value.shape == (1,) == lists[member].shape else value[number]
            assert row.shape == lists[member].shape and row.tobytes() == lists[member].tobytes(), member
            seen.add(member)
    assert {name for name in lists if f".blocks{mark}" in name} == seen and seen


def test_more_or_fewer_layers_than_the_checkpoint_has_are_refused_in_either_form(tmp_path):
    """Neither is filled in or left out."""
    tx = OPTIMIZERS["adam"]

    def of(stacked, num_layers):
        source = functools.partial(Tower, stacked=stacked, num_layers=num_layers)
        return fully_shard(source, mesh=four(), min_size=8)

    for stacked in (False, True):
        path = tmp_path / ("c" if stacked else "list")
        jfsdp.checkpoint.save(path, of(stacked, LAYERS).init(tx))
        for num in (LAYERS - 1, LAYERS + 1):
            like = of(not stacked, num).abstract_state(tx)
            refuses(functools.partial(jfsdp.checkpoint.restore, path, like=like), ".mu.blocks.")
    fewer = of(False, LAYERS - 1)
    refuses(lambda: jfsdp.checkpoint.load_pretrained(tmp_path / "c", fewer, tx), "blocks.norm.scale")
    chosen = jfsdp.checkpoint.restore(tmp_path / "c", like=fewer.init(tx), only="params")
    assert chosen.params.keys() == fewer.init(tx).params.keys()


@pytest.mark.parametrize(("stacks_are_saved", "only"), [(True, None), (False, "params")])
def test_lists_of_lists_are_not_guessed(stacks_are_saved, only, tmp_path):
    """`a.0.1` may be row 1 of `a.0`, and layer 0 of `a.1`."""

    class Stacks(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.List([nnx.Param(jax.random.normal(rngs.params(), (2, 4, 4))) for _ in range(2)])

    class Lists(nnx.Module):
        def __init__(self, rngs):
            rows = [[nnx.Param(jax.random.normal(rngs.params(), (4, 4))) for _ in range(2)] for _ in range(2)]
            self.a = nnx.List([nnx.List(row) for row in rows])

    tx = optax.sgd(1.0)
    nets = (Stacks, Lists) if stacks_are_saved else (Lists, Stacks)
    saved, wanted = (fully_shard(net, mesh=four(), min_size=4) for net in nets)
    jfsdp.checkpoint.save(tmp_path / "c", saved.init(tx))
    like = wanted.init(tx)
    refuses(lambda: jfsdp.checkpoint.restore(tmp_path / "c", like=like, only=only), "missing", "params")
