"""`jfsdp.prove`: a user's model, loss and optimizer on many meshes and strategies, compared with one device.

Source: parity with one device as the test of composed parallelism; the signatures are those of causes.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jfsdp.arguments import Count, checked
from jfsdp.layout.cuts import AxisRules
from jfsdp.layout.mesh import EXPERT, PIPE, check_sizes, make_mesh, resolve_sizes
from jfsdp.layout.placements import Placements
from jfsdp.layout.precision import is_key
from jfsdp.layout.select import Selectors
from jfsdp.layout.strategy import OTHER_NAMES, get_strategy
from jfsdp.layout.strategy import STRATEGIES as OWN_NAMES
from jfsdp.layout.wrapped import WrappedModel
from jfsdp.modules.adapt import as_model
from jfsdp.proof.cases import STRATEGIES, Case, choose_cases
from jfsdp.proof.causes import Cause, Diagnosis
from jfsdp.proof.compare import Difference, Run, capture, differences, norm, run_case, scale_of
from jfsdp.proof.reference import Reference, Values, fast_to_compile
from jfsdp.train.checks import as_arrays, check_batch
from jfsdp.train.fully_shard import fully_shard
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.step.loss_check import same_bits

EQUAL, DIFFERS, REFUSED, RAISED = "equal", "differs", "refused", "raised"


@dataclasses.dataclass(frozen=True)
class Proved:
    """One case of a proof.

    Attributes:
      status: "equal", "differs", "refused" by an error of jfsdp that names a remedy, or "raised" for any other error.
      differences: values that differ by more than rounding, in the order of a step.
      cause: the cause whose signature they have; None if they are equal.
      worst: the largest relative error of a gradient.
      seconds: of the case, compilation included.
    """

    case: Case
    status: str
    differences: tuple[Difference, ...] = ()
    cause: Cause | None = None
    worst: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Proof:
    """The cases of a proof; see `prove`.

    Attributes:
      dtype: of the parameters.
      eps: relative rounding error of the narrowest floating dtype in the loss, which decides what counts as equal.
      note: why the parameters are not in float64; "" if they are.
    """

    cases: tuple[Proved, ...]
    dtype: str
    eps: float
    note: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether at least one case ran, none differs from one device, and none raised."""
        found = {one.status for one in self.cases}
        return EQUAL in found and not found & {DIFFERS, RAISED}

    @property
    def verdict(self) -> tuple[str, str]:
        """EQUAL, DIFFERS or REFUSED, and the number of cases."""
        num, refused = (sum(one.status == status for one in self.cases) for status in (EQUAL, REFUSED))
        word = "EQUAL" if self.is_ok else "REFUSED" if refused == len(self.cases) else "DIFFERS"
        return word, f"{num} of {len(self.cases)} cases equal one device" + f", {refused} refused" * bool(refused)

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as plain data."""
        return {"ok": self.is_ok} | dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(["  ".join(self.verdict), *self.lines()])

    def lines(self) -> list[str]:
        """Return the dtypes, and a line for each case."""
        width = max((len(one.case.name) for one in self.cases), default=0)
        lines = [f"parameters in {self.dtype}, narrowest dtype in the loss rounds by {self.eps:.1e}{self.note}"]
        for one in self.cases:
            text = one.cause.text if one.cause else f"gradients within {one.worst:.1e}"
            facts = f"{one.cause.name}: {text}" if one.cause and one.status == DIFFERS else text
            lines.append(f"{one.case.name:{width}}  {one.status:7}  {facts}".rstrip())
        return lines


@checked
def prove(
    model: Any,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    batch: Any,
    *,
    units: Any = (),
    placements: Placements | None = None,
    axis_rules: AxisRules | None = None,
    frozen: Selectors = None,
    meshes: Sequence[Mapping[str, int]] | None = None,
    strategies: Sequence[Any] = STRATEGIES,
    programs: Sequence[str | None] | None = None,
    accumulate: Sequence[Count] = (1, 2),
    reshard_after_forward: Sequence[bool | None] = (None, False),
    remat: Sequence[Any] = ("none", "full"),
    steps: Count = 2,
    max_grad_norm: float | None = None,
    every: bool = False,
    wide: bool = True,
    on_case: Callable[[Proved], None] = lambda proved: None,
) -> Proof:
    """Compare training steps on meshes of this process's devices with the same user code on one device.

    Compares the loss, every gradient, and after `steps` steps every parameter, array of the optimizer's state and array
    of the model's state. The reference is the unmodified model with `jax.grad` and optax. What counts as equal is
    measured: 16 times the effect of one rounding error in each parameter; beyond 1 % of the norm, 4 times. A model that
    computes in bfloat16 is compared to 5 to 50 %. Run it on simulated devices
    (`XLA_FLAGS=--xla_force_host_platform_device_count=8`), with a small model in float32 or float64.

    Random keys in the model's state draw the same bits everywhere in program "manual", where dropout masks of devices
    differ by design; a second run compares that devices do not share them.

    Cost:    a compilation of a step per case, and of the reference for each number of microbatches.

    Args:
      model, units, placements, axis_rules, frozen: as in `fully_shard`; adapters and codecs are not supported.
      loss_fn: as in `ShardedModel.train_step`.
      batch: arrays of one global batch, a multiple of the devices times the microbatches. Each step takes its rows in
        another order.
      meshes: sizes by axis; None: two devices on up to two at once of `replica` and the axes that cut parameters of the
        model (`placements`, `axis_rules`, stacks of layers), and the rest on `fsdp`. `context` only if it is given.
      strategies, programs, accumulate, reshard_after_forward, remat: values to try; `programs=None` tries both programs
        for a loss that is a sum with its weight, and "xla" for a scalar.
      every: try every combination; by default each pair of values occurs together in some case.
      wide: compute in float64 where the model allows; otherwise in the dtype of its parameters.
      on_case: called after each case.

    Returns:
      The cases with their differences and causes, as text (`str(proof)`) and data (`proof.to_dict()`). `proof.is_ok`
      is whether some case ran, and none differs.

    Raises:
      TypeError: naming a leaf of the batch that is neither an array of rows nor a number.
      ValueError: for a wrapped model or leaves of unequal rows, and if one device cannot run the model.
    """
    if isinstance(model, WrappedModel):
        raise ValueError("prove: models with adapters or codecs are not supported; pass the model without jfsdp.lora")
    if jax.device_count() == 1 and meshes is None:
        raise ValueError(
            "prove: this process has one device; simulate 8 on the CPU with JAX_PLATFORMS=cpu "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 in the environment, before JAX starts"
        )
    check_batch(as_arrays(batch), shards=1, accumulate=1, num_processes=1)
    places = {"units": units, "placements": placements, "axis_rules": axis_rules, "frozen": frozen}
    columns = {"strategy": strategies, "program": programs, "accumulate": accumulate}
    columns |= {"reshard": reshard_after_forward, "remat": remat}

    def shard(case: Case, widen: Callable[[Any], Any]) -> ShardedModel:
        options = {"reshard_after_forward": case.reshard, "remat": case.remat, "strategy": case.strategy}
        return fully_shard(widen(model), mesh=make_case_mesh(case), **options, **places)

    subject = Subject(model, loss_fn, batch, shard, lambda model: tx, steps, wide, max_grad_norm)
    return subject.prove(columns, meshes, every=every, on_case=on_case)


def _host() -> Any:
    """Return a CPU for the reference, also if the cases run on GPUs; the first device if there is none."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def make_case_mesh(case: Case) -> Mesh:
    """Return the mesh of a case, over the first devices of this process."""
    num_devices = math.prod(size for _, size in case.mesh)
    return make_mesh(**{"fsdp": 1, **dict(case.mesh)}, devices=jax.devices()[:num_devices])  # type: ignore[arg-type]


