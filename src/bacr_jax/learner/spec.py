"""Static settings of the learner's compiled programs, and the conditioning that they determine."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from bacr_jax.config import ConditioningConfig, LossConfig, ValueConfig
from bacr_jax.model import budget
from bacr_jax.model.budget import Conditioned
from bacr_jax.model.compute import Compute
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params


@dataclass(frozen=True)
class LearnerSpec(Compute):
    """Static settings of the learner; `Compute` has types, rematerialisation and the mesh.

    Attributes:
      conditioning: how phi is added to the residual stream; None for the plain model.
      value: settings of the value head; None if the method has no value head.
      b_max: largest budget in tokens; constant of the aggregation and scale of the budget codes.
      temperature: sampling temperature; log-probabilities are computed from logits / temperature.
      chunk: tokens per chunk of the output head.
    """

    model: Qwen2Config
    conditioning: ConditioningConfig | None
    loss: LossConfig
    value: ValueConfig | None
    b_max: int
    temperature: float = 1.0
    chunk: int = 512


def phi_of(params: Params, budgets: Array, spec: LearnerSpec) -> Array | None:
    """Returns phi(b) of each row; 0 for rows without a budget (b < 0).

    None if the policy has no conditioning.
    """
    if spec.conditioning is None:
        return None
    phi = budget.embed(
        params["budget"],
        jnp.maximum(budgets, 0),
        conditioning=spec.conditioning,
        b_max=spec.b_max,
    )
    return phi * (budgets >= 0)[:, None]


def condition(
    params: Params, budgets: Int[Array, "B"], response: Bool[Array, "B T"], spec: LearnerSpec
) -> Conditioned | None:
    """Builds the conditioning of the rows of a forward pass; None for the plain model.

    Args:
      budgets: budgets that the rows read; a negative number for none.
      response: True for positions after the prompt. Only these are conditioned if
        `conditioning.positions` is "response".
    """
    phi = phi_of(params, budgets, spec)
    settings = spec.conditioning
    if phi is None or settings is None:
        return None
    mask = response if settings.positions == "response" else None
    return Conditioned(phi, params["budget"]["gate"], mask, settings=settings)
