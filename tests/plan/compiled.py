"""Train steps at Llama-3-8B's dims with two layers, compiled for 64 H100s that are not there."""

import functools

import jfsdp
from jfsdp.plan.program import hlo as plan_hlo
from jfsdp.trainer.job import find_job
from tests import hlo

NUM_DEVICES, SEQ_LEN = 64, 1024


@functools.cache
def two_layers(strategy, **mesh):
    """Return the scheduled module, read."""
    job = find_job("llama-8b").with_config(num_layers=2, attention="xla")
    model = jfsdp.fully_shard(
        job.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(8), **(mesh or {"fsdp": -1})),
        strategy=strategy,
        units=job.units,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16"),
    )
    tx = job.optimizer(3e-4)
    step = model.train_step(job.loss, tx, max_grad_norm=1.0)
    compiled = step.lower(model.abstract_state(tx), job.batch(NUM_DEVICES, SEQ_LEN)).compile()
    return plan_hlo.parse_module(compiled.as_text())
