"""Schedules of pipelines, read from their tables: what a stage needs is there, bubbles are those of the formula, and
what waits in a place is still there when it is read. Nothing here uses the code's own check of dependencies.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfsdp.engine.pipeline.schedule import IDLE, NAMES, Schedule, get_schedule, lay_out
from tests.refusals import refuses

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def sizes(draw, most_stages=16, most_microbatches=64):
    """Draw stages P, microbatches M and repeats v that a named schedule can have."""
    stages, repeats = draw(st.integers(2, most_stages)), draw(st.integers(1, 4))
    if repeats == 1:
        return stages, draw(st.integers(1, most_microbatches)), repeats
    return stages, stages * draw(st.integers(1, max(most_microbatches // stages, 1))), repeats


@st.composite
def own_tables(draw):
    """Draw any schedule that computes nothing too early, with idle ticks anywhere."""
    stages, repeats = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return make_own(stages, microbatches, repeats, rng), stages, microbatches, repeats


def make_own(stages, microbatches, repeats, rng, idle=0.3):
    """Let every stage take, in every tick, any task that it can; or none."""
    num, places = repeats * microbatches * stages, repeats * stages
    forward, backward = [], []
    done, back = {}, {}  # by (place, microbatch), the tick
    while len(back) < num:
        tick = len(forward)
        rows = [[IDLE] * stages, [IDLE] * stages]
        for stage in range(stages):
            own = [(place, m) for place in range(stage, places, stages) for m in range(microbatches)]
            can = [(p, m) for p, m in own if (p, m) not in done and (p == 0 or done.get((p - 1, m), tick) < tick)]
            if can and rng.random() > idle:
                place, m = can[rng.integers(len(can))]
                done[place, m], rows[0][stage] = tick, place // stages * microbatches + m
            can = [
                (p, m)
                for p, m in own
                if (p, m) in done and (p, m) not in back and (p == places - 1 or back.get((p + 1, m), tick) < tick)
            ]
            if can and rng.random() > idle:
                place, m = can[rng.integers(len(can))]
                back[place, m], rows[1][stage] = tick, place // stages * microbatches + m
        forward.append(rows[0])
        backward.append(rows[1])
    return Schedule(forward, backward)


def ticks_of(table, stages, microbatches):
    """Return by (place among all parts of all stages, microbatch) the tick, and check that nothing comes twice."""
    found = {}
    for tick, row in enumerate(table):
        assert len(row) == stages
        for stage, task in enumerate(row):
            if task != IDLE:
                key = task // microbatches * stages + stage, task % microbatches
                assert key not in found, f"{key} twice"
                found[key] = tick
    return found


def check_dependencies(schedule, stages, microbatches, repeats):
    forward, backward = (ticks_of(x, stages, microbatches) for x in (schedule.forward, schedule.backward))
    places = stages * repeats
    assert forward.keys() == backward.keys() == {(p, m) for p in range(places) for m in range(microbatches)}
    for (place, m), tick in forward.items():
        assert place == 0 or forward[place - 1, m] < tick
        assert backward[place, m] >= tick
        assert place == places - 1 or backward[place + 1, m] < backward[place, m]


def simulate(schedule, stages, microbatches, repeats):
    """Run the ticks with names in the place of arrays: whoever reads finds what was written for it."""
    ticks = lay_out(schedule, microbatches, repeats)
    tables, last = ticks.tables(), stages * repeats - 1
    buffers = {
        name: [["nothing"] * getattr(ticks, name).num for _ in range(stages)]
        for name in ("saved", "inputs", "cotangents", "hidden")
    }
    losses, left, entered = [], [], [ticks.first_to_enter()]

    def key(task, stage):
        return (int(task) // microbatches * stages + stage, int(task) % microbatches) if task != IDLE else None

    def take(name, tick, stage):
        return buffers[name][stage][tables[f"{name}_read"][tick, stage]]

    def put(name, tick, values):
        for stage, value in enumerate(values):
            buffers[name][stage][tables[f"{name}_write"][tick, stage]] = value

    def neighbours(values, far):
        goes = [stage - far for stage in range(stages)]
        return [values[a % stages] if repeats > 1 or 0 <= a < stages else "zeros" for a in goes]

    def one(tick, kind):
        if kind.has_forward:
            made = []
            for stage in range(stages):
                task, came = key(ticks.forward[tick, stage], stage), take("inputs", tick, stage)
                if task and task[0]:
                    assert came == ("x", task[0] - 1, task[1])
                elif task:
                    assert entered[-1] == ticks.entering[tick] == task[1]
                made.append(("x", *task) if task else "garbage")
            put("inputs", tick, neighbours(made, 1))
            put("hidden", tick, made)
            put("saved", tick, made)
            entered.append(int(tables["next"][tick]))
        else:
            assert all(task == IDLE for task in ticks.forward[tick])
        assert kind.has_loss == (ticks.leaving[tick] != IDLE)
        if kind.has_loss:
            assert take("hidden", tick, stages - 1) == ("x", last, ticks.leaving[tick])
            losses.append(int(ticks.leaving[tick]))
        if kind.has_backward:
            made = []
            for stage in range(stages):
                task, came = key(ticks.backward[tick, stage], stage), take("cotangents", tick, stage)
                made.append(("g", *task) if task else "garbage")
                if task is None:
                    continue
                assert take("saved", tick, stage) == ("x", *task)
                if task[0] == last:
                    assert ticks.leaving[tick] == task[1]
                else:
                    assert came == ("g", task[0] + 1, task[1])
                if task[0] == 0:
                    assert ticks.left[tick] == task[1]
                    left.append(task[1])
            put("cotangents", tick, neighbours(made, -1))
        else:
            assert all(task == IDLE for task in ticks.backward[tick])

    order = []
    for times, segments in ticks.rounds():
        length = sum(segment.length for segment in segments)
        for turn in range(times):
            for segment in segments:
                for tick in range(segment.length):
                    order.append(segment.first + turn * length + tick)
                    one(order[-1], segment)
    assert order == list(range(len(schedule.forward)))
    assert sorted(losses) == sorted(left) == list(range(microbatches))
    return ticks


@EXAMPLES
@given(sizes(), st.sampled_from(NAMES))
def test_a_schedule_breaks_no_dependency_and_has_the_bubble_of_the_formula(drawn, name):
    stages, microbatches, repeats = drawn
    schedule = get_schedule(name, *drawn)
    check_dependencies(schedule, *drawn)
    passes, ideal = schedule.passes(repeats, turns=False), repeats * microbatches
    assert passes.forward == passes.backward == ideal + stages - 1
    bubble = 1 - ideal / passes.forward
    assert bubble == pytest.approx((stages - 1) / (ideal + stages - 1), abs=1e-12)
    assert sum(m != IDLE for m in lay_out(schedule, microbatches, repeats).leaving) == microbatches


@EXAMPLES
@given(st.integers(2, 16), st.integers(1, 64))
def test_1f1b_saves_at_most_2p_minus_1_microbatches_and_gpipe_all(stages, microbatches):
    saved = {name: lay_out(get_schedule(name, stages, microbatches), microbatches).saved.num for name in NAMES}
    # One place more is for what stages without work make.
    assert saved["1f1b"] <= min(2 * stages - 1, microbatches) + 1
    assert microbatches <= saved["gpipe"] <= microbatches + 1
    if microbatches >= 2 * stages - 1:
        more = lay_out(get_schedule("1f1b", stages, microbatches + 7), microbatches + 7)
        assert more.saved.num == saved["1f1b"] == 2 * stages - 1
        assert more.inputs.num <= 2
        assert more.cotangents.num <= 2
        assert more.hidden.num <= 2


@EXAMPLES
@given(sizes(most_stages=6, most_microbatches=12), st.sampled_from(NAMES))
def test_what_a_stage_reads_was_written_for_its_task(drawn, name):
    simulate(get_schedule(name, *drawn), *drawn)


@EXAMPLES
@given(own_tables())
def test_any_schedule_of_ones_own_is_taken_and_finds_its_places(drawn):
    schedule, *drawn = drawn
    check_dependencies(schedule, *drawn)
    assert get_schedule(schedule, *drawn) is schedule
    simulate(schedule, *drawn)


@EXAMPLES
@given(own_tables(), st.data())
def test_a_task_before_what_it_needs_is_refused_by_stage_task_and_tick(drawn, data):
    """Exchange two ticks of one stage: what is refused is what breaks a dependency, no more and no less."""
    schedule, stages, microbatches, repeats = drawn
    tables = {"forward": [*map(list, schedule.forward)], "backward": [*map(list, schedule.backward)]}
    name, stage = data.draw(st.sampled_from([*tables])), data.draw(st.integers(0, stages - 1))
    one, other = (data.draw(st.integers(0, len(schedule.forward) - 1)) for _ in range(2))
    table = tables[name]
    table[one][stage], table[other][stage] = table[other][stage], table[one][stage]
    changed = Schedule(**tables)
    try:
        check_dependencies(changed, stages, microbatches, repeats)
    except AssertionError:
        with pytest.raises(ValueError, match=r"stage \d+ .*part \d+ .*microbatch \d+ .*tick \d+"):
            get_schedule(changed, stages, microbatches, repeats)
    else:
        assert get_schedule(changed, stages, microbatches, repeats) is changed


FORWARD, BACKWARD = [[0, -1], [1, 0], [-1, 1], [-1, -1]], [[-1, -1], [-1, 0], [0, 1], [1, -1]]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda f, b: Schedule([[*row, -1] for row in f], b), ("forward of tick 0", "3 stages", "2")),
        (lambda f, b: Schedule(f, [row[:1] for row in b]), ("backward of tick 0", "1 stages", "2")),
        (lambda f, b: Schedule([[0, -1], [-1, 0], *f[2:]], b), ("stage 0", "[0] forward", "0..1")),
        (lambda f, b: Schedule(f, [*b[:-1], [0, -1]]), ("stage 0", "[0, 0] backward")),
        (lambda f, b: Schedule([[0, -1], [2, 0], *f[2:]], b), ("stage 0", "[0, 2] forward")),
        (lambda f, b: Schedule([[0, -1], [-3, 0], *f[2:]], b), ("stage 0", "[-3, 0] forward")),
        (lambda f, b: Schedule(f[:-1], b), ("3 ticks", "4")),
        (lambda f, b: Schedule([], []), ("stage 0", "[] forward")),
        (
            lambda f, b: Schedule([[0, 0], [1, 1], *f[3:], f[3]], b),
            ("stage 1", "microbatch 0", "tick 0", "stage before"),
        ),
        (
            lambda f, b: Schedule(f, [b[0], [0, 0], [-1, 1], [1, -1]]),
            ("stage 0", "microbatch 0", "tick 1", "stage after"),
        ),
        (lambda f, b: Schedule(f, [[-1, 0], [0, 1], [1, -1], [-1, -1]]), ("stage 1", "tick 0", "its own forward")),
    ],
)
def test_a_wrong_table_is_refused_by_name(change, facts):
    assert get_schedule(Schedule(FORWARD, BACKWARD), 2, 2)
    refuses(lambda: get_schedule(change(FORWARD, BACKWARD), 2, 2), *facts)


def test_what_is_no_schedule_is_refused_by_name():
    refuses(lambda: get_schedule("zb", 2, 2), "pipe_schedule='zb'", "1f1b")
    refuses(lambda: get_schedule("1f1b", 4, 6, 2), "accumulate=6", "take 8", "pipe_repeats")
    with pytest.raises((TypeError, ValueError), match="forward"):
        Schedule([[0.5, 0]], [[0, 0]])  # pyright: ignore[reportArgumentType]
