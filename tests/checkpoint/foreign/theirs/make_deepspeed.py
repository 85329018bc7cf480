"""Write the checkpoints of DeepSpeed in this directory, and the losses of the steps after them (losses.json).

    pip install deepspeed transformers
    torchrun --nproc-per-node 2 make_deepspeed.py

Written with DeepSpeed 0.19.8, torch 2.13 and transformers 5.23 on a CPU.
"""

import json
import os
import shutil
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import numpy as np
import torch
from deepspeed import comm
from transformers import LlamaConfig, LlamaForCausalLM

HERE, BEFORE, AFTER = Path(__file__).parent, 3, 3
# Sizes that two processes split unevenly.
SIZES = {"vocab_size": 19, "hidden_size": 12, "intermediate_size": 13, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 32}
RUNS = {
    "zero1": ({"stage": 1}, {}, ()),
    "zero2": ({"stage": 2, "round_robin_gradients": True}, {"tie_word_embeddings": True}, ("model.norm.weight",)),
    "zero3": ({"stage": 3, "sub_group_size": 1000}, {}, ("model.embed_tokens.weight",)),
}


def tokens(step):
    """Return token ids [rows, T + 1] of a step."""
    return np.random.default_rng(step).integers(SIZES["vocab_size"], size=(4, 9))


def run(name, zero, options, frozen):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **options, initializer_range=0.3, attn_implementation="eager")
    model = LlamaForCausalLM(config)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path not in frozen)
    trained = [x for x in model.parameters() if x.requires_grad]
    groups = [{"params": [x for x in trained if x.ndim > 1]}]
    groups += [{"params": [x for x in trained if x.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    settings |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=optimizer)
    rank, losses = comm.get_rank(), []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            engine.save_checkpoint(HERE / name)
        rows = torch.tensor(tokens(step)[2 * rank : 2 * rank + 2])
        logits = engine(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / 2
        comm.all_reduce(mean)
        losses.append(float(mean))
    if rank == 0:
        (HERE / name / "config.json").write_text(config.to_json_string())
        for script in (HERE / name).glob("*.py"):
            script.unlink()
    return losses[BEFORE:]


if __name__ == "__main__":
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for name, how in RUNS.items():
        if comm.get_rank() == 0:
            shutil.rmtree(HERE / name, ignore_errors=True)
        comm.barrier()
        found[name] = run(name, *how)
    if comm.get_rank() == 0:
        (HERE / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
