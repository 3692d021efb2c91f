"""Updates of a whole iteration, however they are split; shapes compiled before they are needed."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import bacr_jax.learner.updates as updates_module
from bacr_jax.config import LossConfig, OptimizerConfig, TrainConfig, ValueConfig
from bacr_jax.learner.batch import empty_batch
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.train_step import score_batch
from bacr_jax.learner.updates import Updates, num_scored
from learner_world import (
    ANSWERS,
    CUTS,
    PROMPT,
    ROWS,
    RULES,
    SGD,
    SPEC,
    SUFFIX,
    THINKING,
    VALUE_HEAD,
    WORLD,
    make_batch_by_hand,
    state_of,
)

BY_TOKENS = {"micro_batch_tokens": 50, "length_buckets": 2}
# The rows hold 20, 16, 16 and 10 tokens: three micro-batches, of which the last has two rows.
PADDING_FREE = {"micro_batch_tokens": 28, "padding_free": True}


@pytest.fixture(scope="module")
def batch():
    return make_batch_by_hand()


def updates(spec=SPEC, policy_tx=SGD, head_tx=SGD, **config):
    settings = TrainConfig(**{"minibatches": 1} | config)
    return Updates(spec, settings, policy_tx, head_tx, RULES.allowed_tokens)


def gradient(batch, spec=SPEC, value_head=VALUE_HEAD, **config):
    after, metrics = updates(spec, **config)(state_of(value_head), batch)
    start = (WORLD.params, value_head)
    return jax.tree.map(lambda x, y: x - y, start, (after.policy, after.head)), metrics


def same(one, other, relative):
    """Within so much of the gradient's norm."""
    norm = float(optax.global_norm(other))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=relative * norm, rtol=0), one, other
    )


