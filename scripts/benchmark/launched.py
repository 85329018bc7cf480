"""The contenders of jfsdp inside the processes of `jfsdp launch`, which take each step together."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import jax

from jfsdp.launch.environment import Place

from .case import check_case, count_rows, find_job, write_batches
from .jax_side import JaxContender
from .options import JFSDP, BenchOptions
from .race import Turn, orders


def run_launched(options: BenchOptions, place: Place | None) -> dict[str, list[Turn]]:
    """Let contenders take single steps in random order, all in these processes.

    Raises:
      ValueError: for contenders that are not jfsdp's, and what belongs to processes of their own.
    """
    for name in options.settings:
        if name not in JFSDP:
            raise ValueError(f"--settings {name}: processes of a launcher run {', '.join(JFSDP)} alone; leave it out")
    if options.profile or options.plan or options.devices:
        raise ValueError("--profile, --plan and --devices do not go with a launcher; start scripts/bench.py by itself")
    job, num_devices = find_job(options), jax.device_count()
    check_case(options, job, num_devices)
    turns, contenders = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "batches.npz"
        write_batches(options, job, count_rows(options, num_devices), path)
        for name in options.settings:
            start = time.perf_counter()
            contender = contenders[name] = JaxContender(name, options, str(path), num_devices, place=place)
            first = contender.first()
            turns[name] = [Turn([], first["losses"], time.perf_counter() - start, first["compile_s"])]
            turns[name][0].losses += contender.steps(options.warmup)["losses"]
    _take_turns(options, contenders, turns)
    for name, (turn,) in turns.items():
        found = contenders[name].memory(is_first=True)
        turn.memory = {"compiled": found["compiled"]}  # the other peaks are of all contenders together
    return turns


def _take_turns(options: BenchOptions, contenders: dict[str, JaxContender], turns: dict[str, list[Turn]]) -> None:
    for order in orders(options):
        for name in order:
            found, turn = contenders[name].steps(1), turns[name][0]
            turn.seconds += found["seconds"]
            turn.losses += found["losses"]
