"""The objective: what counts as a target, ratios, trees and sequences, and Eq. 15-16 by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import LossConfig, ValueConfig
from bacr_jax.learner.batch import filled_rows, make_batch
from bacr_jax.learner.objective import Minibatch, loss_normalizers, objective, value_terms
from bacr_jax.learner.train_step import gradients, score_batch
from bacr_jax.model import budget, qwen2
from enumerable_world import ALLOWED, BUDGET, draws, list_traces, rollouts
from learner_world import (
    CUTS,
    ROWS,
    RULES,
    SPEC,
    THINKING,
    VALUE_HEAD,
    WORLD,
    close,
    joined,
    make_batch_by_hand,
    state_of,
)

compiled_gradients = jax.jit(gradients, static_argnames=("spec",))
compiled_objective = jax.jit(objective, static_argnames=("spec",))


@pytest.fixture(scope="module")
def batch():
    return make_batch_by_hand()


def gradient(batch, spec=SPEC, old=None, value_head=VALUE_HEAD):
    """Gradients of the policy and of the value head."""
    grads, _ = compiled_gradients(
        state_of(value_head),
        Minibatch(batch, old),
        loss_normalizers(batch, spec=spec),
        RULES.allowed_tokens,
        spec=spec,
    )
    return grads.policy, grads.head


def test_packed_branches_give_the_same_gradient(batch):
    lengths = batch.branch_lengths
    assert lengths.tolist() == [[5, 4], [3, 5], [4, 4], [0, 5]]
    packing = np.full((ROWS, 9), -1, np.int32)
    for row, each in enumerate(lengths):
        kept = [5 * m + a for m in range(CUTS) for a in range(each[m])]
        packing[row, : len(kept)] = kept
    packed = dataclasses.replace(batch, packing=packing)
    close(gradient(packed), gradient(batch), atol=1e-6)


def test_what_stands_outside_the_masks_does_not_matter(batch):
    """Padding, reused answers and advantages past the end may hold anything."""
    past = np.arange(batch.trunk.shape[1]) >= (batch.prompt_lengths + batch.sampled)[:, None]
    unused = (batch.answered == 0)[..., None]
    poisoned = dataclasses.replace(
        batch,
        trunk=np.where(past, 9, batch.trunk),
        branches=np.where(unused, 9, batch.branches),
        thinking_advantages=np.where(batch.thinking_mask, batch.thinking_advantages, 1e3).astype(
            np.float32
        ),
        answer_advantages=np.where(unused[..., 0], 1e3, batch.answer_advantages).astype(np.float32),
    )
    close(gradient(poisoned), gradient(batch), 1e-6)


def test_one_token_does_not_dominate_the_divergence_of_sampler_and_learner(batch):
    """The estimate of a token is at most 10; exp(30) - 31 would be 1e13."""

    names = ("k1", "k3", "absolute")

    def mismatch(gap):
        logprobs = batch.thinking_logprobs.copy()
        logprobs[0, 2] -= gap
        rows = dataclasses.replace(batch, thinking_logprobs=logprobs)
        normalizers = loss_normalizers(rows, spec=SPEC)
        arguments = (WORLD.params, VALUE_HEAD, Minibatch(rows), normalizers, RULES.allowed_tokens)
        _, metrics, _ = compiled_objective(*arguments, spec=SPEC)
        return {name: float(metrics[f"mismatch/{name}"] * normalizers.count) for name in names}

    assert mismatch(30.0) == pytest.approx({"k1": -30, "k3": 10, "absolute": 30}, rel=1e-4)
    small = {"k1": -0.5, "k3": np.exp(0.5) - 1.5, "absolute": 0.5}
    assert mismatch(0.5) == pytest.approx(small, rel=1e-4)


def test_tokens_above_the_importance_cap_are_reported_as_clipped(batch):
    loss = LossConfig(old_logprobs="sampler", importance_cap=1.5, clip_high=9.0, clip_low=0.9)
    spec = dataclasses.replace(SPEC, loss=loss)
    # The sampler found two of its tokens half as probable as the learner: their ratio is 2.
    logprobs = batch.thinking_logprobs.copy()
    logprobs[0, :2] -= np.log(2.0)
    rows = dataclasses.replace(batch, thinking_logprobs=logprobs)
    normalizers = loss_normalizers(rows, spec=spec)
    arguments = (WORLD.params, VALUE_HEAD, Minibatch(rows), normalizers, RULES.allowed_tokens)
    _, metrics, _ = compiled_objective(*arguments, spec=spec)
    clipped_tokens = float(metrics["policy/clipped_share"] * normalizers.count)
    assert clipped_tokens == pytest.approx(2.0, abs=1e-4)


def test_empty_rows_have_no_part_in_the_value_loss(batch):
    """They pad micro-batches. A new head predicts 0 for them, which is also their target."""
    value_head = jax.tree.map(lambda x: x + 0.1, VALUE_HEAD)
    normalizers = loss_normalizers(batch, spec=SPEC)

    @jax.jit
    def loss(rows):
        question = jnp.ones((len(rows.cuts), 16))
        terms = (WORLD.params, value_head, question, rows, normalizers)
        return value_terms(*terms, spec=SPEC)[0]

    padded = filled_rows(batch, np.arange(ROWS), ROWS + 2)
    assert not padded.real[ROWS:].any()
    assert float(loss(padded)) == pytest.approx(float(loss(batch)), rel=1e-6)


def test_recomputed_old_scores_give_the_on_policy_gradient(batch):
    old = score_batch(WORLD.params, batch, RULES.allowed_tokens, spec=SPEC)
    close(gradient(batch, old=old), gradient(batch), 1e-6)


def test_the_papers_loss_is_one_ratio_and_one_advantage_a_trace(batch):
    """Eq. 15 written down: rho = pi(t | q, b) / pi_old(t | q, b) of all that a row sampled."""
    loss = LossConfig(
        ratio="sequence", aggregate="seq_mean_token_mean", entropy_coef=0.0, value_coef=0.0
    )
    spec = dataclasses.replace(SPEC, loss=loss)
    # The second trace is a quarter as long as the first, the last has no answer at the first cut.
    of_trace = np.array([1.0, 1.0, -0.5, 2.0], np.float32)
    batch = dataclasses.replace(
        batch,
        thinking_advantages=np.repeat(of_trace[:, None], THINKING, 1),
        answer_advantages=np.repeat(of_trace[:, None], CUTS, 1),
    )
    masks = batch.thinking_mask, batch.answer_mask
    compiled = jax.jit(score_batch, static_argnames=("spec",))

    def log_probability(params):
        scores = compiled(params, batch, RULES.allowed_tokens, spec=spec)
        parts = zip((scores.thinking, scores.answers), masks, strict=True)
        return sum(jnp.where(mask, x, 0).reshape(ROWS, -1).sum(1) for x, mask in parts)

    # The second and third leave the range where the sign does not clip them; the last is clipped.
    ratios = jnp.log(jnp.array([1.05, 0.7, 1.4, 1.4]))
    shift = ratios / jnp.array([(masks[0][i].sum() + masks[1][i].sum()) for i in range(ROWS)])
    old = compiled(WORLD.params, batch, RULES.allowed_tokens, spec=spec)
    old = dataclasses.replace(
        old,
        thinking=old.thinking - shift[:, None],
        answers=old.answers - shift[:, None, None],
    )
    before = log_probability(WORLD.params) - ratios

    def literal(params):
        rho = jnp.exp(log_probability(params) - before)
        return -jnp.minimum(rho * of_trace, jnp.clip(rho, 0.8, 1.2) * of_trace).mean()

    found, _ = gradient(batch, spec, old)
    close(found, jax.grad(literal)(WORLD.params), atol=1e-5)


def test_gradient_of_a_tree_equals_that_of_separate_sequences(batch):
    """Each branch as a row of its own, and the trunk as another, with sampled tokens alone as
    targets: the same policy gradient, so forced tokens contribute none.
    """
    rows, source, weights = [], [], []

    def add(row, text, start, advantages):
        rows.append(np.pad(text, (0, 18 - len(text))))
        source.append(row)
        weights.append(np.zeros((2, 17), np.float32))
        # The state before a token predicts it.
        at = slice(start - 1, start - 1 + len(advantages))
        weights[-1][:, at] = advantages, np.ones(len(advantages))

    for i in range(4):
        n, m = int(batch.prompt_lengths[i]), int(batch.sampled[i])
        add(i, batch.trunk[i, : n + m], n, batch.thinking_advantages[i, :m])
        for j in range(2):
            c, k, a = (int(x[i, j]) for x in (batch.context, batch.forced, batch.answered))
            text = np.concatenate([batch.trunk[i, :c], batch.branches[i, j, : k + a]])
            add(i, text, c + k, [batch.answer_advantages[i, j]] * a)
    tokens, (advantages, targets) = np.stack(rows), np.stack(weights, axis=1)

    def loss(params):
        budgets = jnp.asarray(batch.budgets)[np.array(source)]
        phi = budget.embed(
            params["budget"], budgets, conditioning=WORLD.conditioning, b_max=SPEC.b_max
        )
        conditioned = budget.Conditioned(phi, params["budget"]["gate"], settings=WORLD.conditioning)
        hidden = qwen2.forward(
            params, jnp.asarray(tokens[:, :-1]), config=WORLD.shape, conditioned=conditioned
        )
        scores = jnp.where(RULES.allowed_tokens, qwen2.logits(params, hidden), -1e30)
        logp = jax.nn.log_softmax(scores)
        chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.where(logp > -1e29, jnp.exp(logp) * logp, 0.0), axis=-1)
        gain = advantages * chosen + SPEC.loss.entropy_coef * targets * entropy
        return -gain.sum() / (4 * SPEC.b_max)

    close(jax.jit(jax.grad(loss))(WORLD.params), gradient(batch)[0], 1e-5)


@pytest.mark.slow
def test_the_value_loss_does_not_steer_the_policy_unless_asked(batch):
    quiet = dataclasses.replace(SPEC, loss=LossConfig(value_coef=0.0))
    # A zero last layer passes nothing back.
    value_head = jax.tree.map(lambda x: x + 0.1, VALUE_HEAD)
    alone = gradient(batch, quiet, value_head=value_head)[0]
    close(gradient(batch, value_head=value_head)[0], alone, 1e-7)
    joint = dataclasses.replace(SPEC, value=ValueConfig(hidden_size=8, stop_gradient=False))
    steered = gradient(batch, joint, value_head=value_head)[0]
    gap = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), steered, alone)
    assert max(float(x) for x in jax.tree.leaves(gap)) > 1e-5


def agreeing(old, sampler, mask, bound):
    """Rows whose mean difference is within a bound; None: all."""
    gaps = [np.abs(old - sampler)[row][mask[row]].mean() for row in range(mask.shape[0])]
    return np.array(gaps) <= (np.inf if bound is None else bound)


def written_out(new, old, ref, sampler, advantages, mask, loss):
    """Eq. 15 and 16 token by token, in float64."""
    total = 0.0
    kept = agreeing(old, sampler, mask, loss.sequence_mask)
    for row in range(mask.shape[0]):
        for t in np.flatnonzero(mask[row]):
            rho, a = np.exp(new[row, t] - old[row, t]), advantages[row, t]
            if loss.old_logprobs == "sampler":
                rho = min(np.exp(new[row, t] - sampler[row, t]), loss.importance_cap)
            clipped = min(max(rho, 1 - loss.clip_low), 1 + loss.clip_high)
            token = max(-a * rho, -a * clipped)
            if loss.dual_clip is not None and a < 0:
                token = min(token, -a * loss.dual_clip)
            if loss.importance_cap is not None and loss.old_logprobs != "sampler":
                token *= min(np.exp(old[row, t] - sampler[row, t]), loss.importance_cap)
            if loss.sequence_cap is not None:
                weight = np.exp((old - sampler)[row][mask[row]].sum())
                token *= weight if weight <= loss.sequence_cap else 0.0
            token *= kept[row]
            d = new[row, t] - ref[row, t]
            kl = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) + d - 1}[loss.kl_kind]
            total += token + loss.kl_coef * kl
    return total


@pytest.mark.parametrize(
    ("kind", "old_logprobs"),
    [("k1", "scored"), ("k2", "scored"), ("k3", "sampler"), ("k3", "scored")],
)
def test_the_objective_written_out(batch, kind, old_logprobs):
    loss = LossConfig(
        entropy_coef=0.0,
        kl_coef=0.7,
        kl_kind=kind,
        importance_cap=1.1,
        clip_low=0.1,
        old_logprobs=old_logprobs,
    )
    # A sampler that differs from the learner, in both directions.
    wrong = lambda x: x + 0.2 * np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    batch = dataclasses.replace(
        batch,
        thinking_logprobs=wrong(batch.thinking_logprobs),
        answer_logprobs=wrong(batch.answer_logprobs),
    )
    scores = score_batch(WORLD.params, batch, RULES.allowed_tokens, spec=SPEC)
    rng = np.random.default_rng(1)
    shift = lambda scale: dataclasses.replace(
        scores,
        thinking=scores.thinking + scale * rng.normal(size=scores.thinking.shape),
        answers=scores.answers + scale * rng.normal(size=scores.answers.shape),
    )
    old, ref = shift(0.2), shift(0.5)
    tokens = lambda s: joined(s.thinking, s.answers)
    sampler = joined(batch.thinking_logprobs, batch.answer_logprobs)
    mask = joined(batch.thinking_mask, batch.answer_mask) > 0
    if kind == "k1":
        loss = dataclasses.replace(loss, dual_clip=1.2)
        ratios = np.exp(tokens(scores) - tokens(old))
        negative = np.repeat(batch.answer_advantages, batch.answer_logprobs.shape[2], 1) < 0
        negative = np.concatenate([batch.thinking_advantages < 0, negative], 1)
        assert ((ratios > 1.2) & negative & mask).any()
    if kind == "k2":
        loss = dataclasses.replace(loss, sequence_mask=0.23)
    weighs_traces = kind == "k3" and old_logprobs == "scored"
    if weighs_traces:
        loss = dataclasses.replace(loss, importance_cap=None, sequence_cap=1.5)
        weights = np.exp(np.where(mask, tokens(old) - sampler, 0.0).sum(1))
        assert (weights > 1.5).any() and (weights <= 1.5).any()
    kept = agreeing(tokens(old), sampler, mask, loss.sequence_mask)
    assert kept.any() and kept.all() == (kind != "k2")
    spec = dataclasses.replace(SPEC, loss=loss, value=None)
    of_answers = np.repeat(batch.answer_advantages, batch.answer_logprobs.shape[2], 1)
    advantages = np.concatenate([batch.thinking_advantages, of_answers], 1)
    found, metrics, _ = compiled_objective(
        WORLD.params,
        None,
        Minibatch(batch, old, ref),
        loss_normalizers(batch, spec=spec),
        RULES.allowed_tokens,
        spec=spec,
    )
    want = written_out(tokens(scores), tokens(old), tokens(ref), sampler, advantages, mask, loss)
    assert float(found) == pytest.approx(want / (4 * spec.b_max), abs=1e-6)
    if old_logprobs == "sampler":
        ratios = np.minimum(np.exp(tokens(scores) - sampler), 1.1)[mask]
        assert float(metrics["policy/ratio"]) == pytest.approx(ratios.mean(), abs=1e-5)
        assert "mismatch/weight" not in metrics
        return
    if weighs_traces:
        weights = np.where(weights <= 1.5, weights, 0.0)[:, None] * mask
        assert float(metrics["mismatch/weight"]) == pytest.approx(weights.sum() / mask.sum())
        share = (mask & (weights == 0.0)).sum() / mask.sum()
        assert float(metrics["mismatch/masked"]) == pytest.approx(share)
        return
    weights = np.minimum(np.exp(tokens(old) - sampler), 1.1)[mask]
    assert float(metrics["mismatch/weight"]) == pytest.approx(weights.mean(), abs=1e-5)
    gap = np.abs(tokens(old) - sampler)[mask]
    assert float(metrics["mismatch/absolute"]) == pytest.approx(gap.mean(), abs=1e-5)
    if kind == "k2":
        left_out = np.repeat(~kept, mask.sum(1)).mean()
        assert float(metrics["mismatch/masked"]) == pytest.approx(left_out, abs=1e-5)


# --- expected gradients over all traces of a toy --------------------------------------------------

PLAIN = {name: leaf for name, leaf in WORLD.params.items() if name != "budget"}
# One number per trace, of both signs.
CREDIT = np.array([1.0, -2.0, 0.5, -1.0, 2.0, -0.5], np.float32)


def nearby(seed, scale):
    """A policy whose probabilities differ from PLAIN's by some percent."""
    leaves, tree = jax.tree.flatten(PLAIN)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + scale * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys)]
    return jax.tree.unflatten(tree, moved)


