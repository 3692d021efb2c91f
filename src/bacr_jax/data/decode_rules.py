"""What a decoding loop must know of the vocabulary: legal ids, ends, stop strings and bridges."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from bacr_jax.types import pytree


@pytree
class Automaton:
    """A stop string as a table over (state, token); `text.stopping` compiles it.

    Attributes:
      next_state: state after a token; the last state is absorbing and means: seen.
      opens: the match alive after the token began inside that token.
    """

    next_state: Int[Array, "states V"]
    opens: Bool[Array, "states V"]

    @property
    def accept(self) -> int:
        """The absorbing state."""
        return self.next_state.shape[0] - 1


@pytree
class DecodeRules:
    """Vocabulary facts of a run, on the device.

    Attributes:
      legal: ids that may be sampled.
      eos: ids that end the model's turn.
      think_close: automaton of the text that closes the thinking.
      answer_close: automaton of the text that closes the answer.
      bridge_forced: ids put after thinking that was cut or left unclosed.
      bridge_natural: ids put after thinking that the model closed itself.
    """

    legal: Bool[Array, "V"]
    eos: Bool[Array, "V"]
    think_close: Automaton
    answer_close: Automaton
    bridge_forced: Int[Array, "F"]
    bridge_natural: Int[Array, "N"]

    @property
    def bridge_length(self) -> int:
        """Width of the longer bridge."""
        return max(self.bridge_forced.shape[0], self.bridge_natural.shape[0])


def automaton(table: Any) -> Automaton:
    """Puts a compiled stop table on the device."""
    return Automaton(jnp.asarray(table.next_state, jnp.int32), jnp.asarray(table.opens, bool))


def decode_rules(
    *,
    legal: np.ndarray,
    eos_ids: Any,
    think_close: Any,
    answer_close: Any,
    bridge_forced: Any,
    bridge_natural: Any,
) -> DecodeRules:
    """Collects host tables into device arrays; see `DecodeRules`."""
    eos = np.zeros(len(legal), bool)
    eos[list(eos_ids)] = True
    return DecodeRules(
        legal=jnp.asarray(legal, bool),
        eos=jnp.asarray(eos),
        think_close=automaton(think_close),
        answer_close=automaton(answer_close),
        bridge_forced=jnp.asarray(bridge_forced, jnp.int32),
        bridge_natural=jnp.asarray(bridge_natural, jnp.int32),
    )
