"""The Llamas and GPT-2 with rows over several devices equal one device, by the functions that a job hands over."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.trainer.job import as_job
from jfsdp.trainer.options import StepOptions, shard_job
from jfsdp_models import gpt2, llama  # pyright: ignore[reportMissingImports]
from jfsdp_models.gpt2_config import GPT2Config  # pyright: ignore[reportMissingImports]
from jfsdp_models.llama_config import LlamaConfig, RopeScaling  # pyright: ignore[reportMissingImports]
from tests.context.test_over_context import ROWS, TOKENS, VOCAB, error, make_batch, one_device
from tests.pairwise import cover

LIMIT = 2e-5  # the models compute norms, rotations and losses in float32
LLAMA: Any = {"vocab_size": VOCAB, "dim": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4}
LLAMA |= {"ffn_dim": 48, "loss_chunk": 3}
GPT2: Any = {"vocab_size": VOCAB, "dim": 32, "num_layers": 2, "num_heads": 4, "num_positions": TOKENS, "loss_chunk": 8}
DYNAMIC = RopeScaling(kind="dynamic", factor=2.0, original_context=8)
JOBS = {
    "llama": llama.make_job(LlamaConfig(**LLAMA), TOKENS),
    "chunks, window": llama.make_job(LlamaConfig(**LLAMA, token_chunk=4, local_window_size=5), TOKENS),
    "keys": llama.make_job(LlamaConfig(**LLAMA, context_by="keys", rope_scaling=DYNAMIC), TOKENS),
    "keys, window": llama.make_job(LlamaConfig(**LLAMA, context_by="keys", token_chunk=4, local_window_size=5), TOKENS),
    "list, dynamic": llama.make_job(LlamaConfig(**LLAMA, rope_scaling=DYNAMIC, stacked=False, qk_norm=True), TOKENS),
    "gpt2": gpt2.make_job(GPT2Config(**GPT2), TOKENS),
    "gpt2 list": gpt2.make_job(GPT2Config(**GPT2, stacked=False), TOKENS),
}
MESHES = {"2 x 4": {"fsdp": 2, "context": 4}, "2 x tensor 2": {"context": 2, "tensor": 2}}


@functools.cache
def wanted(name, packed):
    job = JOBS[name]
    return one_device(job["model"], make_batch(packed), job.get("eval_loss", job["loss"]))


def sharded(name, batch, mesh, program):
    job = as_job(JOBS[name], name)
    made = jfsdp.make_mesh(**{"fsdp": 1, **MESHES[mesh]}, devices=jax.devices()[: 8 if mesh == "2 x 4" else 4])
    model = shard_job(StepOptions(param_dtype=None, min_size=0, remat="none"), job, made)
    step = model.grads(job.eval_loss or job.loss, program=program, check_loss=False)
    _, grads, metrics = step(model.init(optax.sgd(1.0), 0), batch)
    return float(metrics["loss"]), [np.asarray(x) for x in jax.tree.leaves(grads)]


COLUMNS = {"name": list(JOBS), "packed": [True, False], "mesh": list(MESHES), "program": ["manual", "xla"]}
QUICK = [  # both families, layers of both forms, rows over heads and keys, chunks and windows
    ("chunks, window", True, "2 x tensor 2", "manual"),
    ("keys", True, "2 x 4", "xla"),
    ("list, dynamic", True, "2 x 4", "manual"),
    ("gpt2", True, "2 x 4", "manual"),
]


@pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")
@pytest.mark.parametrize(
    list(COLUMNS), [pytest.param(*row, marks=[pytest.mark.proof] * (row not in QUICK)) for row in cover(COLUMNS)]
)
def test_a_job_over_context_equals_one_device(name, packed, mesh, program):
    assert ROWS == 8
    assert error(sharded(name, make_batch(packed), mesh, program), wanted(name, packed)) <= LIMIT
