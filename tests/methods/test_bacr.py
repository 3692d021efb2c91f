"""BACR: every combination of its parts, from config to advantages, and what it refuses."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import curriculum
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from bacr_jax.methods.registry import advice
from methods_world import credit_of, group_batch, load


@pytest.mark.parametrize(
    "parts",
    itertools.product([True, False], repeat=4),
    ids=lambda parts: "".join("ny"[p] for p in parts),
)
def test_all_sixteen_combinations_of_the_four_parts_give_finite_credit(tmp_path, parts):
    told, curriculum, dense, value = parts
    config = load(
        tmp_path,
        "bacr-full",
        f"conditioning.told={'embedding' if told else 'nothing'}",
        f"budget.prior={'curriculum' if curriculum else 'uniform'}",
        f"reward.dense={str(dense).lower()}",
        f"advantage.baseline={'value' if value else 'group'}",
    )
    method, batch, _, rewards, credit, _ = credit_of(config)
    assert (method.conditioned, method.uses_value) == (told, value)
    step = np.diff(batch.outcomes, axis=-1, prepend=0.0)
    expected = batch.outcomes + (0.3 if dense else 0.0) * step
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    if not value:
        np.testing.assert_allclose(credit.thinking.sum(1), 0.0, atol=1e-5)
    assert np.isfinite(credit.thinking).all() and np.isfinite(credit.answers).all()


def test_a_trace_has_one_advantage_and_each_of_its_answers_has_it_once(tmp_path):
    """A natural end before the last cuts leaves them one answer."""
    config = load(tmp_path, "bacr-paper")
    _, batch, _, _, credit, _ = credit_of(config)
    np.testing.assert_array_equal(credit.thinking, credit.thinking[..., :1] * np.ones(4))
    reached = np.minimum(batch.cuts, np.asarray(batch.thinking)[..., None])
    first = np.diff(reached, axis=-1, prepend=-1) > 0
    assert not first.all()
    np.testing.assert_array_equal(credit.answers, np.where(first, credit.thinking, 0.0))


def test_a_trace_is_not_weighed_as_a_whole_by_credit_of_segments(tmp_path):
    with pytest.raises(UserError, match="credit=to_go: loss.ratio=sequence weighs a trace"):
        load(tmp_path, "bacr-paper", "advantage.credit=to_go")


def test_budgets_come_from_the_list_of_choices(tmp_path):
    config = load(tmp_path, "bacr-full", "budget.prior=choices", "budget.choices=[8, 12]")
    method = load_method(config)
    state = curriculum.init_curriculum(4, mu0=10.0)
    budgets = method.sample_budgets(jax.random.key(0), state, jnp.arange(4))
    assert budgets.shape == (4, config.rollout.group_size)
    assert set(np.unique(budgets)) == {8, 12}
    # No curriculum: questions are asked as often as there are of each group.
    sizes = jnp.array([1, 2, 3, 4])
    np.testing.assert_allclose(method.question_weights(state, sizes), sizes / 10, rtol=1e-6)


@pytest.mark.parametrize("kind", ["batch", "same_budget"])
def test_the_mean_of_the_batch_is_a_baseline_without_value_head_and_memory(tmp_path, kind):
    own = ["advantage.normalise=none", "reward.dense=false"]
    config = load(tmp_path, "bacr-robust", f"advantage.baseline={kind}", *own)
    config = dataclasses.replace(
        config, advantage=dataclasses.replace(config.advantage, score_weighted=False)
    )
    method, batch, state, rewards, credit, _ = credit_of(config)
    assert not method.uses_value and state is None
    budgets = np.asarray(batch.budgets) if kind == "same_budget" else np.zeros_like(batch.budgets)
    flat_budgets, flat_rewards = budgets.ravel(), np.asarray(rewards)[..., 0].ravel()
    for i, advantage in enumerate(np.asarray(credit.thinking)[..., 0].ravel()):
        alike = (flat_budgets == flat_budgets[i]) & (np.arange(len(flat_budgets)) != i)
        if not alike.any():
            alike = np.arange(len(flat_budgets)) != i
        expected = flat_rewards[i] - flat_rewards[alike].mean()
        np.testing.assert_allclose(advantage, expected, atol=1e-6)


@pytest.mark.parametrize("baseline", ["value", "group", "residual_loo", "shrink"])
@pytest.mark.parametrize("normalise", ["batch_rms", "group", "none"])
def test_a_group_of_equal_outcomes_gives_finite_advantages(tmp_path, baseline, normalise):
    config = load(
        tmp_path,
        "bacr-full",
        f"advantage.baseline={baseline}",
        f"advantage.normalise={normalise}",
    )
    outcomes = np.ones((4, 4, 4))
    _, _, _, _, credit, _ = credit_of(config, outcomes=outcomes)
    assert np.isfinite(credit.thinking).all()
    assert np.abs(credit.thinking).max() <= 1.3 / 0.1


def test_the_baseline_moves_to_where_earlier_batches_wanted_it(tmp_path):
    own = ["advantage.baseline=value", "advantage.normalise=none"]
    plain = load(tmp_path, "bacr-full", *own)
    moved = load(tmp_path, "bacr-full", *own, "advantage.score_weighted=true")
    _, _, _, _, want, _ = credit_of(plain)
    method, batch, _, rewards, first, state = credit_of(moved)
    np.testing.assert_array_equal(first.thinking, want.thinking)  # nothing is known yet
    values = jnp.asarray(np.random.default_rng(1).random(batch.outcomes.shape), jnp.float32)
    second = method.advantages(state, batch, rewards, values)
    # By hand: least squares on (1, V), weighted by surprise, two of Kish's traces for "as it is".
    returns, w = np.asarray(first.returns), np.asarray(batch.surprise)
    for m in range(w.shape[-1]):
        x = np.stack([np.ones(w[..., m].size), (returns - first.thinking)[..., m].ravel()], -1)
        one, credit = w[..., m].ravel(), np.asarray(first.thinking)[..., m].ravel()
        square = np.einsum("n,ni,nj->ij", one, x, x) / len(one)
        traces = one.sum() ** 2 / np.square(one).sum()
        ridge = (1e-3 + 2 / traces) * np.trace(square) / 2 * np.eye(2)
        k = np.linalg.solve(square + ridge, x.T @ (one * credit) / len(one))
        moved = np.asarray(second.thinking)[..., m].ravel()
        np.testing.assert_allclose(moved, credit - x @ k, atol=2e-4)
    np.testing.assert_array_equal(second.answers, want.answers)
    np.testing.assert_allclose(second.baseline, second.returns - second.thinking, rtol=1e-6)


def test_a_uniform_shift_is_the_mean_of_what_the_weights_move_by(tmp_path):
    own = ["advantage.normalise=none", "advantage.score_weighted=true"]
    shaped = load(tmp_path, "bacr-full", *own)
    uniform = load(tmp_path, "bacr-full", *own, "advantage.score_uniform=true")
    _, batch, _, rewards, first, state = credit_of(shaped)
    values = jnp.asarray(np.random.default_rng(1).random(batch.outcomes.shape), jnp.float32)
    of_shape = load_method(shaped).advantages(state, batch, rewards, values)
    flat = load_method(uniform).advantages(state, batch, rewards, values)
    plain = load(tmp_path, "bacr-full", own[0])
    unmoved = load_method(plain).advantages(state, batch, rewards, values)
    moved = np.asarray(unmoved.thinking - flat.thinking)
    np.testing.assert_allclose(moved, np.broadcast_to(moved[:1, :1], moved.shape), atol=1e-6)
    np.testing.assert_allclose(
        flat.thinking.mean((0, 1)), of_shape.thinking.mean((0, 1)), atol=1e-6
    )
    assert np.ptp(np.asarray(unmoved.thinking - of_shape.thinking), axis=(0, 1)).min() > 1e-3


def test_a_constant_baseline_is_the_running_mean_of_earlier_batches(tmp_path):
    own = ["advantage.baseline=constant", "advantage.normalise=none", "reward.dense=false"]
    config = load(tmp_path, "bacr-full", *own)
    method, batch, before, rewards, first, state = credit_of(config)
    assert not method.uses_value
    # Nothing is known yet: the other questions of the batch.
    r = np.asarray(batch.outcomes)
    others = (r.sum(0) - r) / (len(r) - 1)
    expected = r - others.mean(1, keepdims=True)
    w = np.full(4, 0.25) if config.cuts.weights == "uniform" else np.array(config.cuts.weights)
    to_go = lambda x: np.flip(np.cumsum(np.flip(w * x, -1), -1), -1)
    np.testing.assert_allclose(first.thinking, to_go(expected), atol=1e-6)
    second = method.advantages(state, batch, rewards, None)
    np.testing.assert_allclose(second.thinking, to_go(r - r.mean((0, 1))), atol=1e-6)
    np.testing.assert_allclose(second.answers, w * (r - r.mean((0, 1))), atol=1e-6)
    other = method.update(state, batch, 0 * rewards, None)
    third = method.advantages(other, batch, rewards, None)
    mean = 0.9 * r.mean((0, 1)) / 1.9  # two batches, the older one weighted .9
    np.testing.assert_allclose(third.answers, w * (r - mean), atol=1e-6)


def test_a_constant_weighted_by_scores_is_the_weighted_mean(tmp_path):
    own = ["advantage.baseline=constant", "advantage.normalise=none", "cuts.count=1"]
    own += ["cuts.weights=own_budget", "reward.dense=false", "advantage.score_weighted=true"]
    config = load(tmp_path, "bacr-full", *own)
    method, batch, state, rewards, *_ = credit_of(config)
    update = jax.jit(lambda state: method.update(state, batch, rewards, None))
    for _ in range(200):
        state = update(state)
    credit = method.advantages(state, batch, rewards, None)
    w, r = np.asarray(batch.surprise), np.asarray(rewards)
    best = (w * r).sum() / w.sum()
    # The prior's two traces against 19 batches of effective ones: within a hundredth.
    np.testing.assert_allclose(credit.thinking, r - best, atol=0.01 * abs(r.mean() - best) + 1e-4)


RUNNING = [
    *("advantage.baseline=constant", "advantage.normalise=none", "advantage.score_weighted=true"),
    *("cuts.count=1", "cuts.weights=own_budget", "reward.dense=false"),
]


@pytest.mark.slow
def test_each_doubling_of_the_budget_has_a_number_of_its_own(tmp_path):
    """Budgets from 4 to 12: those below 8 and the others."""
    own = ["budget.prior=uniform", "advantage.score_by_budget=true", "rollout.questions=16"]
    config = load(tmp_path, "bacr-full", *RUNNING, *own)
    method, batch, state, rewards, first, _ = credit_of(config)
    r, w, small = (np.asarray(x) for x in (rewards, batch.surprise, batch.budgets < 8))
    assert 0 < small.sum() < small.size
    others = (r.sum((0, 1, 2)) - r.sum((1, 2))) / (r.size - r[0].size)
    np.testing.assert_allclose(first.answers, r - others[:, None, None], atol=1e-6)
    update = jax.jit(lambda state: method.update(state, batch, rewards, None))
    for _ in range(200):
        state = update(state)
    credit = method.advantages(state, batch, rewards, None)
    for inside in (small, ~small):
        mean = r[inside].mean()
        np.testing.assert_allclose(credit.answers[inside], r[inside] - mean, atol=1e-5)
        best = (w * r)[inside].sum() / w[inside].sum()
        off = 0.02 * abs(mean - best) + 1e-4
        np.testing.assert_allclose(credit.thinking[inside], r[inside] - best, atol=off)


def test_a_doubled_budget_begins_the_next_number(tmp_path):
    choices = ["budget.prior=choices", "budget.choices=[41,82,164]", "budget.max=164"]
    keys = ["advantage.score_by_budget=true", "budget.min=41", "rollout.questions=1"]
    keys += ["rollout.group_size=3"]
    config = load(tmp_path, "bacr-full", *RUNNING, *choices, *keys)
    method, ones = load_method(config), np.ones((1, 3, 1), np.float32)
    batch = dataclasses.replace(
        group_batch(config, outcomes=ones), budgets=jnp.array([[41, 82, 164]])
    )
    state = method.update(method.init_state(1), batch, jnp.asarray(ones), None)
    np.testing.assert_allclose(state["reward_seen"], [0.1 / 3, 0.2 / 3], rtol=1e-5)


def test_budgets_within_a_factor_of_two_share_their_numbers(tmp_path):
    choices = ["budget.prior=choices", "budget.choices=[6,12]"]
    found = []
    for key in ("false", "true"):
        config = load(tmp_path, "bacr-full", *RUNNING, *choices, f"advantage.score_by_budget={key}")
        *_, credit, state = credit_of(config)
        found.append(jax.tree.leaves((credit, state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(("offset", "baseline"), [(0.4, 1.0), (-1.4, 0.0), (0.04, 0.94)])
def test_a_running_number_stays_within_what_can_be_returned(tmp_path, offset, baseline):
    method, batch, state, rewards, *_ = credit_of(load(tmp_path, "bacr-full", *RUNNING))
    # Weights of 1 on the offset alone; one part in two thousand is the ridge's.
    state |= {
        "reward_mean": jnp.array([0.9]), "reward_seen": jnp.array(1.0),
        "optimal_square": jnp.array([[[1.0, 0.0], [0.0, 0.0]]]),
        "optimal_product": jnp.array([[offset, 0.0]]), "optimal_spread": jnp.array([1e-9]),
    }  # fmt: skip
    credit = method.advantages(state, batch, rewards, None)
    np.testing.assert_allclose(rewards - credit.thinking, np.full((4, 4, 1), baseline), atol=1e-3)
    np.testing.assert_allclose(rewards - credit.answers, np.full((4, 4, 1), 0.9), atol=1e-6)


def test_a_sampler_that_differs_is_to_be_bounded(tmp_path):
    load_with = lambda *own: advice(load(tmp_path, "bacr-robust", "train.minibatches=1", *own))
    assert load_with() == []
    (line,) = load_with("train.minibatches=2")
    assert "train.minibatches=2 sampler and learner differ" in line
    assert line.endswith("write loss.importance_cap=2")
    (line,) = load_with("model.compute_dtype=bfloat16")
    assert "model.compute_dtype=bfloat16 sampler" in line
    assert load_with("train.minibatches=2", "loss.importance_cap=2") == []
    assert load_with("train.minibatches=2", "advantage.score_weighted=false") == []


def test_the_optimal_token_baseline_differs_from_token_to_token(tmp_path):
    own = ["advantage.baseline=optimal_token", "advantage.normalise=none", "cuts.count=1"]
    own += ["cuts.weights=own_budget", "reward.dense=false"]
    config = load(tmp_path, "bacr-full", *own)
    method, batch, *_ = credit_of(load(tmp_path, "bacr-full", *own[1:]))
    method = load_method(config)
    assert method.needs_path and not method.uses_value
    rng, width = np.random.default_rng(5), config.budget.max
    there = np.arange(width) < np.asarray(batch.thinking)[..., None]
    path = np.where(there, np.cumsum(rng.random(there.shape), -1), 0.0).astype(np.float32)
    batch = dataclasses.replace(batch, path=jnp.asarray(path))
    credit = method.advantages(None, batch, batch.outcomes, None)
    r = np.asarray(batch.outcomes)
    for t in (0, 3, int(batch.thinking.max()) - 1):
        base = (path[..., t] * r[..., 0]).sum(1) / path[..., t].sum(1).clip(1e-12)
        want = np.where(there[..., t], r[..., 0] - base[:, None], 0.0)
        got = np.where(there[..., t], credit.tokens[..., t], 0.0)
        np.testing.assert_allclose(got, want, atol=1e-6)
    # An answer is compared by the whole path before it.
    whole = path.max(-1)
    base = (whole * r[..., 0]).sum(1) / whole.sum(1)
    np.testing.assert_allclose(credit.answers[..., 0], r[..., 0] - base[:, None], atol=1e-6)


class TestSteepWeights:
    @pytest.mark.parametrize(
        ("override", "says"),
        [
            ("cuts.weights=final_heavy", "at most 0.166,"),
            ("cuts.weights=own_budget", "reward.coefficient"),
            ("cuts.weights=[.1, .1, .1, .7]", r"\.12, \.12, \.16, \.6"),
        ],
    )
    def test_that_punish_a_right_answer_are_refused(self, tmp_path, override, says):
        with pytest.raises(UserError, match=says):
            load(tmp_path, "bacr-full", override)

    @pytest.mark.parametrize(
        "overrides",
        [
            ["cuts.weights=final_heavy", "reward.coefficient=0.166"],
            ["cuts.weights=final_heavy", "reward.dense=false"],
            ["cuts.weights=own_budget", "cuts.count=1"],
        ],
    )
    def test_and_their_repairs_are_not(self, tmp_path, overrides):
        load_method(load(tmp_path, "bacr-full", *overrides))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["advantage.score_weighted=true", "advantage.credit=segment"], "to_go"),
        (["rollout.group_size=1"], "advantage.baseline=shrink compares the rollouts"),
        (["advantage.score_weighted=true", "advantage.normalise=group"], "normalise=batch_rms"),
        (["advantage.score_uniform=true"], "without advantage.score_weighted"),
        (["advantage.score_by_budget=true"], "without advantage.score_weighted"),
        (["advantage.baseline=optimal_token", "advantage.score_weighted=true"], "weighted=false"),
        (["advantage.baseline=optimal_token", "advantage.credit=segment"], "write to_go"),
    ],
)
def test_combinations_that_mislead_are_refused(tmp_path, overrides, says):
    with pytest.raises(UserError, match=says):
        load(tmp_path, "bacr-full", *overrides)
