import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jfsdp.engine.spec import StepSpec
from jfsdp.launch.watch import Watch
from jfsdp.trainer.display import Display
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.evaluate import Evaluation
from jfsdp.trainer.run.goodput import Goodput
from jfsdp.trainer.run.loop import Loop
from jfsdp.trainer.run.metrics import Throughput
from jfsdp.trainer.run.stop import StopSignal
from tests.refusals import refuses


@dataclasses.dataclass(frozen=True)
class State:
    step: int


class Records:
    """Stands for every part of a loop that is told something, and notes it."""

    def __init__(self, checkpoint_every=0):
        self.lines, self.saved, self.evaluated, self.taken, self.metrics = [], [], [], [], []
        self.checkpoint_every = checkpoint_every

    def write(self, record):
        self.lines.append(record)

    def is_due(self, step):
        return bool(self.checkpoint_every) and step % self.checkpoint_every == 0

    def save(self, step, state, extra, *, config, metrics):
        self.saved.append((step, state, extra))
        self.metrics.append(metrics)
        return 0.5

    def num_bytes(self):
        return 0

    def take(self, step, state, extra):
        self.taken.append((step, state, extra))
        return 0.5


def run_loop(
    first=0,
    stop_after=None,
    loss_of=jnp.float32,
    skipped_by=lambda step: 0,
    batches=None,
    records=None,
    checkpoint_every=0,
    run_dir=None,
    **config,
):
    records, stop, position = records or Records(), StopSignal(), batches or itertools.count(first + 1)
    records.checkpoint_every = checkpoint_every

    class Step:
        loss_scale = None

        def shard_batch(self, batch):
            return batch

        def prepare(self, state, batch):
            return state, batch

        def resolve(self, batch):
            return StepSpec("xla", "no reason")

        def __call__(self, state, batch):
            if batch == stop_after:
                stop.name = "SIGTERM"
            names = ("loss", "grad_norm", "num_skipped", "weight", "correct")
            metrics = {name: loss_of(batch) for name in names}
            return State(state.step + 1), metrics | {"num_skipped": jnp.float32(skipped_by(batch))}

    def evaluate(state):
        records.evaluated.append(state)
        return Evaluation(0.5, 7.0, {"correct": 0.25})

    loop = Loop(
        config=TrainConfig(cache_dir="unused", **config),
        step=Step(),  # type: ignore[arg-type]
        batches=position,
        throughput=Throughput(10, 1, None, "cpu"),
        learning_rate=lambda count: count / 100,
        evaluate=evaluate,
        checkpoints=records,  # type: ignore[arg-type]
        get_extra=dict,
        stop=stop,
        display=Display(is_writer=True),
        writers=[records],
        run_dir=run_dir,  # type: ignore[arg-type]
        watch=Watch(0),
        snapshots=records,  # type: ignore[arg-type]
        goodput=Goodput(None, 0.0, is_writer=False),  # type: ignore[arg-type]
    )
    state, steps = loop.run(State(first), first)  # type: ignore[arg-type]
    return records, state, steps


def nan_from_5(step):
    return jnp.float32(step if step < 5 else jnp.nan)


def ending(error):
    yield from range(1, 6)
    raise error


@pytest.mark.parametrize(
    ("options", "facts", "saved", "lines"),
    [
        ({"steps": 9, "checkpoint_every": 2, "loss_of": nan_from_5}, ["step 6", "diverged", "nan"], [2, 4], []),
        ({"steps": 90, "log_every": 3, "loss_of": nan_from_5}, ["step 6", "diverged", "nan"], [], [3, 6]),
        ({"steps": 9, "checkpoint_every": 4, "batches": ValueError("line 7")}, ["line 7"], [4, 5], []),
        (
            {"steps": 9, "checkpoint_every": 4, "batches": ValueError("line 7"), "loss_of": nan_from_5},
            ["step 5", "diverged"],
            [4],
            [],
        ),
    ],
)
def test_a_diverged_state_is_not_saved_and_what_was_trained_is_when_data_end(options, facts, saved, lines):
    records, batches = Records(), options.get("batches")
    options = options | ({"batches": ending(batches)} if batches else {})
    refuses(lambda: run_loop(records=records, **options), *facts)
    assert ([step for step, *_ in records.saved], steps_of(records)) == (saved, lines)


def test_a_diverged_step_that_was_skipped_may_be_saved():
    records, *_ = run_loop(steps=4, checkpoint_every=2, skip_nonfinite=True, loss_of=lambda step: jnp.float32(jnp.nan))
    assert [step for step, *_ in records.saved] == [2, 4]


def test_a_process_whose_data_cannot_be_read_on_does_not_wait_for_others_to_save(monkeypatch):
    def batches():
        yield from range(1, 6)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        raise OSError("stale file handle")

    records = Records()
    refuses(lambda: run_loop(steps=9, checkpoint_every=4, batches=batches(), records=records), "stale", error=OSError)
    assert [step for step, *_ in records.saved] == [4]


def steps_of(records):
    return [line["step"] for line in records.lines]


def test_logged_are_multiples_evaluations_and_the_last_step_each_once():
    records, _, steps = run_loop(steps=11, log_every=4, eval_every=6, checkpoint_every=4)
    assert steps == 11
    assert steps_of(records) == [4, 6, 8, 11]
    assert [line["eval_loss"] for line in records.lines] == [None, 0.5, None, 0.5]
    assert [line["eval_tokens"] for line in records.lines] == [None, 7.0, None, 7.0]
    assert [line.get("eval_correct") for line in records.lines] == [None, 0.25, None, 0.25]
    assert [step for step, *_ in records.saved] == [4, 8, 11]
    assert [state.step for state in records.evaluated] == [6, 11]


def test_a_line_tells_of_its_own_step():
    records, _, _ = run_loop(steps=3, log_every=1)
    assert [line["loss"] for line in records.lines] == [1, 2, 3]
    assert [line["learning_rate"] for line in records.lines] == [0.0, 0.01, 0.02]
    assert [line["tokens_seen"] for line in records.lines] == [10, 20, 30]
    assert records.lines[0]["step_s"] is None, "the step that compiles has no rate"
    assert records.lines[1]["step_s"] is not None
    assert records.lines[0]["correct"] == 1, "what the loss returns as aux is kept"


def test_a_skipped_step_does_not_move_the_rate():
    records, *_ = run_loop(steps=3, log_every=1, skip_nonfinite=True, skipped_by=lambda step: step // 2)
    assert [line["learning_rate"] for line in records.lines] == [0.0, 0.0, 0.01]


def test_beside_a_save_are_the_metrics_of_its_own_step():
    records, *_ = run_loop(steps=5, log_every=2, checkpoint_every=1)
    assert [metrics.get("loss") for metrics in records.metrics] == [None, 2.0, None, 4.0, 5.0]


def test_an_error_of_the_profiler_does_not_replace_what_ended_the_run(monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    def batches():
        yield 1
        raise ValueError("the data end")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    with pytest.raises(ValueError, match="the data end"):
        run_loop(steps=5, profile=(1, 4), batches=batches(), run_dir=Path("run"))


def test_a_resumed_loop_counts_on():
    records, state, steps = run_loop(first=6, steps=9, log_every=1)
    assert steps_of(records) == [7, 8, 9] and (state.step, steps) == (9, 9)


def test_a_stop_saves_the_step_at_once_and_evaluates_nothing():
    records, _, steps = run_loop(steps=100, stop_after=3, log_every=50, eval_every=3)
    assert steps == 3 and steps_of(records) == [3]
    assert [step for step, *_ in records.saved] == [3]
    assert records.evaluated == []
