"""Tests training with a grace window, in which tokens after the budget are also learned from."""

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from bacr_jax.questions.ledger import ledger_tokenizer
from bacr_jax.rewards import distinct_cuts, with_grace
from bacr_jax.rollout import Rollout, RolloutRequest
from bacr_jax.rollout.rollouts import RolloutLoop
from bacr_jax.rollout.rows import check_request
from bacr_jax.rollout.served import RemoteSampling
from bacr_jax.training import stages
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.types import Branches, Trunks
from methods_world import Odd, group_batch, load, run_of


def test_the_last_segment_goes_on_to_the_end_of_the_grace_window(tmp_path):
    config = load(tmp_path, "bacr-full", "budget.prior=fixed", "advantage.baseline=group")
    method, batch = load_method(resolve(config).method), group_batch(config)
    later = dataclasses.replace(batch, cuts=with_grace(batch.cuts, batch.budgets, 3))
    rows, cuts = batch.cuts.shape[0] * batch.cuts.shape[1], batch.cuts.shape[2]
    source = jnp.broadcast_to(jnp.arange(cuts, dtype=jnp.int32), (rows, cuts))

    def of_tokens(batch):
        found, _ = stages.token_advantages(
            method.init_state(64), batch, None, source, method=method, max_thinking=15
        )
        return np.asarray(found.thinking)

    plain, graced = of_tokens(batch), of_tokens(later)
    for row, b in enumerate(np.asarray(batch.budgets).reshape(-1)):
        np.testing.assert_array_equal(graced[row, :b], plain[row, :b])
        np.testing.assert_array_equal(graced[row, b : b + 3], np.repeat(plain[row, b - 1], 3))
        assert (plain[row, b:] == 0).all() and (graced[row, b + 3 :] == 0).all()
    assert (graced != plain).any()


def observed(config, plan, thinking, outcomes, tag=0):
    """What a method sees of one question's traces of so many tokens, each with probability .5.

    `tag`: tokens of their closing tag.
    """
    tokenizer = ledger_tokenizer()
    run, _ = run_of(config, (tokenizer, len(tokenizer)), Odd())
    rollout = rollout_of(plan, thinking, tag)
    return run.method, learned_batch(run, plan, rollout, outcomes)


def rollout_of(plan, thinking, tag=0):
    """The traces of one question, each token of which has probability .5."""
    rows, most = len(thinking), max(thinking) + tag
    trunks = Trunks(
        tokens=np.zeros((rows, most + 2), int),
        prompt_lengths=np.ones(rows, int),
        sampled=np.array(thinking) + tag,
        thinking=np.array(thinking),
        close=np.array(thinking) < np.asarray(plan.budgets)[0],
        budgets=np.asarray(plan.budgets)[0],
        logprobs=np.full((rows, most + 1), np.log(0.5), np.float32),
    )
    branches = Branches(*4 * [np.ones((rows, plan.cuts.shape[-1]), int)], *3 * [None])
    return Rollout(trunks, branches, {})


def learned_batch(run, plan, rollout, outcomes):
    outcomes = np.array(outcomes, np.float32)[None, ..., None]
    placed = stages.resolve_cuts(run, plan, rollout)
    batch = stages.make_group_batch(run, None, placed, rollout, outcomes, {}, 0.0)
    return jax.tree.map(jnp.asarray, batch)


def plan_of(budgets, cuts):
    one = {"questions": jnp.zeros(1, int), "groups": jnp.zeros(1, int)}
    return BatchPlan(**one, budgets=jnp.array([budgets]), cuts=jnp.array([cuts]))


def test_the_scores_of_the_grace_window_count_in_the_last_segment(tmp_path):
    config = config_io.override(load(tmp_path, "bacr-weighted"), ["budget.grace=3"])
    # Each token contributes (1 - .5)^2 = .25. Three of the seven tokens are after the budget.
    _, batch = observed(config, plan_of([4, 4], [[4], [4]]), [7, 2], [[1], [1]])
    np.testing.assert_allclose(batch.score_norm_proxy, [[[7 / 4], [2 / 4]]], rtol=1e-6)


