"""Data that a job brings: divided among processes, continued exactly after a restore, refused where they do not fit."""

import dataclasses

import grain
import numpy as np

from examples import vit
from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.source import open_source, source_of
from tests.refusals import refuses, refusing

CONFIG = TrainConfig(model=None, factory="examples.vit:job")


class Counting:
    """Batches of an iterator of the user's: numbers, this process's alone."""

    def __init__(self, share, last=10**6):
        self.share, self.last, self.count = share, last, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.count >= self.last:
            raise StopIteration
        self.count += 1
        first = (self.count - 1) * self.share.batch_size * self.share.process_count
        own = first + self.share.process_index * self.share.batch_size
        return {"x": np.arange(own, own + self.share.batch_size)}

    def get_state(self):
        return {"count": self.count, "own": self.share.process_index}

    def set_state(self, state):
        assert state["own"] == self.share.process_index
        self.count = state["count"]


def source(job=None, **changes):
    job = dataclasses.replace(job or vit.job(), **changes)
    return open_source(CONFIG, job, source_of(job).check(CONFIG, job))


def shares(num, rows=8):
    return [{"batch_size": rows // num, "process_index": i, "process_count": num} for i in range(num)]


def read(iterators, num):
    return [np.concatenate([next(one)["images"] for one in iterators]) for _ in range(num)]


def test_a_restored_iterator_goes_on_with_the_next_batch_in_any_number_of_processes():
    rows = source(data=lambda share: grain.MapDataset.source(vit.Pictures(0, 21)).shuffle(seed=share.seed))
    begun = [rows.train_batches(**share) for share in shares(2)]
    read(begun, 4)  # into the second pass over 21 rows
    states = [one.get_state() for one in begun]
    wanted = read(begun, 3)
    for num in (1, 2, 4):
        restored = [rows.train_batches(**share) for share in shares(num)]
        for one in restored:
            one.set_state(*states)
        assert all(np.array_equal(a, b) for a, b in zip(read(restored, 3), wanted, strict=True)), num
    with refusing("global_batch", "was 8", "16", "--restart-data"):
        rows.train_batches(**shares(1, 16)[0]).set_state(*states)


def test_every_row_is_read_once_a_pass_and_passes_have_orders_of_their_own():
    rows = source(data=lambda share: grain.MapDataset.source(vit.Pictures(0, 16)).shuffle(seed=share.seed))
    iterators = [rows.train_batches(**share) for share in shares(2)]
    first, second = (np.concatenate(read(iterators, 2)) for _ in range(2))
    assert len(np.unique(first, axis=0)) == 16 and not np.array_equal(first, second)
    assert np.array_equal(np.sort(first.ravel()), np.sort(second.ravel()))


def test_held_out_rows_come_once_and_the_last_batch_is_filled_with_zeros():
    rows = source(eval_data=lambda share: grain.MapDataset.source(vit.Pictures(0, 11)))
    batches = [list(rows.eval_batches(**share)) for share in shares(2)]
    weights = [[batch["weights"].tolist() for batch in own] for own in batches]
    assert weights == [[[1] * 4, [1, 1, 1, 0]], [[1] * 4, [0] * 4]]
    assert rows.has_eval and not source(eval_data=None).has_eval


def test_an_iterator_of_the_users_is_restored_by_its_share():
    own = source(data=Counting)
    begun = [own.train_batches(**share) for share in shares(2)]
    for one in begun:
        next(one)
    states = [one.get_state() for one in begun]
    restored = [own.train_batches(**share) for share in shares(2)]
    for one in restored:
        one.set_state(*states)
    assert [next(one)["x"].tolist() for one in restored] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    refuses(lambda: own.train_batches(**shares(1)[0]).set_state(*states), "process_count was 2, is 1", "--restart-data")


def test_data_that_cannot_be_used_are_refused():
    other = lambda share: grain.MapDataset.source([{"images": np.zeros((8, 8, 3), np.float32)}])  # noqa: E731
    refuses(
        lambda: source(data=other).train_batches(**shares(1)[0]), "job 'vit'", "float32[8, 8, 3]", "float32[8, 8, 1]"
    )
    filtered = lambda share: grain.MapDataset.source(vit.Pictures(0, 8)).filter(lambda row: row["labels"] != 3)  # noqa: E731
    refuses(lambda: next(source(data=filtered).train_batches(**shares(1)[0])), "row 3", "filter rows")
    refuses(lambda: source(data=lambda share: [1]).train_batches(**shares(1)[0]), "list_iterator", "get_state()")
    ends = source(data=lambda share: Counting(share, last=1)).train_batches(**shares(1)[0])
    next(ends)
    refuses(lambda: next(ends), "job 'vit'", "data ended", "repeat")
    given = dataclasses.replace(CONFIG, data="a.jsonl", prompt="x", seq_len=8)
    refuses(lambda: source_of(vit.job()).check(given, vit.job()), "--data, --prompt, --seq-len", "leave them out")
    refuses(lambda: dataclasses.replace(vit.job(), data="tokens"), "eval_data=", "data=f(share)")


def test_rows_without_weights_must_fill_the_batches_of_an_evaluation():
    def unweighted(share):
        return grain.MapDataset.source(vit.Pictures(0, 11)).map(lambda row: {"x": row["images"]})

    job = Job(
        model=print,
        loss=print,
        units=[],
        optimizer=print,
        data=unweighted,
        eval_data=unweighted,
        batch=lambda rows, _: {"x": vit.batch_shapes(rows, 1)["images"]},
    )
    refuses(lambda: source(job).eval_batches(**shares(1)[0]), "11 rows", "8 rows", "weight")
