"""What holds for a unit as a whole: precision, resharding after forward, remat; and what is offloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jfsdp.arguments import check_call, checked
from jfsdp.layout.precision import MixedPrecisionPolicy
from jfsdp.layout.strategy import NODE, Strategy
from jfsdp.layout.units import ROOT, matches_glob

REMATS = ("none", "full", "dots")


@checked
@dataclasses.dataclass(frozen=True)
class SaveNames:
    """A remat that saves named values, on the device or in the host's memory, and recomputes the rest.

    Attributes:
      save: names given to `jax.ad_checkpoint.checkpoint_name` whose values stay on the device.
      offload: names whose values wait for the backward in pinned host memory.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("save", "offload"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if not self.save and not self.offload:
            raise ValueError(
                "SaveNames() names nothing; say what to save= or offload=, or remat='full' to save nothing"
            )
        both = sorted(set(self.save) & set(self.offload))
        if both:
            raise ValueError(f"SaveNames: {', '.join(both)} cannot be both saved and offloaded")


Remat = str | tuple[str, ...] | SaveNames | Callable[..., Any]


def saved_names(remat: Remat) -> tuple[str, ...]:
    """Return the names whose values a remat saves or offloads; none for any other remat."""
    if isinstance(remat, SaveNames):
        return remat.save + remat.offload
    return remat if isinstance(remat, tuple) else ()


def offloads(remat: Remat) -> str:
    """Return the values that a remat offloads: names, or the policy of `jax.checkpoint_policies`; "" if it does not."""
    if isinstance(remat, SaveNames):
        return ", ".join(remat.offload)
    return next((name for name in _policy_names(remat) if "offload" in name), "")


def _policy_names(policy: Any) -> Iterator[str]:
    """Yield the functions of `jax.checkpoint_policies` that a policy was made by, also those that it combines."""
    if callable(policy):
        yield getattr(policy, "__qualname__", "").partition(".")[0]
        cells = [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]
        for value in (*cells, getattr(policy, "func", None), *getattr(policy, "args", ())):
            for one in value if isinstance(value, tuple) else (value,):
                yield from _policy_names(one)


@checked
@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """What waits in pinned host memory while it is not used; each on its own.

    Leaves below the minimum size stay on the device. Compute and update run on the device: what they need is copied
    there, leaf by leaf, and back. Activations are offloaded by name, with `remat=SaveNames(offload=...)`.

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
      remat: "none" (save what the backward needs), "full" (save only the unit's inputs), "dots" (save matmul results
        without batch dims, and what cuDNN's attention gives), names given to `jax.ad_checkpoint.checkpoint_name` (a
        tuple, or `SaveNames` where some are offloaded), or a policy function of `jax.checkpoint_policies`. Whatever it
        says, a resharded unit saves nothing that depends on its weights alone.
    """

    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int
    remat: Remat

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 1:
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward} must be at least 1 device, True or False"
            )
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
) -> dict[str, UnitPolicy]:
    """Give every unit its policy: the defaults, changed by what `per_unit` says for globs over unit names.

    Where several of its globs match a unit, they must not contradict each other.

    `reshard_after_forward=None` follows the strategy: the root unit stays gathered, the others do as it says. A global
    `output_dtype` is that of the model; one given for a unit is that of the unit's outputs. `remat` is
    for the units below the root; the root (the loss function itself) recomputes only what `per_unit={"": ...}` says.
    `node_size` finds over how many neighbouring devices of one host a parameter is split, or raises a ValueError that
    says why not; it is called only for "node".

    Raises:
      ValueError: for an unknown remat or setting, a glob that matches no unit, or a contradiction with the strategy.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy {mp_policy!r} is not a jfsdp.MixedPrecisionPolicy, such as one of param_dtype='bfloat16'"
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
                        f"unit {name!r}: per_unit says {setting}={overrides[name][setting]!r}, and by {pattern!r} "
                        f"{value!r}; make one of the globs narrower"
                    )
    defaults = {"mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward, "remat": remat}
    root = {**defaults, "remat": "none"}
    defaults["mp_policy"] = dataclasses.replace(mp_policy, output_dtype=None)
    settings = {name: {**(defaults if name else root), **overrides[name]} for name in names}
    policies = {name: _resolve(name, strategy, node_size, **settings[name]) for name in names}
    for name, policy in policies.items():
        if policy.mp_policy.loss_scale not in (None, mp_policy.loss_scale):
            raise ValueError(
                f"unit {name!r}: per_unit sets its loss_scale, and all units share one loss; set it in mp_policy"
            )
    UnitPolicy(mp_policy, False, remat)  # refuses a wrong remat also where no unit is to have it
    return policies


def _check_settings(pattern: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    known = [field.name for field in dataclasses.fields(UnitPolicy)]
    unknown = [key for key in settings if key not in known]
    if not settings:
        raise ValueError(f"per_unit {pattern!r} says nothing; give one of {', '.join(known)}, or leave it out")
    if unknown:
        raise ValueError(
            f"per_unit {pattern!r}: setting {unknown[0]!r} is unknown; the settings are {', '.join(known)}"
        )
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
    if reshard == 1 and reshard is not True:  # one device has it all
        reshard = False
    try:
        return UnitPolicy(mp_policy, reshard, remat)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise type(error)(f"unit {shown}: {error}") from error
