"""The ledger's vocabulary and its tokenizer."""

from bacr_jax.questions.characters import TAGS, CharacterTokenizer

VOCABULARY = (*TAGS, *"0123456789", *"+-=", *"abcdefgh")
# Tells a budget in the prompt, before its digits: a label that no problem has.
BUDGET_MARK = "f"
ID = {token: index for index, token in enumerate(VOCABULARY)}


def ledger_tokenizer() -> CharacterTokenizer:
    """The task's tokenizer, which can all that one of transformers can."""
    return CharacterTokenizer(VOCABULARY, longest=128)
