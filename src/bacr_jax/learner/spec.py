"""What fixes the learner's compiled form."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from bacr_jax.config import ConditioningConfig, LossConfig, ValueConfig
from bacr_jax.model import attention, block, budget
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import ROW_AXES

Params = dict[str, Any]


@dataclass(frozen=True)
class LearnerSpec:
    """Everything about the learner that fixes its compiled form.

    Attributes:
      model: model shape.
      conditioning: how phi joins the stream; None for the plain model.
      loss: clipping, ratio, aggregation, coefficients.
      value: value head settings; None when the method has no value head.
      progress: lambda of Eq. 7, by which V is made of probabilities (value.loss=cross_entropy).
      b_max: largest budget, constant of the aggregation and scale of the budget codes.
      temperature: sampling temperature; log-probabilities are those of logits / temperature.
      dtype: compute type.
      implementation: attention of the trunk.
      scan: loop over layers.
      remat: what the backward pass recomputes of a layer (`qwen2.run_layers`).
      chunk: tokens per chunk of the output head.
      mesh: devices that rows and parameters are split over; None for one device.
      row_axes: axes of the mesh that rows are split over.
    """

    model: Qwen2Config
    conditioning: ConditioningConfig | None
    loss: LossConfig
    value: ValueConfig | None
    b_max: int
    progress: float = 0.0
    temperature: float = 1.0
    dtype: Any = jnp.float32
    implementation: attention.Implementation = "xla"
    scan: bool = True
    remat: block.Remat = "full"
    chunk: int = 512
    mesh: Mesh | None = None
    row_axes: tuple[str, ...] = ROW_AXES


def phi_of(params: Params, budgets: Array, spec: LearnerSpec) -> Array | None:
    """phi(b) for the rows of a batch, or None without conditioning."""
    if spec.conditioning is None:
        return None
    return budget.embed(params["budget"], budgets, conditioning=spec.conditioning, b_max=spec.b_max)


def phi_of_branches(params: Params, cuts: Array, spec: LearnerSpec) -> Array | None:
    """phi(b_j) of each cut; None where branches are told what their trunk was."""
    if spec.conditioning is None or not spec.conditioning.tells_cuts:
        return None
    phi = phi_of(params, cuts.reshape(-1), spec)
    assert phi is not None
    return phi.reshape(*phi.shape[:-2], *cuts.shape, phi.shape[-1])
