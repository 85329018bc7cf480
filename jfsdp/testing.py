"""Assertions about compiled steps, for users' test suites. Imports no test framework."""

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
    """Assert that a compiled training step has the collectives that its layout requires, and no others.

    Args:
      compiled: `step.lower(model.abstract_state(tx), batch).compile()`, or its text.
      tolerance: relative excess of the sent bytes over theory that is allowed.
      min_overlap: the minimum share of the collective bytes in loops that can overlap with a matmul; a program without
        such bytes fails too.
      spec: the spec of the step, `step.spec`; None: one microbatch of program "manual".
      calls, trace: as in `jfsdp.plan.audit`.

    Raises:
      AssertionError: listing the findings by the name of their check; see `jfsdp.plan.traffic.checks`.
      ValueError: for a program that is not scheduled HLO, or whose number of devices differs from the layout's mesh.
    """
    from jfsdp.plan.traffic.audit import audit

    report = audit(compiled, layout, tolerance=tolerance, min_overlap=min_overlap, spec=spec, calls=calls, trace=trace)
    if not report.is_ok:
        raise AssertionError(str(report))