def resolve_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a mesh of at most this process's devices.

    Raises:
      ValueError: for unknown axes, sizes below 1 other than one -1, and too few devices.
    """
    check_sizes(sizes := {"fsdp": 1, **sizes})
    num, least = jax.device_count(), math.prod(size for size in sizes.values() if size > 0)
    if least > num:
        raise ValueError(
            f"mesh {dict(sizes)} needs {least} devices, and there are {num}; change the sizes, or simulate more with "
            f"--devices {least}, or XLA_FLAGS=--xla_force_host_platform_device_count={least} before JAX starts"
        )
    return resolve_sizes(sizes, num if -1 in sizes.values() else least)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model with its loss, batch and optimizer to be proved; see `prove`.

    Attributes:
      model: the user's, for the reference.
      shard: shards the user's model for a case, after passing it to a function that fixes its weights.
      make_tx: the optimizer of a sharded model.
      axes: to try if no mesh is given, in addition to those that cut parameters.
    """

    model: Any
    loss_fn: Callable[..., Any]
    batch: Any
    shard: Callable[[Case, Callable[[Any], Any]], ShardedModel]
    make_tx: Callable[[ShardedModel], optax.GradientTransformation]
    steps: int = 2
    wide: bool = True
    max_grad_norm: float | None = None
    axes: Sequence[str] = ()

    def prove(
        self,
        columns: Mapping[str, Any],
        meshes: Sequence[Mapping[str, int]] | None,
        *,
        every: bool = False,
        on_case: Callable[[Proved], None] = lambda proved: None,
    ) -> Proof:
        """Prove the cases of some columns; `columns["program"]` may be None, as in `prove`.

        Raises:
          ValueError: for meshes and strategies that do not exist, and for an empty list of values.
        """
        meshes = None if meshes is None else [resolve_mesh(sizes) for sizes in meshes]
        if empty := [name for name, x in {**columns, "meshes": meshes}.items() if x is not None and not x]:
            raise ValueError(f"prove: {empty[0]} is empty; pass at least one value")
        for name in columns["strategy"]:
            if isinstance(name, str | int) and name not in {**OWN_NAMES, **OTHER_NAMES}:
                get_strategy(name, {})  # raises
        with jax.enable_x64(self.wide), jax.default_matmul_precision("highest"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = self._refer()
            try:
                one.check()
            except (TypeError, ValueError) as error:
                if not self.wide:
                    raise
                own = dataclasses.replace(self, wide=False).prove(columns, meshes, every=every, on_case=on_case)
                return dataclasses.replace(own, note=f"; float64 fails: {str(error).splitlines()[0]}")
            programs = columns["program"] or (("manual", "xla") if one.is_sum else ("xla",))
            cut = [EXPERT, PIPE] if list(columns["accumulate"]) != [1] else [EXPERT]  # a pipeline has microbatches
            cut = cut if one.is_sum and list(programs) != ["xla"] else []
            axes = [*self.axes, *self._cut_axes(["tensor", *cut])] if meshes is None else []
            same = {name: same_bits(x) if is_key(x) else x for name, x in one.state.items()}
            alike = dataclasses.replace(one, state=same)
            values: dict[Any, tuple[Values, Values]] = {}
            proved = []
            for case in choose_cases({**columns, "program": programs}, meshes, jax.device_count(), axes, every=every):
                reference = alike if case.program != "xla" and one.draws else one
                key = reference is alike, case.accumulate
                if key not in values:
                    values[key] = reference.train(case.accumulate), reference.train(case.accumulate, reference.moved())
                    _check_values(values[key][0])
                keyed = dataclasses.replace(one, batches=one.batches[:1]) if reference is alike else None
                proved.append(self._prove(case, reference, *values[key], keyed))
                on_case(proved[-1])
            dtype = str(next(x.dtype for x in one.params.values() if jnp.issubdtype(x.dtype, jnp.floating)))
            return Proof(tuple(proved), dtype, one.eps)

    def _refer(self) -> Reference:
        """Return the reference, with floating arrays in float64 if `wide`."""
        whole, base = self.shard(Case((("fsdp", 1),)), lambda model: model), as_model(self.model)
        made = jax.jit(base.create, compiler_options=fast_to_compile())(0)
        trained = frozenset(leaf.path for leaf in whole.layout.leaves if leaf.trainable)
        cast = _widen if self.wide else lambda x: x
        params, state = jax.device_put(jax.tree.map(cast, made), _host())
        turn = lambda x, by: cast(x)[(np.arange(len(x)) - by) % len(x)] if np.ndim(x) else x  # noqa: E731
        batches = [jax.tree.map(functools.partial(turn, by=by), as_arrays(self.batch)) for by in range(self.steps)]
        return Reference(base, self.loss_fn, self.make_tx(whole), params, state, trained, batches, self.max_grad_norm)

    def _cut_axes(self, axes: Sequence[str]) -> list[str]:
        """Return those of the axes that cut parameters of the model, if it is placed on them."""
        found = []
        for axis in axes:
            with contextlib.suppress(ValueError):  # such as a number of layers that 2 does not divide
                layout = self.shard(Case((("fsdp", 1), (axis, 2))), lambda model: model).layout
                found += [axis] if any(cut.axis == axis for leaf in layout.leaves for cut in leaf.cuts) else []
        return found

    def _check_keys(self, keyed: Reference, run: Run) -> Cause | None:
        """Check a step with the model's own random keys: devices draw different numbers, and keep the keys."""
        one = keyed.train(1)
        diagnosis = Diagnosis(keyed, one, run, 1, [])
        cells = diagnosis.cells()
        wanted, given = diagnosis.flat(diagnosis.wanted), diagnosis.flat(diagnosis.given)
        if cells.is_sum(given) and not cells.is_sum(wanted):  # masks that one device draws have no effect otherwise
            return Cause("shared-key", "every device draws the numbers of the model's keys for its own rows")
        if kept := [item.name for item in differences(run.values, one, one, keyed.eps) if item.kind == "model state"]:
            return Cause("model-state", f"{', '.join(kept[:3])}: not one device's, with the model's own keys")
        return None

    def _prove(self, case: Case, reference: Reference, one: Values, moved: Values, keyed: Reference | None) -> Proved:
        begin = time.perf_counter()
        try:
            model = self.shard(case, functools.partial(with_weights, reference=reference))
            tx = capture(self.make_tx(model))
            options: dict[str, Any] = {"program": case.program, "accumulate": case.accumulate}
            options |= {"max_grad_norm": self.max_grad_norm, "compiler_options": fast_to_compile()}
            make_step = functools.partial(model.train_step, self.loss_fn, tx, **options)
            run = run_case(model, make_step, tx, reference)
        except Exception as error:  # the other cases run anyway
            place = traceback.extract_tb(error.__traceback__)[-1].filename
            is_refusal = isinstance(error, ValueError) and place.startswith(str(Path(__file__).parents[1]))
            status, text = (REFUSED, str(error)) if is_refusal else (RAISED, f"{type(error).__name__}: {error}")
            return Proved(case, status, (), Cause(status, text), 0.0, time.perf_counter() - begin)
        found = differences(run.values, one, moved, reference.eps)
        is_equal, scale = not found and not run.copies, scale_of(one.of("gradient"))
        diagnosis = Diagnosis(reference, one, run, case.accumulate, found)
        cause = _torn(reference, one, run) if is_equal else diagnosis.cause()
        if cause is None and keyed and case.accumulate == 1 and run.layout.data_axes:
            cause = self._check_keys(keyed, run_case(model, make_step, tx, keyed))
        given, wanted = run.values.of("gradient"), one.of("gradient")
        gaps = [norm(given[n] - x) / (norm(x) + 1e-3 * scale) for n, x in wanted.items() if n in given]
        status, seconds = DIFFERS if cause else EQUAL, time.perf_counter() - begin
        return Proved(case, status, tuple(found), cause, float(max(gaps, default=0.0)), seconds)


def _check_values(one: Values) -> None:
    """Check that one device computes a loss and gradients to compare.

    Raises:
      ValueError: naming the value that is not finite, or if every gradient is zero.
    """
    values = [(kind, name, x) for kind in ("loss", "gradient") for name, x in one.of(kind).items()]
    if bad := [f"{kind} {name}" for kind, name, x in values if not np.isfinite(x).all()]:
        raise ValueError(f"prove: on one device {bad[0]} is not finite; use weights and a batch with a finite loss")
    if not scale_of(one.of("gradient")):
        raise ValueError("prove: on one device every gradient is zero; use a batch with weights above zero")


def _widen(x: Any) -> Any:
    return x.astype(jnp.float64) if not is_key(x) and jnp.issubdtype(x.dtype, jnp.floating) else x


def _torn(reference: Reference, one: Values, run: Run) -> Cause | None:
    """Return that the losses of microbatches do not add up to the loss of all rows, if they should."""
    total, weight, *_ = reference.gradient(reference.params, reference.state, reference.batches[0])
    pair = float(total / weight), float(one.arrays["loss", "step 1"])
    if reference.draws or not run.adds_up or math.isclose(*pair, rel_tol=1e-4 + 16 * reference.eps):
        return None
    return Cause("coupled-rows", f"the loss is {pair[0]:g} for all rows, and {pair[1]:g} for the sum over microbatches")


def with_weights(model: Any, reference: Reference) -> Any:
    """Return a model with the weights and the state of a reference.

    Raises:
      ValueError: if the model has other parameters than the reference.
    """
    base = as_model(model)
    if other := base.params.keys() ^ reference.params.keys():
        raise ValueError(f"prove: {min(other)} is a parameter on some meshes only, and cannot be compared")
    plain = base.plain(reference.params, reference.state)
    return (*model[:2], plain) if isinstance(model, tuple | list) else plain
