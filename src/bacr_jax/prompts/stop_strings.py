r"""Stop strings compiled against a tokenizer into a table that a jitted loop can follow.

A stop string can be cut into tokens in many ways, and a token can hold its last bytes and more:
Qwen2.5 writes `</think>` and a blank line as `</`, `think`, `>\n\n`. Looking for a sequence of ids
misses that. So the strings become an Aho-Corasick automaton over bytes, and every token, a string
of bytes, becomes one jump of it: `next_state[state, token]`.
"""

import dataclasses
import functools
import hashlib
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.errors import UserError


@dataclass(frozen=True)
class StopTable:
    """An automaton over token ids.

    State 0 is the start; the last state (`accept`) is absorbing: a stop string was seen.

    Attributes:
      next_state: state after a token, for every state and token id.
      opens: true where the match that is live after the token, whole or partial, began inside that
        token. The last such token on a row is the first one of the tag.
    """

    next_state: Int[np.ndarray, "states V"]
    opens: Bool[np.ndarray, "states V"]
    accept: int
    strings: tuple[str, ...]


@dataclass(frozen=True)
class ByteAutomaton:
    """Aho-Corasick over bytes, before tokens.

    Attributes:
      next_state: state after a byte. Accepting states, which end a string, are absorbing.
      depth: bytes of a stop string matched so far in each state.
    """

    next_state: Int[np.ndarray, "states 256"]
    depth: Int[np.ndarray, "states"]
    accepting: Bool[np.ndarray, "states"]


