"""Low-rank adapters (LoRA, arXiv 2106.09685) on the weight matrices W of a frozen base model.

    y = x W + (alpha / r) x A B,   with W [D, E],   A [D, r],   B [r, E]   and rank r

A model with adapters has the parameters of `model.qwen2` and two additional entries:

    adapter        A and B of each target matrix in all L layers: q_a [L, D, r], q_b [L, r, E], ...
    adapter_scale  alpha / r, a scalar

Only `adapter` and `budget` are trained. All other parameters form the frozen base model. As in
PEFT, A is initialized uniformly in +-1/sqrt(D) and B with zeros, so the adapted model is initially
bitwise identical to the base model. Dropout is not supported, because learner and sampler must
compute the same log-probabilities.
"""

import jax
import jax.numpy as jnp

from bacr_jax.config import AdapterConfig
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

# Top-level parameters that are trained if a model has adapters.
TRAINED = ("adapter", "budget")


def init(key: jax.Array, config: Qwen2Config, settings: AdapterConfig) -> Params:
    """Initializes the adapters of all layers in fp32.

    Args:
      settings: rank r, scale alpha and target matrices of the adapters.

    Returns:
      The entries `adapter` and `adapter_scale` (see the module docstring).
    """
    rank = settings.rank
    assert rank is not None
    leaves: Params = {}
    for index, (name, (fan_in, fan_out)) in enumerate(config.matrices.items()):
        if name not in settings.targets:
            continue
        matrix_key = jax.random.fold_in(key, index)
        shape = (config.num_layers, fan_in, rank)
        uniform = jax.random.uniform(matrix_key, shape, minval=-1.0, maxval=1.0)
        leaves[f"{name}_a"] = uniform * fan_in**-0.5
        leaves[f"{name}_b"] = jnp.zeros((config.num_layers, rank, fan_out))
    scale = settings.alpha / rank
    return {"adapter": leaves, "adapter_scale": jnp.float32(scale)}


def num_parameters(config: Qwen2Config, settings: AdapterConfig) -> int:
    """Returns the number of parameters of all adapters, or 0 if no rank is set."""
    if settings.rank is None:
        return 0
    per_layer = 0
    for name in settings.targets:
        fan_in, fan_out = config.matrices[name]
        per_layer += settings.rank * (fan_in + fan_out)
    return config.num_layers * per_layer


def split(params: Params) -> tuple[Params, Params]:
    """Splits parameters into (frozen, trained). Without adapters, all parameters are trained."""
    if "adapter" not in params:
        return {}, params
    frozen = {name: leaf for name, leaf in params.items() if name not in TRAINED}
    trained = {name: params[name] for name in TRAINED if name in params}
    return frozen, trained


def scaled(params: Params) -> Params | None:
    """Returns adapters with B multiplied by alpha / r, or None for a model without adapters."""
    if "adapter" not in params:
        return None
    scale = params["adapter_scale"]
    factors = {}
    for name, leaf in params["adapter"].items():
        factors[name] = leaf * scale if name.endswith("_b") else leaf
    return factors


def merged_layer(layer: Params, adapter: Params | None) -> Params:
    """Adds the adapter product A B to each adapted matrix W of a layer or of stacked layers.

    Args:
      adapter: scaled adapters of the same layers (`scaled`). If None, the layer is returned
        unchanged.

    Returns:
      The layer, with W + A B in fp32 for each adapted matrix.
    """
    if adapter is None:
        return layer
    merged = dict(layer)
    for name, kernel in layer.items():
        target = name.removesuffix("_kernel")
        if f"{target}_a" not in adapter:
            continue
        a = adapter[f"{target}_a"]
        b = adapter[f"{target}_b"]
        product = jnp.matmul(a, b, precision="highest")
        merged[name] = kernel.astype(jnp.float32) + product
    return merged


def merge(params: Params) -> Params:
    """Merges adapters into the weight matrices, which yields an equivalent model without adapters.

    Returns:
      The parameters without `adapter` and `adapter_scale`. A budget module is kept.
    """
    if "adapter" not in params:
        return params
    merged = {name: leaf for name, leaf in params.items() if not name.startswith("adapter")}
    merged["layers"] = merged_layer(params["layers"], scaled(params))
    return merged
