"""Mixture of experts: a layer's feed-forward as experts, of which a router chooses k for each token.

The function that moves tokens to experts is passed to the model (`jfsdp.experts` with the scripts here). Without one,
every expert computes every token.
Named values for remat policies: mlp_hidden (gate and up of the experts), and those of the function.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .elementwise import swiglu
from .llama_config import LlamaConfig
from .over_tensor import over_tensor

ExpertsFn = Callable[..., tuple[jax.Array, Any]]


class Routed(NamedTuple):
    """Losses and metrics of routers, of one layer or summed over layers.

    Attributes:
      loss: [B T] float32, balance and z-losses, with their coefficients.
      dropped: scalar, the number of dropped copies.
      load: scalar, the largest load of an expert, in multiples of the mean.
    """

    loss: jax.Array
    dropped: jax.Array
    load: jax.Array

    def add(self, layer: "Routed") -> "Routed":
        """Add those of a layer."""
        sums = self.loss + layer.loss, self.dropped + layer.dropped, jnp.maximum(self.load, layer.load)
        return Routed(*(new.astype(old.dtype) for new, old in zip(sums, self, strict=True)))


class EachExpert(NamedTuple):
    """The balance loss, z-loss and metrics of `every_expert`; see `jfsdp.experts`."""

    balance: jax.Array
    z: jax.Array
    dropped: jax.Array
    load: jax.Array


def not_routed(tokens: jax.Array) -> Routed:
    """Return the sums before the first layer. Layout: tokens [B T]."""
    zero = jnp.zeros((), jnp.float32)
    return Routed(jnp.zeros(tokens.shape, jnp.float32), zero, zero)


def every_expert(
    x: jax.Array,
    router_logits: jax.Array,
    ffn: Callable[[jax.Array], jax.Array],
    *,
    k: int,
    normalize: bool,
    capacity: float | None,
    mask: jax.Array | None = None,
    parts: int = 1,
    **_: Any,
) -> tuple[jax.Array, EachExpert]:
    """Compute each token by all experts, and sum the results of the k chosen ones; the same as `jfsdp.experts`.

    Layout:  x [B T D], router_logits [B T E] -> [B T D]
    Cost:    E/k times the products that are needed. The balance loss is of the rows that the model receives.
    """
    num, scores = router_logits.shape[-1], jax.nn.softmax(router_logits, -1)
    top, chosen = jax.lax.top_k(scores, k)
    top = top / jnp.sum(top, -1, keepdims=True) if normalize else top
    is_chosen = jax.nn.one_hot(chosen, num, dtype=scores.dtype)
    is_chosen = is_chosen if mask is None else is_chosen * mask[..., None, None]
    is_kept, counts = is_chosen, jax.lax.stop_gradient(jnp.sum(is_chosen, (0, 1, 2)))
    if capacity is not None:
        places = min(math.ceil(capacity * x.shape[1] * k / num), x.shape[1])
        places += -places % parts
        is_kept = is_chosen * (jnp.cumsum(jnp.sum(is_chosen, 2), 1) <= places)[:, :, None]
    y = ffn(jnp.broadcast_to(x.reshape(1, -1, x.shape[-1]), (num, x.shape[0] * x.shape[1], x.shape[-1])))
    weights = jnp.einsum("btk,btke->bte", top, is_kept).astype(x.dtype)
    out = jnp.einsum("bte,ebtd->btd", weights, y.reshape(num, *x.shape))
    share = counts / jnp.maximum(jnp.sum(counts), 1)
    balance, z = num * (scores @ share), jax.nn.logsumexp(router_logits, -1) ** 2
    if mask is not None:
        balance, z = (jnp.where(mask, loss, 0.0) for loss in (balance, z))
    return out, EachExpert(balance, z, jnp.sum(is_chosen - is_kept), jnp.max(share) * num)


class Experts(nnx.Module):
    """The SwiGLUs of the experts, by batched products; weights are stacked along dim 0. Layout: [E N D] -> [E N D]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, gain: float):
        def weight(num_in: int, num_out: int, gain: float = 1.0) -> nnx.Param:
            init = nnx.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal", batch_axis=0)
            return nnx.Param(init(rngs.params(), (config.num_experts or 0, num_in, num_out), jnp.float32))

        self.gate_proj = weight(config.dim, config.ffn_dim)
        self.up_proj = weight(config.dim, config.ffn_dim)
        self.down_proj = weight(config.ffn_dim, config.dim, gain)

    def __call__(self, x: jax.Array) -> jax.Array:
        _check_number(x, self.gate_proj)
        wide = (jnp.einsum("end,edf->enf", x, proj[...]) for proj in (self.gate_proj, self.up_proj))
        gate, up = (checkpoint_name(over_tensor(y, -1), "mlp_hidden") for y in wide)
        return jnp.einsum("enf,efd->end", swiglu(gate, up), self.down_proj[...])


