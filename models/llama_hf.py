"""Llama and its relatives in Hugging Face's format: names of arrays; reads and writes `config.json`.

Plain data and functions; a job has them as its field `pretrained`.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .checks import MAX_HEADS, MAX_LAYERS
from .hf_config import Options, check_architecture, refusal
from .llama_config import GEMMA_OPTIONS, ROPE_KINDS, LlamaConfig, RopeScaling
from .llama_titan import titan_names

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

# By architecture: the names of the router, and of the experts {e} of a layer with their gate, up and down.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
}
# Of gpt-oss, whose experts are fused and multiply as ours do.
_GPT_OSS = [
    ("layers.{i}.attn.sinks", "model.layers.{i}.self_attn.sinks"),
    ("layers.{i}.mlp.router.kernel", "model.layers.{i}.mlp.router.weight", "in out -> out in"),
    ("layers.{i}.mlp.router.bias", "model.layers.{i}.mlp.router.bias"),
    ("layers.{i}.mlp.experts.gate_up_proj", "model.layers.{i}.mlp.experts.gate_up_proj"),
    ("layers.{i}.mlp.experts.gate_up_bias", "model.layers.{i}.mlp.experts.gate_up_proj_bias"),
    ("layers.{i}.mlp.experts.down_proj", "model.layers.{i}.mlp.experts.down_proj"),
    ("layers.{i}.mlp.experts.down_bias", "model.layers.{i}.mlp.experts.down_proj_bias"),
]
# Of Gemma, whose norms after attention and after the MLP have names of their own.
_GEMMA = [
    ("layers.{i}.attn_out_norm.scale", "model.layers.{i}.post_attention_layernorm.weight"),
    ("layers.{i}.mlp_norm.scale", "model.layers.{i}.pre_feedforward_layernorm.weight"),
    ("layers.{i}.mlp_out_norm.scale", "model.layers.{i}.post_feedforward_layernorm.weight"),
]
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_ORIGINAL = "original_max_position_embeddings"

_GEMMA_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True}
# Defaults of transformers for options that a config.json omits.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096, "moe_intermediate_size": 768},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
    },
    "gemma2": {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0},
}
_HAVE_BIAS = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gemma3_text")


def fields_from_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of `LlamaConfig` from a `config.json`, except storage of layers and the attention kernel.

    Raises:
      ValueError: for another architecture, and for options that the model does not support; names them.
    """
    check_architecture(options, _DEFAULTS)
    read = Options({**_DEFAULTS[options["model_type"]], **options})
    gemma = _gemma(read)
    read.take_only("hidden_act", "silu")
    read.take_only("attention_dropout", 0)
    read.take_only("attention_bias", False, *[True] * (read.architecture in _HAVE_BIAS))
    bias = read.take("attention_bias", read.architecture == "gpt_oss")
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
        "qk_norm": read.architecture.startswith(("qwen3", "gemma3")),
        **gemma,
        **_windows(read),
        **_ropes(read),
        **_experts(read),
    }
    read.refuse_others()
    return fields


def _gemma(read: Options) -> dict[str, Any]:
    """Read the options of Gemma; for other architectures, that they have none."""
    fields: dict[str, Any] = {"gemma": read.architecture.startswith("gemma"), **dict.fromkeys(GEMMA_OPTIONS)}
    if not fields["gemma"]:
        return fields
    read.take_only("hidden_activation", "gelu_pytorch_tanh")
    read.skip(["hidden_act", "cache_implementation", "sliding_window_size", "_sliding_window_pattern"])
    if read.architecture == "gemma3_text":  # transformers does not limit its scores
        read.take_only("attn_logit_softcapping", None)
    fields["attention_softcap"] = read.take("attn_logit_softcapping")
    fields["final_softcap"] = read.take("final_logit_softcapping")
    return fields | {"query_pre_attn_scalar": read.number("query_pre_attn_scalar", 256)}


