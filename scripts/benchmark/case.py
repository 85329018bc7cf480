"""Inputs shared by all contenders: job and batches, and for PyTorch the initial weights and the optimizer.

The parent process creates them on the CPU, so that only contenders use the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfsdp.checkpoint.foreign.export import export_safetensors
from jfsdp.checkpoint.foreign.mapping import Exported, as_name_map
from jfsdp.checkpoint.foreign.pretrained import config_json
from jfsdp.checkpoint.source import Index
from jfsdp.layout.mesh import make_abstract_mesh, make_mesh, num_data_shards, resolve_sizes
from jfsdp.train.fully_shard import fully_shard
from jfsdp.trainer.job import Job, load_job
from jfsdp.trainer.options import make_optimizer, shard_job, train_arguments

from .adamw import read_adamw
from .options import JFSDP, BenchOptions, as_jfsdp

LEARNING_RATE = 3e-4
NUM_BATCHES = 4


def find_job(options: BenchOptions) -> Job:
    """Load the job that the options name."""
    return load_job(options.model, options.factory).with_config(**dict(options.model_config))


def mesh_sizes(options: BenchOptions, num_devices: int) -> dict[str, int]:
    """Return the sizes of the mesh's axes on `num_devices` devices.

    Raises:
      ValueError: if the product of the sizes is not `num_devices`.
    """
    return resolve_sizes({"fsdp": 1, **dict(options.mesh)}, num_devices)


def count_rows(options: BenchOptions, num_devices: int) -> int:
    """Count the rows of one global batch."""
    return options.batch_per_device * num_data_shards(mesh_sizes(options, num_devices))


def check_case(options: BenchOptions, job: Job, num_devices: int) -> None:
    """Check the options of all contenders before any is started.

    Raises:
      ValueError: naming the option and the remedy.
    """
    sizes = mesh_sizes(options, num_devices)
    train_arguments(options)
    for name in options.settings:
        if name in JFSDP:
            shard_job(as_jfsdp(options, name), job, make_abstract_mesh(sizes))
    if options.torch_settings:
        _check_torch(options, job, sizes)


def _check_torch(options: BenchOptions, job: Job, sizes: Mapping[str, int]) -> None:
    name = options.torch_settings[0]
    others = [axis for axis, size in sizes.items() if axis != "fsdp" and size > 1]
    if others:
        raise ValueError(f"--mesh {options.mesh}: {name} supports only axis fsdp; leave out {others[0]}, or {name}")
    if job.data != "tokens" or not job.pretrained or as_name_map(job.pretrained).to_config is None:
        raise ValueError(
            f"--settings {name}: {job.name} cannot be exported for transformers (see its field `pretrained`); use a "
            f"Llama, Mistral, Qwen or GPT-2, or leave out {name}"
        )
    fields = [field.name for field in dataclasses.fields(job.config) if "dropout" in field.name]
    if any(getattr(job.config, field) for field in fields):
        remedy = " ".join(f"{field}=0" for field in fields)
        raise ValueError(f"--settings {name}: dropout masks differ between libraries; use --model-config {remedy}")


def write_batches(options: BenchOptions, job: Job, rows: int, path: Path) -> None:
    """Write global batches to an `.npz` file, with arrays named `number/place`.

    A row of tokens is one document, and its targets are the next tokens. Other batches are random numbers.
    """
    rng = np.random.default_rng(options.seed)
    arrays = {}
    for number in range(NUM_BATCHES):
        batch = job.batch(rows, options.seq_len or job.seq_len)
        if job.data == "tokens" and isinstance(batch, Mapping) and batch.keys() == {"tokens", "targets"}:
            shape = batch["tokens"].shape
            ids = rng.integers(1, job.vocab_size or 100, (shape[0], shape[1] + 1)).astype(np.int32)
            batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        else:
            batch = jax.tree.map(lambda x: _fill(rng, x), batch)
        arrays |= {f"{number}/{place}": leaf for place, leaf in enumerate(jax.tree.leaves(batch))}
        if job.data == "tokens" and isinstance(batch, Mapping):
            arrays |= {f"{number}/{name}": batch[name] for name in ("tokens", "targets") if name in batch}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _fill(rng: np.random.Generator, x: Any) -> np.ndarray:
    is_whole = jnp.issubdtype(x.dtype, jnp.integer)
    return (rng.integers(1, 100, x.shape) if is_whole else rng.normal(size=x.shape)).astype(x.dtype)


def read_batches(options: BenchOptions, job: Job, rows: int, path: str) -> list[Any]:
    """Read the batches of `write_batches` as pytrees of the job."""
    shapes = job.batch(rows, options.seq_len or job.seq_len)
    leaves, tree = jax.tree.flatten(shapes)
    with np.load(path) as arrays:
        batches = [[arrays[f"{number}/{place}"] for place in range(len(leaves))] for number in range(NUM_BATCHES)]
    return [jax.tree.unflatten(tree, batch) for batch in batches]


class _Arrays:
    """Source of parameters in memory."""

    def __init__(self, params: Mapping[str, jax.Array]):
        self._params = params
        self.arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return np.array(self._params[name][index])


def write_for_torch(options: BenchOptions, job: Job, directory: Path) -> dict[str, Any]:
    """Write the job's initial weights for transformers. Return the other settings of PyTorch's contenders.

    The weights equal those of all other contenders, which use the same seed.

    Memory:  the parameters once, on the host.

    Raises:
      ValueError: for a job that cannot be exported, or an optimizer that is not AdamW.
    """
    model = fully_shard(job.model, mesh=make_mesh(devices=jax.devices()[:1], fsdp=1), units=job.units)
    params = model.init(optax.identity(), options.seed).params
    tx, tree = make_optimizer(options, job, model, LEARNING_RATE), model.model.tree
    adamw = read_adamw(tx, tree, params, LEARNING_RATE)
    source = _Arrays(params)
    seq_len = options.seq_len or job.seq_len
    config = config_json(job.pretrained, job.config, seq_len)
    export_safetensors(source, directory, job.pretrained, config=config)
    pieces = Exported(source, job.pretrained).pieces
    return adamw | {
        "checkpoint": str(directory),
        "decays": {theirs: adamw["decays"][piece.leaf] for theirs, piece in pieces.items()},
        "max_grad_norm": options.max_grad_norm,
        "param_dtype": options.param_dtype,
        "reduce_dtype": options.reduce_dtype or options.param_dtype,
        "remat": options.remat,
        "reshard_after_forward": options.reshard_after_forward,
    }
