"""What `prove` finds and names of seeded faults, and that it finds nothing in programs without a fault."""

import jax
import pytest

import jfsdp
from jfsdp.proof.causes import CAUSES
from tests.proof.faults import FAULTS, UNSEEN

MARKED = [pytest.param(x, id=x.name, marks=() if x.quick else pytest.mark.proof) for x in FAULTS]


@pytest.mark.parametrize("fault", MARKED)
def test_faults_are_found_and_named(fault, monkeypatch):
    fault.seed(monkeypatch)
    (one,) = jfsdp.prove(**fault.given).cases
    if not fault.causes:
        assert one.status == "equal", one
    elif fault.name in UNSEEN:
        assert one.status == "equal", "it is seen now: remove it from UNSEEN"
    else:
        assert one.status in ("differs", "refused")
        assert one.cause.name in fault.causes, one.cause


def test_faults_are_named_as_causes_and_once():
    assert {name for fault in FAULTS for name in fault.causes} == CAUSES.keys() - {"unknown"}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len(FAULTS) - sum(not fault.causes for fault in FAULTS) >= 40
    assert jax.device_count() >= 4