def chances(logprobs, mask):
    return np.exp(np.where(mask, logprobs, 0.0).sum(1))


def expected_gradient(loss, old, sampler):
    """The library's gradient of the loss over all traces that `sampler` draws, each by its chance.

    A loss is proportional to its advantage, so that advantages carry the chances.
    """
    traces = list_traces((BUDGET,))
    prompts, trunks, branches = rollouts(traces)
    logprobs, _, mask = draws(sampler, traces, None)
    chance = chances(logprobs, mask)
    drawn = np.where(mask, logprobs, 0.0)
    thought = np.array([len(trace.thought) for trace in traces])
    thinking = np.where(np.arange(BUDGET) < thought[:, None], drawn[:, :BUDGET], 0.0)
    answers = np.take_along_axis(drawn, thought[:, None], 1)[:, None]
    weighted = CREDIT * chance * len(traces)
    batch = make_batch(
        prompts,
        dataclasses.replace(trunks, logprobs=np.asarray(thinking, np.float32)),
        dataclasses.replace(branches, logprobs=np.asarray(answers, np.float32)),
        cuts=np.full((len(traces), 1), BUDGET),
        thinking_advantages=np.repeat(weighted[:, None], BUDGET, 1),
        answer_advantages=weighted[:, None],
        value_targets=np.zeros((len(traces), 1), np.float32),
    )
    batch = jax.tree.map(jnp.asarray, batch)
    spec = dataclasses.replace(SPEC, conditioning=None, loss=loss, value=None, b_max=BUDGET)
    scores = score_batch(old, batch, ALLOWED, spec=spec)
    normalizers = loss_normalizers(batch, spec=spec)

    def total(params):
        return objective(params, None, Minibatch(batch, scores), normalizers, ALLOWED, spec=spec)[0]

    return jax.jit(jax.grad(total))(PLAIN)


