"""Documents on disk, indexed by (file, offset) in memory and read on access."""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jfsdp.objects.path import AnyPath, StoreError, read_at
from jfsdp.trainer.data.files import find_files
from jfsdp.trainer.data.records import line_number, read_record
from jfsdp.trainer.data.spool import local_copy
from jfsdp.trainer.data.token_files import TokenFormat, index_token_file, read_token_format, read_tokens

MAX_LINE_BYTES = 1 << 28
"""Longest line of a JSONL file; a line is read into memory."""


@dataclasses.dataclass(frozen=True)
class CorpusStats:
    """Counts of files and documents of a corpus; `str` gives one line.

    Attributes:
      num_files_seen: files examined.
      num_files: files with documents of the corpus.
      num_documents: documents; a file longer than `max_document_bytes` has several.
      num_bytes: bytes of the documents, including the JSON of JSONL files.
      skipped: number of skipped files (or directories), by reason.
    """

    num_files_seen: int
    num_files: int
    num_documents: int
    num_bytes: int
    skipped: dict[str, int]

    def __str__(self) -> str:
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return (
            f"{self.num_documents} documents, {self.num_bytes} bytes in {self.num_files} of "
            f"{self.num_files_seen} files; skipped: {skipped or 'none'}"
        )


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, or a piece of a long file.

    Attributes:
      content: the text; for a token file the ids int64 [n + 1], the last one only a target; for JSONL of a form other
        than text, the record.
      starts: whether it starts at the start of a document.
      ends: whether it ends at the end of a document.
    """

    content: Any
    starts: bool = True
    ends: bool = True


class Corpus:
    """A sequence of documents read on access.

    Memory: 20 bytes per document and the path of each file; contents are not kept. Reading is thread-safe.

    Attributes:
      stats: counts of files and documents.
      digest: hash of names, offsets and contents; corpora with equal digests have the same documents.
      token_format: dtype and end-of-document id of token files; None for text.
      has_records: whether a file is JSONL.
      form: form of its records (see `FORMS`); "text" for other files.
    """

    def __init__(self, files: list[_File], skipped: dict[str, int], num_seen: int, text_field: str | None):
        self._files, self._text_field = files, text_field
        self._file_of = np.repeat(np.arange(len(files), dtype=np.int32), [len(f.offsets) for f in files])
        self._offsets = np.concatenate([f.offsets for f in files])
        self._lengths = np.concatenate([f.lengths for f in files])
        self.token_format = files[0].token_format
        itemsize = np.dtype(self.token_format.dtype).itemsize if self.token_format else 1
        num_bytes = int(self._lengths.sum()) * itemsize
        self.stats = CorpusStats(num_seen, len(files), len(self), num_bytes, skipped)
        self.has_records = any(_is_jsonl(file.path) for file in files)
        self.form = self._find_form()
        self.digest = _digest(files, text_field or ("text" if self.form == "text" else f"form {self.form}"))

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, index: int) -> str:
        """Return the identity of a document, "path@offset", with the path relative to the corpus."""
        return f"{self._files[self._file_of[index]].name}@{self._offsets[index]}"

    def place(self, index: int) -> str:
        """Return the position of a document for messages, with the line number in JSONL."""
        return self._files[self._file_of[index]].place(int(self._offsets[index]))

    def order_keys(self, seed: int) -> np.ndarray:
        """Return a pseudo-random uint64 per document [len(self)], which depends only on its identity and `seed`."""
        file_keys = np.array([_hash64(f"{seed}:{file.name}") for file in self._files], np.uint64)
        return _mix64(file_keys[self._file_of] ^ _mix64(self._offsets.astype(np.uint64)))

    def read(self, index: int) -> Document:
        """Read one document.

        Raises:
          ValueError: if the file changed since it was opened, or a JSONL line is not a record of the corpus's form.
        """
        file = self._files[self._file_of[index]]
        offset, length = int(self._offsets[index]), int(self._lengths[index])
        if file.token_format:
            return Document(read_tokens(file.path, file.token_format, offset, length), starts=offset == 0, ends=False)
        if _is_jsonl(file.path):
            return Document(self._read_record(file, offset, length, self.form)[1])
        text = _decode(_read_bytes(file, offset, length), file.source, offset)
        return Document(text, starts=offset == 0, ends=offset + length == file.num_bytes)

    def _find_form(self) -> str:
        """Return the form of the records, from the first record of each JSONL file, so that errors appear early."""
        form = None if all(_is_jsonl(file.path) for file in self._files) else "text"
        for file in self._files:
            if _is_jsonl(file.path):
                form, _ = self._read_record(file, int(file.offsets[0]), int(file.lengths[0]), form)
        return form or "text"

    def _read_record(self, file: _File, offset: int, length: int, form: str | None) -> tuple[str, Any]:
        line = _read_bytes(file, offset, length)
        try:
            return read_record(line, form, self._text_field)
        except ValueError as error:
            raise ValueError(f"{file.place(offset)}: {error}") from error


def open_corpus(data: str, *, text_field: str | None = None, max_document_bytes: int = 65536) -> Corpus:
    """Index the documents of `data`.

    The name of a file decides its content: `*.jsonl` and `*.ndjson` have one JSON object per line, `*.bin` raw
    little-endian token ids, `*.parquet` and `*.arrow` (of Hugging Face `datasets.save_to_disk`) a record per row, other
    files UTF-8 text. With `.gz` or `.zst` after its name a file is compressed. A file with a NUL byte or invalid UTF-8
    is skipped and counted.

    A text or token file longer than `max_document_bytes` is cut into pieces, text after a newline if possible. Pieces
    are shuffled, split and packed separately. Only the transition over a cut of a text file is not trained.

    Lines of JSONL are not cut. The first line of each file is checked here, others when read. A lone surrogate becomes
    "?". The fields of a record decide its form (`FORMS`), which must be equal in all files of a corpus.

    Cost: reads every text and JSONL file once, to check and hash it; only the ends of a token file. For files that are
      compressed, in columns or in an object store see [Note: local copies] in spool.py.
    Memory: see `Corpus`; and one JSONL line, at most `MAX_LINE_BYTES`.

    Args:
      data: see `find_files`.
      text_field: field of a JSONL object that contains the text; None: detected.
      max_document_bytes: length above which a file is cut.

    Raises:
      ValueError: if no file is usable, a file cannot be read, or token files are malformed.
    """
    found = find_files(data)
    skipped = collections.Counter(found.skipped)
    files = []
    for name in found.names:
        path = found.root / name
        try:
            file = _index(path, name, max_document_bytes, text_field)
        except StoreError:
            raise
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read ({error.strerror}); make it readable for every process, or leave it out"
            ) from error
        if isinstance(file, _File):
            files.append(file)
        else:
            skipped[file] += 1
    if not files:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise ValueError(
            f"data {data!r}: none of {found.num_seen} files is UTF-8 text or JSONL (skipped: {reasons or 'none'}); "
            "pass another path or glob, or compress files as .gz or .zst"
        )
    formats = {file.token_format: file.name for file in files}
    if len(formats) > 1:
        examples = "; ".join(f"{name}: {token_format or 'text'}" for token_format, name in formats.items())
        raise ValueError(f"data {data!r}: has files of different kinds ({examples}); name files of one kind")
    return Corpus(files, dict(skipped), found.num_seen, text_field)


@dataclasses.dataclass(frozen=True)
class _File:
    """A file of a corpus: its `source`, which messages name, and the `path` from which it is read."""

    name: str
    source: AnyPath
    path: Any
    num_bytes: int
    checksum: int
    offsets: np.ndarray
    lengths: np.ndarray
    token_format: TokenFormat | None = None

    def place(self, offset: int) -> str:
        """Return a position for messages, with the line number in JSONL, which has a line per row of a table."""
        where = f", line {line_number(self.path, offset)}" if _is_jsonl(self.path) else f" at {offset}"
        return f"{self.source}{where}"


def _index(path: AnyPath, name: str, limit: int, text_field: str | None) -> _File | str:
    if path.suffix == ".bin":
        token_format = read_token_format(path)
        offsets, lengths, checksum = index_token_file(path, token_format, limit)
        return _File(name, path, path, path.stat().st_size, checksum, offsets, lengths, token_format)
    if path.stat().st_size == 0:
        return "empty"
    source, path = path, local_copy(path, text_field)
    num_bytes = path.stat().st_size
    indexed = _index_lines(path, source) if _is_jsonl(path) else _index_text(path, limit)
    if indexed is None:
        return "not UTF-8 text"
    offsets, lengths, checksum = indexed
    return _File(name, source, path, num_bytes, checksum, offsets, lengths) if len(offsets) else "blank"


def _is_jsonl(path: Path) -> bool:
    return path.suffix in (".jsonl", ".ndjson")


def _index_lines(path: Path, source: AnyPath) -> tuple[np.ndarray, np.ndarray, int]:
    offsets, lengths, checksum, offset = array.array("q"), array.array("q"), 0, 0
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{source}: the line at byte {offset} has over {MAX_LINE_BYTES:,} bytes; cut it")
            if line.strip():
                offsets.append(offset)
                lengths.append(len(line))
            checksum = zlib.crc32(line, checksum)
            offset += len(line)
    return np.array(offsets, np.int64), np.array(lengths, np.int64), checksum


def _index_text(path: Path, limit: int) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Cut a text file into pieces of at most `limit` bytes; None if it is not UTF-8 text."""
    lengths, checksum, rest = [], 0, b""
    with path.open("rb") as file:
        while piece := rest + file.read(limit - len(rest)):
            cut = len(piece) if len(piece) < limit else _find_cut(piece)
            piece, rest = piece[:cut], piece[cut:]
            try:
                piece.decode("utf-8")
            except UnicodeDecodeError:
                return None
            if b"\0" in piece:
                return None
            lengths.append(len(piece))
            checksum = zlib.crc32(piece, checksum)
    lengths = np.array(lengths, np.int64)
    return np.cumsum(lengths) - lengths, lengths, checksum


def _find_cut(piece: bytes) -> int:
    """Return the cut of a full piece: after the last newline of its second half, else between two characters."""
    newline = piece.rfind(b"\n", len(piece) // 2)
    if newline >= 0:
        return newline + 1
    cut = len(piece) - 1
    while cut > len(piece) - 4 and piece[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _read_bytes(file: _File, offset: int, length: int) -> bytes:
    data = read_at(file.path, offset, length)
    if len(data) != length:
        raise ValueError(
            f"{file.source}: only {len(data)} of {length} bytes remain at offset {offset}, because the file changed "
            "since the corpus was opened; restore it, or open the corpus again"
        )
    return data


def _decode(data: bytes, path: AnyPath, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: is not UTF-8 at offset {offset + error.start}, because the file changed since the corpus was "
            "opened; restore it, or open the corpus again"
        ) from error


def _digest(files: list[_File], what: str) -> str:
    digest = hashlib.blake2b(what.encode(), digest_size=12)
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\0{file.checksum}\0{file.token_format}\0".encode())
    return digest.hexdigest()


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def _mix64(x: np.ndarray) -> np.ndarray:
    """Return the splitmix64 finalizer of each element. Overflow wraps around intentionally."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
