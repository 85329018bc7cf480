"""Sources: which files become which documents, and what bad input says."""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest

import jfsdp.trainer.data.corpus as corpus
from jfsdp.trainer.data.corpus import open_corpus
from jfsdp.trainer.data.files import standard_library_path
from jfsdp.trainer.data.tokens import DataConfig, open_data
from tests.refusals import refuses
from tests.trainer.chats import with_sidecar


def _read_all(corpus):
    return [corpus.read(i) for i in range(len(corpus))]


def _texts(corpus):
    return {corpus.name(i).rpartition("@")[0]: corpus.read(i).content for i in range(len(corpus))}


def test_directory_is_read_in_sorted_order_and_what_is_skipped_is_counted(tmp_path):
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("zed é")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "zeros.dat").write_bytes(b"ab\0cd")
    (tmp_path / "tokens.bin").write_bytes(b"abcd")
    (tmp_path / ".hidden").write_text("no")
    for directory in (".git", "__pycache__", "site-packages"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "x.txt").write_text("no")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    corpus = open_corpus(str(tmp_path))
    assert list(_texts(corpus).items()) == [("a/z.md", "zed é"), ("b.txt", "bee")]
    stats = corpus.stats
    assert (stats.num_files_seen, stats.num_files, stats.num_documents, stats.num_bytes) == (7, 2, 2, 9)
    assert {reason.split(" (")[0]: count for reason, count in stats.skipped.items()} == {
        "empty": 1,
        "not UTF-8 text": 2,
        "hidden": 1,
        "excluded directory": 3,
        "linked directory": 1,
        "token file": 1,
    }
    assert "2 not UTF-8 text" in str(stats)


