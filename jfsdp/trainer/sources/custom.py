"""Data source for custom data of a job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jfsdp.extras import load
from jfsdp.trainer.data.iterator import Batch, DataIterator, prefetch, read_in_caller
from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig

_TEXT = ("data", "tokenizer", "text_field", "cross_documents", "prompt")
_TEXT += ("chat_template", "answers", "eod_token", "eval_fraction", "eval_data")


@dataclasses.dataclass(frozen=True)
class Share:
    """The argument of a job's `data` and `eval_data`.

    Attributes:
      seed: the run's seed, for the order of the rows.
      batch_size: rows of a batch that this process reads.
      process_index, process_count: number of the share, and of all shares. Processes along axis `tensor` read the same
        rows and have the same number.
    """

    seed: int
    batch_size: int
    process_index: int
    process_count: int


class CustomSource:
    """Custom data of a job, from its `data` and `eval_data`. Has the methods of `TokenSource` that a run calls."""

    num_rows = 1

    def __init__(self, config: TrainConfig, job: Job, row_items: int):
        self.job, self.seed, self.row_items = job, config.seed, row_items
        self.item, self.loss_unit = job.item, "nats per token" if job.item == "token" else ""

    @classmethod
    def check(cls, config: TrainConfig, job: Job) -> int:
        """Check that no option of text data is set. Return the items per row."""
        defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
        names = (*_TEXT, "seq_len") if job.item == "row" else _TEXT
        given = [name for name in names if getattr(config, name) != defaults[name]]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"job {job.name!r} has custom data: {options} have no effect; leave them out")
        if job.item == "row":
            return 1
        return job.seq_len if config.seq_len is None else config.seq_len

    @property
    def has_eval(self) -> bool:
        return self.job.eval_data is not None

    def describe(self, hf_config: Mapping[str, Any]) -> str:
        return f"custom data of job {self.job.name!r}" + "; none held out" * (not self.has_eval)

    def describe_batch(self, rows: int) -> str:
        return f"{rows} rows"

    def decides(self) -> dict[str, Any]:
        return {}

    def train_batches(self, **share: int) -> DataIterator:
        return self._batches("data", Share(self.seed, **share))

    def eval_batches(self, **share: int) -> DataIterator:
        return self._batches("eval_data", Share(self.seed, **share))

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def _batches(self, field: str, share: Share) -> DataIterator:
        found, num_rows = getattr(self.job, field)(share), share.batch_size * share.process_count
        stream = {"data": f"{field} of the job", "seed": share.seed, "global_batch": num_rows}
        if isinstance(found, load("grain").MapDataset):
            batches = self._divide(found, share, repeats=field == "data")
            return DataIterator(prefetch(batches, 2), stream | {"rows": len(found)})
        local = _LocalBatches(iter(found), f"job {self.job.name!r}: {field}", share.process_index, ends=field != "data")
        merge = lambda positions: dict(pair for one in positions for pair in one.items())  # noqa: E731
        return DataIterator(local, stream | {"process_count": share.process_count}, merge)

    def _divide(self, rows: Any, share: Share, *, repeats: bool) -> Any:
        """Return batches of this process's rows. Process i of n reads the i-th of n equal parts of a global batch."""
        grain, num_rows, length = load("grain"), share.batch_size * share.process_count, len(rows)
        example = self._check_row(rows[0])
        if not repeats and length % num_rows and "weights" not in example:
            raise ValueError(
                f"job {self.job.name!r}: the {length} rows of eval_data are not a multiple of the {num_rows} rows of a "
                "batch; add a field 'weights' with 1 to each row, so that zeros can fill the last batch"
            )
        endless = rows.repeat() if repeats else rows
        zeros = jax.tree.map(np.zeros_like, example)

        def take(batch: int) -> Any:
            first = batch * num_rows + share.process_index * share.batch_size
            places = range(first, first + share.batch_size)
            found = [endless[at] if repeats or at < length else zeros for at in places]
            if None in found:
                at = first + found.index(None)
                raise ValueError(f"job {self.job.name!r}: its data have no row {at}; filter rows before the dataset")
            return jax.tree.map(lambda *xs: np.stack(xs), *found)

        num_batches = 2**62 // num_rows if repeats else -(-length // num_rows)
        return grain.MapDataset.range(num_batches).map(take).to_iter_dataset(read_in_caller())

    def _check_row(self, row: Any) -> Any:
        shapes = functools.partial(jax.tree.map, lambda x: f"{np.result_type(x)}{list(np.shape(x))}")
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.job.batch(1, self.row_items))
        wanted = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", wanted)
        if shapes(row) != wanted:
            raise ValueError(
                f"job {self.job.name!r}: its data have rows {shapes(row)}, and its batch= has rows {wanted}; use the "
                "same names, shapes and dtypes in both"
            )
        return row


class _LocalBatches(Iterator[Batch]):
    """A process's iterator, whose state is stored under the number of its share."""

    def __init__(self, batches: Any, name: str, index: int, *, ends: bool):
        if not all(hasattr(batches, method) for method in ("get_state", "set_state")):
            raise ValueError(
                f"{name} returned a {type(batches).__name__}; return a grain.MapDataset of rows, or batches whose "
                "iterator has get_state() and set_state(state)"
            )
        self.batches, self.name, self.index, self.ends = batches, name, str(index), ends

    def __next__(self) -> Batch:
        try:
            return next(self.batches)
        except StopIteration:
            if self.ends:
                raise
            raise ValueError(f"{self.name} ended before the run; repeat the batches") from None

    def get_state(self) -> dict[str, Any]:
        return {self.index: self.batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.batches.set_state(state[self.index])

    def close(self) -> None:
        getattr(self.batches, "close", lambda: None)()
