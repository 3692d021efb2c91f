"""Low-rank adapters on a frozen base (LoRA, arXiv 2106.09685): y = x W + alpha / r (x A) B.

Parameters with adapters are those of `model.qwen2` and two more:

    adapter        of each target two leaves with a leading L: q_a [L, D, r], q_b [L, r, N H] ...
    adapter_scale  []   alpha / r

Trained are `adapter` and `budget`; everything else is the base. A is drawn uniformly from
+-1/sqrt(fan-in), as PEFT draws it, and B is zero: the adapted model starts as the base, bit for
bit. There is no dropout: the learner's log-probabilities must be the sampler's.
"""

import jax
import jax.numpy as jnp

from bacr_jax.config import AdapterConfig
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

# What is trained where a model has adapters.
TRAINED = ("adapter", "budget")


def init(key: jax.Array, config: Qwen2Config, settings: AdapterConfig) -> Params:
    """Fresh adapters, fp32: the leaves `adapter` and `adapter_scale`."""
    rank = settings.rank
    assert rank is not None
    leaves: Params = {}
    for index, (name, (fan_in, fan_out)) in enumerate(config.matrices.items()):
        if name not in settings.targets:
            continue
        shape = (config.num_layers, fan_in, rank)
        draw = jax.random.uniform(jax.random.fold_in(key, index), shape, minval=-1.0, maxval=1.0)
        leaves[f"{name}_a"] = draw * fan_in**-0.5
        leaves[f"{name}_b"] = jnp.zeros((config.num_layers, rank, fan_out))
    return {"adapter": leaves, "adapter_scale": jnp.float32(settings.alpha / rank)}


def num_parameters(config: Qwen2Config, settings: AdapterConfig) -> int:
    """Parameters of all adapters; 0 where there are none."""
    per_layer = sum(sum(config.matrices[name]) for name in settings.targets)
    return config.num_layers * (settings.rank or 0) * per_layer


def split(params: Params) -> tuple[Params, Params]:
    """The frozen base and what is trained; without adapters nothing is frozen."""
    if "adapter" not in params:
        return {}, params
    frozen = {name: leaf for name, leaf in params.items() if name not in TRAINED}
    return frozen, {name: params[name] for name in TRAINED if name in params}


def scaled(params: Params) -> Params | None:
    """Adapters with alpha / r in their B; None without adapters."""
    if "adapter" not in params:
        return None
    scale = params["adapter_scale"]
    leaves = params["adapter"].items()
    return {name: leaf * scale if name.endswith("_b") else leaf for name, leaf in leaves}


def merged_layer(layer: Params, adapter: Params | None) -> Params:
    """A layer's parameters (or those of stacked layers) with W + A B, fp32, of adapted matrices."""
    if adapter is None:
        return layer
    merged = dict(layer)
    for name, kernel in layer.items():
        target = name.removesuffix("_kernel")
        if f"{target}_a" in adapter:
            factors = adapter[f"{target}_a"], adapter[f"{target}_b"]
            product = jnp.matmul(*factors, precision="highest")
            merged[name] = kernel.astype(jnp.float32) + product
    return merged


def merge(params: Params) -> Params:
    """Parameters of a plain model (and its budget module) that computes the same."""
    if "adapter" not in params:
        return params
    kept = {name: leaf for name, leaf in params.items() if not name.startswith("adapter")}
    return {**kept, "layers": merged_layer(params["layers"], scaled(params))}
