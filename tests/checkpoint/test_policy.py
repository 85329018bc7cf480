"""When a run saves and what it keeps, decided without an array."""

import functools
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

import jfsdp
from jfsdp.checkpoint.policy import Keep, KeepBest, parse_best
from tests.refusals import refuses

values = st.floats(allow_nan=True, width=16) | st.none()
keeps = st.builds(
    Keep,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 9),
    best=st.none() | st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
)


@given(keep=keeps, found=st.dictionaries(st.integers(0, 99), values, max_size=20))
@example(keep=Keep(1, best=KeepBest("loss")), found={1: 0.5, 2: 0.5, 3: 1.0})
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


def test_a_policy_that_cannot_be_is_refused():
    refuses(lambda: Keep(last=0), "keep=0")
    refuses(lambda: Keep(every=0), "keep_every=0")
    for text in ("loss:least", "loss:min:0", ""):
        refuses(functools.partial(parse_best, text), repr(text) if text else "METRIC")


def test_steps_are_due_by_their_number(tmp_path):
    for steps, due in {0: [], 1: [1, 2, 3, 4, 5, 6], 2: [2, 4, 6], 4: [4], 7: []}.items():
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
