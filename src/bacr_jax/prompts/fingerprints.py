"""Computes digests of a policy's tokenizer, chat template and prompts.

Checkpoints store these digests. Before a run is resumed, evaluated or exported, they are compared
to detect a modified chat template or vocabulary.
"""

import hashlib
import json
from typing import Any

import numpy as np

from bacr_jax.prompts.budget_prompt import BudgetPrompts
from bacr_jax.prompts.encoding import encode_text, eos_ids, frame
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.stop_strings import vocabulary
from bacr_jax.prompts.tokenizers import is_refusal
from bacr_jax.types import Prompts

# Sample text with words, numbers and symbols that different tokenizers split differently.
_TEXT = (
    "How many of the 1,234 numbers x satisfy 3x^2 - 12 = \\frac{1}{2}?\n\n  It's über 数\U0001f642."
)


def _digest(*parts: Any) -> str:
    """Returns the first 12 hex digits of the SHA-256 digest of the JSON-encoded parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Computes a digest of a tokenizer from the texts of its tokens and an encoded sample text."""
    texts = vocabulary(tokenizer)
    content = hashlib.sha256(b"".join(texts)).hexdigest()
    try:
        ids = encode_text(tokenizer, _TEXT).tolist()
    # A tokenizer with a small alphabet cannot encode the sample text.
    except BaseException as error:
        if not is_refusal(error):
            raise
        ids = []
    return _digest([len(text) for text in texts], content, ids)


def template_fingerprint(tokenizer: Any, style: PromptFormat) -> str:
    """Computes a digest of the text around question and answer, its token ids and the EOS ids.

    The text depends on the chat template and on the prompt format.

    Raises:
      UserError: If `frame` or `eos_ids` raises it.
    """
    texts = [*frame(tokenizer, style), style.forced_suffix, style.natural_suffix]
    ids = [encode_text(tokenizer, text).tolist() for text in texts]
    return _digest(texts, ids, list(eos_ids(tokenizer, style)))


def encoding_fingerprints(tokenizer: Any, style: PromptFormat) -> dict[str, str]:
    """Returns digests of the tokenizer and its chat template, keyed as in the files of runs.

    Raises:
      UserError: If `template_fingerprint` raises it.
    """
    return {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer, style),
    }


def prompts_fingerprint(prompts: Prompts, budget_prompts: BudgetPrompts | None) -> str:
    """Computes a digest of the token ids of prompts, with and without a budget.

    The digest depends on the order of the prompts.

    Args:
      budget_prompts: the same prompts truncated before the number of the budget, or None if prompts
        do not contain the budget.
    """
    leaves: list[Any] = [prompts.tokens, prompts.lengths]
    if budget_prompts is not None:
        leaves += [
            budget_prompts.opened.tokens,
            budget_prompts.opened.lengths,
            budget_prompts.closing,
        ]
    arrays = [np.asarray(leaf, np.int32) for leaf in leaves]
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]
    return _digest([array.shape for array in arrays], digests)
