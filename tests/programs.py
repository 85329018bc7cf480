"""Digests of programs that all processes of a run must build equally: `python -m tests.programs SEED ROW ...`.

A row is a setting and a model, such as `manual, kept: scan`; the default is all rows. The seed determines the order of
the rows and earlier allocations of memory. Prints one line of JSON: for each row, a digest of each part.
"""

import functools
import hashlib
import importlib
import itertools
import json
import random
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import jfsdp
from jfsdp.checkpoint.disk.logical_arrays import logical_arrays
from jfsdp.layout.report import layout_to_dict
from tests.models_small import VOCAB, token_loss
from tests.steps import fully_shard

NUM_LAYERS = 5  # enough that every prefetch leaves a scan of equal iterations


class Part(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Layer(nnx.Module):
    """A layer of three units."""

    def __init__(self, rngs):
        self.a, self.b, self.c = Part(rngs), Part(rngs), Part(rngs)

    def __call__(self, x):
        return self.c(self.b(self.a(x)))


class Stack(nnx.Module):
    """Layers under a scan."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=NUM_LAYERS)(make)(rngs)
        self.head = nnx.Linear(16, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        run = nnx.scan(lambda x, layer: layer(x).astype(x.dtype), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(self.embed(tokens), self.layers))


class Tied(nnx.Module):
    """Layers in a list; the head is the embedding."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


class LinenPart(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + jnp.tanh(linen.Dropout(0.1, deterministic=False)(linen.Dense(16)(x)))


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return LinenPart(name="b")(LinenPart(name="a")(x)).astype(x.dtype), None


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, 16, name="embed")(tokens)
        rngs: Any = {"params": True, "dropout": True}
        layers = linen.scan(LinenLayer, variable_axes={"params": 0}, split_rngs=rngs, length=NUM_LAYERS)
        return linen.Dense(VOCAB, name="head")(layers(name="layers")(x, None)[0])


TOKENS = jax.ShapeDtypeStruct((16, 6), jnp.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS, "weights": jax.ShapeDtypeStruct((16, 6), jnp.float32)}
MODELS = {
    "scan": (Stack, [jfsdp.Unit(Part, stacked=1)]),
    "list": (Tied, [Part]),
    "linen": ((LinenStack(), (jax.ShapeDtypeStruct((1, 6), jnp.int32),)), [jfsdp.Unit(LinenPart, stacked=1)]),
}


def labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "slow" if "kernel" in str(path) else "fast", params)


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "masked": optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "partition": optax.partition({"slow": optax.sgd(1e-3), "fast": optax.adam(1e-2)}, labels),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
}

CHOSEN = {"embed", functools.partial(lambda unit, path, x: f".{unit}." in path, "a")}
POLICY = jax.checkpoint_policies.everything_saveable
BF16 = jfsdp.MixedPrecisionPolicy("bfloat16")
XLA, MANUAL, GROUPS = {"program": "xla"}, {"program": "manual"}, {"replica": 2, "fsdp": 4}
FLAT, LISTS = MANUAL | {"storage": "flat"}, MANUAL | {"prefetch": "lists"}
TWICE, ONCE = {"accumulate": 2}, {"accumulate": 2, "sync": "last"}
KEPT, NEIGHBOURS, FREED = ({"reshard_after_forward": value} for value in (False, 2, True))
# Options of `fully_shard`, and of `train_step`.
SETTINGS = {
    "xla": (XLA, {}),
    "xla, twice": (XLA | {"mp_policy": BF16}, TWICE),
    "xla, kept": (XLA | KEPT, {}),
    "xla, neighbours": (XLA | NEIGHBOURS, TWICE),
    "xla, hybrid": (XLA | GROUPS, TWICE),
    "xla, tensor": (XLA | {"fsdp": 4, "tensor": 2}, {}),
    "by the loss": ({"strategy": "ddp"}, ONCE),
    "manual": (MANUAL, {"max_grad_norm": 1.0}),
    "manual, depth 0": (MANUAL | {"prefetch": 0}, TWICE),
    "manual, depth 2": (MANUAL | {"prefetch": 2}, {}),
    "manual, lists": (LISTS, {}),
    "manual, lists, kept": (LISTS | KEPT, TWICE),
    "manual, kept": (MANUAL | KEPT, {}),
    "manual, kept, depth 2": (MANUAL | KEPT | {"prefetch": 2}, TWICE),
    "manual, neighbours": (MANUAL | NEIGHBOURS, {}),
    "manual, freed": (MANUAL | FREED, TWICE),
    "manual, zero1": (MANUAL | {"strategy": "zero1"}, TWICE),
    "manual, zero2": (MANUAL | {"strategy": "zero2"}, TWICE),
    "manual, once": (MANUAL, ONCE),
    "manual, gathered once": (MANUAL, TWICE | {"reshard_after_backward": False}),
    "manual, hybrid": (MANUAL | GROUPS, TWICE),
    "manual, hybrid, kept": (MANUAL | KEPT | GROUPS, TWICE),
    "manual, hfsdp": (MANUAL | {"opt_over": ("replica", "fsdp"), **GROUPS}, {}),
    "manual, neighbours in groups": (MANUAL | {**NEIGHBOURS, **GROUPS}, TWICE),
    "manual, chosen by functions": (MANUAL | KEPT | {"frozen": CHOSEN, "remat": POLICY}, {}),
    "manual, offloaded": (MANUAL | {"offload_policy": jfsdp.OffloadPolicy(True, True, True)}, {}),
    "manual, float16": (MANUAL | {"mp_policy": jfsdp.MixedPrecisionPolicy("float16")}, TWICE),
    "flat": (FLAT, {}),
    "flat, kept": (FLAT | KEPT, TWICE),
    "flat, neighbours": (FLAT | NEIGHBOURS, {}),
    "flat, freed, depth 2": (FLAT | FREED | {"prefetch": 2}, {}),
    "flat, hybrid, kept": (FLAT | KEPT | GROUPS, TWICE),
    "flat, once": (FLAT | {"mp_policy": BF16}, ONCE),
}


