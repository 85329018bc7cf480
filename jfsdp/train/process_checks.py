"""Checks that compare the arrays of all processes: batches that do not match, and repeated rows."""

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
    """Return whether an array is sharded over several processes. Other arrays are local to a process."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def compare_batches(batch: Any, shares: Mapping[int, int]) -> None:
    """Check that the batches of all processes match, and warn about rows that several processes pass.

    Cost: reads the process's own rows once and exchanges a line per leaf. Every process of the run must call it.

    Args:
      shares: for each process, the index of its share of the rows.

    Raises:
      ValueError: in every process: for local rows next to global arrays (see `TrainStep.shard_batch`), for leaves,
        dtypes or shapes that differ between processes, and for different rows in processes with the same share.
    """
    described = gather_json(_describe("batch", batch))
    kinds = [{name: kind for name, (kind, _) in leaves.items()} for leaves in described]
    remedy = "pass the same leaves in every process: all its own rows, equally many, or all global arrays"
    _check_equal(kinds, remedy)
    owners = {kind.split()[0] for kind in kinds[0].values()} - {"scalar"}
    if len(owners) > 1:
        raise ValueError(f"the batch mixes a process's own rows with global arrays: {kinds[0]}; {remedy}")
    first = {share: process for process, share in sorted(shares.items(), reverse=True)}
    for process, share in shares.items() if owners == {"own"} else ():
        if described[process] != described[first[share]]:
            raise ValueError(
                f"processes {first[share]} and {process} gave different rows, but their devices need the same part of "
                "the batch, because they differ only along axes 'context', 'tensor', 'pipe'; read the same rows, with "
                "all tokens, in both: step.own_rows(num_rows)"
            )
    same = max(([i for i in sorted(first.values()) if described[i] == leaves] for leaves in described), key=len)
    if len(same) > 1 and owners == {"own"}:
        warn(
            f"processes {', '.join(map(str, same))} gave the same batch, {kinds[0]}, so each of its rows counts "
            f"{len(same)} times: an array that is not global has only the process's own rows. Pass other rows in each "
            "process, B/num_processes of them, or make one global array: jax.make_array_from_callback"
        )


def compare_inputs(inputs: Any) -> None:
    """Check that the inputs of an evaluation are equal in all processes, as JAX assumes.

    Global arrays are not compared. Cost: as `compare_batches`.

    Raises:
      ValueError: in every process.
    """
    remedy = "inputs that are not global arrays must be equal in all processes; step.shard_batch(batch) makes a global"
    _check_equal(gather_json(_describe("inputs", inputs)), f"{remedy} batch from each process's own rows")


def _check_equal(described: Sequence[Mapping[str, Any]], remedy: str) -> None:
    for process, leaves in enumerate(described):
        for name in sorted(leaves.keys() | described[0].keys()):
            expected, found = described[0].get(name, "nothing"), leaves.get(name, "nothing")
            if expected != found:
                raise ValueError(f"{name}: process 0 gives {expected}, and process {process} {found}; {remedy}")


def _describe(name: str, tree: Any) -> dict[str, list[str]]:
    """Return for each array its kind (own rows, global or scalar), dtype and shape, and a digest if it is local."""
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
