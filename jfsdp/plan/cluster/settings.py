"""Environment variables that stop or slow a run: XLA's flags and NCCL's. Texts in, findings out."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping


class Severity(enum.StrEnum):
    """A problem is wrong and fails the examination; a note is worth knowing."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found: about what, what is the matter, and what to do."""

    severity: Severity
    topic: str
    text: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What a value of one variable or flag means. Names and values are compared in lower case."""

    name: str
    applies: Callable[[str], bool]
    effect: str


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _has(part: str) -> Callable[[str], bool]:
    return lambda value: part in value


_ON = _is("", "1", "true", "yes", "on")
_OFF = _is("0", "false", "no", "off")

_FLAGS = (
    _Rule("xla_gpu_enable_latency_hiding_scheduler", _OFF, "no collective overlaps with compute"),
    _Rule("xla_gpu_disable_async_collectives", _has("all"), "collectives wait for compute and compute for them"),
    _Rule("xla_disable_hlo_passes", _has("latency-hiding"), "no collective overlaps with compute"),
    _Rule("xla_gpu_autotune_level", _is("0"), "matmuls take the first kernel and not the fastest"),
    _Rule("xla_backend_optimization_level", _is("0", "1"), "kernels are compiled without optimization"),
)
_NCCL = (
    _Rule("NCCL_P2P_DISABLE", _ON, "GPUs of a node talk through host memory and not over NVLink"),
    _Rule("NCCL_SHM_DISABLE", _ON, "processes of a node that have no direct link talk over the network"),
    _Rule("NCCL_IB_DISABLE", _ON, "nodes talk over TCP and not over InfiniBand or RoCE"),
    _Rule("NCCL_NET", _is("socket"), "nodes talk over TCP and not over InfiniBand or RoCE"),
    _Rule("NCCL_SOCKET_IFNAME", _is("lo", "=lo"), "other nodes are not reached"),
)


def check_settings(env: Mapping[str, str]) -> list[Finding]:
    """Return what the variables of an environment do to a run."""
    parts = (part.lstrip("-").partition("=") for part in env.get("XLA_FLAGS", "").split() if part.startswith("--"))
    flags = {name: value for name, _, value in parts}  # without a value, the empty text, which XLA reads as true
    found = []
    for rules, values, prefix in ((_FLAGS, flags, "XLA_FLAGS --"), (_NCCL, env, "")):
        for rule in rules:
            value = values.get(rule.name)
            if value is not None and rule.applies(value.strip().lower()):
                topic = f"{prefix}{rule.name}={value}" if value else f"{prefix}{rule.name}"
                found.append(Finding(Severity.PROBLEM, topic, rule.effect, "unset it"))
    return found
