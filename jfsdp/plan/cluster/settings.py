"""Environment variables that stop or slow a run: XLA's flags, NCCL's, JAX's memory. Texts in, findings out."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence


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
    severity: Severity
    effect: str
    remedy: str = "unset it"


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _has(part: str) -> Callable[[str], bool]:
    return lambda value: part in value


def _below(limit: int) -> Callable[[str], bool]:
    return lambda value: value.lstrip("-").isdigit() and int(value) < limit


def _always(value: str) -> bool:
    return True


_ON = _is("", "1", "true", "yes", "on")
_OFF = _is("0", "false", "no", "off")
_P, _N = Severity.PROBLEM, Severity.NOTE
_TINY = "makes XLA issue a collective for nearly every tensor instead of combining them"

_FLAGS = (
    _Rule("xla_gpu_enable_latency_hiding_scheduler", _OFF, _P, "no collective overlaps with compute"),
    _Rule("xla_gpu_disable_async_collectives", _has("all"), _P, "collectives wait for compute and compute for them"),
    _Rule("xla_disable_hlo_passes", _has("latency-hiding"), _P, "no collective overlaps with compute"),
    _Rule("xla_gpu_all_gather_combine_threshold_bytes", _below(2**20), _P, _TINY),
    _Rule("xla_gpu_reduce_scatter_combine_threshold_bytes", _below(2**20), _P, _TINY),
    _Rule("xla_gpu_all_reduce_combine_threshold_bytes", _below(2**20), _P, _TINY),
    _Rule("xla_gpu_autotune_level", _is("0"), _P, "matmuls take the first kernel and not the fastest"),
    _Rule("xla_backend_optimization_level", _is("0", "1"), _P, "kernels are compiled without optimization"),
    _Rule(
        "xla_gpu_deterministic_ops", _ON, _N, "bits repeat, at some cost in speed", "unset it unless bits must repeat"
    ),
    _Rule(
        "xla_gpu_exclude_nondeterministic_ops",
        _ON,
        _N,
        "some kernels are ruled out",
        "unset it unless bits must repeat",
    ),
    _Rule("xla_dump_to", _always, _N, "every compilation writes files", "unset it for long runs"),
    _Rule(
        "xla_force_host_platform_device_count", _always, _N, "the CPU looks like several devices", "unset it to train"
    ),
)

_NCCL = (
    _Rule("NCCL_P2P_DISABLE", _ON, _P, "GPUs of a node talk through host memory and not over NVLink"),
    _Rule("NCCL_P2P_LEVEL", _is("loc", "0"), _P, "GPUs of a node talk through host memory and not over NVLink"),
    _Rule("NCCL_SHM_DISABLE", _ON, _P, "processes of a node that have no direct link talk over the network"),
    _Rule("NCCL_IB_DISABLE", _ON, _P, "nodes talk over TCP and not over InfiniBand or RoCE"),
    _Rule("NCCL_NET", _is("socket"), _P, "nodes talk over TCP and not over InfiniBand or RoCE"),
    _Rule(
        "NCCL_SOCKET_IFNAME",
        _is("lo", "=lo"),
        _P,
        "other nodes are not reached",
        "name a network interface, or unset it",
    ),
    _Rule("NCCL_DEBUG", _is("trace"), _P, "every call is printed", "set it to WARN"),
    _Rule("NCCL_DEBUG", _is("info"), _N, "each process prints hundreds of lines at its start", "set it to WARN"),
    _Rule("NCCL_NVLS_ENABLE", _OFF, _N, "the switches do not reduce (NVLink SHARP)"),
    _Rule("NCCL_NET_GDR_LEVEL", _is("loc", "0"), _N, "data for other nodes goes through host memory"),
    _Rule("NCCL_MAX_NCHANNELS", _below(4), _P, "few channels cannot fill the links"),
    _Rule("NCCL_ALGO", _always, _N, "NCCL may not choose by message size"),
    _Rule("NCCL_PROTO", _always, _N, "NCCL may not choose by message size"),
)

_JAX = (
    _Rule("JAX_DISABLE_JIT", _ON, _P, "nothing is compiled"),
    _Rule("JAX_DEBUG_NANS", _ON, _P, "every result is copied to the host and looked through"),
    _Rule("JAX_ENABLE_X64", _ON, _N, "values without a stated dtype take twice the bytes"),
    _Rule("JAX_DEFAULT_MATMUL_PRECISION", _is("highest", "float32"), _N, "float32 matmuls run without TF32"),
    _Rule("CUDA_LAUNCH_BLOCKING", _ON, _P, "the host waits for every kernel"),
)

_MEMORY = (
    _Rule("XLA_PYTHON_CLIENT_ALLOCATOR", _is("platform"), _P, "every buffer is asked of the driver, which is slow"),
    _Rule("XLA_PYTHON_CLIENT_PREALLOCATE", _OFF, _N, "memory is taken piece by piece, and may fragment near the limit"),
    _Rule("TF_GPU_ALLOCATOR", _always, _N, "it is TensorFlow's; JAX goes by XLA_PYTHON_CLIENT_ALLOCATOR"),
    _Rule("TF_FORCE_UNIFIED_MEMORY", _ON, _P, "what does not fit is paged to the host without a word"),
)


def check_settings(env: Mapping[str, str]) -> list[Finding]:
    """Return what all variables of an environment do to a run."""
    return [
        *check_xla_flags(env.get("XLA_FLAGS", "")),
        *check_nccl_settings(env),
        *check_jax_settings(env),
        *check_memory_settings(env),
    ]


def check_xla_flags(text: str) -> list[Finding]:
    """Return what the flags of an XLA_FLAGS text that XLA knows do to a run."""
    return list(_apply(_FLAGS, parse_flags(text), lambda name, value: f"XLA_FLAGS --{name}{value}"))


def parse_flags(text: str) -> dict[str, str]:
    """Return flags by name; without a value, the empty text, which XLA reads as true."""
    pairs = (part.lstrip("-").partition("=") for part in text.split() if part.startswith("--"))
    return {name: value for name, _, value in pairs}


def check_nccl_settings(env: Mapping[str, str]) -> list[Finding]:
    """Return what NCCL's variables do to a run."""
    return list(_apply(_NCCL, env))


