"""Worked traces by hand, and the supervised rows made of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.questions import ledger
from ledger_world import check_at_once, check_trace

STYLES = ("steps", "redo", "mixed", "at_once")


@st.composite
def problems(draw):
    """A problem put together here, with its answer."""
    start, operands = (
        draw(st.integers(0, 9)),
        draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)),
    )
    question = str(start) + "".join(f"{c}{n}" for c, n in zip("abcde", operands))
    return ledger.Problem(question, str((start + sum(operands)) % 10), len(operands))


class TestTraces:
    def test_examples_by_hand(self):
        problem, rng = ledger.Problem("4a2b3c1", "0", 3), np.random.default_rng(0)
        assert ledger.render(problem, "steps", rng) == "a4+2=6b6+3=9c9+1=0"
        assert ledger.render(problem, "redo", rng) == "a4+2=64+2=6b6+3=96+3=9c9+1=09+1=0"
        assert ledger.render(problem, "at_once", rng) == "4231=0"

    @settings(max_examples=60)
    @given(problem=problems(), seed=st.integers(0, 1000))
    def test_every_style_works_the_answer_out(self, problem, seed):
        rng = np.random.default_rng(seed)
        n = problem.level
        lengths = {"steps": 6 * n, "redo": 11 * n, "at_once": n + 3}
        for style in STYLES:
            trace = ledger.render(problem, style, rng)
            if style == "at_once":
                redone, value = 0, check_at_once(problem.question, trace)
            else:
                redone, value = check_trace(problem.question, trace)
            assert str(value) == problem.answer
            assert len(trace) == lengths.get(style, 6 * n + 5 * redone)

    def test_mixed_redoes_half_of_the_lines(self):
        problem, rng = ledger.Problem("4a2b3c1d1e2", "3", 5), np.random.default_rng(0)
        redone = [
            check_trace(problem.question, ledger.render(problem, "mixed", rng))[0]
            for _ in range(1000)
        ]
        # 5000 fair coins: 5 standard deviations are 177
        assert abs(sum(redone) - 2500) < 177
        assert set(redone) == {0, 1, 2, 3, 4, 5}


def supervised_example(problem, style, rng, *, cut=False):
    """One example without redone lines: its tokens, and which of them are in the loss."""
    kept = rng.random() if cut else None
    row = ledger.example(problem, [False] * 5, style == "at_once", kept=kept)
    (tokens,), (mask,) = ledger.padded([row])
    return [ledger.VOCABULARY[token] for token in tokens], mask.tolist()


class TestExamples:
    def test_the_whole_row_by_hand(self):
        problem, rng = ledger.Problem("4a2", "6", 1), np.random.default_rng(0)
        tokens, mask = supervised_example(problem, "at_once", rng)
        prompt, rest = ["<bos>", *"4a2", "<think>"], [*"42=6", "</think>", "<answer>", "6"]
        assert tokens == [*prompt, *rest, "</answer>"]
        assert mask == [False] * 5 + [True] * 8

    def test_forced_tags_of_a_cut_example_are_not_in_the_loss(self):
        problem, rng = ledger.Problem("4a2b3c1", "0", 3), np.random.default_rng(0)
        kept = set()
        for _ in range(400):
            tokens, mask = supervised_example(problem, "steps", rng, cut=True)
            length = len(tokens) - 9 - 4
            assert "".join(tokens[9 : 9 + length]) == "a4+2=6b6+3=9c9+1=0"[:length]
            assert tokens[-4:] == ["</think>", "<answer>", "0", "</answer>"]
            assert mask == [False] * 9 + [True] * length + [False, False, True, True]
            kept.add(length)
        # from nothing to all but the last token, every place
        assert kept == set(range(18))

    def test_too_narrow_a_row_is_an_error_not_a_cut(self):
        row = ledger.example(ledger.problem_of(7, 5, 3), [True] * 5, False)
        with pytest.raises(ValueError, match="has 72 tokens, but the batch is only 71 tokens wide"):
            ledger.padded([row], 71)
