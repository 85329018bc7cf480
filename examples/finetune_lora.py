"""Fine-tune published weights with LoRA in your own loop, and export the adapter for PEFT.

    python examples/finetune_lora.py llama-8b Llama-3.1-8B texts.jsonl adapter

MODEL is a name of `jfsdp models`, WEIGHTS a directory as `hf download` leaves it, with `config.json`, safetensors and
`tokenizer.json`, and each line of DATA has a field `text`. It uses all devices that JAX sees.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optax
from tokenizers import Tokenizer

import jfsdp
from jfsdp.checkpoint.foreign.pretrained import pretrained_fields

TARGETS = ["**.attn.*_proj.kernel", "**.mlp.*.kernel"]


def batches(data: Path, tokenizer: Tokenizer, rows: int, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of the texts, one after another and cut into rows, for any number of passes."""
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    ids = np.array([token for text in texts for token in tokenizer.encode(text).ids], np.int32)
    size = rows * length
    if len(ids) <= size:
        raise SystemExit(f"{data}: has {len(ids)} tokens; a batch of {rows} rows of {length} takes {size + 1}")
    while True:
        for start in range(0, len(ids) - size, size):
            part = ids[start : start + size + 1]
            yield {"tokens": part[:-1].reshape(rows, length), "targets": part[1:].reshape(rows, length)}


def main(
    name: str,
    weights: Path,
    data: Path,
    adapter: Path,
    learning_rate: float = 2e-4,
    steps: int = 100,
    rows: int = 8,
    length: int = 512,
) -> list[float]:
    """Train, print, export; return the loss of each step."""
    job = jfsdp.trainer.find_job(name)
    job = job.with_config(**pretrained_fields(weights, job.pretrained))  # the sizes in its config.json
    adapted = jfsdp.lora(job.model, jfsdp.LoRA(targets=TARGETS, rank=16, alpha=32))
    # The base is frozen and kept in bfloat16. Only the adapter has gradients and optimizer states.
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", frozen_dtype="bfloat16")
    model = jfsdp.fully_shard(adapted, units=job.units, mp_policy=policy, remat="full")
    tx = job.optimizer(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps=10, decay_steps=steps))
    step = model.train_step(job.loss, tx, max_grad_norm=1.0)
    # Each device reads only its shards of the weights.
    state = jfsdp.checkpoint.load_pretrained(weights, model, tx, job.pretrained, config=job.config)
    losses = []
    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    for number, batch in zip(range(1, steps + 1), batches(data, tokenizer, rows, length)):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if number % 10 == 0:
            print(f"step {number}: loss {losses[-1]:.4f}", flush=True)
    jfsdp.peft.export_peft(model, state, adapter, job.pretrained, base=str(weights))
    print(f"wrote {adapter}: load it with peft.PeftModel.from_pretrained(model, {str(adapter)!r})")
    return losses


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(f"usage: {sys.argv[0]} MODEL WEIGHTS DATA ADAPTER")
    weights, data, adapter = map(Path, sys.argv[2:])
    main(sys.argv[1], weights, data, adapter)
