"""Builds the optimizers of the policy and of the value head.

The policy uses AdamW with a learning rate schedule, and a separate learning rate for the parameters
of the budget conditioning. `training/run.py` calls `policy_optimizer` and `value_optimizer`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bacr_jax.config import OptimizerConfig, ValueConfig


def schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Returns the learning rate schedule, as a fraction of the peak learning rate.

    The schedule has a linear warm-up, followed by cosine decay, linear decay or a constant rate.

    Args:
      config: settings of the optimizer.
      total_steps: number of optimizer updates.
    """
    rise_steps = min(config.warmup_steps, max(total_steps - 1, 0))
    decay_steps = max(total_steps - rise_steps, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(1.0, decay_steps, alpha=config.final_fraction),
        "linear": optax.linear_schedule(1.0, config.final_fraction, decay_steps),
        "constant": optax.constant_schedule(1.0),
    }[config.schedule]

    def rise(step: Any) -> Any:
        # Start at 1 / rise_steps instead of 0, so that the first update changes the parameters.
        return (step + 1) / max(rise_steps, 1)

    return optax.join_schedules([rise, decay], [rise_steps])


def _adamw(config: OptimizerConfig, rate: float, total_steps: int) -> optax.GradientTransformation:
    """Builds AdamW with the learning rate schedule of the run.

    Args:
      config: settings of the optimizer.
      rate: peak learning rate.
      total_steps: number of optimizer updates.
    """
    factor = schedule(config, total_steps)
    adamw = optax.adamw(
        lambda step: rate * factor(step),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=_decayed,
        mu_dtype=jnp.float32,
    )
    if config.moment_dtype == "float32":
        return adamw
    return keep_moments(adamw, config.moment_dtype)


def keep_moments(tx: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """Wraps Adam so that its moments are stored in a narrower dtype. Updates are computed in fp32.

    Adam's moments are running means m <- b m + (1 - b) g, with decay b and with g a gradient (b =
    b1) or its square (b = b2). A stored moment m does not change if the change (1 - b) |g - m| is
    less than half the spacing of representable numbers at m. In bfloat16 the spacing is 2^-8 to
    2^-7 of m. With b1 = 0.9 and b2 = 0.95, a moment stops within a few percent of its target. With
    b2 = 0.999, the second moment would hardly change.

    Args:
      tx: optimizer that contains `optax.scale_by_adam`.
      dtype: dtype of the stored moments.
    """

    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    def cast(state: Any, dtype: Any) -> Any:
        def cast_moments(node: Any) -> Any:
            if not is_adam(node):
                return node
            moments = (node.mu, node.nu)
            mu, nu = jax.tree.map(lambda x: x.astype(dtype), moments)
            return node._replace(mu=mu, nu=nu)

        return jax.tree.map(cast_moments, state, is_leaf=is_adam)

    def init(params: Any) -> Any:
        return cast(tx.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = cast(state, jnp.float32)
        updates, state = tx.update(grads, state, params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _labels(params: dict) -> dict:
    """Returns the name of each parameter's optimizer group in `policy_optimizer`."""
    labels = {}
    for name, leaves in params.items():
        label = "conditioning" if name == "budget" else "backbone"
        labels[name] = jax.tree.map(lambda _, label=label: label, leaves)
    return labels


def _decayed(params: dict) -> dict:
    """Returns True for parameters with weight decay, which are the matrices.

    Norms, biases and the gates of the budget embedding have no weight decay. The decision is based
    on parameter names, because norms also have two dimensions when their layers are stacked.
    """
    suffixes = ("kernel", "w1", "w2", "embed", "lm_head", "_a", "_b")

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = [getattr(part, "key", "") for part in path]
        return any(name.endswith(suffixes) for name in names)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def policy_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Builds AdamW on fp32 master weights with gradient clipping by global norm.

    The budget embedding phi and the gates that scale it in each layer have no pretrained values. A
    fine-tuning learning rate of 1e-6 would hardly change them in a few hundred updates. Their
    learning rate is therefore `config.conditioning_learning_rate`, unless `config.single_rate` is
    set.

    Args:
      config: settings of the optimizer.
      total_steps: number of optimizer updates, for the learning rate schedule.
    """
    conditioning_rate = config.conditioning_learning_rate
    if config.single_rate:
        conditioning_rate = config.learning_rate
    groups = {
        "backbone": _adamw(config, config.learning_rate, total_steps),
        "conditioning": _adamw(config, conditioning_rate, total_steps),
    }
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip), optax.multi_transform(groups, _labels)
    )


def value_optimizer(
    config: ValueConfig, policy: OptimizerConfig, total_steps: int
) -> optax.GradientTransformation:
    """Builds Adam for the value head with a separate, constant learning rate.

    With `policy.single_rate`, the value head uses the optimizer settings of the policy instead.

    Args:
      config: settings of the value head.
      policy: optimizer settings of the policy.
      total_steps: number of optimizer updates, for the learning rate schedule of the policy.
    """
    if policy.single_rate:
        adam = _adamw(policy, policy.learning_rate, total_steps)
        return optax.chain(optax.clip_by_global_norm(policy.grad_clip), adam)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))
