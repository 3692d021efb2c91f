"""One update: exact ratios, micro-batches, donation, broken batches, and the value head's steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bacr_jax.config import ConditioningConfig, LossConfig, OptimizerConfig, ValueConfig
from bacr_jax.learner import train_step as steps
from bacr_jax.learner.objective import Minibatch
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.train_step import Gradients, score_batch, train_step
from bacr_jax.model import value
from bacr_jax.types import Prompts
from learner_world import (
    RULES,
    SGD,
    SPEC,
    VALUE_HEAD,
    WORLD,
    close,
    make_batch_by_hand,
    state_of,
)
from rollout_world import make_prompts

PLAIN = {"spec": SPEC, "policy_tx": SGD, "head_tx": SGD}


@pytest.fixture(scope="module")
def batch():
    return make_batch_by_hand()


def step(batch, **changes):
    state, metrics, _ = train_step(
        state_of(), Minibatch(batch), RULES.allowed_tokens, **PLAIN | changes
    )
    return state, metrics


def test_the_ratio_is_exactly_one_on_the_first_update(batch):
    _, metrics = step(batch)
    assert float(metrics["policy/ratio"]) == 1.0
    assert float(metrics["policy/clipped_share"]) == 0.0


@pytest.mark.parametrize(
    "mode",
    [
        "token_mean",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("constant", "seq_mean_token_mean")),
    ],
)
def test_a_split_into_micro_batches_changes_nothing(batch, mode):
    spec = dataclasses.replace(SPEC, loss=LossConfig(aggregate=mode))
    whole, one = step(batch, spec=spec)
    split, many = step(batch, spec=spec, micro_batches=2)
    for name in one:
        np.testing.assert_allclose(many[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
    close((split.policy, split.head), (whole.policy, whole.head), 1e-6, rtol=1e-5)


# Adam steps on gradients made up here: only the optimizer is compiled.
ADAM = policy_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0), 10)


def adam_step(state, fill, policy_tx=ADAM, **how):
    like = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, fill), tree)
    grads = Gradients(like(state.policy), like(state.head), {"loss/total": jnp.float32(fill)})
    how |= {"spec": SPEC, "policy_tx": policy_tx, "head_tx": SGD}
    return steps.apply_gradients(state, grads, **how)


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    after, metrics = adam_step(state_of(policy_tx=ADAM), jnp.nan)
    assert int(after.skipped) == 1 and int(after.updates) == 0
    assert float(metrics["policy/skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, after.policy, WORLD.params)
    jax.tree.map(np.testing.assert_array_equal, after.head, VALUE_HEAD)
    again, _ = adam_step(after, 1.0)
    assert int(again.updates) == 1 and int(again.skipped) == 1
    assert (again.policy["embed"] < WORLD.params["embed"]).all()


def test_skipped_updates_are_in_a_row_until_one_is_finite():
    state, found = state_of(policy_tx=ADAM), []
    for fill, has_tokens in (
        (jnp.nan, True), (jnp.nan, True), (0.0, False), (jnp.nan, True), (1.0, True), (0.0, False),
        (jnp.nan, True),
    ):  # fmt: skip
        state, _ = adam_step(state, fill, has_tokens=has_tokens)
        found.append(int(state.skipped_in_a_row))
    # A minibatch without tokens leaves the count as it is.
    assert found == [1, 2, 2, 3, 0, 0, 1]


def test_a_zero_learning_rate_leaves_every_parameter_alone():
    tx = policy_optimizer(OptimizerConfig(learning_rate=0.0, conditioning_learning_rate=0.0), 10)
    after, _ = adam_step(state_of(policy_tx=tx), 1.0, tx)
    assert int(after.updates) == 1
    jax.tree.map(np.testing.assert_array_equal, after.policy, WORLD.params)


@pytest.mark.parametrize(("logprob", "skipped"), [(-jnp.inf, 0), (jnp.inf, 0), (jnp.nan, 1)])
def test_a_log_probability_that_is_no_number_spoils_no_parameter(batch, logprob, skipped):
    scores = score_batch(WORLD.params, batch, RULES.allowed_tokens, spec=SPEC)
    old = dataclasses.replace(scores, thinking=scores.thinking.at[0, 0].set(logprob))
    negative = dataclasses.replace(
        batch, thinking_advantages=-np.abs(batch.thinking_advantages) - np.float32(1.0)
    )
    after, *_ = train_step(state_of(), Minibatch(negative, old), RULES.allowed_tokens, **PLAIN)
    # Ratios are bounded before they are taken from their logarithm.
    assert int(after.skipped) == skipped
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(after.policy))


def test_state_buffers_are_donated(batch):
    lowered = train_step.lower(state_of(), Minibatch(batch), RULES.allowed_tokens, **PLAIN)
    held = sum(x.nbytes for x in jax.tree.leaves(state_of()))
    assert lowered.compile().memory_analysis().alias_size_in_bytes >= 0.95 * held


# Wide enough that parameters outweigh everything else: 2.1 million of them.
LARGE = {"embed": (4096, 256), "layers": {"up_kernel": (8, 256, 512)}}


def temporaries_of_adam(parameters):
    abstract = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    policy = jax.tree.map(abstract, parameters, is_leaf=lambda x: isinstance(x, tuple))
    state = jax.eval_shape(
        functools.partial(steps.init_state, policy_tx=ADAM, head_tx=SGD), policy, None
    )
    lowered = steps.apply_gradients.lower(
        state, Gradients(policy, None, {}), spec=SPEC, policy_tx=ADAM, head_tx=SGD, has_tokens=True
    )
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes / sum(x.size * 4 for x in jax.tree.leaves(policy))


def test_an_adam_step_needs_one_copy_of_the_gradients_and_no_second_state():
    """In units of the parameters. Selecting the old or the new state afterwards took 2.0."""
    assert temporaries_of_adam(LARGE) < 1.05


# Shape [Q, G, D] of the value head's input features.
FEATURES_SHAPE = (4, 2, VALUE_HEAD["hidden"]["kernel"].shape[0])


def fitted_head(features, targets, num_steps):
    tx = value_optimizer(ValueConfig(), OptimizerConfig(), 1)
    fitted, _ = steps.fit_value(
        VALUE_HEAD, tx.init(VALUE_HEAD), features, targets, head_tx=tx, num_steps=num_steps
    )
    return fitted


def test_extra_steps_fit_the_value_head(batch):
    features = jax.random.normal(jax.random.key(0), FEATURES_SHAPE)
    error = lambda head: float(((value.values(head, features) - batch.value_targets) ** 2).mean())
    fitted = fitted_head(features, batch.value_targets, num_steps=200)
    assert error(fitted) < 0.2 * error(VALUE_HEAD)


def test_extra_steps_with_features_that_are_not_finite_are_skipped(batch):
    features = jnp.ones(FEATURES_SHAPE).at[0, 0, 0].set(jnp.nan)
    fitted = fitted_head(features, batch.value_targets, num_steps=2)
    jax.tree.map(np.testing.assert_array_equal, fitted, VALUE_HEAD)


def test_values_read_the_question_without_the_budget_if_prompts_are_not_conditioned():
    """The first 16 features are of the question. The same question has the budgets 1 and 12."""
    one = make_prompts([4], 5)
    prompts = Prompts(*(np.repeat(x, 2, axis=0) for x in jax.tree.leaves(one)))

    def of_question(positions):
        spec = dataclasses.replace(SPEC, conditioning=ConditioningConfig(positions=positions))
        arguments = (WORLD.params, VALUE_HEAD, prompts, jnp.array([1, 12]), jnp.ones((2, 2), int))
        _, features = steps.question_values(*arguments, spec=spec)
        return np.asarray(features[:, :, :16])

    features = of_question("response")
    np.testing.assert_array_equal(features[0], features[1])
    features = of_question("all")
    assert np.abs(features[0] - features[1]).max() > 1e-3


def test_a_head_told_the_cut_learns_each_cuts_pass_rate():
    tx = value_optimizer(ValueConfig(), OptimizerConfig(), 1)
    budgets, cuts = jnp.array([8, 8]), jnp.array([[2, 4, 6, 8]] * 2)
    rates = jnp.array([[0.2, 0.4, 0.6, 0.8]] * 2)

    def fitted(kind):
        features = value.value_features(jnp.ones((2, 6)), None, budgets, cuts, b_max=8, kind=kind)
        head = value.init(jax.random.key(0), num_features=features.shape[-1], hidden_size=32)
        head, _ = steps.fit_value(head, tx.init(head), features, rates, head_tx=tx, num_steps=600)
        return np.asarray(value.values(head, features))

    np.testing.assert_allclose(fitted("cut"), rates, atol=0.02)
    # The best that one number for all cuts can do is off by .3 at the outer ones.
    np.testing.assert_allclose(fitted("trace"), 0.5, atol=0.02)


def test_gradients_start_from_zeros_of_their_own_form(batch):
    normalizers = steps.loss_normalizers(batch, spec=SPEC)
    given = (state_of(), Minibatch(batch), normalizers, RULES.allowed_tokens)
    zeros = steps.no_gradients(*given, spec=SPEC)
    shapes, _ = jax.eval_shape(functools.partial(steps.gradients, spec=SPEC), *given)
    assert jax.tree.structure(zeros) == jax.tree.structure(shapes)
    assert float(optax.global_norm(zeros)) == 0.0
