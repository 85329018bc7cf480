"""Explanation of a GPU that ran out of memory: XLA's sizes, and the plan of the run's options on its GPUs."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax

from jfsdp.launch.hosts import run_devices
from jfsdp.launch.watch import say
from jfsdp.layout.report import show_bytes
from jfsdp.plan.cluster.gpus import gpu_of_device
from jfsdp.plan.search.space import recipe_of
from jfsdp.trainer.job import Job, load_job
from jfsdp.trainer.options import StepOptions, step_options
from jfsdp.trainer.recipes import write_recipe

_LIMITS_S = {"plan": 300.0, "bound": 60.0}
_LIMITS_OF_SEVERAL_S = {"plan": 18.0, "bound": 7.0}  # a launcher kills process 0 30 s after the first failure


class OutOfMemory(RuntimeError):
    """XLA's error for exhausted memory, which is the cause, with the options of the run."""

    def __init__(self, error: Exception, options: StepOptions, job: Job):
        super().__init__(str(error))
        self.options, self.job = StepOptions(**step_options(options)), job

    def _planned_options(self) -> StepOptions:
        options, job = self.options, self.job
        if dataclasses.is_dataclass(job.config):  # --init-from may have changed the sizes of the model
            sizes, usual = vars(job.config), vars(load_job(options.model, options.factory).config)
            changed = {name: value for name, value in sizes.items() if value != usual[name]}
            return dataclasses.replace(options, model_config=tuple(changed.items()))
        return options

    def explain(self) -> None:
        """Print XLA's sizes, and the memory of the step by part with options that need less.

        `jfsdp plan` runs in another process, which sees no GPU, so nothing is allocated on a device.
        """
        (kind, nodes, per_node), sizes = run_devices(), re.findall(r"(\d+) bytes|([\d.]+ ?[KMGT]i?B)", str(self))
        named = [show_bytes(int(number)) if number else text for number, text in sizes]
        stats = jax.local_devices()[0].memory_stats() or {}
        used = {"in use": "bytes_in_use", "at the peak": "peak_bytes_in_use", "JAX's limit": "bytes_limit"}
        named += [f"{what} {show_bytes(stats[key])}" for what, key in used.items() if key in stats]
        gpu = gpu_of_device(kind)
        note = "" if gpu else "; `jfsdp plan --gpu FILE.toml` plans for a GPU that it does not know"
        say(f"{kind} is out of memory: {', '.join(named) or 'XLA names no sizes'}{note}")
        if gpu is None:
            return
        where = ["--gpu", gpu.name, "--nodes", nodes, "--gpus-per-node", per_node]
        if limit := stats.get("bytes_limit"):
            where += ["--reserve", max(0, gpu.memory_bytes - limit) / 2**30]
        for what, limit_s in (_LIMITS_S if jax.process_count() == 1 else _LIMITS_OF_SEVERAL_S).items():
            printed, problem = _plan(self._planned_options(), [*where, *["--analytic"] * (what == "bound")], limit_s)
            if printed:
                note = "note: by this plan the step fits, so see docs/troubleshooting.md for other causes"
                note *= printed.startswith("FITS")
                say(f"the {what} of the step's memory, by `jfsdp plan`:\n\n{printed}\n{note}")
                return
            say(f"note: no {what} of the step's memory: {problem}")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of XLA means that the memory of a device is exhausted."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _plan(options: StepOptions, given: list[Any], limit_s: float) -> tuple[str, str]:
    """Return what `jfsdp plan` prints for the options, or "" and why it prints nothing."""
    with tempfile.TemporaryDirectory(prefix="jfsdp-memory-") as directory:
        recipe = os.path.join(directory, "run.json")
        write_recipe(recipe, recipe_of(options, {}), StepOptions)
        command = [sys.executable, "-m", "jfsdp", "plan", "--recipe", recipe, *map(str, given)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env, check=False)
        except subprocess.TimeoutExpired:
            return "", f"it takes more than {limit_s:g} s"
    return done.stdout, (done.stderr.strip().splitlines() or ["no error"])[-1]
