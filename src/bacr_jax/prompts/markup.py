"""Detects texts that contain tokens of the chat template, which a model reads as markup."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bacr_jax.errors import first_of
from bacr_jax.prompts.decode_rules import DecodeRules
from bacr_jax.prompts.encoding import frame
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.stop_strings import vocabulary

# Maximum number of tokens listed in the warning.
_MOST_NAMED = 3


def control_tokens(tokenizer: Any, style: PromptFormat) -> list[str]:
    """Returns all special tokens, and all other added tokens in the prompt around a question."""
    around = "".join(frame(tokenizer, style))
    texts = []
    for token in tokenizer.added_tokens_decoder.values():
        is_control = token.special or token.content in around
        if is_control and token.content.strip():
            texts.append(token.content)
    return texts


def reserved_texts(tokenizer: Any, style: PromptFormat, rules: DecodeRules) -> list[str]:
    """Returns the texts that must not occur in a supervised trace or answer.

    These are the tags of the prompt format, the tokens that end the turn, and the added tokens that
    are never sampled, such as the start of a turn. Some tokenizers have added tokens that are a
    single ordinary character, which are not reserved.
    """
    texts = [style.think_open, style.think_close, style.answer_close]
    all_tokens = vocabulary(tokenizer)
    texts += [all_tokens[index].decode(errors="replace") for index in np.flatnonzero(rules.eos)]
    allowed = np.asarray(rules.allowed_tokens)
    for index, token in tokenizer.added_tokens_decoder.items():
        is_character = not token.special and len(token.content.strip()) == 1
        if not allowed[index] and not is_character:
            texts.append(token.content)
    # Formats may end an answer with a blank line, which is ordinary text.
    return [text for text in dict.fromkeys(text.strip() for text in texts) if text]


def markup_warning(
    tokenizer: Any, style: PromptFormat, sets: Iterable[Sequence[str]]
) -> str | None:
    """Returns a warning about questions that contain control tokens, or None if there are none.

    Prompt formats without a chat template do not have control tokens.

    Args:
      sets: questions of each set.
    """
    if not style.chat:
        return None
    tokens = control_tokens(tokenizer, style)
    questions = [text for texts in sets for text in texts]
    # A dictionary preserves the order of first occurrence.
    seen: dict[str, None] = {}
    count = 0
    for text in questions:
        contained = [token for token in tokens if token in text]
        seen.update(dict.fromkeys(contained))
        if contained:
            count += 1
    if not count:
        return None
    return (
        f"warning: {count:,} of {len(questions):,} questions contain special tokens of the chat "
        f"template ({first_of(list(seen), _MOST_NAMED)}), which the model interprets as markup "
        "instead of text; remove them from the questions"
    )
