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


def read_record(line: bytes, form: str | None, text_field: str | None) -> tuple[str, Any]:
    """Parse a line; return its form, and the record, or its text where that is its form.

    Args:
      form: that it is to have; None: any.

    Raises:
      ValueError: if it is not a JSON object of that form.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); write one JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{type(record).__name__}, and not a JSON object; write one per line")
    found = form_of(record, text_field)
    fields = ", ".join(sorted(name for name, value in record.items() if value is not None)) or "no fields"
    if found is None and text_field is not None:
        raise ValueError(
            f"no string field {text_field!r} (found: {fields}); name the field that holds the text with text_field="
        )
    if found is None:
        known = "; ".join(" and ".join(fields) for fields in FORMS.values())
        raise ValueError(
            f"has fields {fields}, and a record needs one of: {known}; or name the field that holds a text with "
            "text_field="
        )
    if form not in (None, found):
        raise ValueError(
            f"its fields ({fields}) make it of form {found}, and the data before it are of form {form}; data of "
            "several forms are several sources, such as --data 'a.jsonl:1,b.jsonl:1'"
        )
    if found != "text":
        return found, record
    text = record[text_field or "text"]
    if not isinstance(text, str):
        raise ValueError(f"no string field {text_field or 'text'!r}; write text there")
    return found, as_text(text)


def place(path: Path, offset: int) -> str:
    """Return "path, line N" of what begins at a byte of a file."""
    with path.open("rb") as file:
        number = 1
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{path}, line {number}"
