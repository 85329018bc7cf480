"""Saved under one mesh, strategy, engine, storage and form of layers, and gone on with under another.

Parameters and Adam's states are bit-identical, and the next five losses those of the run that was not interrupted: bit
by bit where nothing changed, within 1e-5 relative where sums over devices differ in order, within 1e-3 where one of the
two computes in bfloat16 and the other in float32 or over other devices.
"""

import dataclasses
import functools
import itertools

import pytest

from tests.checkpoint import elastic
from tests.checkpoint.elastic import COLUMNS, SETTINGS, Setting, covering_pairs
from tests.processes import Processes

LIMIT, LIMIT_BFLOAT16 = 1e-5, 1e-3
PAIRS = covering_pairs()


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


def check(source, target, begun, call):
    """Return the largest relative difference of a loss."""
    path, bits, losses = begun(source)
    found, ours = call("go_on", target, path)
    assert found == bits, f"{source} -> {target}"
    error = max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True))
    if source == target:
        assert ours == losses, "nothing changed, so no bit may"
    low = "zero1" in (source.strategy, target.strategy)
    assert error <= (LIMIT_BFLOAT16 if low else LIMIT), (ours, losses)
    return error


def named(pairs):
    return pytest.mark.parametrize(("source", "target"), pairs, ids=[f"{a}-to-{b}" for a, b in pairs])


def test_the_pairs_meet_every_value_with_every_other():
    met = [(dataclasses.astuple(source), dataclasses.astuple(target)) for source, target in PAIRS]
    for (i, ours), (j, theirs) in itertools.product(enumerate(COLUMNS.values()), repeat=2):
        assert {(source[i], target[j]) for source, target in met} == set(itertools.product(ours, theirs))
    assert {source for source, _ in PAIRS} == {target for _, target in PAIRS} == set(SETTINGS)
    assert {(source.form, source.is_remote) for source, target in PAIRS if source == target} == set(
        itertools.product(COLUMNS["form"], (False, True))
    )


@named(PAIRS)
def test_a_run_goes_on_under_another_setting(source, target, begun, call):
    check(source, target, begun, call)


@pytest.mark.proof
@named(list(itertools.product(SETTINGS, SETTINGS)))
def test_every_setting_goes_on_under_every_other(source, target, begun, call):
    check(source, target, begun, call)
