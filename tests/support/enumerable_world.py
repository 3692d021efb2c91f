"""Defines a question whose possible traces can all be listed, so that expectations are exact.

The thinking has at most two tokens, and an answer has one token. A thinking token is `A` or the
closing tag `B`. An answer is `A` or `B`.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.methods import GroupBatch
from bacr_jax.model import budget, qwen2
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Branches, Prompts, Trunks
from rollout_world import ANSWER, CLOSE, plain_world

WORLD = plain_world()
PROMPT, BUDGET, SUFFIX = [8, 11], 2, 2
# Only these two tokens can be sampled, so the list of traces is complete. B is the closing tag.
A, B = 6, CLOSE
ALLOWED = jnp.zeros(WORLD.shape.vocab_size, bool).at[jnp.array([A, B])].set(True)
THOUGHTS = {(B,): 0, (A, B): 1, (A, A): 2}  # Length of each thinking, without the closing tag.
# Outcome of each answer, by the number of thinking tokens before the answer.
OUTCOMES = {0: {A: 0.0, B: 0.5}, 1: {A: 1.0, B: 0.0}, 2: {A: 0.25, B: 1.0}}


@dataclasses.dataclass(frozen=True)
class Trace:
    """A possible trace: its thinking, and an answer at each truncation point (cut).

    Attributes:
      thought: thinking tokens, including the closing tag.
      answers: answer token at each cut.
      cuts: number of thinking tokens before each cut.
      source: for each cut, the index of the cut whose answer it uses.
    """

    thought: tuple[int, ...]
    answers: tuple[int, ...]
    cuts: tuple[int, ...]
    source: tuple[int, ...]

    @property
    def length(self):
        """Returns the number of thinking tokens, without the closing tag."""
        return THOUGHTS[self.thought]

    def branch(self, j):
        """Returns the tokens between the prompt and answer j: thinking tokens and forced tokens.

        The forced tokens include the closing tag, unless the thinking before the cut ends with it.
        """
        kept = min(self.cuts[j], self.length)
        if kept == self.length and self.thought[-1] == B:
            return [*self.thought], [ANSWER]
        return [*self.thought[:kept]], [CLOSE, ANSWER]

    def parts(self):
        """Yields (tokens before, sampled tokens) for the thinking and for each sampled answer."""
        yield PROMPT, self.thought
        for j, answer in enumerate(self.answers):
            if self.source[j] == j:
                text, suffix = self.branch(j)
                yield [*PROMPT, *text, *suffix], (answer,)

    @property
    def outcomes(self):
        """Returns the outcome at each cut."""
        kept = [min(cut, self.length) for cut in self.cuts]
        return [OUTCOMES[k][answer] for k, answer in zip(kept, self.answers)]


def list_traces(cuts, shared=True):
    """Returns all traces with the given cuts.

    Args:
      cuts: number of thinking tokens before each cut.
      shared: True if cuts at the same position share an answer. False if each cut has an
        independent answer.
    """
    found = []
    for thought, length in THOUGHTS.items():
        reached = [min(cut, length) for cut in cuts]
        own = range(len(cuts))
        source = tuple(reached.index(at) if shared else j for j, at in zip(own, reached))
        for answers in itertools.product((A, B), repeat=len(cuts)):
            if all(answers[j] == answers[i] for j, i in enumerate(source)):
                found.append(Trace(thought, answers, cuts, source))
    return found


# --- log-probabilities of traces ------------------------------------------------------------------


def draws(params, traces, told):
    """Computes the log-probability and the entropy of every sampled token.

    Args:
      params: parameters of the policy.
      traces: list of `Trace`.
      told: `ConditioningConfig` of a policy that receives the budget as an embedding. None for a
        policy without budget.

    Returns:
      Three arrays [traces, tokens]: log-probabilities and entropies in nats, and a mask that is
      False for padding.
    """
    parts = [(i, before, drawn) for i, t in enumerate(traces) for before, drawn in t.parts()]
    width = max(len(before) + len(drawn) for _, before, drawn in parts)
    tokens = np.zeros((len(parts), width), np.int32)
    for row, (_, before, drawn) in enumerate(parts):
        tokens[row, : len(before) + len(drawn)] = [*before, *drawn]
    conditioned = None
    if told is not None:
        phi = budget.embed(
            params["budget"], jnp.full(len(parts), BUDGET), conditioning=told, b_max=BUDGET
        )
        conditioned = budget.Conditioned(phi, params["budget"]["gate"], settings=told)
    hidden = qwen2.forward(params, jnp.asarray(tokens), config=WORLD.shape, conditioned=conditioned)
    logits = jnp.where(ALLOWED, qwen2.logits(params, hidden), -1e30)
    logprobs = jax.nn.log_softmax(logits)
    entropies = -(jnp.exp(logprobs) * logprobs).sum(-1)
    rows, places = [[] for _ in traces], [[] for _ in traces]
    for row, (i, before, drawn) in enumerate(parts):
        rows[i] += [row] * len(drawn)
        places[i] += range(len(before), len(before) + len(drawn))
    most = max(map(len, rows))
    padded = lambda lists: np.array([x + [x[0]] * (most - len(x)) for x in lists])
    rows, places = padded(rows), padded(places)
    mask = np.arange(most) < np.array([sum(len(d) for _, d in t.parts()) for t in traces])[:, None]
    return logprobs[rows, places - 1, tokens[rows, places]], entropies[rows, places - 1], mask


def rollouts(traces):
    """Returns the prompts, trunks and branches of the traces, as a rollout contains them.

    All their log-probabilities are 0.
    """
    n, cuts = len(traces), len(traces[0].cuts)
    trunk = np.zeros((n, len(PROMPT) + BUDGET), np.int32)
    tokens = np.zeros((n, cuts, SUFFIX + 1), np.int32)
    context, forced = np.zeros((2, n, cuts), np.int32)
    for i, trace in enumerate(traces):
        trunk[i, : len(PROMPT) + len(trace.thought)] = [*PROMPT, *trace.thought]
        for j, answer in enumerate(trace.answers):
            text, suffix = trace.branch(trace.source[j])
            tokens[i, j, : len(suffix) + 1] = [*suffix, answer]
            context[i, j], forced[i, j] = len(PROMPT) + len(text), len(suffix)
    lengths = np.array([trace.length for trace in traces], np.int32)
    closed = np.array([trace.thought[-1] == B for trace in traces])
    zeros = lambda *shape: np.zeros(shape, np.float32)
    trunks = Trunks(
        tokens=trunk,
        prompt_lengths=np.full(n, len(PROMPT), np.int32),
        sampled=np.array([len(trace.thought) for trace in traces], np.int32),
        thinking=lengths,
        close=np.where(closed, CLOSED_BY_TAG, CLOSED_BY_BUDGET),
        budgets=np.full(n, BUDGET, np.int32),
        logprobs=zeros(n, BUDGET),
    )
    branches = Branches(
        tokens=tokens,
        context=context,
        forced=forced,
        sampled=np.ones((n, cuts), np.int32),
        finished=np.ones((n, cuts), bool),
        source=np.array([trace.source for trace in traces], np.int32),
        logprobs=zeros(n, cuts, 1),
    )
    ends = np.full(n, len(PROMPT), np.int32)
    return Prompts(trunk[:, :2], ends, np.zeros(n, np.int32), ends), trunks, branches


def group_batch(traces, answers, extra):
    """Returns the `GroupBatch` of traces, of which each consecutive pair forms a group.

    Args:
      answers: number of answers at each cut. The `cuts` of a trace repeat each cut as often.
      extra: for each entry of `GroupBatch.extra`, a number that all traces share.
    """
    pairs = len(traces) // 2
    of = lambda get, dtype=np.float32: np.array([get(t) for t in traces], dtype)
    outcomes = of(lambda t: t.outcomes).reshape(pairs, 2, -1, answers)
    return jax.tree.map(
        jnp.asarray,
        GroupBatch(
            questions=np.zeros(pairs, np.int32),
            budgets=np.full((pairs, 2), BUDGET, np.int32),
            cuts=of(lambda t: t.cuts[::answers], np.int32).reshape(pairs, 2, -1),
            outcomes=outcomes.mean(-1),
            by_answer=outcomes,
            thinking=of(lambda t: t.length, np.int32).reshape(pairs, 2),
            lengths=of(lambda t: t.length + 1, np.int32).reshape(pairs, 2),
            closed=of(lambda t: t.thought[-1] == B, bool).reshape(pairs, 2),
            closed_by_tag=of(lambda t: t.thought[-1] == B, bool).reshape(pairs, 2),
            score_norm_proxy=np.zeros(outcomes.shape[:3], np.float32),
            fraction=np.float32(0.5),
            extra={name: np.full((pairs, 2), number) for name, number in extra.items()},
            answer_lengths=np.ones(outcomes.shape[:3], np.int32),
            sampled=of(lambda t: len(t.thought), np.int32).reshape(pairs, 2),
        ),
    )
