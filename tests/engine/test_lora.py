"""Low-rank adapters: every step equals that of one device on merged weights, and nothing frozen costs a derivative.

The reference adds A @ B to the weight and lets JAX differentiate the sum: another form than that of jfsdp, which never
makes the sum.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.layout.codec import CODECS
from tests import reference
from tests.engine.test_parity import LIMITS
from tests.engine.test_tensor import SplitBlock, SplitTower
from tests.models_small import Block, LinenBlock, Tower, linen_tower, make_batches, token_loss
from tests.pairwise import cover
from tests.steps import fully_shard
from tests.thin import thin
from tests.ways import WAYS

STEPS, TX = 3, optax.sgd(0.3)
SOURCES = {
    "stacked": (Tower, [Block]),
    "listed": (lambda rngs: Tower(rngs, stacked=False, num_layers=2), [Block]),
    "linen": (linen_tower(True), [LinenBlock]),
    "linen, listed": (linen_tower(False, 2), [LinenBlock]),
    "one unit": (Tower, [jfsdp.Unit("", stacked=0)]),
    "split": (SplitTower, [SplitBlock]),
}
MESHES = {
    "8": {"fsdp": 8},
    "2x4": {"replica": 2, "fsdp": 4},
    "1": {"fsdp": 1},
}
FORMS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}
SCALES = {"lora": 5 / 3, "rslora": 5 / 3**0.5, "dora": 5 / 3}
TARGETS = ["**.up.kernel", "**.down.kernel"]
NF4 = {"**.up.kernel": "nf4"}
CUTS = {"**.up": (-1, "tensor"), "**.down": (0, "tensor")}
pytestmark = pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")


def lora(form, **options):
    return jfsdp.LoRA(**({"targets": TARGETS, "rank": 3, "alpha": 5.0} | FORMS[form] | options))


def shard(model, mesh, form="lora", **options: Any):
    source, units = SOURCES[model]
    count = int(np.prod(list(mesh.values())))
    given = {"units": units, "min_size": 20, "lora": lora(form)} | options
    return fully_shard(source, mesh=jfsdp.make_mesh(**mesh, devices=jax.devices()[:count]), **given)


def merged(adapters, params, scale):
    """Return parameters with every adapter added to its matrix; a norm of DoRA gets no derivative."""

    def one(path, weight):
        parts = adapters.get(reference.dotted(path))
        if parts is None:
            return weight
        whole = weight + scale * parts["lora_a"] @ parts["lora_b"]
        if "lora_magnitude" in parts:
            norms = jax.lax.stop_gradient(jnp.linalg.norm(whole, axis=-2, keepdims=True))
            whole = whole * parts["lora_magnitude"][..., None, :] / norms
        return whole

    return jax.tree_util.tree_map_with_path(one, params)


def rounded(params, quantized):
    """Return parameters as their codes say them."""

    def one(path, weight):
        name = quantized.get(reference.dotted(path).rpartition(".")[0].rpartition(".")[2])
        return CODECS[name].decode(*CODECS[name].encode(weight)).astype(weight.dtype) if name else weight

    return jax.jit(lambda params: jax.tree_util.tree_map_with_path(one, params))(params)


def train_alone(source, adapters, scale, batches, tx=TX, accumulate=1, quantized=()):
    """Return losses and adapters of one device's training on merged weights."""
    model, opt_state, losses = reference.plain(source), tx.init(adapters), []
    model.params = rounded(model.params, dict(quantized))

    @jax.jit
    def step(adapters, opt_state, batch):
        def total(adapters):
            sums = [0.0, 0.0]
            for part in range(accumulate):
                rows = jax.tree.map(operator.itemgetter(slice(part, None, accumulate)), batch)
                loss, _ = model.loss(token_loss, merged(adapters, model.params, scale), model.state, rows)
                sums = [sums[0] + loss.total, sums[1] + loss.weight]
            return sums[0] / sums[1]

        loss, grads = jax.value_and_grad(total)(adapters)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, loss

    for batch in batches:
        adapters, opt_state, loss = step(adapters, opt_state, batch)
        losses.append(float(loss))
    return losses, adapters


def parts_of(state):
    """Return the adapters of a state as numpy, by the leaf that they adapt."""
    found = {}
    for name, value in state.params.items():
        path, _, part = name.rpartition(".")
        if part.startswith("lora_"):
            found.setdefault(path, {})[part] = reference.logical(state, name, value)
    return found


