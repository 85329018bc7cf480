"""Llama, Mistral, Qwen 2 and Qwen 3 in Hugging Face's format: names of arrays; reads and writes `config.json`.

Plain data and functions; a job has them as its field `pretrained`.
"""

import math
from collections.abc import Mapping
from typing import Any

from .checks import MAX_HEADS, MAX_LAYERS
from .hf_config import Options, check_architecture, refusal
from .llama_config import ROPE_KINDS, LlamaConfig, RopeScaling

# (our name, their name, order of dims). {i}: the layer, which is a leading dim of our array if layers are stacked.
RULES = [
    ("embed.embedding", "model.embed_tokens.weight"),
    ("layers.{i}.attn_norm.scale", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.attn.q_proj.kernel", "model.layers.{i}.self_attn.q_proj.weight", "in out -> out in"),
    ("layers.{i}.attn.k_proj.kernel", "model.layers.{i}.self_attn.k_proj.weight", "in out -> out in"),
    ("layers.{i}.attn.v_proj.kernel", "model.layers.{i}.self_attn.v_proj.weight", "in out -> out in"),
    ("layers.{i}.attn.o_proj.kernel", "model.layers.{i}.self_attn.o_proj.weight", "in out -> out in"),
    ("layers.{i}.attn.q_proj.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    ("layers.{i}.attn.k_proj.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    ("layers.{i}.attn.v_proj.bias", "model.layers.{i}.self_attn.v_proj.bias"),
    ("layers.{i}.attn.o_proj.bias", "model.layers.{i}.self_attn.o_proj.bias"),
    ("layers.{i}.attn.q_norm.scale", "model.layers.{i}.self_attn.q_norm.weight"),
    ("layers.{i}.attn.k_norm.scale", "model.layers.{i}.self_attn.k_norm.weight"),
    ("layers.{i}.mlp_norm.scale", "model.layers.{i}.post_attention_layernorm.weight"),
    ("layers.{i}.mlp.gate_proj.kernel", "model.layers.{i}.mlp.gate_proj.weight", "in out -> out in"),
    ("layers.{i}.mlp.up_proj.kernel", "model.layers.{i}.mlp.up_proj.weight", "in out -> out in"),
    ("layers.{i}.mlp.down_proj.kernel", "model.layers.{i}.mlp.down_proj.weight", "in out -> out in"),
    ("norm.scale", "model.norm.weight"),
    ("lm_head.kernel", "lm_head.weight", "in out -> out in"),
]

_ORIGINAL = "original_max_position_embeddings"

# Defaults of transformers for options that a config.json omits.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}


def fields_from_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of `LlamaConfig` from a `config.json`, except storage of layers and the attention kernel.

    Raises:
      ValueError: for another architecture, and for options that the model does not support; names them.
    """
    check_architecture(options, _DEFAULTS)
    read = Options({**_DEFAULTS[options["model_type"]], **options})
    read.take_only("hidden_act", "silu")
    read.take_only("attention_dropout", 0)
    read.take_only("attention_bias", False, *[True] * (read.architecture in ("llama", "qwen3")))
    bias = read.take("attention_bias", False)
    read.take_only("mlp_bias", False)
    heads, dim = read.count("num_attention_heads", maximum=MAX_HEADS), read.count("hidden_size")
    fields = {
        "vocab_size": read.count("vocab_size"),
        "dim": dim,
        "num_layers": read.count("num_hidden_layers", maximum=MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": read.count("num_key_value_heads", heads, maximum=MAX_HEADS),
        "ffn_dim": read.count("intermediate_size"),
        "head_dim": read.count("head_dim", max(1, dim // heads)),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "tied": read.take("tie_word_embeddings", False),
        "qkv_bias": read.architecture == "qwen2" or bias,
        "out_bias": bias,
        "qk_norm": read.architecture == "qwen3",
        "local_window_size": _window(read),
        **_rope(read),
    }
    read.refuse_others()
    return fields


def _window(read: Options) -> int | None:
    """Read the window of attention; the model has the same window, or none, in all layers."""
    window, kinds = read.take("sliding_window"), read.take("layer_types")
    if read.architecture.startswith("qwen"):
        begin = read.take("max_window_layers", 28)
        if not read.take("use_sliding_window", False):
            window = None
        num_layers = read.need("num_hidden_layers")
        num_full = num_layers if window is None else min(begin, num_layers)
        kinds = kinds or ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    if kinds and len(set(kinds)) > 1:
        raise refusal("layer_types", sorted(set(kinds)), ["the same attention in all layers"])
    if kinds and kinds[0] not in ("full_attention", "sliding_attention"):
        raise refusal("layer_types", kinds[0], ["full_attention", "sliding_attention"])
    if read.architecture == "llama" and window is not None:
        raise refusal("sliding_window", window, [None])
    return None if kinds and kinds[0] == "full_attention" else window


def _rope(read: Options) -> dict[str, Any]:
    """Read `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters` (from 5 on)."""
    theta, scaling = read.take("rope_theta"), read.take("rope_scaling")
    rope = Options({"model_type": "rope", **(scaling or {}), **(read.take("rope_parameters") or {})})
    theta = rope.take("rope_theta", theta)
    kind = rope.take("rope_type", rope.take("type", "default"))
    if kind not in ("default", *ROPE_KINDS):
        raise refusal("rope_type", kind, ["default", *ROPE_KINDS])
    rope.take_only("partial_rotary_factor", 1.0)
    theta = Options({"rope_theta": 10_000.0 if theta is None else theta}).number("rope_theta", 10_000.0)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    if kind != "default":
        fields["rope_scaling"] = RopeScaling(kind=kind, factor=rope.need("factor"), **_scaling(kind, rope, read))
    rope.refuse_others()
    return fields


def _scaling(kind: str, rope: Options, read: Options) -> dict[str, Any]:
    """Read the parameters of a kind of scaling, besides its factor."""
    if kind == "linear":
        return {}
    # For dynamic scaling, transformers reads only max_position_embeddings.
    original = None if kind == "dynamic" else rope.take(_ORIGINAL)
    fields = {"original_context": read.need("max_position_embeddings") if original is None else original}
    if kind == "dynamic":
        return fields
    if kind == "llama3":
        return fields | {name: rope.need(name) for name in ("low_freq_factor", "high_freq_factor")}
    factor, scales = rope.take("attention_factor"), [rope.take(name) for name in ("mscale", "mscale_all_dim")]
    if factor is None and all(scales):
        above, below = (0.1 * scale * math.log(max(rope.need("factor"), 1.0)) + 1.0 for scale in scales)
        factor = above / below
    return fields | {
        "beta_fast": rope.take("beta_fast") or 32.0,
        "beta_slow": rope.take("beta_slow") or 1.0,
        "attention_factor": factor,
        "truncate": rope.take("truncate", True),
    }


def config_from_fields(config: LlamaConfig, seq_len: int) -> dict[str, Any]:
    """Return the `config.json` of a model, with the architecture that computes the same.

    Args:
      seq_len: maximum row length of the model; with rope scaling the longer of this and the scaled context.

    Raises:
      ValueError: if no architecture does, naming the fields.
    """
    architecture = _architecture(config)
    options = {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.ffn_dim,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rope_theta": config.rope_theta,
        **_window_options(architecture, config.local_window_size),
        **({"attention_bias": True} if config.out_bias else {}),
    }
    if (scaling := config.rope_scaling) is not None:
        options["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor, **_scaling_options(scaling)}
        if scaling.kind == "dynamic":
            options["max_position_embeddings"] = scaling.original_context  # determines the frequencies
        elif scaling.kind != "linear":
            options["max_position_embeddings"] = max(seq_len, int(scaling.factor * scaling.original_context))
    return options


def _scaling_options(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind in ("linear", "dynamic"):
        return {}
    names = ["low_freq_factor", "high_freq_factor"]
    if scaling.kind == "yarn":
        names = ["beta_fast", "beta_slow", "truncate", *["attention_factor"] * (scaling.attention_factor is not None)]
    return {_ORIGINAL: scaling.original_context, **{name: getattr(scaling, name) for name in names}}


def _architecture(config: LlamaConfig) -> str:
    # Mistral without a window equals Llama, but transformers requires that a Llama's heads divide its width.
    can_be_llama = config.local_window_size is None and config.dim % config.num_heads == 0
    if config.qk_norm and config.qkv_bias == config.out_bias:
        return "qwen3"
    if not config.qk_norm and config.qkv_bias and not config.out_bias:
        return "qwen2"
    if config.qk_norm or config.qkv_bias != config.out_bias or (config.out_bias and not can_be_llama):
        raise ValueError(
            f"LlamaConfig(qkv_bias={config.qkv_bias}, out_bias={config.out_bias}, qk_norm={config.qk_norm}) has no "
            "architecture in Hugging Face: Qwen 2 has qkv_bias, Qwen 3 qk_norm with both biases or none, Llama both "
            "biases or none and no window; export a model with one of these combinations"
        )
    return "llama" if can_be_llama else "mistral"


def _window_options(architecture: str, window: int | None) -> dict[str, Any]:
    if architecture == "llama":
        return {}
    if architecture == "mistral":
        return {"sliding_window": window}
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}


PRETRAINED: dict[str, Any] = {
    "rules": RULES,
    # Stored by old versions; computed from the configuration.
    "ignored": ["*.rotary_emb.inv_freq"],
    "tied": {"lm_head.weight": "model.embed_tokens.weight"},
    "prefix": "model.",
    "from_config": fields_from_config,
    "to_config": config_from_fields,
}
