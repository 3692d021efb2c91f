"""Defines the vocabulary and the tokenizer of the ledger."""

from bacr_jax.questions.characters import TAGS, CharacterTokenizer

VOCABULARY = (*TAGS, *"0123456789", *"+-=", *"abcdefgh")
# Token before the digits of a budget in the prompt. It is a label that problems do not use.
BUDGET_MARK = "f"
ID = {token: index for index, token in enumerate(VOCABULARY)}


def ledger_tokenizer() -> CharacterTokenizer:
    """Returns the tokenizer of the ledger, with all methods of a tokenizer of transformers."""
    return CharacterTokenizer(VOCABULARY, longest=128)
