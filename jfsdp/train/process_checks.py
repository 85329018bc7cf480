"""What only a comparison between the processes of a run can show of their arrays: rows that do not fit, or repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jfsdp.compat import warn
from jfsdp.launch.hosts import gather_json
from jfsdp.layout.precision import is_key


def is_global(x: Any) -> bool:
    """Tell whether an array is spread over several processes; of any other, each process has its own."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def compare_batches(batch: Any, shares: Mapping[int, int]) -> None:
    """Refuse batches that do not fit each other, and warn of rows that several processes give.

    Cost: reads the process's own rows once and exchanges a line per leaf. Every process of the run must call it.

    Args:
      shares: which share of the rows each process gives.

    Raises:
      ValueError: in every process: for leaves of both kinds (see `TrainStep.shard_batch`), for a leaf, dtype or shape
        that another process does not have, and for processes that are to give the same rows and do not.
    """
    told = gather_json(_describe("batch", batch))
    kinds = [{name: kind for name, (kind, _) in found.items()} for found in told]
    remedy = "every process gives the same leaves: all its own rows, equally many, or all global arrays"
    _check_equal(kinds, remedy)
    whose = {kind.split()[0] for kind in kinds[0].values()} - {"scalar"}
    if len(whose) > 1:
        raise ValueError(f"the batch mixes a process's own rows with global arrays: {kinds[0]}; {remedy}")
    first = {share: process for process, share in sorted(shares.items(), reverse=True)}
    for process, share in shares.items() if whose == {"own"} else ():
        if told[process] != told[first[share]]:
            raise ValueError(
                f"processes {first[share]} and {process} gave different rows, and their devices hold the same part of "
                "the batch: they differ along axes 'tensor' and 'pipe' alone; read the same rows in both, those of "
                "step.own_rows(num_rows)"
            )
    same = max(([i for i in sorted(first.values()) if told[i] == found] for found in told), key=len)
    if len(same) > 1 and whose == {"own"}:
        warn(
            f"processes {', '.join(map(str, same))} gave the same batch, {kinds[0]}, and each of its rows counts "
            f"{len(same)} times: an array that is not spread over processes holds the process's own rows. Give each "
            "process other rows, B/num_processes of them, or make one global array: jax.make_array_from_callback"
        )


def compare_inputs(inputs: Any) -> None:
    """Refuse inputs of an evaluation that differ between processes, since JAX takes them to be equal.

    Global arrays are the same by their making. Cost: as `compare_batches`.

    Raises:
      ValueError: in every process.
    """
    remedy = "an evaluation takes what is not spread over processes to be equal in all; step.shard_batch(batch) spreads"
    _check_equal(gather_json(_describe("inputs", inputs)), f"{remedy} rows of each process's own")


def _check_equal(told: Sequence[Mapping[str, Any]], remedy: str) -> None:
    for process, found in enumerate(told):
        for name in sorted(found.keys() | told[0].keys()):
            there, here = told[0].get(name, "nothing"), found.get(name, "nothing")
            if there != here:
                raise ValueError(f"{name}: process 0 gives {there}, and process {process} {here}; {remedy}")


def _describe(name: str, tree: Any) -> dict[str, list[str]]:
    """Return, by name, whose an array is with its dtype and shape, and a digest of what is this process's own."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{name}{jax.tree_util.keystr(path)}": [_kind(x), _digest(x)] for path, x in leaves}


def _kind(x: Any) -> str:
    if not np.ndim(x):
        return f"scalar {x}"
    return f"{'global' if is_global(x) else 'own'} {getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"


def _digest(x: Any) -> str:
    if is_global(x):
        return ""
    data = jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x) else x
    return hashlib.blake2b(np.asarray(data).tobytes(), digest_size=8).hexdigest()
