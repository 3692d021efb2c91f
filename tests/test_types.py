"""Pytrees that travel between rooms: frozen, and open to whatever JAX puts in their places."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from bacr_jax.types import Prompts, pytree


@pytree
class Pair:
    first: Float[Array, "B"]
    second: Float[Array, "B"] | None = None


def test_leaves_are_the_fields_that_hold_something():
    doubled = jax.tree.map(lambda x: 2 * x, Pair(jnp.ones(2)))
    assert doubled.first.tolist() == [2.0, 2.0] and doubled.second is None


def test_fields_take_shapes_and_shardings_as_well_as_arrays():
    shapes = jax.eval_shape(lambda pair: pair, Pair(jnp.ones(2), jnp.ones(2)))
    assert shapes.first.shape == (2,)
    assert Pair("of rank nothing").first == "of rank nothing"


def test_an_instance_is_changed_by_making_another():
    pair = Pair(jnp.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.first = jnp.zeros(2)
    assert dataclasses.replace(pair, second=1.0).second == 1.0 and pair.second is None


def test_prompts_are_taken_by_row_and_padded_on_the_right():
    tokens = jnp.array([[1, 2, 0], [3, 4, 5], [6, 0, 0]])
    prompts = Prompts(tokens, jnp.array([2, 3, 1]), jnp.array([0, 1, 0]), jnp.array([1, 3, 1]))
    rows = prompts.take(np.array([1, 1, 0])).padded(5)
    assert rows.tokens.tolist() == [[3, 4, 5, 0, 0], [3, 4, 5, 0, 0], [1, 2, 0, 0, 0]]
    assert rows.lengths.tolist() == [3, 3, 2]
    assert (rows.question_start.tolist(), rows.question_end.tolist()) == ([1, 1, 0], [3, 3, 1])
