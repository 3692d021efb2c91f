"""Expected gradients on a toy whose every trace can be listed, against each method's definition.

A question of two tokens; thinking of at most two tokens, each `A` or the closing tag `B`; answers
of one token, `A` or `B`. On one side the library makes rewards, advantages and gradients of every
pair of traces, weighted by its probability. On the other stands the method's definition, written
down with log-probabilities of whole texts alone.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.objective import Minibatch, loss_normalizers, objective
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.train_step import question_values
from bacr_jax.methods import hapo, load_method, selfbudgeter
from bacr_jax.model import budget, qwen2, value
from bacr_jax.training.stages import token_advantages
from enumerable_world import (
    ALLOWED,
    BUDGET,
    OUTCOMES,
    PROMPT,
    WORLD,
    B,
    draws,
    group_batch,
    list_traces,
    rollouts,
)
from learner_world import close
from methods_world import load

HEAD = value.init(jax.random.key(4), num_features=2 * 16 + 32, hidden_size=8)
HEAD["out"]["kernel"] = jax.random.normal(jax.random.key(5), (8, 1))


# --- the library ----------------------------------------------------------------------------------


def library(config, traces, params, state, extra):
    """Expected gradient over all pairs, with respect to policy and value head."""
    method = load_method(resolve(config).method)
    spec = LearnerSpec(
        WORLD.shape,
        config.conditioning if method.conditioned else None,
        config.loss,
        config.value if method.uses_value else None,
        b_max=BUDGET,
        remat="none",
        scan=False,
    )
    rows = [trace for pair in itertools.product(traces, repeat=2) for trace in pair]
    prompts, trunks, branches = rollouts(rows)
    seen = group_batch(rows, method.answers, extra)
    head, values = None, None
    if method.uses_value:
        head = HEAD
        cuts = seen.cuts.reshape(len(rows), -1)
        told = jnp.asarray(trunks.budgets)
        values, _ = question_values(params, head, prompts, told, cuts, spec=spec)
        values = values.reshape(seen.cuts.shape)
    credit, _ = token_advantages(
        state, seen, values, branches.source, method=method, max_thinking=BUDGET
    )
    flat = lambda x: np.repeat(np.asarray(x), method.answers, -1).reshape(len(rows), -1)
    batch = make_batch(
        prompts,
        trunks,
        branches,
        cuts=flat(seen.cuts),
        thinking_advantages=credit.thinking,
        answer_advantages=credit.answers,
        value_targets=flat(credit.rewards),
    )
    weights = pair_weights(params, traces, spec.conditioning)
    if method.dynamic_sampling is not None:
        weights = weights * np.asarray(method.dynamic_sampling.keep(seen))
    by_pair = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, 2, *x.shape[1:]), batch)

    @jax.jit
    def expected(params, head):
        def of_pair(pair):
            normalizers = loss_normalizers(pair, spec=spec)
            return objective(params, head, Minibatch(pair), normalizers, ALLOWED, spec=spec)[0]

        return (weights * jax.vmap(of_pair)(by_pair)).sum()

    return jax.grad(expected, argnums=(0, 1))(params, head)


def pair_weights(params, traces, told):
    """Probability of every pair of traces under the policy itself."""
    logprobs, _, mask = jax.jit(lambda params: draws(params, traces, told))(params)
    chance = np.exp(np.where(mask, logprobs, 0).sum(1))
    np.testing.assert_allclose(chance.sum(), 1.0, rtol=1e-5)
    return np.outer(chance, chance).ravel()


# --- definitions ----------------------------------------------------------------------------------


def definition(params, traces, told, loss_of_pairs):
    """Gradient of the sum over pairs of probability times loss; only ratios depend on `params`."""
    weights = pair_weights(params, traces, told)

    @jax.jit
    def expected(params):
        return (weights * loss_of_pairs(params, *draws(params, traces, told))).sum()

    return jax.grad(expected)(params)


def of_pairs(x):
    """[traces, ...] as [pairs, 2, ...]."""
    n = len(x)
    return jnp.stack([jnp.repeat(x, n, axis=0), jnp.tile(x, (n,) + (1,) * (x.ndim - 1))], axis=1)


def ratio(logprobs):
    return jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))


def grpo(r):
    return (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)


def dapo_reward(outcome, length):
    """+-1 and the overlong punishment, over the last fifth of the longest response's 2 + 2."""
    return 2 * outcome - 1 - np.clip((length - (4 - 0.8)) / 0.8, 0, 1)


