"""Defines the vocabulary tables of the decoding loop: allowed and end tokens, stop strings."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from bacr_jax.types import pytree


@pytree
class Automaton:
    """A stop string, compiled by `stop_strings` to a transition table over token ids.

    The initial state is 0. The automaton stays in the last state once the stop string has been
    generated.

    Attributes:
      next_state: next state for each state and token id.
      opens: for each state and token id, True if the match in progress after the token started in
        this token. The last such token before the last state is the stop string's first token.
    """

    next_state: Int[Array, "states V"]
    opens: Bool[Array, "states V"]

    @property
    def accept(self) -> int:
        """Returns the last state, which means that the stop string has been generated."""
        return self.next_state.shape[0] - 1


@pytree
class DecodeRules:
    """Vocabulary tables of a run, stored on the device.

    Attributes:
      allowed_tokens: True for token ids that may be sampled.
      eos: True for token ids that end the turn.
      think_close: automaton of the string that ends the thinking.
      answer_close: automaton of the string that ends an answer.
      forced_suffix: token ids appended to thinking that was truncated or not closed.
      natural_suffix: token ids appended to thinking that was closed by the model.
      line_breaks: True for token ids whose text contains a line break.
    """

    allowed_tokens: Bool[Array, "V"]
    eos: Bool[Array, "V"]
    think_close: Automaton
    answer_close: Automaton
    forced_suffix: Int[Array, "F"]
    natural_suffix: Int[Array, "N"]
    line_breaks: Bool[Array, "V"]

    @property
    def suffix_length(self) -> int:
        """Returns the length of the longer suffix in tokens."""
        return max(self.forced_suffix.shape[0], self.natural_suffix.shape[0])


def automaton(table: Any) -> Automaton:
    """Copies a compiled stop string table (an `Automaton` of NumPy arrays) to the device."""
    next_state = jnp.asarray(table.next_state, jnp.int32)
    opens = jnp.asarray(table.opens, bool)
    return Automaton(next_state, opens)


def stop_token(token: int, *, vocab_size: int) -> Automaton:
    """Returns the table of a stop string that is always encoded as one token."""
    next_state: Any = np.zeros((2, vocab_size), np.int32)
    opens: Any = np.zeros((2, vocab_size), bool)
    next_state[0, token] = 1
    next_state[1] = 1
    opens[0, token] = True
    return Automaton(next_state, opens)


def decode_rules(
    *,
    allowed_tokens: np.ndarray,
    eos_ids: Any,
    think_close: Any,
    answer_close: Any,
    forced_suffix: Any,
    natural_suffix: Any,
    line_breaks: np.ndarray | None = None,
) -> DecodeRules:
    """Builds `DecodeRules` on the device from tables on the host.

    Args:
      eos_ids: list of the token ids that end the turn.
      line_breaks: True for token ids whose text contains a line break, or None if there are none.
    """
    eos = np.zeros(len(allowed_tokens), bool)
    eos[list(eos_ids)] = True
    if line_breaks is None:
        line_breaks = np.zeros(len(allowed_tokens), bool)
    return DecodeRules(
        allowed_tokens=jnp.asarray(allowed_tokens, bool),
        eos=jnp.asarray(eos),
        think_close=automaton(think_close),
        answer_close=automaton(answer_close),
        forced_suffix=jnp.asarray(forced_suffix, jnp.int32),
        natural_suffix=jnp.asarray(natural_suffix, jnp.int32),
        line_breaks=jnp.asarray(line_breaks),
    )
