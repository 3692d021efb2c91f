"""The ledger's vocabulary and its tokenizer."""

from bacr_jax.errors import UserError
from bacr_jax.questions.characters import TAGS, CharacterTokenizer

VOCABULARY = (
    *TAGS,
    *"0123456789",
    *"+-=",
    *"abcdefgh",
)
# Tells a budget in the prompt, before its digits: a label that no problem has.
BUDGET_MARK = "f"
ID = {token: index for index, token in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of ledger text, tags included; the same ids as `ledger_tokenizer`, but faster.

    UserError: text outside the vocabulary.
    """
    ids, at = [], 0
    while at < len(text):
        end = text.find(">", at) + 1 if text[at] == "<" else at + 1
        token = text[at:end]
        if token not in ID:
            raise UserError(
                f"ledger text: found {text[at]!r} in {text!r}; write digits, + - =, a..h and tags"
            )
        ids.append(ID[token])
        at = end
    return ids


def ledger_tokenizer() -> CharacterTokenizer:
    """The task's tokenizer, which can all that one of transformers can."""
    return CharacterTokenizer(VOCABULARY, longest=128)
