"""Digests of a policy's tokenizer, chat template and prompts.

A checkpoint stores them, so that resuming, evaluation and export refuse an edited template or
vocabulary.
"""

import hashlib
import json
from typing import Any

import numpy as np

from bacr_jax.prompts.encoding import encode_text, eos_ids, frame
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.stop_strings import vocabulary
from bacr_jax.prompts.tokenizers import is_refusal
from bacr_jax.prompts.told import ToldPrompts
from bacr_jax.types import Prompts

# Contains words, numbers and symbols that tokenizers split in different ways.
_TEXT = (
    "How many of the 1,234 numbers x satisfy 3x^2 - 12 = \\frac{1}{2}?\n\n  It's über 数\U0001f642."
)


def _digest(*parts: Any) -> str:
    """Returns the first 12 digits of the SHA-256 of parts as JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Identifies a tokenizer by the texts of all its ids, and by its ids of one text."""
    texts = vocabulary(tokenizer)
    content = hashlib.sha256(b"".join(texts)).hexdigest()
    try:
        ids = encode_text(tokenizer, _TEXT).tolist()
    # A tokenizer with few characters has no tokens for the text.
    except BaseException as error:
        if not is_refusal(error):
            raise
        ids = []
    return _digest([len(text) for text in texts], content, ids)


def template_fingerprint(tokenizer: Any, style: PromptFormat) -> str:
    """Identifies the texts around a question and its answer, their ids, and the ends of a turn.

    Raises:
      UserError: as `frame` and `eos_ids`.
    """
    texts = [*frame(tokenizer, style), style.forced_suffix, style.natural_suffix]
    ids = [encode_text(tokenizer, text).tolist() for text in texts]
    return _digest(texts, ids, list(eos_ids(tokenizer, style)))


def prompts_fingerprint(prompts: Prompts, told: ToldPrompts | None) -> str:
    """Identifies the ids of prompts, in their order, with and without a budget.

    Args:
      told: the same prompts up to a budget's number; None if prompts do not contain the budget.
    """
    leaves: list[Any] = [prompts.tokens, prompts.lengths]
    if told is not None:
        leaves += [told.opened.tokens, told.opened.lengths, told.closing]
    arrays = [np.asarray(leaf, np.int32) for leaf in leaves]
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]
    return _digest([array.shape for array in arrays], digests)