def build(setting, model):
    """Return the parts of a setting and a model that must be equal in all processes, as texts."""
    source, units = MODELS[model]
    options, step_options = SETTINGS[setting]
    sizes = {axis: options[axis] for axis in ("replica", "fsdp", "tensor") if axis in options}
    options = {name: value for name, value in options.items() if name not in sizes}
    if options.get("prefetch") == "lists":
        names = [unit.name for unit in fully_shard(source, units=units, min_size=1).layout.units if unit.name]
        options["prefetch"] = jfsdp.Prefetch(*({name: [after] for name, after in pairs(names, way)} for way in (1, -1)))
    tx = OPTIMIZERS[list(OPTIMIZERS)[list(SETTINGS).index(setting) % len(OPTIMIZERS)]]
    sharded = fully_shard(source, mesh=jfsdp.make_mesh(**sizes), units=units, min_size=1, **options)
    state, step = sharded.abstract_state(tx), sharded.train_step(token_loss, tx, **step_options)
    lowered = step.lower(state, BATCH)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    parts = {
        "step": lowered.as_text(),  # without source lines: a traced function keeps the lines of its first caller
        "state": "\n".join(f"{jax.tree_util.keystr(path)} {x} {x.sharding}" for path, x in leaves),
        "layout": json.dumps(layout_to_dict(sharded.layout)),
        "checkpoint": repr(logical_arrays(state)),
        "options of XLA": repr(step.compiler_options),
    }
    if list(SETTINGS).index(setting) % len(MODELS) == list(MODELS).index(model):  # each setting on one of the models
        parts["init"] = sharded.lower_init(tx).as_text()
        parts["forward"] = sharded.forward(token_loss).lower(state, BATCH).as_text()
    return parts


def pairs(names, way):
    """Pair each unit with the next unit called; `way` is 1, or -1 for the backward."""
    names = names[::way]
    return itertools.pairwise(names)


def digests(setting, model):
    """Return a digest of each part, of the error if the setting raises, and of the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            parts = build(setting, model)
        except ValueError as error:
            parts = {"refusal": str(error)}
    parts["warnings"] = "\n".join(str(warning.message) for warning in told)
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in parts.items()}


def main(seed, rows):
    rng, held, found = random.Random(seed), [], {}
    for name in rng.sample(["sqlite3", "xml.dom.minidom", "tarfile", "curses", "mailbox"], seed % 4):
        importlib.import_module(name)
    for row in rng.sample(rows, len(rows)):
        held += [bytearray(rng.randrange(16, 4096)) for _ in range(rng.randrange(4000))]
        held = rng.sample(held, rng.randrange(len(held) + 1))
        found[row] = digests(*row.split(": "))
    print(json.dumps(found))


ROWS = [f"{setting}: {model}" for setting in SETTINGS for model in MODELS]

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or ROWS)
