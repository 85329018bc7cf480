"""Configuration of Llama and its relatives, the published presets, and their FLOPs."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .attention import AttentionChoice
from .checks import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_SIZE,
    is_count,
    require_attention,
    require_bool,
    require_choice,
    require_counts,
    require_documents,
    require_positive,
)

ROPE_KINDS = ("llama3", "linear", "dynamic", "yarn")
GEMMA_OPTIONS = ("query_pre_attn_scalar", "attention_softcap", "final_softcap", "local_rope_theta")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary embedding for longer contexts, by one of four rules of Hugging Face (`rope_type`).

    - llama3 (Llama 3.1): wavelengths above `original_context / low_freq_factor` are multiplied by `factor`, wavelengths
      below `original_context / high_freq_factor` are kept, and others are interpolated.
    - linear: all wavelengths are multiplied by `factor` (arXiv 2306.15595).
    - dynamic: the base grows with rows longer than `original_context` (NTK), so all tokens of a row depend on its
      longest position. Shorter rows are not scaled.
    - yarn: pairs with more than `beta_fast` turns in `original_context` are kept, the wavelengths of pairs with fewer
      than `beta_slow` turns are multiplied by `factor`, and others are interpolated. Cosines and sines are multiplied
      by `attention_factor` (arXiv 2309.00071).

    Args:
      attention_factor: for yarn; None: `0.1 * log(factor) + 1`.
      truncate: for yarn: whether the bounds between kept and scaled pairs are whole numbers.
    """

    kind: Literal["llama3", "linear", "dynamic", "yarn"] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        require_choice(self, "kind", ROPE_KINDS)
        require_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_context")
        require_positive(self, "beta_fast", "beta_slow", *["attention_factor"] * (self.attention_factor is not None))
        require_bool(self, "truncate")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"RopeScaling.beta_fast={self.beta_fast} must exceed beta_slow={self.beta_slow}; 32.0 and 1.0 are usual"
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RopeScaling.high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}; Llama 3 uses 4.0 and 1.0"
            )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Dimensions and options of a model.

    Args:
      vocab_size: V, rows of the embedding.
      dim: D, width of the residual stream.
      num_layers: L.
      num_heads: H, query heads.
      num_kv_heads: K, key/value heads; must divide `num_heads`.
      ffn_dim: F, width inside the SwiGLU.
      head_dim: A, size of one head; None: `dim // num_heads`. Qwen 3 and others set it independently.
      norm_eps: epsilon added to the mean square.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: scaling of the rotary embedding, or None.
      local_window_size: number of keys that a query sees, including its own (Mistral's `sliding_window`); None: all
        earlier keys.
      full_attention_every: with a window, every n-th layer sees all earlier keys (2 in gpt-oss); None: no layer.
      sinks: one learned score per head in the softmax of attention, that belongs to no key (gpt-oss). Attention is
        then computed by XLA.
      gemma: what all Gemmas have: norms multiply by 1 + scale, and also follow attention and MLP; embeddings are
        multiplied by sqrt(D), and the MLP is a GeGLU.
      query_pre_attn_scalar: scores are divided by its root; None: the size of a head.
      attention_softcap, final_softcap: limits of the scores and of the logits, as `cap * tanh(x / cap)` (Gemma 2);
        None: no limit. Attention with a limit is computed by XLA.
      local_rope_theta: `rope_theta` of the layers with a window, whose rotation is not scaled (Gemma 3); None: all
        layers are alike.
      tied: the head is the transposed embedding, and there is no `lm_head`.
      qkv_bias: biases on the query, key and value projections (Qwen 2).
      out_bias: a bias on the output projection of attention (with `qkv_bias`: Hugging Face's `attention_bias`).
      qk_norm: RMSNorm over each query and key head before the rotation (Qwen 3).
      stacked: store layers stacked, with a leading dim, and scan over them (compile time independent of depth); else a
        list.
      attention: "xla" | "cudnn" | "auto". See [Note: choosing the attention kernel] in attention.py.
      documents_per_row: maximum number of documents in a packed row, including padding, if attention receives their
        positions (cuDNN on GPUs from Hopper on). Its memory grows with this number. Data pipelines observe it. None:
        any number, and attention reads a mask.
      loss_chunk: number of tokens of a row whose logits exist at a time in training; see [Note: a loss without logits]
        in losses.py.
      token_chunk: number of tokens of a row on which a layer computes everything except attention at a time, in
        training; must divide the row. None: whole rows. See `by_chunks`.
      num_experts: E, the experts of each layer in place of its MLP, of width `ffn_dim`; None: an MLP.
      experts_per_token: k, experts of each token.
      normalize_experts: divide the router's k scores of a token by their sum (Hugging Face's `norm_topk_prob`).
      swiglu_limit: experts as in gpt-oss: gate and up are one array, clipped at this limit, with biases, also of the
        router; None: a SwiGLU without biases.
      capacity: places of an expert for the tokens of a row, in multiples of `T k / E`, the mean; tokens beyond it pass
        the layer by. None: no limit, at E/k times the products. Logits and generation have no limit.
      expert_parts: number of equal parts of the places, whose all-to-alls over mesh axis `expert` can run during the
        products of others; see `jfsdp.experts`.
      expert_send: "copies" or "tokens", the values sent over that axis.
      balance_loss, z_loss: coefficients of the two losses of routers, each a mean over tokens and layers. Hugging
        Face's `router_aux_loss_coef` is 1/k of `balance_loss`.
      context_by: how mesh axis `context` splits attention: "heads" (all-to-alls), or "keys", for more devices than
        heads; see `jfsdp.attention`.

    Raises:
      ValueError: for invalid or contradictory values; names field, value and remedy.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    head_dim: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    local_window_size: int | None = None
    full_attention_every: int | None = None
    sinks: bool = False
    gemma: bool = False
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    local_rope_theta: float | None = None
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    stacked: bool = True
    attention: AttentionChoice = "auto"
    documents_per_row: int | None = 64
    loss_chunk: int = 2048
    token_chunk: int | None = None
    context_by: Literal["heads", "keys"] = "heads"
    num_experts: int | None = None
    experts_per_token: int = 2
    normalize_experts: bool = True
    swiglu_limit: float | None = None
    capacity: float | None = 1.25
    expert_parts: int = 1
    expert_send: Literal["copies", "tokens"] = "copies"
    balance_loss: float = 0.01
    z_loss: float = 0.0

    def __post_init__(self):
        require_counts(self, "vocab_size", "dim", "ffn_dim", "loss_chunk")
        require_documents(self)
        require_counts(self, "num_layers", maximum=MAX_LAYERS)
        require_counts(self, "num_heads", "num_kv_heads", maximum=MAX_HEADS)
        require_positive(self, "norm_eps", "rope_theta")
        require_counts(self, *(name for name in ("head_dim", "token_chunk") if getattr(self, name) is not None))
        if self.local_window_size is not None and not is_count(self.local_window_size, MAX_SIZE):
            raise ValueError(
                f"LlamaConfig.local_window_size={self.local_window_size!r} must be at least 1 (the query itself); "
                "pass None for no window"
            )
        if self.full_attention_every is not None:
            require_counts(self, "full_attention_every")
            if self.local_window_size is None:
                raise ValueError(
                    f"LlamaConfig.full_attention_every={self.full_attention_every} needs local_window_size, the window "
                    "of the other layers"
                )
            if self.context_by == "keys":
                raise ValueError(
                    f"LlamaConfig.full_attention_every={self.full_attention_every} needs context_by='heads'; gathered "
                    "keys have the same window in all layers"
                )
        if self.sinks and (self.attention == "cudnn" or self.context_by == "keys"):
            raise ValueError(
                "LlamaConfig.sinks needs attention='xla' or 'auto', and context_by='heads': cuDNN has no derivative "
                "for sinks"
            )
        if self.swiglu_limit is not None and (self.num_experts is None or not self.normalize_experts):
            raise ValueError(
                f"LlamaConfig.swiglu_limit={self.swiglu_limit} is an option of gpt-oss's experts; set num_experts, and "
                "leave normalize_experts=True"
            )
        self._check_gemma()
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"LlamaConfig.rope_scaling={self.rope_scaling!r} must be a RopeScaling, or None")
        require_bool(self, "sinks", "gemma", "tied", "qkv_bias", "out_bias", "qk_norm", "stacked")
        if self.num_heads % self.num_kv_heads:
            divisors = [d for d in range(1, self.num_heads + 1) if self.num_heads % d == 0]
            raise ValueError(
                f"LlamaConfig.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                f"choose one of {divisors}"
            )
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"LlamaConfig.dim={self.dim} is not a multiple of num_heads={self.num_heads}; "
                "choose another dim= or num_heads=, or pass head_dim="
            )
        if self.head_size <= 0 or self.head_size % 2:
            raise ValueError(
                f"LlamaConfig.head_dim={self.head_size} must be positive and even, because the rotary embedding "
                "pairs its halves; pass another head_dim="
            )
        require_attention(self)
        require_choice(self, "context_by", ("heads", "keys"))
        if self.num_experts is not None:
            self._check_experts()

    def _check_gemma(self) -> None:
        require_positive(self, *(name for name in GEMMA_OPTIONS if getattr(self, name) is not None))
        is_xla = self.attention != "cudnn" and self.context_by == "heads" and not self.sinks
        if self.attention_softcap is not None and not is_xla:
            raise ValueError(
                f"LlamaConfig.attention_softcap={self.attention_softcap} needs attention='xla' or 'auto', "
                "context_by='heads' and no sinks: other kernels do not limit scores"
            )
        if self.local_rope_theta is not None and self.full_attention_every is None:
            raise ValueError(
                f"LlamaConfig.local_rope_theta={self.local_rope_theta} needs full_attention_every, the layers with "
                "rope_theta"
            )
        if self.gemma and self.num_experts is not None:
            raise ValueError(f"LlamaConfig.gemma has no experts; pass num_experts=None, not {self.num_experts}")

    def _check_experts(self) -> None:
        require_counts(self, "num_experts", "experts_per_token", "expert_parts")
        require_bool(self, "normalize_experts")
        require_choice(self, "expert_send", ("copies", "tokens"))
        num, k, capacity = self.num_experts or 0, self.experts_per_token, self.capacity
        if k > num:
            raise ValueError(f"LlamaConfig.experts_per_token={k} exceeds num_experts={num}; choose at most {num}")
        if capacity is not None and not 1 <= capacity < math.inf:
            raise ValueError(
                f"LlamaConfig.capacity={capacity} must be at least 1, the places that equal loads need, or None for no "
                "limit"
            )
        if not all(0 <= coefficient < math.inf for coefficient in (self.balance_loss, self.z_loss)):
            raise ValueError(
                f"LlamaConfig.balance_loss={self.balance_loss} and z_loss={self.z_loss} must be finite and at least 0"
            )
        if self.token_chunk is not None:
            raise ValueError(
                f"LlamaConfig.token_chunk={self.token_chunk}: experts count places in whole rows; pass None"
            )

    @property
    def attention_kernel(self) -> AttentionChoice:
        """`attention`; "xla" with sinks or limited scores, which no other kernel computes."""
        return "xla" if self.sinks or self.attention_softcap is not None else self.attention

    @property
    def head_size(self) -> int:
        """A: `head_dim`, or `dim // num_heads` if it is None."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def matmul_params_per_layer(self) -> int:
        """Number of weights per layer in matmuls (without norms and biases)."""
        return self._matmul_params(self.num_experts or 1)

    @property
    def matmul_params_per_token(self) -> int:
        """Number of these weights that compute a token: with experts, those of k of them."""
        return self._matmul_params(1 if self.num_experts is None else self.experts_per_token)

    def _matmul_params(self, num_experts: int) -> int:
        attention = 2 * self.dim * (self.num_heads + self.num_kv_heads) * self.head_size
        return attention + self.dim * (self.num_experts or 0) + 3 * num_experts * self.dim * self.ffn_dim

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied head counts once."""
        norms = (4 if self.gemma else 2) * self.dim + (2 * self.head_size if self.qk_norm else 0)
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_size if self.qkv_bias else 0
        biases += (self.dim if self.out_bias else 0) + (self.num_heads if self.sinks else 0)
        if self.swiglu_limit is not None:
            biases += (self.num_experts or 0) * (2 * self.ffn_dim + self.dim + 1)
        tables = self.vocab_size * self.dim * (1 if self.tied else 2)
        return self.num_layers * (self.matmul_params_per_layer + norms + biases) + self.dim + tables


