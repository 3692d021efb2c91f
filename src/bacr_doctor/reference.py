"""A plain Qwen2 of random weights, and its log-probabilities in NumPy's float64.

Written from the model's description and not from `bacr_jax.model`: one sequence at a time, every
key, no cache, no tree. Slow, easy to check, and the same on every machine.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from bacr_jax.config import AdapterConfig, ConditioningConfig
from bacr_jax.model import adapters, qwen2
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params


def random_params(config: Qwen2Config, rank: int | None = None) -> Params:
    """Parameters far from uniform and from zero, so that every one of them matters; on the host.

    `rank`: of low-rank adapters beside them.
    """
    draw, key = np.random.default_rng(0), jax.random.key(0)

    def make() -> Params:
        params = qwen2.init(key, config, conditioning=ConditioningConfig())
        if rank is None:
            return params
        low = AdapterConfig(rank=rank, alpha=2.0 * rank, targets=("q", "v", "down"))
        return {**params, **adapters.init(key, config, low)}

    def fill(path: Any, leaf: Any) -> np.ndarray:
        near = float(path[-1].key.endswith(("norm", "scale")))
        return (near + 0.2 * draw.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(make))


def doubled(params: Params) -> Params:
    """In float64, adapters added to their matrices: W + alpha / r A B."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    adapter, layers = params.get("adapter", {}), dict(params["layers"])
    for name in {leaf.rpartition("_")[0] for leaf in adapter}:
        low = adapter[f"{name}_a"] @ adapter[f"{name}_b"] * params["adapter_scale"]
        layers[f"{name}_kernel"] = layers[f"{name}_kernel"] + low
    return {**params, "layers": layers}


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rotated(x: np.ndarray, at: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = at[:, None, None] * theta ** (-np.arange(half) / half)
    cos, sin, first, second = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def embedded_budget(params: Params, budget: int) -> Float[np.ndarray, "D"]:
    """phi(b) = W2 SiLU(W1 s(b)) (Eq. 2)."""
    width = params["w1"].shape[0]
    # The angle is a product of two float32 numbers; its error would grow with the budget.
    frequency = (10000.0 ** (-np.arange(0, width, 2) / width)).astype(np.float32)
    angle = (np.float32(budget) * frequency).astype(np.float64)
    codes = np.concatenate([np.sin(angle), np.cos(angle)])
    return _silu(codes @ params["w1"]) @ params["w2"]


def logprobs(
    params: Params, tokens: Int[np.ndarray, "n"], budget: int, count: int, config: Qwen2Config
) -> Float[np.ndarray, "M"]:
    """Log-probabilities of the last `count` tokens, with tied embeddings and phi of a budget."""
    length, x, eps = len(tokens), params["embed"][tokens], config.rms_norm_eps
    phi, group = embedded_budget(params["budget"], budget), config.num_heads // config.num_kv_heads
    # Positions that attend: all, but in the last layer only those that say the last tokens.
    everywhere, last = np.arange(length), np.arange(length - count - 1, length - 1)
    for index in range(config.num_layers):
        at = last if index == config.num_layers - 1 else everywhere
        layer = {name: leaf[index] for name, leaf in params["layers"].items()}
        y = _norm(x, layer["attention_norm"], eps)
        q, k, v = (
            (states @ layer[f"{n}_kernel"] + layer[f"{n}_bias"]).reshape(
                len(states), -1, config.head_dim
            )
            for n, states in (("q", y[at]), ("k", y), ("v", y))
        )
        q, k = _rotated(q, at, config.rope_theta), _rotated(k, everywhere, config.rope_theta)
        k, v = (np.repeat(heads, group, axis=1) for heads in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k, optimize=True) / np.sqrt(config.head_dim)
        scores = np.where(everywhere > at[:, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("nts,snh->tnh", weights, v, optimize=True)
        x = x[at] + mixed.reshape(len(at), -1) @ layer["o_kernel"]
        y = _norm(x, layer["mlp_norm"], eps)
        x = x + (_silu(y @ layer["gate_kernel"]) * (y @ layer["up_kernel"])) @ layer["down_kernel"]
        # The budget joins through its gate (Eq. 3).
        x = x + phi / (1 + np.exp(-x @ params["budget"]["gate"][index]))[:, None]
    logits = _norm(x, params["final_norm"], eps) @ params["embed"].T
    logits -= logits.max(-1, keepdims=True)
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return scores[np.arange(count), tokens[-count:]]
