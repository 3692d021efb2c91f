"""The value head V(q, b) (paper Eq. 11): what reward a question will bring under a budget."""

from typing import Any

import chex
import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.model.budget import sinusoids

Params = dict[str, Any]


class ValueHead(nn.Module):
    """A two-layer MLP on [h_q, phi-features of b, phi-features of b_j], fp32, linear output.

    The output is not squashed: dense rewards range from -lambda to 1 + lambda. The last layer
    starts at zero, so the first values are its bias.

    Attributes:
      hidden_size: width of the hidden layer.
    """

    hidden_size: int = 1024

    @nn.compact
    def __call__(self, features: Float[Array, "*B F"]) -> Float[Array, "*B"]:
        """Value of each row of features."""
        h = nn.silu(nn.Dense(self.hidden_size, name="hidden")(features))
        return nn.Dense(1, name="out", kernel_init=nn.initializers.zeros)(h)[..., 0]


def pool_question(
    hidden: Float[Array, "B P D"], start: Int[Array, "B"], end: Int[Array, "B"]
) -> Float[Array, "B D"]:
    """h_q: mean of the final states over the question's own tokens [start, end), fp32."""
    chex.assert_rank([hidden, start, end], [3, 1, 1])
    index = jnp.arange(hidden.shape[1])
    mask = (index >= start[:, None]) & (index < end[:, None])
    total = jnp.einsum("bpd,bp->bd", hidden.astype(jnp.float32), mask.astype(jnp.float32))
    return total / jnp.maximum(mask.sum(1), 1)[:, None]


def value_features(
    h_q: Float[Array, "B D"],
    phi: Float[Array, "B D"] | None,
    budgets: Int[Array, "B"],
    cuts: Int[Array, "B M"],
    *,
    b_max: int,
    cut_input: bool,
) -> Float[Array, "B M F"]:
    """Inputs of the head for every cut of every row: h_q (+) phi(b) (+) codes of b and b_j.

    phi starts at zero and learns slowly, so the sinusoids of the log-scaled budget stand beside it:
    the head can tell budgets apart from the first step. The paper's V has one budget, but the
    expected reward at a cut depends on both b and b_j, hence `cut_input`.

    Args:
      h_q: pooled question states.
      phi: budget embedding, averaged over layers if each has one; None without conditioning.
      budgets: b, thinking tokens.
      cuts: b_j, thinking tokens.
      b_max: largest budget.
      cut_input: add the code of b_j; False gives the paper's V(q, b).
    """
    chex.assert_rank([h_q, budgets, cuts], [2, 1, 2])
    b, m = cuts.shape
    code = lambda x: sinusoids(x, width=32, scale="log", b_max=b_max)
    rows = [h_q, code(budgets)] if phi is None else [h_q, phi, code(budgets)]
    per_row = jnp.concatenate([r.astype(jnp.float32) for r in rows], axis=-1)
    features = jnp.broadcast_to(per_row[:, None], (b, m, per_row.shape[-1]))
    if cut_input:
        features = jnp.concatenate([features, code(cuts.reshape(-1)).reshape(b, m, -1)], axis=-1)
    return features


def init(key: Array, *, num_features: int, hidden_size: int) -> Params:
    """Fresh parameters of the head."""
    return ValueHead(hidden_size).init(key, jnp.zeros((1, num_features)))["params"]


def values(params: Params, features: Float[Array, "B M F"]) -> Float[Array, "B M"]:
    """V(q, b[, b_j]) in units of reward."""
    hidden_size = params["hidden"]["bias"].shape[0]
    return jnp.asarray(ValueHead(hidden_size).apply({"params": params}, features))


def with_bias(params: Params, bias: Float[Array, ""]) -> Params:
    """The head with another output bias: its value everywhere while the last kernel is zero."""
    out = params["out"]
    return {**params, "out": {**out, "bias": jnp.full_like(out["bias"], bias)}}


def num_features(hidden_size: int, *, conditioned: bool, cut_input: bool) -> int:
    """Width of `value_features`."""
    return hidden_size * (1 + conditioned) + 32 * (1 + cut_input)


def shared_phi(
    phi: Float[Array, "B D"] | Float[Array, "L B D"] | None,
) -> Float[Array, "B D"] | None:
    """One embedding per row for the head: the mean over layers where each has its own."""
    if phi is None or phi.ndim == 2:
        return phi
    return jnp.mean(phi, axis=0)
