"""The form of a line of JSONL: a text, a conversation, a prompt and its completion, or a choice between answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jfsdp.trainer.data.tokenizer import as_text

# Form -> the fields by which a record is known; the first whose fields are all there. Some data sets keep the prompt
# beside the messages that begin with it.
FORMS = {
    "messages": ("messages",),
    "pairs": ("chosen", "rejected"),
    "prompt": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
# Form -> the fields that are read.
_MORE = {"pairs": ("prompt",), "sharegpt": ("system",), "alpaca": ("system", "history", "input")}
READ = {form: {*fields, "tools", *_MORE.get(form, ())} for form, fields in FORMS.items()}
Record = Mapping[str, Any]


def form_of(record: Record, text_field: str | None) -> str | None:
    """Return the form of a record; None: of none of them.

    Args:
      text_field: the field that holds the text; then every record is a text. None: found by looking.
    """
    if text_field is not None:
        return "text" if isinstance(record.get(text_field), str) else None
    there = {name for name, value in record.items() if value is not None}
    return next((form for form, fields in FORMS.items() if there.issuperset(fields)), None)


def read_record(line: bytes, path: Path, offset: int) -> Record:
    """Parse a line.

    Raises:
      ValueError: naming file and line, if it is no JSON object.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place(path, offset)}: not JSON ({error}); write one JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place(path, offset)}: {type(record).__name__}, and not a JSON object; write one per line")
    return record


def check_form(record: Record, form: str | None, text_field: str | None, path: Path, offset: int) -> str:
    """Return the form of a record, which is to be `form` if that is given.

    Raises:
      ValueError: naming file and line and what there is instead.
    """
    found = form_of(record, text_field)
    if found is not None and form in (None, found):
        return found
    fields = ", ".join(sorted(name for name, value in record.items() if value is not None)) or "no fields"
    if found is not None:
        raise ValueError(
            f"{place(path, offset)}: its fields ({fields}) make it of form {found}, and the data before it are of form "
            f"{form}; data of several forms are several sources, such as --data 'a.jsonl:1,b.jsonl:1'"
        )
    if text_field is not None:
        raise ValueError(
            f"{place(path, offset)}: no string field {text_field!r} (found: {fields}); name the field that holds the "
            "text with text_field="
        )
    known = "; ".join(" and ".join(fields) for fields in FORMS.values())
    raise ValueError(
        f"{place(path, offset)}: has fields {fields}, and a record needs one of: {known}; or name the field that holds "
        "a text with text_field="
    )


def text_of(record: Record, text_field: str | None, path: Path, offset: int) -> str:
    """Return the text of a record; see `as_text`.

    Raises:
      ValueError: if it is no string.
    """
    text = record[text_field or "text"]
    if not isinstance(text, str):
        raise ValueError(f"{place(path, offset)}: no string field {text_field or 'text'!r}; write text there")
    return as_text(text)


def place(path: Path, offset: int) -> str:
    """Return "path, line N" of what begins at a byte of a file."""
    with path.open("rb") as file:
        number = 1
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{path}, line {number}"
