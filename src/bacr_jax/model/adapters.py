"""Low-rank adapters on a frozen base (LoRA, arXiv 2106.09685): y = x W + alpha / r (x A) B.

A model with adapters has the parameters of `model.qwen2` and two more:

    adapter        two leaves per target, with a leading L: q_a [L, D, r], q_b [L, r, N H] ...
    adapter_scale  []   alpha / r

Only `adapter` and `budget` are trained; all other parameters are the frozen base. As in PEFT, A is
drawn uniformly from +-1/sqrt(fan-in) and B is zero, so the adapted model equals the base bit for
bit at the start. Dropout is left out because learner and sampler must compute the same
log-probabilities.
"""

import jax
import jax.numpy as jnp

from bacr_jax.config import AdapterConfig
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

# Parameters that are trained if a model has adapters.
TRAINED = ("adapter", "budget")


def init(key: jax.Array, config: Qwen2Config, settings: AdapterConfig) -> Params:
    """Draws fresh adapters in fp32.

    Returns:
      The leaves `adapter` and `adapter_scale`.
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
    """Counts the parameters of all adapters; 0 if the settings have no rank."""
    if settings.rank is None:
        return 0
    per_layer = 0
    for name in settings.targets:
        fan_in, fan_out = config.matrices[name]
        per_layer += settings.rank * (fan_in + fan_out)
    return config.num_layers * per_layer


def split(params: Params) -> tuple[Params, Params]:
    """Splits parameters into (frozen, trained); without adapters nothing is frozen."""
    if "adapter" not in params:
        return {}, params
    frozen = {name: leaf for name, leaf in params.items() if name not in TRAINED}
    trained = {name: params[name] for name in TRAINED if name in params}
    return frozen, trained


def scaled(params: Params) -> Params | None:
    """Multiplies every B of the adapters by alpha / r; returns None without adapters."""
    if "adapter" not in params:
        return None
    scale = params["adapter_scale"]
    factors = {}
    for name, leaf in params["adapter"].items():
        factors[name] = leaf * scale if name.endswith("_b") else leaf
    return factors


def merged_layer(layer: Params, adapter: Params | None) -> Params:
    """Adds A B to every adapted matrix of a layer, or of stacked layers.

    Args:
      adapter: scaled factors of the same layers (`scaled`); None returns the layer as it is.

    Returns:
      The layer with W + A B in fp32 for each adapted matrix.
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
    """Merges adapters into the matrices, which gives an equal model without adapters.

    Returns:
      The parameters without `adapter` and `adapter_scale`; a budget module stays.
    """
    if "adapter" not in params:
        return params
    merged = {name: leaf for name, leaf in params.items() if not name.startswith("adapter")}
    merged["layers"] = merged_layer(params["layers"], scaled(params))
    return merged
