"""Records of a run as text, and texts made safe for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe(record: Mapping[str, Any]) -> str:
    """Say a record in one line: `loss 2.3126  lr 0.0003  12,345 tokens/s  MFU 41.2 %  3.1 GiB`.

    A dash stands for what is not known.
    """
    (name,) = (name for name in record if name.endswith("s_per_s"))
    rate, mfu, items = record[name], record["mfu"], name.removesuffix("_per_s")
    held_out = "" if record["eval_loss"] is None else f"held-out loss {record['eval_loss']:.4f}{accuracy(record)}  "
    return (
        f"loss {record['loss']:.4f}  {held_out}lr {record['learning_rate']:.3g}  "
        f"{'-' if rate is None else format(rate, ',.0f')} {items}/s  "
        f"MFU {'-' if mfu is None else format(100 * mfu, '.1f') + ' %'}  {record['memory_bytes'] / 2**30:.2f} GiB"
    )


def harmless(text: str) -> str:
    """Return text of a model or of a file for a terminal: what would steer one is replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def accuracy(record: Mapping[str, Any]) -> str:
    """Say the held-out accuracy of a record: `, accuracy 97.21 %`; nothing where it is not known."""
    correct = record.get("eval_correct")
    return "" if correct is None else f", accuracy {100 * correct:.2f} %"