def l1_reward(outcome, length, alpha=0.5):
    """Told two tokens; at most, and exactly."""
    most = outcome * np.clip(0.5 + alpha * (2 - length), 0, 1)
    return {"l1_max": most, "l1_exact": outcome - alpha * np.abs(2 - length)}


def effort_reward(outcome, length):
    """Full effort: no longer in thinking, an answer's token less, than the pair's mean."""
    return outcome * (length - 1 <= (length - 1).mean(1, keepdims=True))


def laser_reward(outcome, length):
    """A target of two tokens."""
    return np.where(outcome >= 1, 1 + 0.5 * (length <= 2), -0.5)


def shorter_better_reward(outcome, length):
    """The weight of 6 is that of two tokens."""
    right = outcome >= 1
    shortest = np.where(right, length, 99).min(1, keepdims=True)
    optimal = np.where(right.any(1, keepdims=True), shortest, length.mean(1, keepdims=True))
    return 2 * outcome - 3 * np.abs(length - optimal)


def gated_bonus_reward(outcome, length):
    """The best outcome above 0 is correct, and earns more below the mean length of the correct."""
    best = outcome.max(1, keepdims=True)
    right = (outcome == best) & (best > 0)
    mean = (right * length).sum(1, keepdims=True) / np.maximum(right.sum(1, keepdims=True), 1)
    short = np.clip(1 - length / np.maximum(mean, 1), 0, 1)
    return outcome * (1 + right * short)


def hapo_reward(outcome, length):
    """The shortest right answer so far had 2 tokens; a partial outcome of half or less is wrong."""
    f = np.cos(np.minimum(length / 2, 2) * np.pi / 2)
    return outcome + np.where(outcome > 0.5, np.maximum(-0.7, f), np.minimum(0, f))


TOKEN_LOSSES = {
    "seq_mean_token_mean": lambda x, mask: (x.sum(2) / mask.sum(2)).mean(1),
    "token_mean": lambda x, mask: x.sum((1, 2)) / mask.sum((1, 2)),
    "constant": lambda x, mask: x.sum((1, 2)) / (2 * BUDGET),
}
ONE_ADVANTAGE = {
    # name: advantage of a pair's outcomes and lengths, and how token losses are added up
    "grpo": (lambda r, length: grpo(r), "seq_mean_token_mean"),
    "dr_grpo": (lambda r, length: r - r.mean(1, keepdims=True), "constant"),
    "rloo": (lambda r, length: r - r[:, ::-1], "constant"),
    "dapo": (
        lambda r, length: grpo(dapo_reward(r, length)) * (r[:, :1] != r[:, 1:]),
        "token_mean",
    ),
    "hapo": (lambda r, length: grpo(hapo_reward(r, length)), "seq_mean_token_mean"),
    "l1_exact": (lambda r, length: grpo(l1_reward(r, length)["l1_exact"]), "token_mean"),
    "l1_max": (lambda r, length: grpo(l1_reward(r, length)["l1_max"]), "token_mean"),
    "effort": (lambda r, length: grpo(effort_reward(r, length)), "seq_mean_token_mean"),
    "elastic": (lambda r, length: grpo(r), "token_mean"),
    "laser": (lambda r, length: grpo(laser_reward(r, length)), "token_mean"),
    "shorter_better": (lambda r, length: grpo(shorter_better_reward(r, length)), "token_mean"),
    "gated_bonus": (
        lambda r, length: (
            gated_bonus_reward(r, length) - gated_bonus_reward(r, length).mean(1, keepdims=True)
        ),
        "token_mean",
    ),
    # Both of a pair are kept.
    "gfpo": (lambda r, length: grpo(r), "token_mean"),
}
# A miss by budget.max tokens costs 1; no entropy bonus here.
OWN = {
    "l1_exact": ("l1.weight=1", "loss.entropy_coef=0"),
    "l1_max": ("l1.weight=1", "loss.entropy_coef=0"),
    "elastic": ("loss.entropy_coef=0",),
    "laser": ("length.target=1", "loss.entropy_coef=0"),
    "shorter_better": ("loss.entropy_coef=0",),
    "gfpo": ("loss.entropy_coef=0",),
}
SETTINGS = ("budget.min=2", "budget.max=2", "eval.budgets=[2]", "curriculum.mu0=2")
PLAIN = {name: leaf for name, leaf in WORLD.params.items() if name != "budget"}


