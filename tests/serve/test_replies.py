"""Streamed events join to the whole reply, with texts, counts and how the thinking ended."""

import pytest

from bacr_serve.fields import Defaults, read_chat, read_completion
from bacr_serve.generation import ANSWER, FORCED, THINKING, Piece
from bacr_serve.replies import Reply
from serve_world import CLOSE, END, EOS, LEVELS, OPEN, ids, letter_policy

DEFAULTS = Defaults("policy", LEVELS, None, 64)
CUT = [
    Piece(THINKING, ids("hm")),
    Piece(THINKING, ids("hm")),
    Piece(FORCED, (CLOSE, OPEN), "budget"),
    Piece(ANSWER, ids("42")),
    Piece(ANSWER, (END,), finished=True),
]
CLOSED = [
    Piece(THINKING, (*ids("hm "), CLOSE)),
    Piece(FORCED, (OPEN,), "tag"),
    Piece(ANSWER, (*ids("42"), EOS), finished=True),
]


def replied(pieces, is_chat=True, **changes):
    """The whole reply, and the texts of the fields in its chunks."""
    policy = letter_policy(**changes)
    if is_chat:
        body = {"messages": [{"role": "user", "content": "1+1"}], "budget": 4}
        asked = read_chat(body, DEFAULTS)
    else:
        asked = read_completion({"prompt": "1+1", "budget": 4}, DEFAULTS)
    reply = Reply(policy, asked, policy.generation(asked))
    changes = [*map(reply.take, pieces), reply.finish()]
    texts = {}
    for change in changes:
        for name, text in change.items():
            texts[name] = texts.get(name, "") + text
    return reply.whole(), texts


def test_a_cut_chat():
    whole, texts = replied(CUT)
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "42", "reasoning_content": "hmhm"}
    assert texts == {"content": "42", "reasoning_content": "hmhm"}
    assert choice["finish_reason"] == "stop"
    # The prompt is `1+1~4`: five letters.
    assert whole["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    assert choice["bacr"] == {
        "budget": 4,
        "thinking_tokens": 4,
        "forced_tokens": 2,
        "answer_tokens": 3,
        "closed_by": "budget",
        "forced_text": "</think><answer>",
    }
    assert (whole["object"], whole["model"]) == ("chat.completion", "policy")


def test_a_chat_that_closed_its_thinking_shows_no_tags():
    whole, _ = replied(CLOSED)
    (choice,) = whole["choices"]
    assert choice["message"]["reasoning_content"] == "hm" and choice["message"]["content"] == "42"
    assert choice["bacr"]["closed_by"] == "tag" and choice["bacr"]["thinking_tokens"] == 4


def test_a_completion_is_all_text_without_the_end_of_the_turn():
    whole, texts = replied(CLOSED, is_chat=False)
    assert whole["choices"][0]["text"] == texts["text"] == "hm </think><answer>42"
    assert whole["object"] == "text_completion"
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_an_answer_in_a_box_begins_with_its_opening():
    pieces = [*CUT[:3], Piece(ANSWER, ids("42}"))]
    whole, _ = replied(pieces, answer_open="\\boxed{", answer_close="\n\n")
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "\\boxed{42}" and choice["finish_reason"] == "length"


@pytest.mark.parametrize("count", range(1, len(CUT)))
def test_a_truncated_reply_keeps_what_there_is(count):
    whole, texts = replied(CUT[:count])
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"] == "hmhm"[: 2 * count]
    assert choice["message"]["content"] == texts.get("content", "") == ("42" if count == 4 else "")
