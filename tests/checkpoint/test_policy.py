"""When a run saves and what it keeps, decided without an array."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jfsdp
from jfsdp.checkpoint.policy import Keep, KeepBest, parse_best

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: float("nan"), 60: 2.5}
BEST = KeepBest("loss")


def metrics(values: dict[int, float]) -> Any:
    return {step: {"loss": value} for step, value in values.items()}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(), [40, 50, 60]),
        (Keep(last=None), [10, 20, 30, 40, 50, 60]),
        (Keep(last=None, every=20, best=BEST), [10, 20, 30, 40, 50, 60]),
        (Keep(last=1), [60]),
        (Keep(last=99), [10, 20, 30, 40, 50, 60]),
        (Keep(last=1, every=20), [20, 40, 60]),
        (Keep(last=1, every=7), [60]),
        (Keep(last=2, every=30), [30, 50, 60]),
        (Keep(last=1, best=BEST), [40, 60]),  # of 20 and 40, as good, the later one
        (Keep(last=1, best=KeepBest("loss", num=2)), [20, 40, 60]),
        (Keep(last=1, best=KeepBest("loss", num=3)), [20, 30, 40, 60]),
        (Keep(last=1, best=KeepBest("loss", mode="max")), [10, 60]),
        (Keep(last=1, best=KeepBest("loss", num=99)), [10, 20, 30, 40, 60]),  # no number is never best
        (Keep(last=1, best=KeepBest("accuracy")), [60]),
        (Keep(last=1, every=10**6, best=KeepBest("accuracy")), [60]),
        (Keep(last=2, every=30, best=BEST), [30, 40, 50, 60]),
    ],
)
def test_what_any_rule_names_stays_and_nothing_else(keep, kept):
    assert keep.kept(metrics(LOSSES)) == kept


def test_steps_without_the_metric_are_not_among_the_best_and_nothing_is_kept_of_nothing():
    assert Keep(last=1, best=BEST).kept({1: {"loss": 5.0}, 2: {}, 3: {"other": 0.0}}) == [1, 3]
    assert Keep(last=1, every=1, best=BEST).kept({}) == []


values = st.floats(allow_nan=True, width=16) | st.none()
keeps = st.builds(
    Keep,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 9),
    best=st.none() | st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
)


@given(keep=keeps, found=st.dictionaries(st.integers(0, 99), values, max_size=20))
def test_the_newest_stays_and_what_stays_is_named_by_a_rule(keep, found):
    given_metrics = {step: {} if value is None else {"loss": value} for step, value in found.items()}
    kept, steps = keep.kept(given_metrics), sorted(found)
    assert kept == sorted(set(kept)) and set(kept) <= set(steps)
    newest = steps if keep.last is None else steps[-keep.last :]
    assert set(newest) <= set(kept)
    if steps:
        assert steps[-1] in kept
    for step in set(steps) - set(newest):
        is_due = bool(keep.every) and step % keep.every == 0
        assert (step in kept) == (is_due or is_best(keep.best, step, found))
    assert keep.kept({step: given_metrics[step] for step in kept}) == kept, "what was kept once stays"


def is_best(best, step, found) -> bool:
    """Tell whether fewer than `best.num` steps are better: by the metric, or as good and later."""
    value = found[step]
    if best is None or value is None or value != value:
        return False
    sign = 1 if best.mode == "min" else -1
    mine = (sign * value, -step)
    others = [(sign * x, -s) for s, x in found.items() if s != step and x is not None and x == x]
    return sum(other < mine for other in others) < best.num


@given(keep=keeps, found=st.lists(st.floats(width=16), min_size=1, max_size=25))
def test_a_run_that_prunes_after_every_save_never_loses_a_best_step_that_a_run_without_pruning_would_keep(keep, found):
    there: dict[int, Any] = {}
    for step, value in enumerate(found, start=1):
        there[step] = {"loss": value}
        there = {kept: there[kept] for kept in keep.kept(there)}
    whole = keep.kept({step: {"loss": value} for step, value in enumerate(found, start=1)})
    assert list(there) == whole


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Keep(last=0), "keep=0 must be at least 1, or None"),
        (lambda: Keep(every=0), "keep_every=0 must be at least 1, or None"),
        (lambda: parse_best("loss:least"), "keep_best 'loss:least' is not METRIC"),
        (lambda: parse_best("loss:min:0"), "keep_best 'loss:min:0' is not METRIC"),
        (lambda: parse_best(""), "keep_best '' is not METRIC"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(("steps", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), (7, [])])
def test_steps_are_due_by_their_number(steps, due, tmp_path):
    with jfsdp.checkpoint.Checkpointer(tmp_path, every_steps=steps) as run:
        assert [step for step in range(1, 7) if run.is_due(step)] == due


def test_a_run_keeps_what_its_policies_name_and_a_best_step_outlives_newer_ones(tmp_path):
    """The same with files: a policy that nobody asks would keep the wrong steps."""
    from tests.checkpoint.test_damage import state_of

    run = jfsdp.checkpoint.Checkpointer(tmp_path / "run", keep=1, keep_every=4, keep_best="loss")
    for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0, 6.0], start=1):
        run.save(step, state_of(step), metrics={"loss": loss})
    run.wait()
    assert run.steps() == [2, 4, 6]
    assert int(run.restore(state_of(1), step=2)[0].step) == 2
    run.close()
