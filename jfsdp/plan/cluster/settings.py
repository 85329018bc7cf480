"""Environment variables that stop or slow a run: XLA's flags and NCCL's. Texts in, findings out."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping


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


_ON, _OFF = "|1|true|yes|on", "0|false|no|off"

# What a value does, by the name of a flag or variable: values that match, in lower case, and their effect.
_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler": (_OFF, "no collective overlaps with compute"),
    "xla_gpu_disable_async_collectives": (".*all.*", "collectives wait for compute and compute for them"),
    "xla_disable_hlo_passes": (".*latency-hiding.*", "no collective overlaps with compute"),
    "xla_gpu_autotune_level": ("0", "matmuls take the first kernel and not the fastest"),
    "xla_backend_optimization_level": ("0|1", "kernels are compiled without optimization"),
}
_NCCL = {
    "NCCL_P2P_DISABLE": (_ON, "GPUs of a node talk through host memory and not over NVLink"),
    "NCCL_SHM_DISABLE": (_ON, "processes of a node that have no direct link talk over the network"),
    "NCCL_IB_DISABLE": (_ON, "nodes talk over TCP and not over InfiniBand or RoCE"),
    "NCCL_NET": ("socket", "nodes talk over TCP and not over InfiniBand or RoCE"),
    "NCCL_SOCKET_IFNAME": ("=?lo", "other nodes are not reached"),
}


def check_settings(env: Mapping[str, str]) -> list[Finding]:
    """Return what the variables of an environment do to a run."""
    parts = (part.lstrip("-").partition("=") for part in env.get("XLA_FLAGS", "").split() if part.startswith("--"))
    flags = {name: value for name, _, value in parts}  # without a value, the empty text, which XLA reads as true
    found = []
    for rules, values, prefix in ((_FLAGS, flags, "XLA_FLAGS --"), (_NCCL, env, "")):
        for name, (pattern, effect) in rules.items():
            value = values.get(name)
            if value is not None and re.fullmatch(pattern, value.strip().lower()):
                topic = f"{prefix}{name}={value}" if value else f"{prefix}{name}"
                found.append(Finding(Severity.PROBLEM, topic, effect, "unset it"))
    return found