def test_a_cut_within_the_closing_tag_has_all_of_it_in_its_segment(tmp_path):
    """Its answer has read the tag whole; one at its beginning would be forced the same tag."""
    config = config_io.override(load(tmp_path, "bacr-full"), ["cuts.count=3"])
    cuts = [[4, 12, 16], [4, 10, 16]]
    _, batch = observed(config, plan_of([16, 16], cuts), [10, 10], 2 * [[0, 1, 1]], tag=3)
    np.testing.assert_array_equal(batch.cuts, [[[4, 13, 16], [4, 10, 16]]])
    np.testing.assert_allclose(
        batch.score_norm_proxy, [[[1, 9 / 4, 0], [1, 6 / 4, 3 / 4]]], rtol=1e-6
    )


def test_the_last_exit_of_a_trace_keeps_its_grace_window(tmp_path):
    """Exits at 3 and 6 of 6 tokens; of 8 thought of they are at 4 and 8, the last one right."""
    config = config_io.override(load(tmp_path, "s_grpo", "cuts.count=2"), ["budget.grace=3"])
    method, batch = observed(config, plan_of([6, 6], [[3, 6], [3, 6]]), [8, 6], [[0, 1], [0, 0]])
    np.testing.assert_array_equal(batch.cuts, [[[4, 9], [3, 9]]])
    rewards = method.rewards(None, batch)
    np.testing.assert_array_equal(rewards, [[[0, 1], [0, 0]]])
    credit = method.advantages(None, batch, rewards, None)
    # The advantages of the exits are -1/2 and 1/2. Each is divided by the two exits, and by the
    # tokens of its response (4 + 1 and 8 + 1). The first segment belongs to both responses.
    np.testing.assert_allclose(credit.thinking[0, 0], [0.25 / 9 - 0.25 / 5, 0.25 / 9], rtol=1e-5)


def answered_cuts(run, state, plan, rollout):
    """Where the decoder answers, and where a server does, for traces of these lengths."""
    setup = run.sampler(run.params(state.train))
    rows = RolloutRequest(plan.input_budgets, np.asarray(plan.cuts)[0])
    request = check_request(stages.prompts_of(run, plan), rows, jax.random.key(0), setup)
    thinking = rollout.trunks.thinking
    loop = SimpleNamespace(
        engine=SimpleNamespace(spec=setup.spec, trunks=lambda slots: rollout.trunks),
        scheduler=SimpleNamespace(slot_row=np.arange(len(thinking))),
        rows=request,
        _answer_cuts=lambda slots, cuts: cuts,
    )
    decoded = inspect.unwrap(RolloutLoop.answer)(loop, np.arange(len(thinking)))
    remote = SimpleNamespace(answers=1, cuts_relative_to_length=setup.spec.cuts_relative_to_length)
    served = []
    for cuts, limit, length in zip(request.cuts.tolist(), request.limits, thinking):
        asked = SimpleNamespace(cuts=cuts, limit=limit)
        served.append(inspect.unwrap(RemoteSampling._ends)(remote, asked, int(length)))
    return decoded, np.array(served)


