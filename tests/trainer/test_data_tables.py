"""Files that are copied before they are read: tables, compressed files, and all of an object store."""

import gzip
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfsdp.objects.path import ObjectPath
from jfsdp.trainer.data.corpus import open_corpus
from jfsdp.trainer.data.pipeline import make_eval_iterator, make_train_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from tests.objects.faulty import s3_server
from tests.refusals import refuses

NUMBERS = itertools.count()
TEXTS = [f"text {n} é\n" * (n % 5 + 1) for n in range(40)]
CHATS = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(10)]


@pytest.fixture(autouse=True)
def copies(tmp_path_factory, monkeypatch):
    """Where local copies of this test go."""
    directory = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def lines(texts=TEXTS, field="text"):
    return b"".join(json.dumps({field: text, "n": 1}).encode() + b"\n" for text in texts)


def write_table(path: Path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def texts_of(data, **options):
    corpus = open_corpus(data, **options)
    return [corpus.read(n).content for n in range(len(corpus))]


def test_tables_compressed_files_and_plain_ones_have_the_same_documents(tmp_path):
    datasets = pytest.importorskip("datasets")  # not in the extra `test`

    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    (tmp_path / "a.jsonl.zst").write_bytes(pa.compress(lines(), codec="zstd", asbytes=True))
    write_table(tmp_path / "a.parquet", {"n": range(40), "text": TEXTS, "junk": [b"\xff" * 100] * 40}, row_group_size=7)
    datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(40))}).save_to_disk(tmp_path / "set", num_shards=3)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "set", "set/*.arrow"):
        assert texts_of(str(tmp_path / name)) == TEXTS, name
    long = "line\n" * 40000
    (tmp_path / "long.txt.gz").write_bytes(gzip.compress(long.encode()))
    assert "".join(texts_of(str(tmp_path / "long.txt.gz"))) == long


def test_records_and_named_columns(tmp_path):
    chats = write_table(tmp_path / "chats.parquet", {"id": range(10), "messages": CHATS})
    corpus = open_corpus(chats)
    assert corpus.form == "messages" and corpus.read(3).content == {"messages": CHATS[3]}
    bodies = write_table(tmp_path / "bodies.parquet", {"body": pa.array(TEXTS, pa.large_string()), "n": range(40)})
    assert texts_of(bodies, text_field="body") == TEXTS
    refuses(lambda: open_corpus(bodies), "bodies.parquet", "body (large_string)", "text_field=")
    refuses(lambda: open_corpus(bodies, text_field="text"), "column 'text'", "body (large_string), n (int64)")
    nested = write_table(tmp_path / "nested.parquet", {"text": [{"a": "x"}]})
    refuses(lambda: open_corpus(nested), "nested.parquet", "'text'", "struct<a: string>")
    refuses(lambda: open_corpus(nested, text_field="text"), "struct<a: string>", "text_field=")


def test_nulls_of_a_table_are_missing_fields(tmp_path):
    calls = [
        [{"role": "user", "content": "q", "args": {"a": 1}}],
        [{"role": "user", "content": "q", "args": {"b": "z"}}],
    ]
    data = write_table(tmp_path / "calls.parquet", {"messages": calls, "tools": pa.array([None, None], pa.string())})
    corpus = open_corpus(data)
    assert [corpus.read(n).content for n in range(2)] == [{"messages": one} for one in calls]
    nulls = write_table(tmp_path / "nulls.parquet", {"text": ["one", None]})
    refuses(lambda: open_corpus(nulls), "nulls.parquet, row 1", "'text' is null")
    few = write_table(tmp_path / "few.parquet", {"text": pa.array(["one", "two", "one"]).dictionary_encode()})
    assert texts_of(few) == ["one", "two", "one"]


def test_a_copy_that_was_cut_is_made_again(tmp_path, copies):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    assert len(texts_of(str(tmp_path / "a.jsonl.gz"))) == 40
    (copy,) = copies.rglob("*.jsonl")
    copy.write_bytes(copy.read_bytes()[:300])
    assert len(texts_of(str(tmp_path / "a.jsonl.gz"))) == 40


