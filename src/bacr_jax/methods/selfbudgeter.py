"""SelfBudgeter (arXiv 2505.11274): a response declares a budget and is rewarded for matching it.

The code of the publication is not public. `declared_budget_reward` and the comments in
`config.SelfBudgeterConfig` distinguish between parts that are published, recalled from memory, and
inferred.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from bacr_jax.config import SelfBudgeterConfig
from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.values import written
from bacr_jax.methods import grpo_family as family
from bacr_jax.methods.method import GroupBatch, Method, Published, RejectionSFT
from bacr_jax.prompts.formats import format_for
from bacr_jax.prompts.stop_strings import vocabulary
from bacr_jax.types import Scalar

_RECALLED = "recalled, not checked in print"
# loss.kl_coef is not listed, because it is unknown if the publication's loss has a KL term.
PUBLISHED = {
    "loss.aggregate": Published("seq_mean_token_mean", "GRPO's"),
    **family.CLIPPED,
    **family.NO_ENTROPY,
    "selfbudgeter.alpha_start": Published(6.0, "summaries of the publication", verified=False),
    "selfbudgeter.alpha_end": Published(0.1, "summaries of the publication", verified=False),
    "selfbudgeter.correct_range": Published((0.5, 1.0), _RECALLED, verified=False),
    "selfbudgeter.wrong_range": Published((-0.5, 0.0), _RECALLED, verified=False),
    "selfbudgeter.budget_penalty": Published(-0.4, _RECALLED, verified=False),
    "selfbudgeter.format_penalty": Published(-1.0, _RECALLED, verified=False),
}

# A budget has at most six digits. Longer numbers are not accepted.
_NUMBER = re.compile(rb"\s*(\d{1,6})\s*")


def alpha_schedule(fraction: Scalar, *, start: float = 6.0, end: float = 0.1) -> Float[Array, ""]:
    """Computes how much a response may deviate from its declared budget.

    The tolerance is interpolated linearly over training.

    Args:
      fraction: fraction of training completed, in [0, 1].
      start: tolerance at the start of training, as a fraction of the declared budget.
      end: tolerance at the end of training.
    """
    tolerance = start + (end - start) * jnp.clip(fraction, 0.0, 1.0)
    return jnp.asarray(tolerance, jnp.float32)


def declared_budget_reward(
    well_formed: Shaped[Array, "*batch"],
    correct: Shaped[Array, "*batch"],
    lengths: Num[Array, "*batch"],
    budgets: Num[Array, "*batch"],
    limits: Num[Array, "*batch"],
    *,
    alpha: Scalar,
    settings: SelfBudgeterConfig,
) -> Float[Array, "*batch"]:
    """Computes the reward of a response from its format, correctness and length.

    A malformed response gets `settings.format_penalty`. For all other responses, the reward depends
    on the distance between the length l and the declared budget b:

        low                                                          if |l - b| > alpha b
        low + (high - low) (1 + cos(pi |l - best| / (2 alpha b))) / 2    otherwise

    The reward range [low, high] depends on whether the response is correct. best is (1 - alpha) b
    for a correct response and (1 + alpha) b for a wrong response. `settings.budget_penalty` is
    added if b exceeds the limit of the question.

    The published description specifies the values at both ends and the position of the maximum. A
    cosine of width 2 alpha b is the only cosine that is `high` at one end and `low` at the other.
    The constants satisfy the publication's constraint that a correct answer is never worse than a
    wrong one: correct_low + penalty >= wrong_high. Their values are not fully published, so treat
    them as hyperparameters.

    Args:
      well_formed: True for responses that declare a budget and close their solution.
      correct: correctness of each response. Values above 1/2 count as correct.
      lengths: length l of each solution, in tokens.
      budgets: declared budget b, in tokens. Ignored for malformed responses.
      limits: length of the base model's response to the question if that response was correct,
        otherwise infinity.
      alpha: tolerance as a fraction of b (`alpha_schedule`).
      settings: reward ranges [low, high] and penalties.
    """
    chex.assert_equal_shape([well_formed, correct, lengths, budgets, limits])
    b = budgets.astype(jnp.float32)
    positive_b = jnp.maximum(b, 1.0)
    # The small constant 1e-6 absorbs the rounding error of alpha * b, so that lengths exactly at
    # the tolerance count as inside.
    is_inside = jnp.abs(lengths - positive_b) <= (alpha + 1e-6) * positive_b

    def match(best: Array, low: float, high: float) -> Array:
        distance = jnp.abs(lengths - best) / (2.0 * alpha * positive_b)
        cosine = jnp.cos(np.pi * jnp.minimum(distance, 1.0))
        return jnp.where(is_inside, low + (high - low) * 0.5 * (1.0 + cosine), low)

    reward_if_correct = match((1.0 - alpha) * b, *settings.correct_range)
    reward_if_wrong = match((1.0 + alpha) * b, *settings.wrong_range)
    is_correct = jnp.asarray(correct).astype(jnp.float32) > 0.5
    reward = jnp.where(is_correct, reward_if_correct, reward_if_wrong)
    penalty = jnp.where(b > limits, settings.budget_penalty, 0.0)
    is_well_formed = jnp.asarray(well_formed).astype(bool)
    return jnp.where(is_well_formed, reward + penalty, settings.format_penalty)


def declared_budget(pieces: Sequence[bytes], close: bytes) -> tuple[int, int]:
    """Parses the number at the beginning of a response, with which it declares its budget.

    Args:
      pieces: bytes of each token of the response.
      close: bytes that end the declaration.

    Returns:
      A tuple of the budget and the number of tokens of the declaration, including the tokens of
      `close`. (0, 0) if the response does not begin with a positive integer followed by `close`.
    """
    before, separator, _ = b"".join(pieces).partition(close)
    if not separator:
        return 0, 0
    number = _NUMBER.fullmatch(before)
    if number is None:
        return 0, 0
    budget = int(number[1])
    if budget == 0:
        return 0, 0
    declaration_bytes = len(before) + len(close)
    token_ends = itertools.accumulate(len(piece) for piece in pieces)
    tokens_ending_inside = sum(end < declaration_bytes for end in token_ends)
    return budget, tokens_ending_inside + 1


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each setting that is incompatible with the method."""
    settings = config.selfbudgeter
    yield from family.problems(config)
    # The first stage trains on responses in the format that all methods share, if their thinking
    # ended with its closing tag.
    shared_format = format_for(config.data)
    if not shared_format.think_close:
        yield (
            f"data.prompt_format={config.data.prompt_format}: this prompt format has no closing "
            "tag, which the supervised steps of method=selfbudgeter need; set "
            "data.prompt_format=auto"
        )
    for name in ("correct_range", "wrong_range"):
        limits = getattr(settings, name)
        if len(limits) != 2 or limits[0] > limits[1]:
            yield (
                f"selfbudgeter.{name}={written(limits)} is not a range; use [low, high] with low "
                "at most high"
            )
            return
    smallest_penalty = settings.wrong_range[1] - settings.correct_range[0]
    if settings.correct_range[0] + settings.budget_penalty < settings.wrong_range[1]:
        yield (
            f"selfbudgeter.budget_penalty={written(settings.budget_penalty)}: a correct response "
            "could get a lower reward than a wrong one; set it to at least "
            f"{written(smallest_penalty)}"
        )


