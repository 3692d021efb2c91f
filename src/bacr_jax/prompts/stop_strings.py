r"""Compiles stop strings into transition tables over tokens that a jitted loop can evaluate.

A stop string can be tokenized in many ways, and a token can extend beyond its end: Qwen2.5 encodes
`</think>` followed by a blank line as `</`, `think`, `>\n\n`. Searching for a fixed sequence of
token ids would miss such cases. The string is therefore compiled into a Knuth-Morris-Pratt
automaton over bytes, and the bytes of every token are compiled into a single transition:
`next_state[state, token]`.
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
    """Builds the transition table of the Knuth-Morris-Pratt automaton of a string.

    Returns:
      Next state for each state and byte. A state is the number of matched bytes. The automaton
      never leaves the last state.
    """
    table = np.zeros((len(string) + 1, 256), np.int32)
    # State of the automaton if the match had started one byte later.
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
    """Returns the byte that each character of GPT-2's byte-level alphabet represents.

    Printable Latin-1 characters represent themselves. The other bytes, in ascending order, are
    represented by the characters from code point 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def _decoder_kinds(backend: Any) -> set[str]:
    """Returns the names of the decoding steps of a fast tokenizer."""
    # Only the decoder is serialized, because the whole tokenizer is several megabytes of JSON.
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Returns the bytes that each id in [0, len(tokenizer)) decodes to, or b"" without a token.

    The bytes of a sequence of ids are UTF-8 text. A single token can contain an incomplete
    character. For added and special tokens, the bytes are their literal content.

    Raises:
      UserError: If the tokenizer has no tokenizer.json, or is neither byte-level nor a tokenizer
        whose tokens are literal text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"tokenizer: its type is {type(tokenizer).__name__}, which is not a fast tokenizer; "
            "use a folder with a tokenizer.json"
        )
    kinds = _decoder_kinds(backend)
    unknown = kinds - {"ByteLevel", "Fuse"}
    if unknown:
        raise UserError(
            f"tokenizer: it decodes tokens with {', '.join(sorted(unknown))}, which is not "
            "supported, because stop strings need a byte-level tokenizer (such as Qwen2.5's) or "
            "one whose tokens are literal text; use another model"
        )
    ids = backend.get_vocab(with_added_tokens=True)
    texts = [b""] * (max(ids.values(), default=-1) + 1)
    to_bytes = _alphabet_bytes if "ByteLevel" in kinds else str.encode
    for token, index in ids.items():
        texts[index] = to_bytes(token)
    for index, added in backend.get_added_tokens_decoder().items():
        texts[index] = added.content.encode()
    return texts


def _alphabet_bytes(token: str) -> bytes:
    """Converts a token from the byte-level alphabet to bytes."""
    try:
        return bytes(_byte_of_char()[char] for char in token)
    except KeyError:
        # Decoders return tokens with characters outside the alphabet unchanged.
        return token.encode()


Vocabulary = tuple[bytes, ...]
_VOCABULARIES: weakref.WeakKeyDictionary[Any, tuple[int, Vocabulary]] = weakref.WeakKeyDictionary()


def vocabulary(tokenizer: Any) -> Vocabulary:
    """Returns the bytes of every token id (`token_bytes`), cached per tokenizer."""
    cached = _VOCABULARIES.get(tokenizer)
    # Tokens can be added to a tokenizer but not renamed, so the same length means the same content.
    if cached is not None and cached[0] == len(tokenizer):
        return cached[1]
    texts = tuple(token_bytes(tokenizer))
    _VOCABULARIES[tokenizer] = (len(tokenizer), texts)
    return texts


def compile_stop_string(tokenizer: Any, string: str, *, vocab_size: int) -> Automaton:
    """Compiles a stop string for a tokenizer. Results are cached.

    A string that overlaps with itself by two or more bytes may be rejected. For example, if the
    stop string is `aaab` and each token is one character, the tokens `a a a a b` complete a match
    that started in the second token. The field `opens` of the result only marks tokens in which a
    match starts, so it cannot represent a start that changes later. Tags such as `</think>` never
    overlap with themselves in this way.

    Args:
      string: stop string. An empty string never matches.
      vocab_size: number of rows of the model's embedding matrix, at least the number of ids of the
        tokenizer. Ids beyond the tokenizer are never sampled and lead back to the initial state.

    Returns:
      The table on the host. It uses about 5 bytes per state and id, for example 6 MB for 8 states
      and 152,064 ids.

    Raises:
      UserError: If the string is rejected, or the tokenizer has more ids than `vocab_size`.
    """
    if not string:
        return no_stop_string(vocab_size)
    texts = vocabulary(tokenizer)
    if len(texts) > vocab_size:
        raise UserError(
            f"tokenizer: it has {len(texts)} token ids, but the vocabulary of the model has only "
            f"{vocab_size}; use the tokenizer that belongs to the model"
        )
    return _compile(texts, string, vocab_size)


