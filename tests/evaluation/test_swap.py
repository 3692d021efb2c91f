"""The swap table shows whether a policy uses the budget that it receives as input."""

import numpy as np
import pytest

from bacr_grading import ExactGrader
from bacr_jax.evaluation.samples import GREEDY, EvalSetting, graded
from bacr_jax.evaluation.summary import summarise
from bacr_jax.evaluation.swap import length_differences, matched_gains, swap_table
from evaluation_world import GOLD, sample


def pair(budget, cut, verdicts, thinking):
    """Greedy answers of a pair of input budget and truncation point."""
    setting = EvalSetting(GREEDY, budget, 1, cut)
    samples = [
        sample(
            problem,
            0,
            GOLD if right else "1",
            budget=budget,
            mode=GREEDY,
            cut=cut,
            thinking=tokens,
            closed_by="budget" if tokens == cut else "tag",
        )
        for problem, (right, tokens) in enumerate(zip(verdicts, thinking, strict=True))
    ]
    return setting, graded(samples, setting)


def adaptive():
    """A policy that writes 3 tokens with input 4 and 8 with input 8, and answers when it is done.

    With input 4, problems 0 to 2 of 4 are right. With input 8, all are right if they are not
    truncated, and none is if they are truncated at 4.
    """
    return dict(
        [
            pair(4, 4, [True, True, True, False], [3, 3, 3, 3]),
            pair(4, 8, [True, True, True, False], [3, 3, 3, 3]),
            pair(8, 4, [False] * 4, [4] * 4),
            pair(8, 8, [True] * 4, [8, 8, 8, 6]),
        ]
    )


def test_the_gain_is_the_diagonal_less_the_mean_of_the_other_inputs():
    # One problem, three budgets: rows are inputs, columns are truncation points.
    correct = np.array([[[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.5, 0.0, 0.5]]])
    np.testing.assert_allclose(matched_gains(correct), [[1 - 0.25, 1 - 0.0, 0.5 - 0.5]])


def test_a_policy_without_use_for_its_input_gains_nothing():
    rows = np.random.default_rng(0).random((5, 1, 3))
    np.testing.assert_allclose(matched_gains(np.repeat(rows, 3, axis=1)), 0.0, atol=1e-12)


def test_lengths_are_compared_for_every_pair_of_inputs():
    pairs, differences = length_differences(np.array([[1.0, 4.0, 9.0], [2.0, 2.0, 3.0]]))
    assert pairs == [(1, 0), (2, 0), (2, 1)]
    np.testing.assert_array_equal(differences, [[3, 8, 5], [0, 1, 1]])


def test_table_by_hand():
    by_pair = {(s.budget, s.cut): cell for s, cell in adaptive().items()}
    table = swap_table(by_pair)
    assert table["budgets"] == [4, 8]
    accuracies = {
        (budget, cut): entry["accuracy"]
        for budget, by_cut in table["pairs"].items()
        for cut, entry in by_cut.items()
    }
    assert accuracies == {("4", "4"): 0.75, ("4", "8"): 0.75, ("8", "4"): 0.0, ("8", "8"): 1.0}
    gain = table["matched_gain"]
    assert gain["by_cut"]["4"]["difference"] == 0.75
    assert gain["by_cut"]["8"]["difference"] == 0.25
    assert gain["difference"] == 0.5
    # Every problem gains .5, so resampling has no width and the formula's interval is used:
    # m = 4 * .5 / 6 and v = (4 * .25 + 1) / 6 - m^2.
    mean = 2.0 / 6
    half = 1.959964 * np.sqrt((2.0 / 6 - mean**2) / 6)
    assert gain["ci95"] == pytest.approx([mean - half, mean + half], abs=1e-6)
    (length,) = table["lengths"]
    assert (length["budget"], length["less"]) == (8, 4)
    assert length["difference"] == (5 + 5 + 5 + 3) / 4
    low, high = length["ci95"]
    assert 3 <= low < 4.5 < high <= 5
    assert table["pairs"]["8"]["4"]["completion_rate"] == 0.0
    assert table["pairs"]["8"]["8"]["completion_rate"] == 0.25


def test_tokens_of_a_pair_are_those_of_its_answers():
    by_pair = {}
    for budget in (4, 8):
        for cut in (4, 8):
            _, by_pair[budget, cut] = pair(budget, cut, [True, True], [3, cut])
    entry = swap_table(by_pair)["pairs"]["4"]["8"]
    # 3 and 8 thinking tokens, and 4 other tokens each.
    assert (entry["mean_thinking_tokens"], entry["mean_total_tokens"]) == (5.5, 9.5)
    assert entry["thinking_ci95"] == [3.0, 8.0] and entry["total_ci95"] == [7.0, 12.0]


def test_traces_of_several_inputs_are_a_swap_table_and_of_one_a_dense_curve():
    uncut = EvalSetting(GREEDY, 8, 1)
    _, cell = pair(8, 8, [True] * 4, [8] * 4)
    results = {uncut: cell, **adaptive()}
    result = summarise(results, ExactGrader())
    assert result["swap"][GREEDY]["budgets"] == [4, 8] and result["dense"] == {}
    one_input = {s: cell for s, cell in results.items() if s.budget == 8}
    result = summarise(one_input, ExactGrader())
    assert "swap" not in result and list(result["dense"][GREEDY]["curve"]) == ["4", "8"]
