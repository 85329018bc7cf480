"""What holds for a unit as a whole: its precision, whether it is resharded after forward, what its remat saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jfsdp.layout.precision import MixedPrecisionPolicy
from jfsdp.layout.strategy import Split, Strategy
from jfsdp.layout.units import ROOT, matches_glob

REMATS = ("none", "full", "dots")
Remat = str | tuple[str, ...] | Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """Settings of one unit. Moves no data.

    Attributes:
      mp_policy: its precision.
      reshard_after_forward: False keeps the gathered parameters until the unit's backward.
      remat: "none" (save what the backward needs), "full" (save only the unit's inputs), "dots" (save matmul results
        without batch dims), a tuple of names given to `jax.ad_checkpoint.checkpoint_name`, or a policy function of
        `jax.checkpoint_policies`. Whatever it says, a resharded unit saves nothing that depends on its weights alone.
    """

    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    remat: Remat

    def __post_init__(self) -> None:
        if not isinstance(self.mp_policy, MixedPrecisionPolicy):
            raise ValueError(f"mp_policy {self.mp_policy!r} is not a jfsdp.MixedPrecisionPolicy")
        is_names = isinstance(self.remat, tuple) and all(isinstance(name, str) for name in self.remat)
        if self.remat not in REMATS and not is_names and not callable(self.remat):
            raise ValueError(
                f"remat {self.remat!r} is unknown; use {', '.join(REMATS)}, a tuple of names, or a policy of "
                "jax.checkpoint_policies"
            )


def resolve_policies(
    units: Iterable[str],
    *,
    strategy: Strategy,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
    remat: Remat,
    per_unit: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, UnitPolicy]:
    """Give every unit its policy: the defaults, changed by what `per_unit` says for globs over unit names. Moves no
    data.

    `reshard_after_forward=None` follows the strategy: the root unit stays gathered, the others as `kept` says. A global
    `output_dtype` is that of the model; one given for a unit is that of the unit's outputs. `remat` is
    for the units below the root; the root (the loss function itself) recomputes only what `per_unit={"": ...}` says.

    Raises:
      ValueError: for an unknown remat or setting, a glob that matches no unit, or a contradiction with the strategy.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ValueError(
            f"mp_policy {mp_policy!r} is not a jfsdp.MixedPrecisionPolicy, such as one of param_dtype='bfloat16'"
        )
    names = list(units)
    overrides: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pattern, settings in (per_unit or {}).items():
        matched = [name for name in names if matches_glob(pattern, name)]
        if not matched:
            raise ValueError(f"per_unit {pattern!r} matches no unit; the units are {', '.join(map(repr, names))}")
        for name in matched:
            overrides[name].update(_check_settings(pattern, settings))
    defaults = {"mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward, "remat": remat}
    root = {**defaults, "remat": "none"}
    defaults["mp_policy"] = dataclasses.replace(mp_policy, output_dtype=None)
    return {name: _resolve(name, strategy, **{**(defaults if name else root), **overrides[name]}) for name in names}


def _check_settings(pattern: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    known = [field.name for field in dataclasses.fields(UnitPolicy)]
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise ValueError(
            f"per_unit {pattern!r}: setting {unknown[0]!r} is unknown; the settings are {', '.join(known)}"
        )
    return settings


def _resolve(
    name: str, strategy: Strategy, mp_policy: MixedPrecisionPolicy, reshard_after_forward: bool | None, remat: Remat
) -> UnitPolicy:
    shown = repr(name) if name else "(root)"
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(
            f"unit {shown}: reshard_after_forward={reshard_after_forward!r} is not None, True or False; "
            f"resharding to a "
            "number of devices (hpZ) is not supported"
        )
    if reshard_after_forward and strategy.kept is Split.WHOLE:
        raise ValueError(
            f"unit {shown}: reshard_after_forward=True contradicts strategy {strategy.name!r}, which keeps parameters "
            "whole between forward and backward; use full_shard or hybrid_shard, or leave it None"
        )
    default = strategy.kept is not Split.WHOLE and name != ROOT
    reshard = default if reshard_after_forward is None else bool(reshard_after_forward)
    try:
        return UnitPolicy(mp_policy, reshard, remat)
    except ValueError as error:
        raise ValueError(f"unit {shown}: {error}") from error
