"""Reference implementation of a small Qwen2 model in NumPy, in float64.

`paths` compares the library's log-probabilities with the log-probabilities of this module. The code
follows the description of the model and shares no code with the forward pass in `bacr_jax.model`.
It processes one sequence at a time with full attention, without a KV cache and without tree
attention (several answers that attend to one shared trace). This is slow, but it is easy to verify
and returns the same numbers on every machine.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from bacr_jax.config import AdapterConfig, ConditioningConfig
from bacr_jax.model import adapters, qwen2
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

# Shapes: T positions, model width D, N heads of width H.
States = Float[np.ndarray, "T D"]
Heads = Float[np.ndarray, "T N H"]
Positions = Int[np.ndarray, "T"]  # noqa: F821


def random_params(config: Qwen2Config, rank: int | None = None) -> Params:
    """Generates random parameters that are all large enough to affect the model's output.

    Norm weights and scales have mean 1, and all other parameters have mean 0. The standard
    deviation is 0.2.

    Args:
      config: shape of the model.
      rank: rank of the LoRA adapters. If None, the model has no adapters.

    Returns:
      The parameters as float32 NumPy arrays.
    """
    rng = np.random.default_rng(0)
    key = jax.random.key(0)

    def make() -> Params:
        params = qwen2.init(key, config, conditioning=ConditioningConfig())
        if rank is None:
            return params
        adapter_config = AdapterConfig(rank=rank, alpha=2.0 * rank, targets=("q", "v", "down"))
        return {**params, **adapters.init(key, config, adapter_config)}

    def fill(path: Any, leaf: Any) -> np.ndarray:
        is_scale = path[-1].key.endswith(("norm", "scale"))
        mean = 1.0 if is_scale else 0.0
        values = mean + 0.2 * rng.normal(size=leaf.shape)
        return values.astype(np.float32)

    shapes = jax.eval_shape(make)
    return jax.tree_util.tree_map_with_path(fill, shapes)


def to_float64(params: Params) -> Params:
    """Converts parameters to float64 and merges LoRA adapters into their kernels.

    Each adapted kernel W becomes W + (alpha / r) A B.
    """
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    adapter = params.get("adapter", {})
    layers = dict(params["layers"])
    names = {leaf.rpartition("_")[0] for leaf in adapter}
    for name in names:
        a = adapter[f"{name}_a"]
        b = adapter[f"{name}_b"]
        # `adapter_scale` contains alpha / r.
        update = a @ b * params["adapter_scale"]
        kernel = layers[f"{name}_kernel"]
        layers[f"{name}_kernel"] = kernel + update
    return {**params, "layers": layers}


def budget_embedding(params: Params, budget: int) -> Float[np.ndarray, "D"]:
    """Computes the budget embedding phi(b) = W2 SiLU(W1 s(b)) of a budget b (Eq. 2).

    s(b) contains the sine and cosine of b times each of several frequencies.
    """
    w1 = params["w1"]
    w2 = params["w2"]
    width = w1.shape[0]
    exponents = -np.arange(0, width, 2) / width
    # The library computes this product in float32. Without the same rounding, the difference from
    # the library would grow with the budget.
    frequency = (10000.0**exponents).astype(np.float32)
    angle_float32 = np.float32(budget) * frequency
    angle = angle_float32.astype(np.float64)
    codes = np.concatenate([np.sin(angle), np.cos(angle)])
    return _silu(codes @ w1) @ w2


def logprobs(
    params: Params,
    tokens: Int[np.ndarray, "n"],
    budget: int,
    count: int,
    config: Qwen2Config,
) -> Float[np.ndarray, "M"]:
    """Computes the log-probabilities of the last `count` tokens of a sequence, in nats.

    The input and output embeddings are tied, and the budget embedding is added in every layer.

    Args:
      params: float64 parameters with merged adapters, as returned by `to_float64`.
      tokens: token ids of the sequence.
      budget: thinking budget in tokens.
      count: number of tokens to score.
      config: shape of the model.
    """
    embed = params["embed"]
    gates = params["budget"]["gate"]
    eps = config.rms_norm_eps
    length = len(tokens)
    x = embed[tokens]
    phi = budget_embedding(params["budget"], budget)
    all_positions = np.arange(length)
    # Positions whose outputs predict the last `count` tokens. The last layer computes only these.
    predicting = np.arange(length - count - 1, length - 1)
    for index in range(config.num_layers):
        is_last = index == config.num_layers - 1
        positions = predicting if is_last else all_positions
        layer = {name: leaf[index] for name, leaf in params["layers"].items()}
        x = x[positions] + _attention(layer, x, positions, config)
        y = _norm(x, layer["mlp_norm"], eps)
        x = x + _mlp(layer, y)
        # Add the budget embedding phi, scaled by the sigmoid of its gate (Eq. 3).
        gate_logits = x @ gates[index]
        x = x + phi / (1 + np.exp(-gate_logits))[:, None]
    y = _norm(x, params["final_norm"], eps)
    logits = y @ embed.T
    logits -= logits.max(-1, keepdims=True)
    totals = np.exp(logits).sum(-1, keepdims=True)
    scores = logits - np.log(totals)
    last_tokens = tokens[-count:]
    return scores[np.arange(count), last_tokens]


def _attention(
    layer: Params,
    x: Float[np.ndarray, "n D"],
    positions: Positions,
    config: Qwen2Config,
) -> States:
    """Applies RMSNorm to `x`, then computes causal attention at the query positions `positions`."""
    all_positions = np.arange(len(x))
    y = _norm(x, layer["attention_norm"], config.rms_norm_eps)
    q = _heads(layer, "q", y[positions], config)
    k = _heads(layer, "k", y, config)
    v = _heads(layer, "v", y, config)
    q = _rotate(q, positions, config.rope_theta)
    k = _rotate(k, all_positions, config.rope_theta)
    group = config.num_heads // config.num_kv_heads
    k = np.repeat(k, group, axis=1)
    v = np.repeat(v, group, axis=1)
    scores = np.einsum("tnh,snh->nts", q, k, optimize=True)
    scores = scores / np.sqrt(config.head_dim)
    is_later = all_positions > positions[:, None]
    scores = np.where(is_later, -np.inf, scores)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("nts,snh->tnh", weights, v, optimize=True)
    joined = mixed.reshape(len(positions), -1)
    return joined @ layer["o_kernel"]


def _heads(
    layer: Params,
    name: str,
    x: States,
    config: Qwen2Config,
) -> Heads:
    """Projects hidden states to queries, keys or values (`name` is q, k or v), split into heads."""
    kernel = layer[f"{name}_kernel"]
    bias = layer[f"{name}_bias"]
    projected = x @ kernel + bias
    return projected.reshape(len(x), -1, config.head_dim)


def _mlp(layer: Params, y: States) -> States:
    """Computes the gated MLP of normalised hidden states."""
    gate = _silu(y @ layer["gate_kernel"])
    up = y @ layer["up_kernel"]
    return gate * up @ layer["down_kernel"]


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    """Divides `x` by its root mean square over the last axis, and multiplies it by `scale`."""
    mean_square = (x * x).mean(-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * scale


def _rotate(x: Heads, positions: Positions, theta: float) -> Heads:
    """Applies rotary embeddings, which pair dimensions i and i + H/2 of a head of width H."""
    half = x.shape[-1] // 2
    exponents = -np.arange(half) / half
    angle = positions[:, None, None] * theta**exponents
    cos = np.cos(angle)
    sin = np.sin(angle)
    first = x[..., :half]
    second = x[..., half:]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    return np.concatenate([rotated_first, rotated_second], axis=-1)


def _silu(x: np.ndarray) -> np.ndarray:
    """Computes SiLU(x) = x / (1 + exp(-x))."""
    return x / (1 + np.exp(-x))