def solution_lengths(batch: GroupBatch) -> Int[Array, "Q G"]:
    """Returns the number of response tokens after the budget declaration."""
    return batch.lengths - batch.extra["declaration"]


def well_formed(batch: GroupBatch) -> Bool[Array, "Q G"]:
    """True for responses that declare a budget and close their solution with the closing tag."""
    return (batch.extra["declared"] > 0) & batch.closed_by_tag


def no_limits(num_questions: int) -> Float[Array, "n"]:
    """Returns the initial upper limit on the budget that the policy may declare for each question.

    All limits are infinite.
    """
    return jnp.full(num_questions, jnp.inf, jnp.float32)


def first_stage(config: MethodSettings, close: str) -> RejectionSFT:
    """Builds the supervised stage in which the policy learns to begin with a budget.

    The declared budget is the length of the response in tokens, followed by `close`.
    """
    settings = config.selfbudgeter
    learning_rate = settings.cold_start_rate
    if learning_rate is None:
        learning_rate = 4.0 * config.optimizer.learning_rate

    def opening(length: int) -> str:
        return f"{length}{close}"

    def update_state(limits: Any, lengths: np.ndarray, correct: np.ndarray) -> Array:
        # The length of a correct response in this stage becomes the limit for budgets declared
        # later.
        is_correct = jnp.asarray(correct) > 0.5
        return jnp.where(is_correct, jnp.asarray(lengths, jnp.float32), limits)

    return RejectionSFT(
        questions=settings.cold_start_questions,
        steps=settings.cold_start_steps,
        learning_rate=learning_rate,
        batch_tokens=settings.cold_start_tokens,
        opening=opening,
        update_state=update_state,
    )


def make(config: MethodSettings) -> Method:
    """Builds SelfBudgeter: GRPO on the budget-matching reward.

    The state contains one limit per training question: the length of the initial policy's response
    if that response was correct, otherwise infinity. A response that declares a budget above the
    limit is penalized.
    """
    settings = config.selfbudgeter
    close = format_for(config.data, declares_budget=True).budget_close

    def read(tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        texts = vocabulary(tokenizer)
        declarations = []
        for row in rows:
            pieces = [texts[i] for i in row]
            declarations.append(declared_budget(pieces, close.encode()))
        columns = np.array(declarations, np.int32).reshape(-1, 2)
        return {"declared": columns[:, 0], "declaration": columns[:, 1]}

    def alpha(batch: GroupBatch) -> Float[Array, ""]:
        return alpha_schedule(batch.fraction, start=settings.alpha_start, end=settings.alpha_end)

    def reward(limits: Float[Array, "n"], batch: GroupBatch) -> Float[Array, "Q G"]:
        declared = batch.extra["declared"]
        return declared_budget_reward(
            well_formed(batch),
            batch.outcomes[..., -1],
            solution_lengths(batch),
            declared,
            jnp.broadcast_to(limits[batch.questions][:, None], declared.shape),
            alpha=alpha(batch),
            settings=settings,
        )

    def metrics(limits: Float[Array, "n"], batch: GroupBatch) -> dict[str, Array]:
        is_well_formed = well_formed(batch)
        declared = batch.extra["declared"]
        count = jnp.maximum(is_well_formed.sum(), 1)
        ratio = solution_lengths(batch) / jnp.maximum(declared, 1)
        return {
            "selfbudgeter/alpha": alpha(batch),
            "selfbudgeter/well_formed": is_well_formed.mean(),
            "selfbudgeter/declared": jnp.where(is_well_formed, declared, 0).sum() / count,
            "selfbudgeter/length_ratio": jnp.where(is_well_formed, ratio, 0.0).sum() / count,
        }

    return family.grpo_family(
        config,
        "SelfBudgeter",
        reward=reward,
        init_state=no_limits,
        metrics=metrics,
        declares_budget=True,
        pays_by_verdicts=True,
        read=read,
        rejection_sft=first_stage(config, close),
        published=PUBLISHED,
    )