def test_glob_crosses_directories_and_names_do_not_hold_the_root(tmp_path):
    for name in ("x/1.txt", "x/y/2.txt", "x/y/3.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert set(_texts(open_corpus(f"{tmp_path}/**/*.txt"))) == {"x/1.txt", "x/y/2.txt"}


@pytest.mark.parametrize("limit", [16, 17, 64, 1000])
def test_pieces_of_a_long_file_concatenate_to_the_file(tmp_path, limit):
    text = "naïve — 日本語 🎉\n" * 40 + "ü" * 300
    (tmp_path / "long.txt").write_text(text)
    documents = _read_all(open_corpus(str(tmp_path), max_document_bytes=limit))
    assert "".join(str(d.content) for d in documents) == text
    assert limit < 64 or all(str(d.content).endswith("\n") for d in documents[: 1000 // limit])
    assert max(len(str(d.content).encode()) for d in documents) <= limit
    assert [d.starts for d in documents] == [True] + [False] * (len(documents) - 1)
    assert [d.ends for d in documents] == [False] * (len(documents) - 1) + [True]


def test_invalid_utf8_late_in_a_long_file_is_found_at_opening(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "late.txt").write_bytes(b"x" * 1000 + b"\xe9 latin")
    assert open_corpus(str(tmp_path), max_document_bytes=64).stats.skipped == {"not UTF-8 text": 1}


def test_jsonl_gives_one_document_per_line_and_skips_blank_lines(tmp_path):
    lines = [json.dumps({"body": text, "n": 1}) for text in ("one", "zwei ü", "")]
    (tmp_path / "d.jsonl").write_text(lines[0] + "\n\n" + lines[1] + "\r\n  \n" + lines[2])
    documents = _read_all(open_corpus(str(tmp_path / "d.jsonl"), text_field="body"))
    assert [d.content for d in documents] == ["one", "zwei ü", ""]
    assert all(d.starts and d.ends for d in documents)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_file_pieces_hold_every_token_with_one_of_lookahead(tmp_path, dtype):
    tokens = np.arange(100, dtype=dtype)
    tokens.tofile(tmp_path / "t.bin")
    corpus = open_corpus(with_sidecar(str(tmp_path / "t.bin"), dtype=dtype), max_document_bytes=64)
    pieces = [d.content for d in _read_all(corpus)]
    np.testing.assert_array_equal(np.concatenate([p[:-1] for p in pieces]), tokens[:-1])
    np.testing.assert_array_equal(np.concatenate([p[1:] for p in pieces]), tokens[1:])
    assert corpus.stats.num_bytes == tokens.nbytes - tokens.itemsize


def test_digest_depends_on_contents_and_not_on_the_place(tmp_path):
    for place, text in (("p", "abc"), ("q", "abc"), ("r", "abd")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "f.txt").write_text(text)
    digests = [open_corpus(str(tmp_path / place)).digest for place in "pqr"]
    assert digests[0] == digests[1] != digests[2]


def test_standard_library_is_a_corpus_of_python_sources_only():
    corpus = open_corpus("stdlib")
    stats = corpus.stats
    assert stats.num_files > 300 and stats.num_bytes > 5_000_000
    names = {corpus.name(i).rpartition("@")[0] for i in range(stats.num_documents)}
    assert all(name.endswith(".py") for name in names)
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))
    assert (standard_library_path() / "dataclasses.py").exists() and "dataclasses.py" in names


# Bad input. Every message names the place and the remedy.


def _write(path, content):
    path.write_bytes(content)
    return str(path)


def _tokens(directory, content, **sidecar):
    return with_sidecar(_write(directory / "a.bin", content), **sidecar)


def _kinds(directory):
    for name, dtype in (("a.bin", "uint16"), ("b.bin", "uint32")):
        with_sidecar(_write(directory / name, b"abcdefgh"), dtype=dtype)
    return str(directory / "*.bin")


def _sidecar(directory, text):
    _write(directory / "a.bin.json", text)
    return _write(directory / "a.bin", b"abcd")


BAD = [
    (lambda d: str(d / "nowhere"), ["nowhere", "pass a directory"]),
    (lambda d: str(d), ["0 files", "pass another path"]),
    (lambda d: str(d / "*.txt"), ["*.txt", "0 files"]),
    (lambda d: os.path.dirname(_write(d / "a.xz", b"\xfd7zXZ\xff\0")), ["1 files", "1 not UTF-8 text", ".zst"]),
    (lambda d: _write(d / "a.xz", b"\xfd7zXZ\xff\0"), ["a.xz", "1 not UTF-8 text"]),
    (lambda d: _write(d / "a.jsonl", b"\n\n"), ["1 blank"]),
    (lambda d: _write(d / "a.jsonl", b"\nnot json"), ["a.jsonl, line 2", "JSON"]),
    (lambda d: _write(d / "a.jsonl", b'{"body": "x"}'), ["a.jsonl, line 1", "body", "text_field="]),
    (lambda d: _write(d / "a.jsonl", b'{"text": 3}'), ["line 1", "'text'"]),
    (lambda d: _write(d / "a.jsonl", b'["text"]'), ["line 1", "list"]),
    (lambda d: _write(d / "a.bin", b"abcd"), ["a.bin", '"dtype": "uint16"', "a.bin.json"]),
    (lambda d: _tokens(d, b"abcd", dtype="int8"), ["int8", "uint16"]),
    (lambda d: _tokens(d, b"abcd", dtype="uint16", eod_id=-1), ["eod_id=-1", "0 to 65,535"]),
    (lambda d: _tokens(d, b"abc", dtype="uint16"), ["3 bytes", "multiple of the 2"]),
    (lambda d: _tokens(d, b"abcd", dtype="uint32"), ["1 token", "two"]),
    (lambda d: _sidecar(d, b"[1]"), ["a.bin.json"]),
    (lambda d: _sidecar(d, b'{"dtype": "uint16", "eod_id": "x"}'), ["a.bin.json"]),
    (_kinds, ["a.bin", "b.bin"]),
]


@pytest.mark.parametrize(("make", "facts"), BAD)
def test_a_bad_source_is_refused_by_place_and_remedy(tmp_path, make, facts):
    path = make(tmp_path)
    refuses(lambda: open_corpus(path), *facts)


def test_what_is_bad_or_changed_after_opening_is_named_when_it_is_read(tmp_path):
    lines = open_corpus(_write(tmp_path / "a.jsonl", b'{"text": "x"}\n\n{"text": "y"}\n{"text": '))
    refuses(lambda: lines.read(2), "a.jsonl, line 4")
    (tmp_path / "t").mkdir()
    text, tokens = _write(tmp_path / "t" / "a.txt", b"0123456789"), _tokens(tmp_path / "t", b"01234567", dtype="uint16")
    for path, content in ((text, b"ab"), (text, b"\xff" * 10), (tokens, b"0123")):
        _write(Path(text), b"0123456789")
        corpus = open_corpus(path)
        _write(Path(path), content)
        refuses(functools.partial(corpus.read, 0), path, "changed since")


def test_unreadable_file_is_an_error_and_not_a_smaller_corpus(tmp_path, monkeypatch):
    # Root reads every file, so the refusal is played: what is tested is that it is not swallowed.
    _write(tmp_path / "a.txt", b"x")
    path_open = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return path_open(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    refuses(lambda: open_corpus(str(tmp_path)), "a.txt")


# The split.


def _corpus_of(tmp_path, count):
    for i in range(count):
        (tmp_path / f"{i:03}.txt").write_text(f"document {i}")
    return str(tmp_path)


def _names(documents):
    return {part.name(i) for part in documents.parts for i in range(len(part))}


def test_split_is_a_partition_of_the_asked_size_that_the_order_seed_does_not_move(tmp_path):
    data = _corpus_of(tmp_path, 200)
    opened = open_data(DataConfig(data, eval_fraction=0.1, seed=0))
    again = open_data(DataConfig(data, eval_fraction=0.1, seed=1))
    other = open_data(DataConfig(data, eval_fraction=0.1, split_seed=1))
    train, held_out = _names(opened.train), _names(opened.eval)
    assert len(held_out) == 20 and not train & held_out and len(train | held_out) == 200
    assert _names(again.eval) == held_out != _names(other.eval)
    assert held_out < _names(open_data(DataConfig(data, eval_fraction=0.3)).eval), "a larger part has the smaller"
    for name, value in (("eval_fraction", 1.0), ("eval_fraction", -0.1), ("shuffle_rows", 10**12)):
        refuses(functools.partial(DataConfig, "stdlib", **{name: value}), f"{name}={value}")
    refuses(lambda: DataConfig(""), "data=''")
    one = DataConfig(str(tmp_path / "000.txt"))
    refuses(lambda: open_data(one), "none to train on", "0")


def test_records_are_held_out_from_all_over_a_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 200)
    (held_out,) = open_data(DataConfig(str(tmp_path), eval_fraction=0.1)).eval.parts
    numbers = [held_out.number(index) for index in range(len(held_out))]
    assert numbers[0] < 50 and numbers[-1] >= 150 and len(set(numbers)) == 20


def test_a_line_without_end_is_refused_by_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 100)
    line = json.dumps({"text": "x" * 80}) + "\n"
    (tmp_path / "a.jsonl").write_text(line)
    assert len(open_corpus(str(tmp_path))) == 1
    (tmp_path / "a.jsonl").write_text(line + "x" * 200)
    refuses(lambda: open_corpus(str(tmp_path)), "a.jsonl", f"byte {len(line)}", "100 bytes")
