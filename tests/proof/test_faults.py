"""What `prove` finds and names of seeded faults, and that it finds nothing in programs without a fault."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jfsdp
from jfsdp.proof import causes
from tests.proof.faults import DIM, FAULTS, of, weight

CAUSES = re.findall(r"^    ([\w-]+) +\w", causes.__doc__ or "", re.M)
MARKED = [pytest.param(x, id=x.name, marks=() if x.quick else pytest.mark.proof) for x in FAULTS]


@pytest.mark.parametrize("fault", MARKED)
def test_faults_are_found_and_named(fault, monkeypatch):
    fault.seed(monkeypatch)
    (one,) = jfsdp.prove(**fault.given).cases
    if not fault.causes:
        assert one.status == "equal", one
    else:
        assert one.status in ("differs", "refused") and one.cause
        assert one.cause.name in fault.causes, one.cause


def test_faults_are_named_as_causes_and_once():
    assert {name for fault in FAULTS for name in fault.causes} == {*CAUSES} - {"unknown"}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len(FAULTS) - sum(not fault.causes for fault in FAULTS) >= 40
    assert jax.device_count() >= 4


class Carried(nnx.Module):
    """A scan whose carry is float32 whatever the parameters are."""

    def __init__(self, rngs):
        self.mix = weight(rngs, DIM, DIM)

    def __call__(self, x):
        step = lambda x, _: (jnp.tanh(x @ self.mix[...]), None)  # noqa: E731
        return jax.lax.scan(step, x.astype(jnp.float32), None, length=2)[0]


def test_a_model_that_float64_breaks_is_proved_in_its_own_dtype():
    proof = jfsdp.prove(**of(Carried))
    assert proof.is_ok and proof.dtype == "float32" and "float64 fails" in proof.note
