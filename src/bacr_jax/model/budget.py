"""The budget embedding phi(b) and its gate (paper Eq. 2-3)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config import ConditioningConfig
from bacr_jax.types import Params, pytree


def sinusoids(
    budgets: Int[Array, "*B"], *, width: int, scale: str = "raw", b_max: int = 4096
) -> Float[Array, "*B D"]:
    """[sin, cos] of the budget at geometrically spaced frequencies (Eq. 2), fp32, squared norm D/2.

    Args:
      budgets: thinking tokens, at least 0.
      width: D, even; the frequencies are 10000^(-2i/D), i < D/2.
      scale: `raw` uses b itself as the paper does; `log` uses 1000 log(1+b)/log(1+b_max), which
        spreads ratios of budgets evenly; `normalised` uses 1000 b/b_max. On raw budgets of
        thousands the highest frequencies alias into codes without order.
      b_max: budget that maps to 1000 under `log` and `normalised`.
    """
    b = budgets.astype(jnp.float32)
    if scale == "log":
        b = 1000.0 * jnp.log1p(b) / jnp.log1p(float(b_max))
    elif scale == "normalised":
        b = 1000.0 * b / b_max
    # Rounded once, from float64: an error of one unit in fp32 grows with b, up to 2e-4 radians.
    frequencies = np.float32(10000.0 ** (-np.arange(0, width, 2) / width))
    angles = b[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class _Weights(nn.Module):
    """W1 and W2 of phi; a leading axis stacks independent embeddings, one per layer."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> None:
        """Draws W1 with a variance over the fan-in only; W2 starts at zero."""
        stack = tuple(range(len(self.shape) - 2))
        lecun = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=stack)
        self.param("w1", lecun, self.shape, jnp.float32)
        self.param("w2", nn.initializers.zeros, self.shape, jnp.float32)


def init(key: Array, conditioning: ConditioningConfig, *, width: int, layers: int) -> Params:
    """Fresh parameters: W1 by fan-in, W2 zero, gates zero (a sigmoid gate then starts at 1/2).

    With W2 zero, phi is zero and the pretrained model unchanged bit for bit at the start. There a
    zero-initialised tanh gate would leave both gradients zero for ever, so tanh gates start at
    small random values.

    Returns:
      {"w1", "w2", "gate"}: [D, D], [D, D] (or [L, D, D]) and [L, D], fp32.
    """
    phi_key, gate_key = jax.random.split(key)
    stack = (layers,) if conditioning.sharing == "per_layer" else ()
    weights = _Weights((*stack, width, width)).lazy_init(phi_key)["params"]
    gate = jnp.zeros((layers, width), jnp.float32)
    if conditioning.gate == "tanh":
        gate = jax.random.normal(gate_key, gate.shape) * width**-0.5
    return {**weights, "gate": gate}


def embed(
    params: Params, budgets: Int[Array, "B"], *, conditioning: ConditioningConfig, b_max: int
) -> Float[Array, "B D"] | Float[Array, "L B D"]:
    """phi(b) = W2 SiLU(W1 s(b)) with s the sinusoids (paper Eq. 2), fp32.

    [B, D] when shared and [L, B, D] when per layer.
    """
    width = params["w1"].shape[-1]
    s = sinusoids(budgets, width=width, scale=conditioning.input, b_max=b_max)
    return jnp.matmul(nn.silu(jnp.matmul(s, params["w1"])), params["w2"])


@pytree
class Conditioned:
    """What a budget adds to the residual stream, after every layer or after one of them.

    Attributes:
      phi: embedding of each row's budget, [B, D]; with `index` P of them, [B, P, D]; with a leading
        L where every layer has its own.
      gate: w_g of every layer, or of one.
      mask: positions that receive the embedding; None for all.
      index: one-hot, which of its row's P embeddings each position receives; None: a row has one.
      settings: which gate (sigmoid, tanh, on the raw or RMS-normed stream) and its bias.
    """

    phi: Float[Array, "*L B D"] | Float[Array, "*L B P D"]
    gate: Float[Array, "*L D"]
    mask: Bool[Array, "B T"] | None = None
    index: Float[Array, "B T P"] | None = None
    settings: ConditioningConfig = struct.field(
        pytree_node=False, default_factory=ConditioningConfig
    )

    @property
    def per_layer(self) -> bool:
        """Whether every layer has a phi of its own."""
        return self.phi.ndim > (2 if self.index is None else 3)

    def of_layer(self, layer: int) -> "Conditioned":
        """What is added after one layer."""
        phi = self.phi[layer] if self.per_layer else self.phi
        return dataclasses.replace(self, phi=phi, gate=self.gate[layer])


def add_gated(x: Float[Array, "B T D"], conditioned: Conditioned) -> Float[Array, "B T D"]:
    """H + g(w_g . h) phi(b): the budget joins the residual stream through a gate (Eq. 3)."""
    settings, phi = conditioned.settings, conditioned.phi
    h = x.astype(jnp.float32)
    if settings.gate == "sigmoid_normed":
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)
    activation = h @ conditioned.gate + settings.gate_bias
    opened = jnp.tanh(activation) if settings.gate == "tanh" else nn.sigmoid(activation)
    if conditioned.mask is not None:
        opened = jnp.where(conditioned.mask, opened, 0.0)
    if conditioned.index is None:
        of_token = phi[:, None]
    else:
        of_token = jnp.einsum("btp,bpd->btd", conditioned.index, phi, precision="highest")
    return x + (opened[..., None] * of_token).astype(x.dtype)
