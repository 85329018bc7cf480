"""Prove and measure jfsdp on this machine's devices, in about eight minutes: `make gpu`.

Computes small steps on the real devices and compares them with one device, measures a larger step next to its plan, and
times it next to PyTorch FSDP2 if torch is installed. Writes `gpu-proof.json` and the page `gpu-proof.md`, to attach to
an issue. Needs no network. Without a GPU it runs on the CPU, and what only a GPU can show is marked "not shown".

Exit status: 0 if nothing failed; 1 if a check failed; 2 for bad arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jfsdp.extras import MissingExtra, installed_version, need

try:
    need("cli")
except MissingExtra as error:
    sys.exit(f"gpu_proof.py: error: {error}")

import jax
import numpy as np

from jfsdp import checkpoint
from jfsdp.cli.console import GIB
from jfsdp.cli.profile import ROWS
from jfsdp.float8 import check_devices
from jfsdp.launch.runtime import plain_warnings, start_jax
from jfsdp.layout.mesh import make_mesh, num_data_shards
from jfsdp.plan.cluster.gpus import gpu_of_device
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.cluster.target import has_nvidia_driver
from jfsdp.plan.jobs import find_planned_job, plan_job
from jfsdp.plan.time.profile import read_profile
from jfsdp.proof.jobs import cut_to_size, prove_job, random_batch
from jfsdp.trainer.help_groups import option, read_command
from jfsdp.trainer.option_errors import spell
from jfsdp.trainer.options import Count, Location, Real, StepOptions, describe_error
from jfsdp.trainer.parse import write
from jfsdp.trainer.step import make_step

SMALL, SIZES = "llama-tiny", (("num_layers", 2), ("dim", 64))
TRACED = 3  # steps
RACE_S = 150  # limit of each contender
SIMULATED = 4  # devices of the CPU, without a GPU
SHOWN = ("jfsdp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "torch")
SHOWN += ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
NEEDED_GIB = {"llama-8b": 300, "llama-3b": 120, "llama-1b": 45}  # of all devices together, for a step with AdamW


class NotShown(Exception):
    """A check that this machine cannot do."""


@dataclasses.dataclass(frozen=True)
class ProofOptions(StepOptions):
    """Options of the measured step, and of the report."""

    minutes: Real = option(8.0, "report", least=0.1)
    """Checks begin until this time is over."""
    directory: Location = option(".", "report")
    """Directory of gpu-proof.json and gpu-proof.md."""
    steps: Count = option(10, "report", least=3)
    """Timed steps."""


@dataclasses.dataclass
class Result:
    """One check: its status ("passed", "failed" or "not shown"), what was found, in one line and as data."""

    name: str
    status: str
    text: str
    data: dict[str, Any]
    seconds: float


class Checks:
    """The checks on one machine; each returns a line and data, and raises if something is wrong."""

    def __init__(self, options: ProofOptions, traces: Path):
        self.options, self.traces = options, traces

    @functools.cached_property
    def devices(self) -> list[Any]:
        """The devices of JAX, which starts when they are first used: before, it leaves all memory to the race."""
        start_jax()
        return jax.devices()

    @property
    def is_gpu(self) -> bool:
        return self.devices[0].platform == "gpu"

    def prove(self) -> tuple[str, dict[str, Any]]:
        """Every gradient on these devices equals one device, in both programs."""
        job, _ = cut_to_size(find_planned_job(self._small()))
        columns = {"strategy": ("full_shard", "zero1"), "program": None, "accumulate": (1,), "remat": ("none",)}
        batch = random_batch(job, 2 * len(self.devices), 32)
        proof = prove_job(self._small(param_dtype=None), job, columns, batch=batch)
        if not proof.is_ok:
            raise AssertionError(str(proof))
        return f"{len(proof.cases)} cases equal one device", proof.to_dict()

    def attention(self) -> tuple[str, dict[str, Any]]:
        """cuDNN's attention over packed documents gives the losses of plain attention."""
        if not self.is_gpu or float(self.devices[0].compute_capability) < 8:
            raise NotShown("cuDNN's attention needs a GPU from Ampere on")
        sizes = (("dim", 256), ("num_heads", 4), ("num_kv_heads", 2))
        plain, fused = (
            self._small(param_dtype="bfloat16", seq_len=256, model_config=(*sizes, ("attention", kind)))
            for kind in ("xla", "cudnn")
        )
        return self._compare(plain, fused, 1e-2)

    def offload(self) -> tuple[str, dict[str, Any]]:
        """Optimizer states in host memory give the same losses."""
        if not self.is_gpu:
            raise NotShown("the CPU has no other memory")
        return self._compare(self._small(), self._small(offload=("opt_state",)), 1e-5)

    def lora(self) -> tuple[str, dict[str, Any]]:
        """Adapters on all devices give the losses of one device."""
        adapted = self._small(lora=((("rank", 4), ("targets", ("**.q_proj.kernel", "**.v_proj.kernel"))),))
        return self._compare(adapted, adapted, 1e-4, devices=1)

    def float8(self) -> tuple[str, dict[str, Any]]:
        """Products in float8 give the losses of bfloat16, within their rounding."""
        half = self._small(param_dtype="bfloat16")
        try:
            check_devices(make_mesh())
        except ValueError as error:
            raise NotShown(str(error)) from error
        return self._compare(half, dataclasses.replace(half, matmul="float8"), 5e-2)

    def checkpoint(self) -> tuple[str, dict[str, Any]]:
        """A checkpoint restores every bit."""
        model, tx, step, batch = self._make(self._small())
        state, _ = step(model.init(tx), batch)
        with tempfile.TemporaryDirectory() as directory:
            begin = time.perf_counter()
            checkpoint.save(Path(directory) / "1", state)
            saved_s = time.perf_counter() - begin
            again = checkpoint.restore(Path(directory) / "1", model.abstract_state(tx))
        pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(again.params), strict=True)
        if not all(np.array_equal(one, other) for one, other in pairs):
            raise AssertionError("a restored parameter has other bits")
        size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
        return f"{size / 1e6:.0f} MB in {saved_s:.2f} s, all bits equal", {"bytes": size, "save_s": saved_s}

    def measure(self) -> tuple[str, dict[str, Any]]:
        """Memory and time of a step, and the plan's."""
        options = self._measured()
        model, tx, step, batch = self._make(options)
        batch, state, seconds = step.shard_batch(batch), model.init(tx), []
        for _ in range(self.options.steps + 1):
            begin = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - begin)
        peak = (self.devices[0].memory_stats() or {}).get("peak_bytes_in_use")
        with jax.profiler.trace(str(self.traces)):
            for number in range(TRACED):
                with jax.profiler.StepTraceAnnotation("train", step_num=number):
                    state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
        found: dict[str, Any] = {"model": options.model, "first_step_s": seconds[0], "peak_bytes": peak}
        found["step_s"] = float(np.median(seconds[1:]))
        text = f"{options.model} on {len(self.devices)} x {self.devices[0].device_kind}: {found['step_s']:.3f} s a step"
        try:
            gpu = gpu_of_device(self.devices[0].device_kind) if self.is_gpu else None
            if gpu is None:
                return f"{text}; no plan for these devices", found
            plan = plan_job(options, Cluster(gpu, 1, len(self.devices)))
        except Exception as error:  # the measurement is reported anyway
            return f"{text}; no plan: {type(error).__name__}: {error}", found
        found["planned"] = {"step_s": plan.step_s, "bytes": plan.memory.peak_bytes, "parts_s": plan.timeline.critical}
        found["planned"]["miscompiles"] = [one.message for one in plan.miscompiles]
        text += f", planned {plan.step_s:.3f}; {(peak or 0) / GIB:.2f} GiB at the peak of this process"
        return f"{text}, planned {plan.memory.peak_bytes / GIB:.2f}", found

    def profile(self) -> tuple[str, dict[str, Any]]:
        """Where the time of the measured steps went, and how much communication is hidden."""
        found = read_profile(self.traces)[0]
        waited, num = found.seconds["exposed_s"], len(self.devices)
        share = f"{found.hidden_s / total:.0%} of communication hidden" if (total := found.hidden_s + waited) else ""
        parts = ", ".join(f"{ROWS[name]} {1e3 * value:.1f} ms" for name, value in found.seconds.items() if value)
        if not self.is_gpu:
            share = "simulated devices share cores, so nothing is hidden"
        return f"{parts}; {share or f'no communication on {num} device'}", dataclasses.asdict(found)

    def race(self) -> tuple[str, dict[str, Any]]:
        """The time of a step, and of PyTorch FSDP2."""
        if not _gpu_memory():
            raise NotShown("a race on the CPU says nothing about GPUs")
        if installed_version("torch") is None or installed_version("transformers") is None:
            raise NotShown("torch and transformers are not installed")
        options, command = self._measured(), [sys.executable, str(Path(__file__).with_name("bench.py"))]
        fields = [field for field in dataclasses.fields(StepOptions) if field.name in RACED]
        changed = {x.name: value for x in fields if (value := getattr(options, x.name)) != x.default}
        command += [word for name, value in changed.items() for word in (spell(name), write(value))]
        command += ["--settings", "manual", "torch-fsdp2", "--rounds", "1", "--steps", "5", "--json"]
        command += ["--timeout", str(RACE_S)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise NotShown(reason) if "exceeded --timeout" in done.stderr else AssertionError(reason)
        found = json.loads(done.stdout)
        ours, theirs = (found["settings"][name]["step_s"] for name in ("manual", "torch-fsdp2"))
        return f"{ours:.3f} s a step, PyTorch FSDP2 {theirs:.3f} s: {theirs / ours:.2f} times as long", found

    def _small(self, **changes: Any) -> StepOptions:
        usual = {"model": SMALL, "model_config": SIZES, "param_dtype": "float32", "seq_len": 64, "remat": "none"}
        return StepOptions(**usual | changes)

    def _measured(self) -> StepOptions:
        """Return the options of the command, with the largest model that fits and rows that such GPUs train on."""
        options = StepOptions(**{x.name: getattr(self.options, x.name) for x in dataclasses.fields(StepOptions)})
        if options.model or options.factory:
            return options
        fits = [name for name, size in NEEDED_GIB.items() if sum(_gpu_memory()) >= size]
        return dataclasses.replace(options, model=(fits or [SMALL])[0], seq_len=4096 if fits else 128)

    def _make(self, options: StepOptions, num_devices: int = 0) -> tuple[Any, Any, Any, Any]:
        job, devices = find_planned_job(options), self.devices[: num_devices or None]
        mesh = make_mesh(devices=devices, **{"fsdp": 1, **dict(options.mesh)})  # type: ignore[arg-type]
        model, tx, step = make_step(options, job, mesh, lambda count: 1e-3, check_loss=False)
        rows = options.batch_per_device * (len(self.devices) if num_devices else num_data_shards(dict(mesh.shape)))
        return model, tx, step, random_batch(job, rows, options.seq_len or job.seq_len)

    def _compare(self, one: StepOptions, other: StepOptions, limit: float, devices: int = 0) -> tuple[str, Any]:
        """Compare the losses of three steps, the first options on all devices or on fewer."""
        losses = []
        for options, num_devices in ((one, devices), (other, 0)):
            model, tx, step, batch = self._make(options, num_devices)
            state, found = model.init(tx), []
            for _ in range(3):
                state, metrics = step(state, batch)
                found.append(float(metrics["loss"]))
            losses.append(np.array(found))
        error = float(np.max(np.abs(losses[1] / losses[0] - 1)))
        if not error <= limit:
            raise AssertionError(f"losses {losses[1].tolist()} differ from {losses[0].tolist()} by {error:.1e}")
        return f"losses within {error:.1e}, {limit:g} allowed", {"error": error, "losses": [x.tolist() for x in losses]}


# The race is first, since JAX keeps the memory of a GPU until its process ends.
CHECKS = ("race", "prove", "attention", "offload", "lora", "float8", "checkpoint", "measure", "profile")
RACED = ("model", "model_config", "seq_len", "batch_per_device", "mesh", "remat")


def run_checks(proof: Any, minutes: float, report: Callable[[Result], None]) -> list[Result]:
    """Run the checks until the time is over, and return their results."""
    results, start = list[Result](), time.perf_counter()
    for name in CHECKS:
        begin, text, data = time.perf_counter(), "", dict[str, Any]()
        try:
            if begin - start > 60 * minutes:
                raise NotShown(f"{minutes:g} minutes are over (--minutes)")
            text, data = getattr(proof, name)()
            status = "passed"
        except NotShown as error:
            status, text = "not shown", str(error)
        except Exception as error:  # the other checks run anyway
            status, text = "failed", f"{type(error).__name__}: {error}"
        results.append(Result(name, status, text, data, time.perf_counter() - begin))
        report(results[-1])
    return results


def write_report(directory: Path, results: Sequence[Result]) -> None:
    """Write gpu-proof.json and gpu-proof.md."""
    versions = {name: installed_version(name) for name in SHOWN if installed_version(name)}
    devices = jax.devices()
    about = {"devices": f"{len(devices)} x {devices[0].device_kind}", "python": sys.version.split()[0], **versions}
    about["driver"] = next(iter(_query("driver_version")), "")
    plain = {"about": about, "checks": [dataclasses.asdict(one) for one in results]}
    (directory / "gpu-proof.json").write_text(json.dumps(plain, indent=1, default=str) + "\n")
    rows = [f"| {one.name} | {one.status} | {_cell(one.text)} | {one.seconds:.0f} s |" for one in results]
    facts = [f"- {name}: {value}" for name, value in about.items() if value]
    table = ["| check | status | found | time |", "|---|---|---|---|", *rows]
    title = "# jfsdp on this machine's devices"
    (directory / "gpu-proof.md").write_text("\n".join([title, "", *facts, "", *table]) + "\n")


def _show(one: Result) -> None:
    print(f"{one.name:11} {one.status:9} {one.seconds:5.0f} s  {_cell(one.text)}", flush=True)


def _cell(text: str) -> str:
    return text.splitlines()[0].replace("|", "/") if text else ""


def _gpu_memory() -> list[float]:
    """Return the GiB of each GPU that JAX will see; [] without a driver."""
    sizes = [float(line) / 1024 for line in _query("memory.total") if line.strip().isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return sizes if visible is None else sizes[: len(visible.split(",")) if visible else 0]


def _query(what: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def main(argv: Sequence[str]) -> int:
    """Run the checks, print a line for each, and write the report. Return the exit status."""
    try:
        options = read_command(ProofOptions, argv, prog="gpu_proof.py", description=__doc__)
        directory = Path(options.directory or ".").expanduser()
        if not os.access(directory, os.W_OK):
            raise ValueError(f"--directory {directory}: cannot be written; make it")
        with plain_warnings(), tempfile.TemporaryDirectory(prefix="jfsdp-gpu-proof-") as traces:
            if not has_nvidia_driver() and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
                jax.config.update("jax_platforms", "cpu")
                jax.config.update("jax_num_cpu_devices", SIMULATED)
            if options.model or options.factory:
                find_planned_job(options)  # whose errors are those of the command
            results = run_checks(Checks(options, Path(traces)), options.minutes, _show)
    except (MissingExtra, ValueError) as error:
        print(f"gpu_proof.py: error: {describe_error(error, ProofOptions)}", file=sys.stderr)
        return 2
    write_report(directory, results)
    print(f"written: {directory / 'gpu-proof.md'} and gpu-proof.json")
    return int(any(one.status == "failed" for one in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