def check_jax_settings(env: Mapping[str, str]) -> list[Finding]:
    """Return what JAX's and CUDA's debugging variables do to a run."""
    return list(_apply(_JAX, env))


def check_memory_settings(env: Mapping[str, str]) -> list[Finding]:
    """Return what the variables of JAX's allocator do to a run; the part of the memory that it may take above all."""
    found = list(_apply(_MEMORY, env))
    new, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    given = [name for name in (new, old) if env.get(name)]
    if len(given) == 2:
        found.append(Finding(_P, new, f"is set together with {old}, its older name; JAX refuses both", f"unset {old}"))
    for name in given:
        found.extend(_check_fraction(name, env[name]))
    return found


def _check_fraction(name: str, text: str) -> Iterator[Finding]:
    topic = f"{name}={text}"
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", text) or not float(text):
        yield Finding(_P, topic, "is not a part of the memory", "give a number such as 0.95")
    elif float(text) > 1:
        yield Finding(
            _P, topic, "is more than the GPU has; what does not fit is paged to the host", "give at most 0.95"
        )
    elif float(text) > 0.95:
        yield Finding(_P, topic, "leaves NCCL, cuDNN and CUDA too little outside of JAX's share", "give at most 0.95")
    elif float(text) < 0.75:
        yield Finding(_P, topic, "gives JAX less than its default share of 0.75", "unset it, or give 0.95")


def _apply(
    rules: Sequence[_Rule], values: Mapping[str, str], topic: Callable[[str, str], str] = "{}{}".format
) -> Iterator[Finding]:
    for rule in rules:
        value = values.get(rule.name)
        if value is not None and rule.applies(value.strip().lower()):
            shown = f"={value}" if value else ""
            yield Finding(rule.severity, topic(rule.name, shown), rule.effect, rule.remedy)
