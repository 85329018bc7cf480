"""When a step reduces, and in which dtype: what strategies and policies allow."""

from typing import Any

import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.layout import Layout
from jfsdp.layout.strategy import STRATEGIES
from jfsdp.train.step.config import StepConfig
from jfsdp.train.step.resolve import check_needs
from tests.refusals import refusing
from tests.sharding import fully_shard

BF16 = jfsdp.MixedPrecisionPolicy("bfloat16", "bfloat16")
F32_SUMS = jfsdp.MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")


def layout(**settings: Any) -> Layout:
    model = lambda rngs: nnx.List([nnx.Linear(8, 8, rngs=rngs)])  # noqa: E731
    mesh = jfsdp.make_mesh(replica=2, fsdp=4)
    return fully_shard(model, mesh=mesh, units=[nnx.Linear], **settings).layout


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"mp_policy": F32_SUMS}, ["reduce_dtype='float32' (weights of unit 0 are gathered in bfloat16)"]),
        (
            {"per_unit": {"0": {"mp_policy": F32_SUMS}}},
            ["reduce_dtype='float32' (weights of unit 0 are gathered in bfloat16)"],
        ),
        ({"mp_policy": BF16}, []),
        ({}, []),
        ({"mp_policy": F32_SUMS, "frozen": "**.kernel", "ignored": "**.bias"}, []),
    ],
)
def test_sums_in_another_dtype_than_weights_travel_in_are_named(settings, found):
    assert check_needs(layout(**settings), StepConfig()) == found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_zero1_reduces_last_unless_asked(strategy):
    assert StepConfig(2).syncs_last(layout(strategy=strategy)) == (strategy == "zero1")
    assert StepConfig(2, sync="last").syncs_last(layout(strategy=strategy))
    assert not StepConfig(2, sync="every").syncs_last(layout(strategy=strategy))


@pytest.mark.parametrize("norm", ["a", 0, -1.0])
def test_a_norm_to_clip_to_is_a_positive_number(norm):
    with refusing("max_grad_norm="):
        StepConfig(max_grad_norm=norm)