def check(model, mesh, form, *, accumulate=1, **options: Any):
    coded = [(glob.split(".")[1], codec) for glob, codec in options.get("quantized", {}).items()]
    sharded = shard(model, mesh, form, **options)
    state, batches = sharded.init(TX), make_batches(STEPS)
    first = parts_of(state)
    frozen = {name: np.asarray(x) for name, x in state.params.items() if ".lora_" not in name}
    assert first
    step, losses = sharded.train_step(token_loss, TX, accumulate=accumulate, check_loss=False), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    wanted, adapters = train_alone(
        SOURCES[model][0], first, SCALES[form], batches, accumulate=accumulate, quantized=coded
    )
    assert np.abs(np.array(losses) / wanted - 1).max() < LIMITS["loss"]
    found = parts_of(state)
    flat, right = ({f"{path}.{part}": x for path in of for part, x in of[path].items()} for of in (found, adapters))
    error, leaf = reference.worst_leaf(flat, jax.tree.map(np.asarray, right), 1e-2)
    assert error < LIMITS["params"], leaf
    for name, value in frozen.items():
        np.testing.assert_array_equal(np.asarray(state.params[name]), value, err_msg=name)


COLUMNS = {
    "strategy": list(WAYS),
    "program": ["xla", "manual"],
    "mesh": list(MESHES),
    "model": ["stacked", "listed", "linen", "linen, listed"],
    "form": list(FORMS),
    "accumulate": [1, 2],
}
QUICK = [("full_shard", "manual", "2x4", "listed", "rslora", 2)]


# All strategies are in test_parity.py.
@pytest.mark.parametrize("row", [*QUICK, *(pytest.param(row, marks=pytest.mark.proof) for row in cover(COLUMNS))])
def test_steps_equal_one_device_on_merged_weights(row):
    strategy, program, mesh, model, form, accumulate = row
    options: dict[str, Any] = {"strategy": WAYS[strategy]}
    if strategy == "node":
        options = {"reshard_after_forward": 2 if MESHES[mesh]["fsdp"] > 1 else True}
    check(model, MESHES[mesh], form, accumulate=accumulate, program=program, **options)


MANUAL, FLAT = {"program": "manual"}, {"program": "manual", "storage": "flat"}
CASES = {
    "in 4 bits, flat": ("stacked", {"fsdp": 4}, FLAT | {"quantized": NF4}, "lora"),
    "in 8 bits, Linen": ("linen", {"fsdp": 4}, {"quantized": {"**.up.kernel": "int8"}, "strategy": "zero2"}, "dora"),
    "split adapters, offloaded": (
        "stacked",
        {"fsdp": 4},
        {"lora": lora("lora", placement="full_shard"), "offload_policy": jfsdp.OffloadPolicy(True, True, True)},
        "lora",
    ),
}
PROOFS = {
    "cut, manual": ("split", {"fsdp": 2, "tensor": 2}, MANUAL | {"cuts": CUTS}, "lora"),  # and in test_lora_dropout.py
    "cut": ("split", {"fsdp": 2, "tensor": 2}, {"cuts": CUTS}, "dora"),
    "in 4 bits, manual": (
        "listed",
        {"replica": 2, "fsdp": 2},
        MANUAL | {"quantized": {"**.up.kernel": "int4"}},
        "dora",
    ),
    "in 4 bits": ("stacked", {"fsdp": 4}, {"quantized": NF4}, "dora"),
    "in 4 bits, lora": ("stacked", {"fsdp": 8}, {"quantized": NF4}, "lora"),
    "no remat": ("stacked", {"fsdp": 8}, MANUAL | {"remat": "none"}, "lora"),
    "flat": ("stacked", {"fsdp": 8}, FLAT, "dora"),
    "prefetch 2": ("listed", {"fsdp": 8}, MANUAL | {"prefetch": 2}, "lora"),
    "offloaded": ("listed", {"fsdp": 4}, {"offload_policy": jfsdp.OffloadPolicy(True, True, True)}, "dora"),
    "split adapters, dora": ("stacked", {"fsdp": 4}, {"lora": lora("dora", placement="full_shard")}, "dora"),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.proof) for case in PROOFS)])
def test_every_setting_equals_one_device(case):
    model, mesh, options, form = (CASES | PROOFS)[case]
    check(model, mesh, form, **({"program": "xla"} | options))


@pytest.mark.parametrize(
    "rest", thin([{"quantized": NF4}, {"mp_policy": jfsdp.MixedPrecisionPolicy(frozen_dtype="bfloat16")}])
)
def test_a_base_of_few_bits_takes_nothing_from_the_merged_matrices(rest):
    model = fully_shard(Tower, units=[Block], lora=lora("lora"), mesh=jfsdp.make_mesh(), **rest)
    tx, batch = optax.adam(1e-3), make_batches(1)[0]
    state = model.init(tx)
    first = model.to_flax(state)
    for _ in range(2):
        state, _ = model.train_step(token_loss, tx, check_loss=False)(state, batch)
    whole, run = model.to_flax(state), model.forward(lambda model, batch: model(batch["tokens"]))
    before, after, meant = (np.asarray(x) for x in (first(batch["tokens"]), whole(batch["tokens"]), run(state, batch)))
    assert np.abs(after - meant).max() < 1e-3 * np.abs(after - before).max()