PAIRS = pytest.param({"micro_batch_rows": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "split", [PAIRS, BY_TOKENS, PADDING_FREE], ids=["rows", "tokens", "padding free"]
)
def test_a_split_gives_the_gradient_of_the_whole(batch, split):
    whole, want = gradient(batch)
    parts, metrics = gradient(batch, **split)
    same(parts, whole, 1e-6)
    for name in want:
        np.testing.assert_allclose(metrics[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_shapes_were(batch):
    update = updates(**BY_TOKENS, minibatches=2)
    shapes = {"prompt": PROMPT, "thinking": THINKING, "suffix": SUFFIX, "answer": ANSWERS}
    update.compile(state_of(), empty_batch(ROWS, cuts=CUTS, **shapes), reference=WORLD.params)
    short = dataclasses.replace(batch, sampled=np.minimum(batch.sampled, 1))
    state, _ = update(state_of(), short, reference=WORLD.params)
    compiled = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        update(state, batch, reference=WORLD.params)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def emptied(batch, rows):
    """The batch, with no token of these rows in the loss."""
    sampled, answered = batch.sampled.copy(), batch.answered.copy()
    sampled[rows], answered[rows] = 0, 0
    return dataclasses.replace(batch, sampled=sampled, answered=answered)


BY_ROWS = pytest.param({"micro_batch_rows": 1}, marks=pytest.mark.slow)


@pytest.mark.parametrize("split", [BY_ROWS, BY_TOKENS], ids=["rows", "tokens"])
def test_a_minibatch_without_a_token_in_the_loss_is_no_step_and_is_counted(batch, split):
    adam = policy_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0), 10)
    spec = dataclasses.replace(SPEC, loss=LossConfig(aggregate="token_mean", entropy_coef=0.1))
    update = updates(spec, adam, minibatches=2, **split)
    both, _ = update(state_of(policy_tx=adam), batch)
    half, metrics = update(state_of(policy_tx=adam), emptied(batch, slice(2, 4)))
    assert int(both.updates) == 2 and int(half.updates) == 1 and int(half.skipped) == 0
    assert float(metrics["policy/empty_minibatches"]) == 1
    # A mean over two minibatches would halve it.
    assert float(metrics["policy/ratio"]) == pytest.approx(1.0, abs=1e-5)
    after, metrics = update(half, emptied(batch, slice(0, 4)))
    kept = lambda state: jax.tree.map(np.array, (state.policy, state.policy_opt, state.updates))
    again, _ = update(state_of(policy_tx=adam), emptied(batch, slice(2, 4)))
    jax.tree.map(np.testing.assert_array_equal, kept(after), kept(again))
    assert float(metrics.pop("policy/empty_minibatches")) == 2
    # The value head learns from rows, whether or not their tokens count.
    assert float(metrics.pop("value/loss")) > 0 and "value/mean" in metrics
    assert np.abs(after.head["out"]["bias"] - again.head["out"]["bias"]).max() > 0
    del metrics["value/mean"]
    assert {name: float(x) for name, x in metrics.items()} == dict.fromkeys(metrics, 0.0)


@pytest.mark.parametrize(("spoilt", "in_a_row"), [(0, 0), (2, 1)])
def test_updates_skipped_in_a_row_are_counted_in_their_order(batch, spoilt, in_a_row):
    advantages = batch.thinking_advantages.copy()
    advantages[spoilt] = np.nan
    broken = dataclasses.replace(batch, thinking_advantages=advantages)
    after, _ = updates(minibatches=2)(state_of(), broken)
    assert (int(after.skipped), int(after.skipped_in_a_row)) == (1, in_a_row)


def counting_scores(monkeypatch):
    """Rows that scoring passes ran over, in order."""
    rows = []

    def score(policy, batch, *arguments, **how):
        rows.append(batch.trunk.shape[0])
        return score_batch(policy, batch, *arguments, **how)

    monkeypatch.setattr(updates_module, "score_batch", score)
    return rows


@pytest.mark.parametrize(
    ("old_logprobs", "passes"),
    [pytest.param("scored", 2, marks=pytest.mark.slow), ("learner", 1), ("sampler", 0)],
)
def test_old_log_probabilities_take_as_many_passes_as_they_need(
    batch, monkeypatch, old_logprobs, passes
):
    assert num_scored(old_logprobs, 2) == passes and num_scored(old_logprobs, 1) == 0
    rows = counting_scores(monkeypatch)
    loss = LossConfig(entropy_coef=0.0, importance_cap=5.0)
    both = [dataclasses.replace(loss, old_logprobs=which) for which in ("scored", old_logprobs)]
    small = optax.sgd(0.001)
    states = []
    for loss in both:
        rows.clear()
        update = updates(dataclasses.replace(SPEC, loss=loss), small, small, minibatches=2)
        states.append(update(state_of(policy_tx=small, head_tx=small), batch)[0])
    assert rows == [ROWS // 2] * passes
    # The batch was sampled by this policy: all three are the same update but for rounding.
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=3e-7),
        states[0].policy,
        states[1].policy,
    )


def test_a_zero_learning_rate_leaves_every_metric_alone(batch):
    tx = policy_optimizer(OptimizerConfig(learning_rate=0.0, conditioning_learning_rate=0.0), 10)
    head_tx = value_optimizer(ValueConfig(learning_rate=0.0), OptimizerConfig(), 1)
    update = updates(policy_tx=tx, head_tx=head_tx, minibatches=2)
    # The same questions in both halves: every update of every iteration sees the same.
    half = jax.tree.map(lambda x: np.concatenate([x[: ROWS // 2]] * 2), batch)
    state, first = update(state_of(policy_tx=tx, head_tx=head_tx), half)
    for _ in range(2):
        state, again = update(state, half)
        assert jax.tree.map(float, again) == jax.tree.map(float, first)
    assert float(first["policy/ratio"]) == pytest.approx(1.0, abs=1e-6)


def test_the_second_minibatch_is_held_to_the_policy_that_sampled(batch):
    big = optax.sgd(0.3)
    loss = LossConfig(entropy_coef=0.0, clip_high=10.0, clip_low=0.9)
    spec = dataclasses.replace(SPEC, loss=loss)
    start = state_of(policy_tx=big, head_tx=big)
    _, metrics = updates(spec, big, big, minibatches=2)(start, batch)
    assert abs(float(metrics["policy/ratio"]) - 1.0) > 1e-4
    # Old scores are those of the start: the sampler's own, whatever the policy is by now.
    assert abs(float(metrics["mismatch/k1"])) < 1e-5
