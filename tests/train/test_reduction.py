"""When a step reduces, and in which dtype: what strategies and policies allow."""

from typing import Any

import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.strategy import STRATEGIES
from jfsdp.train.checks import check_reduce_dtype
from jfsdp.train.step import StepConfig, reduces_once

BF16 = jfsdp.MixedPrecisionPolicy("bfloat16", "bfloat16")
F32_SUMS = jfsdp.MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")
WHOLE = ["ddp", "zero1"]  # strategies whose accumulator may be whole


def layout(**settings: Any) -> jfsdp.Layout:
    model = lambda rngs: nnx.List([nnx.Linear(8, 8, rngs=rngs)])  # noqa: E731
    mesh = jfsdp.make_mesh(replica=2, fsdp=4)
    return jfsdp.fully_shard(model, mesh=mesh, units=[nnx.Linear], **settings).layout


def test_a_reduction_in_another_dtype_than_the_parameters_is_refused_by_unit():
    with pytest.raises(
        ValueError,
        match=r"unit .*: reduce_dtype 'float32' differs from param_dtype 'bfloat16', in which .* engine 'auto'",
    ):
        check_reduce_dtype(layout(mp_policy=F32_SUMS), once=False)
    with pytest.raises(ValueError, match=r"unit 0: reduce_dtype 'float32' differs .*or reduce once"):
        check_reduce_dtype(layout(per_unit={"0": {"mp_policy": F32_SUMS}}), once=False)


@pytest.mark.parametrize(("policy", "once"), [(F32_SUMS, True), (BF16, False), (BF16, True), (None, False)])
def test_a_reduction_in_the_dtype_of_the_parameters_or_at_the_end_is_welcome(policy, once):
    check_reduce_dtype(layout(mp_policy=policy), once)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_zero1_reduces_once_unless_asked_and_only_if_there_is_more_than_one(strategy, accumulate):
    assert reduces_once(layout(strategy=strategy), StepConfig(accumulate)) == (strategy == "zero1" and accumulate > 1)
    assert not reduces_once(layout(strategy=strategy), StepConfig(accumulate, "every"))


def test_zero1_with_a_parameter_split_at_rest_reduces_every_microbatch_unless_asked():
    mixed = layout(strategy="zero1", placements={"0.kernel": "full_shard"}, min_size=4)
    assert not reduces_once(mixed, StepConfig(2))
    with pytest.raises(ValueError, match=r'reduce="once": strategy .*: 0\.kernel is split at rest'):
        reduces_once(mixed, StepConfig(2, "once"))


@pytest.mark.parametrize("norm", ["a", 0, -1.0])
def test_a_norm_to_clip_to_is_a_positive_number(norm):
    with pytest.raises(ValueError, match=r"max_grad_norm=.* must be a positive number, or None"):
        StepConfig(max_grad_norm=norm)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reducing_once_needs_a_whole_accumulator_or_whole_parameters(strategy):
    if strategy in WHOLE:
        assert reduces_once(layout(strategy=strategy), StepConfig(2, "once"))
    else:
        with pytest.raises(ValueError, match=rf'reduce="once": strategy {strategy!r}.*; use ddp, zero1, .*or keep'):
            reduces_once(layout(strategy=strategy), StepConfig(2, "once"))
    assert reduces_once(layout(strategy=strategy), StepConfig(2, "once", reshard_after_backward=False))
