"""Descriptions of GPUs: cores, memory, links and peak rates. Does not import JAX."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from jfsdp.arguments import Amount, Count, Share, Size, checked, did_you_mean

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f8e4m3fn": "float8", "f8e5m2": "float8"}
_Rate = Annotated[float, 1]


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual server. The known GPUs, with the source of each number, are in gpus.toml.

    Bandwidths are bytes/s per GPU in one direction. FLOP/s are without sparsity.

    Attributes:
      memory_bytes: as CUDA reports it, slightly less than the nominal size.
      peak: FLOP/s by dtype; float32 is without TF32.
      link, link_bandwidth: connect the GPUs of a domain, at most `domain_size`.
      network_bandwidth: to other domains.
      is_domain_of_nodes: whether several nodes can form one domain.
      link_efficiency: the share of the datasheet's link bandwidth that a large collective reaches, without
        `measured_links`. Assumed 0.8 for NVLink (measured on 8 H100: 0.89), 0.6 for PCIe.
      measured_links: (bytes, bus bandwidth) of all-gathers inside a node.
      measured_matmul: (dtype, (m, n, k), FLOP/s) of a matmul on an otherwise idle GPU.
      sustained: the share of such rates that remains in long runs, where the power limit lowers the clock. Fitted to
        published runs for the A100 and the H100 (scripts/fit_clock.py); assumed to be the H100's for others.
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    num_cores: Count
    fpus_per_core: Count = 128
    threads_per_core: Count = 2048
    shared_memory_per_core: Count
    shared_memory_per_block: Count
    l2_bytes: Count
    clock_ghz: Amount
    memory_bytes: Count
    memory_bandwidth: _Rate
    peak: tuple[tuple[str, _Rate], ...]
    link: str
    num_links: Size
    link_bandwidth: _Rate
    domain_size: Count = 8
    gpus_per_node: Count = 8
    network_bandwidth: _Rate
    host_bandwidth: _Rate
    source: str
    is_domain_of_nodes: bool = False
    link_efficiency: Share = 0.8
    measured_links: tuple[tuple[Count, _Rate], ...] = ()
    measured_matmul: tuple[str, tuple[Count, Count, Count], _Rate] | None = None
    sustained: Share = 0.82
    aliases: tuple[str, ...] = ()

    def peak_flops(self, dtype: str) -> float:
        """Return the datasheet's FLOP/s for matrices of `dtype`: float8, bfloat16, float16, tf32 or float32.

        Raises:
          ValueError: for a dtype without a known rate.
        """
        rates = dict(self.peak)
        key = dtype_name(dtype)
        if key not in rates:
            raise ValueError(f"{self.name}: FLOP/s for dtype {dtype!r} are unknown; known are {', '.join(rates)}")
        return rates[key]


def dtype_name(dtype: str) -> str:
    """Return the long name of a dtype: bf16 is bfloat16."""
    return _DTYPES.get(str(dtype), str(dtype))


def _read_table() -> tuple[Gpu, ...]:
    rows = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    known: dict[str, Gpu] = {}
    for name, row in rows.items():
        known[name] = _make(name, row, known)
    return tuple(known.values())


def _make(name: str, row: Mapping[str, Any], known: Mapping[str, Gpu]) -> Gpu:
    fields: dict[str, Any] = {"name": name} | {field: _freeze(value) for field, value in row.items()}
    if "like" in fields:
        fields = vars(_find(fields.pop("like"), known)) | {"aliases": ()} | fields
    fields["measured_matmul"] = fields.get("measured_matmul") or None
    return Gpu(**fields)


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _find(name: str, known: Mapping[str, Gpu]) -> Gpu:
    by_name = {key: gpu for gpu in known.values() for key in (gpu.name, *gpu.aliases)}
    key = str(name).strip().lower().replace("_", "-").replace(" ", "-")
    if key in by_name:
        return by_name[key]
    raise ValueError(
        f"no GPU is called {name!r}{did_you_mean(key, by_name)}; there are {', '.join(known)}; describe others in a "
        "file FILE.toml"
    )


GPUS = _read_table()


def gpu_of_device(kind: str) -> Gpu | None:
    """Return the GPU of a JAX device by its `device_kind`, or None if it is unknown."""
    return next((gpu for gpu in GPUS if len(kind) > len("NVIDIA ") and gpu.full_name.startswith(kind)), None)


@checked
def find_gpu(name: str) -> Gpu:
    """Return a GPU by name or alias, or from a file.

    Args:
      name: a name of gpus.toml, in upper or lower case, or FILE.toml with the fields of a `Gpu`. `like = "h100"` in the
        file copies missing fields from a known GPU. The GPU is named FILE.

    Raises:
      ValueError: for an unknown name, with the known ones, the closest first; for a file that does not describe a GPU.
    """
    known = {gpu.name: gpu for gpu in GPUS}
    if not name.endswith(".toml"):
        return _find(name, known)
    try:
        path = Path(name).expanduser()
        return _make(path.stem, tomllib.loads(path.read_text(encoding="utf-8")), known)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{name} does not describe a GPU: {error}; docs/plan.md has an example") from None
