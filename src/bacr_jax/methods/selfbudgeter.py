"""SelfBudgeter (arXiv 2505.11274): the response declares its budget first, and then keeps to it.

No code is public. What follows the publication and what is recalled or inferred is said in
`declared_budget_reward` and at the keys of `config.SelfBudgeterConfig`.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from bacr_jax.config import Config, SelfBudgeterConfig
from bacr_jax.config.values import written
from bacr_jax.methods import grpo_family as family
from bacr_jax.methods.method import GroupBatch, Method, Published, RejectionSFT
from bacr_jax.prompts.formats import format_for
from bacr_jax.prompts.stop_strings import vocabulary
from bacr_jax.types import Scalar

_RECALLED = "recalled, not checked in print"
# Whether its GRPO has a divergence term is not known; loss.kl_coef is free.
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

# A budget of more digits is no budget.
_NUMBER = re.compile(rb"\s*(\d{1,6})\s*")


def alpha_schedule(fraction: Scalar, *, start: float = 6.0, end: float = 0.1) -> Float[Array, ""]:
    """Tolerance of the declared budget, tightened linearly over training.

    Args:
      start: tolerance at 0, as a fraction of the declared budget.
    """
    return jnp.asarray(start + (end - start) * jnp.clip(fraction, 0.0, 1.0), jnp.float32)


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
    """Reward of a response, by its form, its verdict and its length.

    Malformed responses get `format_penalty`. Others are paid for how near their length is to the
    budget that they declared,

        low                                                          if |l - b| > alpha b
        low + (high - low) (1 + cos(pi |l - best| / (2 alpha b))) / 2    otherwise

    best at (1 - alpha) b when correct and (1 + alpha) b when wrong, plus `budget_penalty` if b
    exceeds the question's limit. The published description gives the two ends and the best point;
    the cosine of width 2 alpha b is the only one that starts at `high` in one end and reaches `low`
    in the other. The constants keep the publication's constraint that a correct answer is never
    worse than a wrong one, correct_low + penalty >= wrong_high, but their values are not published
    in full: treat them as settings.

    Args:
      lengths: solution lengths l, in tokens.
      budgets: b, in tokens; anything where malformed.
      limits: length of the base model's response to the question if it was correct, else inf.
      alpha: tolerance as a fraction of b (`alpha_schedule`).
    """
    chex.assert_equal_shape([well_formed, correct, lengths, budgets, limits])
    b = budgets.astype(jnp.float32)
    least = jnp.maximum(b, 1.0)
    # Lengths exactly at the tolerance count as inside; 1e-6 absorbs the rounding of alpha * b.
    inside = jnp.abs(lengths - least) <= (alpha + 1e-6) * least

    def match(best: Array, low: float, high: float) -> Array:
        bend = jnp.cos(np.pi * jnp.minimum(jnp.abs(lengths - best) / (2.0 * alpha * least), 1.0))
        return jnp.where(inside, low + (high - low) * 0.5 * (1.0 + bend), low)

    right = match((1.0 - alpha) * b, *settings.correct_range)
    wrong = match((1.0 + alpha) * b, *settings.wrong_range)
    is_right = jnp.asarray(correct).astype(jnp.float32) > 0.5
    over = jnp.where(b > limits, settings.budget_penalty, 0.0)
    parsed = jnp.asarray(well_formed).astype(bool)
    return jnp.where(parsed, jnp.where(is_right, right, wrong) + over, settings.format_penalty)


def declared_budget(pieces: Sequence[bytes], close: bytes) -> tuple[int, int]:
    """The budget that a response opens with, and the number of tokens spent on saying so.

    Returns:
      Budget and tokens; (0, 0) where the response does not open with a positive whole number and
      `close`.
    """
    before, closed, _ = b"".join(pieces).partition(close)
    number = _NUMBER.fullmatch(before) if closed else None
    if number is None or not int(number[1]):
        return 0, 0
    ends = itertools.accumulate(map(len, pieces))
    return int(number[1]), 1 + sum(end < len(before) + len(close) for end in ends)


def problems(config: Config) -> Iterator[str]:
    """What is wrong with the settings of this method."""
    settings = config.selfbudgeter
    yield from family.problems(config)
    for name in ("correct_range", "wrong_range"):
        given = getattr(settings, name)
        if len(given) != 2 or given[0] > given[1]:
            yield f"selfbudgeter.{name}: found {written(given)}; write [low, high]"
            return
    if settings.correct_range[0] + settings.budget_penalty < settings.wrong_range[1]:
        yield (
            f"selfbudgeter.budget_penalty={written(settings.budget_penalty)}: a correct response "
            "could earn less than a wrong one; write at least "
            f"{written(settings.wrong_range[1] - settings.correct_range[0])}"
        )


def solution_lengths(batch: GroupBatch) -> Int[Array, "Q G"]:
    """Response tokens without those of the declaration."""
    return batch.lengths - batch.extra["declaration"]


def well_formed(batch: GroupBatch) -> Bool[Array, "Q G"]:
    """Responses that declare a budget and close their solution with its tag."""
    return (batch.extra["declared"] > 0) & batch.closed_by_tag


def no_limits(num_questions: int) -> Float[Array, "n"]:
    """Limits on the declared budgets before the first stage: none."""
    return jnp.full(num_questions, jnp.inf, jnp.float32)


def first_stage(config: Config, close: str) -> RejectionSFT:
    """The stage that teaches to open with a budget: one's own length, then what ends it."""
    settings = config.selfbudgeter
    rate = settings.cold_start_rate
    return RejectionSFT(
        questions=settings.cold_start_questions,
        steps=settings.cold_start_steps,
        learning_rate=4.0 * config.optimizer.learning_rate if rate is None else rate,
        batch_tokens=settings.cold_start_tokens,
        opening=lambda length: f"{length}{close}",
        # Limits on the declared budgets are then the lengths of its correct responses.
        update_state=lambda limits, lengths, correct: jnp.where(
            jnp.asarray(correct) > 0.5, jnp.asarray(lengths, jnp.float32), limits
        ),
    )


def make(config: Config) -> Method:
    """GRPO on the budget-matching reward.

    The state holds what each question's response by the first policy cost, where it was correct:
    declaring more than that is punished.
    """
    settings = config.selfbudgeter
    close = format_for(config, declares_budget=True).budget_close

    def read(tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        texts = vocabulary(tokenizer)
        pairs = [declared_budget([texts[i] for i in row], close.encode()) for row in rows]
        declared, spent = np.array(pairs, np.int32).reshape(-1, 2).T
        return {"declared": declared, "declaration": spent}

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
        formed, declared = well_formed(batch), batch.extra["declared"]
        count = jnp.maximum(formed.sum(), 1)
        ratio = solution_lengths(batch) / jnp.maximum(declared, 1)
        return {
            "selfbudgeter/alpha": alpha(batch),
            "selfbudgeter/well_formed": formed.mean(),
            "selfbudgeter/declared": jnp.where(formed, declared, 0).sum() / count,
            "selfbudgeter/length_ratio": jnp.where(formed, ratio, 0.0).sum() / count,
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
