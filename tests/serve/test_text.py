"""Streamed pieces join to the text before the closing tag, however the tokens are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_serve.text import TextStream

BYTES = [bytes([byte]) for byte in range(256)]


def pieces(text, closing="</think>", cuts=(), **how):
    """What is returned for the bytes of a text that arrive in several pieces."""
    stream = TextStream(BYTES, closing, **how)
    content = text.encode()
    edges = [0, *sorted(cuts), len(content)]
    found = [stream.feed(content[a:b]) for a, b in zip(edges, edges[1:])]
    return [*found, stream.finish()]


def test_the_tag_and_the_whitespace_before_it_are_left_out():
    assert "".join(pieces("a b \n</think>rest")) == "a b"
    assert "".join(pieces("a b \n")) == "a b"
    assert "".join(pieces("a b \n", strips=False)) == "a b \n"


def test_text_that_may_be_the_tag_is_held_back_until_it_is_not():
    # `a </t`, `h`, `us`: until the `u` it may be the tag.
    assert pieces("a </thus", cuts=[5, 6]) == ["a", "", " </thus", ""]
    assert pieces("a </th", cuts=[5]) == ["a", "", " </th"]


def test_a_character_appears_when_all_its_bytes_have():
    assert pieces("é!", cuts=[1]) == ["", "é!", ""]
    stream = TextStream(BYTES)
    assert stream.feed([0xC3]) == "" and stream.finish() == "\N{REPLACEMENT CHARACTER}"


@given(
    st.text("a <>/think\né", max_size=30),
    st.sets(st.integers(0, 30)),
    st.sampled_from(["", "</think>", "\n\n"]),
    st.booleans(),
)
def test_pieces_join_to_the_whole(text, cuts, closing, strips):
    size = len(text.encode())
    found = pieces(text, closing, [cut for cut in cuts if cut <= size], strips=strips)
    whole = text.partition(closing)[0] if closing else text
    assert "".join(found) == (whole.rstrip() if strips else whole)


@pytest.mark.parametrize("size", [1, 7])
def test_what_follows_the_tag_is_ignored(size):
    text = "a</think>b</think>c"
    assert "".join(pieces(text, cuts=range(size, len(text), size))) == "a"
