"""GPT-2 in Hugging Face's format: names of arrays, and reading and writing of `config.json`.

Hugging Face's kernels are also `[in, out]` (`Conv1D`), so no dims are transposed.
"""

from collections.abc import Mapping
from typing import Any

from .checks import MAX_HEADS, MAX_LAYERS
from .gpt2_config import GPT2Config
from .hf_config import Options, check_architecture, refusal

_BLOCK = ["ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def _rules() -> list[tuple[str, str]]:
    rules = [("wte.embedding", "transformer.wte.weight"), ("wpe.embedding", "transformer.wpe.weight")]
    for name in ["ln_f", *(f"h_{{i}}.{part}" for part in _BLOCK)]:
        theirs = f"transformer.{name.replace('h_{i}', 'h.{i}')}"
        weight = "scale" if "ln_" in name else "kernel"
        rules += [(f"{name}.{weight}", f"{theirs}.weight"), (f"{name}.bias", f"{theirs}.bias")]
    return rules


def fields_from_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of `GPT2Config` from a `config.json`, without dropout rates, which a job chooses.

    Raises:
      ValueError: for another architecture, and for options that the model does not support; names them.
    """
    check_architecture(options, ["gpt2"])
    read = Options(options)
    read.take_only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    read.take_only("scale_attn_weights", True)
    read.take_only("scale_attn_by_inverse_layer_idx", False)
    read.take_only("add_cross_attention", False)
    read.take_only("tie_word_embeddings", True)
    # The softmax here is always in float32 (reorder_and_upcast_attn); n_ctx is an old name of n_positions.
    # gpt2-medium, -large and -xl have n_special and predict_special_tokens, which transformers does not read.
    read.skip(["resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn", "n_ctx"])
    read.skip(["n_special", "predict_special_tokens"])
    read.skip(f"summary_{kind}" for kind in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"))
    dim = read.count("n_embd", 768)
    if read.take("n_inner") not in (None, 4 * dim):
        raise refusal("n_inner", read.take("n_inner"), [4 * dim])
    fields = {
        "vocab_size": read.count("vocab_size", 50_257),
        "num_positions": read.count("n_positions", 1024),
        "dim": dim,
        "num_layers": read.count("n_layer", 12, maximum=MAX_LAYERS),
        "num_heads": read.count("n_head", 12, maximum=MAX_HEADS),
        "norm_eps": read.number("layer_norm_epsilon", 1e-5),
    }
    read.refuse_others()
    return fields


def config_from_fields(config: GPT2Config, seq_len: int) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Args:
      seq_len: not used; the position table limits the row length.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.num_positions,
        "n_embd": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


PRETRAINED: dict[str, Any] = {
    "rules": _rules(),
    # The causal mask, stored by old versions.
    "ignored": ["*.attn.bias", "*.attn.masked_bias"],
    "tied": {"lm_head.weight": "transformer.wte.weight"},
    "prefix": "transformer.",
    "from_config": fields_from_config,
    "to_config": config_from_fields,
}
