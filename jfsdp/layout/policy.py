"""Settings of whole units: precision, resharding after forward and remat; and offloading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

from jfsdp.arguments import check_call, checked
from jfsdp.layout.precision import MixedPrecisionPolicy
from jfsdp.layout.strategy import NODE, Strategy
from jfsdp.layout.units import ROOT, matches_glob

REMATS = ("none", "full", "dots")
UNIT_INPUT = "input"
"""Name, in a remat policy, of a unit's inputs that have a derivative."""
FUSED = "attention"  # name, in a remat policy, of the output and statistics of a fused attention


@checked
@dataclasses.dataclass(frozen=True)
class SaveNames:
    """A remat policy that saves named values, on the device or in host memory, and recomputes all others.

    Attributes:
      save: names given to `jax.ad_checkpoint.checkpoint_name` whose values stay on the device.
      offload: names whose values wait for the backward in pinned host memory.

    `UNIT_INPUT` ("input") is the name of each unit's inputs, except those that several calls share. Inputs that are
    not named here are saved on the device. A model cannot give this name to a value.

    "attention" is the name of the output and the softmax statistics of fused attention (cuDNN's), which the backward
    then does not compute again. A model may give other values this name too.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("save", "offload"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if not self.save and not self.offload:
            raise ValueError("SaveNames() has no names; set save= or offload=, or use remat='full' to save nothing")
        both = sorted(set(self.save) & set(self.offload))
        if both:
            raise ValueError(f"SaveNames: {', '.join(both)} cannot be both saved and offloaded")


Remat = Annotated[str, ", ".join(REMATS)] | tuple[str, ...] | SaveNames | Callable[..., Any]


def saved_names(remat: Remat) -> tuple[str, ...]:
    """Return the names that a remat policy saves or offloads; none for other policies."""
    if isinstance(remat, SaveNames):
        return remat.save + remat.offload
    return remat if isinstance(remat, tuple) else ()


def offloads(remat: Remat) -> str:
    """Return the values that a remat offloads: names, or the policy of `jax.checkpoint_policies`; "" for none."""
    if isinstance(remat, SaveNames):
        return ", ".join(remat.offload)
    return next((name for name in _policy_names(remat) if "offload" in name), "")


def _policy_names(policy: Any) -> Iterator[str]:
    """Yield the functions of `jax.checkpoint_policies` that made a policy, including policies that it combines."""
    if callable(policy):
        yield getattr(policy, "__qualname__", "").partition(".")[0]
        cells = [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]
        for value in (*cells, getattr(policy, "func", None), *getattr(policy, "args", ())):
            for one in value if isinstance(value, tuple) else (value,):
                yield from _policy_names(one)


@checked
@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """Arrays that are in pinned host memory while they are not used; the settings are independent.

    Leaves below the minimum size stay on the device. Compute and update run on the device: arrays are copied there and
    back, leaf by leaf. Activations are offloaded by name, with `remat=SaveNames(offload=...)`.

    Attributes:
      params: the parameters at rest; each unit's shards are copied to the device before its gather.
      grads: the gradient accumulators.
      opt_state: the optimizer's arrays that have the shape of a parameter (moments, averages; not factored ones).
    """

    params: bool = False
    grads: bool = False
    opt_state: bool = False


@checked
@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """Settings of one unit.

    Attributes:
      mp_policy: its precision.
      reshard_after_forward: False keeps the gathered parameters until the unit's backward; n keeps them split n ways
        over neighbouring devices, which makes the gather of the backward cheaper (hpZ); 1 is False.
      remat: "none" (save all values that the backward needs), "full" (save only the unit's inputs), "dots" (save matmul
        results without batch dims, and the outputs of cuDNN's attention), names given to
        `jax.ad_checkpoint.checkpoint_name` (a tuple, or `SaveNames` if some are offloaded), or a policy function of
        `jax.checkpoint_policies`. With any of these, a resharded unit saves nothing that depends only on its weights.
    """

    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int
    remat: Remat

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 1:
            raise ValueError(f"reshard_after_forward={self.reshard_after_forward} must be True, False or at least 1")
        is_policy = isinstance(self.remat, SaveNames) or (callable(self.remat) and not isinstance(self.remat, type))
        is_names = isinstance(self.remat, tuple) and self.remat and all(isinstance(name, str) for name in self.remat)
        if is_policy and not isinstance(self.remat, SaveNames):
            check_call("remat", self.remat, "primitive")
        if not (is_names or is_policy or self.remat in REMATS):
            raise ValueError(
                f"remat {self.remat!r} is unknown; use {', '.join(REMATS)}, a tuple of names, jfsdp.SaveNames, or a "
                "policy of jax.checkpoint_policies"
            )


def resolve_policies(
    units: Iterable[str],
    *,
    strategy: Strategy,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | str | None,
    remat: Remat,
    per_unit: Mapping[str, Mapping[str, Any]] | None,
    node_size: Callable[[], int],
    host_size: Callable[[], int],
) -> dict[str, UnitPolicy]:
    """Return the policy of each unit: the defaults with the overrides of `per_unit`, by globs over unit names.

    If several globs match a unit, they must not contradict each other.

    `reshard_after_forward=None` follows the strategy: the root unit stays gathered, and the others use the strategy's
    default. A global `output_dtype` applies to the model's outputs, one for a unit to the unit's outputs. `remat`
    applies to the units below the root; the root (the loss function) recomputes only with `per_unit={"": ...}`.
    Wire formats are those of the units below the root. `node_size` returns the number of neighbouring devices of one
    host over which a parameter is split, or raises a ValueError with the reason why not; `host_size` does so for all
    neighbours. They are called only for "node".

    Raises:
      ValueError: for an unknown remat or setting, a glob that matches no unit, or a contradiction with the strategy.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy {mp_policy!r} is not a jfsdp.MixedPrecisionPolicy; pass MixedPrecisionPolicy(param_dtype=...)"
        )
    names = list(units)
    overrides: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pattern, settings in (per_unit or {}).items():
        matched = [name for name in names if matches_glob(pattern, name)]
        if not matched:
            raise ValueError(f"per_unit {pattern!r} matches no unit; the units are {', '.join(map(repr, names))}")
        for name in matched:
            for setting, value in _check_settings(pattern, settings).items():
                if overrides[name].setdefault(setting, value) != value:
                    raise ValueError(
                        f"unit {name!r}: per_unit sets {setting}={overrides[name][setting]!r}, and {pattern!r} sets "
                        f"{value!r}; make one of the globs narrower"
                    )
    defaults = {"mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward, "remat": remat}
    no_wires = dataclasses.replace(mp_policy, gather_wire=None, reduce_wire=None)
    root = {**defaults, "remat": "none", "mp_policy": no_wires}
    defaults["mp_policy"] = dataclasses.replace(mp_policy, output_dtype=None)
    settings = {name: {**(defaults if name else root), **overrides[name]} for name in names}
    policies = {name: _resolve(name, strategy, node_size, **settings[name]) for name in names}
    policies = {name: _with_host_size(name, policy, host_size) for name, policy in policies.items()}
    for name, policy in policies.items():
        if policy.mp_policy.loss_scale not in (None, mp_policy.loss_scale):
            raise ValueError(f"unit {name!r}: per_unit sets loss_scale, but units share one loss; set it in mp_policy")
    UnitPolicy(mp_policy, False, remat)  # raises for a wrong remat even if no unit uses it
    return policies


def _with_host_size(name: str, policy: UnitPolicy, host_size: Callable[[], int]) -> UnitPolicy:
    """Replace "node" in wire formats by a number of devices."""
    wires = {}
    for field in ("gather_wire", "reduce_wire"):
        wire = getattr(policy.mp_policy, field)
        if wire is not None and wire.between == NODE:
            try:
                wires[field] = dataclasses.replace(wire, between=host_size())
            except ValueError as error:
                raise ValueError(
                    f"unit {name or '(root)'}: {field} is a Wire(between={NODE!r}), and {error}; pass between=n, the "
                    "number of neighbouring devices inside a host"
                ) from error
    return dataclasses.replace(policy, mp_policy=dataclasses.replace(policy.mp_policy, **wires))


def _check_settings(pattern: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    known = [field.name for field in dataclasses.fields(UnitPolicy)]
    if not settings:
        raise ValueError(f"per_unit {pattern!r} has no settings; set one of {', '.join(known)}, or leave it out")
    for key in settings:
        if key not in known:
            raise ValueError(f"per_unit {pattern!r}: setting {key!r} is unknown; the settings are {', '.join(known)}")
    return settings


def _resolve(
    name: str,
    strategy: Strategy,
    node_size: Callable[[], int],
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | str | None,
    remat: Remat,
) -> UnitPolicy:
    shown, reshard = repr(name) if name else "(root)", reshard_after_forward
    if not (reshard is None or reshard == NODE or isinstance(reshard, int)):
        raise ValueError(
            f"unit {shown}: reshard_after_forward={reshard!r} is not None, True, False, {NODE!r} or a number of devices"
        )
    asks = reshard is True or reshard not in (None, False, 1)
    if asks and (strategy.reshard_after_forward is False or not strategy.axes("param")):
        when = "between forward and backward" if strategy.axes("param") else "at rest"
        raise ValueError(
            f"unit {shown}: reshard_after_forward={reshard} contradicts strategy {strategy.name!r}, which keeps "
            f"parameters whole {when}; use full_shard, or leave it None"
        )
    if reshard is None:
        reshard = strategy.reshard_after_forward if name != ROOT and strategy.axes("param") else False
    if reshard == NODE:
        try:
            reshard = node_size()
        except ValueError as error:
            raise ValueError(
                f"unit {shown}: reshard_after_forward={NODE!r} splits parameters over the devices of one host, and "
                f"{error}; pass reshard_after_forward=n, the number of neighbouring devices to split over"
            ) from error
    if reshard == 1 and reshard is not True:  # one device has the whole parameter
        reshard = False
    try:
        return UnitPolicy(mp_policy, reshard, remat)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise type(error)(f"unit {shown}: {error}") from error
