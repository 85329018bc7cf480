"""Compare the step time of jfsdp, plain JAX and PyTorch: `python scripts/bench.py --model llama-tiny --settings manual
torch-fsdp2`.

Contenders (--settings) have the same initial weights, batches, AdamW, clipping and precision:
- plain: the same model, loss and optimizer under jax.jit on one device, without jfsdp and without remat
- xla, manual, flat (manual with flat storage): jfsdp
- torch-fsdp2, torch-fsdp2-compile: the model of transformers, set up according to PyTorch's documentation

JAX runs in one process, PyTorch in one process per device. Each turn is a new process with a first step, warmup steps,
and `--steps` timed steps. Ratios compare with the first contender of the same round.

Memory: `resident` is the peak of resident memory (VmHWM), including libraries, summed over a contender's processes;
`allocated` and `reserved` are the allocator's peaks on the device with the highest; `compiled` is XLA's memory analysis
of the step per device.

Exit status: 0; 1 if a contender fails or its losses differ from the first contender's; 2 for invalid options.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jfsdp.extras import MissingExtra, need

try:
    need("cli")
except MissingExtra as error:
    sys.exit(f"bench.py: error: {error}")

from benchmark.options import BenchOptions, check, find_devices, find_platform
from benchmark.race import ContenderFailed, Setup, run

from jfsdp.launch.runtime import plain_warnings, start_jax
from jfsdp.trainer.help_groups import read_command
from jfsdp.trainer.options import describe_error


def main(argv: Sequence[str]) -> int:
    """Time the contenders and print a table. Return the exit status."""
    try:
        options = read_command(BenchOptions, argv, prog="bench.py", description=__doc__)
        check(options)
        with plain_warnings():
            return race(options)
    except (MissingExtra, ValueError) as error:
        print(f"bench.py: error: {describe_error(error, BenchOptions)}", file=sys.stderr)
        return 2
    except ContenderFailed as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 1


def race(options: BenchOptions) -> int:
    """Run the contenders in turn and print their results. Return 1 if losses differ."""
    platform, platforms = find_platform(), os.environ.get("JAX_PLATFORMS")
    num_devices = find_devices(options, platform)
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process leaves the devices to the contenders
    start_jax()
    from benchmark.case import check_case, count_rows, find_job, write_batches, write_for_torch
    from benchmark.report import collect, describe, show

    job, rows = find_job(options), count_rows(options, num_devices)
    check_case(options, job, num_devices)
    with tempfile.TemporaryDirectory(prefix="jfsdp-bench-") as directory:
        scratch = Path(directory)
        case = write_for_torch(options, job, scratch / "weights") if options.torch_settings else {}
        setup = Setup(options, scratch, platform, num_devices, rows, case, platforms)
        write_batches(options, job, rows, scratch / "batches.npz")
        turns = run(setup, lambda text: print(text, file=sys.stderr, flush=True))
    seq_len = 1 if job.item == "row" else options.seq_len or job.seq_len
    settings = collect(turns, rows * seq_len)
    if options.json:
        given = dataclasses.asdict(options)
        print(json.dumps({"options": given, "devices": num_devices, "kind": platform, "settings": settings}, indent=2))
    else:
        what = f"{options.model or options.factory} on {num_devices} x {platform}, {rows} rows of {seq_len}"
        turned = f"{options.rounds} rounds of {options.steps} steps in fresh processes"
        show(settings, f"{what}, {options.param_dtype or 'none'}, remat {options.remat}: {turned}")
    differing = {name: result["loss_difference"] for name, result in settings.items()}
    differing = {name: one for name, one in differing.items() if not one["relative"] <= options.tolerance}
    for name, one in differing.items():
        text = f"{describe(name, one)}, over --loss-tolerance {options.tolerance:g}"
        print(f"bench.py: error: {text}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the contenders are ended
    sys.exit(main(sys.argv[1:]))
