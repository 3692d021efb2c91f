"""The ledger's vocabulary and its tokenizer in Hugging Face form."""

import functools
from typing import TYPE_CHECKING, Any

from bacr_jax.errors import UserError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
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


class LedgerTokenizer:
    """The task's tokenizer: one token per character or tag.

    What a run and a question need is said by its Rust part alone, since importing transformers
    takes a second or more; whatever else is asked of it, transformers' own object says.
    """

    bos_token, eos_token, pad_token = "<bos>", "</answer>", "<pad>"
    bos_token_id, eos_token_id, pad_token_id = (ID[x] for x in (bos_token, eos_token, pad_token))
    # A run asks whether there is one.
    chat_template = None

    def __init__(self) -> None:
        """Makes the Rust part, as transformers would."""
        self.backend_tokenizer = _rust_tokenizer()
        # The end token is a tag, and there already.
        self.backend_tokenizer.add_special_tokens([self.bos_token, self.pad_token])

    @functools.cached_property
    def whole(self) -> "PreTrainedTokenizerFast":
        """The same tokenizer in Hugging Face form."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=_rust_tokenizer(),
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            pad_token=self.pad_token,
            model_max_length=128,
        )

    @property
    def added_tokens_decoder(self) -> "dict[int, AddedToken]":
        """Tags and special tokens by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        """Number of ids."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        """Ids of a text or of several, as of a Hugging Face tokenizer."""
        if not options.keys() <= _PLAIN:
            return self.whole(text, **options)
        texts = [text] if isinstance(text, str) else text
        encoded = self.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        rows: dict[str, list[Any]] = {"input_ids": [row.ids for row in encoded]}
        if options.get("return_offsets_mapping"):
            rows["offset_mapping"] = [row.offsets for row in encoded]
        return {name: row[0] for name, row in rows.items()} if isinstance(text, str) else rows

    def __getattr__(self, name: str) -> Any:
        """Everything else is transformers'."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)


# Options under which ids and offsets are all that comes back.
_PLAIN = {"add_special_tokens", "return_offsets_mapping", "verbose"}


def _rust_tokenizer() -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(ID))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Tags are atoms but not "special": decoding that skips special tokens must keep them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in VOCABULARY[2:6]])
    return tokenizer


def ledger_tokenizer() -> LedgerTokenizer:
    """The task's tokenizer, which can all that one of transformers can."""
    return LedgerTokenizer()
