"""Defines tokenizers with one token per character, for small models trained from scratch."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

TAGS = ("<pad>", "<bos>", "<think>", "</think>", "<answer>", "</answer>")
# Printable ASCII, and the letters of Latin-1.
VOCABULARY = (*TAGS, *map(chr, range(0x20, 0x7F)), *map(chr, range(0xC0, 0x100)))
# Default maximum length of a text in tokens.
LONGEST = 4096


class CharacterTokenizer:
    """A tokenizer with one token per character or tag.

    Training runs only use the fast tokenizer of the Rust library, because importing transformers
    takes a second or more. All other attributes are delegated to a transformers tokenizer, which is
    created on first use.
    """

    bos_token = "<bos>"
    eos_token = "</answer>"
    pad_token = "<pad>"
    bos_token_id = TAGS.index(bos_token)
    eos_token_id = TAGS.index(eos_token)
    pad_token_id = TAGS.index(pad_token)
    # Runs read this attribute of every tokenizer. This tokenizer has no chat template.
    chat_template = None

    def __init__(self, vocabulary: Sequence[str], *, longest: int) -> None:
        self._vocabulary = vocabulary
        self._longest = longest
        self.backend_tokenizer = _rust_tokenizer(vocabulary)
        # eos_token is one of the tags, so it is in the vocabulary.
        self.backend_tokenizer.add_special_tokens([self.bos_token, self.pad_token])

    @functools.cached_property
    def hf_tokenizer(self) -> "PreTrainedTokenizerFast":
        """Returns an equivalent tokenizer of transformers."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=_rust_tokenizer(self._vocabulary),
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            pad_token=self.pad_token,
            model_max_length=self._longest,
        )

    @property
    def added_tokens_decoder(self) -> "dict[int, AddedToken]":
        """Returns the tags and special tokens, keyed by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        """Returns the ids of one or several texts, like a Hugging Face tokenizer."""
        if not options.keys() <= _PLAIN:
            return self.hf_tokenizer(text, **options)
        texts = [text] if isinstance(text, str) else text
        encoded = self.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        rows: dict[str, list[Any]] = {"input_ids": [row.ids for row in encoded]}
        if options.get("return_offsets_mapping"):
            rows["offset_mapping"] = [row.offsets for row in encoded]
        if isinstance(text, str):
            return {name: values[0] for name, values in rows.items()}
        return rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.hf_tokenizer, name)


# Options with which only ids and offsets are returned.
_PLAIN = {"add_special_tokens", "return_offsets_mapping", "verbose"}


def _rust_tokenizer(vocabulary: Sequence[str]) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Each tag is a single token but not a special token, because decoding with skip_special_tokens
    # must keep it.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS[2:]])
    return tokenizer
