"""The schedule, and the rates of old and new parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import OptimizerConfig, ValueConfig
from bacr_jax.learner.optimizer import policy_optimizer, schedule, value_optimizer


def test_the_schedule_by_hand():
    config = OptimizerConfig(warmup_steps=2, schedule="cosine", final_fraction=0.1)
    rate = schedule(config, 12)
    np.testing.assert_allclose(
        [float(rate(i)) for i in (0, 1, 2, 7, 12)], [0.5, 1.0, 1.0, 0.55, 0.1], atol=1e-6
    )
    linear = schedule(dataclasses.replace(config, schedule="linear", warmup_steps=0), 10)
    np.testing.assert_allclose([float(linear(i)) for i in (0, 5, 10)], [1.0, 0.55, 0.1])


def test_new_modules_learn_at_their_own_rate():
    config = OptimizerConfig(
        learning_rate=1e-3, conditioning_learning_rate=1e-2, warmup_steps=0, schedule="constant"
    )
    params = {"embed": jnp.ones((2, 2)), "budget": {"w1": jnp.ones((2, 2))}}
    tx = policy_optimizer(config, 10)
    updates, _ = tx.update(jax.tree.map(lambda x: x * 0.1, params), tx.init(params), params)
    np.testing.assert_allclose(updates["embed"], -1e-3, rtol=1e-3)
    np.testing.assert_allclose(updates["budget"]["w1"], -1e-2, rtol=1e-3)


def test_a_single_rate_holds_for_phi_and_value_head():
    config = OptimizerConfig(
        learning_rate=1e-3, single_rate=True, warmup_steps=2, schedule="constant"
    )
    head = {"out": {"kernel": jnp.ones((2, 1))}}
    params = {"embed": jnp.ones((2, 2)), "budget": {"w1": jnp.ones((2, 2))}}
    for tx, tree in (
        (policy_optimizer(config, 10), params),
        (value_optimizer(ValueConfig(), config, 10), head),
    ):
        updates, _ = tx.update(jax.tree.map(lambda x: x * 0.1, tree), tx.init(tree), tree)
        for update in jax.tree.leaves(updates):
            np.testing.assert_allclose(update, -5e-4, rtol=1e-3)  # half way up the rise


def test_matrices_decay_and_norms_and_gates_do_not():
    config = OptimizerConfig(
        learning_rate=1.0,
        conditioning_learning_rate=1.0,
        warmup_steps=0,
        schedule="constant",
        weight_decay=0.5,
    )
    params = {
        "embed": jnp.ones((2, 2)),
        "layers": {"q_kernel": jnp.ones((1, 2, 2)), "mlp_norm": jnp.ones((1, 2))},
        "budget": {"w2": jnp.ones((2, 2)), "gate": jnp.ones((1, 2))},
    }
    tx = policy_optimizer(config, 10)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["embed"], -0.5)
    np.testing.assert_allclose(updates["layers"]["q_kernel"], -0.5)
    np.testing.assert_allclose(updates["budget"]["w2"], -0.5)
    np.testing.assert_array_equal(updates["layers"]["mlp_norm"], 0.0)
    np.testing.assert_array_equal(updates["budget"]["gate"], 0.0)


def test_gradients_of_the_value_head_are_clipped():
    """The second step of Adam, after gradients 100, which is clipped to 1, and .1."""
    tx = value_optimizer(ValueConfig(learning_rate=1.0), OptimizerConfig(), 1)
    head = {"bias": jnp.zeros(1)}
    state = tx.init(head)
    for gradient in (100.0, 0.1):
        updates, state = tx.update({"bias": jnp.array([gradient])}, state, head)
    mean = (0.9 * 0.1 * 1 + 0.1 * 0.1) / (1 - 0.9**2)
    square = (0.999 * 0.001 * 1 + 0.001 * 0.01) / (1 - 0.999**2)
    np.testing.assert_allclose(updates["bias"], [-mean / square**0.5], rtol=1e-4)
