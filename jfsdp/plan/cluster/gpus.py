"""GPUs as data: the chip, its memory, its links, its peaks. No JAX, no devices."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from jfsdp.arguments import Amount, Count, Share, Size, checked, did_you_mean

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_Rate = Annotated[float, 1]


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual server. Bandwidths are bytes/s per GPU in one direction; FLOP/s without sparsity.

    `memory_bytes` is what CUDA reports, a little less than what is printed on the box. `link_bandwidth` joins the GPUs
    of a domain, at most `domain_size` of them, over `link`; other domains are reached over `network_bandwidth`. Only
    where `is_domain_of_nodes` can several nodes form one domain. `peak` is by dtype; float32 is without TF32.
    `link_efficiency` is the part of a link's datasheet bandwidth that a large collective gets, where `measured_links`
    has none: assumed 0.8 for NVLink (8 H100 get 0.89, measured), 0.6 for PCIe. `measured_links` are (bytes, bus
    bandwidth) of all-gathers inside a node, `measured_matmul` is (dtype, (m, n, k), FLOP/s) of one on a quiet GPU.
    `sustained` is the part of such rates that is left in a step that runs for hours, where the power limit lowers the
    clock: fitted to published runs for the A100 and the H100 (scripts/fit_clock.py), assumed to be the H100's for all
    others. The GPUs that are known, with the source of each number, are in gpus.toml.
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
        """Return the datasheet's FLOP/s for matrices of `dtype`: bfloat16, float16, tf32 or float32.

        Raises:
          ValueError: for a dtype that the table lacks.
        """
        rates = dict(self.peak)
        key = dtype_name(dtype)
        if key not in rates:
            raise ValueError(f"{self.name}: no FLOP/s known for dtype {dtype!r}; known are {', '.join(rates)}")
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
        f"no GPU is called {name!r}{did_you_mean(key, by_name)}; there are {', '.join(known)}; a file FILE.toml may "
        "describe another"
    )


GPUS = _read_table()


@checked
def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name or alias, upper or lower case, or the one that a file describes.

    Args:
      name: one of gpus.toml, or FILE.toml with the fields of a `Gpu`; `like = "h100"` takes those that it leaves out
        from a known one. The name of the file, without `.toml`, becomes its name.

    Raises:
      ValueError: if there is none, listing those there are, the closest first; if the file cannot be read as a GPU.
    """
    known = {gpu.name: gpu for gpu in GPUS}
    if not name.endswith(".toml"):
        return _find(name, known)
    try:
        path = Path(name).expanduser()
        return _make(path.stem, tomllib.loads(path.read_text(encoding="utf-8")), known)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{name} describes no GPU: {error}; docs/plan.md has an example") from None
