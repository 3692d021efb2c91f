"""Defines how a forward pass is computed, such as its dtypes, kernels and sharding."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from bacr_jax.model.attention import Implementation
from bacr_jax.parallel import ROW_AXES

Remat = Literal["full", "selective", "none"]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Static settings of a forward pass and its gradient. None of them changes the model.

    Attributes:
      dtype: dtype of activations, and of weights in matrix products.
      product_dtype: 16-bit dtype to which both operands of products with weight matrices are
        rounded, while everything else is in fp32. None uses `dtype`.
      implementation: kernel for the causal attention of a sequence, or of a prompt and its
        thinking.
      scan: True compiles a single layer and loops over it. False unrolls the layers, which is
        faster for small models on CPUs.
      remat: what the backward pass recomputes. "full" recomputes entire layers, "selective"
        recomputes everything except the results of matrix products, and "none" recomputes nothing.
      mesh: devices over which rows and parameters are sharded. Weights are communicated between
        devices, activations are not. None for a single device.
      row_axes: mesh axes over which rows are sharded.
    """

    dtype: Any = jnp.float32
    product_dtype: Any = None
    implementation: Implementation = "xla"
    scan: bool = True
    remat: Remat = "full"
    mesh: Mesh | None = None
    row_axes: tuple[str, ...] = ROW_AXES

    def __repr__(self) -> str:
        """Returns only the fields that differ from their defaults, to keep signatures short."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"
