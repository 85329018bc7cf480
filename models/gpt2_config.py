"""Configuration of GPT-2, the published sizes, and their FLOPs."""

from dataclasses import dataclass
from functools import partial

from .attention import AttentionChoice
from .checks import (
    MAX_HEADS,
    MAX_LAYERS,
    require_attention,
    require_bool,
    require_counts,
    require_documents,
    require_fraction,
    require_heads,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Dimensions and options of a model.

    Args:
      vocab_size: V, rows of the embedding, which is also the head.
      num_positions: P, rows of the position table: the maximum row length.
      dim: D, width of the residual stream.
      num_layers: L.
      num_heads: H; must divide `dim`.
      norm_eps: epsilon added to the variance.
      dropout: rate on the embeddings and on the output of each half of a block.
      attention_dropout: rate on the attention probabilities. If it is not 0, training uses plain attention, with scores
        `[B H T T]` in memory: no fused kernel draws these masks.
      stacked: store blocks stacked, with a leading dim, and scan over them (compile time independent of depth); else a
        list.
      attention: "xla" | "cudnn" | "auto". See [Note: choosing the attention kernel] in attention.py.
      documents_per_row: maximum number of documents in a packed row, including padding, if attention receives their
        positions (cuDNN on GPUs from Hopper on). Its memory grows with this number. Data pipelines observe it. None:
        any number, and attention reads a mask.
      loss_chunk: number of tokens of a row whose logits exist at a time in training; see [Note: a loss without logits]
        in losses.py.

    Raises:
      ValueError: for invalid or contradictory values; names field, value and remedy.
    """

    vocab_size: int = 50_257
    num_positions: int = 1024
    dim: int
    num_layers: int
    num_heads: int
    norm_eps: float = 1e-5
    dropout: float = 0.1
    attention_dropout: float = 0.1
    stacked: bool = True
    attention: AttentionChoice = "auto"
    documents_per_row: int | None = 64
    loss_chunk: int = 512

    def __post_init__(self):
        require_counts(self, "vocab_size", "num_positions", "dim", "loss_chunk")
        require_documents(self)
        require_counts(self, "num_layers", maximum=MAX_LAYERS)
        require_counts(self, "num_heads", maximum=MAX_HEADS)
        require_positive(self, "norm_eps")
        require_fraction(self, "dropout", "attention_dropout")
        require_bool(self, "stacked")
        require_heads(self)
        require_attention(self)

    @property
    def matmul_params_per_layer(self) -> int:
        """Number of weights per block in matmuls: 3 + 1 matrices of attention, 4 + 4 of the MLP."""
        return 12 * self.dim**2

    @property
    def num_params(self) -> int:
        """Number of parameters; the tied head counts once."""
        norms, biases = 4 * self.dim, 9 * self.dim
        tables = (self.vocab_size + self.num_positions) * self.dim
        return tables + self.num_layers * (self.matmul_params_per_layer + norms + biases) + 2 * self.dim


def flops_per_token(config: GPT2Config, num_keys: float) -> float:
    """Return the model FLOPs of forward and backward per token: `6 N + 12 L D T`, as for Llama.

    N is the number of weights in matmuls: with the tied head, without lookups, norms and biases. The attention term
    counts scores and values over T=`num_keys` keys; see `llama_config.flops_per_token`.
    """
    matmul_params = config.num_layers * config.matmul_params_per_layer + config.dim * config.vocab_size
    return 6.0 * matmul_params + 12.0 * config.num_layers * config.dim * num_keys


_no_dropout = partial(GPT2Config, dropout=0.0, attention_dropout=0.0)

PRESETS: dict[str, GPT2Config] = {
    # Bytes and eight special tokens; small enough to learn on a CPU, and too small to need dropout.
    "gpt2-tiny": _no_dropout(vocab_size=264, num_positions=256, dim=128, num_layers=4, num_heads=4),
    "gpt2": GPT2Config(dim=768, num_layers=12, num_heads=12),
    "gpt2-medium": GPT2Config(dim=1024, num_layers=24, num_heads=16),
    "gpt2-large": GPT2Config(dim=1280, num_layers=36, num_heads=20),
    "gpt2-xl": GPT2Config(dim=1600, num_layers=48, num_heads=25),
}