# They differ in rewards and baselines, which are tested with their methods; the quick one of all is
# the paper's, below.
@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_ADVANTAGE)
def test_methods_with_one_advantage_a_trace(tmp_path, name):
    config = load(tmp_path, name, *SETTINGS, *OWN.get(name, ()))
    traces = list_traces((BUDGET,))
    advantage, aggregate = ONE_ADVANTAGE[name]
    outcome = of_pairs(np.array([trace.outcomes[0] for trace in traces]))
    length = of_pairs(np.array([trace.length + 1 for trace in traces]))
    a = advantage(np.asarray(outcome), np.asarray(length))[..., None]

    def loss(params, logprobs, entropies, mask):
        mask = of_pairs(mask)
        return TOKEN_LOSSES[aggregate](jnp.where(mask, -a * ratio(of_pairs(logprobs)), 0), mask)

    state = hapo.no_history(64).at[0].set(2) if name == "hapo" else None
    found, _ = library(config, traces, PLAIN, state, {})
    agree(found, definition(PLAIN, traces, None, loss))


def token_mean_without_forced_answers(a, closed):
    """The mean over tokens, in which the answer of a truncated trace has no advantage."""

    def loss(params, logprobs, entropies, mask):
        mask = of_pairs(mask)
        last = mask & ~jnp.pad(mask[..., 1:], ((0, 0), (0, 0), (0, 1)))
        by_token = jnp.where(last & ~closed[..., None], 0.0, a[..., None])
        tokens = jnp.where(mask, -by_token * ratio(of_pairs(logprobs)), 0)
        return TOKEN_LOSSES["token_mean"](tokens, mask)

    return loss


@pytest.mark.slow
def test_thinkprune(tmp_path):
    """What is truncated earns nothing, and its answer has no advantage."""
    config = load(tmp_path, "thinkprune", *SETTINGS, "budget.stages=[]", "loss.entropy_coef=0")
    traces = list_traces((BUDGET,))
    closed = np.asarray(of_pairs(np.array([trace.thought[-1] == B for trace in traces])))
    a = grpo(np.asarray(of_pairs(np.array([trace.outcomes[0] for trace in traces]))) * closed)

    loss = token_mean_without_forced_answers(a, closed)
    found, _ = library(config, traces, PLAIN, None, {})
    agree(found, definition(PLAIN, traces, None, loss))


@pytest.mark.slow
def test_the_gated_penalty(tmp_path, monkeypatch):
    """Thinking of 0 and 1 tokens can be right without truncation, with lengths 1 and 2.

    The quarter of a pair of both is 1.25; 1.1 x 1.25 and 2 / 32 tokens more are free.
    """
    monkeypatch.setitem(OUTCOMES[0], B, 1.0)
    config = load(tmp_path, "gated_penalty", *SETTINGS)
    traces = list_traces((BUDGET,))
    closed = np.asarray(of_pairs(np.array([trace.thought[-1] == B for trace in traces])))
    outcome = np.asarray(of_pairs(np.array([trace.outcomes[0] for trace in traces])))
    length = np.asarray(of_pairs(np.array([trace.length + 1 for trace in traces])))
    succeeded = (outcome == 1.0) & closed
    differ = succeeded.all(1) & (length[:, 0] != length[:, 1])
    assert differ.any()
    penalty = 0.1 * (2 - 1.1 * 1.25 - 2 / 32) / 1.25
    a = grpo(outcome - penalty * (differ[:, None] & (length == 2)))[..., None]

    def loss(params, logprobs, entropies, mask):
        mask = of_pairs(mask)
        tokens = jnp.where(mask, -a * ratio(of_pairs(logprobs)), 0)
        return TOKEN_LOSSES["seq_mean_token_mean"](tokens, mask)

    found, _ = library(config, traces, PLAIN, None, {})
    agree(found, definition(PLAIN, traces, None, loss))


def agree(found, want):
    """The same gradient, and not nothing."""
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want)) > 1e-3
    close(found, want, atol=2e-6)


@pytest.mark.slow
def test_dler(tmp_path):
    """All pairs that are listed are one batch, whose tokens whiten the advantages."""
    config = load(tmp_path, "dler", *SETTINGS)
    traces = list_traces((BUDGET,))
    closed = of_pairs(np.array([trace.thought[-1] == B for trace in traces]))
    sampled = of_pairs(np.array([len(trace.thought) for trace in traces]))
    r = np.asarray(of_pairs(np.array([trace.outcomes[0] for trace in traces])) * closed)
    mixed = r[:, :1] != r[:, 1:]
    # A response that was cut has no answer.
    n = np.asarray(mixed * (sampled + closed))
    a = r - r.mean(1, keepdims=True)
    a = a - (n * a).sum() / n.sum()
    a = mixed * a / np.sqrt((n * a**2).sum() / (n.sum() - 1))

    loss = token_mean_without_forced_answers(a, closed)
    found, _ = library(config, traces, PLAIN, None, {})
    agree(found, definition(PLAIN, traces, None, loss))