def byte_automaton(strings: Sequence[bytes]) -> ByteAutomaton:
    """Aho-Corasick automaton that stops at the first end of any string."""
    children: list[dict[int, int]] = [{}]
    depth, accepting = [0], [False]
    for string in strings:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                depth.append(depth[state] + 1)
                accepting.append(False)
            state = children[state][byte]
        accepting[state] = True
    table = np.zeros((len(children), 256), np.int32)
    fallback = [0] * len(children)
    queue = [0]
    # Breadth first, so that the state to fall back to is complete before it is needed.
    for state in queue:
        if accepting[fallback[state]] and not accepting[state]:
            # A string that ends inside another one ends the search; the match is its own bytes.
            accepting[state], depth[state] = True, depth[fallback[state]]
        if state:
            table[state] = table[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = int(table[state, byte]) if state else 0
            table[state, byte] = child
            queue.append(child)
    final = np.array(accepting)
    table[final] = np.flatnonzero(final)[:, None]
    return ByteAutomaton(table, np.array(depth, np.int32), final)


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


@dataclass(frozen=True)
class Vocabulary:
    """What every id of a tokenizer stands for (`token_bytes`); equal when the contents are.

    Attributes:
      fingerprint: hash of the contents.
    """

    fingerprint: str
    texts: tuple[bytes, ...] = dataclasses.field(compare=False, repr=False)


_VOCABULARIES: "weakref.WeakKeyDictionary[Any, tuple[int, Vocabulary]]"
_VOCABULARIES = weakref.WeakKeyDictionary()


def vocabulary(tokenizer: Any) -> Vocabulary:
    """Reads a tokenizer's vocabulary, once per tokenizer."""
    known = _VOCABULARIES.get(tokenizer)
    # Tokens can be added to a tokenizer, never renamed: an unchanged length is the same content.
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    texts = token_bytes(tokenizer)
    lengths = np.array([len(text) for text in texts], np.int64).tobytes()
    digest = hashlib.sha256(lengths + b"".join(texts)).hexdigest()
    read = Vocabulary(digest, tuple(texts))
    _VOCABULARIES[tokenizer] = (len(tokenizer), read)
    return read


def compile_stop_strings(
    tokenizer: Any, strings: Sequence[str], *, vocab_size: int, locate_start: bool = True
) -> StopTable:
    """Compiles stop strings against a tokenizer; equal calls share one table.

    Args:
      strings: the first to end wins, the longest if several end there.
      vocab_size: rows of the model's embedding, at least as many as the tokenizer has ids. Ids
        beyond the tokenizer are never sampled; they lead back to the start.
      locate_start: refuse strings for which `opens` can not tell where a match began. That takes a
        string that overlaps itself by two bytes or more (`aaab`: after four a, the match alive
        began in the second token, neither the first nor the last). Tags never do.

    Returns:
      The table. About 5 bytes per state and id: 8 states and 152,064 ids take 6 MB.
    """
    if isinstance(strings, str) or not strings or "" in strings:
        raise UserError(f"stop strings: found {strings!r}; write a list of strings, none empty")
    read = vocabulary(tokenizer)
    if len(read.texts) > vocab_size:
        raise UserError(
            f"tokenizer: found {len(read.texts)} ids for a vocabulary of {vocab_size}; use the "
            "tokenizer that belongs to the model"
        )
    return _compile(read, tuple(dict.fromkeys(strings)), vocab_size, locate_start)


def no_stop_string(vocab_size: int) -> StopTable:
    """The table of a format without a stop string: it stays at the start whatever comes."""
    next_state = np.zeros((2, vocab_size), np.int32)
    next_state[1] = 1
    opens = np.zeros((2, vocab_size), bool)
    return StopTable(next_state, opens, 1, ())


@functools.lru_cache(maxsize=16)
def _compile(
    read: Vocabulary, strings: tuple[str, ...], vocab_size: int, locate_start: bool
) -> StopTable:
    over_bytes = byte_automaton([string.encode() for string in strings])
    after, begin = _jumps(over_bytes, read.texts)
    depth, accepting = over_bytes.depth, over_bytes.accepting
    alive = (depth[after] > 0) & ~accepting[:, None]
    moved = alive & (begin < 0) & (begin != -depth[:, None])
    if locate_start and moved[_reachable(over_bytes)].any():
        raise UserError(
            f"stop strings: found {list(strings)}, which overlap themselves so that the start of "
            "a match is not known; write strings whose first character appears only once"
        )
    # One absorbing state for all strings, and none that can not be reached.
    kept = [state for state in _reachable(over_bytes) if not accepting[state]]
    accept = len(kept)
    renumber = np.full(len(depth), accept, np.int32)
    renumber[kept] = np.arange(accept)
    next_state = np.zeros((accept + 1, vocab_size), np.int32)
    opens = np.zeros((accept + 1, vocab_size), bool)
    next_state[:accept, : len(read.texts)] = renumber[after[kept]]
    next_state[accept] = accept
    opens[:accept, : len(read.texts)] = (alive & (begin >= 0))[kept]
    next_state.setflags(write=False)
    opens.setflags(write=False)
    return StopTable(next_state, opens, accept, strings)


def _reachable(over_bytes: ByteAutomaton) -> list[int]:
    """States that some text leads to, in ascending order."""
    found, queue = {0}, [0]
    for state in queue:
        new = set(over_bytes.next_state[state].tolist()) - found
        found |= new
        queue.extend(new)
    return sorted(found)


def _jumps(
    over_bytes: ByteAutomaton, texts: Sequence[bytes]
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
    depth, accepting = over_bytes.depth, over_bytes.accepting
    state = np.repeat(np.arange(len(depth), dtype=np.int32)[:, None], len(texts), axis=1)
    seen_after = np.zeros(state.shape, np.int32)
    for at in range(int(lengths.max(initial=0))):
        active = int(np.searchsorted(-sizes, -at, side="left"))
        before = state[:, :active]
        now = over_bytes.next_state[before, flat[first[:active] + at]]
        # What a match has absorbed after its end is not part of it.
        seen_after[:, :active] += ~accepting[before]
        state[:, :active] = now
    begin = seen_after - depth[state]
    back = np.argsort(order)
    return state[:, back], begin[:, back]


def match(table: StopTable, ids: Sequence[int]) -> tuple[int, int]:
    """Follows the table over ids: what a decoding loop does, one token at a time.

    Returns:
      Index of the token in which the first stop string ends and of the one in which it began (the
      number of tokens before it); (-1, -1) if none does.
    """
    state, start = 0, 0
    for index, token in enumerate(ids):
        if table.opens[state, token]:
            start = index
        state = int(table.next_state[state, token])
        if state == table.accept:
            return index, start
    return -1, -1
