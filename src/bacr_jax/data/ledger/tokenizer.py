"""The ledger's vocabulary and its tokenizer in Hugging Face form."""

from typing import TYPE_CHECKING

from bacr_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = (
    *("<pad>", "<bos>", "<think>", "</think>", "<answer>", "</answer>"),
    *"0123456789",
    *"+-=",
    *"abcdefgh",
)
# Tells a budget in the prompt, before its digits: a label that no problem has.
BUDGET_MARK = "f"
ID = {token: index for index, token in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of ledger text, tags included; the same ids as `ledger_tokenizer`, but faster.

    Raises:
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


def ledger_tokenizer() -> "PreTrainedTokenizerFast":
    """The task's tokenizer in Hugging Face form: one token per character or tag.

    Importing transformers takes about a second, so it happens here; `encode` does without.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(ID))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Tags are atoms but not "special": decoding that skips special tokens must keep them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in VOCABULARY[2:6]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="</answer>",
        pad_token="<pad>",
        model_max_length=128,
    )