def serial_advantages(trace):
    """Of every drawn token: the mean over the trace's exits of A_i / |o_i|, o_i being it."""
    exits = [j for j in range(len(trace.cuts)) if trace.source[j] == j]
    right = [trace.outcomes[j] > 0.5 for j in exits]
    paid = np.array([0.5 ** sum(right[:i]) if right[i] else 0.0 for i in range(len(exits))])
    found = np.zeros(len(trace.thought) + len(exits))
    for place, (j, a) in enumerate(zip(exits, paid - paid.mean())):
        # The whole thought has its closing tag, too.
        kept = len(trace.thought) if trace.cuts[j] >= trace.length else trace.cuts[j]
        share = a / (kept + 1) / len(exits)
        found[:kept] += share
        found[len(trace.thought) + place] += share
    return found


@pytest.mark.slow
def test_s_grpo(tmp_path):
    """Exits after 0, 1 and 2 tokens."""
    config = load(tmp_path, "s_grpo", *SETTINGS, "cuts.count=2")
    config = dataclasses.replace(config, cuts=dataclasses.replace(config.cuts, count=3))
    traces = list_traces((0, 1, 2))
    each = [serial_advantages(trace) for trace in traces]
    width = max(map(len, each))
    a = of_pairs(np.array([np.pad(x, (0, width - len(x))) for x in each]))

    def loss(params, logprobs, entropies, mask):
        mask = of_pairs(mask)
        return jnp.where(mask, -a * ratio(of_pairs(logprobs)), 0).sum(2).mean(1)

    found, _ = library(config, traces, PLAIN, None, {})
    agree(found, definition(PLAIN, traces, None, loss))


@pytest.mark.slow
def test_selfbudgeter(tmp_path):
    config = load(tmp_path, "selfbudgeter", *SETTINGS)
    traces = list_traces((BUDGET,))
    outcome = np.array([trace.outcomes[0] for trace in traces])
    length = np.array([trace.length + 1 for trace in traces])
    closed = np.array([trace.thought[-1] == B for trace in traces])
    # Two tokens are declared, the first policy's right answer had one: .4 less. alpha is 3.05.
    far = lambda best: np.pi * np.abs(length - best) / (2 * 3.05 * 2)
    right = 0.5 + 0.25 * (1 + np.cos(far((1 - 3.05) * 2)))
    wrong = -0.5 + 0.25 * (1 + np.cos(far((1 + 3.05) * 2)))
    reward = np.where(closed, np.where(outcome > 0.5, right, wrong) - 0.4, -1.0)
    a = grpo(np.asarray(of_pairs(reward)))[..., None]

    def loss(params, logprobs, entropies, mask):
        mask = of_pairs(mask)
        tokens = jnp.where(mask, -a * ratio(of_pairs(logprobs)), 0)
        return TOKEN_LOSSES["seq_mean_token_mean"](tokens, mask)

    limits = selfbudgeter.no_limits(64).at[0].set(1)
    extra = {"declared": 2, "declaration": 0}
    found, _ = library(config, traces, PLAIN, limits, extra)
    agree(found, definition(PLAIN, traces, None, loss))


@pytest.mark.slow
def test_anytime_reasoner(tmp_path):
    """Two budgets, two answers at each; no two cuts share an answer."""
    config = load(tmp_path, "anytime", "cuts.count=2", "anytime.answers=2", *SETTINGS)
    traces = list_traces((1, 1, 2, 2), shared=False)
    by_answer = np.array([trace.outcomes for trace in traces]).reshape(-1, 2, 2)
    r = np.asarray(of_pairs(by_answer.mean(-1)))
    to_go = np.stack([r.sum(-1) / 2, r[..., 1] / 2], -1)
    v2 = to_go.mean(1, keepdims=True)
    first = to_go[..., 0] - v2[..., 0]
    second = to_go[..., 1] - (r[..., 0] / 2 + v2[..., 1]) / 2
    # A thought of one token, the tag alone, lies before the first cut.
    lone = np.asarray(of_pairs(np.array([len(trace.thought) == 1 for trace in traces])))
    of_answers = np.asarray(
        of_pairs((by_answer - by_answer.mean(-1, keepdims=True)).reshape(-1, 4))
    )
    # The answers of a lone tag follow at once.
    short = np.concatenate([first[..., None], of_answers, np.zeros_like(first)[..., None]], -1)
    long = np.concatenate([np.stack([first, second], -1), of_answers], -1)
    a = np.where(lone[..., None], short, long)

    def loss(params, logprobs, entropies, mask):
        mask = of_pairs(mask)
        return TOKEN_LOSSES["constant"](jnp.where(mask, -a * ratio(of_pairs(logprobs)), 0), mask)

    found, _ = library(config, traces, PLAIN, None, {})
    agree(found, definition(PLAIN, traces, None, loss))


