"""Log-likelihoods of all answers under the frozen reference of a run on pairs, computed once and stored with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.launch.hosts import gather_json
from jfsdp.launch.watch import PATIENT, Watch
from jfsdp.objects.path import as_path
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.trainer.job import Job
from jfsdp.trainer.preferences import score_answers
from jfsdp.trainer.run.build import Parts
from jfsdp.trainer.run.evaluate import shard_batch
from jfsdp.trainer.run.load_model import load_frozen, without_adapters
from jfsdp.trainer.sources.tokens import PairSource

FILE = "reference.npy"


def find_reference(
    source: PairSource,
    parts: Parts,
    state: TrainState | None,
    run_dir: Any,
    *,
    share: dict[str, int],
    watch: Watch,
    say: Callable[[str], None],
) -> np.ndarray:
    """Return the log-likelihoods of all answers, read from the run's file or computed by all processes.

    Layout:  -> [N 2] float32, by document number; NaN for documents that are not used
    Cost:    one forward of all pairs, once per run.
    Memory:  with --reference, and for a resumed run whose file is missing: the frozen weights in addition to the state,
             until it returns.

    Args:
      state: initial state of the run; None: the run is resumed.
      share: this process's part of a batch, as for the data iterators.
      say: prints a line.

    Raises:
      ValueError: for a file of other data, weights of another model, and answers whose log-likelihood is not finite.
    """
    found = read_reference(run_dir, source.num_documents) if state is None else None
    if all(gather_json(found is not None)):
        assert found is not None
        return found
    begin, config, model = time.perf_counter(), parts.config, parts.model
    with watch.at("the weights of the reference", PATIENT):
        if config.reference is not None:
            weights = as_path(config.reference)
            try:
                model, state, _ = load_frozen(without_adapters(config), parts.job, weights)
            except ValueError as error:
                raise ValueError(f"--reference {weights}: does not fit the trained model: {error}") from error
        elif state is None:
            model, state, _ = load_frozen(config, parts.job, as_path(config.init_from))
    found = _compute(source, parts.job, model, state, share, watch)
    if jax.process_index() == 0:
        write_reference(run_dir, found)
    count, seconds = np.isfinite(found[:, 0]).sum(), time.perf_counter() - begin
    name = config.reference or "the initial weights"
    say(f"reference: {name}, log-likelihoods of {count:,} pairs computed in {seconds:.0f} s")
    return found


def _compute(
    source: PairSource, job: Job, model: ShardedModel, state: TrainState, share: dict[str, int], watch: Watch
) -> np.ndarray:
    table = np.full((source.num_documents, 2), np.nan, np.float32)
    replicated = NamedSharding(model.mesh, PartitionSpec())  # type: ignore[arg-type]

    def score(module: Any, batch: Any) -> Any:
        scores, counts = score_answers(job, module, batch)
        return jax.lax.with_sharding_constraint((scores, counts.min(axis=1) > 0, batch["index"]), replicated)

    forward = model.forward(score)
    for batch in source.every_batch(**share):
        with watch.at("a batch of the reference", PATIENT):
            scores, is_real, index = map(np.asarray, forward(state, shard_batch(model.mesh, batch)))
            table[index[is_real]] = scores[is_real]
            if not np.isfinite(scores[is_real]).all():
                bad = index[is_real][~np.isfinite(scores[is_real]).all(axis=1)][0]
                raise ValueError(
                    f"the reference's log-likelihood of document {bad} of {source.config.data!r} is not finite; use "
                    "another --param-dtype, or check the weights"
                )
    return table


def write_reference(run_dir: Path, table: np.ndarray) -> None:
    """Write the file atomically."""
    partial = run_dir / f".{FILE}.partial"
    with partial.open("wb") as file:
        np.save(file, table)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, run_dir / FILE)


def read_reference(run_dir: Path, num_documents: int) -> np.ndarray | None:
    """Read the file of `write_reference`; None if there is none.

    Raises:
      ValueError: if the file is damaged, or belongs to other data.
    """
    path = run_dir / FILE
    try:
        table = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to compute it again") from error
    if table.shape != (num_documents, 2) or table.dtype != np.float32:
        raise ValueError(
            f"{path} belongs to other data than these {num_documents} documents; remove it to compute it again, or use "
            "those data"
        )
    return table
