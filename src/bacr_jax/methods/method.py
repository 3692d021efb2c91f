"""Defines `Method`, the functions that a training method consists of, and their data types.

Each module that implements a training method builds a `Method`, whose functions are called by the
training loop.
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

# One number for each truncation point (cut) of each rollout, such as a reward, a value or an
# advantage.
PerCut = Float[Array, "Q G M"]


@pytree
class GroupBatch:
    """A batch of Q questions with G rollouts each, the input of a method's functions.

    A cut is a truncation point of the thinking, at which A answers are sampled and graded. A
    segment is the thinking between two consecutive cuts.

    Attributes:
      questions: index of each question in the training set.
      budgets: thinking budget of each rollout, in tokens.
      cuts: position of each cut, the end of a segment, in thinking tokens. If a trace may exceed
        its budget up to the next line break (grace window), the additional tokens are part of the
        last segment. A closing tag of several tokens is part of the segment whose cut lies inside
        the tag.
      outcomes: score of each cut in [0, 1], averaged over its answers. The score is correctness,
        the score of a user-defined verifier, or the sum of several rewards weighted by
        `reward.weights`.
      by_answer: score of each answer at each cut.
      thinking: number of thinking tokens of each rollout.
      lengths: number of response tokens of each rollout, including thinking and the final answer
        but not forced tokens.
      closed: True if the thinking ended naturally, before the budget was used up.
      closed_by_tag: True if the thinking ended with its closing tag rather than with the end of the
        turn.
      score_norm_proxy: sum of (1 - p)^2 over each thinking segment, where p is the probability of a
        sampled token (`advantages.segment_score_norm_proxy`).
      fraction: completed fraction of training, in [0, 1]. It is the larger of the fractions of the
        steps and of `train.max_generated_tokens`.
      extra: arrays [Q, G] that the method's `read` and `read_answers` extracted from the text.
      cumulative_score_norm: squared norm of the gradient of the log-probability with respect to the
        logits, accumulated up to each thinking token, and 0 after the last token
        (`advantages.token_baseline`). None unless `Method.needs_score_norms` is true.
      answer_lengths: number of sampled tokens of the first answer at each cut.
      sampled: number of sampled tokens of each rollout before its answer, which consist of thinking
        and closing tag and are part of the loss.
      by_reward: for each reward in `reward.weights`, including correctness, the score of each
        answer. Empty if correctness is the only reward.
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
    score_norm_proxy: Float[Array, "Q G M"]
    fraction: Float[Array, ""]
    extra: dict[str, Array]
    cumulative_score_norm: Float[Array, "Q G T"] | None = None
    answer_lengths: Int[Array, "Q G M"] | None = None
    sampled: Int[Array, "Q G"] | None = None
    by_reward: dict[str, Float[Array, "Q G M A"]] = field(default_factory=dict)


@pytree
class Advantages:
    """The advantages of a batch, as returned by a method to the learner.

    A cut is a truncation point of the thinking, at which an answer is sampled.

    Attributes:
      thinking: advantage of each thinking segment (tokens after cut j - 1 up to cut j).
      answers: advantage of the answers at each cut, before summing over cuts that share an answer.
        The shape is [Q, G, M], or [Q, G, M, A] with several answers per cut.
      baseline: baseline that the method subtracts from `returns`. It is only used for metrics.
      returns: return of each thinking segment before subtracting the baseline and scaling. None if
        the returns equal the rewards.
      keep: True for rollouts that are included in the loss, or None to include all rollouts.
      tokens: advantage of each thinking token, or None if all tokens of a segment have the same
        advantage.
    """

    thinking: Float[Array, "Q G M"]
    answers: Float[Array, "Q G M"] | Float[Array, "Q G M A"]
    baseline: Float[Array, "Q G M"]
    returns: Float[Array, "Q G M"] | None = None
    keep: Bool[Array, "Q G"] | None = None
    tokens: Float[Array, "Q G T"] | None = None


@dataclass(frozen=True)
class DynamicSampling:
    """The settings of dynamic sampling, which samples questions until enough are useful (DAPO).

    Attributes:
      keep: function from `GroupBatch` to bool [Q], True for useful questions.
      max_rounds: maximum number of sampling rounds per iteration, including the first round.
    """

    keep: Callable[[GroupBatch], Bool[Array, "Q"]]
    max_rounds: int