def defined_gradient(old, sampler, loss_of_tokens):
    """Gradient of the sum over traces of chance times loss; only PLAIN's probabilities vary."""
    traces = list_traces((BUDGET,))
    before, _, mask = draws(old, traces, None)
    seen, _, _ = draws(sampler, traces, None)
    chance = chances(seen, mask)
    # The policy before the update over the sampler, of a whole trace.
    weights = chances(before, mask) / chance

    def total(params):
        logprobs, _, _ = draws(params, traces, None)
        rho = jnp.exp(logprobs - before)
        tokens = jnp.where(mask, loss_of_tokens(rho, CREDIT[:, None], weights[:, None]), 0.0)
        return (chance * tokens.sum(1)).sum() / BUDGET

    return (
        jax.jit(jax.grad(total))(PLAIN),
        np.asarray(jnp.exp(draws(PLAIN, traces, None)[0] - before)),
        mask,
    )


@pytest.mark.slow
def test_the_expected_gradient_with_dual_clip():
    old = nearby(1, 0.03)
    loss = LossConfig(entropy_coef=0.0, clip_low=0.05, clip_high=0.1, dual_clip=1.05)

    def clipped(rho, a, weights):
        plain = jnp.maximum(-a * rho, -a * jnp.clip(rho, 0.95, 1.1))
        return jnp.where(a < 0, jnp.minimum(plain, -a * 1.05), plain)

    want, ratios, mask = defined_gradient(old, old, clipped)
    assert ((ratios > 1.05) & mask & (CREDIT[:, None] < 0)).any()
    close(expected_gradient(loss, old, old), want, 2e-6)
    unbounded = dataclasses.replace(loss, dual_clip=None)
    gap = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), expected_gradient(unbounded, old, old), want
    )
    assert max(jax.tree.leaves(gap)) > 1e-5


@pytest.mark.slow
def test_the_expected_gradient_with_a_sequence_cap():
    """Without masked traces, it is the gradient of traces that the policy itself drew."""
    old, sampler = nearby(1, 0.02), nearby(2, 0.05)
    loss = LossConfig(entropy_coef=0.0, sequence_cap=1.1)

    def clipped(rho, a):
        return jnp.maximum(-a * rho, -a * jnp.clip(rho, 0.8, 1.2))

    def masked(rho, a, weights):
        return jnp.where(weights <= 1.1, weights, 0.0) * clipped(rho, a)

    want, _, _ = defined_gradient(old, sampler, masked)
    found = expected_gradient(loss, old, sampler)
    close(found, want, 2e-6)
    whole = expected_gradient(dataclasses.replace(loss, sequence_cap=50.0), old, sampler)
    unmasked, _, _ = defined_gradient(old, old, lambda rho, a, weights: clipped(rho, a))
    close(whole, unmasked, 2e-6)
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), found, whole)
    assert max(jax.tree.leaves(gap)) > 1e-4
