"""GPUs as data: the chip, its memory, its links, its peaks. No JAX, no devices.

Every number has a source: *measured* where we know a measurement, *datasheet* for what the maker prints (always without
sparsity), *CUDA* for what the driver reports (as in XLA's published target specifications), else *assumed*.
"""

from __future__ import annotations

import dataclasses
import difflib

from jfsdp.arguments import checked

_MIB = 2**20
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

# Assumed: the part of a link's datasheet bandwidth that a large collective gets (8 H100 get 0.89, measured).
NVLINK_EFFICIENCY = 0.8
PCIE_EFFICIENCY = 0.6
# Fitted to published runs on H100s; see `Gpu.sustained`.
SUSTAINED = 0.82


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual server. Bandwidths are bytes/s per GPU in one direction; FLOP/s without sparsity.

    `memory_bytes` is what CUDA reports, a little less than what is printed on the box. `link_bandwidth` joins the GPUs
    of a domain, at most `domain_size` of them, over `link`; other domains are reached over `network_bandwidth`. Only
    where `is_domain_of_nodes` can several nodes form one domain. `peak` is by dtype; float32 is without TF32.
    `measured_links` are (bytes, bus bandwidth) of all-gathers inside a node, `measured_matmul` is (dtype, (m, n, k),
    FLOP/s) of one on a quiet GPU. `sustained` is the part of such rates that is left in a step that runs for hours,
    where the power limit lowers the clock: fitted to published runs for the A100 and the H100 (scripts/fit_clock.py),
    assumed to be the H100's for all others.
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int = 128
    threads_per_core: int = 2048
    shared_memory_per_core: int
    shared_memory_per_block: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: float
    peak: tuple[tuple[str, float], ...]
    link: str
    num_links: int
    link_bandwidth: float
    domain_size: int = 8
    gpus_per_node: int = 8
    network_bandwidth: float
    host_bandwidth: float
    source: str
    is_domain_of_nodes: bool = False
    link_efficiency: float = NVLINK_EFFICIENCY
    measured_links: tuple[tuple[int, float], ...] = ()
    measured_matmul: tuple[str, tuple[int, int, int], float] | None = None
    sustained: float = SUSTAINED
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


# Where matmuls were measured by others: the best shape of a search, on a quiet GPU.
_MATMULS = "a bfloat16 matmul as measured in stas00/ml-engineering, compute/accelerator (MAMF)"


def _peak(half: float, tf32: float, float32: float) -> tuple[tuple[str, float], ...]:
    return (("bfloat16", half), ("float16", half), ("tf32", tf32), ("float32", float32))


_A100 = Gpu(
    name="a100-80",
    full_name="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    num_cores=108,
    fpus_per_core=64,
    shared_memory_per_core=167936,
    shared_memory_per_block=166912,
    l2_bytes=40 * _MIB,
    clock_ghz=1.41,
    memory_bytes=85100068864,
    memory_bandwidth=2.039e12,
    peak=_peak(312e12, 156e12, 19.5e12),
    link="NVLink 3",
    num_links=12,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    host_bandwidth=32e9,
    source="datasheet A100 80GB SXM; chip and memory as CUDA reports them; network of a DGX A100, 8 x 200 Gbit/s; "
    f"{_MATMULS}",
    measured_matmul=("bfloat16", (1024, 10240, 5120), 271.2e12),
    sustained=1.0,
    aliases=("a100", "a100-sxm", "a100-80gb", "a100-sxm-80"),
)

_H100 = Gpu(
    name="h100",
    full_name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    num_cores=132,
    shared_memory_per_core=233472,
    shared_memory_per_block=232448,
    l2_bytes=50 * _MIB,
    clock_ghz=1.98,
    memory_bytes=84942979072,
    memory_bandwidth=3.352e12,
    peak=_peak(989.4e12, 494.7e12, 66.9e12),
    link="NVLink 4",
    num_links=18,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    source="datasheet H100 SXM; chip and memory as CUDA reports them; network of a DGX H100, 8 x 400 Gbit/s; "
    "all-gathers on 8 H100 and a bfloat16 matmul measured",
    measured_links=((8 * _MIB, 129e9), (32 * _MIB, 259e9), (128 * _MIB, 344e9), (2048 * _MIB, 402e9)),
    measured_matmul=("bfloat16", (4096, 4096, 4096), 780e12),
    aliases=("h100-sxm", "h100-80", "h100-80gb", "h100-sxm-80"),
)

_B200 = dataclasses.replace(
    _H100,
    name="b200",
    full_name="NVIDIA B200",
    capability=(10, 0),
    num_cores=148,
    l2_bytes=132644864,
    clock_ghz=1.965,
    memory_bytes=191514411008,
    memory_bandwidth=7.672e12,
    peak=_peak(2250e12, 1125e12, 75e12),
    link="NVLink 5",
    link_bandwidth=900e9,
    source="datasheet HGX B200; chip, memory and its bandwidth as CUDA reports them; network of a DGX B200, "
    f"8 x 400 Gbit/s; {_MATMULS}",
    measured_links=(),
    measured_matmul=("bfloat16", (1792, 16128, 3072), 1745e12),
    aliases=("b200-sxm", "hgx-b200"),
)

_L40S = Gpu(
    name="l40s",
    full_name="NVIDIA L40S",
    capability=(8, 9),
    num_cores=142,
    threads_per_core=1536,
    shared_memory_per_core=102400,
    shared_memory_per_block=101376,
    l2_bytes=96 * _MIB,
    clock_ghz=2.52,
    memory_bytes=47674000000,
    memory_bandwidth=864e9,
    peak=_peak(362e12, 183e12, 91.6e12),
    link="PCIe 4 x16",
    num_links=0,
    link_bandwidth=32e9,
    network_bandwidth=25e9,
    host_bandwidth=32e9,
    source="datasheet L40S; assumed: memory bytes (44.4 GiB, with ECC), L2, clock, network of 200 Gbit/s per GPU",
    link_efficiency=PCIE_EFFICIENCY,
    aliases=("l40s-48",),
)

