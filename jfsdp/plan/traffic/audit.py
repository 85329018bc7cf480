"""Audit a compiled step against its layout, with the checks of checks.py."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jfsdp.arguments import Amount, Count, Share, Size, checked
from jfsdp.engine.movements import movements
from jfsdp.engine.spec import StepSpec
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.plan.hlo.collectives import SCALARS_BYTES, find_collectives
from jfsdp.plan.hlo.op_names import find_argument
from jfsdp.plan.hlo.parse import Instruction, Module, parse_module
from jfsdp.plan.miscompiles import NOTES, find_miscompiles
from jfsdp.plan.time.timeline import overlapped_share
from jfsdp.plan.time.work import describe_products, flops_by_dtype
from jfsdp.plan.traffic.attribution import split_activations
from jfsdp.plan.traffic.checks import Check, Finding, gb
from jfsdp.plan.traffic.ledger import OWN, Ledger, make_ledger, one_microbatch
from jfsdp.train.step.step import Trace

# Findings that usually mean the program was compiled for another strategy, mesh or step than the layout's.
_OTHER_LAYOUT = ("extra-bytes", "activations", "repeated-gather", "all-reduce", "held", "replicated", "optimizer-state")
_STAGES = {"params": "param", "work": "work", "opt_state": "opt"}


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """Findings and collectives of a compiled step.

    Attributes:
      findings: differences from the layout; empty if there are none.
      ledger: every collective by unit, compared with theory.
      overlap: the share of collective bytes in loops with a matmul between start and done; None if no loop has any.
      notes: checks that were impossible, and unusual facts that are not faults.
    """

    findings: tuple[Finding, ...]
    ledger: Ledger
    overlap: float | None
    notes: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "ok": self.is_ok,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "overlap": self.overlap,
            "notes": list(self.notes),
            "ledger": self.ledger.to_dict(),
        }

    def __str__(self) -> str:
        ledger, num = self.ledger, len(self.findings)
        verdict = f"{num} finding{'s' if num > 1 else ''}" if num else "ok"
        what = " of weights" if ledger.own_bytes else ""
        head = (
            f"{gb(ledger.wire_bytes - ledger.own_bytes)}{what} sent per device and step, "
            f"{gb(ledger.wire_bytes_theory)} by theory "
            f"(ratio {ledger.wire_ratio:.4f}): {verdict}"
        )
        lines = [f"{item.trap}: {item.message}{f' ({item.source})' * bool(item.source)}" for item in self.findings]
        return "\n".join([head, *lines, *(f"note: {note}" for note in self.notes)])


@checked
def audit(
    compiled: Any,
    layout: Layout,
    *,
    tolerance: Amount = 0.01,
    min_overlap: Share | None = None,
    gpus_per_node: Count | None = None,
    spec: StepSpec | None = None,
    calls: Mapping[str, Size] | None = None,
    trace: Trace | None = None,
) -> AuditReport:
    """Compare a compiled training step with its layout; see [Note: audit checks].

    Args:
      compiled: the result of `step.lower(...).compile()`, its text, the path of a file with the text, or the result of
        `read_module`.
      tolerance: the allowed excess, as a share of theory's bytes. A tenth of it is allowed for unknown collectives.
      min_overlap: the least share of collective bytes in loops that must have a matmul between start and done. A
        program without such bytes is a finding too, since it cannot show overlap. None: no minimum.
      gpus_per_node: marks collectives that cross nodes in the ledger.
      spec: `step.spec`; None: one microbatch of program "manual".
      calls: calls per microbatch of units that are not called exactly once.
      trace: of the step, for theory of activations over model axes (`tensor`) and for products stated in float8; None:
        they are not checked.

    Raises:
      ValueError: if `compiled` is not scheduled HLO, or has another number of devices than the layout's mesh.
    """
    module = read_module(compiled)
    num_devices = _check_devices(module, layout)
    collectives = find_collectives(module, num_devices, dict(layout.mesh_sizes))
    spec = spec or one_microbatch(layout, calls)
    ledger = make_ledger(layout, collectives, spec, calls=calls, gpus_per_node=gpus_per_node, trace=trace)
    allowed = tolerance * ledger.wire_bytes_theory + SCALARS_BYTES * spec.accumulate
    check = Check(layout, module, ledger, movements(layout, spec, calls), allowed)
    arguments = list(_arguments(module, layout))
    share = overlapped_share(module, [split_activations(layout, item)[1] for item in collectives])
    miscompiles = find_miscompiles(module, trace and trace.jaxpr, layout.num_shards(layout.data_axes))
    findings = [
        *(one for one in miscompiles if one.trap not in NOTES),
        *check.wire_dtypes(),
        *check.arguments(arguments),
        *check.all_reduces(),
        *check.gathers(),
        *check.extra_bytes(tolerance),
        *check.activations(tolerance),
        *(check.kept_weights() if set(spec.gathered) <= set(layout.gathered_in_pipeline) else []),
        *check.overlap(share, min_overlap),
        *check.unknown(),
    ]
    notes = [f"{one.trap}: {one.message}" for one in miscompiles if one.trap in NOTES]
    notes += [*_notes(module, layout, ledger, arguments, tolerance), *_other_layout_note(findings, layout)]
    return AuditReport(tuple(findings), ledger, share, tuple(notes))


def read_module(compiled: Any) -> Module:
    """Parse a compiled program, its text, or a file with the text. Returns a parsed module unchanged.

    Raises:
      ValueError: if it is not a scheduled HLO module.
    """
    if isinstance(compiled, Module):
        return compiled
    text = compiled.as_text() if hasattr(compiled, "as_text") else compiled
    if not isinstance(text, str | Path):
        raise TypeError(f"{type(compiled).__name__} is neither a compiled program, nor its text, nor a file path")
    if isinstance(text, str) and ("\n" in text or "HloModule" in text):
        return parse_module(text)
    try:
        return parse_module(Path(text).read_text())
    except OSError as error:
        raise ValueError(f"{text}: no such file, and no HLO text either ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _check_devices(module: Module, layout: Layout) -> int:
    num_devices = math.prod(size for _, size in layout.mesh_sizes)
    found = module.num_partitions or 1
    if found != num_devices:
        sizes = ", ".join(f"{name}={size}" for name, size in layout.mesh_sizes)
        raise ValueError(
            f"HLO module {module.name}: the program has {found} devices, but the layout's mesh ({sizes}) has "
            f"{num_devices}; pass the layout of the model that was compiled"
        )
    return num_devices


def _arguments(module: Module, layout: Layout) -> Iterator[tuple[Leaf, str, Instruction]]:
    """Yield the leaf, stage and instruction of the step's arguments that belong to a leaf."""
    for instruction in module.entry.instructions:
        field, leaf = find_argument(instruction.op_name, layout.by_path)
        if instruction.opcode == "parameter" and field in _STAGES and leaf:
            yield layout.by_path[leaf], _STAGES[field], instruction


