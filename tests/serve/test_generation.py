"""`max_tokens` truncates a response wherever it falls, and closes the engine's generator."""

import asyncio

import pytest

from bacr_serve.generation import ANSWER, FORCED, THINKING, Generation, generate
from serve_world import CLOSE, END, OPEN, FakeBackend, ids


def run(max_tokens, thought="abcdef"):
    backend = FakeBackend(thought)
    request = Generation((5,), 16, 16, max_tokens=max_tokens)

    async def collect():
        return [piece async for piece in generate(backend, request)]

    found = asyncio.run(collect())
    assert backend.running == 0
    return found


def tokens(pieces):
    return tuple(token for piece in pieces for token in piece.tokens)


WHOLE = (*ids("abcdef"), CLOSE, OPEN, *ids("42"), END)


@pytest.mark.parametrize("most", range(1, len(WHOLE)))
def test_a_response_has_at_most_so_many_tokens(most):
    pieces = run(most)
    assert tokens(pieces) == WHOLE[:most]
    assert not any(piece.finished for piece in pieces)
    # Thinking that was truncated here was closed by nothing.
    assert any(piece.closed_by for piece in pieces) == (most >= 8)


@pytest.mark.parametrize("most", [None, len(WHOLE), 100])
def test_a_response_that_fits_is_whole(most):
    pieces = run(most)
    assert tokens(pieces) == WHOLE and pieces[-1].finished
    kinds = [piece.kind for piece in pieces]
    assert kinds == sorted(kinds, key=[THINKING, FORCED, ANSWER].index)
