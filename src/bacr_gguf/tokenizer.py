"""The byte-level BPE of a GGUF file as a tokenizer of transformers."""

from typing import Any

import tokenizers
from tokenizers import pre_tokenizers as pre

from bacr_gguf.container import GgufFile, Unusable
from bacr_jax.config.values import shown

# llama.cpp's numbers of the types of tokens.
TYPES = NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
_KEY = "tokenizer.ggml."
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Tokens that end a turn or a message, at which llama.cpp stops as it does at eos.
TURN_ENDS = ("eot", "eom")
# tiktoken's cl100k, with digits by themselves up to a number of them.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cl100k(digits: str) -> list[Any]:
    pattern = tokenizers.Regex(_CL100K.replace("DIGITS", digits))
    return [pre.Split(pattern, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]


# What the names of pre-tokenizers stand for, which files do not say.
_GPT2 = pre.ByteLevel(add_prefix_space=False)
STEPS: dict[str, list[Any]] = {
    "gpt-2": [_GPT2],
    "smollm": [pre.Digits(individual_digits=True), _GPT2],
    "qwen2": _cl100k(""),
    "llama-bpe": _cl100k("{1,3}"),
}


def read(file: GgufFile, *, rows: int) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """A tokenizer for so many rows of an embedding, and ids by what they are for: bos, eos, eot ...

    Unusable: no byte-level BPE, a pre-tokenizer that is unknown here, or a damaged vocabulary.
    """
    kind, name = (file.setting(_KEY + key, str, "") for key in ("model", "pre"))
    if kind != "gpt2" or name not in STEPS:
        raise Unusable(
            f"its tokenizer is {shown(kind)} with the pre-tokenizer {shown(name)}, not 'gpt2' "
            f"(byte-level BPE) with one of {', '.join(STEPS)}"
        )
    keys = ("tokens", "merges", "token_type")
    texts, merges, types = (file.setting(_KEY + key, tuple) for key in keys)
    readable = all(isinstance(text, str) for text in texts + merges) and set(types) <= set(TYPES)
    if not readable or not len(types) == len(texts) <= rows:
        raise Unusable(f"not all of its {len(texts):,} tokens have a text, a type and an embedding")
    # Unused tokens only fill the embedding up.
    vocab = {text: i for i, text in enumerate(texts) if types[i] != UNUSED}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    known = {part for left, right in pairs for part in (left, right, left + right)} <= vocab.keys()
    if not known or len(vocab) + types.count(UNUSED) != len(texts):
        raise Unusable("two of its tokens are the same, or a merge is of none of them")
    llama = name == "llama-bpe"
    bpe = tokenizers.models.BPE(vocab=vocab, merges=pairs, ignore_merges=llama)
    backend = tokenizers.Tokenizer(bpe)
    if name == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = pre.Sequence(STEPS[name])
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    added = [(text, special[types[i]]) for text, i in vocab.items() if types[i] in special]
    token = tokenizers.AddedToken
    backend.add_tokens([token(text, special=x, normalized=False) for text, x in added])
    ids = {}
    for short, long in (*_SPECIAL.items(), *((name, name) for name in TURN_ENDS)):
        if (key := f"{_KEY}{long}_token_id") in file.settings:
            ids[short] = index = file.setting(key, int)
            if not 0 <= index < len(texts) or texts[index] not in vocab:
                raise Unusable(f"{key} is {index}, the id of no token")
    begins = file.setting(f"{_KEY}add_bos_token", bool, llama)
    if file.setting(f"{_KEY}add_eos_token", bool, False) or (begins and "bos" not in ids):
        raise Unusable("texts would end with eos, or begin with a token that it does not name")
    if begins:
        bos, make = texts[ids["bos"]], tokenizers.processors.TemplateProcessing
        pair, named = [bos, "$A", bos, "$B:1"], [(bos, ids["bos"])]
        backend.post_processor = make(single=[bos, "$A"], pair=pair, special_tokens=named)
    return backend, ids