def _check_number(x: jax.Array, weight: Any) -> None:
    if x.shape[0] != weight.shape[0]:
        raise ValueError(
            f"{weight.shape[0]} experts are on each device and tokens of {x.shape[0]}; pass experts=jfsdp.experts to "
            "the model where mesh axis 'expert' cuts the experts"
        )


class ClippedExperts(nnx.Module):
    """The experts of gpt-oss: `down((clip(up) + 1) * gate * sigmoid(1.702 gate)) + bias`. Layout: [E N D] -> [E N D].

    Gate and up alternate along the last dim of one array, as in its checkpoints.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, gain: float):
        num, dim, width = config.num_experts or 0, config.dim, config.ffn_dim
        init = partial(nnx.initializers.variance_scaling, mode="fan_in", distribution="truncated_normal", batch_axis=0)
        self.limit = config.swiglu_limit or math.inf
        self.gate_up_proj = nnx.Param(init(1.0)(rngs.params(), (num, dim, 2 * width), jnp.float32))
        self.gate_up_bias = nnx.Param(jnp.zeros((num, 2 * width), jnp.float32))
        self.down_proj = nnx.Param(init(gain**2)(rngs.params(), (num, width, dim), jnp.float32))
        self.down_bias = nnx.Param(jnp.zeros((num, dim), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        _check_number(x, self.gate_up_proj)
        wide = jnp.einsum("end,edf->enf", x, self.gate_up_proj[...]) + self.gate_up_bias[...][:, None]
        wide = checkpoint_name(over_tensor(wide, -1), "mlp_hidden")
        gate, up = jnp.minimum(wide[..., ::2], self.limit), jnp.clip(wide[..., 1::2], -self.limit, self.limit)
        hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        return jnp.einsum("enf,efd->end", hidden, self.down_proj[...]) + self.down_bias[...][:, None]


class Router(nnx.Module):
    """The scores of the experts, in float32. Layout: [B T D] -> [B T E]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        num, has_bias = config.num_experts or 0, config.swiglu_limit is not None
        self.kernel = nnx.Param(init(rngs.params(), (config.dim, num), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((num,), jnp.float32)) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        scores = x.astype(dtype) @ self.kernel[...].astype(dtype)
        return scores if self.bias is None else scores + self.bias[...].astype(dtype)


class MoE(nnx.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, gain: float, experts: ExpertsFn | None):
        self.config, self.run = config, every_expert if experts is None else experts
        self.router = Router(config, rngs=rngs)
        kind = Experts if config.swiglu_limit is None else ClippedExperts
        self.experts = kind(config, rngs=rngs, gain=gain)

    def __call__(self, x: jax.Array, real: jax.Array | None, *, drops: bool) -> tuple[jax.Array, Routed]:
        """Return the result, and the losses and metrics of the router.

        Args:
          real: `[B T]`, whether each token is not padding; None: no padding.
          drops: whether copies beyond the capacity are dropped.
        """
        config = self.config
        run = partial(self.run, k=config.experts_per_token, normalize=config.normalize_experts, mask=real)
        if drops:
            run = partial(run, parts=config.expert_parts, send=config.expert_send)
        y, found = run(x, self.router(x), self.experts, capacity=config.capacity if drops else None)
        loss = (config.balance_loss * found.balance + config.z_loss * found.z) / config.num_layers
        return y, Routed(loss, found.dropped, found.load)
