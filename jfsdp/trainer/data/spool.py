"""Local copies of files that cannot be read at random places: in an object store, compressed, or in columns.

[Note: local copies]
Documents are read in random order, a few kilobytes each. So texts and JSONL in an object store, compressed files and
tables are copied once, to `jfsdp-data-UID` in the directory for temporary files (TMPDIR); of a table, only the columns
that are used, by ranged reads. A copy is named by the address, size and version of the file, so processes of a host
share it, and a resumed run finds it. Token files are not copied, since a document of theirs is one range.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jfsdp.checkpoint.disk.files import mark_of
from jfsdp.extras import load
from jfsdp.objects.path import AnyPath, ObjectPath
from jfsdp.trainer.data.records import KNOWN, READ, form_of

COMPRESSED, TABLES = (".gz", ".zst"), (".parquet", ".arrow")
_BYTES = 8 << 20


def local_copy(path: AnyPath, text_field: str | None) -> Path:
    """Return a file to read a file's documents from: itself, or its local copy; see [Note: local copies].

    Args:
      text_field: as `open_corpus`.

    Raises:
      ValueError: for a table without a column of text or a known form, naming its columns; for damaged files.
      OSError: if the disk is full.
    """
    if isinstance(path, Path) and path.suffix not in COMPRESSED + TABLES:
        return path
    version = _version(path)
    identity = f"{path}\0{version}\0{text_field if path.suffix in TABLES else ''}"
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    owned = Path(tempfile.gettempdir(), f"jfsdp-data-{os.getuid()}")
    owned.mkdir(mode=0o700, exist_ok=True)
    if owned.is_symlink() or owned.stat().st_uid != os.getuid():
        raise ValueError(f"{owned}: belongs to another user; set TMPDIR to a directory of yours")
    directory = owned / hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    copy = directory / (f"{name}.jsonl" if path.suffix in TABLES else name)
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process of a host copies, the others wait
        size = directory / "size"  # written last
        if not (size.exists() and copy.exists() and size.read_text() == str(copy.stat().st_size)):
            partial = directory / ".partial"
            try:
                with path.open("rb") as source, partial.open("wb") as target:
                    _copy(path, source, target, text_field)
                    target.flush()
                    os.fsync(target.fileno())
                if _version(path) != version:
                    raise ValueError(f"{path}: was changed while it was copied; start again")
                os.replace(partial, copy)
                size.write_text(str(copy.stat().st_size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise ValueError(f"{path}: its copy does not fit in {owned}; set TMPDIR to a larger disk") from error
            finally:
                partial.unlink(missing_ok=True)
    return copy


def _version(path: AnyPath) -> str:
    if isinstance(path, ObjectPath):
        found = path.entry()
        return f"{found['size']} {found['e_tag']}"
    return f"{path.absolute()} {mark_of(path)}"


def _copy(path: AnyPath, source: Any, target: IO[bytes], text_field: str | None) -> None:
    if path.suffix in TABLES:
        for row in _rows(path, source, text_field):
            target.write(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n")
        return
    if path.suffix == ".gz":
        source = gzip.GzipFile(fileobj=source)
    elif path.suffix == ".zst":
        pa = load("pyarrow", "data")
        source = pa.CompressedInputStream(pa.PythonFile(source), "zstd")
    try:
        shutil.copyfileobj(source, target, _BYTES)
    except (EOFError, zlib.error, ValueError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # a disk or a store failed; errors of gzip and pyarrow have none
            raise
        raise ValueError(f"{path}: cannot be decompressed ({error}); copy it again, or leave it out") from error


def _rows(path: AnyPath, source: Any, text_field: str | None) -> Iterator[dict[str, Any]]:
    """Yield the records of a table, with the fields of their form only."""
    pa = load("pyarrow", "data")
    try:
        if path.suffix == ".parquet":
            table = load("pyarrow.parquet", "data").ParquetFile(source, pre_buffer=True)
            fields = _fields(path, table.schema_arrow, text_field)
            batches: Iterable[Any] = table.iter_batches(batch_size=1024, columns=fields)
        else:  # written by datasets as a stream
            table = load("pyarrow.ipc", "data").open_stream(source)
            fields = _fields(path, table.schema, text_field)
            batches = (batch.select(fields) for batch in table)
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            if len(fields) == 1 and row[fields[0]] is None:
                raise ValueError(f"{path}, row {number}: column {fields[0]!r} is null; leave such rows out")
            yield _without_nulls(row)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]} ({error}); write it again") from error


def _without_nulls(value: Any) -> Any:
    """Remove null fields, which a table has where a record lacks a field that others have."""
    if isinstance(value, dict):
        return {name: _without_nulls(x) for name, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def _fields(path: AnyPath, schema: Any, text_field: str | None) -> list[str]:
    """Return the columns to read: of the text, or of the first form whose columns the table has."""
    kinds, name = {field.name: str(field.type) for field in schema}, text_field or "text"
    form = "text" if text_field else form_of(dict.fromkeys(kinds, ""), None)
    if form not in ("text", None):
        return [column for column in kinds if column in READ[form]]
    if re.match("(dictionary<values=)?(large_)?string", kinds.get(name, "")):
        return [name]
    columns = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
    others = "" if text_field else f", or one of: {KNOWN}"
    raise ValueError(
        f"{path}: has columns {columns}, but needs a column {name!r} of type string{others}; name the column of the "
        "text with text_field="
    )
