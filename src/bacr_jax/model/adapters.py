"""Low-rank adapters on a frozen base (LoRA, arXiv 2106.09685): y = x W + alpha / r (x A) B.

Parameters with adapters are those of `model.qwen2` and two more:

    adapter        of each target two leaves with a leading L: q_a [L, D, r], q_b [L, r, N H] ...
    adapter_scale  []   alpha / r

Trained are `adapter` and `budget`; everything else is the base. A is drawn uniformly from
+-1/sqrt(fan-in), as PEFT draws it, and B is zero: the adapted model starts as the base, bit for
bit. There is no dropout: the learner's log-probabilities must be the sampler's.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

# What is trained where a model has adapters.
TRAINED = ("adapter", "budget")


def widths(config: Qwen2Config) -> dict[str, tuple[int, int]]:
    """Input and output width of every matrix that can have an adapter, by its target's name."""
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q": (d, q),
        "k": (d, kv),
        "v": (d, kv),
        "o": (q, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }


def init(
    key: jax.Array, config: Qwen2Config, *, rank: int, alpha: float, targets: Sequence[str]
) -> Params:
    """Fresh adapters, fp32: the leaves `adapter` and `adapter_scale`.

    Args:
      alpha: the product A B is multiplied by alpha / r.
      targets: matrices that get one, by the names of `widths`.
    """
    leaves: Params = {}
    for index, (name, (fan_in, fan_out)) in enumerate(widths(config).items()):
        if name not in targets:
            continue
        shape = (config.num_layers, fan_in, rank)
        draw = jax.random.uniform(jax.random.fold_in(key, index), shape, minval=-1.0, maxval=1.0)
        leaves[f"{name}_a"] = draw * fan_in**-0.5
        leaves[f"{name}_b"] = jnp.zeros((config.num_layers, rank, fan_out))
    return {"adapter": leaves, "adapter_scale": jnp.float32(alpha / rank)}


def num_parameters(config: Qwen2Config, *, rank: int, targets: Sequence[str]) -> int:
    """Parameters of all adapters."""
    per_layer = sum(sum(width) for name, width in widths(config).items() if name in targets)
    return config.num_layers * rank * per_layer


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


def merged_kernel(kernel: Any, adapter: Params, name: str) -> Any:
    """W + A B of one target in fp32, of one layer or of all stacked ones.

    Args:
      name: the target; a matrix without an adapter comes back as it is.
    """
    if f"{name}_a" not in adapter:
        return kernel
    product = jnp.matmul(adapter[f"{name}_a"], adapter[f"{name}_b"], precision="highest")
    return kernel.astype(jnp.float32) + product


def merged_layer(layer: Params, adapter: Params | None) -> Params:
    """A layer's parameters (or those of stacked layers) with the adapters in its matrices."""
    if adapter is None:
        return layer
    merged = dict(layer)
    for name in layer:
        if name.endswith("_kernel"):
            merged[name] = merged_kernel(layer[name], adapter, name.removesuffix("_kernel"))
    return merged


def merge(params: Params) -> Params:
    """Parameters of a plain model (and its budget module) that computes the same."""
    if "adapter" not in params:
        return params
    kept = {name: leaf for name, leaf in params.items() if not name.startswith("adapter")}
    return {**kept, "layers": merged_layer(params["layers"], scaled(params))}
