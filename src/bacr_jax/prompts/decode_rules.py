"""What a decoding loop must know of the vocabulary: which ids, ends, stop strings, suffixes."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from bacr_jax.types import pytree


@pytree
class Automaton:
    """A stop string as a table over token ids; `stop_strings` compiles it.

    State 0 is the start; the last state is absorbing: the stop string was seen.

    Attributes:
      next_state: state after a token, for every state and token id.
      opens: true where the match that is live after the token, whole or partial, began inside that
        token. The last such token on a row is the first one of the tag.
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
      allowed_tokens: ids that may be sampled.
      forced_suffix: ids put after thinking that was cut or left unclosed.
      natural_suffix: ids put after thinking that the model closed itself.
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
        """Width of the longer suffix."""
        return max(self.forced_suffix.shape[0], self.natural_suffix.shape[0])


def automaton(table: Any) -> Automaton:
    """Puts a compiled stop table on the device."""
    return Automaton(jnp.asarray(table.next_state, jnp.int32), jnp.asarray(table.opens, bool))


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
    """Collects host tables into device arrays; see `DecodeRules`. By default no line breaks."""
    eos = np.zeros(len(allowed_tokens), bool)
    eos[list(eos_ids)] = True
    return DecodeRules(
        allowed_tokens=jnp.asarray(allowed_tokens, bool),
        eos=jnp.asarray(eos),
        think_close=automaton(think_close),
        answer_close=automaton(answer_close),
        forced_suffix=jnp.asarray(forced_suffix, jnp.int32),
        natural_suffix=jnp.asarray(natural_suffix, jnp.int32),
        line_breaks=jnp.zeros(len(eos), bool) if line_breaks is None else jnp.asarray(line_breaks),
    )