def _experts(read: Options) -> dict[str, Any]:
    """Read the options of experts; for other architectures, that there are none."""
    if read.architecture == "gpt_oss":
        return _clipped_experts(read)
    if read.architecture not in _EXPERTS:
        return {"num_experts": None}
    is_qwen = read.architecture == "qwen3_moe"
    if is_qwen:
        read.take_only("decoder_sparse_step", 1)
        read.take_only("mlp_only_layers", [], None)
    read.take_only("router_jitter_noise", 0.0)
    names = [name for name in ("num_local_experts", "num_experts") if read.take(name) is not None]
    fields = {
        "num_experts": read.count(names[0] if names else "num_local_experts", 128 if is_qwen else 8),
        "experts_per_token": read.count("num_experts_per_tok", 8 if is_qwen else 2),
        "normalize_experts": read.take("norm_topk_prob", not is_qwen),
    }
    if is_qwen:
        fields["ffn_dim"] = read.count("moe_intermediate_size")
    return fields | _balance(read, fields["experts_per_token"])


def _balance(read: Options, k: int) -> dict[str, Any]:
    """Read the coefficient of the balance loss, which transformers adds only with `output_router_logits`."""
    coefficient = read.take("router_aux_loss_coef", 0.001)
    return {"balance_loss": k * coefficient if read.take("output_router_logits", False) else 0.0}


def _clipped_experts(read: Options) -> dict[str, Any]:
    """Read the options of experts of gpt-oss, whose weights may be in mxfp4."""
    read.skip(["initial_context_length", "experts_per_token"])
    read.take_only("swiglu_alpha", 1.702)
    quantized = read.take("quantization_config") or {"quant_method": "mxfp4"}
    if quantized.get("quant_method") != "mxfp4":
        raise refusal("quantization_config.quant_method", quantized.get("quant_method"), ["mxfp4"])
    k = read.count("num_experts_per_tok", 4)
    return {
        "num_experts": read.count("num_local_experts", 128),
        "experts_per_token": k,
        "normalize_experts": True,
        **_balance(read, k),
        "swiglu_limit": read.number("swiglu_limit", 7.0),
        "sinks": True,
    }


def _windows(read: Options) -> dict[str, Any]:
    """Read the window of attention, and in which layers it is."""
    if read.architecture != "gpt_oss" and not read.architecture.startswith("gemma"):
        return {"local_window_size": _window(read)}
    default = read.count("sliding_window_pattern", 6) if read.architecture == "gemma3_text" else 2
    num, window = read.need("num_hidden_layers"), read.need("sliding_window")
    kinds = read.take("layer_types") or (["sliding_attention"] * (default - 1) + ["full_attention"]) * num
    every = next((place + 1 for place, kind in enumerate(kinds) if kind == "full_attention"), 0)
    pattern = ["sliding_attention"] * (every - 1) + ["full_attention"]
    if not every or list(kinds[:num]) != (pattern * num)[:num]:
        raise refusal("layer_types", kinds, ["one full_attention after equally many sliding_attention"])
    return {"local_window_size": window, "full_attention_every": every}


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


