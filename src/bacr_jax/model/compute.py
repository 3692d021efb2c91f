"""Settings of how a forward pass is computed, which do not change the model's function."""

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
      dtype: type of the activations, and of weights in products.
      product_dtype: 16-bit type to which both operands of products with weight matrices are
        rounded, while everything else is fp32. None uses `dtype`.
      implementation: kernel for the causal attention of a sequence or trunk.
      scan: True compiles one layer and loops over it. False unrolls the layers, which is faster
        for small models on CPUs.
      remat: what the backward pass recomputes of a layer. `full` recomputes all of the layer,
        `selective` all but the results of matrix products, `none` nothing.
      mesh: devices over which rows and parameters are split, so that weights travel between
        devices and activations do not. None for one device.
      row_axes: axes of the mesh over which rows are split.
    """

    dtype: Any = jnp.float32
    product_dtype: Any = None
    implementation: Implementation = "xla"
    scan: bool = True
    remat: Remat = "full"
    mesh: Mesh | None = None
    row_axes: tuple[str, ...] = ROW_AXES
