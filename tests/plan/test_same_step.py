"""What is planned is what runs: the same text, byte for byte, from the script's parts and from a plan's."""

import dataclasses
import json
import re
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from jfsdp.plan.jobs import shard_planned
from jfsdp.trainer.options import StepOptions
from jfsdp.trainer.run.build import build
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.source import open_source
from jfsdp.trainer.sources.tokens import PairSource
from tests import hlo
from tests.options import made
from tests.thin import thin

CASES = {
    "llama": {"model": "llama-tiny", "seq_len": 64, "accumulate": 2, "batch_per_device": 4, "mesh": "replica=2,fsdp=4"},
    "gpt2": {"model": "gpt2-tiny", "seq_len": 64, "cross_documents": True, "ema": 0.9, "strategy": "zero1"},
    "pairs": {"model": "llama-tiny", "seq_len": 64, "preference": "dpo", "lora": ("rank=4,targets=**.q_proj.kernel",)},
    "list": {"model": "llama-tiny", "seq_len": 64, "model_config": ("stacked=false",), "opt_state_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i} " * 9}) + "\n" for i in range(90)))
    pairs = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(90)]
    path.with_name("pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    safetensors.numpy.save_file({"w": np.zeros(1)}, path.with_name("w.safetensors"))
    return path


def lowered(step, batch):
    text = step.lower(step.abstract_state(), batch).as_text()
    return re.sub(r'"\d{12,}"', '"address"', text)  # of the function by which JAX partitions cuDNN's plain attention


@pytest.mark.parametrize(
    ("target", "case"),
    [
        *thin([("gpu", case) for case in ("list", "llama", "pairs", "gpt2")]),
        *thin([("cpu", case) for case in CASES], 4),
    ],
)
def test_a_plan_lowers_what_the_script_runs(case, target, data):
    devices = jax.devices() if target == "cpu" else hlo.h100s(1)
    options = made(StepOptions, **CASES[case])
    path, weights = data.with_name("pairs.jsonl") if options.preference else data, data.with_name("w.safetensors")
    begin: dict[str, Any] = {"init_from": str(weights), "tokenizer": "byte"} if options.preference else {}
    config = made(TrainConfig, **dataclasses.asdict(options), data=str(path), **begin)
    parts = build(config, {}, devices)
    source = open_source(parts.config, parts.job, parts.row_items)
    if isinstance(source, PairSource):
        source.reference = np.zeros((source.num_documents, 2), np.float32)  # pyright: ignore
    batch = source.prepare(next(source.train_batches(batch_size=parts.global_batch)))
    run = lowered(parts.step, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    planned = shard_planned(options, devices)
    assert run == lowered(planned.step, planned.batch)
    assert ("segment_ids" in planned.batch) is (not options.cross_documents and options.preference is None)
