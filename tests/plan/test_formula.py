"""The formula of a step's memory, term by term on a small model; at real size in test_real_size.py."""

import dataclasses

import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.plan.alone import Alone
from jfsdp.plan.formula import TERMS, Shapes, memory_formula
from jfsdp.train.account import account

DIM, WIDE, VOCAB, NUM_LAYERS, NUM_DEVICES = 64, 256, 512, 6, 8
UNIT, HEAD, TABLE = 2 * DIM * WIDE, DIM * VOCAB, VOCAB * DIM  # elements
SHAPES = Shapes(rows=2, seq_len=32, vocab_size=VOCAB, batch_bytes=7)
SAVED, SHARED, WORK, ROOT_WORK = 1000, 10, 300, 2 * 32 * VOCAB * 6 + 50


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(DIM, WIDE, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(WIDE, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs, stacked=True):
        self.embed, self.head = (
            nnx.Embed(VOCAB, DIM, rngs=rngs),
            nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs),
        )
        keys = nnx.split_rngs(splits=NUM_LAYERS)(nnx.vmap(Layer))
        self.layers = keys(rngs) if stacked else nnx.List([Layer(rngs) for _ in range(NUM_LAYERS)])


def terms_of(prefetch=1, stacked=True, **options):
    mesh = jfsdp.make_abstract_mesh({"fsdp": NUM_DEVICES})
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
    model = jfsdp.fully_shard(
        lambda rngs: Net(rngs, stacked), mesh=mesh, units=[Layer], mp_policy=policy, engine="manual", **options
    )
    state = account(model.abstract_state(optax.adamw(1e-3))).total
    alone = {"": Alone(0, 0, ROOT_WORK)}
    alone |= {unit.name: Alone(SAVED, SHARED, WORK) for unit in model.layout.units if unit.name}
    return memory_formula(model.layout, state, SHAPES, alone, prefetch=jfsdp.Prefetch(prefetch, prefetch)), state


def test_each_term_of_a_stack_is_what_shapes_say():
    found, state = terms_of()
    base = {"state": state, "batch": 7, "saved activations": NUM_LAYERS * SAVED + SHARED}
    shard = 4 * UNIT * NUM_LAYERS // NUM_DEVICES
    base["transposed shards"] = shard // 2  # of the two kernels, one is split along a layer's second dim
    loss = base | {"root weights": 2 * HEAD, "logits": ROOT_WORK - 50, "recompute": 50}
    backward = base | {"gathered units": 2 * 2 * UNIT, "recompute": WORK}
    assert found.moments["loss"] == loss
    assert found.moments["first unit"] == backward | {
        "unit gradients": 2 * UNIT,
        "root gradient": 2 * HEAD,
        "reduced gradients": shard,
    }
    assert found.moments["unit"] == backward | {
        "unit gradients": 2 * 2 * UNIT,
        "root gradient": 0,
        "reduced gradients": shard + 4 * (HEAD + TABLE) // NUM_DEVICES,
    }
    assert found.peak_bytes == sum(found.moments[found.moment].values()) == max(map(sum_of, found.moments.values()))
    assert set().union(*found.moments.values()) == set(TERMS)
    assert all(term in str(found) for term in TERMS)


def sum_of(terms):
    return sum(terms.values())


@pytest.mark.parametrize("prefetch", [0, 2, 100])
def test_depth_counts_gathered_units_and_no_more_than_there_are(prefetch):
    found, _ = terms_of(prefetch)
    expected = min(prefetch + 1, NUM_LAYERS) * 2 * UNIT
    assert found.moments["unit"]["gathered units"] == expected
    assert "gathered units" not in found.moments["loss"]


def test_a_list_trades_what_is_saved_for_what_is_reduced():
    found, _ = terms_of(stacked=False)
    whole, unit = found.moments["first unit"], found.moments["unit"]
    assert whole["saved activations"] == NUM_LAYERS * SAVED + SHARED
    assert whole["reduced gradients"] == whole["transposed shards"] == 0
    assert unit["saved activations"] == SAVED  # here shards of gradients weigh more
    assert unit["reduced gradients"] == 4 * (NUM_LAYERS * UNIT + HEAD + TABLE) // NUM_DEVICES


def test_in_flat_storage_the_roots_gradient_waits_for_all_of_its_array():
    found, _ = terms_of(storage="flat")
    assert found.moments["unit"]["root gradient"] == 2 * HEAD
    assert found.moments["end"]["root gradient"] == 2 * (HEAD + TABLE)
    assert found.moments["unit"]["transposed shards"] == 0


def test_a_unit_without_figures_is_named():
    mesh = jfsdp.make_abstract_mesh({"fsdp": NUM_DEVICES})
    layout = jfsdp.fully_shard(Net, mesh=mesh, units=[Layer], engine="manual").layout
    with pytest.raises(ValueError, match=r"layers.*measure_alone"):
        memory_formula(layout, 0, SHAPES, {"": Alone(0, 0, 0)}, prefetch=jfsdp.Prefetch())


def test_more_live_copies_of_the_logits_are_stated():
    stated = dataclasses.replace(SHAPES, logits_bytes=8)
    assert stated.logits * 6 == SHAPES.logits * 8
