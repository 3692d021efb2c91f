"""A method is a bundle of functions; what it leaves out means nothing is done."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.methods import Advantages, Method
from methods_world import group_batch, load


def method(**fields):
    """The least that a method must say."""
    given = dict.fromkeys(
        ("question_weights", "sample_budgets", "cuts", "rewards"), lambda *_: None
    )
    return Method(
        name="mine",
        conditioned=False,
        uses_value=False,
        advantages=lambda *_: None,
        **{**given, **fields},
    )


def test_a_method_that_says_no_more_remembers_and_reports_nothing(tmp_path):
    plain, batch = method(), group_batch(load(tmp_path, "grpo"))
    assert plain.init_state(64) is None and plain.metrics(None, batch) == {}
    assert plain.update("as it was", batch, batch.outcomes, None) == "as it was"
    assert (plain.answers, plain.declares_budget, dict(plain.published)) == (1, False, {})
    assert plain.dynamic_sampling is plain.read is plain.rejection_sft is None


def test_a_method_equals_itself_alone_so_that_jit_tells_methods_apart():
    one, other = method(rewards=lambda s, b: b + 1), method(rewards=lambda s, b: b + 2)
    assert one == one and one != dataclasses.replace(one)
    reward = jax.jit(lambda b, m: m.rewards(None, b), static_argnums=1)
    assert (int(reward(1, one)), int(reward(1, other))) == (2, 3)


def test_the_number_of_cuts_is_that_of_its_function():
    thirds = lambda key, budgets: budgets[..., None] * jnp.arange(1, 4) // 3
    one = method(cuts=thirds)
    assert (
        one.num_cuts == 3 and dataclasses.replace(one, cuts=lambda k, b: b[..., None]).num_cuts == 1
    )


def test_batches_and_advantages_are_pytrees(tmp_path):
    batch = group_batch(load(tmp_path, "grpo"), extra={"declared": np.ones((4, 4))})
    doubled = jax.tree.map(lambda x: 2 * x, batch)
    np.testing.assert_array_equal(doubled.extra["declared"], np.full((4, 4), 2))
    np.testing.assert_array_equal(doubled.budgets, 2 * batch.budgets)
    zeros = jnp.zeros((1, 2, 3))
    assert len(jax.tree.leaves(Advantages(zeros, zeros, zeros))) == 3
    assert len(jax.tree.leaves(Advantages(zeros, zeros, zeros, keep=jnp.ones((1, 2), bool)))) == 4
