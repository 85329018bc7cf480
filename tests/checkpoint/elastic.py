"""Runs that are saved under one setting and go on under another; also called in the processes of `tests.processes`."""

import dataclasses
import functools
import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import jfsdp
from tests.models_small import Block, Tower, make_batches, token_loss
from tests.pairwise import cover
from tests.states import logical
from tests.steps import fully_shard
from tests.ways import WAYS

TX = optax.adamw(1e-2, eps=1e-4)
BEFORE, AFTER, ROWS = 2, 2, 12

MESHES = {
    "1": {"fsdp": 1},
    "2": {"fsdp": 2},
    "4": {"fsdp": 4},
    "2x2": {"replica": 2, "fsdp": 2},
    "3": {"fsdp": 3},
    "2 processes": {"replica": 2, "fsdp": 2},  # each has two devices
}
STRATEGIES = {
    "full_shard": {},
    "zero1": {"mp_policy": jfsdp.MixedPrecisionPolicy("bfloat16")},  # keeps a copy in bfloat16 at rest
    "all": {},
    "ddp": {},
}
FORMS = {"auto": {}, "manual": {"program": "manual"}, "flat": {"program": "manual", "storage": "flat"}}
COLUMNS = {"mesh": list(MESHES), "strategy": list(STRATEGIES), "form": list(FORMS), "layers": ["stacked", "listed"]}


def net(rngs, stacked):
    """As little as can be trained: these tests compile dozens of steps. The vocabulary divides by no mesh."""
    tower = Tower(rngs, stacked, dim=12, num_layers=2)
    tower.embed.dtype = None  # that of its weight in use: a scan wants one dtype
    return tower


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run is laid out."""

    mesh: str
    strategy: str
    form: str
    layers: str

    def __str__(self) -> str:
        return " ".join(dataclasses.astuple(self)).replace("2 processes", "2procs").replace(" ", ",")

    @property
    def is_remote(self) -> bool:
        return self.mesh == "2 processes"


# Every pair of values of two columns stands in some setting.
SETTINGS = [Setting(*row) for row in cover(COLUMNS)]
# Every value of a column stands in one of these, and each goes on as the next.
CHAIN = [
    Setting("1", "full_shard", "auto", "stacked"),
    Setting("2", "zero1", "manual", "listed"),
    Setting("4", "full_shard", "flat", "listed"),
    Setting("2x2", "all", "manual", "stacked"),
    Setting("3", "ddp", "auto", "stacked"),
    Setting("2 processes", "all", "flat", "stacked"),
]


@functools.cache
def model(setting: Setting) -> jfsdp.ShardedModel:
    sizes = MESHES[setting.mesh]
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    source = functools.partial(net, stacked=setting.layers == "stacked")
    options: dict[str, Any] = {**STRATEGIES[setting.strategy], **FORMS[setting.form]}
    return fully_shard(source, mesh=mesh, strategy=WAYS[setting.strategy], units=[Block], min_size=20, **options)


@functools.cache
def train_step(setting: Setting) -> Any:
    return model(setting).train_step(token_loss, TX, check_loss=False)


def train(setting, state, first, num):
    """Take steps on this process's share of the batches; return the state and the losses."""
    size, index = ROWS // jax.process_count(), jax.process_index()
    losses = []
    for batch in make_batches(BEFORE + AFTER, rows=ROWS)[first : first + num]:
        own = {name: rows[index * size : (index + 1) * size] for name, rows in batch.items()}
        state, metrics = train_step(setting)(state, own)
        losses.append(float(metrics["loss"]))
    return state, losses


def lived_in(state: jfsdp.TrainState) -> jfsdp.TrainState:
    """Moments of their own, every element another, and counts that are not zero; padding is."""

    def change(role: Any, x: jax.Array) -> jax.Array:
        inside = np.zeros(x.shape, np.float32)
        if x.ndim and x.size > 1:
            part = tuple(map(slice, role.shape))
            inside[part] = 1 + np.arange(inside[part].size).reshape(inside[part].shape)
        return jax.device_put(jnp.asarray(inside, x.dtype) + (x + 1 if x.ndim == 0 else 0), x.sharding)

    opt_state = state.roles.map(change, state.opt_state)
    return dataclasses.replace(state, opt_state=opt_state, step=change(None, state.step))


def bits(state: jfsdp.TrainState) -> dict[str, str]:
    """Say what every logical array of a state is, down to its bits; layers are stacked, and keys are their data."""
    gather = lambda value: multihost_utils.process_allgather(value, tiled=True)  # noqa: E731
    arrays = logical(state, gather if jax.process_count() > 1 else np.asarray)
    return {name: describe(value) for name, value in stack_layers(arrays).items()}


def stack_layers(arrays):
    """Stack what a list of layers holds: `blocks.0.up.kernel` and on are `blocks.up.kernel`."""
    found, layers = {}, {}
    for name, value in arrays.items():
        match = re.fullmatch(r"(.*\bblocks)\.(\d+)\.(.*)", name)
        if match:
            layers.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
        else:
            found[name] = value
    return found | {name: np.stack([values[n] for n in range(len(values))]) for name, values in layers.items()}


def describe(value: np.ndarray) -> str:
    return f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"


def begin(fields, path):
    """Train and save; return the state's bits and the losses of the steps that follow."""
    setting = Setting(*fields)
    state, _ = train(setting, model(setting).init(TX, seed=ROWS), 0, BEFORE)
    jfsdp.checkpoint.save(path, state)
    found = bits(state)
    return found, train(setting, state, BEFORE, AFTER)[1]


def go_on(fields, path):
    """Restore what `begin` saved, maybe under another setting; return what it does."""
    setting = Setting(*fields)
    state = jfsdp.checkpoint.restore(path, like=model(setting).abstract_state(TX))
    found = bits(state)
    return found, train(setting, state, BEFORE, AFTER)[1]
