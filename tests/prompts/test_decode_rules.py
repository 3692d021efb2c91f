"""Vocabulary facts as the decoding loop gets them: arrays of fixed types on the device."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.prompts.decode_rules import automaton, decode_rules


@dataclass
class Table:
    next_state: Any
    opens: Any


# "ab" over the vocabulary a, b, c: nothing seen, a seen, ab seen.
AB = Table([[1, 0, 0], [1, 2, 0], [2, 2, 2]], [[1, 0, 0], [1, 0, 0], [0, 0, 0]])


def rules(**changes):
    given = {
        "allowed_tokens": np.array([True, True, False]),
        "eos_ids": {2},
        "think_close": AB,
        "answer_close": AB,
        "forced_suffix": [0, 1, 2],
        "natural_suffix": [2],
    }
    return decode_rules(**{**given, **changes})


def test_an_automaton_is_read_state_by_state_to_its_last():
    compiled = automaton(AB)
    state, seen = 0, []
    for token in (0, 0, 1, 2):
        state = int(compiled.next_state[state, token])
        seen.append(state)
    assert compiled.accept == 2 and seen == [1, 1, 2, 2]
    assert (compiled.next_state.dtype, compiled.opens.dtype) == (jnp.int32, jnp.bool_)


def test_ids_that_end_a_turn_become_a_mask_over_the_vocabulary():
    np.testing.assert_array_equal(rules().eos, [False, False, True])
    np.testing.assert_array_equal(rules(eos_ids=()).eos, [False] * 3)
    with pytest.raises(IndexError):
        rules(eos_ids=[3])


@pytest.mark.parametrize(
    ("forced", "natural", "longer"), [([0, 1, 2], [2], 3), ([0], [0, 1], 2), ([], [], 0)]
)
def test_room_is_made_for_the_longer_suffix(forced, natural, longer):
    made = rules(forced_suffix=forced, natural_suffix=natural)
    assert made.suffix_length == longer
    assert made.forced_suffix.dtype == made.natural_suffix.dtype == jnp.int32


def test_rules_pass_through_jit_as_one_argument():
    closes = jax.jit(lambda rules, state, token: rules.think_close.next_state[state, token])
    assert closes(rules(), 1, 1) == 2
    # The widths of suffixes are shapes: known while a program is traced.
    assert jax.jit(lambda rules: jnp.zeros(rules.suffix_length))(rules()).shape == (3,)
