"""Checkpoints and a run directory of jfsdp 0.2 restore; `v0_2/write.py`, as commit 4df5d02 has it, wrote them."""

import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.trainer.help_groups import read_command
from jfsdp.trainer.run.build import build
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.directory import check_same, read_config
from jfsdp.trainer.run.resume_rules import memory_since_0_2
from jfsdp.trainer.sources.source import open_source
from tests.models_small import Block, Tower
from tests.scripts.command import TINY
from tests.states import logical
from tests.steps import fully_shard

HERE = Path(__file__).parent / "v0_2"
CASES: dict[str, dict[str, Any]] = {
    "full_shard": {"mesh": {"fsdp": 4}},
    "hybrid_shard": {"mesh": {"replica": 2, "fsdp": 2}, "strategy": "hybrid_shard"},
    "flat": {"mesh": {"fsdp": 4}, "program": "manual", "storage": "flat"},
    "lora": {"mesh": {"fsdp": 4}, "lora": jfsdp.LoRA(["**.up.kernel"], rank=2, dropout=0.1, dora=True)},
    "nf4": {"mesh": {"fsdp": 4}, "frozen": "blocks", "quantized": {"**.up.kernel": "nf4"}},
    "ema": {"mesh": {"fsdp": 4}},
    "float16": {"mesh": {"fsdp": 4}, "units": [Block], "mp_policy": jfsdp.MixedPrecisionPolicy("float16")},
    "pipe": {"mesh": {"pipe": 2, "fsdp": 2}},
}

RUN = [
    *["--model", "llama-tiny", "--model-config", *TINY, "vocab_size=257", "--seq-len", "16", "--batch-per-device", "2"],
    *["--data", "corpus", "--tokenizer", "byte", "--eval-batches", "1", "--log-every", "1", "--sample-tokens", "0"],
    *["--checkpoint-every", "2", "--simulate-devices", "4", "--mesh", "replica=2,fsdp=2", "--strategy", "hybrid_shard"],
    *["--learning-rate", "1e-2", "--decay-steps", "4", "--remat", "none"],
]


@pytest.mark.filterwarnings("ignore:mesh axis 'pipe'")
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_restore_bitwise(name):
    options = {"units": ["blocks", "embed"], **CASES[name]}
    sizes, dim = options.pop("mesh"), 16 if name == "nf4" else 4
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    factory = lambda rngs: Tower(rngs, name != "float16", dim=dim, num_layers=2)  # noqa: E731
    model = fully_shard(factory, mesh=mesh, min_size=8, **options)
    tx = optax.adamw(1e-2)
    tx = optax.chain(tx, jfsdp.optim.track_ema(0.9)) if name == "ema" else tx
    found = logical(jfsdp.checkpoint.restore(HERE / name, model.abstract_state(tx)))
    wanted = np.load(HERE / name / "expected.npz")  # its files know no bfloat16
    assert {n: (x.shape, x.tobytes()) for n, x in found.items()} == {
        n: (x.shape, x.tobytes()) for n, x in wanted.items()
    }


def test_a_run_resumes_with_its_state_and_the_next_batch(tmp_path, monkeypatch):
    shutil.copytree(HERE / "corpus", tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HERE / "run", tmp_path / "run")
    stored = read_config(tmp_path / "run")
    parts = build(read_command(TrainConfig, [*RUN, "--steps", "3", "--resume", "auto"]), stored, jax.devices()[:4])
    source = open_source(parts.config, parts.job, parts.row_items)
    check_same(tmp_path / "run", parts.decides | source.decides())

    with jfsdp.checkpoint.Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        like = parts.model.abstract_state(parts.tx)
        state, extra = checkpoints.restore(like=like)
    assert int(state.step) == 2
    iterator = source.train_batches(batch_size=8, process_index=0, process_count=1)
    iterator.set_state(extra["data"])
    found, expected = source.prepare(next(iterator)), np.load(HERE / "run" / "next_batch.npz")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_a_run_on_replicas_is_told_the_change_of_memory():
    stored, mesh = read_config(HERE / "run"), {"replica": 2, "fsdp": 2}
    assert memory_since_0_2(stored, mesh) == "", "hybrid_shard held as much"
    was_whole = {"config": stored["config"] | {"strategy": "full_shard"}}
    for fact in ("'full_shard'", "2 times the memory", "--mesh fsdp=4"):
        assert fact in memory_since_0_2(was_whole, mesh)
    assert memory_since_0_2(was_whole, {"replica": 1, "fsdp": 4}) == ""
    assert memory_since_0_2({"config": was_whole["config"] | {"opt_over": None}}, mesh) == "", "not of 0.2"
    assert memory_since_0_2({}, mesh) == ""
