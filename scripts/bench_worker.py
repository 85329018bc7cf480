"""One process of a contender of `scripts/bench.py`, which starts it: `python scripts/bench_worker.py SPEC.json RANK`.

It answers each line of its input with a line of JSON on its output; what else is printed goes to the error output.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

from benchmark.usage import use_cores


def make(spec: dict[str, Any], rank: int) -> Any:
    """Make the contender that the file describes; its first step is still to come."""
    is_cuda = spec["case"]["platform"] == "cuda"
    if spec["library"] == "torch":
        from benchmark.torch_side import TorchContender, torch

        if not is_cuda:
            torch.set_num_threads(spec["threads_each"])
        return TorchContender(spec["name"], spec["case"], rank, spec["world"])
    from jfsdp.launch.runtime import start_jax

    start_jax()
    from benchmark.jax_side import JaxContender
    from benchmark.options import BenchOptions

    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in spec["options"].items()
    }
    return JaxContender(spec["name"], BenchOptions(**fields), spec["case"]["batches"], spec["devices"], is_cuda=is_cuda)


def main(path: str, rank: int) -> int:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    with open(path) as file:
        spec = json.load(file)
    if spec["threads"]:
        use_cores(spec["threads"])
    contender = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            contender = contender or make(spec, rank)
            answer = getattr(contender, asked.pop("do"))(**asked)
        except ValueError as error:  # what was asked for cannot be: said in a line
            answer = {"error": str(error)}
        print(json.dumps(answer), file=out)
    sys.stderr.flush()
    os._exit(0)  # collectives in flight, or a profiler, must not keep a process that is done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
