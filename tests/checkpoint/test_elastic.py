"""Saved under one mesh, strategy, engine, storage and form of layers, and gone on with under another.

Parameters and Adam's states are bit-identical, and the next losses those of the run that was not interrupted: bit
by bit where nothing changed, within 1e-5 relative where sums over devices differ in order, within 1e-3 where one of the
two computes in bfloat16 and the other in float32 or over other devices.
"""

import dataclasses
import functools
import itertools

import pytest

from tests.checkpoint import elastic
from tests.checkpoint.elastic import CHAIN, SETTINGS, Setting
from tests.processes import Processes

LIMIT, LIMIT_BFLOAT16 = 1e-5, 1e-3
PAIRS = [*zip(CHAIN, CHAIN[1:] + CHAIN[:1], strict=True), *((one, one) for one in (*CHAIN[:3], CHAIN[-1]))]
PROOFS = [pytest.param(*pair, marks=pytest.mark.proof) for pair in itertools.product(SETTINGS, SETTINGS)]


@pytest.fixture(scope="module")
def call():
    """Call a function of `elastic` for a setting: here, or in the two processes that it needs."""
    with_processes = functools.cache(Processes)

    def call(name, setting: Setting, path):
        fields = dataclasses.astuple(setting)
        if not setting.is_remote:
            return getattr(elastic, name)(fields, str(path))
        first, second = with_processes().call(f"tests.checkpoint.elastic:{name}", fields, str(path))
        assert first == second
        return first

    yield call
    if with_processes.cache_info().currsize:
        with_processes().close()


@pytest.fixture(scope="module")
def begun(call, tmp_path_factory):
    """Begin a run once; return where it was saved, its bits, and the losses that follow."""

    @functools.cache
    def begin(setting: Setting):
        path = tmp_path_factory.mktemp("elastic") / "c"
        return path, *call("begin", setting, path)

    return begin


@pytest.mark.parametrize(("source", "target"), PAIRS + PROOFS, ids=str)
def test_a_run_goes_on_under_another_setting(source, target, begun, call):
    path, bits, losses = begun(source)
    found, ours = call("go_on", target, path)
    assert found == bits, f"{source} -> {target}"
    if source == target:
        assert ours == losses, "nothing changed, so no bit may"
    low = "zero1" in (source.strategy, target.strategy)
    assert ours == pytest.approx(losses, rel=LIMIT_BFLOAT16 if low else LIMIT)
