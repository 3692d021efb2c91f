"""One question, asked of a policy at one or several thinking budgets."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bacr_jax.config import EvalConfig
from bacr_jax.config.budgets import cap
from bacr_jax.data.environment import make_rules
from bacr_jax.data.prompts import PromptFormat, encode_prompts
from bacr_jax.data.tokenizers import answer_text, decode_ids
from bacr_jax.data.told import budget_words, told_prompts
from bacr_jax.errors import UserError
from bacr_jax.evaluation.checks import check_grace
from bacr_jax.evaluation.decoder import open_decoder, with_declared_budget
from bacr_jax.learner import policy as policies
from bacr_jax.rollout import Rollout, generate, sampling_params
from bacr_jax.runs.open import SavedPolicy
from bacr_jax.types import NO_BUDGET, Prompts


@dataclass(frozen=True)
class Answer:
    """What the policy said at one budget.

    Attributes:
      thinking: text of the thinking.
      thinking_tokens: its length, without a closing tag.
      forced_tokens: tokens put between thinking and answer.
      answer_tokens: sampled answer, its closing tag included.
      answer: text of the answer, without its tags.
    """

    thinking: str
    thinking_tokens: int
    forced_tokens: int
    answer_tokens: int
    answer: str


def ask(
    saved: SavedPolicy,
    question: str,
    budgets: Sequence[int | None],
    *,
    style: PromptFormat,
    temperature: float,
    top_p: float,
    seed: int,
    say: Callable[[str], Any] | None = None,
) -> list[Answer]:
    """Decodes the answers at all budgets together.

    Args:
      saved: the policy, with the settings it is decoded with.
      question: text.
      budgets: thinking tokens; None: the policy is told none and thinks up to budget.cap tokens.
      style: prompt format.
      temperature: 0: the most likely tokens.
      top_p: nucleus.
      seed: of sampled answers.
      say: takes the thinking at the first budget piece by piece while it is decoded.

    Returns:
      An answer per budget.

    Raises:
      UserError: the policy, the question or a budget can't be used.
    """
    config, tokenizer = saved.config, saved.tokenizer()
    check_grace(config, tokenizer)
    vocab_size = policies.vocabulary_rows(config, len(tokenizer))
    prompts, _ = encode_prompts(
        tokenizer, [question], style, max_tokens=config.data.max_prompt_tokens
    )
    told = np.array([NO_BUDGET if budget is None else budget for budget in budgets], np.int32)
    words = budget_words(config, style)
    if words:
        waiting, _ = told_prompts(
            tokenizer,
            [question],
            style,
            words,
            largest=int(told.max(initial=0)),
            max_tokens=config.data.max_prompt_tokens,
        )
        one = np.zeros(len(budgets), np.int64)
        prompts = waiting.at(one, told, jax.tree.map(lambda x: np.asarray(x)[one], prompts))
    else:
        prompts = prompt_per_budget(prompts, tokenizer, style, budgets, config.eval)
    limits = np.array([cap(config) if budget is None else budget for budget in budgets], np.int32)
    longest = max(int(limits.max()), 1)
    positions = policies.model_shape(config, vocab_size).max_positions
    free = positions - int(prompts.lengths.max()) - config.rollout.answer_tokens
    free -= config.budget.grace
    if longest > free:
        written = ",".join("none" if budget is None else str(budget) for budget in budgets)
        raise UserError(
            f"--budget {written}: the model's {positions} positions leave {free} for thinking; "
            "write a smaller budget" + (", or budget.cap" if None in budgets else "")
        )
    decoder = open_decoder(saved, vocab_size, max_thinking=longest, slots=len(budgets))
    rollout = generate(
        decoder.params,
        prompts,
        told,
        limits[:, None],
        jax.random.key(seed),
        spec=decoder.spec,
        rules=make_rules(tokenizer, style, vocab_size),
        sampling=sampling_params(temperature, top_p),
        phi_of=decoder.phi_of,
        limits=limits,
        on_tokens=None if say is None else _Live(lambda ids: decode_ids(tokenizer, ids), say),
    )
    return _answers(rollout, tokenizer, style)


def _answers(rollout: Rollout, tokenizer: Any, style: PromptFormat) -> list[Answer]:
    """The texts of each row."""
    trunks, branches = rollout.trunks, rollout.branches
    tags = {"opened": style.answer_open, "closed": style.answer_close}

    def answer_of(row: int) -> Answer:
        start, end = branches.forced[row, 0], branches.forced[row, 0] + branches.sampled[row, 0]
        thinking = trunks.tokens[row, trunks.prompt_lengths[row] :][: trunks.sampled[row]]
        return Answer(
            thinking=decode_ids(tokenizer, thinking.tolist()),
            thinking_tokens=int(trunks.thinking[row]),
            forced_tokens=int(branches.forced[row, 0]),
            answer_tokens=int(branches.sampled[row, 0]),
            answer=answer_text(tokenizer, branches.tokens[row, 0, start:end].tolist(), **tags),
        )

    return [answer_of(row) for row in range(len(trunks.budgets))]


def prompt_per_budget(
    prompts: Prompts,
    tokenizer: Any,
    style: PromptFormat,
    budgets: Sequence[int | None],
    config: EvalConfig,
) -> Prompts:
    """The only prompt once per budget, with the budget in it where the format has a place for it.

    Args:
      prompts: one row.
      tokenizer: of the policy.
      style: prompt format.
      budgets: thinking tokens; None is never in a prompt.
      config: whether the policy is given its budget.
    """
    numbers = tuple(budget for budget in budgets if budget is not None)
    settings = dataclasses.replace(config, budgets=numbers)
    rows = [
        prompts
        if budget is None
        else with_declared_budget(prompts, tokenizer, style, settings, budget)
        for budget in budgets
    ]
    width = max(row.tokens.shape[1] for row in rows)
    wide: Callable[[Any], Any] = lambda x: np.pad(np.asarray(x), ((0, 0), (0, width - x.shape[1])))
    rows = [dataclasses.replace(row, tokens=wide(row.tokens)) for row in rows]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)


class _Live:
    """Writes the thinking while it comes; a character of several tokens waits until it is whole."""

    def __init__(self, decode: Callable[[list[int]], str], say: Callable[[str], Any]):
        self.decode, self.say, self.ids, self.shown = decode, say, list[int](), 0

    def __call__(self, row: int, tokens: Any) -> None:
        """Takes the new tokens of a row; those of the first one are written."""
        if row:
            return
        self.ids += [int(token) for token in tokens]
        text = self.decode(self.ids).rstrip("\N{REPLACEMENT CHARACTER}")
        self.say(text[self.shown :])
        self.shown = max(self.shown, len(text))