@pytest.mark.parametrize("cuts", [pytest.param((2,), marks=pytest.mark.slow), (1, 2)])
def test_bacr_to_the_letter(tmp_path, cuts):
    """Eq. 7 to 16: one advantage and one ratio a trace, V(q, b_j) in the same loss, entropy."""
    config = load(tmp_path, "bacr-paper", f"cuts.count={len(cuts)}", *SETTINGS)
    told, traces, count = config.conditioning, list_traces(cuts), len(cuts)
    r = np.asarray(of_pairs(np.array([trace.outcomes for trace in traces])))
    dense = r + 0.3 * np.diff(r, axis=-1, prepend=0)  # Eq. 7 and 8

    @jax.jit
    def v(params, head):
        """Eq. 11 and the sinusoids of the logarithm, which the paper does not have, [cuts]."""
        phi = lambda budgets: budget.embed(
            params["budget"], jnp.asarray(budgets), conditioning=told, b_max=BUDGET
        )
        hidden = qwen2.forward(
            params,
            jnp.array([PROMPT]),
            config=WORLD.shape,
            conditioned=budget.Conditioned(phi([BUDGET]), params["budget"]["gate"], settings=told),
        )
        question = jnp.tile(hidden[0].mean(0), (count, 1))
        code = budget.sinusoids(jnp.array(cuts), width=32, scale="log", b_max=BUDGET)
        return value.values(head, jnp.concatenate([question, phi(cuts), code], -1)[None])[0]

    residual = dense - np.asarray(v(WORLD.params, HEAD))  # Eq. 10
    deviation = residual.reshape(len(residual), -1).std(1)
    a = residual.mean(-1) / np.maximum(deviation, 0.1)[:, None]  # Eq. 14, and the mean over cuts

    def loss(params, head, logprobs, entropies, mask):
        mask = of_pairs(mask)
        rho = ratio(jnp.where(mask, of_pairs(logprobs), 0).sum(-1))
        policy = -jnp.minimum(rho * a, jnp.clip(rho, 0.8, 1.2) * a).mean(1)  # Eq. 15
        squares = jnp.square(v(params, head) - dense).mean((1, 2))  # Eq. 12
        entropy = (jnp.where(mask, of_pairs(entropies), 0).sum(2) / mask.sum(2)).mean(1)
        return policy + 0.5 * squares - 0.01 * entropy  # Eq. 16

    of_policy, of_head = library(config, traces, WORLD.params, None, {})
    of_theta = lambda params, *drawn: loss(params, HEAD, *drawn)
    agree(of_policy, definition(WORLD.params, traces, told, of_theta))
    drawn = jax.jit(lambda params: draws(params, traces, told))(WORLD.params)
    weights = pair_weights(WORLD.params, traces, told)
    of_psi = jax.grad(lambda head: (weights * loss(WORLD.params, head, *drawn)).sum())
    agree(of_head, of_psi(HEAD))


# Numbers that earlier batches could have left; two cuts.
_MOMENTS = {
    "score_weighted": {
        "optimal_square": jnp.array([[[0.2, 0.1], [0.1, 0.1]]] * 2),
        "optimal_product": jnp.array([[0.1, 0.03], [-0.08, 0.02]]),
        "optimal_spread": jnp.array([0.001, 0.002]),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("extension", _MOMENTS)
def test_moving_the_baseline_moves_no_expected_gradient(tmp_path, extension):
    plain = (
        *("cuts.count=2", "advantage.credit=to_go", "advantage.normalise=none", *SETTINGS),
        *("loss.ratio=token", "loss.aggregate=constant"),
    )
    traces = list_traces((1, 2))
    expected = {}
    for key, state in (("false", None), ("true", _MOMENTS[extension])):
        config = load(tmp_path, "bacr-paper", f"advantage.{extension}={key}", *plain)
        expected[key], _ = library(config, traces, WORLD.params, state, {})
    agree(expected["true"], expected["false"])
