"""The value head V(q, b) (paper Eq. 11): what reward a question will bring under a budget."""

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


class ValueHead(nn.Module):
    """A two-layer MLP on h_q and what is known of the budget, fp32, linear output.

    The output is not squashed: dense rewards range from -lambda to 1 + lambda. The last layer
    starts at zero, so the first values are its bias.
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


def phi_budgets(
    budgets: Int[Array, "B"], cuts: Int[Array, "B M"], *, kind: ValueInput
) -> Int[Array, "B M"]:
    """The budget whose phi the head reads at every cut.

    Args:
      kind: "cut": b_j (paper Eq. 10 to 12, where R(q, t, b) and V(q, b) share their budget).
        "trace_and_cut", "trace": b.
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
    """Inputs of the head for every cut of every row: h_q (+) phi (+) codes of the budgets.

        kind            V               inputs beside h_q
        cut             V(q, b_j)       phi(b_j), code(b_j)            (paper)
        trace_and_cut   V(q, b, b_j)    phi(b), code(b), code(b_j)
        trace           V(q, b)         phi(b), code(b)

    The reward at a cut depends on b_j most of all, and on b too, since the policy was told b. phi
    starts at zero and learns slowly, so the sinusoids of the log-scaled budget stand beside it: the
    head can tell budgets apart from the first step. Where phi joins the stream at all positions,
    h_q holds b whatever the kind.

    Args:
      phi: embedding of `phi_budgets`, averaged over layers if each has one; None without
        conditioning.
    """
    chex.assert_rank([h_q, budgets, cuts], [2, 1, 2])
    code = functools.partial(sinusoids, width=32, scale="log", b_max=b_max)
    parts = [jnp.broadcast_to(h_q[:, None], (*cuts.shape, h_q.shape[-1]))]
    parts += [] if phi is None else [phi]
    parts += [code(phi_budgets(budgets, cuts, kind=kind))]
    parts += [code(cuts)] if kind == "trace_and_cut" else []
    return jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)


def init(key: Array, *, num_features: int, hidden_size: int) -> Params:
    """Fresh parameters of the head."""
    # Nothing but the parameters is computed.
    features = jax.ShapeDtypeStruct((1, num_features), jnp.float32)
    return ValueHead(hidden_size).lazy_init(key, features)["params"]


def values(params: Params, features: Float[Array, "B M F"]) -> Float[Array, "B M"]:
    """V at every cut, in units of reward."""
    hidden_size = params["hidden"]["bias"].shape[0]
    return jnp.asarray(ValueHead(hidden_size).apply({"params": params}, features))


def with_bias(params: Params, bias: Float[Array, ""]) -> Params:
    """The head with another output bias: its value everywhere while the last kernel is zero."""
    out = params["out"]
    return {**params, "out": {**out, "bias": jnp.full_like(out["bias"], bias)}}


def num_features(hidden_size: int, *, conditioned: bool, kind: ValueInput) -> int:
    """Width of `value_features`."""
    return hidden_size * (1 + conditioned) + 32 * (1 + (kind == "trace_and_cut"))
