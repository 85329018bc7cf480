"""Steps as a pipeline equal program manual without one, on the same data shards: with whatever else a step can have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import jfsdp
from jfsdp_models.llama import MLP, Attention  # pyright: ignore[reportMissingImports]
from tests import models_published as published
from tests import models_small as small
from tests import reference
from tests.steps import fully_shard

STEPS, ROWS, ACCUMULATE, LEARNING_RATE = 3, 16, 4, 1e-2
ADAM = optax.adamw(LEARNING_RATE, eps=1e-4)
TOWER, LLAMA = published.tower(True, num_layers=4), published.llama(True, num_layers=4)
pytestmark = pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")


class HalfLayer(nnx.Module):
    """A layer that hands on float16 whatever it is given, also where weights are float32."""

    def __init__(self, rngs):
        self.up, self.down = (nnx.Linear(24, 24, rngs=rngs, dtype=jnp.float16) for _ in range(2))

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Half(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(published.VOCAB, 24, rngs=rngs, dtype=jnp.float16)
        make = nnx.vmap(lambda rngs: HalfLayer(rngs), in_axes=0, out_axes=0)
        self.layers, self.head = nnx.split_rngs(splits=4)(make)(rngs), nnx.Linear(24, published.VOCAB, rngs=rngs)

    def __call__(self, tokens):
        scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(scan(self.embed(tokens), self.layers))


class DropLayer(linen.Module):
    """Names a value to save, and drops another."""

    @linen.compact
    def __call__(self, x, _=None):
        h = checkpoint_name(jnp.tanh(linen.Dense(24)(x)), "qkv")
        return x + linen.Dropout(0.3, deterministic=False)(linen.Dense(24)(h)), None


class Drop(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}, "length": 2}
        x = linen.Embed(published.VOCAB, 24, name="embed")(tokens)
        return linen.Dense(published.VOCAB)(linen.scan(DropLayer, **kinds)(name="layers")(x, None)[0])


TOKENS = (jax.ShapeDtypeStruct((1, published.LENGTH), jnp.int32),)
DROP = published.Case((Drop(), TOKENS), small.token_loss, [DropLayer], published.tokens)
HALF = published.Case(Half, small.token_loss, [HalfLayer], published.tokens)
NORM = jfsdp.Unit("layers.*_norm", stacked=1)
INNER = dataclasses.replace(LLAMA, units=[Attention, MLP, NORM])
WIDE = dataclasses.replace(TOWER, source=lambda rngs: small.Tower(rngs, dim=64, num_layers=4, vocab=published.VOCAB))
LORA = jfsdp.LoRA(rank=2, alpha=4, targets=["blocks.up.kernel"])
DECAYED = optax.chain(
    optax.clip_by_global_norm(0.1),
    optax.adamw(
        LEARNING_RATE,
        eps=1e-4,
        weight_decay=0.1,
        mask=functools.partial(
            jax.tree_util.tree_map_with_path, lambda path, _: "kernel" in jax.tree_util.keystr(path)
        ),
    ),
    jfsdp.optim.track_ema(0.9),
)
# By name: model, data axes, options of fully_shard, of both steps, of the pipeline's, the optimizer.
FSDP, HYBRID = {"fsdp": 2}, {"replica": 2, "fsdp": 2}
CASES = {
    "masked optimizer, average, clipping": (
        TOWER,
        FSDP,
        {"remat": "dots"},
        {"max_grad_norm": 0.05, "skip_nonfinite": True},
        {"pipe_schedule": "gpipe"},
        DECAYED,
    ),
    "float16": (HALF, FSDP, {"mp_policy": jfsdp.MixedPrecisionPolicy("float16")}, {}, {}, optax.sgd(0.1)),
    "adapters": (WIDE, FSDP, {"lora": LORA, "quantized": {"blocks.*.kernel": "int8"}}, {}, {"pipe_repeats": 2}, ADAM),
    "offload": (
        TOWER, FSDP, {"offload_policy": jfsdp.OffloadPolicy(params=True, opt_state=True, grads=True)}, {}, {}, ADAM,
    ),
    "zero1": (TOWER, HYBRID, {"strategy": "zero1"}, {}, {"pipe_repeats": 2}, ADAM),
    "reduced once": (TOWER, HYBRID, {}, {"sync": "last"}, {"pipe_schedule": "gpipe"}, ADAM),
    "kept": (TOWER, HYBRID, {"reshard_after_forward": False}, {}, {}, ADAM),
    "kept in part": (
        TOWER, {"fsdp": 4}, {"reshard_after_forward": 2}, {}, {"pipe_repeats": 2}, ADAM,
    ),
    "several units per layer": (INNER, FSDP, {"prefetch": 2}, {}, {}, ADAM),
    "one gather ahead, forward": (INNER, FSDP, {"prefetch": jfsdp.Prefetch(1, 0)}, {}, {"pipe_repeats": 2}, ADAM),
    "dropout, Linen": (DROP, FSDP, {"remat": ("qkv",)}, {}, {}, ADAM),
    "dropout, GPT-2": (published.gpt2(dropout=0.3), FSDP, {"remat": ("qkv",)}, {}, {}, ADAM),
}  # fmt: skip
QUICK = ("masked optimizer, average, clipping", "dropout, Linen")


def train(case, sizes, options, step, tx):
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    model = fully_shard(case.source, mesh=mesh, units=case.units, min_size=20, **options)
    state, losses = model.init(tx), []
    run = model.train_step(case.loss, tx, accumulate=ACCUMULATE, check_loss=False, **step)
    for seed in range(STEPS):
        state, metrics = run(state, case.batch(np.random.default_rng(seed), ROWS))
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"]), float(metrics["num_skipped"])))
    return state, np.array(losses)


def logical(state):
    """Return parameters and what the optimizer keeps, by name, in logical shapes."""
    pairs = zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True)
    found = {f"optimizer {role.name}": np.asarray(x)[tuple(map(slice, role.shape))] for role, x in pairs}
    return found | {name: reference.logical(state, name, x) for name, x in state.params.items()}


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.proof) for x in CASES])
def test_a_pipeline_equals_the_same_data_shards_without_one(name):
    case, sizes, options, both, own, tx = CASES[name]
    state, found = train(case, {"pipe": 2, **sizes}, options, both | own, tx)
    alone, wanted = train(case, sizes, options | {"program": "manual"}, both, tx)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(found[:, 2], wanted[:, 2])
    is_half = name == "float16"
    np.testing.assert_allclose(found[:, 0], wanted[:, 0], rtol=1e-3 if is_half else 1e-6)
    np.testing.assert_allclose(found[:, 1], wanted[:, 1], rtol=1e-3 if is_half else 1e-6)
    first, second = logical(state), logical(alone)
    floats = {name for name, x in second.items() if np.issubdtype(x.dtype, np.floating)}
    first, second = ({name: x[name] for name in floats} for x in (first, second))
    error, leaf = reference.worst_leaf(first, second, LEARNING_RATE * STEPS)
    assert error < (1e-2 if is_half else 1e-4), f"{leaf}: {error:.2e}"


def test_what_a_state_does_besides_steps_does_not_know_stages():
    """Evaluation, the whole model, comparison of replicas."""
    mesh = jfsdp.make_mesh(pipe=2, replica=2, fsdp=2)
    model = fully_shard(TOWER.source, mesh=mesh, units=TOWER.units, min_size=20)
    state, tokens = model.init(optax.sgd(0.1)), TOWER.batch(np.random.default_rng(0), ROWS)["tokens"]
    assert jfsdp.checkpoint.compare_replicas(state)
    found = model.forward(lambda model, tokens: model(tokens))(state, tokens)
    wanted = nnx.jit(lambda model, tokens: model(tokens))(model.to_flax(state), tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