def _ropes(read: Options) -> dict[str, Any]:
    """Read the rotary embedding, of Gemma 3 for layers with and without a window."""
    if read.architecture != "gemma3_text":
        return _rope(read)
    both = Options({"model_type": "rope", **(read.take("rope_parameters") or {})})
    names = ("rope_theta", "rope_scaling", "max_position_embeddings")
    full = {name: read.take(name) for name in names} | {"rope_parameters": both.take("full_attention")}
    local = {"rope_theta": read.take("rope_local_base_freq"), "rope_parameters": both.take("sliding_attention")}
    both.refuse_others()
    found = _rope(Options(local))
    if found["rope_scaling"] is not None:
        raise refusal("rope_parameters.sliding_attention", local["rope_parameters"], ["rope_type 'default'"])
    return {**_rope(Options(full)), "local_rope_theta": found["rope_theta"]}


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
        "architectures": [f"{architecture.removesuffix('_text').title().replace('_', '')}ForCausalLM"],
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
        "max_position_embeddings": seq_len,
        "rope_theta": config.rope_theta,
        **_window_options(architecture, config),
        **_gemma_options(config),
        **({"attention_bias": True} if config.out_bias else {}),
        **_expert_options(architecture, config),
    }
    if (scaling := config.rope_scaling) is not None:
        options["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor, **_scaling_options(scaling)}
        if scaling.kind == "dynamic":
            options["max_position_embeddings"] = scaling.original_context  # determines the frequencies
        elif scaling.kind != "linear":
            options["max_position_embeddings"] = max(seq_len, int(scaling.factor * scaling.original_context))
    return options


def _gemma_options(config: LlamaConfig) -> dict[str, Any]:
    if not config.gemma:
        return {"hidden_act": "silu"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_size,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        **({} if config.local_rope_theta is None else {"rope_local_base_freq": config.local_rope_theta}),
    }


def _expert_options(architecture: str, config: LlamaConfig) -> dict[str, Any]:
    if config.num_experts is None:
        return {}
    options = {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_loss / config.experts_per_token,
        "output_router_logits": config.balance_loss > 0,
    }
    if architecture == "mixtral":
        return options
    if architecture == "gpt_oss":
        return options | {"swiglu_limit": config.swiglu_limit}
    width = {"moe_intermediate_size": config.ffn_dim, "norm_topk_prob": config.normalize_experts}
    return options | {"num_experts": config.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": []} | width


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
    if config.gemma or any(getattr(config, name) is not None for name in GEMMA_OPTIONS):
        return _gemma_architecture(config)
    if config.num_experts is not None or config.sinks or config.full_attention_every is not None:
        return _architecture_with_experts(config)
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


def _gemma_architecture(config: LlamaConfig) -> str:
    is_any = config.gemma and config.full_attention_every is not None and not config.sinks
    is_any = is_any and config.qkv_bias == config.out_bias and config.dim % config.num_heads == 0
    if is_any and not config.qk_norm and config.local_rope_theta is None:
        return "gemma2"
    if is_any and config.qk_norm and config.local_rope_theta is not None and config.attention_softcap is None:
        return "gemma3_text"
    raise ValueError(
        f"LlamaConfig(gemma={config.gemma}, {', '.join(f'{name}={getattr(config, name)}' for name in GEMMA_OPTIONS)}) "
        "has no architecture in Hugging Face: both Gemmas have full_attention_every, no sinks, all biases or none and "
        "a dim that num_heads divides; Gemma 3 also has qk_norm and local_rope_theta, and no attention_softcap"
    )


def _architecture_with_experts(config: LlamaConfig) -> str:
    is_clipped = config.swiglu_limit is not None and config.num_experts is not None
    if is_clipped and config.sinks and config.qkv_bias and config.out_bias and not config.qk_norm:
        return "gpt_oss"
    if is_clipped or config.sinks or config.full_attention_every is not None:
        raise ValueError(
            "LlamaConfig: swiglu_limit, sinks, full_attention_every and biases of attention are those of gpt-oss "
            "together; no architecture in Hugging Face has only some of them"
        )
    if config.qk_norm and config.qkv_bias == config.out_bias:
        return "qwen3_moe"
    if config.qk_norm or config.qkv_bias or config.out_bias or not config.normalize_experts:
        raise ValueError(
            f"LlamaConfig(num_experts={config.num_experts}, qkv_bias={config.qkv_bias}, out_bias={config.out_bias}, "
            f"qk_norm={config.qk_norm}, normalize_experts={config.normalize_experts}) has no architecture in Hugging "
            "Face: Mixtral has none of biases and qk_norm, and Qwen 3 MoE qk_norm with both biases or none; export a "
            "model with one of these combinations"
        )
    return "mixtral"


def _window_options(architecture: str, config: LlamaConfig) -> dict[str, Any]:
    window = config.local_window_size
    if architecture == "llama":
        return {}
    if config.full_attention_every is not None:
        kinds = ["sliding_attention"] * (config.full_attention_every - 1) + ["full_attention"]
        return {"sliding_window": window, "layer_types": (kinds * config.num_layers)[: config.num_layers]}
    if architecture in ("mistral", "mixtral", "gpt_oss"):
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


def pretrained_names(config: LlamaConfig) -> dict[str, Any]:
    """Return the names of a model's parameters in checkpoints of Hugging Face, torchtitan and Meta."""
    if config.gemma:
        return {**PRETRAINED, "rules": [rule for rule in RULES if ".mlp_norm." not in rule[0]] + _GEMMA}
    if config.num_experts is None:
        return {**PRETRAINED, "others": titan_names(config)}
    if config.swiglu_limit is not None:
        rules = [rule for rule in RULES if ".mlp." not in rule[0]] + _GPT_OSS
        return {**PRETRAINED, "rules": rules, "view": Mxfp4}
    router, expert, projections = _EXPERTS["qwen3_moe" if config.qk_norm else "mixtral"]
    rules = [rule for rule in RULES if ".mlp." not in rule[0]]
    rules.append(("layers.{i}.mlp.router.kernel", f"model.layers.{{i}}.{router}.weight", "in out -> out in"))
    for ours, theirs in zip(_PROJECTIONS, projections, strict=True):
        name = f"model.layers.{{i}}.{expert}.{theirs}.weight"
        rules.append((f"layers.{{i}}.mlp.experts.{ours}", name, "in out -> out in"))
    fused = [*rules[:-4], ("layers.{i}.mlp.router.kernel", "model.layers.{i}.mlp.gate.weight", "in out -> out in")]
    for name in _PROJECTIONS:
        theirs = f"model.layers.{{i}}.mlp.experts.{name}"
        fused.append((f"layers.{{i}}.mlp.experts.{name}", theirs, "expert in out -> expert out in"))
    others = {"*.experts.gate_up_proj": {**PRETRAINED, "rules": fused, "view": Split}}
    return {**PRETRAINED, "rules": rules, "others": others}


class Split:
    """A checkpoint of fused experts (a state dict of transformers 5), with gate_proj and up_proj in place of both."""

    def __init__(self, source: Any):
        self.source, self.arrays = source, dict[str, Any]()
        self.parts: dict[str, tuple[str, int]] = {}  # the fused array and the first row
        for name, array in source.arrays.items():
            if not name.endswith(".gate_up_proj"):
                self.arrays[name] = array
                continue
            num, rows, *rest = array.shape
            for place, part in enumerate(("gate_proj", "up_proj")):
                new = name.replace("gate_up_proj", part)
                self.arrays[new] = jax.ShapeDtypeStruct((num, rows // 2, *rest), array.dtype)
                self.parts[new] = name, place * (rows // 2)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read one slice of one array."""
        if name not in self.parts:
            return self.source.read(name, index)
        fused, first = self.parts[name]
        rows = slice(index[1].start + first, index[1].stop + first)
        return self.source.read(fused, (index[0], rows, *index[2:]))


# Values of the 16 codes of mxfp4, in units of a block's scale.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Mxfp4:
    """A checkpoint of gpt-oss with decoded weights in place of mxfp4: `x_blocks`, `x_scales` -> `x`, in bfloat16.

    Blocks are of 32 inputs, two codes in a byte (the first in the low bits), with a power of two in a byte.

    Layout:  blocks [E out in/32 16], scales [E out in/32] uint8 -> [E in out]
    Source:  OCP Microscaling Formats 1.0; order of bytes as in transformers.
    """

    def __init__(self, source: Any):
        self.source, self.arrays = source, dict[str, Any]()
        for name, array in source.arrays.items():
            if name.endswith("_blocks"):
                num, out, blocks, half = array.shape
                shape = num, blocks * 2 * half, out
                self.arrays[name.removesuffix("_blocks")] = jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16)
            elif not name.endswith("_scales"):
                self.arrays[name] = array

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read one slice of one array."""
        if name in self.source.arrays:
            return self.source.read(name, index)
        experts, ins, outs = index
        blocks = slice(ins.start // 32, -(-ins.stop // 32))
        codes = self.source.read(f"{name}_blocks", (experts, outs, blocks, slice(0, 16)))
        scales = self.source.read(f"{name}_scales", (experts, outs, blocks)).astype(np.int32) - 127
        pairs = np.stack([_FP4[codes & 15], _FP4[codes >> 4]], -1).reshape(*codes.shape[:3], 32)
        whole = np.ldexp(pairs, scales[..., None]).reshape(*codes.shape[:2], -1)
        part = whole[..., ins.start - 32 * blocks.start : ins.stop - 32 * blocks.start]
        return part.swapaxes(1, 2).astype(jax.numpy.bfloat16)
