"""Learning rates by parameter: one device's steps with the same factors, in the script's words too."""

import jax
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.train.update.rates import scale_rates
from jfsdp.trainer.options import ShardingOptions
from tests import reference
from tests.models_small import Block, LinenBlock, Lookup, Tower, linen_tower, make_batches, token_loss
from tests.options import made
from tests.refusals import refuses
from tests.sharding import fully_shard

FACTORS = {"embed": 0.1, "blocks.**": 2.0, "**.down.kernel": 0.0}


def factor(name):
    return (
        0.0 if name.endswith("down.kernel") else 2.0 if name.startswith("blocks") else 0.1 if "embed" in name else 1.0
    )


@pytest.mark.parametrize(
    ("source", "unit"), [(Tower, Block), pytest.param(linen_tower(), LinenBlock, marks=pytest.mark.proof)]
)
def test_updates_are_multiplied_by_the_last_glob_that_fits(source, unit):
    tx, batches = optax.chain(optax.sgd(0.1), scale_rates(FACTORS)), make_batches(1)
    model = fully_shard(source, units=[unit], min_size=20)
    state = model.init(tx)
    before = {name: np.asarray(jfsdp.checkpoint.gather_leaf(state, name)) for name in state.params}
    state, _ = model.train_step(token_loss, tx, check_loss=False)(state, batches[0])
    plain = reference.train(source, token_loss, optax.sgd(0.1), batches).params
    for name, first in before.items():
        wanted = first + factor(name) * (plain[name] - first)
        np.testing.assert_allclose(
            np.asarray(jfsdp.checkpoint.gather_leaf(state, name)), wanted, atol=1e-6, err_msg=name
        )


def test_parts_of_adapters_have_names_too():
    tx = optax.chain(optax.sgd(0.1), scale_rates({"**.lora_a": 0.0}))
    model = fully_shard(Lookup, lora=jfsdp.LoRA("head.kernel", rank=2))
    state, step = model.init(tx), model.train_step(token_loss, tx, check_loss=False)
    first = jax.device_get(state.params)
    for batch in make_batches(2):
        state, _ = step(state, batch)
    np.testing.assert_array_equal(state.params["head.kernel.lora_a"], first["head.kernel.lora_a"])
    assert np.abs(state.params["head.kernel.lora_b"]).max() > 0


def test_a_glob_that_matches_nothing_is_refused():
    model = fully_shard(Tower, units=[Block])
    refuses(lambda: model.abstract_state(scale_rates({"**.nothing": 0.5})), "rate_scale", "**.nothing")


@pytest.mark.parametrize("text", ["embed", "=1", "embed=x", "embed=-1", "embed=nan"])
def test_what_is_no_factor_is_refused(text):
    refuses(lambda: made(ShardingOptions, rate_scale=(text,)), "GLOB=X")
    assert dict(made(ShardingOptions, rate_scale=("a=1", "b=0.5")).rate_scale) == {"a": 1.0, "b": 0.5}
