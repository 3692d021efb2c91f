"""Builds a `tokenizers.Tokenizer` from the byte-level BPE vocabulary of a GGUF file.

`folder` calls `read` and saves the result as tokenizer.json.
"""

from typing import Any

import tokenizers
from tokenizers import pre_tokenizers as pre

from bacr_gguf.container import GgufError, GgufFile
from bacr_jax.config.values import shown

# Token types in llama.cpp.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
TYPES = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED)
_KEY = "tokenizer.ggml."
# End-of-turn and end-of-message tokens. llama.cpp stops at these tokens as it does at eos.
TURN_ENDS = ("eot", "eom")
# Names of special tokens in this package, mapped to their names in GGUF keys.
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "eot": "eot",
    "eom": "eom",
}
# Regular expression of the pre-tokenizer cl100k of tiktoken. DIGITS is replaced by a quantifier for
# the number of digits in a piece. Without a quantifier, each digit is a separate piece.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3 = "llama-bpe"


def _cl100k(digits: str) -> list[Any]:
    """Builds the pre-tokenizers of cl100k, which split a text into pieces before BPE is applied.

    Args:
      digits: regular-expression quantifier for the number of digits in a piece, such as `{1,3}`.
    """
    pattern = tokenizers.Regex(_CL100K.replace("DIGITS", digits))
    return [
        pre.Split(pattern, "isolated"),
        pre.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# Pre-tokenizers by their name in GGUF files. A GGUF file contains only the name.
_GPT2 = pre.ByteLevel(add_prefix_space=False)
STEPS: dict[str, list[Any]] = {
    "gpt-2": [_GPT2],
    "smollm": [pre.Digits(individual_digits=True), _GPT2],
    "qwen2": _cl100k(""),
    _LLAMA_3: _cl100k("{1,3}"),
}


def read(file: GgufFile, *, rows: int) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """Builds the tokenizer of a GGUF file.

    Args:
      file: header of the GGUF file.
      rows: number of rows of the model's embedding, which is the maximum number of tokens.

    Returns:
      The tokenizer, and the ids of the special tokens by name (bos, eos, unk, pad, eot, eom).

    Raises:
      GgufError: if the tokenizer is not byte-level BPE, its pre-tokenizer is unknown, or the
        vocabulary is damaged.
    """
    model = file.setting(_KEY + "model", str, "")
    pre_name = file.setting(_KEY + "pre", str, "")
    if model != "gpt2" or pre_name not in STEPS:
        raise GgufError(
            f"the tokenizer {shown(model)} with the pre-tokenizer {shown(pre_name)} is not "
            f"supported; it must be 'gpt2' (byte-level BPE) with one of {', '.join(STEPS)}"
        )
    texts = file.setting(_KEY + "tokens", tuple)
    types = file.setting(_KEY + "token_type", tuple)
    vocab = _vocabulary(texts, types, rows)
    pairs = _merges(file.setting(_KEY + "merges", tuple), vocab)
    is_llama_3 = pre_name == _LLAMA_3
    bpe = tokenizers.models.BPE(vocab=vocab, merges=pairs, ignore_merges=is_llama_3)
    backend = tokenizers.Tokenizer(bpe)
    if pre_name == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = pre.Sequence(STEPS[pre_name])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(_added_tokens(vocab, types))
    ids = _special_ids(file, texts, vocab)

    adds_bos = file.setting(_KEY + "add_bos_token", bool, is_llama_3)
    adds_eos = file.setting(_KEY + "add_eos_token", bool, False)
    if adds_eos or (adds_bos and "bos" not in ids):
        raise GgufError(
            "the tokenizer appends an end token to every text, or begins every text with a token "
            "whose id is missing, and neither is supported"
        )
    if adds_bos:
        backend.post_processor = _begin_with(texts[ids["bos"]], ids["bos"])
    return backend, ids


def _vocabulary(texts: tuple[Any, ...], types: tuple[Any, ...], rows: int) -> dict[str, int]:
    """Returns the id of each token by its text.

    Unused tokens are excluded, because they are only padding of the embedding.

    Raises:
      GgufError: if a token has no text, no known type or no row in the embedding, or if two tokens
        have the same text.
    """
    are_texts = all(isinstance(text, str) for text in texts)
    are_types = set(types) <= set(TYPES)
    if not (are_texts and are_types and len(types) == len(texts) <= rows):
        raise GgufError(
            f"at least one of the tokenizer's {len(texts):,} tokens has no text, no known type or "
            "no row in the embedding"
        )
    vocab = {text: id for id, text in enumerate(texts) if types[id] != UNUSED}
    if len(vocab) + types.count(UNUSED) != len(texts):
        raise GgufError("two tokens of the tokenizer have the same text")
    return vocab


def _merges(merges: tuple[Any, ...], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Splits BPE merges into pairs of tokens.

    Raises:
      GgufError: if a merge does not consist of two tokens whose concatenation is also a token.
    """
    pairs = []
    for merge in merges:
        if not isinstance(merge, str):
            raise GgufError(f"the BPE merge {shown(merge)} is not a string")
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise GgufError(
                f"the BPE merge {shown(merge)} does not join two tokens of the vocabulary to a "
                "third one"
            )
        pairs.append((left, right))
    return pairs


def _added_tokens(vocab: dict[str, int], types: tuple[int, ...]) -> list[tokenizers.AddedToken]:
    """Builds the tokens that are matched before BPE is applied.

    Unknown and control tokens are marked as special, so that decoding can skip them. User-defined
    tokens are not marked as special.
    """
    is_skipped = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    return [
        tokenizers.AddedToken(text, special=is_skipped[types[id]], normalized=False)
        for text, id in vocab.items()
        if types[id] in is_skipped
    ]


def _special_ids(file: GgufFile, texts: tuple[str, ...], vocab: dict[str, int]) -> dict[str, int]:
    """Returns the ids of the special tokens that the file defines, by name (see `_SPECIAL`).

    Raises:
      GgufError: if an id is outside the vocabulary or belongs to an unused token.
    """
    ids = {}
    for name, file_name in _SPECIAL.items():
        key = f"{_KEY}{file_name}_token_id"
        if key not in file.settings:
            continue
        id = file.setting(key, int)
        if not 0 <= id < len(texts) or texts[id] not in vocab:
            raise GgufError(f"the setting {key!r} is {id}, which is not the id of a token in use")
        ids[name] = id
    return ids


def _begin_with(bos: str, id: int) -> Any:
    """Builds a post-processor that prepends bos to each input, or to both inputs of a pair."""
    return tokenizers.processors.TemplateProcessing(
        single=[bos, "$A"],
        pair=[bos, "$A", bos, "$B:1"],
        special_tokens=[(bos, id)],
    )
