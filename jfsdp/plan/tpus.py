"""TPUs as data, and slices of them: the chip, its memory, its links. No JAX, no devices.

Every number has a source: *datasheet* for what Google prints per chip (cloud.google.com/tpu/docs/v5e, v5p, v6e),
*libtpu* for what its compiler says, else *assumed*.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jfsdp.layout.limits import check_number
from jfsdp.plan.collectives import Collective
from jfsdp.plan.gpus import dtype_name
from jfsdp.plan.work import Kind, Work

_GIB = 2**30

# Assumed: the part of a link's datasheet bandwidth that a large collective gets, and how long a collective takes before
# its first byte; the part of the memory's bandwidth where XLA states no cycles.
ICI_EFFICIENCY = 0.9
ICI_LATENCY_S = 5e-6
MEMORY_EFFICIENCY = 0.85


@dataclasses.dataclass(frozen=True)
class Tpu:
    """One kind of TPU; a device is a chip. Bandwidths are bytes/s in one direction.

    `memory_bytes` is what libtpu 0.0.42.1 lets a program use: it refuses to compile one that takes more.
    `link_bandwidth` is that of one link; a chip has two for each of the `num_dims` of its torus. A dim of the slice
    closes to a ring where its size is a multiple of `wraps_at`. `clock_hz` turns the cycles that XLA estimates into
    seconds.
    """

    name: str
    full_name: str
    memory_bytes: int
    memory_bandwidth: float
    peak: tuple[tuple[str, float], ...]
    link_bandwidth: float
    num_dims: int
    wraps_at: int
    clock_hz: float
    host_bandwidth: float
    source: str
    aliases: tuple[str, ...] = ()
    noun = "TPU"
    link = "ICI"

    def peak_flops(self, dtype: str) -> float:
        """Return the datasheet's FLOP/s. float32 runs in bfloat16 at JAX's default precision. Moves no data.

        Raises:
          ValueError: for a dtype without a known peak.
        """
        name = dtype_name(dtype)
        known = dict(self.peak)
        key = "bfloat16" if name in ("float32", "tf32") else name
        if key not in known:
            raise ValueError(f"{self.name}: the peak for {dtype} is not known; known are {', '.join(known)}")
        return known[key]


# Clocks: those at which 2 FLOPs per cycle and cell of the datasheet's matrix units make its peak (v5e 4 x 128^2, v5p
# 8 x 128^2). For v6e assumed: there XLA's cycles for the logits of Llama-3-8B are 89 % of the datasheet's peak.
TPUS = (
    Tpu(
        name="v5e",
        full_name="TPU v5e",
        memory_bytes=int(15.75 * _GIB),
        memory_bandwidth=819e9,
        peak=(("bfloat16", 197e12),),
        link_bandwidth=50e9,
        num_dims=2,
        wraps_at=16,
        clock_hz=1.5e9,
        host_bandwidth=16e9,
        source="datasheet: 197 TFLOP/s, 16 GB, 819 GB/s, 1600 Gbit/s over 4 links; libtpu: memory; assumed: PCIe 3",
        aliases=("v5litepod", "v5-lite"),
    ),
    Tpu(
        name="v5p",
        full_name="TPU v5p",
        memory_bytes=int(95.74 * _GIB),
        memory_bandwidth=2765e9,
        peak=(("bfloat16", 459e12),),
        link_bandwidth=100e9,
        num_dims=3,
        wraps_at=4,
        clock_hz=1.75e9,
        host_bandwidth=16e9,
        source="datasheet: 459 TFLOP/s, 95 GiB, 2765 GB/s, 4800 Gbit/s over 6 links; libtpu: memory; assumed: PCIe 3",
        aliases=("v5",),
    ),
    Tpu(
        name="v6e",
        full_name="TPU v6e",
        memory_bytes=int(31.25 * _GIB),
        memory_bandwidth=1638e9,
        peak=(("bfloat16", 918e12),),
        link_bandwidth=100e9,
        num_dims=2,
        wraps_at=16,
        clock_hz=1.75e9,
        host_bandwidth=32e9,
        source="datasheet: 918 TFLOP/s, 32 GB, 1638 GB/s, 800 GB/s both ways over 4 links; libtpu: memory; "
        "assumed: PCIe 4, clock",
        aliases=("trillium",),
    ),
)
KINDS = tuple(tpu.name for tpu in TPUS)
FORM = "KIND:AxB (v5p: KIND:AxBxC)"
_BY_NAME = {name: tpu for tpu in TPUS for name in (tpu.name, *tpu.aliases)}


def find_tpu(name: str) -> Tpu:
    """Return the TPU of a name or alias, upper or lower case. Moves no data.

    Raises:
      ValueError: if there is none; lists those there are, the closest first.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("tpu-")
    if key in _BY_NAME:
        return _BY_NAME[key]
    close = [_BY_NAME[match].name for match in difflib.get_close_matches(key, _BY_NAME, n=2, cutoff=0.5)]
    listed = dict.fromkeys([*close, *KINDS])
    raise ValueError(f"no TPU is called {name!r}; there are {', '.join(listed)}, and a slice is written as {FORM}")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of TPUs: `shape` chips along each dim of the torus; ids count along the last dim first.

    Raises:
      ValueError: for a shape with other dims than the torus has, or below 1.
    """

    tpu: Tpu
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        example = "x".join(["4"] * self.tpu.num_dims)
        if len(self.shape) != self.tpu.num_dims or min(self.shape) < 1:
            raise ValueError(
                f"{self.topology}: a slice of {self.tpu.name} has {self.tpu.num_dims} dims of 1 or more; give for "
                f"example {self.tpu.name}:{example}"
            )

        check_number(self.topology, self.num_devices)

    @property
    def chip(self) -> Tpu:
        """The TPU, by the name that clusters share."""
        return self.tpu

    @property
    def topology(self) -> str:
        """As libtpu calls it, such as v5e:4x4."""
        return f"{self.tpu.name}:{'x'.join(map(str, self.shape))}"

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which dims close to a ring."""
        return tuple(size % self.tpu.wraps_at == 0 for size in self.shape)

    @property
    def num_devices(self) -> int:
        """Chips in all."""
        return math.prod(self.shape)

    @property
    def devices_per_domain(self) -> int:
        """Chips that ICI joins: all of them."""
        return self.num_devices

    def spans_nodes(self, group: Iterable[int]) -> bool:
        """Return whether a group leaves the slice: never."""
        return False

    def describe(self) -> str:
        """Return the slice in words."""
        return f"{self.num_devices} x {self.tpu.full_name} ({self.topology})"

    def to_dict(self) -> dict[str, Any]:
        """Return the slice as plain data."""
        return {"tpu": self.tpu.name, "topology": self.topology, "num_devices": self.num_devices}

    def places(self) -> tuple[tuple[int, ...], ...]:
        """Return the place in the torus of each id."""
        return tuple(itertools.product(*(range(size) for size in self.shape)))

    def group_bandwidth(
        self, group: Iterable[int], message_bytes: float, places: Sequence[Sequence[int]] | None = None
    ) -> float:
        """Return what a device of a group sends per second, all such groups at once. Moves no data.

        A model, not a reading: every dim of the torus along which the group's chips differ carries an equal part at the
        same time, over both of its links where it closes to a ring, and over one where it does not.

        Args:
          places: the place in the torus of each id; by default as ids are counted.

        Raises:
          ValueError: for an id that the slice does not have.
        """
        places, members = self.places() if places is None else places, tuple(group)
        if any(not 0 <= device < len(places) for device in members):
            raise ValueError(f"{self.topology}: devices {members} are not all in a slice of {len(places)}")
        links = 0
        for dim, is_ring in enumerate(self.wraps):
            if len({places[device][dim] for device in members}) > 1:
                links += 2 if is_ring else 1
        bandwidth = max(links, 1) * self.tpu.link_bandwidth * ICI_EFFICIENCY
        return message_bytes / (ICI_LATENCY_S + message_bytes / bandwidth)


