"""Defines `Method`, a set of pure functions that the training loop calls, and their data types.

The modules of this package build one `Method` each. Nothing here computes a reward or an advantage.
"""

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
    """Inputs of a method's rewards and advantages: Q questions with G rollouts each.

    Attributes:
      questions: index of each question in the training set.
      budgets: thinking budget of each rollout, in tokens.
      cuts: end of each segment, in thinking tokens. A grace window belongs to the last segment; a
        closing tag of several tokens belongs to the segment whose cut is inside the tag.
      outcomes: score of each cut in [0, 1], averaged over its answers: correctness, the score of
        a user's verifier, or the sum of several rewards weighted by `reward.weights`.
      by_answer: score of every answer of a cut.
      thinking: thinking tokens of each rollout.
      lengths: response tokens of each rollout: thinking and the answer at its end, without forced
        tokens.
      closed: True if the thinking ended by itself, before the budget.
      closed_by_tag: True if the thinking ended with its closing tag, not by ending the turn.
      surprise: sum of (1 - p)^2 over each thinking segment (`advantages.segment_surprise`).
      fraction: share of training done, in [0, 1].
      extra: [Q, G] numbers that the method's `read` and `read_answers` extracted from the text.
      path: squared norms of the scores in the logits, summed up to each thinking token, 0 after the
        last one (`advantages.token_baseline`); None unless the method `needs_path`.
      answer_lengths: sampled tokens of the first answer at each cut.
      sampled: sampled tokens of each rollout before its answer, which are in the loss: thinking and
        closing tag.
      by_reward: score of every answer by each reward of `reward.weights`, correctness included;
        empty if correctness is the only reward.
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
    """Advantages of a batch, as a method returns them to the learner.

    Attributes:
      thinking: advantage of each thinking segment (tokens up to cut j, after cut j - 1).
      answers: advantage of the answers at each cut, before the advantages of cuts that share an
        answer are added; [Q, G, M], or one more axis with several answers per cut.
      baseline: number that the method subtracts from `returns`, for the metrics.
      returns: return of each thinking segment before baseline and scale; None for the rewards.
      keep: rollouts that count in the loss; None for all.
      tokens: advantage of each thinking token; None if the tokens of a segment share its advantage.
    """

    thinking: Float[Array, "Q G M"]
    answers: Float[Array, "Q G M"] | Float[Array, "Q G M A"]
    baseline: Float[Array, "Q G M"]
    returns: Float[Array, "Q G M"] | None = None
    keep: Bool[Array, "Q G"] | None = None
    tokens: Float[Array, "Q G T"] | None = None


@dataclass(frozen=True)
class DynamicSampling:
    """Settings of dynamic sampling: more questions are sampled until enough are useful (DAPO).

    Attributes:
      keep: `GroupBatch` -> bool [Q], True for useful questions.
      max_rounds: most rounds of sampling in an iteration, the first one included.
    """

    keep: Callable[[GroupBatch], Bool[Array, "Q"]]
    max_rounds: int


@dataclass(frozen=True)
class RejectionSFT:
    """Settings of a supervised stage before training, on correct responses of the policy.

    Attributes:
      questions: number of training questions, each answered once; None for all.
      steps: number of optimizer steps.
      learning_rate: constant learning rate of the stage.
      batch_tokens: tokens per step, padding included.
      opening: length of a response in tokens -> text before the response, which is also learned.
      update_state: (state, lengths [n], correct [n]) -> the method's state after the stage, for n
        training questions; the length is 0 if the question was not answered.
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
      value: prescribed value of the config key.
      source: section or code with the value, or who chose it if the publication has none.
      defining: True if another value makes it another method; such a config is refused.
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

    The loop jits the functions on arrays with the method as a static argument, which is only equal
    to itself. `state` is a pytree of the method, saved with every checkpoint.

    Attributes:
      name: name of the method, for the user.
      conditioned: True if the budget is an input of the policy, as an embedding.
      uses_value: True if a value head predicts rewards.
      question_weights: (curriculum, group sizes [K]) -> probability of each difficulty group [K].
      sample_budgets: (key, curriculum, groups [Q]) -> budgets [Q, G] in tokens.
      cuts: (key, budgets [Q, G]) -> truncation points [Q, G, M] in tokens, nondecreasing.
      rewards: (state, `GroupBatch`) -> rewards [Q, G, M].
      advantages: (state, `GroupBatch`, rewards, values or None) -> `Advantages`.
      init_state: number of training questions -> state before training.
      update: (state, `GroupBatch`, rewards, values or None) -> state after the batch.
      metrics: (state, `GroupBatch`) -> scalars by `group/name`, from the state before the batch.
      answers: answers A sampled at every cut.
      needs_path: True if the method reads `GroupBatch.path`, which takes a forward pass of the
        learner.
      follows_prior: True if traces end at budgets drawn from `budget.prior`; False if the method
        chooses the budgets.
      held: True if a trace is cut at its budget. False if it is cut at `budget.max` and its budget
        is only in the prompt.
      pays_by_verdicts: True if rewards depend on whether an answer is right, which cannot be read
        from a mixture of rewards (`reward.weights`).
      own_cuts: True if cuts are shares of the budget, which are scaled to each trace's length.
      dynamic_sampling: when to sample more questions; None for never.
      declares_budget: True if responses open with a budget, in a separate prompt format.
      read: (tokenizer, sampled thinking ids by row) -> arrays [rows] for `GroupBatch.extra`, on
        the host; None if the method does not read the thinking.
      read_answers: (text of each answer, with its tags, by row) -> arrays [rows] for
        `GroupBatch.extra`; None if only the grader reads the answers.
      rejection_sft: supervised stage of the method before training; None if it has none.
      published: settings that the publication prescribes, by config key, of the keys that the
        method reads. A config with another value departs from the publication, or is refused if the
        setting defines the method. Always empty for a user's method, also if it was built from a
        method of this package.
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
        """Returns the number of cuts M of each trace, from the shape of `cuts` only."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        one_budget = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        cuts = jax.eval_shape(self.cuts, key, one_budget)
        return int(cuts.shape[-1])
