"""Configuration of the Vision Transformer, the published sizes, and their FLOPs."""

from dataclasses import dataclass
from typing import Literal, get_args

from .attention import AttentionChoice
from .checks import (
    MAX_HEADS,
    MAX_LAYERS,
    require_attention,
    require_bool,
    require_choice,
    require_counts,
    require_fraction,
    require_heads,
    require_positive,
)

Norm = Literal["layer", "batch"]
Pool = Literal["token", "mean"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Dimensions and options of a model.

    Args:
      image_size: H and W of an image.
      channels: C of an image.
      patch_size: side of a patch; must divide `image_size`.
      num_classes: K.
      dim: D, width of the residual stream.
      num_layers: L.
      num_heads: must divide `dim`.
      ffn_dim: F, width inside the MLP.
      norm: "layer", as published, or "batch": BatchNorm over batch and patches, whose statistics are state.
      pool: input of the head: "token", a class token in addition to the patches, as published, or "mean", the mean of
        the patches.
      norm_eps: epsilon added to the variance.
      norm_momentum: momentum of the stored batch statistics.
      dropout: rate on the embedded patches and on the output of each half of a block.
      stacked: store blocks stacked, with a leading dim, and scan over them (compile time independent of depth); else a
        list.
      attention: "xla" | "cudnn" | "auto". See [Note: choosing the attention kernel] in attention.py.

    Raises:
      ValueError: for invalid or contradictory values; names field, value and remedy.
    """

    image_size: int = 224
    channels: int = 3
    patch_size: int = 16
    num_classes: int = 1000
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm: Norm = "layer"
    pool: Pool = "token"
    norm_eps: float = 1e-6
    norm_momentum: float = 0.9
    dropout: float = 0.1
    stacked: bool = True
    attention: AttentionChoice = "auto"

    def __post_init__(self):
        require_counts(self, "image_size", "channels", "patch_size", "num_classes", "dim", "ffn_dim")
        require_counts(self, "num_layers", maximum=MAX_LAYERS)
        require_counts(self, "num_heads", maximum=MAX_HEADS)
        require_positive(self, "norm_eps")
        require_fraction(self, "dropout", "norm_momentum")
        require_bool(self, "stacked")
        require_choice(self, "norm", get_args(Norm))
        require_choice(self, "pool", get_args(Pool))
        require_heads(self)
        require_attention(self)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"ViTConfig.image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; choose "
                "another image_size= or patch_size="
            )

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def seq_len(self) -> int:
        """T: the number of patches, plus 1 with a class token."""
        return self.num_patches + (self.pool == "token")

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return self.patch_size**2 * self.channels

    @property
    def matmul_params_per_layer(self) -> int:
        """Number of weights per block in matmuls."""
        return 4 * self.dim**2 + 2 * self.dim * self.ffn_dim

    @property
    def num_params(self) -> int:
        """Number of parameters, without stored batch statistics."""
        vectors = 4 * self.dim + 5 * self.dim + self.ffn_dim  # two norms; biases of attention and MLP
        embedding = (self.patch_dim + 1) * self.dim + self.seq_len * self.dim + (self.pool == "token") * self.dim
        head = 2 * self.dim + (self.dim + 1) * self.num_classes
        return embedding + self.num_layers * (self.matmul_params_per_layer + vectors) + head


def flops_per_image(config: ViTConfig, num_keys: float = 1) -> float:
    """Return the model FLOPs of forward and backward per image: `6 (T N + P E + D K) + 12 L D T^2`.

    N is the number of weights of the blocks in matmuls, P E the patches times their embedding, D K the head. The
    attention term counts scores and values over all T tokens. `num_keys` is ignored: a token sees its whole image.
    """
    del num_keys
    blocks = config.seq_len * config.num_layers * config.matmul_params_per_layer
    ends = config.num_patches * config.patch_dim * config.dim + config.dim * config.num_classes
    return 6.0 * (blocks + ends) + 12.0 * config.num_layers * config.dim * config.seq_len**2


PRESETS: dict[str, ViTConfig] = {
    # Small enough to learn on a CPU.
    "vit-tiny": ViTConfig(
        image_size=8, channels=1, patch_size=2, num_classes=10, dim=64, num_layers=4, num_heads=4, ffn_dim=256
    ),
    "vit-s16": ViTConfig(dim=384, num_layers=12, num_heads=6, ffn_dim=1536),
    "vit-b16": ViTConfig(dim=768, num_layers=12, num_heads=12, ffn_dim=3072),
    "vit-l16": ViTConfig(dim=1024, num_layers=24, num_heads=16, ffn_dim=4096),
}
