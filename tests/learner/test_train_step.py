"""The update: forced tokens, ratios, splits, donation and broken batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import LossConfig, OptimizerConfig, ValueConfig
from bacr_jax.learner import train_step as learning
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.objective import LearnerSpec, denominators, objective, score_tokens
from bacr_jax.learner.optimizer import policy_optimizer, schedule, value_optimizer
from bacr_jax.model import value
from bacr_jax.rollout import generate, sampling_params
from rollout_world import World, make_prompts, make_rules

WORLD, RULES = World(), make_rules()
SPEC = LearnerSpec(
    WORLD.shape, WORLD.conditioning, LossConfig(), ValueConfig(hidden_size=8), b_max=12
)
HEAD = value.init(
    jax.random.key(4),
    num_features=value.num_features(16, conditioned=True, cut_input=True),
    hidden_size=8,
)
TX = policy_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0), 10)
HEAD_TX = value_optimizer(ValueConfig())


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
    batch = make_batch(
        prompts,
        rollout.trunks,
        rollout.branches,
        cuts=cuts,
        thinking_advantages=rng.normal(size=(8, 12)).astype(np.float32),
        answer_advantages=rng.normal(size=(8, 4)).astype(np.float32),
        returns=rng.random((8, 4)).astype(np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


def gradients(batch, spec=SPEC, params=WORLD.params, old=None):
    totals = denominators(batch, spec=spec)
    loss = lambda p, h: objective(p, h, batch, RULES.allowed_tokens, old, None, totals, spec=spec)[
        0
    ]
    return jax.grad(loss, (0, 1))(params, HEAD)


def state_of():
    copy = lambda tree: jax.tree.map(jnp.copy, tree)
    return learning.init_state(copy(WORLD.params), copy(HEAD), TX, HEAD_TX)


def step(batch, state=None, **changes):
    how = {"spec": SPEC, "policy_tx": TX, "head_tx": HEAD_TX} | changes
    return learning.train_step(state or state_of(), batch, RULES.allowed_tokens, None, None, **how)


def close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), a, b)


def test_the_learner_reproduces_the_samplers_logprobs(rolled):
    scores = score_tokens(WORLD.params, rolled, RULES.allowed_tokens, spec=SPEC)
    for ours, theirs, mask in (
        (scores.thinking, rolled.thinking_logprobs, rolled.thinking_mask),
        (scores.answers, rolled.answer_logprobs, rolled.answer_mask),
    ):
        assert mask.any()
        np.testing.assert_allclose(np.where(mask, ours, 0), np.where(mask, theirs, 0), atol=1e-5)


def test_masks_follow_lengths_and_leave_reused_answers_out(rolled):
    np.testing.assert_array_equal(rolled.thinking_mask.sum(1), rolled.sampled)
    np.testing.assert_array_equal(rolled.answer_mask.sum(2), rolled.answered)
    assert (rolled.answered == 0).any()  # row 3 has budget 1: four cuts, one answer


def test_what_stands_outside_the_masks_does_not_matter(rolled):
    """Padding, reused answers and advantages past the end may hold anything."""
    want = gradients(rolled)
    b, s = rolled.trunk.shape
    past = jnp.arange(s) >= (rolled.prompt_lengths + rolled.sampled)[:, None]
    unused = (rolled.answered == 0)[..., None]
    poisoned = dataclasses.replace(
        rolled,
        trunk=jnp.where(past, 9, rolled.trunk),
        branches=jnp.where(unused, 9, rolled.branches),
        thinking_advantages=jnp.where(rolled.thinking_mask, rolled.thinking_advantages, 1e3),
        answer_advantages=jnp.where(unused[..., 0], 1e3, rolled.answer_advantages),
    )
    close(gradients(poisoned), want, 1e-6)


def test_forced_tokens_are_never_targets(rolled):
    """Every branch holds a forced `<answer>`. Scored as if it could not be sampled, it would show
    up as an impossible target; only those that the policy itself sampled may.
    """
    answer_opening, sampled = 3, 0
    for i in range(8):
        n, m = int(rolled.prompt_lengths[i]), int(rolled.sampled[i])
        sampled += int((rolled.trunk[i, n : n + m] == answer_opening).sum())
        for j in range(4):
            k, a = int(rolled.forced[i, j]), int(rolled.answered[i, j])
            assert int(rolled.branches[i, j, k - 1]) == answer_opening
            sampled += int((rolled.branches[i, j, k : k + a] == answer_opening).sum())
    allowed = RULES.allowed_tokens.at[answer_opening].set(False)
    scores = score_tokens(WORLD.params, rolled, allowed, spec=SPEC)
    impossible = sum(
        int((np.asarray(logprobs)[np.asarray(mask)] < -1e20).sum())
        for logprobs, mask in (
            (scores.thinking, rolled.thinking_mask),
            (scores.answers, rolled.answer_mask),
        )
    )
    assert impossible == sampled


def test_the_ratio_is_exactly_one_on_the_first_update(rolled):
    _, metrics = step(rolled)
    assert float(metrics["policy/ratio"]) == 1.0
    assert float(metrics["policy/clipped_share"]) == 0.0


def test_recomputed_old_scores_give_the_on_policy_gradient(rolled):
    old = learning.score_batch(WORLD.params, rolled, RULES.allowed_tokens, spec=SPEC)
    close(gradients(rolled, old=old), gradients(rolled), 1e-6)


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("mode", ["constant", "token_mean", "seq_mean_token_mean"])
def test_a_split_into_micro_batches_changes_nothing(rolled, parts, mode):
    spec = dataclasses.replace(SPEC, loss=LossConfig(aggregate=mode))
    whole, one = step(rolled, spec=spec)
    split, many = step(rolled, spec=spec, micro_batches=parts)
    np.testing.assert_allclose(one["policy/grad_norm"], many["policy/grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(one["loss/total"], many["loss/total"], rtol=1e-5)
    close(split.policy, whole.policy, 2e-4)  # Adam's first step has size lr whatever the gradient


def test_gradient_of_a_tree_equals_that_of_separate_sequences(rolled):
    """Each branch as a row of its own, and the trunk as another, with sampled tokens alone as
    targets: the same policy gradient, so forced tokens contribute none.
    """
    want = gradients(rolled)[0]
    rows = []
    for i in range(8):
        n, m = int(rolled.prompt_lengths[i]), int(rolled.sampled[i])
        span = [(n + t, float(rolled.thinking_advantages[i, t])) for t in range(m)]
        rows.append((i, np.asarray(rolled.trunk[i, : n + m]), span))
        for j in range(4):
            c, k, a = (int(x[i, j]) for x in (rolled.context, rolled.forced, rolled.answered))
            text = np.concatenate([rolled.trunk[i, :c], rolled.branches[i, j, : k + a]])
            advantage = float(rolled.answer_advantages[i, j])
            rows.append((i, text, [(c + k + t, advantage) for t in range(a)]))

    from bacr_jax.model import budget, qwen2

    total = 8 * 12

    def loss(params):
        result = 0.0
        for i, text, span in rows:
            phi = budget.embed(
                params["budget"],
                rolled.budgets[i : i + 1],
                conditioning=WORLD.conditioning,
                b_max=12,
            )
            hidden = qwen2.forward(
                params,
                jnp.asarray(text)[None],
                config=WORLD.shape,
                budget_embedding=phi,
                conditioning=WORLD.conditioning,
            )
            logits = jnp.where(RULES.allowed_tokens, qwen2.logits(params, hidden)[0], -1e30)
            logp = jax.nn.log_softmax(logits)
            for at, advantage in span:
                result -= advantage * logp[at - 1, text[at]] / total
                p = jnp.exp(logp[at - 1])
                entropy = -jnp.sum(jnp.where(p > 0, p * logp[at - 1], 0.0))
                result -= SPEC.loss.entropy_coef * entropy / total
        return result

    close(jax.jit(jax.grad(loss))(WORLD.params), want, 1e-5)


def test_the_value_loss_does_not_steer_the_policy_unless_asked(rolled):
    quiet = dataclasses.replace(SPEC, loss=LossConfig(value_coef=0.0))
    close(gradients(rolled)[0], gradients(rolled, quiet)[0], 1e-7)
    joint = dataclasses.replace(SPEC, value=ValueConfig(hidden_size=8, stop_gradient=False))
    params = {**WORLD.params}
    head = jax.tree.map(lambda x: x + 0.1, HEAD)  # a zero last layer passes nothing back
    totals = denominators(rolled, spec=joint)
    grad = jax.grad(
        lambda p, coef: objective(
            p,
            head,
            rolled,
            RULES.allowed_tokens,
            None,
            None,
            totals,
            spec=dataclasses.replace(joint, loss=LossConfig(value_coef=coef)),
        )[0]
    )
    gap = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), grad(params, 0.5), grad(params, 0.0))
    assert max(float(x) for x in jax.tree.leaves(gap)) > 1e-5


def test_a_zero_learning_rate_leaves_every_parameter_alone(rolled):
    tx = policy_optimizer(OptimizerConfig(learning_rate=0.0, conditioning_learning_rate=0.0), 10)
    start = learning.init_state(
        jax.tree.map(jnp.copy, WORLD.params), jax.tree.map(jnp.copy, HEAD), tx, HEAD_TX
    )
    after, _ = step(rolled, start, policy_tx=tx)
    jax.tree.map(np.testing.assert_array_equal, after.policy, WORLD.params)


def test_a_step_that_is_not_finite_is_skipped_and_counted(rolled):
    bad = dataclasses.replace(
        rolled, thinking_advantages=rolled.thinking_advantages.at[0, 0].set(jnp.nan)
    )
    after, metrics = step(bad)
    assert int(after.skipped) == 1 and int(after.updates) == 0
    assert float(metrics["policy/skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, after.policy, WORLD.params)
    again, _ = step(rolled, after)
    assert int(again.updates) == 1 and int(again.skipped) == 1


@pytest.mark.parametrize(("logprob", "skipped"), [(-jnp.inf, 0), (jnp.inf, 0), (jnp.nan, 1)])
def test_a_log_probability_that_is_no_number_spoils_no_parameter(rolled, logprob, skipped):
    scores = learning.score_batch(WORLD.params, rolled, RULES.allowed_tokens, spec=SPEC)
    first = scores.thinking.at[0, 0].set(logprob)
    negative = dataclasses.replace(
        rolled, thinking_advantages=-jnp.abs(rolled.thinking_advantages) - 1.0
    )
    after, metrics = learning.train_step(
        state_of(),
        negative,
        RULES.allowed_tokens,
        dataclasses.replace(scores, thinking=first),
        None,
        spec=SPEC,
        policy_tx=TX,
        head_tx=HEAD_TX,
    )
    # Ratios are bounded before they are taken from their logarithm.
    assert int(after.skipped) == skipped
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(after.policy))


def test_state_buffers_are_donated(rolled):
    lowered = learning.train_step.lower(
        state_of(),
        rolled,
        RULES.allowed_tokens,
        None,
        None,
        spec=SPEC,
        policy_tx=TX,
        head_tx=HEAD_TX,
    )
    held = sum(x.nbytes for x in jax.tree.leaves(state_of()))
    assert lowered.compile().memory_analysis().alias_size_in_bytes >= 0.95 * held


def test_extra_steps_fit_the_value_head(rolled):
    features = jax.random.normal(jax.random.key(0), (8, 4, HEAD["hidden"]["kernel"].shape[0]))
    error = lambda head: float(((value.values(head, features) - rolled.returns) ** 2).mean())
    head, _ = learning.fit_value(
        HEAD, HEAD_TX.init(HEAD), features, rolled.returns, head_tx=HEAD_TX, num_steps=200
    )
    assert error(head) < 0.2 * error(HEAD)


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
