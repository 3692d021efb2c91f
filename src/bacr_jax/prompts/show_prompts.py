"""Prompts as a model reads them, for people: special tokens visible, control characters escaped."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bacr_jax.config import Config
from bacr_jax.config.checks import BUDGET
from bacr_jax.errors import printable
from bacr_jax.prompts.encoding import encode_prompts, opener, user_message
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.markup import markup_warning
from bacr_jax.prompts.tokenizers import decode_ids
from bacr_jax.prompts.told import budget_words, largest_told, told_prompts
from bacr_jax.questions.question_set import QuestionSet


def shown_prompts(
    config: Config, style: PromptFormat, questions: QuestionSet, tokenizer: Any, *, count: int
) -> Iterator[str]:
    r"""Lines of what a model reads of the first `count` questions of a set, and what follows.

    Without a tokenizer the messages are shown before any chat template. The end of a line in the
    prompt is "\n" and a new line.
    """
    words, largest = budget_words(config, style), largest_told(config)
    some = questions.take(np.arange(min(count, len(questions))))
    said = f", told a budget of {largest}" if words else ""
    yield f"{questions.name}, prompt format {style.name}{said}"
    if tokenizer is None:
        yield "no tokenizer there: the messages, as its chat template will get them"
        texts = [
            _messages(style, text, words.replace(BUDGET, str(largest))) for text in some.questions
        ]
        heads = [""] * len(some)
    else:
        warning = markup_warning(tokenizer, style, [questions.questions])
        if warning is not None:
            yield warning
        rows = prompt_ids(config, style, words, some.questions, tokenizer)
        texts = [decode_ids(tokenizer, row) for row in rows]
        limit = config.data.max_prompt_tokens
        over = f", over data.max_prompt_tokens={limit}: left out"
        heads = [f", {len(row):,} tokens{over if len(row) > limit else ''}" for row in rows]
    for place, (text, head) in enumerate(zip(texts, heads, strict=True)):
        yield f"--- {some.ids[place]}{head}"
        yield visible(text)
    yield "---"
    opened = "the chat template or else the prompt format"
    if tokenizer is not None:
        opened = opener(tokenizer, style)
    close = style.think_close or "the end of the turn"
    yield f"thinking begins here, opened by {opened}, and goes up to {visible(close, joined=True)}"
    yield "or the budget; then is put"
    yield f"  where the budget cut it: {visible(style.forced_suffix, joined=True)}"
    yield f"  where it ended by itself: {visible(style.natural_suffix, joined=True)}"
    yield f"and the answer follows, up to: {visible(style.answer_close, joined=True)}"


def visible(text: str, *, joined: bool = False) -> str:
    r"""Text in which nothing is hidden: control characters as escapes, line ends as "\n" too.

    Joined, line ends are "\n" alone.
    """
    return ("\\n" if joined else "\\n\n").join(map(printable, text.split("\n")))


def _messages(style: PromptFormat, question: str, said: str) -> str:
    """System and user message of a chat format, or the whole prompt of another."""
    user = user_message(style, question.strip(), said)
    if not style.chat:
        return user + style.think_open
    system = f"[system] {style.system}\n" if style.system else ""
    return f"{system}[user] {user}\n[assistant] {style.think_open}"


def prompt_ids(
    config: Config, style: PromptFormat, words: str, texts: Sequence[str], tokenizer: Any
) -> list[list[int]]:
    """Tokens of prompts, however long; the largest budget is told if `words` tell one."""
    most, largest = 1 << 30, largest_told(config)
    prompts, _ = encode_prompts(tokenizer, texts, style, max_tokens=most)
    if words:
        told, _ = told_prompts(tokenizer, texts, style, words, largest=largest, max_tokens=most)
        everyone = np.arange(len(texts))
        prompts = told.at(everyone, np.full_like(everyone, largest), prompts)
    rows = zip(np.asarray(prompts.tokens), np.asarray(prompts.lengths))
    return [tokens[:length].tolist() for tokens, length in rows]
