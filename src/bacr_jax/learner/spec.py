"""What fixes the learner's compiled form."""

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
    """Everything about the learner that fixes its compiled form; how it computes is `Compute`.

    Attributes:
      conditioning: how phi joins the stream; None for the plain model.
      value: value head settings; None when the method has no value head.
      b_max: largest budget, constant of the aggregation and scale of the budget codes.
      temperature: sampling temperature; log-probabilities are those of logits / temperature.
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
    """phi(b) for the rows of a batch, 0 where b < 0 (told none); None without conditioning."""
    if spec.conditioning is None:
        return None
    settings, known = spec.conditioning, jnp.maximum(budgets, 0)
    phi = budget.embed(params["budget"], known, conditioning=settings, b_max=spec.b_max)
    return phi * (budgets >= 0)[:, None]


def condition(
    params: Params, budgets: Int[Array, "B"], response: Bool[Array, "B T"], spec: LearnerSpec
) -> Conditioned | None:
    """What rows of a forward pass are conditioned on; None for the plain model.

    Args:
      budgets: that they were told; a negative number: none.
      response: positions after the prompt, of which alone some settings take note.
    """
    phi, settings = phi_of(params, budgets, spec), spec.conditioning
    if phi is None or settings is None:
        return None
    mask = response if settings.positions == "response" else None
    return Conditioned(phi, params["budget"]["gate"], mask, settings=settings)
