"""Updates of a whole iteration, however they are split; the objective written out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bacr_jax.config import LossConfig, OptimizerConfig, TrainConfig, ValueConfig
from bacr_jax.learner import train_step as learning
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.objective import LearnerSpec, denominators, objective
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.updates import Updates
from bacr_jax.model import value
from bacr_jax.rollout import generate, sampling_params
from rollout_world import World, make_prompts, make_rules

WORLD, RULES = World(), make_rules()
SPEC = LearnerSpec(
    WORLD.shape,
    WORLD.conditioning,
    LossConfig(entropy_coef=0.0),
    ValueConfig(hidden_size=8),
    b_max=12,
    remat=False,
)
HEAD = value.init(
    jax.random.key(4),
    num_features=value.num_features(16, conditioned=True, cut_input=True),
    hidden_size=8,
)
# The difference of the parameters is then the gradient itself.
SGD = optax.sgd(1.0)


@pytest.fixture(scope="module")
def rolled():
    prompts = make_prompts([3, 5, 2, 4, 1, 5, 3, 2], 5)
    budgets = np.array([12, 4, 7, 1, 12, 9, 2, 5])
    cuts = np.ceil(budgets[:, None] * np.arange(1, 5) / 4).astype(int)
    rollout = generate(
        WORLD.decode,
        prompts,
        budgets,
        cuts,
        jax.random.key(5),
        spec=WORLD.spec(8),
        rules=RULES,
        sampling=sampling_params(1.0),
        phi_of=WORLD.phi_of,
    )
    rng = np.random.default_rng(0)
    return make_batch(
        prompts,
        rollout.trunks,
        rollout.branches,
        cuts=cuts,
        thinking_advantages=rng.normal(size=(8, 12)).astype(np.float32),
        answer_advantages=rng.normal(size=(8, 4)).astype(np.float32),
        returns=rng.random((8, 4)).astype(np.float32),
    )


def state_of(head=HEAD, policy_tx=SGD, head_tx=SGD):
    copy = lambda tree: jax.tree.map(jnp.array, tree)
    return learning.init_state(copy(WORLD.params), copy(head), policy_tx, head_tx)


def updates(spec=SPEC, policy_tx=SGD, head_tx=SGD, **config):
    settings = TrainConfig(**{"minibatches": 1} | config)
    return Updates(spec, settings, policy_tx, head_tx, RULES.allowed_tokens)


def gradient(batch, spec=SPEC, head=HEAD, **config):
    after, metrics = updates(spec, **config)(state_of(head), batch)
    start = (WORLD.params, head)
    return jax.tree.map(lambda x, y: x - y, start, (after.policy, after.head)), metrics


def same(one, other, relative):
    """Within so much of the gradient's norm."""
    norm = float(optax.global_norm(other))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=relative * norm, rtol=0), one, other
    )


@pytest.fixture(scope="module")
def whole(rolled):
    return gradient(rolled)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param({"micro_batch_rows": 1}, marks=pytest.mark.slow),
        {"micro_batch_tokens": 60, "length_buckets": 2},
    ],
    ids=["rows", "tokens"],
)
def test_a_split_gives_the_gradient_of_the_whole(rolled, whole, split):
    found, metrics = gradient(rolled, **split)
    same(found, whole[0], 1e-6)
    for name, value_ in whole[1].items():
        np.testing.assert_allclose(metrics[name], value_, rtol=1e-5, atol=1e-6, err_msg=name)


def test_rows_without_advantage_can_be_left_out(rolled):
    some = np.array([1, 0, 0, 1, 1, 0, 1, 0], np.float32)[:, None]
    batch = dataclasses.replace(
        rolled,
        thinking_advantages=rolled.thinking_advantages * some,
        answer_advantages=rolled.answer_advantages * some,
    )
    spec = dataclasses.replace(SPEC, value=None)
    by_tokens = {"micro_batch_tokens": 60, "length_buckets": 1}
    all_rows, _ = gradient(batch, spec, None, **by_tokens)
    kept, metrics = gradient(batch, spec, None, **by_tokens, drop_zero_advantage=True)
    same(kept, all_rows, 1e-6)
    np.testing.assert_allclose(metrics["policy/ratio"], 1.0, rtol=1e-6)
    nothing = dataclasses.replace(
        batch,
        thinking_advantages=0 * batch.thinking_advantages,
        answer_advantages=0 * batch.answer_advantages,
    )
    none, _ = gradient(nothing, spec, None, **by_tokens, drop_zero_advantage=True)
    assert float(optax.global_norm(none)) == 0.0


