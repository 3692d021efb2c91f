"""What a method is: pure functions that the loop calls in the order of Algorithm 1."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.curriculum import CurriculumState
from bacr_jax.types import pytree

# A number for every cut of every rollout: rewards, values, advantages.
PerCut = Float[Array, "Q G M"]


@pytree
class GroupBatch:
    """What a method may look at when it makes rewards of a batch: Q questions, G rollouts each.

    Attributes:
      questions: index of each question in the training set.
      cuts: thinking tokens up to which each segment goes; a grace window belongs to the last, and
        a closing tag of several tokens to the segment whose cut falls into it.
      outcomes: correctness at each cut in [0, 1], averaged over the answers of a cut; the score of
        a verifier of one's own.
      by_answer: correctness of every answer of a cut.
      lengths: response tokens of each rollout: thinking and the answer at its end, without what
        was forced.
      closed: the thinking ended by itself, before the budget.
      closed_by_tag: it did so with its closing tag, not by ending the turn.
      surprise: how improbable each thinking segment's tokens were (`advantages.segment_surprise`).
      fraction: share of training done, in [0, 1].
      extra: [Q, G] numbers that the method's own `read` and `read_answers` found in the text.
      path: squared norms of the scores in the logits, summed up to each thinking token, 0 after the
        last one (`advantages.token_baseline`); None unless the method `needs_path`.
      answer_lengths: sampled tokens of the first answer at each cut.
      sampled: those of each rollout up to its answer, its thinking and its closing tag: the loss's.
      by_reward: score of every answer by each of reward.weights, correctness among them; empty:
        that is all there is. What a method is paid for has them mixed in `outcomes`.
    """

    questions: Int[Array, "Q"]
    budgets: Int[Array, "Q G"]
    cuts: Int[Array, "Q G M"]
    outcomes: Float[Array, "Q G M"]
    by_answer: Float[Array, "Q G M A"]
    thinking: Int[Array, "Q G"]
    lengths: Int[Array, "Q G"]
    closed: Bool[Array, "Q G"]
    closed_by_tag: Bool[Array, "Q G"]
    surprise: Float[Array, "Q G M"]
    fraction: Float[Array, ""]
    extra: dict[str, Array]
    path: Float[Array, "Q G T"] | None = None
    answer_lengths: Int[Array, "Q G M"] | None = None
    sampled: Int[Array, "Q G"] | None = None
    by_reward: dict[str, Float[Array, "Q G M A"]] = field(default_factory=dict)


@pytree
class Advantages:
    """Advantages as the learner wants them.

    Attributes:
      thinking: advantage of each thinking segment (tokens up to cut j, after cut j - 1).
      answers: advantage of the answers at each cut, before answers that serve several cuts are
        summed; [Q, G, M], or one more axis with several answers per cut.
      baseline: what the method subtracts from `returns`, for the metrics.
      returns: what each thinking segment is paid, before baseline and scale; None: the rewards.
      keep: rollouts that count in the loss; None: all.
      tokens: advantage of each thinking token, where it differs within a segment; None: that of
        its segment.
    """

    thinking: Float[Array, "Q G M"]
    answers: Float[Array, "Q G M"] | Float[Array, "Q G M A"]
    baseline: Float[Array, "Q G M"]
    returns: Float[Array, "Q G M"] | None = None
    keep: Bool[Array, "Q G"] | None = None
    tokens: Float[Array, "Q G T"] | None = None


@dataclass(frozen=True)
class DynamicSampling:
    """Sampling more questions until enough are of use (DAPO).

    Attributes:
      keep: `GroupBatch` -> questions of use [Q].
      max_rounds: most rounds of sampling in an iteration, the first one included.
    """

    keep: Callable[[GroupBatch], Bool[Array, "Q"]]
    max_rounds: int


@dataclass(frozen=True)
class RejectionSFT:
    """A supervised stage before training, on the policy's own correct responses.

    Attributes:
      questions: training questions answered once; None: all.
      learning_rate: their constant rate.
      batch_tokens: tokens per step, padding included.
      opening: length of a response in tokens -> text put before it, to be learned.
      update_state: (state, lengths [n], correct [n]) -> the method's state after the stage;
        lengths are 0 where nothing was asked.
    """

    questions: int | None
    steps: int
    learning_rate: float
    batch_tokens: int
    opening: Callable[[int], str]
    update_state: Callable[[Any, np.ndarray, np.ndarray], Any]


@dataclass(frozen=True)
class Published:
    """A setting that a publication prescribes.

    Attributes:
      value: of the config key.
      source: where it is said; or whose choice it is, where the publication says nothing.
      defining: with another value it is another method; such a config is refused.
      verified: False if the value was not compared with the publication or its released code.
        `bacr methods` lists such settings.
    """

    value: Any
    source: str
    defining: bool = False
    verified: bool = True


@dataclass(frozen=True, eq=False)
class Method:
    """A training method as a composition of pure functions.

    The functions on arrays are jitted by the loop, with the method as a static argument (equal to
    itself alone); `state` is the method's own pytree, saved with every checkpoint.

    Attributes:
      conditioned: the policy is told its budget.
      uses_value: a value head predicts rewards.
      question_weights: (curriculum, group sizes [K]) -> probability of each difficulty group [K].
      sample_budgets: (key, curriculum, groups [Q]) -> budgets [Q, G] in tokens.
      cuts: (key, budgets [Q, G]) -> truncation points [Q, G, M] in tokens, nondecreasing.
      rewards: (state, `GroupBatch`) -> rewards [Q, G, M].
      advantages: (state, `GroupBatch`, rewards, values or None) -> `Advantages`.
      init_state: number of training questions -> state before training.
      update: (state, `GroupBatch`, rewards, values or None) -> state after the batch.
      metrics: (state, `GroupBatch`) -> scalars by `group/name`, from the state before the batch.
      answers: answers A sampled at every cut.
      needs_path: `GroupBatch.path` is wanted, which takes a forward pass of the learner.
      follows_prior: traces end at budgets drawn as `budget.prior` says; else as the method has it.
      held: a trace is cut at its budget; else at `budget.max`, and its budget is told in words.
      pays_by_verdicts: its rewards ask whether an answer is right, which a mixture of rewards
        (`reward.weights`) doesn't say.
      own_cuts: cuts are shares of the budget, to be taken of each trace's own length.
      dynamic_sampling: when more questions are to be sampled; None: never.
      declares_budget: responses open with a budget, in a prompt format of their own.
      read: (tokenizer, sampled thinking ids by row) -> arrays [rows] for `GroupBatch.extra`, on
        the host; None: the text is not looked at.
      read_answers: the same for the answers: (text of each answer, with its tags, by row) -> arrays
        [rows]; None: only the grader reads them.
      rejection_sft: the method's own supervised stage before training; None: there is none.
      published: what its publication prescribes, by config key, of the keys that it reads; a
        config that says otherwise departs from it, or is refused where the setting defines the
        method. A method of one's own has none, whatever it was made from.
    """

    name: str
    conditioned: bool
    uses_value: bool
    question_weights: Callable[[CurriculumState, Int[Array, "K"]], Float[Array, "K"]]
    sample_budgets: Callable[[Array, CurriculumState, Int[Array, "Q"]], Int[Array, "Q G"]]
    cuts: Callable[[Array, Int[Array, "Q G"]], Int[Array, "Q G M"]]
    rewards: Callable[[Any, GroupBatch], Float[Array, "Q G M"]]
    advantages: Callable[..., Advantages]
    init_state: Callable[[int], Any] = lambda num_questions: None
    update: Callable[..., Any] = lambda state, batch, rewards, values: state
    metrics: Callable[[Any, GroupBatch], dict[str, Array]] = lambda state, batch: {}
    answers: int = 1
    needs_path: bool = False
    follows_prior: bool = False
    held: bool = True
    pays_by_verdicts: bool = False
    own_cuts: bool = False
    dynamic_sampling: DynamicSampling | None = None
    declares_budget: bool = False
    read: Callable[[Any, Sequence[Sequence[int]]], dict[str, Any]] | None = None
    read_answers: Callable[[Sequence[Sequence[str]]], dict[str, Any]] | None = None
    rejection_sft: RejectionSFT | None = None
    published: Mapping[str, Published] = field(default_factory=dict)

    @functools.cached_property
    def num_cuts(self) -> int:
        """Cuts M of each trace."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        one_budget = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        return int(jax.eval_shape(self.cuts, key, one_budget).shape[-1])
