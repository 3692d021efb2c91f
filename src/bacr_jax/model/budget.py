"""The budget embedding phi(b) and the gate that adds it to the residual stream (paper Eq. 2-3)."""

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
    """Encodes budgets as [sin, cos] at geometrically spaced frequencies (Eq. 2).

    Args:
      budgets: thinking tokens, at least 0.
      width: D, even. The frequencies are 10000^(-2i/D) for i < D/2.
      scale: `raw` encodes b itself, as the paper does. `log` encodes 1000 log(1+b)/log(1+b_max),
        which spaces ratios of budgets evenly. `normalised` encodes 1000 b/b_max. Raw budgets of
        thousands alias at the highest frequencies, so their codes have no order.
      b_max: budget that maps to 1000 under `log` and `normalised`.

    Returns:
      fp32 codes with squared norm D/2.
    """
    b = budgets.astype(jnp.float32)
    if scale == "log":
        b = 1000.0 * jnp.log1p(b) / jnp.log1p(float(b_max))
    elif scale == "normalised":
        b = 1000.0 * b / b_max
    # Computed in float64 and rounded once, because an error of one unit in fp32 grows with b, up
    # to 2e-4 radians.
    frequencies = np.float32(10000.0 ** (-np.arange(0, width, 2) / width))
    angles = b[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class _Weights(nn.Module):
    """W1 and W2 of phi; a leading axis of `shape` stacks one independent embedding per layer."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> None:
        """Draws W1 with variance 1 / fan-in and sets W2 to zero."""
        stack = tuple(range(len(self.shape) - 2))
        lecun = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=stack)
        self.param("w1", lecun, self.shape, jnp.float32)
        self.param("w2", nn.initializers.zeros, self.shape, jnp.float32)


def init(key: Array, conditioning: ConditioningConfig, *, width: int, layers: int) -> Params:
    """Draws fresh parameters: W1 by fan-in, W2 zero, gates zero (a sigmoid gate starts at 1/2).

    With W2 zero, phi is zero and the pretrained model is unchanged bit for bit at the start. A
    tanh gate of zero would then keep both gradients at zero forever, so tanh gates start at small
    random values.

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
    """Embeds budgets: phi(b) = W2 SiLU(W1 s(b)) with s the sinusoids (paper Eq. 2).

    Returns:
      phi in fp32, [B, D] if all layers share one embedding, [L, B, D] if each has its own.
    """
    width = params["w1"].shape[-1]
    s = sinusoids(budgets, width=width, scale=conditioning.input, b_max=b_max)
    hidden = nn.silu(jnp.matmul(s, params["w1"]))
    return jnp.matmul(hidden, params["w2"])


@pytree
class Conditioned:
    """Budget embeddings and gates that are added to the residual stream after layers.

    Attributes:
      phi: embedding of each row's budget, [B, D]. With `index`, each row has P embeddings,
        [B, P, D]. A leading L if every layer has its own.
      gate: w_g of every layer, or of one layer.
      mask: positions that receive the embedding; None for all.
      index: one-hot choice among the row's P embeddings for each position. None if a row has one
        embedding.
      settings: kind of gate (sigmoid or tanh, on the raw or RMS-normed stream) and its bias.
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
        """True if every layer has its own phi."""
        shared_axes = 2 if self.index is None else 3
        return self.phi.ndim > shared_axes

    def of_layer(self, layer: int) -> "Conditioned":
        """Returns the embeddings and the gate of one layer."""
        phi = self.phi[layer] if self.per_layer else self.phi
        return dataclasses.replace(self, phi=phi, gate=self.gate[layer])


def add_gated(x: Float[Array, "B T D"], conditioned: Conditioned) -> Float[Array, "B T D"]:
    """Adds the gated budget embedding to the residual stream: H + g(w_g . h) phi(b) (Eq. 3).

    Args:
      x: the residual stream H after a layer.
      conditioned: embeddings and gate of this layer (`Conditioned.of_layer`).
    """
    settings = conditioned.settings
    phi = conditioned.phi
    h = x.astype(jnp.float32)
    if settings.gate == "sigmoid_normed":
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)
    activation = h @ conditioned.gate + settings.gate_bias
    openness = jnp.tanh(activation) if settings.gate == "tanh" else nn.sigmoid(activation)
    if conditioned.mask is not None:
        openness = jnp.where(conditioned.mask, openness, 0.0)
    if conditioned.index is None:
        token_phi = phi[:, None]
    else:
        token_phi = jnp.einsum("btp,bpd->btd", conditioned.index, phi, precision="highest")
    return x + (openness[..., None] * token_phi).astype(x.dtype)
