r"""Stop strings compiled against a tokenizer into a table that a jitted loop can follow.

A stop string can be cut into tokens in many ways, and a token can hold its last bytes and more:
Qwen2.5 writes `</think>` and a blank line as `</`, `think`, `>\n\n`. Looking for a sequence of ids
misses that. So the string becomes a Knuth-Morris-Pratt automaton over bytes, and every token, a
string of bytes, becomes one jump of it: `next_state[state, token]`.
"""

import functools
import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_jax.errors import UserError
from bacr_jax.prompts.decode_rules import Automaton


def byte_automaton(string: bytes) -> Int[np.ndarray, "states 256"]:
    """The state after a byte: how many bytes of the string are matched, all of them for good."""
    table = np.zeros((len(string) + 1, 256), np.int32)
    # Where the automaton would be without the first byte of the match.
    fallback = 0
    for state, byte in enumerate(string):
        table[state] = table[fallback]
        table[state, byte] = state + 1
        if state:
            fallback = table[fallback, byte]
    table[-1] = len(string)
    return table


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable Latin-1 stands for itself, the rest follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def _decoder_kinds(backend: Any) -> set[str]:
    """Names of the decoding steps of a fast tokenizer."""
    # Only the decoder: the state of the whole tokenizer is megabytes of JSON.
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}


def token_bytes(tokenizer: Any) -> list[bytes]:
    """What each id in [0, len(tokenizer)) stands for in a text, as UTF-8 bytes; empty: no token.

    A token can be part of a character, so these need not be valid UTF-8 one by one. Added and
    special tokens stand for their literal content. The tokenizer is byte-level or has whole tokens
    as its text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"tokenizer: found {type(tokenizer).__name__}; write a folder with a tokenizer.json"
        )
    kinds = _decoder_kinds(backend)
    if unknown := kinds - {"ByteLevel", "Fuse"}:
        raise UserError(
            f"tokenizer: found the decoder {', '.join(sorted(unknown))}; stop strings need a "
            "byte-level tokenizer (Qwen2.5) or one whose tokens are literal text"
        )
    ids = backend.get_vocab(with_added_tokens=True)
    texts = [b""] * (max(ids.values(), default=-1) + 1)
    content = _alphabet_bytes if "ByteLevel" in kinds else str.encode
    for token, index in ids.items():
        texts[index] = content(token)
    for index, added in backend.get_added_tokens_decoder().items():
        texts[index] = added.content.encode()
    return texts


def _alphabet_bytes(token: str) -> bytes:
    try:
        return bytes(map(_byte_of_char().__getitem__, token))
    except KeyError:
        # not of the alphabet: decoders give such a token back as it is
        return token.encode()


Vocabulary = tuple[bytes, ...]
_VOCABULARIES: weakref.WeakKeyDictionary[Any, tuple[int, Vocabulary]] = weakref.WeakKeyDictionary()


def vocabulary(tokenizer: Any) -> Vocabulary:
    """What every id of a tokenizer stands for (`token_bytes`), read once per tokenizer."""
    known = _VOCABULARIES.get(tokenizer)
    # Tokens can be added to a tokenizer, never renamed: an unchanged length is the same content.
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    texts = tuple(token_bytes(tokenizer))
    _VOCABULARIES[tokenizer] = (len(tokenizer), texts)
    return texts


def compile_stop_string(tokenizer: Any, string: str, *, vocab_size: int) -> Automaton:
    """Compiles a stop string against a tokenizer; equal calls share one table.

    An empty one never comes. A string that overlaps itself by two bytes or more may be refused:
    after four a, the match of `aaab` began in the second token, neither the first nor the last, so
    that `opens` could not say where. Tags never do.

    Args:
      vocab_size: rows of the model's embedding, at least as many as the tokenizer has ids. Ids
        beyond the tokenizer are never sampled; they lead back to the start.

    Returns:
      The table. About 5 bytes per state and id: 8 states and 152,064 ids take 6 MB.
    """
    if not string:
        return no_stop_string(vocab_size)
    texts = vocabulary(tokenizer)
    if len(texts) > vocab_size:
        raise UserError(
            f"tokenizer: found {len(texts)} ids for a vocabulary of {vocab_size}; use the "
            "tokenizer that belongs to the model"
        )
    return _compile(texts, string, vocab_size)


def no_stop_string(vocab_size: int) -> Automaton:
    """The table of a format without a stop string: it stays at the start whatever comes."""
    next_state: Any = np.zeros((2, vocab_size), np.int32)
    next_state[1] = 1
    opens: Any = np.zeros((2, vocab_size), bool)
    return Automaton(next_state, opens)


@functools.lru_cache(maxsize=16)
def _compile(texts: Vocabulary, string: str, vocab_size: int) -> Automaton:
    over_bytes = byte_automaton(string.encode())
    after, begin = _jumps(over_bytes, texts)
    accept = len(over_bytes) - 1
    alive = (after > 0) & (np.arange(accept + 1) < accept)[:, None]
    moved = alive & (begin < 0) & (begin != -np.arange(accept + 1)[:, None])
    if moved.any():
        raise UserError(
            f"stop string: found {string!r}, which overlaps itself so that the start of a match is "
            "not known; write one whose first character appears only once"
        )
    next_state: Any = np.zeros((accept + 1, vocab_size), np.int32)
    opens: Any = np.zeros((accept + 1, vocab_size), bool)
    next_state[:, : len(texts)] = after
    next_state[accept] = accept
    opens[:, : len(texts)] = alive & (begin >= 0)
    next_state.setflags(write=False)
    opens.setflags(write=False)
    # On the host; `decode_rules` puts it on the device.
    return Automaton(next_state, opens)


def _jumps(
    over_bytes: Int[np.ndarray, "states 256"], texts: Sequence[bytes]
) -> tuple[Int[np.ndarray, "states V"], Int[np.ndarray, "states V"]]:
    """Where every token leads from every state, and where the match alive then began.

    Returns:
      The state after each token, and the byte at which its match began, counted from the start of
      the token: negative if in an earlier one.
    """
    lengths = np.array([len(text) for text in texts])
    # Longest first: at byte i the tokens that still have one are the first `active` rows.
    order = np.argsort(-lengths, kind="stable")
    flat = np.frombuffer(b"".join([texts[index] for index in order]), np.uint8)
    sizes = lengths[order]
    first = np.cumsum(sizes) - sizes
    accept = len(over_bytes) - 1
    state = np.repeat(np.arange(accept + 1, dtype=np.int32)[:, None], len(texts), axis=1)
    seen_after = np.zeros(state.shape, np.int32)
    for at in range(int(lengths.max(initial=0))):
        active = int(np.searchsorted(-sizes, -at, side="left"))
        before = state[:, :active]
        now = over_bytes[before, flat[first[:active] + at]]
        # What a match has absorbed after its end is not part of it.
        seen_after[:, :active] += before < accept
        state[:, :active] = now
    # A state is the number of its match's bytes.
    begin = seen_after - state
    back = np.argsort(order)
    return state[:, back], begin[:, back]


def match(table: Automaton, ids: Sequence[int]) -> tuple[int, int]:
    """Follows the table over ids: what a decoding loop does, one token at a time.

    Returns:
      Index of the token in which the stop string first ends and of the one in which it began (the
      number of tokens before it); (-1, -1) if it does not.
    """
    state, start = 0, 0
    for index, token in enumerate(ids):
        if table.opens[state, token]:
            start = index
        state = int(table.next_state[state, token])
        if state == table.accept:
            return index, start
    return -1, -1