def flops_per_token(config: LlamaConfig, num_keys: float) -> float:
    """Return the model FLOPs of forward and backward per token: `6 N + 12 L H A T`.

    N is the number of weights in matmuls: with the head (tied or not), without the lookup, norms and biases; of experts
    those of the k that compute a token, with a router of all. The
    attention term counts scores and values over T=`num_keys` keys. With all keys of a row, *without* halving for
    causality, it is the convention of PaLM (arXiv 2204.02311, appendix B) and torchtitan. With the average number of
    keys that a token sees, it is the work of causal attention. A shorter window replaces T.
    Recomputed activations do not count: this is for MFU, not for hardware utilization.
    """
    matmul_params = config.num_layers * config.matmul_params_per_token + config.dim * config.vocab_size
    window, num_full = min(num_keys, config.local_window_size or num_keys), 0
    if config.full_attention_every is not None:
        num_full = config.num_layers // config.full_attention_every
    all_keys = num_full * num_keys + (config.num_layers - num_full) * window
    return 6.0 * matmul_params + 12.0 * config.num_heads * config.head_size * all_keys


_llama3 = partial(LlamaConfig, vocab_size=128_256, num_kv_heads=8)
_llama32_scaling = RopeScaling(factor=32.0)
_llama31_scaling = RopeScaling(factor=8.0)
_qwen = partial(LlamaConfig, rope_theta=1e6, norm_eps=1e-6)
_mixtral = partial(LlamaConfig, num_kv_heads=8, rope_theta=1e6, num_experts=8, experts_per_token=2)
_qwen_moe = partial(
    _qwen, vocab_size=151_936, num_kv_heads=4, head_dim=128, qk_norm=True, num_experts=128, experts_per_token=8
)
_gpt_oss = partial(
    LlamaConfig,
    vocab_size=201_088,
    dim=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    ffn_dim=2880,
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_context=4096, truncate=False),
    local_window_size=128,
    full_attention_every=2,
    sinks=True,
    qkv_bias=True,
    out_bias=True,
    experts_per_token=4,
    swiglu_limit=7.0,
)