@pytest.mark.parametrize("grace", [0, 3, 16])
@pytest.mark.parametrize("name", ["s_grpo", "bacr-full"])
def test_the_learner_has_the_cuts_that_were_answered(tmp_path, name, grace):
    config = load(tmp_path, name, "cuts.count=4", "budget.min=8", "budget.max=100")
    config = config_io.override(config, [f"budget.grace={grace}"])
    tokenizer = ledger_tokenizer()
    run, state = run_of(config, (tokenizer, len(tokenizer)), Odd())
    rng = np.random.default_rng(grace)
    for tag in range(3):
        budgets = rng.integers(8, 101, 60)
        thinking = rng.integers(0, budgets + grace + 1)
        thinking[:20] = budgets[:20] + rng.integers(0, grace + 1, 20)
        cuts = run.method.cuts(jax.random.key(tag), jnp.asarray(budgets, jnp.int32)[None])
        plan = plan_of(budgets, cuts[0])
        rollout = rollout_of(plan, thinking, tag)
        batch = learned_batch(run, plan, rollout, np.zeros(cuts[0].shape))
        decoded, served = answered_cuts(run, state, plan, rollout)
        at = np.minimum(batch.cuts[0], thinking[:, None])
        np.testing.assert_array_equal(at, np.minimum(decoded, thinking[:, None]))
        np.testing.assert_array_equal(at, served)
        source = distinct_cuts(np.asarray(batch.cuts[0]), thinking)
        np.testing.assert_array_equal(source, distinct_cuts(decoded, thinking))


def test_a_right_answer_at_the_end_of_the_grace_window_is_rewarded(tmp_path):
    """Of the exits of a trace with 12 tokens more than its budget the last alone is right."""
    config = config_io.override(load(tmp_path, "s_grpo", "budget.max=100"), ["budget.grace=16"])
    plan = plan_of([100], [[20, 40, 60, 80, 90, 94, 97, 100]])
    method, batch = observed(config, plan, [112], [[0] * 7 + [1]])
    np.testing.assert_array_equal(batch.cuts, [[[23, 45, 68, 90, 101, 106, 109, 116]]])
    rewards = method.rewards(None, batch)
    np.testing.assert_array_equal(rewards, [[[0] * 7 + [1]]])
    assert method.advantages(None, batch, rewards, None).answers[0, 0, -1] > 0


def test_a_token_of_the_grace_window_is_paid_under_the_optimal_token_baseline(tmp_path):
    config = load(
        tmp_path, "bacr-full", "advantage.baseline=optimal_token", "advantage.normalise=none",
        "advantage.score_weighted=false", "cuts.count=1", "cuts.weights=last",
        "rollout.questions=1", "rollout.group_size=2",
    )  # fmt: skip
    method, batch = (
        load_method(resolve(config).method),
        group_batch(config, outcomes=np.array([[[1.0], [0.0]]])),
    )
    # Two traces of six tokens with the same score norms, longer than a budget of four.
    path = jnp.broadcast_to(jnp.arange(1.0, 7.0), (1, 2, 6))
    batch = dataclasses.replace(batch, cumulative_score_norm=path, cuts=jnp.full((1, 2, 1), 6))
    source = jnp.zeros((2, 1), jnp.int32)
    found, _ = stages.token_advantages(None, batch, None, source, method=method, max_thinking=6)
    paid = float(method.rewards(None, batch)[0, 0, 0])
    np.testing.assert_allclose(found.thinking, [[paid / 2] * 6, [-paid / 2] * 6], rtol=1e-5)


@pytest.mark.slow
def test_a_step_with_a_grace_window(tmp_path):
    config = config_io.override(load(tmp_path, "grpo"), ["budget.grace=3"])
    tokenizer = ledger_tokenizer()
    run, state = run_of(config, (tokenizer, len(tokenizer)), Odd())
    # The ledger task has no line breaks, so use two of its digits as line breaks.
    rules = run.task_data.rules
    breaks = jnp.zeros_like(rules.line_breaks).at[jnp.array([8, 9])].set(True)
    rules = dataclasses.replace(rules, line_breaks=breaks)
    run = dataclasses.replace(run, task_data=dataclasses.replace(run.task_data, rules=rules))
    _, iteration = iterate(run, state, 0)
    trunks = iteration.chosen.rollout.trunks
    excess = np.maximum(np.asarray(trunks.thinking) - np.asarray(trunks.budgets), 0)
    assert 0 < excess.max() <= 3
    assert iteration.metrics["rollout/excess_mean"] == excess.mean()
    assert iteration.metrics["rollout/forced_tokens_mean"] >= 1
    assert all(np.isfinite(value) for value in iteration.metrics.values())
