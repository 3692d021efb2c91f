"""Displays prompts as the model reads them, with visible special tokens and control characters."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bacr_jax.config.checks import BUDGET
from bacr_jax.config.settings import TaskSettings
from bacr_jax.errors import printable
from bacr_jax.prompts.budget_prompt import budget_words, make_budget_prompts
from bacr_jax.prompts.encoding import encode_prompts, opener, user_message
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.markup import markup_warning
from bacr_jax.prompts.tokenizers import decode_ids
from bacr_jax.questions.question_set import QuestionSet


def shown_prompts(
    task: TaskSettings,
    style: PromptFormat,
    questions: QuestionSet,
    tokenizer: Any,
    *,
    count: int,
) -> Iterator[str]:
    r"""Yields lines that display the prompts of a set's first questions, and what follows them.

    Line breaks in the prompt are displayed as "\n" followed by a line break.

    Args:
      tokenizer: tokenizer of the model. None displays the messages without a chat template.
      count: number of questions to display.
    """
    words = budget_words(task.budget_text, style)
    largest = task.largest_budget
    some = questions.take(np.arange(min(count, len(questions))))
    budget = f", with a budget of {largest}" if words else ""
    yield f"{questions.name}, prompt format {style.name}{budget}"
    if tokenizer is None:
        yield (
            "no tokenizer is available: these are the messages that its chat template will format"
        )
        sentence = words.replace(BUDGET, str(largest))
        texts = [_messages(style, text, sentence) for text in some.questions]
        details = [""] * len(some)
    else:
        warning = markup_warning(tokenizer, style, [questions.questions])
        if warning is not None:
            yield warning
        rows = prompt_ids(style, words, largest, some.questions, tokenizer)
        texts = [decode_ids(tokenizer, row) for row in rows]
        details = [_length_detail(len(row), task.data.max_prompt_tokens) for row in rows]
    for id_, text, detail in zip(some.ids, texts, details, strict=True):
        yield f"--- {id_}{detail}"
        yield visible(text)
    yield "---"
    yield from _continuation(style, tokenizer)


def _length_detail(num_tokens: int, limit: int) -> str:
    """Returns the length of a prompt as text, with a note if it exceeds the limit."""
    detail = f", {num_tokens:,} tokens"
    if num_tokens > limit:
        detail += f", over data.max_prompt_tokens={limit}: left out"
    return detail


def _continuation(style: PromptFormat, tokenizer: Any) -> Iterator[str]:
    """Yields lines that describe what follows the prompt: thinking, suffixes and answer."""
    opened = "the chat template or else the prompt format"
    if tokenizer is not None:
        opened = opener(tokenizer, style)
    close = style.think_close or "the end of the turn"
    yield (
        f"thinking begins here, opened by {opened}, and continues up to "
        f"{visible(close, joined=True)}"
    )
    yield "or until the budget is used up; then this text is inserted"
    yield f"  if the thinking was truncated: {visible(style.forced_suffix, joined=True)}"
    yield f"  if the policy ended it: {visible(style.natural_suffix, joined=True)}"
    yield f"and the answer follows, up to {visible(style.answer_close, joined=True)}"


def visible(text: str, *, joined: bool = False) -> str:
    r"""Escapes control characters and line breaks of a text.

    Args:
      joined: if True, line breaks are replaced with "\n". If False, a line break follows each "\n".
    """
    line_end = "\\n" if joined else "\\n\n"
    return line_end.join(printable(line) for line in text.split("\n"))


def _messages(style: PromptFormat, question: str, sentence: str) -> str:
    """Returns the system and user message of a chat format, or the whole prompt of another format.

    Args:
      sentence: sentence with the budget at the end of the user message, or an empty string.
    """
    user = user_message(style, question.strip(), sentence)
    if not style.chat:
        return user + style.think_open
    system = f"[system] {style.system}\n" if style.system else ""
    return f"{system}[user] {user}\n[assistant] {style.think_open}"


def prompt_ids(
    style: PromptFormat, words: str, largest: int, texts: Sequence[str], tokenizer: Any
) -> list[list[int]]:
    """Tokenizes prompts without a length limit.

    Args:
      words: sentence with a placeholder for the budget. Empty for prompts without a budget.
      largest: budget that replaces the placeholder.

    Returns:
      The token ids of each prompt.
    """
    no_limit = 1 << 30
    prompts, _ = encode_prompts(tokenizer, texts, style, max_tokens=no_limit)
    if words:
        budget_prompts, _ = make_budget_prompts(
            tokenizer, texts, style, words, largest=largest, max_tokens=no_limit
        )
        index = np.arange(len(texts))
        prompts = budget_prompts.at(index, np.full_like(index, largest), prompts)
    rows = zip(np.asarray(prompts.tokens), np.asarray(prompts.lengths))
    return [tokens[:length].tolist() for tokens, length in rows]