def _notes(module: Module, layout: Layout, ledger: Ledger, arguments: Sequence[Any], tolerance: float) -> Iterator[str]:
    if ledger.own_bytes:
        axes = dict.fromkeys(axis for row in ledger.rows if row.what == OWN for axis in row.axes)
        theory = "theory needs the step's trace for them (trace=)"
        if own := ledger.own_theory:
            theory = f"{gb(ledger.own_bytes_theory)} by theory (ratio {ledger.own_ratio:.4f})"
            unknown = ", ".join(own.unknown)
            theory += f", which has no rule for {unknown} on a dim that is split" if unknown else ""
        yield f"{gb(ledger.own_bytes)} more are sent by the model's own collectives, over {', '.join(axes)}: {theory}"
    products = flops_by_dtype(module)
    if "float8" in products:
        yield f"matrix products: {describe_products(products)}"
    if any(leaf.gather_wire or leaf.reduce_wire for leaf in layout.leaves):
        for what in ("parameters", "gradients"):
            sent = Counter[str]()
            for row in ledger.rows:
                sent[f"{row.kind} {row.dtype}"] += row.measured_bytes if row.what == what else 0  # type: ignore[assignment]
            yield f"{what}: {', '.join(f'{name} {gb(size)}' for name, size in sent.items() if size)}"
    if not arguments:
        yield (
            "no argument of the program is named as a part of a TrainState, so replicated parameters and "
            "optimizer states were not checked"
        )
    if ledger.wire_ratio < 1 - tolerance:
        yield (
            f"{1 - ledger.wire_ratio:.1%} fewer bytes than theory: XLA omits gathers that no derivative reads, "
            "and may sum microbatches before it reduces them"
        )


def _other_layout_note(findings: Iterable[Finding], layout: Layout) -> Iterator[str]:
    """Yield a note if some findings may mean that the program was compiled for another layout."""
    names = [name for name in _OTHER_LAYOUT if name in {finding.trap for finding in findings}]
    if names:
        mesh = ", ".join(f"{axis}={size}" for axis, size in layout.mesh_sizes if size > 1)
        yield (
            f"the layout is {layout.strategy.name!r} on {mesh or 'one device'}; if the program was compiled for "
            f"another strategy, mesh or number of microbatches, that explains {', '.join(names)}: audit it "
            "with the options that it was compiled with"
        )
