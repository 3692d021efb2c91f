"""SelfBudgeter (arXiv 2505.11274): the response declares its budget first, and then keeps to it.

No code is public. What follows the publication and what is recalled or inferred is said in
`baselines.selfbudgeter_reward` and at the keys of `config.SelfBudgeterConfig`.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.data.prompts import format_for
from bacr_jax.data.stop_strings import vocabulary
from bacr_jax.methods import baselines
from bacr_jax.methods.grpo_family import single_budget
from bacr_jax.methods.method import ColdStart, Method, Observed
from bacr_jax.types import Prompts

# A budget of more digits is no budget.
_NUMBER = re.compile(rb"\s*(\d{1,6})\s*")


def declared_budget(pieces: Sequence[bytes], close: bytes) -> tuple[int, int]:
    """The budget that a response opens with, and the number of tokens spent on saying so.

    Args:
      pieces: text of each sampled token.
      close: what ends the declaration.

    Returns:
      Budget and tokens; (0, 0) where the response does not open with a positive whole number and
      `close`.
    """
    text = b""
    for count, piece in enumerate(pieces, 1):
        text += piece
        before, found, _ = text.partition(close)
        if found:
            number = _NUMBER.fullmatch(before)
            return (int(number[1]), count) if number and int(number[1]) else (0, 0)
    return 0, 0


def prefill(prompts: Prompts, declaration: Int[np.ndarray, "n"]) -> Prompts:
    """Prompts in which the user has declared the budget: ids put at the end of every row.

    Args:
      prompts: right-padded prompts that end with the opening tag.
      declaration: ids of the number and of the closing tag.

    Returns:
      Prompts, wider by the declaration.
    """
    rows, count = len(prompts.lengths), len(declaration)
    tokens: Any = np.pad(np.asarray(prompts.tokens), ((0, 0), (0, count)))
    at = np.asarray(prompts.lengths)[:, None] + np.arange(count)
    tokens[np.arange(rows)[:, None], at] = declaration
    longer: Any = np.asarray(prompts.lengths) + count
    return Prompts(tokens, longer, prompts.question_start, prompts.question_end)


def make(config: Config) -> Method:
    """GRPO on the budget-matching reward.

    The state holds what each question's response by the first policy cost, where it was correct:
    declaring more than that is punished.
    """
    settings = config.selfbudgeter
    close = format_for(config).budget_close

    def read(tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        texts = vocabulary(tokenizer).texts
        found = [declared_budget([texts[i] for i in row], close.encode()) for row in rows]
        declared, spent = np.array(found, np.int32).reshape(-1, 2).T
        return {"declared": declared, "declaration": spent}

    def alpha(seen: Observed) -> Float[Array, ""]:
        return baselines.alpha_schedule(
            seen.fraction, start=settings.alpha_start, end=settings.alpha_end
        )

    def solution(seen: Observed) -> Int[Array, "Q G"]:
        return seen.lengths - seen.extra["declaration"]

    def well_formed(seen: Observed) -> Array:
        return (seen.extra["declared"] > 0) & seen.closed

    def reward(limits: Float[Array, "n"], seen: Observed) -> Float[Array, "Q G"]:
        declared = seen.extra["declared"]
        low_right, high_right = settings.correct_range
        low_wrong, high_wrong = settings.wrong_range
        return baselines.selfbudgeter_reward(
            well_formed(seen),
            seen.outcomes[..., -1],
            solution(seen),
            declared,
            jnp.broadcast_to(limits[seen.questions][:, None], declared.shape),
            alpha=alpha(seen),
            correct_range=(low_right, high_right),
            wrong_range=(low_wrong, high_wrong),
            budget_penalty=settings.budget_penalty,
            format_penalty=settings.format_penalty,
        )

    def init_state(num_questions: int) -> Float[Array, "n"]:
        return jnp.full(num_questions, jnp.inf, jnp.float32)

    def remember(
        limits: Float[Array, "n"], lengths: np.ndarray, correct: np.ndarray
    ) -> Float[Array, "n"]:
        return jnp.where(jnp.asarray(correct) > 0.5, jnp.asarray(lengths, jnp.float32), limits)

    def metrics(limits: Float[Array, "n"], seen: Observed) -> dict[str, Array]:
        formed = well_formed(seen)
        count = jnp.maximum(formed.sum(), 1)
        ratio = solution(seen) / jnp.maximum(seen.extra["declared"], 1)
        return {
            "selfbudgeter/alpha": alpha(seen),
            "selfbudgeter/well_formed": formed.mean(),
            "selfbudgeter/declared": jnp.where(formed, seen.extra["declared"], 0).sum() / count,
            "selfbudgeter/length_ratio": jnp.where(formed, ratio, 0.0).sum() / count,
        }

    rate = settings.cold_start_rate
    start = ColdStart(
        questions=settings.cold_start_questions,
        steps=settings.cold_start_steps,
        learning_rate=4.0 * config.optimizer.learning_rate if rate is None else rate,
        batch_tokens=settings.cold_start_tokens,
        opening=lambda length: f"{length}{close}",
        remember=remember,
    )
    return single_budget(
        config,
        "SelfBudgeter",
        advantages.grpo_advantage,
        reward=reward,
        init_state=init_state,
        metrics=metrics,
        read=read,
        cold_start=start,
        loss={"kl_coef": 0.0},
    )
