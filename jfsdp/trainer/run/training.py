"""A run of the training script: open the data, initialize or restore, train, write the results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.checkpoint.disk.processes import only_first
from jfsdp.checkpoint.snapshot import Snapshots, snapshot_dir
from jfsdp.compat import warn
from jfsdp.launch.environment import RESTART
from jfsdp.launch.hosts import check_alike, gather_json, run_devices, wait_for_all
from jfsdp.launch.watch import PATIENT, Watch
from jfsdp.layout.layout import num_parameters
from jfsdp.layout.lint import advise
from jfsdp.layout.report import describe_mesh
from jfsdp.train.state import TrainState
from jfsdp.train.update.ema import with_ema
from jfsdp.trainer.display import Display, accuracy, harmless
from jfsdp.trainer.run import directory as runs
from jfsdp.trainer.run import resume_rules
from jfsdp.trainer.run.build import Parts
from jfsdp.trainer.run.evaluate import Evaluation, make_evaluator
from jfsdp.trainer.run.goodput import Goodput
from jfsdp.trainer.run.loop import Loop
from jfsdp.trainer.run.metrics import JsonLines, Throughput, closing, finite, save_loss_curve
from jfsdp.trainer.run.reference import find_reference
from jfsdp.trainer.run.stop import StopSignal
from jfsdp.trainer.run.trackers import BackgroundTracker, MLflow, TensorBoard, Wandb
from jfsdp.trainer.run.weights import describe_model, initial_hf_config, load_weights, omits_base, open_checkpoints
from jfsdp.trainer.sources.source import Source, open_source
from jfsdp.trainer.sources.tokens import PairSource, TokenSource
from jfsdp.trainer.step import describe_attention, make_batch

_ALL_DATA = 24 * PATIENT  # limit for reading millions of records: half a day by default


class Run:
    """A run of the training script, one object per process. Only process 0 writes files other than checkpoints.

    Args:
      stored: the `config.json` of the run to resume, or empty.
      begin: `time.perf_counter()` at the start of the program, for the summary.
      watch: the watchdog.
      check_program: returns lines to print about the compiled step, which JAX's cache has when it is called.

    Attributes:
      loop: the training loop; None until it is ready to start.
    """

    def __init__(
        self,
        parts: Parts,
        run_dir: runs.RunDir,
        stored: Mapping[str, Any],
        begin: float,
        watch: Watch,
        check_program: Callable[[Any, Any], Sequence[str]] = lambda step, batch: (),
    ):
        self.config, self.parts, self.run_dir, self.begin, self.watch = parts.config, parts, run_dir, begin, watch
        self.hf_config = initial_hf_config(self.config, stored)
        self.begun = gather_json(stored.get("begun", time.time()))[0]
        self.snapshots = Snapshots(snapshot_dir(run_dir), {"begun": self.begun})
        self.snapshot: int | None = None
        self.train_s = 0.0 if "begun" in stored else None
        self.is_writer = jax.process_index() == 0
        self.display = Display(self.is_writer)
        self.say, watch.show = self.display.say, self.display.wait
        self.check_program = check_program
        self.loop: Loop | None = None
        self.changes: list[dict[str, Any]] = []
        self.source: Source

    def run(self) -> None:
        """Train and write the results.

        Raises:
          ValueError: for data, checkpoints or directories that cannot be used, before any file is overwritten.
          OSError: if the disk is full or not writable.
        """
        try:
            with runs.lock_run_dir(self.run_dir) if self.is_writer else contextlib.nullcontext():
                self._run()
        finally:
            self.watch.show = lambda what, seconds: None
            self.display.show("")
            with contextlib.suppress(OSError):
                self.run_dir.rmdir()  # only if nothing was written

    def _run(self) -> None:
        with self.watch.at("the start: run directory", PATIENT):
            self.first = self._check_directory()
        with self.watch.at("reading the data", _ALL_DATA):
            self.source = open_source(self.config, self.parts.job, self.parts.row_items)
            decides = self.parts.decides | self.source.decides()
            check_alike({name: str(value) for name, value in decides.items()} | {"step to resume from": self.first})
            if self.config.resume is not None:
                runs.check_same(self.run_dir, decides)
        self._print_facts()
        if self.first >= self.config.steps:
            self.say(f"step {self.first} of {self.config.steps} is done; raise --steps to continue")
        else:
            self._train(decides)

    def _check_directory(self) -> int:
        """Check the run directory before any work, and return the number of completed steps."""
        if self.is_writer and self.config.resume is not None and (self.run_dir / "checkpoints").exists():
            with open_checkpoints(self.config, self.run_dir) as checkpoints:
                checkpoints.remove_unfinished()  # frees space if the disk was full
        wait_for_all("removed unfinished saves")
        runs.check_writable(self.run_dir)
        if self.config.resume is None:
            runs.check_new(self.run_dir)
        resume = self.config.resume
        # Decided once: processes may see different steps in an object store.
        first = 0 if resume is None else only_first(lambda: runs.resume_step(self.run_dir, resume))
        wait_for_all("checked")  # process 0 writes into the directory afterwards, and others would see a run there
        self.like = self.parts.step.abstract_state()
        if self.config.snapshot_every:
            try:
                self.snapshots.check_room(self.like)
            except ValueError as error:
                if not first:
                    raise
                warn(f"{error}; the run continues, because an error would also prevent later restarts")
        newest = self.snapshots.newest(self.like) if self.config.resume == "auto" else None
        if newest is not None and newest >= first:
            first = self.snapshot = newest
        return first

    def _print_facts(self) -> None:
        layout, source, config, parts = self.parts.model.layout, self.source, self.config, self.parts
        sizes = f" with the sizes of {config.init_from}" if config.init_from and self.hf_config else ""
        count = num_parameters(layout.leaves)
        num_trained = num_parameters([leaf for leaf in layout.leaves if leaf.trainable])
        trained = "" if num_trained == count else f", {num_trained:,} trained"
        accumulated = f" in {config.accumulate} microbatches" if config.accumulate > 1 else ""
        crossed = {"cross_documents": config.cross_documents}
        facts = {
            "run": str(self.run_dir),
            "data": source.describe(self.hf_config),
            "model": f"{parts.job.name}{sizes}: {count:,} parameters{trained}",
            "sharding": f"{describe_mesh(layout)}, {parts.step.mesh.size} x {jax.devices()[0].device_kind}",
            "batch": f"{source.describe_batch(parts.global_batch)} per step{accumulated}",
            "attention": describe_attention(parts.job, parts.model, parts.row_items, **crossed),
        }
        self.display.facts({name: text for name, text in facts.items() if text})
        for warning in advise(layout):
            self.say(f"note: {warning}")
        if config.steps > (decay_steps := parts.decides["decay_steps"]) and config.lr_schedule != "constant":
            self.say(f"note: the learning rate stays at its floor after step {decay_steps}; see --decay-steps")

    def _train(self, decides: dict[str, Any]) -> None:
        parts, config = self.parts, self.config
        iterator = self.source.train_batches(**self._share(1))
        with self.watch.at("tracing the step, and the first weights or restoring", PATIENT):
            rows, crossed = parts.global_batch, config.cross_documents
            # Raises most errors before weights are read and files are written. The first step reuses this trace.
            parts.step.trace(self.like, make_batch(parts.job, rows, parts.row_items, cross_documents=crossed))
            is_resumed = bool(self.first)
            state = self._start_state(iterator, decides)
        if isinstance(self.source, PairSource):
            begun, given = None if is_resumed else state, {"watch": self.watch, "say": self.say}
            given["share"] = self._share(config.accumulate)
            self.source.reference = find_reference(self.source, parts, begun, self.run_dir, **given)
        described = {"config": dataclasses.asdict(config), "decides": decides, "changes": self.changes}
        hf_config = describe_model(parts.job, parts.row_items, self.hf_config)
        described |= {"begun": self.begun, "devices": run_devices()} | (
            {} if hf_config is None else {"pretrained": hf_config}
        )
        described = json.loads(json.dumps(described, default=str))
        if self.is_writer:
            runs.write_json(self.run_dir / "config.json", described)
            runs.publish(self.run_dir)
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopSignal())
            checkpoints = open_checkpoints(config, self.run_dir)
            stack.push(closing(iterator.close))
            with self.watch.at("trackers, and removing old snapshots", PATIENT):
                loop = self.loop = self._make_loop(stack, iterator, checkpoints, stop, described)
                self.snapshots.keep(self.snapshot)
            try:
                state, steps = loop.run(state, self.first)
            except Exception:
                finishing = self.watch.at("finishing a save, after an error", PATIENT, checkpoints.num_bytes)
                with contextlib.suppress(Exception), finishing:
                    checkpoints.close(alone=True)  # finish a save in progress
                raise
            finishing = self.watch.at("finishing the last save", PATIENT, checkpoints.num_bytes)
            with finishing, loop.goodput.spent_on("save"):
                checkpoints.close()
            self.snapshots.clear()
            with self.watch.at("the sample and the summary", PATIENT):
                self._finish(loop, state, steps)

    def _share(self, accumulate: int) -> dict[str, int]:
        """Return this process's part of each batch, as the data iterators take it."""
        num_rows = self.parts.global_batch // accumulate
        rows = self.parts.step.own_rows(num_rows)
        share = {"process_index": rows.start // len(rows), "process_count": num_rows // len(rows)}
        return {"batch_size": len(rows), **share}

    def _start_state(self, iterator: Any, decides: dict[str, Any]) -> TrainState:
        """Return the initial state, or restore it with the position in the data, and then rewind the directory."""
        found = self._restore_snapshot()
        if not self.first:
            if self.config.resume is not None:
                self.say("no checkpoint to resume from yet: starting with step 1")
                self._rewind()
            state = self._first_state()
            self.first = int(state.step)  # more than 0 with --init-optimizer
            if self.first >= self.config.steps:
                raise ValueError(f"--init-optimizer: {self.config.init_from} has {self.first} steps; raise --steps")
            if self.first:
                self.say(f"continuing after its step {self.first}, with new data")
            return state
        if found is None:  # a checkpoint without the base is restored onto a state that has it
            found = self._restore(self._first_state() if omits_base(self.config) else self.like)
        state, extras = found
        self.train_s = extras[0].get("train_s", 0.0)
        if self.config.restart_data:
            self.say("the data restart from the beginning: examples are repeated")
        else:
            iterator.set_state(*(extra["data"] for extra in extras))
        self._rewind()
        self.say(f"resumed after step {self.first}")
        self._report_changes(decides)
        return state

    def _first_state(self) -> TrainState:
        if self.config.init_from is None:
            return self.parts.model.init(self.parts.tx, self.config.seed)
        self.say(f"starting from the weights of {self.config.init_from}")
        return load_weights(self.config, self.parts.job, self.parts.model, self.parts.tx)

    def _restore_snapshot(self) -> tuple[TrainState, list[Any]] | None:
        """Restore like `_restore`, from the snapshot. Return None if there is none, or if it is damaged."""
        if self.snapshot is None:
            return None
        try:
            found = self.snapshots.restore(self.like, self.snapshot)
        except DamagedError as error:
            self.snapshot, self.first = None, gather_json(runs.resume_step(self.run_dir, "auto"))[0]
            self.say(f"note: {error}; continuing from the checkpoint of step {self.first}")
            return None
        self.say(f"restored from the snapshot of step {self.snapshot} in {self.snapshots.directory}")
        return found

    def _restore(self, like: TrainState) -> tuple[TrainState, list[Any]]:
        """Restore the checkpoint to continue from. Return its state, and the extra data of each process."""
        with open_checkpoints(self.config, self.run_dir) as checkpoints, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = checkpoints.restore(like=like, step=self.first, fall_back=self.config.fall_back)
            self.first = int(state.step)
            extras = checkpoints.extras(self.first)
        for warning in caught:
            self.say(f"note: {warning.message}")
        return state, extras

    def _report_changes(self, decides: dict[str, Any]) -> None:
        """Print and record the settings that differ from those of the restored checkpoint."""
        stored = runs.read_config(self.run_dir / "checkpoints" / str(self.first)) or runs.read_config(self.run_dir)
        self.changes = stored.get("changes", [])
        if memory := resume_rules.memory_since_0_2(stored, dict(self.parts.model.layout.mesh_sizes)):
            self.say(memory)
        if changed := resume_rules.changed(stored, decides, self.config):
            self.changes = [*self.changes, {"after_step": self.first, **changed}]
            self.say(f"note: {resume_rules.describe(changed)}: the run continues, but no longer bit for bit")

    def _rewind(self) -> None:
        wait_for_all("restored")
        if self.is_writer:
            aside = runs.rewind(self.run_dir, self.first)
            if aside is not None:
                self.say(f"later checkpoints, and a copy of metrics.jsonl, are moved to {aside}")
        wait_for_all("rewound")

    def _make_loop(
        self, stack: contextlib.ExitStack, iterator: Any, checkpoints: Any, stop: StopSignal, described: dict[str, Any]
    ) -> Loop:
        parts, job, mesh = self.parts, self.parts.job, self.parts.step.mesh
        device = mesh.devices.flat[0]
        writers: list[Any] = []
        if self.is_writer:
            writers.append(JsonLines(self.run_dir / "metrics.jsonl"))
            writers.append(TensorBoard(self.run_dir / "tensorboard", self.first + 1))
            settings = described | {"run_dir": os.fspath(self.run_dir)}
            for option, kind in (("wandb", Wandb), ("mlflow", MLflow)):
                if (name := getattr(self.config, option)) is not None:
                    begin = functools.partial(kind, name, settings)
                    writers.append(BackgroundTracker(f"--{option} {name}", begin, self.say))
            if parts.tracker is not None:
                tracker = parts.tracker(settings)
                if not all(callable(getattr(tracker, name, None)) for name in ("write", "close")):
                    returned = f"--tracker {self.config.tracker} returned a {type(tracker).__name__}"
                    raise ValueError(f"{returned}; return an object with write(record) and close()")
                writers.append(tracker)
        for writer in writers:
            stack.push(closing(writer.close))
        items = parts.global_batch * self.source.num_rows * parts.row_items
        sizes = (items, mesh.devices.size, job.flops_per_token, device.device_kind, self.source.item, parts.row_items)
        return Loop(
            config=self.config,
            step=parts.step,
            batches=map(self.source.prepare, iterator),
            throughput=Throughput(*sizes),
            learning_rate=parts.schedule,
            evaluate=self._make_evaluator(),
            checkpoints=checkpoints,
            snapshots=self.snapshots,
            get_extra=lambda: {"data": iterator.get_state()},
            stop=stop,
            display=self.display,
            writers=writers,
            run_dir=self.run_dir,
            watch=self.watch,
            goodput=Goodput(self.run_dir / "goodput.json", self.begin, self.train_s, is_writer=self.is_writer),
            check_program=self.check_program,
            described=described,
        )

    def _make_evaluator(self) -> Callable[[TrainState], Evaluation] | None:
        if not self.source.has_eval:
            return None

        def batches() -> Iterator[Any]:
            with contextlib.closing(self.source.eval_batches(**self._share(self.config.accumulate))) as iterator:
                while True:
                    with self.watch.at("a batch of the evaluation"):
                        batch = next(iterator, None)
                        if batch is None:
                            return
                        yield self.source.prepare(batch)  # the stage stays the same while the batch is computed

        job = self.parts.job
        num_batches = self.config.eval_batches * self.config.accumulate
        evaluate = make_evaluator(self.parts.model, job.eval_loss or job.loss, batches, num_batches)
        return lambda state: evaluate(self._evaluated(state))

    def _evaluated(self, state: TrainState) -> TrainState:
        """Return the state for evaluation and samples: with `--ema`, the averages."""
        return state if self.config.ema is None else with_ema(state)

    def _finish(self, loop: Loop, state: TrainState, steps: int) -> None:
        loop.goodput.to("start")
        paces, is_done = loop.pace.of_all(), steps == self.config.steps
        source = self.source if is_done and self.config.sample_tokens else None
        if isinstance(source, TokenSource) and not loop.stop.is_agreed(may_gather=True):
            self._sample(source, state)
        if not self.is_writer:
            return
        records = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        job = self.parts.job
        title = (job.name if callable(job.data) else f"{job.name} on {self.config.data}").replace("$", r"\$")
        save_loss_curve(self.run_dir / "loss.png", records, self.source.loss_unit, title)
        evaluated = next((one for one in reversed(records) if one.get("eval_loss") is not None), {})
        summary = {
            "steps": steps,
            "is_done": is_done,
            "stopped_by": None if is_done else loop.stop.name,
            "loss": (loop.last_record or {}).get("loss"),
            **{name: evaluated.get(name) for name in ("eval_loss", "eval_correct")},
            "eval_step": evaluated.get("step"),
            "first_step_s": loop.first_step_s,
            **({} if loop.program is None else dataclasses.asdict(loop.program)),
            "restarts": int(os.environ.get(RESTART, 0)),
            "goodput": loop.goodput.fraction,
            "seconds": loop.goodput.seconds,
            "processes": paces,
            "total_s": time.perf_counter() - self.begin,
        }
        runs.write_json(self.run_dir / "summary.json", finite(summary))
        loop.goodput.write(in_order=True)
        self._print_summary(summary)

    def _print_summary(self, summary: dict[str, Any]) -> None:
        say, loss = self.say, summary["eval_loss"]
        if not summary["is_done"]:
            say(f"stopped by {summary['stopped_by']} after step {summary['steps']}, which is saved; --resume continues")
        if loss is not None:
            after = "" if summary["is_done"] else f" after step {summary['eval_step']}"
            say(f"held-out loss{after}: {loss:.4f} {self.source.loss_unit}".rstrip() + accuracy(summary))
        say(f"{summary['total_s']:.0f} s in all; results in {self.run_dir}")

    def _sample(self, source: TokenSource, state: TrainState) -> None:
        try:
            texts = source.sample(self.parts.job, self.parts.model, self._evaluated(state))
        except ValueError as error:
            self.say(f"no sample: {error}")
            return
        if self.is_writer:
            (self.run_dir / "sample.txt").write_text("\n\n--------\n\n".join(texts), encoding="utf-8")
        self.say(f"sample (more in sample.txt):\n{harmless(texts[0])}")