def test_damaged_files_are_named(tmp_path):
    whole = gzip.compress(lines())
    for name, data in {
        "a.jsonl.gz": whole[: len(whole) // 2],
        "b.jsonl.gz": b"nothing",
        "f.jsonl.gz": whole[:40] + b"\0" * 20 + whole[60:],
        "c.jsonl.zst": b"nothing at all",
        "d.parquet": b"PAR1 nothing",
        "e.arrow": b"nothing of a stream",
    }.items():
        (tmp_path / name).write_bytes(data)
        refuses(lambda name=name: open_corpus(str(tmp_path / name)), name)


def test_errors_name_the_file_and_not_its_copy(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(lines(TEXTS[:2]) + b"[1]\n"))
    corpus = open_corpus(str(file))
    assert corpus.place(1) == f"{file}, line 2"
    refuses(lambda: corpus.read(2), f"{file}, line 3", "list")
    write_table(tmp_path / "b.parquet", {"messages": [[{"role": "user"}]]})
    assert open_corpus(str(tmp_path / "b.parquet")).place(0) == f"{tmp_path}/b.parquet, line 1"
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text"))
    assert open_corpus(str(tmp_path / "c.txt.gz")).place(0) == f"{tmp_path}/c.txt.gz at 0"
    file.write_bytes(gzip.compress(b"1\n"))
    refuses(lambda: open_corpus(str(file)), f"{file}, line 1: int")


def test_held_out_data_that_cannot_be_opened_are_named_as_such(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    config = DataConfig(data=str(tmp_path / "a.jsonl"), eval_fraction=0.0, eval_data=str(tmp_path / "none"))
    refuses(lambda: open_data(config), f"eval_data '{tmp_path}/none'", "no such file")


def test_a_dict_of_datasets_must_be_one_split(tmp_path):
    datasets = pytest.importorskip("datasets")  # not in the extra `test`

    part = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": part, "test": part.select(range(3))}).save_to_disk(tmp_path)
    refuses(lambda: open_corpus(str(tmp_path)), "train, test", f"{tmp_path}/train")
    assert texts_of(f"{tmp_path}/test") == TEXTS[:3]


def test_a_file_is_copied_once_and_again_if_it_changed(tmp_path, copies):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(lines()))
    assert texts_of(str(file)) == TEXTS
    (copy,) = copies.rglob("*.jsonl")
    before = copy.stat().st_mtime_ns
    assert texts_of(str(file)) == TEXTS and copy.stat().st_mtime_ns == before
    file.write_bytes(gzip.compress(lines(TEXTS[:5])))
    assert texts_of(str(file)) == TEXTS[:5]
    assert not list(copies.rglob(".partial"))


def batches(data, num, **options):
    config = DataConfig(data=data, seq_len=64, **{"eval_fraction": 0.1, **options})
    made = open_data(config, vocab_size=257)
    train = make_train_iterator(made, batch_size=2, process_index=0, process_count=1)
    held_out = make_eval_iterator(made, batch_size=1, process_index=0, process_count=1)
    return [next(train)["tokens"] for _ in range(num)], next(held_out)["tokens"]


def check_same_batches(one, other):
    for first, second in zip([*one[0], one[1]], [*other[0], other[1]], strict=True):
        np.testing.assert_array_equal(first, second)


def test_addresses_give_the_batches_of_local_files(tmp_path, monkeypatch):
    tokens = np.arange(100000, dtype="<u2") % 250
    with s3_server(monkeypatch) as bucket:
        for directory in (tmp_path, ObjectPath(f"{bucket}/data")):
            for name, data in {
                "x/a.jsonl": lines(TEXTS[:20]),
                "x/deep/b.jsonl": lines(TEXTS[20:]),
                "x/.hidden": b"no",
                "y/t.bin": tokens.tobytes(),
                "y/t.bin.json": b'{"dtype": "uint16"}',
            }.items():
                if isinstance(directory, Path):
                    (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(data)
        for name in ("x/**/*.jsonl", "y/*.bin"):
            check_same_batches(batches(f"{bucket}/data/{name}", 5), batches(str(tmp_path / name), 5))
        mixed = "{0}/x/a.jsonl:0.5,{0}/x/deep/b.jsonl:0.5"
        check_same_batches(batches(mixed.format(f"{bucket}/data"), 5), batches(mixed.format(tmp_path), 5))
        corpus = open_corpus(f"{bucket}/data/x")
        assert corpus.stats.skipped == {"hidden": 1} and corpus.name(0) == "a.jsonl@0"
        for wrong in ("none", "x/*.md"):
            refuses(lambda wrong=wrong: open_corpus(f"{bucket}/data/{wrong}"), wrong, "no such objects")


def test_held_out_data_of_their_own(tmp_path):
    for name, texts in {"a.jsonl": TEXTS, "b.jsonl": TEXTS[:7]}.items():
        (tmp_path / name).write_bytes(lines(texts))
    options = {"eval_data": str(tmp_path / "b.jsonl"), "eval_fraction": 0.0}
    made = open_data(DataConfig(data=str(tmp_path / "a.jsonl"), seq_len=64, **options), vocab_size=257)
    assert (len(made.train), len(made.eval), made.weights) == (40, 7, (1.0,))
    alone = open_data(DataConfig(data=str(tmp_path / "a.jsonl"), seq_len=64, eval_fraction=0.0), vocab_size=257)
    assert alone.digest == made.digest
    refuses(lambda: DataConfig(data="a", eval_fraction=0.1, eval_data="b"), "eval_fraction=0.1", "eval_data='b'")
