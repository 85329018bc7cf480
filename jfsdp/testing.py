"""For test suites of those who use jfsdp: assertions about compiled steps. Imports no test framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jfsdp.arguments import Amount, Share, Size, checked
from jfsdp.engine.spec import StepSpec
from jfsdp.layout.layout import Layout
from jfsdp.train.step.step import Trace


@checked
def assert_collectives(
    compiled: Any,
    layout: Layout,
    *,
    tolerance: Amount = 0.01,
    min_overlap: Share | None = None,
    spec: StepSpec | None = None,
    calls: Mapping[str, Size] | None = None,
    trace: Trace | None = None,
) -> None:
    """Assert that a compiled training step moves what its layout says, and no more.

    Args:
      compiled: `step.lower(model.abstract_state(tx), batch).compile()`, or its text.
      tolerance: by how much the bytes on the wire may exceed theory.
      min_overlap: the least share of the collective bytes in loops that must have a matmul to hide behind; a program
        without such bytes fails too.
      spec: of the step, `step.spec`; None: one microbatch of program "manual".
      calls, trace: as in `jfsdp.plan.audit`.

    Raises:
      AssertionError: listing what was found, each by the name of its trap; see `jfsdp.plan.traffic.checks`.
      ValueError: for a program that is not scheduled HLO, or is of another number of devices than the layout's mesh.
    """
    from jfsdp.plan.traffic.audit import audit

    report = audit(compiled, layout, tolerance=tolerance, min_overlap=min_overlap, spec=spec, calls=calls, trace=trace)
    if not report.is_ok:
        raise AssertionError(str(report))