@pytest.mark.slow
def test_a_zero_learning_rate_leaves_every_metric_alone(rolled):
    tx = policy_optimizer(OptimizerConfig(learning_rate=0.0, conditioning_learning_rate=0.0), 10)
    head_tx = value_optimizer(ValueConfig(learning_rate=0.0))
    update = updates(policy_tx=tx, head_tx=head_tx, minibatches=2)
    # The same questions in both halves: every update of every iteration sees the same.
    half = jax.tree.map(lambda x: np.concatenate([np.asarray(x)[:4]] * 2), rolled)
    state, first = update(state_of(HEAD, tx, head_tx), half)
    for _ in range(2):
        state, again = update(state, half)
        assert jax.tree.map(float, again) == jax.tree.map(float, first)
    assert float(first["policy/ratio"]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
def test_the_second_minibatch_is_held_to_the_policy_that_sampled(rolled):
    step = optax.sgd(0.3)
    spec = dataclasses.replace(
        SPEC, loss=LossConfig(entropy_coef=0.0, clip_high=10.0, clip_low=0.9)
    )
    start = learning.init_state(
        jax.tree.map(jnp.array, WORLD.params), jax.tree.map(jnp.array, HEAD), step, step
    )
    _, metrics = updates(spec, step, step, minibatches=2)(start, rolled)
    assert abs(float(metrics["policy/ratio"]) - 1.0) > 1e-4
    # Old scores are those of the start: the sampler's own, whatever the policy is by now.
    assert abs(float(metrics["mismatch/k1"])) < 1e-5


def numpy_loss(new, old, ref, sampled, advantages, mask, totals, loss):
    """Eq. 15 and 16 token by token, in float64."""
    total = 0.0
    for row in range(mask.shape[0]):
        for t in np.flatnonzero(mask[row]):
            rho, a = np.exp(new[row, t] - old[row, t]), advantages[row, t]
            clipped = min(max(rho, 1 - loss.clip_low), 1 + loss.clip_high)
            token = max(-a * rho, -a * clipped)
            if loss.importance_cap is not None:
                token *= min(np.exp(old[row, t] - sampled[row, t]), loss.importance_cap)
            d = new[row, t] - ref[row, t]
            kl = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) + d - 1}[loss.kl_kind]
            total += token + loss.kl_coef * kl
    return total / totals


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_objective_written_out(rolled, kind):
    loss = LossConfig(entropy_coef=0.0, kl_coef=0.7, kl_kind=kind, importance_cap=1.1, clip_low=0.1)
    spec = dataclasses.replace(SPEC, loss=loss, value=None)
    scores = learning.score_batch(WORLD.params, rolled, RULES.allowed_tokens, spec=SPEC)
    rng = np.random.default_rng(1)
    shift = lambda s, scale: dataclasses.replace(
        scores,
        thinking=scores.thinking + scale * rng.normal(size=scores.thinking.shape),
        answers=scores.answers + scale * rng.normal(size=scores.answers.shape),
    )
    old, ref = shift(scores, 0.2), shift(scores, 0.5)
    joined = lambda s: np.concatenate(
        [np.asarray(s.thinking), np.asarray(s.answers).reshape(8, -1)], 1
    ).astype(np.float64)
    sampled = np.concatenate([rolled.thinking_logprobs, rolled.answer_logprobs.reshape(8, -1)], 1)
    mask = np.concatenate([rolled.thinking_mask, rolled.answer_mask.reshape(8, -1)], 1)
    answers = np.repeat(np.asarray(rolled.answer_advantages), rolled.answer_logprobs.shape[2], 1)
    advantages = np.concatenate([rolled.thinking_advantages, answers], 1)
    totals = denominators(rolled, spec=spec)
    evaluate = jax.jit(objective, static_argnames=("spec",))
    found, metrics = evaluate(
        WORLD.params, None, rolled, RULES.allowed_tokens, old, ref, totals, spec=spec
    )
    want = numpy_loss(
        joined(scores), joined(old), joined(ref), sampled, advantages, mask, 8 * 12, loss
    )
    assert float(found) == pytest.approx(want, abs=1e-6)
    weights = np.minimum(np.exp(joined(old) - sampled), 1.1)[mask]
    assert float(metrics["mismatch/weight"]) == pytest.approx(weights.mean(), abs=1e-5)
