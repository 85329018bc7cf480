"""Small training steps compiled for H100s that are not there, for the ledger and the audit: a narrow Llama."""

import dataclasses
import functools
from typing import Any

import jfsdp
from jfsdp.trainer.job import find_job
from jfsdp_models.losses import next_token_loss  # pyright: ignore[reportMissingImports]
from tests import hlo
from tests.steps import fully_shard
from tests.ways import WAYS

SEQ_LEN = 512


@functools.cache
def job(num_layers=2, attention="cudnn", **config):
    narrow = {"dim": 1024, "ffn_dim": 2048, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 4096} | config
    found = find_job("llama-8b").with_config(num_layers=num_layers, attention=attention, **narrow)
    return dataclasses.replace(found, loss=next_token_loss)  # of logits, which no loop cuts


def build(strategy: Any = "full_shard", hosts=1, mesh=(), devices=None, config=(), dtype="bfloat16", **options):
    task, sizes = job(**dict(config)), dict(mesh)
    given = {"remat": "full", "mp_policy": jfsdp.MixedPrecisionPolicy(dtype)}
    if sizes.keys() & {"pipe", "tensor"}:
        given["placements"] = task.placements
    return fully_shard(
        task.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(hosts) if devices is None else devices, **sizes),
        strategy=WAYS.get(strategy, strategy),
        units=task.units,
        **given | options,
    )


def compile_with_step(model, loss, batch, **options):
    """Compile a step as it is run; return it, what it takes, and what XLA made of it."""
    tx = job().optimizer(3e-4)
    step = model.train_step(loss, tx, max_grad_norm=1.0, **options)
    given = model.abstract_state(tx), batch
    return step, given, step.lower(*given).compile(step.compiler_options)


def compile_step(model, *, accumulate=1, state=None, **step):
    task = job()
    tx = task.optimizer(3e-4)
    num_devices = model.mesh.devices.size
    layout = model.layout
    is_even = dict(layout.mesh_sizes)["replica"] == 1 and not any(leaf.padding for leaf in layout.leaves)
    if is_even:  # XLA sends no more than `manual`
        step = {"program": "xla"} | step
    train_step = model.train_step(task.loss, tx, accumulate=accumulate, max_grad_norm=1.0, **step)
    return train_step.lower(state or model.abstract_state(tx), task.batch(num_devices * accumulate, SEQ_LEN)).compile()


@functools.cache
def program(strategy="full_shard", hosts=1, mesh=(), config=(), accumulate=1):
    """The text of a step as it should be, and its layout."""
    model = build(strategy, hosts, mesh, config=config)
    return compile_step(model, accumulate=accumulate).as_text(), model.layout
