"""Print what `prove` says of each fault: `python -m tests.proof.run_faults [words of a name]`."""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_cpu_parallel_codegen_split_count=1"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import pytest

import jfsdp
from tests.proof.faults import FAULTS


def main(words: str) -> None:
    found = right = total = 0
    for fault in [fault for fault in FAULTS if words in fault.name]:
        begin = time.perf_counter()
        with pytest.MonkeyPatch.context() as patch:
            fault.seed(patch)
            try:
                (one,) = jfsdp.prove(**fault.given).cases
                status, cause = one.status, one.cause and one.cause.name
                text = one.cause.text if one.cause else f"gradients within {one.worst:.1e}"
            except Exception as error:
                status, cause, text = "RAISED", type(error).__name__, str(error)
        is_right = cause in fault.causes if fault.causes else status == "equal"
        total, found, right = total + 1, found + (status in ("differs", "refused")), right + is_right
        seconds = time.perf_counter() - begin
        print(f"{'ok ' if is_right else 'BAD'} {fault.name} | {status} | {cause} | {fault.causes} | {seconds:.1f} s")
        print(f"      {text[:400]}", flush=True)
    print(f"{total} programs, {found} found, {right} right")


main(" ".join(sys.argv[1:]))
