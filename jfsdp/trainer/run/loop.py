"""The training loop: step, log, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jfsdp.checkpoint.manager import Checkpointer
from jfsdp.checkpoint.snapshot import Snapshots
from jfsdp.launch.hosts import check_alike
from jfsdp.launch.watch import PATIENT, Watch
from jfsdp.train.state import TrainState
from jfsdp.train.step.loss import numbers
from jfsdp.train.step.step import Metrics, TrainStep
from jfsdp.trainer.display import Display, accuracy, describe, time_left
from jfsdp.trainer.options import as_options
from jfsdp.trainer.run.compiled import StepProgram, kept_program
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.directory import RunDir, publish
from jfsdp.trainer.run.evaluate import Evaluation
from jfsdp.trainer.run.goodput import Goodput, Pace
from jfsdp.trainer.run.metrics import Record, Throughput, closing, memory_bytes
from jfsdp.trainer.run.stop import StopSignal
from jfsdp.trainer.step import seen_keys


@dataclasses.dataclass
class Loop:
    """The training loop of a run.

    Attributes:
      config: the run's configuration, with the intervals of logs, evaluations and saves. Steps count from 1. The last
        step is logged, evaluated and saved.
      step: the training step.
      batches: this process's share of each batch, endless.
      throughput: counter of steps and time.
      learning_rate: learning rate by number of previous updates.
      evaluate: `f(state) -> Evaluation`; None: no evaluation.
      checkpoints: checkpoints on disk.
      snapshots: snapshots in host memory.
      get_extra: returns data to save with the state; called just after the batch of the saved step was used.
      described: the run's configuration, saved with the state.
      stop: stop signal, checked after every step.
      display: terminal output.
      writers: receivers of the records.
      run_dir: directory of traces.
      watch: watchdog, which knows the current stage and its time limit.
      goodput: clock of the time by kind.
    """

    config: TrainConfig
    step: TrainStep
    batches: Iterator[Any]
    throughput: Throughput
    learning_rate: Callable[[int], Any]
    evaluate: Callable[[TrainState], Evaluation] | None
    checkpoints: Checkpointer
    snapshots: Snapshots
    get_extra: Callable[[], dict[str, Any]]
    stop: StopSignal
    display: Display
    writers: Sequence[Any]
    run_dir: RunDir
    watch: Watch
    goodput: Goodput
    check_program: Callable[[TrainStep, Any], Sequence[str]] = lambda step, batch: ()
    described: Any = None
    first_step_s: float | None = None
    program: StepProgram | None = None
    last_record: Record | None = None
    last_saved: int | None = None
    pace: Pace = dataclasses.field(default_factory=Pace)

    def run(self, state: TrainState, first: int) -> tuple[TrainState, int]:
        """Train from step `first + 1` to the last step or a stop signal, and save the state at the end.

        Cost: the host waits for the devices at logged steps, and to stay at most two steps ahead. On CPUs it stays one
        step ahead, because collectives of two steps would compete for the same threads.

        Returns:
          The last state, and the number of the last step.
        """
        in_flight: list[Any] = []
        max_in_flight = 1 if jax.default_backend() == "cpu" else 2
        metrics: Metrics = {}
        step = self.last_saved = first
        self.goodput.write()
        is_last = first >= self.config.steps
        with contextlib.ExitStack() as stack:
            stack.push(closing(self._stop_trace))
            while not is_last:
                step += 1
                self._start_trace(step, first, metrics)
                begin = time.perf_counter()
                with self.watch.at(f"the data of step {step}"):
                    batch = self._next_batch(state, metrics)
                data_s = time.perf_counter() - begin
                if all(loss.is_ready() for loss in in_flight):  # the devices were idle
                    self.goodput.move(data_s, "data")
                is_first = step == first + 1
                name, patience = (f"compiling, and step {step}", PATIENT) if is_first else (f"step {step}", 1)
                with self.watch.at(name, patience):
                    self.goodput.to("compile" if is_first else "train")
                    with jax.profiler.StepTraceAnnotation("train", step_num=step):
                        state, metrics = self._take_step(state, batch, is_first)
                    self.goodput.to("train")
                    host_s = time.perf_counter() - begin
                    in_flight.append(metrics["loss"])
                    while len(in_flight) >= max_in_flight:
                        loss = in_flight.pop(0).block_until_ready()
                        self._show(step, loss, len(in_flight))
                    if not is_first:
                        self.pace.add(data_s, host_s)
                    if self.config.profile and step >= self.config.profile[1]:
                        self._stop_trace(metrics)
                    may_gather = _is_due(self.config.log_every or 1, step)
                    is_last = self.stop.is_agreed(may_gather=may_gather) or step == self.config.steps
                    is_save = is_last or self.checkpoints.is_due(step)
                self._after_step(state, metrics, step, is_last, is_save)
        return state, step

    def _take_step(self, state: TrainState, batch: Any, is_first: bool) -> tuple[TrainState, Metrics]:
        if not is_first:
            self.throughput.count_step(seen_keys(batch))
            return self.step(state, batch)
        begin = time.perf_counter()
        batch = self.step.shard_batch(batch)
        spec = self.step.resolve(batch)
        self.display.facts({"program": f"{spec.program} ({as_options(spec.reason)})"})
        if jax.process_count() > 1:
            check_alike({"the program of a step": self.step.fingerprint(state, batch)})
        self.step.prepare(state, batch)  # compares the loss, by programs that are not kept
        with kept_program(None if self.config.cache_dir else self.run_dir / "compiled") as self.program:
            state, metrics = self.step(state, batch)
        metrics["loss"].block_until_ready()
        self.first_step_s = time.perf_counter() - begin
        for problem in self.check_program(self.step, batch):
            self.display.say(problem)
        got = f"its program was {self.program.compiled} in {self.program.compile_s:.1f} s"
        self.display.say(f"first step: {self.first_step_s:.1f} s; {got}")
        self.throughput.restart()
        return state, metrics

    def _next_batch(self, state: TrainState, before: Metrics) -> Any:
        """Return the next batch. If the data cannot be read, save the state before raising.

        With several processes, do not save: this process would wait for the others, which wait for it in their next
        step.
        """
        try:
            return next(self.batches)
        except (ValueError, OSError):
            step = int(state.step)
            if jax.process_count() == 1 and self.last_saved != step and before:
                self._check_finite(before, step)
                self._save(state, step)
                self.display.say(f"the next batch cannot be read; step {step} is saved")
            raise

    def _after_step(self, state: TrainState, metrics: Metrics, step: int, is_last: bool, is_save: bool) -> None:
        config = self.config
        interrupted = is_last and step < config.steps
        is_eval = not interrupted and (is_last or _is_due(config.eval_every, step))
        if is_last or is_eval or _is_due(config.log_every, step):
            metrics["loss"].block_until_ready()
            with self.watch.at(f"logging step {step}"), self.goodput.spent_on("evaluate"):
                self._log(state, metrics, step, is_eval)
            self._check_finite(metrics, step)
        is_snapshot = _is_due(config.snapshot_every, step) and not is_last
        if not (is_save or is_snapshot):
            return
        metrics["loss"].block_until_ready()
        with self.throughput.paused(), self.goodput.spent_on("save"):
            self._check_finite(metrics, step)
            if is_save:
                self._save(state, step)
            if is_snapshot:
                with self.watch.at(f"the snapshot of step {step}", PATIENT):
                    self.snapshots.take(step, state, self._extra())
            self.goodput.write()

    def _save(self, state: TrainState, step: int) -> None:
        """Save a checkpoint, with the metrics logged at this step, which decide the best checkpoints."""
        record = self.last_record if self.last_record and self.last_record["step"] == step else {}
        metrics = {name: value for name, value in record.items() if isinstance(value, float) and math.isfinite(value)}
        with self.watch.at(f"saving step {step}", PATIENT, self.checkpoints.num_bytes):
            publish(self.run_dir)
            self.checkpoints.save(step, state, self._extra(), config=self.described, metrics=metrics)
        self.last_saved = step

    def _extra(self) -> dict[str, Any]:
        """Return the data to save with a state: `get_extra` and the training time so far."""
        self.goodput.to("save")
        return self.get_extra() | {"train_s": self.goodput.seconds["train"]}

    def _check_finite(self, metrics: Metrics, step: int) -> None:
        """Raise if the run has diverged, before bad states replace good checkpoints."""
        if self.config.skip_nonfinite or self.step.loss_scale is not None:
            return  # such a step leaves the state unchanged
        values = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
        if not all(map(math.isfinite, values.values())):
            raise ValueError(
                f"step {step}: the run has diverged (loss {values['loss']}, gradient norm {values['grad_norm']}); its "
                "state is not saved, and earlier checkpoints are kept. Repeat the command with --resume and a lower "
                "--learning-rate, or with --resume --skip-nonfinite"
            )

    def _log(self, state: TrainState, metrics: Metrics, step: int, is_eval: bool) -> None:
        values = numbers(jax.device_get(metrics))
        rates = self.throughput.take()
        with self.throughput.paused():
            evaluation = self.evaluate(state) if is_eval and self.evaluate else None
            num_skipped = int(values.pop("num_skipped"))
            values.pop("weight", None)
            record = {
                "step": step,
                "loss": values.pop("loss"),
                "grad_norm": values.pop("grad_norm"),
                "learning_rate": float(self.learning_rate(step - 1 - num_skipped)),
                **rates,
                **self.pace.take(),
                "goodput": self.goodput.fraction,
                "memory_bytes": memory_bytes(),
                "num_skipped": num_skipped,
                f"{self.throughput.item}s_seen": step * self.throughput.items_per_step,
                **describe_evaluation(evaluation, self.throughput.item),
                **values,
            }
            if self.last_record is None and self.program is not None:
                record["compile_s"] = self.program.compile_s
            self.last_record = record
            for writer in self.writers:
                writer.write(record)
            head = f"step {step:>{len(str(self.config.steps))}}/{self.config.steps}  "
            self.display.say(f"{head}{describe(record)}")
            if record["eval_loss"] is not None:
                self.display.say(f"{head}held-out loss {record['eval_loss']:.4f}{accuracy(record)}")
        self.goodput.write()

    def _show(self, step: int, loss: Any, num_running: int) -> None:
        """Show the newest finished step and its loss on the live line of a terminal."""
        steps, step_s, step = self.config.steps, self.throughput.mean_step_s(num_running), step - num_running
        if self.display.is_live and step_s is not None:
            rate = f"{self.throughput.items_per_step / step_s:,.0f} {self.throughput.item}s/s"
            remaining = f"{time_left((steps - step) * step_s)} left"
            self.display.show(f"step {step}/{steps}  {step / steps:.0%}  loss {float(loss):.4f}  {rate}  {remaining}")

    def _start_trace(self, step: int, first: int, before: Metrics) -> None:
        if self.config.profile and step == max(self.config.profile[0], first + 1) <= self.config.profile[1]:
            jax.block_until_ready(before)  # so that the trace has whole steps
            jax.profiler.start_trace(str(self.run_dir / "profile"))
            self._is_tracing = True

    def _stop_trace(self, metrics: Metrics | None = None) -> None:
        if not self._is_tracing:
            return
        if metrics is not None:
            metrics["loss"].block_until_ready()
        jax.profiler.stop_trace()
        self._is_tracing = False
        self.display.say(f"trace: {self.run_dir / 'profile'} (open it in XProf or Perfetto)")

    _is_tracing: bool = dataclasses.field(default=False, init=False)


def _is_due(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def describe_evaluation(evaluation: Evaluation | None, item: str) -> Record:
    """Return the fields of metrics.jsonl for an evaluation, or for None."""
    if evaluation is None:
        return {"eval_loss": None, f"eval_{item}s": None}
    found = {"eval_loss": evaluation.loss, f"eval_{item}s": evaluation.weight}
    return {f"eval_{name}": value for name, value in evaluation.aux.items()} | found
