"""Data that a job brings itself, as the data of a run."""

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
_TEXT += ("chat_template", "answers", "eod_token", "eval_fraction")


@dataclasses.dataclass(frozen=True)
class Share:
    """What a function of a job's data is given.

    Attributes:
      seed: of the run, for the order of the rows.
      batch_size: rows of a batch that this process reads.
      process_index, process_count: which share that is, and of how many. Processes that hold the same rows of a batch,
        as along axis `tensor`, have the same one.
    """

    seed: int
    batch_size: int
    process_index: int
    process_count: int


class OwnSource:
    """The data of a job, from its `data` and `eval_data`; has the methods of `TokenSource` that a run calls."""

    num_rows = 1

    def __init__(self, config: TrainConfig, job: Job, row_items: int):
        self.job, self.seed, self.row_items = job, config.seed, row_items
        self.item = self.counted = job.item

    @classmethod
    def check(cls, config: TrainConfig, job: Job) -> int:
        """Refuse options that mean nothing for the job; return how many items a row holds."""
        defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
        names = (*_TEXT, "seq_len") if job.item == "row" else _TEXT
        given = [name for name in names if getattr(config, name) != defaults[name]]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"job {job.name!r} brings its own data: {options} mean nothing for it; leave them out")
        if job.item == "row":
            return 1
        return job.seq_len if config.seq_len is None else config.seq_len

    @property
    def has_eval(self) -> bool:
        return self.job.eval_data is not None

    def describe(self, theirs: Mapping[str, Any]) -> str:
        return f"of job {self.job.name!r}" + "; none held out" * (not self.has_eval)

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
        own = _OfProcess(iter(found), f"job {self.job.name!r}: {field}", share.process_index, ends=field != "data")
        merge = lambda positions: dict(pair for one in positions for pair in one.items())  # noqa: E731
        return DataIterator(own, stream | {"process_count": share.process_count}, merge)

    def _divide(self, rows: Any, share: Share, *, repeats: bool) -> Any:
        """Return batches of this process's rows: of a global batch, process i of n reads the i-th n-th."""
        grain, num_rows, length = load("grain"), share.batch_size * share.process_count, len(rows)
        example = self._check_row(rows[0])
        if not repeats and length % num_rows and "weights" not in example:
            raise ValueError(
                f"job {self.job.name!r}: the {length} rows of eval_data are no multiple of the {num_rows} rows of a "
                "batch, and rows have no field 'weights'; give each row the weight 1, and the rest is filled with zeros"
            )
        endless = rows.repeat() if repeats else rows
        zeros = jax.tree.map(np.zeros_like, example)

        def take(batch: int) -> Any:
            first = batch * num_rows + share.process_index * share.batch_size
            places = range(first, first + share.batch_size)
            found = [endless[at] if repeats or at < length else zeros for at in places]
            if None in found:
                at = first + found.index(None)
                raise ValueError(f"job {self.job.name!r}: its data have no row {at}; filter before they are a dataset")
            return jax.tree.map(lambda *xs: np.stack(xs), *found)

        num_batches = 2**62 // num_rows if repeats else -(-length // num_rows)
        return grain.MapDataset.range(num_batches).map(take).to_iter_dataset(read_in_caller())

    def _check_row(self, row: Any) -> Any:
        shapes = functools.partial(jax.tree.map, lambda x: f"{np.result_type(x)}{list(np.shape(x))}")
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.job.batch(1, self.row_items))
        wanted = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", wanted)
        if shapes(row) != wanted:
            raise ValueError(
                f"job {self.job.name!r}: its data give rows {shapes(row)}, and its batch= has rows {wanted}; give both "
                "the same names, shapes and dtypes"
            )
        return row


class _OfProcess(Iterator[Batch]):
    """A process's own iterator, with its state under the number of its share."""

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
            raise ValueError(f"{self.name} ended, and the run goes on; repeat the batches") from None

    def get_state(self) -> dict[str, Any]:
        return {self.index: self.batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.batches.set_state(state[self.index])

    def close(self) -> None:
        getattr(self.batches, "close", lambda: None)()
