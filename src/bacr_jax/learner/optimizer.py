"""AdamW with its schedule, and a rate of their own for freshly initialised parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bacr_jax.config import OptimizerConfig, ValueConfig


def schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate relative to its peak: a linear rise, then cosine, linear or no decay."""
    rise = min(config.warmup_steps, max(total_steps - 1, 0))
    rest = max(total_steps - rise, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(1.0, rest, alpha=config.final_fraction),
        "linear": optax.linear_schedule(1.0, config.final_fraction, rest),
        "constant": optax.constant_schedule(1.0),
    }[config.schedule]
    # The first update already moves: the rise starts at 1/rise, not at 0.
    up = lambda step: (step + 1) / max(rise, 1)
    return optax.join_schedules([up, decay], [rise])


def _adamw(config: OptimizerConfig, rate: float, total_steps: int) -> optax.GradientTransformation:
    """AdamW under the run's schedule, at a peak rate of its own."""
    factor = schedule(config, total_steps)
    adamw = optax.adamw(
        lambda step: rate * factor(step),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=_decayed,
        mu_dtype=jnp.float32,
    )
    return adamw if config.moment_dtype == "float32" else keep_moments(adamw, config.moment_dtype)


def keep_moments(tx: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """An Adam whose moments are kept in a narrower type; every step computes with them in fp32.

    A moment m <- b m + (1 - b) g whose step (1 - b) |g - m| is under half the spacing at m stays
    where it is. In bfloat16 the spacing is 2^-8 to 2^-7 of m: with b1 = 0.9 and b2 = 0.95 a moment
    stops within a few percent of its target, with b2 = 0.999 the second would hardly move.
    """
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)

    def cast(state: Any, dtype: Any) -> Any:
        to = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)

        def moments(node: Any) -> Any:
            return node._replace(mu=to(node.mu), nu=to(node.nu)) if is_adam(node) else node

        return jax.tree.map(moments, state, is_leaf=is_adam)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(grads, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(tx.init(params), dtype), update)


def _labels(params: dict) -> dict:
    return {
        name: jax.tree.map(lambda _: "conditioning" if name == "budget" else "backbone", leaf)  # noqa: B023
        for name, leaf in params.items()
    }


def _decayed(params: dict) -> dict:
    """Matrices decay; norms, biases, gates do not (stacked layers make a norm two-dimensional)."""
    ends = ("kernel", "w1", "w2", "embed", "lm_head", "_a", "_b")

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return any(getattr(part, "key", "").endswith(ends) for part in path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def policy_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW on fp32 masters, global-norm clipping over all of the policy.

    phi and the gates start from nothing, and a fine-tuning rate of 1e-6 would hardly move them in a
    few hundred updates; they get `conditioning_learning_rate`, unless the run has a single rate.
    """
    single = config.single_rate
    of_phi = config.learning_rate if single else config.conditioning_learning_rate
    groups = {
        "backbone": _adamw(config, config.learning_rate, total_steps),
        "conditioning": _adamw(config, of_phi, total_steps),
    }
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip), optax.multi_transform(groups, _labels)
    )


def value_optimizer(
    config: ValueConfig, policy: OptimizerConfig, total_steps: int
) -> optax.GradientTransformation:
    """Adam for the value head, with its own steps and rate, or the policy's if the run has one."""
    if policy.single_rate:
        adam = _adamw(policy, policy.learning_rate, total_steps)
        return optax.chain(optax.clip_by_global_norm(policy.grad_clip), adam)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))
