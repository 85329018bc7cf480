"""Llama and Qwen 3 in the checkpoints of torchtitan, and Llama in those of Meta: names and order of arrays.

Source: torchtitan 0.3, `models/llama3/state_dict_adapter.py` and `models/qwen3/state_dict_adapter.py`.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from .llama_config import LlamaConfig

# Where the projections are and how the head is named: torchtitan from 0.3 on, and before it, as Meta.
_FORMATS = {
    "layers.*.attention.qkv_linear.*": ("attention.qkv_linear", "lm_head"),
    "layers.*.attention.wq.*": ("attention", "output"),
}


def titan_names(config: LlamaConfig) -> dict[str, Any]:
    """Return mappings of names, by a glob of names that only their format has.

    Their Llama rotates neighboring elements of a head. Ours rotates the two halves, as Hugging Face does. So the
    projections to queries and keys have another order of rows. Qwen 3 rotates halves in both.
    """
    half = config.head_size // 2
    rotated = "in out -> out in" if config.qk_norm else f"in (heads pair=2 half={half}) -> (heads half pair) in"
    return {
        glob: {
            "rules": _rules(where, head, rotated),
            "view": partial(Unfused, config),
            "ignored": ["*freqs*"],  # tables of older versions
            "tied": {f"{head}.weight": "tok_embeddings.weight"},
        }
        for glob, (where, head) in _FORMATS.items()
    }


def _rules(where: str, head: str, rotated: str) -> list[tuple[str, ...]]:
    return [
        ("embed.embedding", "tok_embeddings.weight"),
        ("layers.{i}.attn_norm.scale", "layers.{i}.attention_norm.weight"),
        ("layers.{i}.attn.q_proj.kernel", f"layers.{{i}}.{where}.wq.weight", rotated),
        ("layers.{i}.attn.k_proj.kernel", f"layers.{{i}}.{where}.wk.weight", rotated),
        ("layers.{i}.attn.v_proj.kernel", f"layers.{{i}}.{where}.wv.weight", "in out -> out in"),
        ("layers.{i}.attn.o_proj.kernel", "layers.{i}.attention.wo.weight", "in out -> out in"),
        ("layers.{i}.attn.q_norm.scale", "layers.{i}.attention.q_norm.weight"),
        ("layers.{i}.attn.k_norm.scale", "layers.{i}.attention.k_norm.weight"),
        ("layers.{i}.mlp_norm.scale", "layers.{i}.ffn_norm.weight"),
        ("layers.{i}.mlp.gate_proj.kernel", "layers.{i}.feed_forward.w1.weight", "in out -> out in"),
        ("layers.{i}.mlp.up_proj.kernel", "layers.{i}.feed_forward.w3.weight", "in out -> out in"),
        ("layers.{i}.mlp.down_proj.kernel", "layers.{i}.feed_forward.w2.weight", "in out -> out in"),
        ("norm.scale", "norm.weight"),
        ("lm_head.kernel", f"{head}.weight", "in out -> out in"),
    ]


class Unfused:
    """A checkpoint with wq, wk and wv in place of each fused wqkv, as states of the optimizer have it.

    The rows of wqkv are, for each head of keys: its heads of queries, its keys, its values.
    """

    def __init__(self, config: LlamaConfig, source: Any):
        self.source, self.size, group = source, config.head_size, config.num_heads // config.num_kv_heads
        self.heads, self.arrays = group + 2, dict[str, Any]()
        self.parts: dict[str, tuple[str, int, int]] = {}  # the fused array, the first head and the number of heads
        for name, array in source.arrays.items():
            if ".wqkv." not in name:
                self.arrays[name] = array
                continue
            for part, first, number in (("wq", 0, group), ("wk", group, 1), ("wv", group + 1, 1)):
                shape = array.shape[0] // self.heads * number, *array.shape[1:]
                new = name.replace(".wqkv.", f".{part}.")
                self.arrays[new] = jax.ShapeDtypeStruct(shape, array.dtype)
                self.parts[new] = name, first, number

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read one slice of one array."""
        if name not in self.parts:
            return self.source.read(name, index)
        fused, first, number = self.parts[name]
        rows, step = index[0], number * self.size
        begin, end = rows.start // step, -(-rows.stop // step)
        whole = slice(begin * self.heads * self.size, end * self.heads * self.size)
        block = self.source.read(fused, (whole, *index[1:]))
        heads = block.reshape(end - begin, self.heads, self.size, *block.shape[1:])[:, first : first + number]
        found = heads.reshape((end - begin) * step, *block.shape[1:])
        return found[rows.start - begin * step : rows.stop - begin * step]
