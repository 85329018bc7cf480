"""Forms of JSONL records: texts, conversations, prompts with completions, pairs of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jfsdp.trainer.data.tokenizer import as_text

# Form -> its fields. A record has the first form whose fields it has; some data sets have prompt in addition to
# messages.
FORMS = {
    "messages": ("messages",),
    "pairs": ("chosen", "rejected"),
    "prompt": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
KNOWN = "; ".join(" and ".join(fields) for fields in FORMS.values())
# Form -> the fields that are used.
_MORE = {"pairs": ("prompt",), "sharegpt": ("system",), "alpaca": ("system", "history", "input")}
READ = {form: {*fields, "tools", *_MORE.get(form, ())} for form, fields in FORMS.items()}
Record = Mapping[str, Any]


def form_of(record: Record, text_field: str | None) -> str | None:
    """Return the form of a record, or None.

    Args:
      text_field: field that contains the text; every record is then a text. None: detect the form from the fields.
    """
    if text_field is not None:
        return "text" if isinstance(record.get(text_field), str) else None
    present = {name for name, value in record.items() if value is not None}
    return next((form for form, fields in FORMS.items() if present.issuperset(fields)), None)


def read_record(line: bytes, form: str | None, text_field: str | None) -> tuple[str, Any]:
    """Parse a line. Return its form and the record; for form "text", the text.

    Args:
      form: required form; None: any.

    Raises:
      ValueError: if it is not a JSON object of that form.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({getattr(error, 'msg', error)}); write one JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{type(record).__name__} and not a JSON object; write one object per line")
    found = form_of(record, text_field)
    fields = ", ".join(sorted(name for name, value in record.items() if value is not None)) or "no fields"
    if found is None and text_field is not None:
        raise ValueError(f"no string field {text_field!r} (found: {fields}); name the text's field with text_field=")
    if found is None:
        raise ValueError(
            f"has fields {fields}, but a record needs one of: {KNOWN}; or name the field of the text with text_field="
        )
    if form not in (None, found):
        raise ValueError(
            f"its fields ({fields}) are of form {found}, but previous records are of form {form}; name one source per "
            "form, such as --data 'a.jsonl:1,b.jsonl:1'"
        )
    if found != "text":
        return found, record
    text = record[text_field or "text"]
    if not isinstance(text, str):
        raise ValueError(f"no string field {text_field or 'text'!r}; write text there")
    return found, as_text(text)


def line_number(path: Path, offset: int) -> int:
    """Return the number of the line at a byte offset of a file."""
    with path.open("rb") as file:
        number = 1
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return number
