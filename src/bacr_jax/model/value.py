"""Value head V(q, b) (paper Eq. 11), which predicts the reward of a question under a budget."""

import functools
from typing import Literal

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.model.budget import sinusoids
from bacr_jax.types import Params

ValueInput = Literal["cut", "trace_and_cut", "trace"]

# Dimension of the sinusoidal code of a budget in the input features.
_CODE_WIDTH = 32


class ValueHead(nn.Module):
    """Two-layer fp32 MLP with SiLU that predicts a reward from features of question and budget.

    The output is linear, because dense rewards range from -lambda to 1 + lambda. The last layer is
    initialized to zero, so all initial values equal its bias.

    Attributes:
      hidden_size: width of the hidden layer.
    """

    hidden_size: int = 1024

    @nn.compact
    def __call__(self, features: Float[Array, "*B F"]) -> Float[Array, "*B"]:
        """Returns the predicted value for each row of features."""
        h = nn.silu(nn.Dense(self.hidden_size, name="hidden")(features))
        return nn.Dense(1, name="out", kernel_init=nn.initializers.zeros)(h)[..., 0]


def pool_question(
    hidden: Float[Array, "B P D"], start: Int[Array, "B"], end: Int[Array, "B"]
) -> Float[Array, "B D"]:
    """Averages the final hidden states over the question tokens [start, end) of each prompt.

    Returns:
      The mean state h_q of each question, in fp32.
    """
    chex.assert_rank([hidden, start, end], [3, 1, 1])
    index = jnp.arange(hidden.shape[1])
    mask = (index >= start[:, None]) & (index < end[:, None])
    total = jnp.einsum("bpd,bp->bd", hidden.astype(jnp.float32), mask.astype(jnp.float32))
    return total / jnp.maximum(mask.sum(1), 1)[:, None]


def phi_budgets(
    budgets: Int[Array, "B"], cuts: Int[Array, "B M"], *, kind: ValueInput
) -> Int[Array, "B M"]:
    """Returns the budget that the value head receives as phi at each truncation point (cut).

    Args:
      budgets: budget b of each trace, in thinking tokens.
      cuts: position b_j of each cut of the thinking, in tokens.
      kind: "cut" returns b_j, as in paper Eq. 10 to 12, where reward R(q, t, b) and value V(q, b)
        have the same budget. "trace_and_cut" and "trace" return b.
    """
    return cuts if kind == "cut" else jnp.broadcast_to(budgets[:, None], cuts.shape)


def value_features(
    h_q: Float[Array, "B D"],
    phi: Float[Array, "B M D"] | None,
    budgets: Int[Array, "B"],
    cuts: Int[Array, "B M"],
    *,
    b_max: int,
    kind: ValueInput,
) -> Float[Array, "B M F"]:
    """Concatenates the features of the value head for each truncation point (cut) of the thinking.

    The features are the question's mean hidden state h_q, the budget embedding phi, and sinusoidal
    codes of the budget b and of the cut's position b_j:

        kind            V               features after h_q
        cut             V(q, b_j)       phi(b_j), code(b_j)            (paper: without the code)
        trace_and_cut   V(q, b, b_j)    phi(b), code(b), code(b_j)
        trace           V(q, b)         phi(b), code(b)

    The reward at a cut depends mostly on b_j, but also on b, because the policy was conditioned on
    b. phi is initially zero and learns slowly, so a sinusoidal code of the log-scaled budget lets
    the head distinguish budgets from the first step. If phi is added to the residual stream at all
    positions, h_q depends on b for every kind.

    Args:
      phi: embedding of the budgets that `phi_budgets` returns, averaged over layers if each layer
        has a separate embedding. None for a model without budget conditioning.
    """
    chex.assert_rank([h_q, budgets, cuts], [2, 1, 2])
    code = functools.partial(sinusoids, width=_CODE_WIDTH, scale="log", b_max=b_max)
    parts = [jnp.broadcast_to(h_q[:, None], (*cuts.shape, h_q.shape[-1]))]
    if phi is not None:
        parts.append(phi)
    parts.append(code(phi_budgets(budgets, cuts, kind=kind)))
    if kind == "trace_and_cut":
        parts.append(code(cuts))
    return jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)


def init(key: Array, *, num_features: int, hidden_size: int) -> Params:
    """Initializes a value head with `num_features` inputs."""
    # The shape is sufficient, because lazy_init only computes the parameters.
    features = jax.ShapeDtypeStruct((1, num_features), jnp.float32)
    return ValueHead(hidden_size).lazy_init(key, features)["params"]


def values(params: Params, features: Float[Array, "B M F"]) -> Float[Array, "B M"]:
    """Computes the value V at every truncation point (cut) of the thinking, in units of reward."""
    hidden_size = params["hidden"]["bias"].shape[0]
    return jnp.asarray(ValueHead(hidden_size).apply({"params": params}, features))


def with_bias(params: Params, bias: Float[Array, ""]) -> Params:
    """Replaces the output bias, which equals the predicted value while the last kernel is zero."""
    out = params["out"]
    return {**params, "out": {**out, "bias": jnp.full_like(out["bias"], bias)}}


def num_features(hidden_size: int, *, conditioned: bool, kind: ValueInput) -> int:
    """Returns the number of features F of `value_features`."""
    codes = 2 if kind == "trace_and_cut" else 1
    states = 2 if conditioned else 1
    return hidden_size * states + _CODE_WIDTH * codes
