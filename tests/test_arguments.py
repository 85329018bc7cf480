"""Wrong arguments of what is public: refused by name, with what was given and what it must be."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
import jfsdp.plan
import jfsdp.testing
from jfsdp.arguments import Count, Share, checked
from jfsdp.launch import runtime
from tests.refusals import refuses, refusing
from tests.sharding import fully_shard

ADAM = optax.adam(1e-2)
MODEL: Any = fully_shard(lambda rngs: nnx.Linear(8, 16, rngs=rngs), min_size=0)
SHARED = {"model": nnx.Linear, "batch": dict, "units": [], "loss": max, "optimizer": optax.adam}


@checked
def take(
    count: Count = 1,
    *,
    number: float = 1.0,
    share: Share | None = None,
    word: str | None = None,
    flag: bool = False,
    by_name: Mapping[str, Mapping[str, int]] | None = None,
    several: str | Sequence[str] = (),
    fn: Callable[..., Any] = max,
    tx: optax.GradientTransformation = ADAM,
    anything: Any = None,
    **extra: Any,
) -> str:
    """Take one of each kind."""
    return "taken"


@pytest.mark.parametrize(
    "given",
    [
        {"count": np.int64(3), "number": 3, "share": 0, "flag": np.True_},
        {"number": np.float32(1), "share": jnp.float32(1), "anything": object(), "unknown": object()},
        {"by_name": {"a": {"b": 3}}, "several": "a", "fn": int, "tx": optax.MultiSteps(ADAM, 2)},
        {"several": {"a", "b"}, "word": "", "count": jnp.int32(3), "number": jnp.bfloat16(1)},
    ],
)
def test_right_arguments_are_taken(given):
    assert take(**given) == "taken"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"count": "3"}, "count='3' must be a whole number, at least 1"),
        ({"count": True}, "count=True must be a whole number, at least 1"),
        ({"count": 3.0}, "count=3.0 must be a whole number, at least 1"),
        ({"number": "1"}, "number='1' must be a number"),
        ({"count": jnp.float32(3)}, "count (a ArrayImpl) must be a whole number, at least 1"),
        ({"number": jnp.ones(2)}, "number (a ArrayImpl) must be a number"),
        ({"number": np.True_}, "number (a bool) must be a number"),
        ({"number": 1j}, "number=1j must be a number"),
        ({"word": b"x"}, "word=b'x' must be text or None"),
        ({"flag": "no"}, "flag='no' must be True or False"),
        ({"flag": 0}, "flag=0 must be True or False"),
        ({"flag": None}, "flag=None must be True or False"),
        ({"by_name": ["a"]}, "by_name (a list) must be a dict or None"),
        ({"by_name": {3: {}}}, "by_name[3]: a key must be text"),
        ({"by_name": {"a": 3}}, "by_name['a']=3 must be a dict"),
        ({"by_name": {"a": {"b": "c"}}}, "by_name['a']['b']='c' must be a whole number"),
        ({"several": 3}, "several=3 must be text or a list of text"),
        ({"several": ["a", 3]}, "several[1]=3 must be text"),
        ({"several": {"a": 3}}, "several (a dict) must be text or a list of text"),
        ({"fn": 3}, "fn=3 must be a function"),
        ({"tx": optax.adam}, "tx (a function) must be an optax transformation, such as optax.adamw(3e-4)"),
        ({"tx": optax.MultiSteps}, "tx (class MultiSteps) must be an optax transformation, such as optax.adamw(3e-4)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(given, told):
    with pytest.raises(TypeError, match=f"^take: {re.escape(told)}$"):
        take(**given)


def test_values_out_of_range_are_no_type_errors():
    refuses(lambda: take(count=0), "take: count=0", "at least 1")
    refuses(lambda: take(number=float("nan")), "take: number=nan")
    refuses(lambda: take(share=1.5), "take: share=1.5", "0 to 1 or None")


def test_unknown_missing_and_surplus_arguments_are_told_with_those_there_are():
    told = "by_size: got an unexpected keyword argument 'min_parameter'; its arguments are"
    with pytest.raises(TypeError, match=f"^{re.escape(told)} min_parameters$"):
        jfsdp.by_size(1, min_parameter=1)  # type: ignore[call-arg]
    with refusing("gather_leaf:", "'path'", error=TypeError):
        jfsdp.checkpoint.gather_leaf(MODEL)  # type: ignore[call-arg,arg-type]
    with refusing("by_size:", "min_parameters", error=TypeError):
        jfsdp.by_size(1, 2)  # type: ignore[call-arg]


def test_a_checked_class_has_a_checked_constructor_and_public_methods():
    assert str(inspect.signature(jfsdp.LoRA)).startswith("(targets:")
    with pytest.raises(TypeError, match=r"^LoRA: rslora=2 must be True or False$"):
        jfsdp.LoRA(["w"], rslora=2)  # type: ignore[arg-type]
    with refusing("init:", "seed=-1", "0", "2147483647"):
        MODEL.init(ADAM, seed=-1)


SPACES = (jfsdp, jfsdp.checkpoint, jfsdp.optim, jfsdp.peft, jfsdp.plan, jfsdp.trainer)
PUBLIC = [getattr(module, name) for module in SPACES for name in module.__all__]
FUNCTIONS = {
    f"{value.__name__}.{name}": member
    for value in PUBLIC
    if callable(value)
    for name, member in (vars(value).items() if isinstance(value, type) else [("", value)])
    if (name == "__init__" or not name.startswith("_")) and hasattr(member, "__wrapped__")
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_annotations_of_public_functions_can_be_read_at_run_time(name):
    hints = typing.get_type_hints(FUNCTIONS[name].__wrapped__, include_extras=True)
    assert hints.keys() >= set(inspect.signature(FUNCTIONS[name]).parameters) - {"self"}


def test_public_functions_are_checked():
    own = {
        "UNIT_INPUT",
        "Split",
        "Loss",
        "Max",
        "Mean",
        "Strategy",
        "alternate",
        "TrainState",
        "Plan",
        "Bound",
        "float8_dot_general",
    }
    names = {name.partition(".")[0] for name in FUNCTIONS}
    assert names == {name for module in SPACES for name in module.__all__} - own


def shard(**options: Any) -> Any:
    return fully_shard(lambda rngs: nnx.Linear(8, 16, rngs=rngs), **{"min_size": 0, **options})


def evaluated(donate: Sequence[int]) -> Any:
    return MODEL.forward(lambda model, x: model(x), donate=donate)(MODEL.init(ADAM, 0), jnp.ones((8, 8)))


class RngsByName(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)


SCALED = jfsdp.MixedPrecisionPolicy("float16", loss_scale=jfsdp.optim.LossScale())
WRONG_TYPES = {
    "make_mesh: fsdp='8' must be a whole number": lambda: jfsdp.make_mesh(fsdp="8"),  # type: ignore[arg-type]
    "make_mesh: fsdp=2.0 must be a whole number": lambda: jfsdp.make_mesh(fsdp=2.0),  # type: ignore[arg-type]
    "make_mesh: fsdp=True must be a whole number": lambda: jfsdp.make_mesh(fsdp=True),
    "devices (a Device) must be a list or None": lambda: jfsdp.make_mesh(devices=jax.devices()[0]),  # type: ignore[arg-type]
    "make_abstract_mesh: sizes['fsdp']=True must be": lambda: jfsdp.make_abstract_mesh({"fsdp": True}),
    "fully_shard: opt_over='fsdp' must be a list": lambda: shard(opt_over="fsdp"),
    "make_mesh: sharding_factor=2.0 must be": lambda: jfsdp.make_mesh(sharding_factor=2.0),  # type: ignore[arg-type]
    "fully_shard: mp_policy=False must be a MixedPrecisionPolicy, such as ": lambda: shard(mp_policy=False),
    "MixedPrecisionPolicy: loss_scale=True must be a": lambda: jfsdp.MixedPrecisionPolicy(loss_scale=True),  # type: ignore
    "fully_shard: remat=True must be none, full, dots or ": lambda: shard(remat=True),
    "fully_shard: per_unit['']=3 must be a dict": lambda: shard(per_unit={"": 3}),
    "fully_shard: per_unit (a list) must be a dict or None": lambda: shard(per_unit=[""]),
    "fully_shard: got an unexpected keyword argument 'stratgy'; its arguments are model": lambda: shard(stratgy=1),
    "frozen adam returned GradientTransformationExtraArgs": lambda: shard(frozen=optax.adam),
    "MixedPrecisionPolicy: cast_forward_inputs='no' must be": lambda: jfsdp.MixedPrecisionPolicy(
        cast_forward_inputs="no"  # type: ignore[arg-type]
    ),
    "Prefetch: forward['a']=3 must be a list of text": lambda: jfsdp.Prefetch({"a": 3}),  # type: ignore[dict-item]
    "LossScale: interval=1.5 must be": lambda: jfsdp.optim.LossScale(interval=1.5),  # type: ignore[arg-type]
    "track_ema: decay='0.9' must be a number": lambda: jfsdp.optim.track_ema("0.9"),  # type: ignore[arg-type]
    "with_ema: state=3 must be a TrainState, as": lambda: jfsdp.optim.with_ema(3),  # type: ignore[arg-type]
    "train_step: accumulate=True must be a whole number": lambda: MODEL.train_step(max, ADAM, accumulate=True),
    "init_from: params['bias']=3 must be an Array": lambda: MODEL.init_from(ADAM, {"bias": 3}),  # type: ignore
    "Snapshots: directory=3 must be text or a path": lambda: jfsdp.checkpoint.Snapshots(3, "run"),  # type: ignore[arg-type]
    "gather_leaf: path=3 must be text": lambda: jfsdp.checkpoint.gather_leaf(MODEL.abstract_state(ADAM), 3),  # type: ignore[arg-type]
    "save: path=3 must be text or a path": lambda: jfsdp.checkpoint.save(3, MODEL.abstract_state(ADAM)),  # type: ignore[arg-type]
    "Checkpointer: keep_best=3 must be text or None": lambda: jfsdp.checkpoint.Checkpointer(
        "a",
        keep_best=3,  # type: ignore[arg-type]
    ),
    "Job: loss=3 must be a function": lambda: jfsdp.trainer.Job(**{**SHARED, "loss": 3}),
    "devices has 1 (a int)": lambda: jfsdp.make_mesh(devices=[1, 2]),
    "Cluster: gpu='h100' must be a Gpu": lambda: jfsdp.plan.Cluster("h100"),  # type: ignore[arg-type]
    "configure_xla: simulate_devices='8' must be": lambda: runtime.configure_xla(simulate_devices="8"),  # type: ignore
}
WRONG_VALUES = {
    "devices has a device twice": lambda: jfsdp.make_mesh(devices=jax.devices()[:1] * 2),
    "unit '': per_unit sets loss_scale": lambda: shard(per_unit={"": {"mp_policy": SCALED}}),
    "is called as f(path, shape), and takes": lambda: shard(placements={"**": lambda path: None}),
    "frozen <lambda> is called as f(path, shape), and takes": lambda: shard(frozen=lambda path: True),
    "model is called as f(rngs), and takes other arguments": lambda: fully_shard(lambda: 3),
    "mesh axis 'dp' is called 'replica'": lambda: jfsdp.make_mesh(dp=2),
    "pass a factory such as lambda rngs: Net(rngs)": lambda: fully_shard(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
    "model Linear needs more than rngs": lambda: fully_shard(nnx.Linear),
    "lambda rngs: Linear(...)": lambda: fully_shard(nnx.Linear),
    "lambda rngs: RngsByName(...)": lambda: fully_shard(RngsByName),
    "by_size: min_parameters=-1 must be a whole number, at least 1": lambda: jfsdp.by_size(-1),
    "Unit: stacked=-1 must be a whole number, at least 0 or None": lambda: jfsdp.Unit("a", -1),
    "interval >= 1, as float32 and int32": lambda: jfsdp.optim.LossScale(initial=1e300),
    "with_ema: the state has shapes only": lambda: jfsdp.optim.with_ema(MODEL.abstract_state(ADAM)),
    "low_precision_state: dtype 'nope' is not one of": lambda: jfsdp.optim.low_precision_state(ADAM, "nope"),
    "loss_fn is called as f(model, batch), and takes": lambda: MODEL.train_step(lambda model: 0.0, ADAM),
    "the step: the state has shapes only": lambda: MODEL.to_flax(MODEL.abstract_state(ADAM)),
    "forward: donate[0]=-1 must be a whole number, at least 0": lambda: MODEL.forward(max, donate=[-1]),
    "donate=[0, 5]: [5] is not an input": lambda: evaluated(donate=[0, 5]),
    "donate=[0, 0]: [0] is not an input, or is repeated": lambda: evaluated(donate=[0, 0]),
    "init_from: params are not the leaves of this model:\n  missing: bias": lambda: MODEL.init_from(ADAM, {}),
    "is not a path; name a directory": lambda: jfsdp.checkpoint.Snapshots("", "run"),
    "take: step=-1 must be a whole number, at least 0": lambda: jfsdp.checkpoint.Snapshots("a", "run").take(
        -1, MODEL.abstract_state(ADAM)
    ),
    "checkpoint '': is not a path; name a directory": lambda: jfsdp.checkpoint.Checkpointer(""),
    "Job: seq_len=0 must be a whole number, at least 1": lambda: jfsdp.trainer.Job(**SHARED, seq_len=0),
    "Work: items=0 must be a whole number, at least 1": lambda: jfsdp.plan.Work(0, 1, "token", None, "float32"),
    "audit: tolerance=-1 must be a number, at least 0": lambda: jfsdp.plan.audit("", MODEL.layout, tolerance=-1),
}


@pytest.mark.parametrize("told", WRONG_TYPES)
def test_what_is_public_refuses_wrong_types_by_name(told):
    refuses(WRONG_TYPES[told], told, error=TypeError)


@pytest.mark.parametrize("told", WRONG_VALUES)
def test_what_is_public_refuses_wrong_values_by_name(told):
    refuses(WRONG_VALUES[told], told)
