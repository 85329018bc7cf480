"""Time one training step of jfsdp beside plain JAX and PyTorch: `python scripts/bench.py --model llama-tiny --settings
manual torch-fsdp2`.

Contenders (--settings), all with the same first weights, batches, AdamW, clipping and precision:
- plain: the same model, loss and optimizer under jax.jit, without jfsdp and without remat
- xla, manual, flat (manual with flat storage), auto, watched (auto under the watch of `--timeout`): jfsdp
- torch, torch-fsdp2, torch-ddp, torch-fsdp2-compile: the model of transformers, as PyTorch's own pages advise

`plain` and `torch` run on one device, with all rows of the batch. JAX runs in one process, PyTorch in one per device.
Each turn is a fresh process, which takes a first step, some to warm up, and `--steps` timed ones; with --together all
stay alive and take single steps in random order, which is best against noise. Ratios are to the first named, in pairs
by round, with 95 % bootstrap intervals. Inside `jfsdp launch --nproc 2 scripts/bench.py --settings auto watched` the
contenders of jfsdp take their steps in the launched processes.

Memory: `resident` is the peak of resident memory (VmHWM), summed over a contender's processes, with their libraries;
`allocated` and `reserved` are the peaks of the allocator on the device that had the most; `compiled` is what XLA says
that the step takes on a device.

Exit status: 0; 1 if a contender fails or its losses are not those of the first; 2 for options that cannot be.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfsdp.extras import MissingExtra, need

try:
    need("cli")
except MissingExtra as error:
    sys.exit(f"bench.py: error: {error}")

import tyro
from benchmark.options import BenchOptions, check, find_devices, find_platform, find_threads
from benchmark.processes import ContenderFailed

from jfsdp.launch.environment import find_place
from jfsdp.launch.runtime import plain_warnings, start_jax
from jfsdp.trainer.options import describe_error

if TYPE_CHECKING:
    from benchmark.race import Setup, Turn


def main(argv: Sequence[str]) -> int:
    """Time the contenders and print tables; return the exit status."""
    options = tyro.cli(BenchOptions, args=list(argv), prog="bench.py", description=__doc__)
    try:
        check(options)
        with plain_warnings():
            return _launched(options) if find_place(os.environ) is not None else _alone(options)
    except (MissingExtra, ValueError) as error:
        print(f"bench.py: error: {describe_error(error, BenchOptions)}", file=sys.stderr)
        return 2
    except ContenderFailed as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 1


def _launched(options: BenchOptions) -> int:
    from jfsdp.launch.processes import initialize

    place = initialize()
    import jax
    from benchmark.launched import run_launched

    options = dataclasses.replace(options, together=True)
    turns = run_launched(options, place)
    if jax.process_index() != 0:
        return 0
    return _finish(options, turns, jax.device_count(), jax.devices()[0].device_kind, "", {})


def _alone(options: BenchOptions) -> int:
    platform, platforms = find_platform(), os.environ.get("JAX_PLATFORMS")
    num_devices = find_devices(options, platform)
    threads = find_threads(options) if platform == "cpu" else 0
    os.environ["JAX_PLATFORMS"] = "cpu"  # of this process: the devices are the contenders'
    start_jax()
    from benchmark.case import check_case, count_rows, find_job, write_batches, write_for_torch
    from benchmark.race import Setup, run

    job = find_job(options)
    check_case(options, job, num_devices)
    more: dict[str, Any] = {}
    if options.plan is not None:
        _tell("planning")
        from benchmark.planned import plan

        more["plan"] = plan(options, num_devices)
    with tempfile.TemporaryDirectory(prefix="jfsdp-bench-") as directory:
        scratch = Path(directory)
        case = write_for_torch(options, job, scratch / "weights") if options.torch_settings else {}
        rows = count_rows(options, num_devices)
        setup = Setup(options, scratch, platform, num_devices, rows, threads, case, platforms)
        write_batches(options, job, rows, setup.batches)
        turns = run(setup, _tell)
        if options.profile:
            more["profile"] = {name: own[-1].profile for name, own in turns.items()}
    return _finish(options, turns, num_devices, platform, _threads(setup), more)


def _threads(setup: Setup) -> str:
    """Say which cores and threads each contender uses; "" on GPUs."""
    if not setup.threads:
        return ""
    each = [f"{name} {setup.num_processes(name)} x {setup.threads_each(name)}" for name in setup.options.settings]
    return f"{setup.threads} cores for each contender; processes x threads: {', '.join(each)}"


def _finish(
    options: BenchOptions,
    turns: Mapping[str, Sequence[Turn]],
    num_devices: int,
    kind: str,
    threads: str,
    more: Mapping[str, Any],
) -> int:
    """Print and draw the results; return 1 where losses differ."""
    from benchmark.case import count_rows, find_job
    from benchmark.report import collect, show, too_far

    job = find_job(options)
    seq_len = 1 if job.item == "row" else options.seq_len or job.seq_len
    rows = count_rows(options, num_devices)
    dtype = options.param_dtype or "none"
    title = f"{options.model or options.factory} on {num_devices} x {kind}, {rows} rows of {seq_len}, {dtype}"
    turned = "single steps in turn" if options.together else f"fresh processes, {options.steps} steps each"
    head = [f"{title}, remat {options.remat}: {options.num_rounds} rounds, {turned}"]
    found = {
        "options": dataclasses.asdict(options),
        "devices": num_devices,
        "kind": kind,
        "threads": threads,
        "settings": collect(options, turns, rows * seq_len),
        **more,
    }
    if options.plot is not None:
        from benchmark.chart import draw

        draw(turns, Path(options.plot).expanduser(), title)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found, head + ([threads] if threads else []))
    far = too_far(options, turns)
    for one in far:
        print(f"bench.py: error: {one}, over --loss-tolerance {options.tolerance:g}", file=sys.stderr)
    return 1 if far else 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the contenders
    sys.exit(main(sys.argv[1:]))