GPUS: tuple[Gpu, ...] = (
    dataclasses.replace(
        _A100,
        name="a100-40",
        full_name="NVIDIA A100-SXM4-40GB",
        memory_bytes=42331013120,
        memory_bandwidth=1.555e12,
        source="datasheet A100 40GB SXM; chip and memory as CUDA reports them; network of a DGX A100, 8 x 200 Gbit/s; "
        f"{_MATMULS}",
        aliases=("a100-40gb", "a100-sxm-40"),
    ),
    _A100,
    _H100,
    dataclasses.replace(
        _H100,
        name="h100-96-500w",
        full_name="NVIDIA H100 96GB HBM2e, 500 W",
        memory_bytes=95 * 2**30,
        memory_bandwidth=2.4e12,
        source="datasheet H100 SXM, with the memory of Grand Teton (torchtitan's reports) and its power limit, which "
        "is concluded from that; assumed: the sustained rate goes with the square root of the power limit",
        sustained=SUSTAINED * (500 / 700) ** 0.5,
        aliases=("h100-500w",),
    ),
    dataclasses.replace(
        _H100,
        name="h100-pcie",
        full_name="NVIDIA H100 PCIe",
        num_cores=114,
        clock_ghz=1.755,
        memory_bandwidth=2.039e12,
        peak=_peak(756e12, 378e12, 51e12),
        link="PCIe 5 x16",
        num_links=0,
        link_bandwidth=64e9,
        source="datasheet H100 PCIe; chip and memory as CUDA reports them; assumed: network of 400 Gbit/s per GPU, "
        "and no NVLink bridge between pairs of cards, since collectives of more than two go over PCIe all the same",
        link_efficiency=PCIE_EFFICIENCY,
        measured_links=(),
        measured_matmul=None,
        aliases=(),
    ),
    dataclasses.replace(
        _H100,
        name="h100-nvl",
        full_name="NVIDIA H100 NVL",
        clock_ghz=1.785,
        memory_bytes=99907000000,
        memory_bandwidth=3.938e12,
        peak=_peak(835e12, 417.5e12, 60e12),
        link="PCIe 5 x16",
        num_links=0,
        link_bandwidth=64e9,
        source="datasheet H100 NVL; assumed: clock, memory bytes (95830 MiB less what CUDA keeps on an H100), network "
        "of 400 Gbit/s per GPU; the NVLink bridge of a pair is not counted: more than two cards talk over PCIe",
        link_efficiency=PCIE_EFFICIENCY,
        measured_links=(),
        measured_matmul=None,
        aliases=("h100-94", "h100-nvl-94"),
    ),
    dataclasses.replace(
        _H100,
        name="h200",
        full_name="NVIDIA H200 141GB HBM3e",
        memory_bytes=151397597184,
        memory_bandwidth=4.8e12,
        source="datasheet H200 SXM; chip and memory as CUDA reports them; network of a DGX H200, 8 x 400 Gbit/s; "
        "assumed: links and matmuls as measured on the H100, which is the same chip on the same switches",
        aliases=("h200-sxm", "h200-141"),
    ),
    _B200,
    dataclasses.replace(
        _B200,
        name="gb200",
        full_name="NVIDIA GB200",
        num_cores=152,
        l2_bytes=135528448,
        clock_ghz=2.062,
        memory_bytes=197897748480,
        memory_bandwidth=7.928e12,
        peak=_peak(2500e12, 1250e12, 80e12),
        domain_size=72,
        is_domain_of_nodes=True,
        gpus_per_node=4,
        host_bandwidth=225e9,
        source="datasheet GB200 NVL72, per GPU; chip, memory and its bandwidth as CUDA reports them; a node is a tray "
        "of 4 GPUs, 18 trays are a domain; network 400 Gbit/s per GPU; assumed: half of a Grace's NVLink-C2C per GPU; "
        f"{_MATMULS}",
        measured_matmul=("bfloat16", (4096, 9728, 2048), 1822e12),
        aliases=("gb200-nvl72", "nvl72"),
    ),
    _L40S,
    dataclasses.replace(
        _L40S,
        name="rtx4090",
        full_name="NVIDIA GeForce RTX 4090",
        num_cores=128,
        l2_bytes=72 * _MIB,
        memory_bytes=25393364992,
        memory_bandwidth=1.008e12,
        peak=_peak(165.2e12, 82.6e12, 82.6e12),
        gpus_per_node=4,
        network_bandwidth=3.125e9,
        source="datasheet RTX 4090, with float32 accumulation; assumed: memory bytes, 4 cards and one 100 Gbit/s "
        "adapter per machine, and 0.4 of PCIe, since the driver lets cards talk through the host only",
        link_efficiency=0.4,
        aliases=("4090", "rtx-4090"),
    ),
)

_BY_NAME = {name: gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}


@checked
def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name or alias, upper or lower case.

    Raises:
      ValueError: if there is none; lists those there are, the closest first.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key in _BY_NAME:
        return _BY_NAME[key]
    close = [_BY_NAME[match].name for match in difflib.get_close_matches(key, _BY_NAME, n=3, cutoff=0.5)]
    listed = dict.fromkeys([*close, *(gpu.name for gpu in GPUS)])
    raise ValueError(f"no GPU is called {name!r}; there are {', '.join(listed)}")
