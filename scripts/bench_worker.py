"""One process of a contender, started by `scripts/bench.py`: `python scripts/bench_worker.py SPEC RANK`.

It runs its steps and writes the measurements as JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any


def make(spec: dict[str, Any], rank: int) -> Any:
    """Return the contender of a spec, before its first step."""
    if spec["name"].startswith("torch"):
        from benchmark.torch_side import TorchContender

        return TorchContender(spec["name"], spec["case"], rank, spec["world"])
    from jfsdp.launch.runtime import start_jax

    start_jax()
    from benchmark.jax_side import JaxContender
    from benchmark.options import BenchOptions

    from jfsdp.trainer.parse import read_fields

    fields = read_fields(BenchOptions, spec["options"])
    is_cuda = spec["case"]["platform"] == "cuda"
    return JaxContender(spec["name"], BenchOptions(**fields), spec["case"]["batches"], spec["devices"], is_cuda=is_cuda)


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run all steps. Return seconds, losses and memory peaks."""
    contender = make(spec, rank)
    found = contender.steps(1 + spec["options"]["warmup"] + spec["options"]["steps"])
    resident = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    memory = {"resident": int(resident[1]) * 1024 if resident else 0}
    return found | {"memory": memory | contender.memory(is_first=spec["first"])}


def main(path: str, rank: int) -> None:
    """Measure, and write the measurements or the error of invalid options."""
    warnings.simplefilter("ignore")
    spec = json.loads(Path(path).read_text())
    try:
        answer = measure(spec, rank)
    except ValueError as error:
        answer = {"error": str(error)}
    Path(f"{spec['case']['answer']}.{rank}").write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for collectives in flight


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
