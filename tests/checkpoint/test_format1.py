"""A checkpoint of format 1, written by the code before format 2: it is read, bit by bit, in every form.

`data/format1.zip` is what `jfsdp.save` of commit c8498b6 wrote of the state that `expected` describes, on eight devices
where `odd` is stored as [16, 11] and `stack` as [2, 8, 5], with `extra={"data": [1, 2]}`.
"""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.checkpoint.files import read_manifest
from tests.checkpoint.elastic import bits, describe

TX = optax.adam(1e-3)
PARAMS = {
    "odd": jnp.arange(13 * 11, dtype=jnp.float32).reshape(13, 11) / 7,
    "stack": jnp.arange(2 * 6 * 5, dtype=jnp.float32).reshape(2, 6, 5) * 3,
    "scale": jnp.arange(5, dtype=jnp.float32) - 2,
    "half": (jnp.arange(40) / 3).astype(jnp.bfloat16).reshape(8, 5),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        for name, value in PARAMS.items():
            setattr(self, name, nnx.Param(jnp.zeros_like(value)))
        self.seen = nnx.BatchStat(jnp.zeros(3))
        self.key = nnx.Variable(jax.random.key(0))


def expected() -> dict[str, str]:
    arrays: dict[str, Any] = {f"params.{name}": value for name, value in PARAMS.items()}
    arrays |= {f"opt_state.0.mu.{name}": value * 2 for name, value in PARAMS.items()}
    arrays |= {f"opt_state.0.nu.{name}": value * value for name, value in PARAMS.items()}
    arrays |= {"opt_state.0.count": np.int32(7), "step": np.int32(41), "num_skipped": np.int32(0)}
    arrays |= {"model_state.seen": jnp.arange(3.0), "model_state.key": jax.random.key_data(jax.random.key(5))}
    return {name: describe(np.asarray(value)) for name, value in arrays.items()}


FORMS: dict[str, dict[str, Any]] = {
    "8": {},
    "3": {"mesh": 3},
    "3, flat": {"mesh": 3, "engine": "manual", "storage": "flat"},
    "8, ddp": {"strategy": "ddp"},
}


def model(form: str) -> jfsdp.ShardedModel:
    options = dict(FORMS[form])
    mesh = jfsdp.make_mesh(devices=jax.devices()[: options.pop("mesh", 8)])
    return jfsdp.fully_shard(Net, mesh=mesh, min_size=8, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("format1") / "c"
    with zipfile.ZipFile(Path(__file__).parent / "data" / "format1.zip") as file:
        file.extractall(where)
    return where


@pytest.mark.parametrize("form", list(FORMS))
def test_every_bit_is_read(form, path):
    assert bits(jfsdp.restore(path, like=model(form).abstract_state(TX))) == expected()


def test_parts_are_read_and_other_models_refused(path):
    like = model("3").init(TX)
    state = jfsdp.restore(path, like=like, only="params")
    wanted = {name: value if name.startswith("params.") else bits(like)[name] for name, value in expected().items()}
    assert bits(state) == wanted
    with pytest.raises(ValueError, match=r"missing from the checkpoint: opt_state\.0\.trace\.half"):
        jfsdp.restore(path, like=model("8").abstract_state(optax.sgd(1e-3, 0.9)))


def test_it_stands_in_a_run_before_steps_of_format_2(path, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(path, run_dir / "41")
    run = jfsdp.Checkpointer(run_dir, keep_best="loss")
    state, extra = run.restore(model("8").abstract_state(TX))
    assert (int(state.step), extra) == (41, {"data": [1, 2]})
    run.save(50, state, metrics={"loss": 1.0})
    run.close()
    assert run.steps() == [41, 50]
    assert [read_manifest(run_dir / str(step))["format"] for step in run.steps()] == [1, 2]
    assert bits(run.restore(model("3").abstract_state(TX))[0]) == expected()


def test_an_array_that_cannot_be_read_is_named(path, tmp_path):
    """Format 1 has no digests: missing files are told, flipped bits cannot be."""
    shutil.copytree(path, tmp_path / "c")
    for data in (tmp_path / "c" / "state").rglob("d/*"):
        data.unlink()
    with pytest.raises(ValueError, match=r"checkpoint .*/c: is damaged: \S+ cannot be read"):
        jfsdp.restore(tmp_path / "c", like=model("8").abstract_state(TX))