_gemma = partial(
    LlamaConfig, head_dim=256, norm_eps=1e-6, gemma=True, query_pre_attn_scalar=256, tied=True, num_kv_heads=4
)
_gemma2 = partial(_gemma, vocab_size=256_000, rope_theta=1e4, local_window_size=4096, full_attention_every=2)
_gemma2 = partial(_gemma2, attention_softcap=50.0, final_softcap=30.0)
_gemma3 = partial(_gemma, vocab_size=262_208, qk_norm=True, local_window_size=1024, full_attention_every=6)
_gemma3 = partial(_gemma3, rope_theta=1e6, local_rope_theta=1e4, rope_scaling=RopeScaling(kind="linear", factor=8.0))
_gemma3_1b = partial(_gemma3, vocab_size=262_144, local_window_size=512, rope_scaling=None)

PRESETS: dict[str, LlamaConfig] = {
    # Bytes and eight special tokens; small enough to learn on a CPU.
    "llama-tiny": LlamaConfig(
        vocab_size=264, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=352, rope_theta=10_000.0
    ),
    "llama-1b": _llama3(dim=2048, num_layers=16, num_heads=32, ffn_dim=8192, rope_scaling=_llama32_scaling, tied=True),
    "llama-3b": _llama3(dim=3072, num_layers=28, num_heads=24, ffn_dim=8192, rope_scaling=_llama32_scaling, tied=True),
    "llama-8b": _llama3(dim=4096, num_layers=32, num_heads=32, ffn_dim=14_336, rope_scaling=_llama31_scaling),
    "llama-70b": _llama3(dim=8192, num_layers=80, num_heads=64, ffn_dim=28_672, rope_scaling=_llama31_scaling),
    "llama-405b": _llama3(dim=16_384, num_layers=126, num_heads=128, ffn_dim=53_248, rope_scaling=_llama31_scaling),
    "mistral-7b": LlamaConfig(
        vocab_size=32_000,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=14_336,
        rope_theta=10_000.0,
        local_window_size=4096,
    ),
    "qwen2.5-7b": _qwen(
        vocab_size=152_064, dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, ffn_dim=18_944, qkv_bias=True
    ),
    "qwen3-8b": _qwen(
        vocab_size=151_936,
        dim=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=12_288,
        head_dim=128,
        qk_norm=True,
    ),
    "mixtral-8x7b": _mixtral(vocab_size=32_000, dim=4096, num_layers=32, num_heads=32, ffn_dim=14_336),
    "mixtral-8x22b": _mixtral(vocab_size=32_768, dim=6144, num_layers=56, num_heads=48, ffn_dim=16_384),
    "qwen3-30b-a3b": _qwen_moe(dim=2048, num_layers=48, num_heads=32, ffn_dim=768),
    "qwen3-235b-a22b": _qwen_moe(dim=4096, num_layers=94, num_heads=64, ffn_dim=1536),
    "gpt-oss-20b": _gpt_oss(num_layers=24, num_experts=32),
    "gpt-oss-120b": _gpt_oss(num_layers=36, num_experts=128),
    "gemma2-2b": _gemma2(dim=2304, num_layers=26, num_heads=8, ffn_dim=9216),
    "gemma2-9b": _gemma2(dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, ffn_dim=14_336),
    "gemma2-27b": _gemma2(
        dim=4608, num_layers=46, num_heads=32, num_kv_heads=16, ffn_dim=36_864, head_dim=128, query_pre_attn_scalar=144
    ),
    # The larger ones of Gemma 3 without their part for images.
    "gemma3-1b": _gemma3_1b(dim=1152, num_layers=26, num_heads=4, num_kv_heads=1, ffn_dim=6912),
    "gemma3-4b-text": _gemma3(dim=2560, num_layers=34, num_heads=8, ffn_dim=10_240),
    "gemma3-12b-text": _gemma3(dim=3840, num_layers=48, num_heads=16, num_kv_heads=8, ffn_dim=15_360),
    "gemma3-27b-text": _gemma3(
        dim=5376, num_layers=62, num_heads=32, num_kv_heads=16, ffn_dim=21_504, head_dim=128, query_pre_attn_scalar=168
    ),
    # As llama-tiny, with eight experts.
    "moe-tiny": LlamaConfig(
        vocab_size=264,
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=176,
        rope_theta=10_000.0,
        num_experts=8,
    ),
}
