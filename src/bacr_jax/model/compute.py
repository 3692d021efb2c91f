"""How a forward pass is computed, whatever it computes."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from bacr_jax.model.attention import Implementation
from bacr_jax.parallel import ROW_AXES

Remat = Literal["full", "selective", "none"]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Static settings of a forward pass and its gradient; none of them changes the model.

    Attributes:
      product_dtype: 16-bit type that operands of weight matrices' products are rounded to, where
        all else is fp32; None: `dtype`.
      implementation: of a sequence's (or trunk's) causal attention.
      scan: one compiled layer, looped; False unrolls (faster for small models on CPUs).
      remat: what the backward pass recomputes of a layer: full: all of it; selective: all but its
        matrix products, which are kept; none: nothing.
      mesh: devices that rows and parameters are split over, so that weights travel and activations
        don't; None for one device.
      row_axes: axes of the mesh that rows are split over.
    """

    dtype: Any = jnp.float32
    product_dtype: Any = None
    implementation: Implementation = "xla"
    scan: bool = True
    remat: Remat = "full"
    mesh: Mesh | None = None
    row_axes: tuple[str, ...] = ROW_AXES