def parse_slice(text: str) -> Slice:
    """Read a slice such as "v5e:4x4". Moves no data.

    Raises:
      ValueError: for an unknown kind, or another form; names the kinds and the form.
    """
    kind, _, shape = text.strip().lower().partition(":")
    tpu = find_tpu(kind)
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(f"{text!r}: a TPU slice is written as {FORM}, and KIND is one of {', '.join(KINDS)}")
    return Slice(tpu, tuple(int(size) for size in shape.split("x")))


@dataclasses.dataclass(frozen=True)
class TpuRates:
    """How fast a slice works and sends.

    Computing takes the cycles that XLA's own cost model states for an instruction; where it states none, the bytes that
    pass through memory. Copies between memory and the chip's own (VMEM) are taken to hide. Sending goes by
    `Slice.group_bandwidth`.

    Attributes:
      places: the place in the torus of each device of the mesh.
    """

    slice: Slice
    places: tuple[tuple[int, ...], ...]
    overlap_slowdown: float = 1.0  # assumed: links move bytes without the matrix units

    def work_s(self, work: Work) -> float:
        """Return the seconds of one instruction. Moves no data."""
        tpu = self.slice.tpu
        match work.kind:
            case Kind.NONE:
                return 0.0
            case Kind.HOST:
                return work.num_bytes / tpu.host_bandwidth
        if work.cycles:
            return work.cycles / tpu.clock_hz
        return work.num_bytes / (tpu.memory_bandwidth * MEMORY_EFFICIENCY)

    def collective_s(self, collective: Collective) -> float:
        """Return the seconds of one collective, alone on the wire. Moves no data."""
        if not collective.wire_bytes:
            return 0.0
        return collective.wire_bytes / self.slice.group_bandwidth(collective.group, collective.num_bytes, self.places)