@dataclass(frozen=True)
class RejectionSFT:
    """The settings of a supervised stage on correct responses of the policy, before training.

    Attributes:
      questions: number of training questions, each of which is answered once. None for all
        questions.
      steps: number of optimizer steps.
      learning_rate: constant learning rate of this stage.
      batch_tokens: number of tokens per step, including padding.
      opening: function from the length of a response in tokens to a text that is prepended to the
        response and also trained on.
      update_state: (state, lengths [n], correct [n]) -> state of the method after this stage, for n
        training questions. The length is 0 for questions that were not answered.
    """

    questions: int | None
    steps: int
    learning_rate: float
    batch_tokens: int
    opening: Callable[[int], str]
    update_state: Callable[[Any, np.ndarray, np.ndarray], Any]


@dataclass(frozen=True)
class Published:
    """A value that a publication prescribes for a config key.

    Attributes:
      value: prescribed value.
      source: section of the publication or code that specifies the value. If the publication does
        not specify it, an explanation of who chose the value.
      defining: True if a different value would make it a different method. Configs with a different
        value are rejected.
      verified: False if the value was not checked against the publication or its released code.
        `bacr methods` lists these settings.
    """

    value: Any
    source: str
    defining: bool = False
    verified: bool = True


@dataclass(frozen=True, eq=False)
class Method:
    """A training method as a composition of pure functions.

    The training loop jits these functions on arrays, with the method as a static argument. Methods
    are compared by identity. `state` is an arbitrary pytree defined by the method and is saved in
    every checkpoint.

    Attributes:
      name: display name of the method.
      conditioned: True if the policy receives the budget as an embedding.
      uses_value: True if the method uses a value head.
      question_weights: (curriculum, group sizes [K]) -> probability of each difficulty group [K].
      sample_budgets: (key, curriculum, groups [Q]) -> budgets [Q, G] in tokens.
      cuts: (key, budgets [Q, G]) -> truncation points [Q, G, M] in tokens, nondecreasing.
      rewards: (state, `GroupBatch`) -> rewards [Q, G, M].
      advantages: (state, `GroupBatch`, rewards, values or None) -> `Advantages`.
      init_state: number of training questions -> state before training.
      update: (state, `GroupBatch`, rewards, values or None) -> state after the batch.
      metrics: (state, `GroupBatch`) -> scalars keyed by `group/name`, computed from the state
        before the batch.
      answers: number of answers A sampled at each truncation point.
      needs_score_norms: True if the method uses `GroupBatch.cumulative_score_norm`, which requires
        a forward pass of the learner.
      follows_prior: True if traces are truncated at budgets sampled from `budget.prior`. False if
        the method chooses the budgets itself.
      truncates_at_budget: True if each trace is truncated at its budget. False if traces are
        truncated at `budget.max` and the budget is only mentioned in the prompt.
      pays_by_verdicts: True if rewards depend on whether an answer is correct. Such a method cannot
        use a weighted sum of several rewards (`reward.weights`), from which correctness cannot be
        determined.
      cuts_relative_to_length: True if truncation points are fractions of the budget, which are
        rescaled to the length of each trace.
      dynamic_sampling: settings of dynamic sampling, or None to disable it.
      declares_budget: True if responses begin with a budget, which requires a separate prompt
        format.
      read: (tokenizer, sampled thinking ids per row) -> arrays [rows] for `GroupBatch.extra`. It
        runs on the host. None if the method does not use the thinking text.
      read_answers: (text of each answer per row, including tags) -> arrays [rows] for
        `GroupBatch.extra`. None if the method does not use the answer texts.
      rejection_sft: supervised stage before training, or None.
      published: settings prescribed by the publication, by config key. Keys that the method does
        not use are omitted. A different value in a config is reported as a departure, or rejected
        if the setting defines the method. Always empty for user-defined methods, even if they are
        derived from a built-in method.
      source_digest: digest of the file of a user-defined method when it was imported. None for a
        built-in method, and for a module whose code at the import is unknown. `make_method` sets
        it.
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
    needs_score_norms: bool = False
    follows_prior: bool = False
    truncates_at_budget: bool = True
    pays_by_verdicts: bool = False
    cuts_relative_to_length: bool = False
    dynamic_sampling: DynamicSampling | None = None
    declares_budget: bool = False
    read: Callable[[Any, Sequence[Sequence[int]]], dict[str, Any]] | None = None
    read_answers: Callable[[Sequence[Sequence[str]]], dict[str, Any]] | None = None
    rejection_sft: RejectionSFT | None = None
    published: Mapping[str, Published] = field(default_factory=dict)
    source_digest: str | None = None

    @functools.cached_property
    def num_cuts(self) -> int:
        """Returns the number of truncation points per trace, from the output shape of `cuts`."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        one_budget = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        cuts = jax.eval_shape(self.cuts, key, one_budget)
        return int(cuts.shape[-1])
