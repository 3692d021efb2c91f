"""Budget embedding phi(b), and the gate that adds it to the residual stream (paper Eq. 2-3)."""

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
    """Encodes budgets b as [sin(b f), cos(b f)] at geometrically spaced frequencies f (Eq. 2).

    Args:
      budgets: budgets in thinking tokens, at least 0.
      width: dimension D of the code, even. The frequencies are 10000^(-2i/D) for i < D/2.
      scale: "raw" encodes b itself, as in the paper, but the order of budgets in the thousands is
        lost, because they alias at the highest frequencies. "log" encodes 1000 log(1+b) /
        log(1+b_max), which spaces equal ratios of budgets evenly. "normalised" encodes 1000 b /
        b_max.
      b_max: budget that is mapped to 1000 for "log" and "normalised".

    Returns:
      fp32 codes with squared norm D/2.
    """
    b = budgets.astype(jnp.float32)
    if scale == "log":
        b = 1000.0 * jnp.log1p(b) / jnp.log1p(float(b_max))
    elif scale == "normalised":
        b = 1000.0 * b / b_max
    # Computed in float64 and rounded once. An error of one unit in the last place in fp32 would be
    # multiplied by b and reach 2e-4 radians.
    frequencies = np.float32(10000.0 ** (-np.arange(0, width, 2) / width))
    angles = b[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class _Weights(nn.Module):
    """Parameters of the budget embedding phi: the matrices W1 and W2.

    Attributes:
      shape: shape of each matrix: [D, D], or [L, D, D] for a separate embedding per layer.
    """

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> None:
        """Initializes W1 with variance 1 / fan-in and W2 with zeros."""
        stack = tuple(range(len(self.shape) - 2))
        lecun = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=stack)
        self.param("w1", lecun, self.shape, jnp.float32)
        self.param("w2", nn.initializers.zeros, self.shape, jnp.float32)


def init(key: Array, conditioning: ConditioningConfig, *, width: int, layers: int) -> Params:
    """Initializes the budget module: W1 scaled by fan-in, W2 and the gates with zeros.

    A sigmoid gate without bias is initially 1/2. Since W2 is zero, phi is zero and a pretrained
    model is initially unchanged, bit for bit. With tanh gates initialized to zero, the gradients of
    both W2 and the gates would stay zero forever, so tanh gates are initialized with small random
    values.

    Returns:
      {"w1", "w2", "gate"} in fp32. The shapes are [D, D], [D, D] and [L, D]. If each layer has a
      separate embedding, w1 and w2 have shape [L, D, D].
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
    """Embeds budgets: phi(b) = W2 SiLU(W1 s(b)), where s are the sinusoids (paper Eq. 2).

    Returns:
      phi in fp32. The shape is [B, D] if all layers share an embedding, and [L, B, D] if each layer
      has a separate one.
    """
    width = params["w1"].shape[-1]
    s = sinusoids(budgets, width=width, scale=conditioning.input, b_max=b_max)
    hidden = nn.silu(jnp.matmul(s, params["w1"]))
    return jnp.matmul(hidden, params["w2"])


@pytree
class Conditioned:
    """Budget embeddings and gates, which are applied to the residual stream after each layer.

    Attributes:
      phi: embedding of each row's budget, [B, D]. With `index`, each row has P embeddings, [B, P,
        D]. There is a leading axis L if each layer has a separate embedding.
      gate: gate weights w_g of all layers or of a single layer.
      mask: positions to which the embedding is added, or None for all positions.
      index: one-hot selection of one of the row's P embeddings for each position. None if each row
        has a single embedding.
      settings: type of the gate (sigmoid or tanh, applied to the raw or RMS-normalized residual
        stream) and its bias.
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
        """True if each layer has a separate phi."""
        shared_axes = 2 if self.index is None else 3
        return self.phi.ndim > shared_axes

    def of_layer(self, layer: int) -> "Conditioned":
        """Returns the embeddings and the gate of a single layer."""
        phi = self.phi[layer] if self.per_layer else self.phi
        return dataclasses.replace(self, phi=phi, gate=self.gate[layer])


def add_gated(x: Float[Array, "B T D"], conditioned: Conditioned) -> Float[Array, "B T D"]:
    """Adds the gated budget embedding to the residual stream: h + g(w_g . h) phi(b) (Eq. 3).

    The gate g is a sigmoid or tanh of the dot product of h with the gate weights w_g.

    Args:
      x: residual stream h of each token after a layer.
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
