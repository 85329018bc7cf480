"""Pipelines compiled for H100s that are not there: bytes over each axis, memory, the bubble, and what a search tries.

A narrow Llama of 8 layers on pipe=2,fsdp=4. The closed forms here are written from the schedules' definitions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.engine.pipeline.schedule import get_schedule
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.time.pipeline import Pipeline, tick_seconds
from jfsdp.plan.time.timeline import Rates, simulate
from jfsdp.plan.traffic.ledger import make_ledger
from tests import hlo
from tests.plan import programs
from tests.steps import fully_shard
from tests.thin import thin

LAYERS, DIM, FFN, VOCAB, KV, SEQ = 8, 1024, 2048, 4096, 512, 512
P, F = 2, 4
PER_STAGE = LAYERS // P
LAYER = 2 * DIM * DIM + 2 * DIM * KV + 3 * DIM * FFN + 2 * DIM  # elements
ROOT = 2 * VOCAB * DIM // P + DIM  # on a stage: embedding and head are cut over the stages


@functools.cache
def compiled(schedule="1f1b", repeats=1, prefetch=1, microbatches=8, layers=LAYERS) -> tuple[Any, Any, Any]:
    """Return the step, its module, and how it was compiled."""
    job = programs.job(layers)
    model = programs.build(mesh=(("pipe", P), ("fsdp", F)), config=(("num_layers", layers),), prefetch=prefetch)
    options = {"accumulate": microbatches, "pipe_schedule": schedule, "pipe_repeats": repeats}
    step, _, found = programs.compile_with_step(model, job.loss, job.batch(F * microbatches, SEQ), **options)
    return step, parse_module(found.as_text()), found


def gathers_and_sums(repeats, prefetch, microbatches):
    """How often a step gathers a layer, and sums the gradient of one."""
    passes, layers = repeats * microbatches + P - 1, PER_STAGE // repeats
    if prefetch == 0 or repeats > 1:
        return passes * 2 * layers, passes * layers
    return passes * (2 * layers - 3) + 2, passes * layers + 1  # the ends of a stage stay


SLOW = [pytest.param(*case, marks=pytest.mark.proof) for case in (("1f1b", 1, 0), ("gpipe", 1, 1), ("1f1b", 2, 1))]


@pytest.mark.parametrize(("schedule", "repeats", "prefetch"), [("1f1b", 1, 1), *SLOW])
def test_every_axis_carries_what_the_schedule_says(schedule, repeats, prefetch):
    step, module, _ = compiled(schedule, repeats, prefetch)
    trace = step.read_trace(step.abstract_state(), programs.job(LAYERS).batch(F * 8, SEQ))
    found = find_collectives(module, P * F, dict(step.layout.mesh_sizes))
    ledger = make_ledger(step.layout, found, step.spec, trace=trace)
    sent: dict[tuple[str, str, str], float] = {}
    for row in ledger.rows:
        if row.what != "scalars":
            key = row.axes[0], row.kind, row.dtype
            sent[key] = sent.get(key, 0) + row.measured_bytes
    gathers, sums = gathers_and_sums(repeats, prefetch, 8)
    share, passes, hidden = 2 * (F - 1) / F, repeats * 8 + P - 1, 2 * SEQ * DIM
    assert sent["fsdp", "all-gather", "bf16"] == share * (gathers * LAYER + ROOT)
    assert sent["fsdp", "reduce-scatter", "bf16"] == share * (sums * LAYER + ROOT)
    dealt = PER_STAGE * LAYER / F if repeats > 1 else 0  # two permutations of half of a stage's layers each
    sends = 2 * passes - (repeats == 1)  # what stage 0 has left in the last tick goes nowhere
    assert sent["pipe", "collective-permute", "bf16"] == sends * hidden + 2 * dealt
    assert sent.get(("pipe", "collective-permute", "f32"), 0) == 4 * dealt  # gradients back, as they are summed
    # What enters and what leaves in each tick, before them the shapes of the first; hidden states and their gradients.
    assert sent["pipe", "all-reduce", "bf16"] == (2 * passes + 2 * 8 + 1) * hidden
    assert ledger.unknown == ()
    assert ledger.wire_ratio == pytest.approx(1, abs=1e-6)
    assert ledger.own_ratio == pytest.approx(1, abs=1e-3)


class Mix(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 512, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(512, 256, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(x)))


class Scale(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(256))

    def __call__(self, x):
        return x * self.scale[...]


class Scores(nnx.Module):
    def __init__(self, rngs):
        self.scores = nnx.Linear(256, 256, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.scores(x)


class Ends(nnx.Module):
    """Called first, a unit that is whole, too small to be split; or last, one that only counts: without a backward."""

    def __init__(self, rngs, has_small):
        self.mix, self.scores = Mix(rngs), Scores(rngs)
        self.small = Scale(rngs) if has_small else None

    def __call__(self, carry):
        x, seen = carry
        if self.small is None:
            x = self.mix(x)
            return x, seen + (self.scores(x) > 0).sum((1, 2))
        x = self.mix(self.small(x))
        return x + self.scores(x), seen


class Counted(nnx.Module):
    def __init__(self, rngs, has_small):
        self.embed = nnx.Embed(512, 256, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Ends(rngs, has_small)))(rngs)

    def __call__(self, tokens):
        scan = nnx.scan(lambda carry, layer: layer(carry), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x, seen = scan((self.embed(tokens), jnp.zeros(tokens.shape[0], jnp.int32)), self.layers)
        return self.embed.attend(x * (1 + 0.01 * seen[:, None, None]))


def counted_loss(model, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens)
    return jfsdp.Loss(losses.sum(), losses.size)


@pytest.mark.parametrize("has_small", thin([True, False]))
def test_theory_knows_which_ends_of_a_stage_do_not_stay(has_small):
    units = [jfsdp.Unit(f"layers.{name}", stacked=1) for name in ("mix", "scores", *["small"] * has_small)]
    mesh = jfsdp.make_mesh(devices=hlo.h100s(1), pipe=P, fsdp=F)
    words = {"embed.embedding": (0, "pipe")}
    model = fully_shard(lambda rngs: Counted(rngs, has_small), mesh=mesh, units=units, min_size=1000, cuts=words)
    tx = optax.sgd(0.1)
    step = model.train_step(counted_loss, tx, accumulate=4)
    lowered = step.lower(model.abstract_state(tx), jax.ShapeDtypeStruct((4 * F, 128), jnp.int32))
    found = find_collectives(
        parse_module(lowered.compile(step.compiler_options).as_text()), P * F, dict(step.layout.mesh_sizes)
    )
    ledger = make_ledger(step.layout, found, step.spec)
    split = [row for row in ledger.rows if row.axes == ("fsdp",) and row.kind in ("all-gather", "reduce-scatter")]
    assert {row.unit for row in split} == {"", "layers.mix", "layers.scores"}
    for row in split:
        assert row.measured_bytes == row.expected_bytes, (row.unit, row.kind)


@pytest.mark.proof
def test_memory_and_program_are_the_same_for_8_microbatches_and_64():
    """At most 2P-1 microbatches wait under 1f1b, and ticks that compute alike are one loop."""
    (_, _, few), (_, _, many) = compiled(), compiled(microbatches=64)
    assert few.memory_analysis().temp_size_in_bytes == many.memory_analysis().temp_size_in_bytes
    lines = [len(found.as_text().splitlines()) for found in (few, many)]
    assert lines[0] == pytest.approx(lines[1], rel=0.02)


@pytest.mark.proof
def test_all_microbatches_wait_under_gpipe():
    """Hidden states before each layer, one more place for ticks of no use."""
    sizes = [compiled("gpipe", microbatches=num)[2].memory_analysis().temp_size_in_bytes for num in (8, 16)]
    assert (sizes[1] - sizes[0]) / (8 * PER_STAGE * 2 * SEQ * DIM) == pytest.approx(1, rel=0.3)


def test_the_clock_finds_passes_and_what_stages_share():
    step, module, _ = compiled("1f1b", 1, 1)
    clock = simulate(
        module, find_collectives(module, P * F, dict(step.layout.mesh_sizes)), Rates(Cluster(find_gpu("h100")))
    )
    seconds = tick_seconds(module, clock)
    assert sum(seconds.values()) == pytest.approx(clock.step_s, rel=0.2)
    assert 1.5 < seconds["backward"] / seconds["forward"] < 4
    assert seconds["shared"] > 0
    pipeline = Pipeline("1f1b", step.spec.schedule, 1, 8, seconds, clock.step_s)
    assert 0.5 / 9 < pipeline.bubble_share < pipeline.bubble


def pipeline(name="1f1b", stages=4, microbatches=8, repeats=1):
    schedule = get_schedule(name, stages, microbatches, repeats)
    return Pipeline(name, schedule, repeats, microbatches, {"forward": 11.0, "backward": 22.0, "shared": 4.0}, 40.0)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_bubble_by_formula_and_by_the_clock(name, repeats):
    found = pipeline(name, repeats=repeats)
    assert found.bubble == pytest.approx(3 / (8 * repeats + 3))
    assert found.bubble_share == pytest.approx(found.bubble * 33 / 40)
    assert pipeline(name).live == {"1f1b": 7, "gpipe": 8}[name]
