"""Facts about the vocabulary that a decoding loop needs: allowed ids, ends, stop strings."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from bacr_jax.types import pytree


@pytree
class Automaton:
    """A stop string as a transition table over token ids, compiled by `stop_strings`.

    State 0 is the start. The last state is absorbing and means that the stop string was seen.

    Attributes:
      next_state: state after a token, for every state and token id.
      opens: True if the partial or complete match after the token began inside that token. The
        last such token of a row is the first one of the stop string.
    """

    next_state: Int[Array, "states V"]
    opens: Bool[Array, "states V"]

    @property
    def accept(self) -> int:
        """Returns the absorbing state."""
        return self.next_state.shape[0] - 1


@pytree
class DecodeRules:
    """Facts about the vocabulary of a run, on the device.

    Attributes:
      allowed_tokens: True at ids that may be sampled.
      eos: True at ids that end the turn.
      think_close: automaton of the string that ends thinking.
      answer_close: automaton of the string that ends an answer.
      forced_suffix: ids appended to thinking that was cut or not closed.
      natural_suffix: ids appended to thinking that the model closed itself.
      line_breaks: True at ids whose text contains a line break.
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
        """Returns the number of ids in the longer suffix."""
        return max(self.forced_suffix.shape[0], self.natural_suffix.shape[0])


def automaton(table: Any) -> Automaton:
    """Copies a compiled stop table to the device."""
    next_state = jnp.asarray(table.next_state, jnp.int32)
    opens = jnp.asarray(table.opens, bool)
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
    """Copies host tables into `DecodeRules` on the device.

    Args:
      eos_ids: list of the ids that end the turn.
      line_breaks: None for no line breaks.
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
