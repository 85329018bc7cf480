"""Llama and Qwen 3 in the checkpoints of torchtitan, and Llama in those of Meta: names and order of arrays.

Source: torchtitan 0.3, `models/llama3/state_dict_adapter.py` and `models/qwen3/state_dict_adapter.py`.
"""

from typing import Any

from .llama_config import LlamaConfig

# Where the projections are and how the head is named: torchtitan from 0.3 on, and before it, as Meta.
_FORMATS = {
    "layers.*.attention.qkv_linear.*": ("attention.qkv_linear", "lm_head"),
    "layers.*.attention.wq.*": ("attention", "output"),
}


def titan_names(config: LlamaConfig) -> dict[str, Any]:
    """Return mappings of names, by a glob of names that only their format has.

    Llama there rotates neighboring elements of a head, and here, as in Hugging Face, the two halves of a head: the rows
    of the projections to queries and keys have another order. Qwen 3 rotates halves in both.
    """
    half = config.head_size // 2
    rotated = "in out -> out in" if config.qk_norm else f"in (heads pair=2 half={half}) -> (heads half pair) in"
    return {
        glob: {
            "rules": _rules(where, head, rotated),
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
