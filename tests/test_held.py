"""Budgets held by calls: what an engine writes in pieces becomes what a loop writes by itself."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bacr_held as held
from bacr_held.calls import answer_of
from bacr_held.server import check_length, parameters, seed_of

# Tokens: 1 a word, 2 `</`, 3 `think>`, 4 `answer>`, 5 ends the turn, 6 holds a line break, 7 `<a>`.
THINKING = {
    "closing_ids": [2, 3, 7],
    "answer_ids": [7],
    "end_ids": [5],
    "never_sampled": "0 8-9",
    "think_close": {"string": "</think>", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "3"]]},
    "answer_close": {"string": "</answer>", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "4"]]},
    "answer_tokens": 3,
    "cap": 9,
    "grace": 0,
    "line_breaks": "6",
}
WORDS = [1] * 20


def engine(part, drawn, early=()):
    """Answers the calls of a part from a stream of tokens; stops early after some numbers."""
    stream, early = list(drawn), iter(early)
    while (call := part.call()) is not None:
        assert call.prompt == (*part.prompt, *part.tokens) and call.max_tokens > 0
        found = stream[: min(call.max_tokens, next(early, 99))]
        for index, token in enumerate(found):
            if token in call.stop_ids:
                found = found[: index + 1]
                break
        del stream[: len(found)]
        part.take(found)


def said(thought, answered, limit, early=(), **changes):
    """A row for which these tokens are drawn in thinking and answer."""
    rules = held.read_rules({**THINKING, **changes})
    thinking = held.Thinking(rules, [1, 1], limit)
    engine(thinking, thought, early)
    answering = thinking.answering()
    engine(answering, answered, early)
    return answer_of(thinking, answering)


class TestAnswers:
    def test_thinking_is_cut_at_the_budget_and_answered(self):
        found = said(WORDS, WORDS, 2)
        assert found.tokens == (1, 1, 2, 3, 7, 1, 1, 1)
        assert (found.closed_by, found.finished) == ("budget", False)

    def test_a_budget_of_zero_asks_for_no_thinking(self):
        assert said([], [2, 4], 0).tokens == (2, 3, 7, 2, 4)

    def test_a_tag_counts_and_asks_for_its_own_suffix(self):
        found = said([1, 2, 3, 1, 1], [1, 2, 4, 1], 3)
        assert found.tokens == (1, 2, 3, 7, 1, 2, 4)
        assert (found.closed_by, found.finished) == ("tag", True)

    def test_the_end_of_the_turn_is_not_kept_in_thinking(self):
        found = said([1, 5], [1, 5, 1], 9)
        assert (found.thinking, found.closed_by) == ((1,), "end of turn")
        assert (found.answer, found.finished) == ((1, 5), True)

    def test_a_cut_waits_for_a_line_break_inside_the_grace_window(self):
        grace = {"grace": 2}
        assert said([1, 6, 1], [5], 1, **grace).thinking == (1, 6)
        assert said([6, 1, 1], [5], 1, **grace).thinking == (6,)
        assert said(WORDS, [5], 2, **grace).thinking == (1, 1, 1, 1)
        assert said(WORDS, [5], 0, **grace).thinking == ()

    def test_what_an_engine_writes_too_much_is_left_out(self):
        rules = held.read_rules(THINKING)
        thinking = held.Thinking(rules, [1], 9)
        thinking.take([1, 2, 3, 1, 1])
        assert thinking.kept == (1, 2, 3) and thinking.call() is None

    def test_an_engine_that_writes_nothing_is_an_error(self):
        with pytest.raises(ValueError, match="without a token"):
            held.Thinking(held.read_rules(THINKING), [1], 9).take([])


@settings(max_examples=200, deadline=None)
@given(
    thought=st.lists(st.integers(1, 7), min_size=10, max_size=10),
    answered=st.lists(st.integers(1, 7), min_size=6, max_size=6),
    limit=st.integers(0, 6),
    grace=st.integers(0, 3),
    answer_tokens=st.integers(1, 5),
    early=st.lists(st.integers(1, 3), max_size=8),
)
def test_calls_say_what_the_loop_in_transformers_says(
    thought, answered, limit, grace, answer_tokens, early
):
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
    from bacr_jax.export import budget_generation as loop

    changes = {"grace": grace, "answer_tokens": answer_tokens}
    rows = loop.Rows(loop.Rules({**THINKING, **changes}, 10, "cpu"), torch.tensor([limit]))
    streams, expected = {loop.THINKING: iter(thought), loop.ANSWERING: iter(answered)}, []
    while not rows.done:
        drawn = next(streams.get(int(rows.phase), iter([9])))
        expected.append(int(rows.take(torch.tensor([drawn]), 0)))
    assert list(said(thought, answered, limit, early, **changes).tokens) == expected


def test_an_answer_at_an_earlier_cut_keeps_fewer_tokens():
    thinking = held.Thinking(held.read_rules(THINKING), [1], 9)
    thinking.take([1, 6, 1, 2, 3])
    early = thinking.answering_at(2)
    assert early.prompt == (1, 1, 6, 2, 3, 7) and early.forced == (2, 3, 7)
    assert thinking.answering().prompt == (1, 1, 6, 1, 2, 3, 7)


@pytest.mark.parametrize(
    ("budget", "found"),
    [(8, 8), (0, 0), (None, None), ("none", None), ("low", 16), (np.int64(3), 3)],
)
def test_budgets(budget, found):
    assert held.read_budget(budget, {"low": 16}) == found


@pytest.mark.parametrize("budget", [-1, 8.5, 8.0, True, "8", "high", 2**31, 101, [8], {}])
def test_what_is_no_budget_is_a_value_error_that_names_it(budget):
    with pytest.raises(ValueError, match=r"^budget: found .*; write a whole number from 0 to 100"):
        held.read_budget(budget, {"low": 16}, 100)


def test_a_long_text_is_not_repeated_in_the_refusal():
    with pytest.raises(ValueError) as refused:
        held.read_budget("9" * 10_000, {})
    assert len(str(refused.value)) < 200


def test_a_row_has_to_fit_the_engine():
    rules = held.read_rules({**THINKING, "grace": 2})
    # 10 prompt tokens, 7 thinking, 2 grace, 3 forced, 3 answer.
    check_length(rules, 7, 10, 25)
    check_length(rules, 0, 10, 16)
    with pytest.raises(ValueError, match="budget: found 7, .* 24 positions leave 6;"):
        check_length(rules, 7, 10, 24)
    with pytest.raises(ValueError, match="budget: found none, which thinks up to 9"):
        check_length(rules, None, 10, 24)


def test_every_call_of_every_row_has_a_seed_of_its_own():
    call = lambda number: held.Call((1,), 1, (), (), number)
    seeds = {
        seed_of(held.Sampling(1.0, 1.0, seed), part, call(number))
        for seed in range(20)
        for part in range(3)
        for number in range(3)
    }
    assert len(seeds) == 180
    assert parameters(call(0), held.Sampling(), 0)["seed"] is None


def test_a_folder_that_is_not_ours_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"can't read its config.json \(No such file"):
        held.read_folder(tmp_path)
    for config in ({}, [], {"thinking": None}, {"thinking": {"cap": 8}}, {"thinking": 3}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="does not say how thinking is held; write") as refused:
            held.read_folder(tmp_path)
        assert "\n" not in str(refused.value)


def test_a_fingerprint_changes_with_config_and_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        held.fingerprint(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10_000))
    first = held.fingerprint(tmp_path)
    weights.write_bytes(bytes(9_999) + b"1")
    second = held.fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert len({first, second, held.fingerprint(tmp_path)}) == 3
