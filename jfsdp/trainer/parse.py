"""Texts of options as values: what each takes, and what is said of any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

OFFLOADABLE = ("params", "grads", "opt_state")
REMATS = "none, full, dots, names:a,b, offload:c, or names:a,b+offload:c"


def split_pair(option: str, pair: str, form: str, example: str) -> tuple[str, str]:
    """Read a pair such as NAME=VALUE; the value may have a `=` of its own.

    Raises:
      ValueError: if there is no `=`, or nothing before it; with an example.
    """
    first, equals, last = pair.partition("=")
    if not first or not equals:
        raise ValueError(f"{option} {pair!r} is not {form}, such as {example}")
    return first, last


def parse_xla(pairs: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE pairs; values are whole numbers, true, false, none (which takes the option away), or text.

    Raises:
      ValueError: if a pair has no `=`.
    """
    words = {"true": True, "false": False, "none": None}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, value = split_pair("--xla", pair, "NAME=VALUE", "xla_gpu_enable_latency_hiding_scheduler=true")
        found[name] = words[value.lower()] if value.lower() in words else int(value) if value.isdecimal() else value
    return found


def word_or_none(text: str | None) -> str | None:
    """Read `none` as None."""
    return None if text is None or text.lower() == "none" else text


def split_commas(texts: Sequence[str]) -> list[str]:
    """Read `a,b c` as three words."""
    return [word for text in texts for word in text.split(",") if word]


def split_given(option: str, texts: Sequence[str]) -> list[str]:
    """Read the words of an option, of which there is one at least where it is given.

    Raises:
      ValueError: if there is none.
    """
    words = split_commas(texts)
    if texts and not words:
        raise ValueError(f"{option} {texts[0]!r} names nothing; leave it out")
    return words


def parse_lora(text: str) -> Any:
    """Read KEY=VALUE,...: the fields of a `LoRA`; what has no `=` is one more value of the key before.

    Raises:
      ValueError: for a key that is none, and a value that is not the key's.
    """
    from jfsdp.layout.lora import LoRA

    kinds = {"rank": int, "alpha": float, "dropout": float, "rslora": bool, "dora": bool, "targets": list, "also": list}
    found: dict[str, list[str]] = {}
    key = ""
    for word in split_commas([text]):
        first, equals, last = word.partition("=")
        key, value = (first, last) if equals else (key, word)
        if not key:
            raise ValueError(f"--lora {text!r}: {word!r} is not KEY=VALUE; the keys are {', '.join(kinds)}")
        found.setdefault(key, []).extend([value] if value else [])
    fields: dict[str, Any] = {}
    for key, values in found.items():
        if key not in kinds:
            raise ValueError(f"--lora {text!r}: there is no {key!r}; the keys are {', '.join(kinds)}")
        fields[key] = values if kinds[key] is list else _lora_value(text, key, values, kinds[key])
    if not fields.get("targets"):
        raise ValueError(
            f"--lora {text!r}: has no targets; name the matrices: targets=**.q_proj.kernel,**.v_proj.kernel"
        )
    return LoRA(**fields)


def parse_quantized(pairs: Sequence[str]) -> dict[str, str]:
    """Read GLOB=CODEC pairs.

    Raises:
      ValueError: if a pair has no `=`.
    """
    found = {}
    for pair in pairs:
        glob, codec = split_pair("--quantized", pair, "GLOB=CODEC", "'**.mlp.*.kernel=nf4'")
        if found.get(glob, codec) != codec:
            raise ValueError(f"--quantized {glob} is given {found[glob]} and {codec}; say one")
        found[glob] = codec
    return found


def parse_factors(pairs: Sequence[str]) -> dict[str, float]:
    """Read GLOB=X pairs.

    Raises:
      ValueError: if a pair has no `=`, or X is no number from 0 on.
    """
    found, form = {}, "GLOB=X with a number X from 0 on"
    for pair in pairs:
        glob, text = split_pair("--rate-scale", pair, form, "embed=0.1")
        try:
            found[glob] = float(text)
        except ValueError:
            found[glob] = math.nan
        if not 0 <= found[glob] < math.inf:
            raise ValueError(f"--rate-scale {pair!r} is not {form}, such as embed=0.1")
    return found


def _lora_value(text: str, key: str, values: list[str], kind: type) -> Any:
    try:
        (value,) = values
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError):
        what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ValueError(f"--lora {text!r}: {key}={','.join(values)} is not {what}") from None


def parse_offload(texts: Sequence[str]) -> list[str]:
    """Read what is to be offloaded.

    Raises:
      ValueError: for anything that cannot be.
    """
    words = split_given("--offload", texts)
    unknown = [word for word in words if word not in OFFLOADABLE]
    if unknown:
        raise ValueError(
            f"--offload {unknown[0]!r} is unknown; use any of {', '.join(OFFLOADABLE)}, separated by commas "
            "(activations: --remat offload:NAME)"
        )
    return words


def parse_reshard(text: str) -> bool | int | str | None:
    """Read none, true, false, node or a number of devices.

    Raises:
      ValueError: for anything else.
    """
    words = {"none": None, "true": True, "false": False, "node": "node"}
    if text.lower() in words:
        return words[text.lower()]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--reshard-after-forward {text!r} is not none, true, false, node or a number of devices")
    return int(text)


def parse_remat(text: str) -> Any:
    """Read none, full, dots, or names to save and to offload: `names:a,b+offload:c`.

    Raises:
      ValueError: for anything else.
    """
    from jfsdp.layout.policy import REMATS as PLAIN
    from jfsdp.layout.policy import SaveNames

    if text in PLAIN:
        return text
    fields: dict[str, tuple[str, ...]] = {}
    for part in text.split("+"):
        kind, _, names = part.partition(":")
        field = {"names": "save", "offload": "offload"}.get(kind)
        if field is None or field in fields or not split_commas([names]):
            raise ValueError(f"--remat {text!r} is unknown; use {REMATS}")
        fields[field] = tuple(split_commas([names]))
    try:
        return SaveNames(**fields)
    except ValueError as error:
        raise ValueError(f"--remat {text!r}: {error}") from error
