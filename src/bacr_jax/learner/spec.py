"""Defines the static settings of the learner, and builds the budget conditioning of the model."""

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
    """Static settings of the learner's compiled functions.

    The base class `Compute` contains dtypes, rematerialization and the mesh.

    Attributes:
      model: sizes of the model.
      conditioning: how the budget embedding phi is added to the residual stream. None for a model
        without budget conditioning.
      loss: settings of the loss.
      value: settings of the value head. None if the method has no value head.
      b_max: largest budget in tokens. It scales the input of the budget embedding, and is the
        constant denominator if the loss is divided by a constant.
      temperature: sampling temperature. Log-probabilities are computed from logits / temperature.
      chunk: number of tokens per chunk of the output head.
      distill: weight of the teacher's log-probabilities in the advantages.
    """

    model: Qwen2Config
    conditioning: ConditioningConfig | None
    loss: LossConfig
    value: ValueConfig | None
    b_max: int
    temperature: float = 1.0
    chunk: int = 512
    distill: float = 0.0


def phi_of(params: Params, budgets: Array, spec: LearnerSpec) -> Array | None:
    """Returns the budget embedding phi(b) of each trace, or None without budget conditioning.

    Args:
      params: parameters of the policy.
      budgets: budget of each trace in tokens. The embedding is 0 for negative budgets, which mark
        traces without a budget.
      spec: static settings of the learner.
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
    """Builds the budget conditioning of a forward pass, or None without budget conditioning.

    Args:
      params: parameters of the policy.
      budgets: budget of each trace in tokens. Negative for traces without a budget.
      response: True for positions after the prompt. With conditioning.positions=response, only
        these positions are conditioned.
    """
    phi = phi_of(params, budgets, spec)
    settings = spec.conditioning
    if phi is None or settings is None:
        return None
    mask = response if settings.positions == "response" else None
    return Conditioned(phi, params["budget"]["gate"], mask, settings=settings)
