"""Write the checkpoint of torchtitan in this directory, and add the losses of the steps after it to losses.json.

    pip install torchtitan
    torchrun --nproc-per-node 1 make_torchtitan.py

Written with torchtitan 0.3.0 and torch 2.13 by its Trainer on a CPU. Replaced for that: the device type, the monitor of
GPU memory, timeouts of process groups, the attention kernel (its own for GPUs needs CUDA), the data and the tokenizer.
"""

import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
import torch._utils
from torch import nn
from torch.utils.data import IterableDataset

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as metrics
import torchtitan.distributed.utils as distributed
import torchtitan.models.llama3 as llama3
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

NAME, BEFORE, AFTER = "torchtitan", 3, 3
DIM, HEADS, KV_HEADS, LAYERS, HIDDEN, VOCAB, TOKENS = 16, 4, 2, 2, 20, 19, 8


class Rows(IterableDataset):
    """The rows of make_deepspeed.py."""

    def __iter__(self):
        for step in range(BEFORE + AFTER + 1):
            for row in np.random.default_rng(step).integers(VOCAB, size=(4, TOKENS + 1)):
                yield {"input": torch.tensor(row[:-1]), "positions": torch.arange(TOKENS)}, torch.tensor(row[1:])


class Loader(ParallelAwareDataloader):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        super().__init__(Rows(), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


class Tokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return VOCAB


class Monitor:
    device_name, device_capacity_gib = "cpu", 1.0

    def __init__(self, *_, **__):
        pass

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


def model():
    wide, norm = {"weight": functools.partial(nn.init.normal_, std=0.3)}, {"weight": nn.init.ones_}
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=TOKENS, theta=10000.0)
    sizes = {"dim": DIM, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "hidden_dim": HIDDEN}
    layers = llama3._build_llama3_layers(n_layers=LAYERS, **sizes, fuse_qkv=True, attn_backend="flex", rope=rope)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=wide),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=norm),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=wide | {"bias": nn.init.zeros_}),
        layers=layers,
    )
    return ModelSpec(
        name="llama3",
        flavor="tiny",
        model=config,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=llama3.pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=llama3.Llama3StateDictAdapter,
    )


def run(directory):
    metrics.DeviceMemoryMonitor, distributed.set_pg_timeouts = Monitor, lambda **_: None
    trainer = Trainer.Config(
        model_spec=model(),
        hf_assets_path=str(directory),
        dump_folder=str(directory),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        training=TrainingConfig(
            local_batch_size=4,
            seq_len=TOKENS,
            steps=BEFORE + AFTER,
            max_norm=1e9,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        metrics=metrics.MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(enable=True, interval=BEFORE, last_save_model_only=False),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    ).build()
    losses = []
    trainer.metrics_processor.log = lambda step, mean, *_, **__: losses.append(mean)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    return losses[BEFORE:]


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)  # paths in the checkpoint are relative
    work, file = Path("work"), Path("losses.json")
    shutil.rmtree(NAME, ignore_errors=True)
    losses = json.loads(file.read_text()) | {NAME: run(work)}
    (work / "checkpoint" / f"step-{BEFORE}").rename(NAME)
    shutil.rmtree(work)
    file.write_text(json.dumps(losses, indent=1) + "\n")