def no_stop_string(vocab_size: int) -> Automaton:
    """Returns the table of an empty stop string, which never leaves the initial state."""
    next_state: Any = np.zeros((2, vocab_size), np.int32)
    next_state[1] = 1
    opens: Any = np.zeros((2, vocab_size), bool)
    return Automaton(next_state, opens)


@functools.lru_cache(maxsize=16)
def _compile(texts: Vocabulary, string: str, vocab_size: int) -> Automaton:
    """Compiles a stop string, given the bytes of all token ids."""
    byte_table = byte_automaton(string.encode())
    accept = len(byte_table) - 1
    states = np.arange(accept + 1)[:, None]
    after, begin = _token_transitions(byte_table, texts)
    # Only these pairs of state and token matter: after them, a match is in progress or complete.
    is_alive = (after > 0) & (states < accept)
    # If a match started in an earlier token, it must be the match of the previous state, which
    # started `state` bytes before the token. Otherwise, its first token is unknown.
    began_elsewhere = is_alive & (begin < 0) & (begin != -states)
    if began_elsewhere.any():
        raise UserError(
            f"stop string {string!r} has a beginning that also occurs later in it, so the start "
            "of a match is ambiguous; use a string whose first character appears only once"
        )
    next_state: Any = np.zeros((accept + 1, vocab_size), np.int32)
    opens: Any = np.zeros((accept + 1, vocab_size), bool)
    next_state[:, : len(texts)] = after
    next_state[accept] = accept
    opens[:, : len(texts)] = is_alive & (begin >= 0)
    # The cached table is shared between calls, so it is read-only. It stays on the host, and
    # `decode_rules` copies it to the device.
    next_state.setflags(write=False)
    opens.setflags(write=False)
    return Automaton(next_state, opens)


def _token_transitions(
    byte_table: Int[np.ndarray, "states 256"], texts: Sequence[bytes]
) -> tuple[Int[np.ndarray, "states V"], Int[np.ndarray, "states V"]]:
    """Runs the byte automaton over the bytes of every token, from every state.

    Returns:
      (next state, start) for each state and token. `start` is the offset in bytes, relative to the
      start of the token, at which the match in progress started. It is negative if the match
      started in an earlier token.
    """
    lengths = np.array([len(text) for text in texts])
    # Tokens are sorted by descending length, so that the tokens with a byte at a given index come
    # first.
    order = np.argsort(-lengths, kind="stable")
    all_bytes = np.frombuffer(b"".join([texts[index] for index in order]), np.uint8)
    sizes = lengths[order]
    offsets = np.cumsum(sizes) - sizes
    accept = len(byte_table) - 1
    start_states = np.arange(accept + 1, dtype=np.int32)[:, None]
    state = np.repeat(start_states, len(texts), axis=1)
    num_read = np.zeros(state.shape, np.int32)
    for index in range(int(lengths.max(initial=0))):
        active = int(np.searchsorted(-sizes, -index, side="left"))
        before = state[:, :active]
        next_bytes = all_bytes[offsets[:active] + index]
        after = byte_table[before, next_bytes]
        # Bytes after the end of a match are not part of it.
        num_read[:, :active] += before < accept
        state[:, :active] = after
    # The state equals the number of matched bytes.
    begin = num_read - state
    original_order = np.argsort(order)
    return state[:, original_order], begin[:, original_order]


def match(table: Automaton, ids: Sequence[int]) -> tuple[int, int]:
    """Runs the automaton over token ids, one token at a time, like a decoding loop.

    Returns:
      (index of the token in which the stop string first ends, index of the token in which this
      occurrence starts), or (-1, -1) if the stop string does not occur.
    """
    state = 0
    start = 0
    for index, token in enumerate(ids):
        if table.opens[state, token]:
            start = index
        state = int(table.next_state[state, token])
        if state == table.accept:
            return index, start
    return -1, -1
