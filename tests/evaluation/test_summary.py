"""The numbers of a report are the means of the samples they are about."""

import itertools

import numpy as np
import pytest

from bacr_grading import ExactGrader
from bacr_jax.evaluation.samples import GREEDY, SAMPLED, EvalSetting, graded
from bacr_jax.evaluation.summary import (
    anytime,
    dense_curve,
    entry_of,
    numbers_of_samples,
    summarise,
)
from evaluation_world import GOLD, drawn, near_problems, near_results, sample

ROWS = [["4", "4", "1", "1"], ["4", "2", "2", None], ["4", "4", "4", "4"]]


def test_entry_by_hand():
    entry = entry_of(drawn(ROWS), ExactGrader())
    assert entry["accuracy"] == pytest.approx(7 / 12)
    assert entry["pass_at"]["1"]["value"] == pytest.approx(7 / 12)
    assert entry["pass_at"]["4"]["value"] == 1.0
    # Two against two is a tie, one against two is lost, four of four is won.
    assert entry["maj_at"]["4"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert entry["maj_at"]["4"]["mean_thinking_tokens"] == 4 * 5
    assert entry["maj_at"]["4"]["mean_total_tokens"] == 4 * 9
    assert entry["no_answer_share"] == pytest.approx(1 / 12)
    assert entry["forced_share"] == 0
    low, high = entry["ci95"]
    assert low <= entry["accuracy"] <= high


def test_votes_by_brute_force():
    rng = np.random.default_rng(0)
    rows = [[str(x) if x else None for x in row] for row in rng.integers(0, 6, (5, 6))]
    entry = entry_of(drawn(rows), ExactGrader())
    for k in (2, 4, 6):
        shares, hits = [], []
        for row in rows:
            for chosen in itertools.combinations(row, k):
                tally = {a: chosen.count(a) for a in chosen if a is not None}
                best = [a for a, c in tally.items() if c == max(tally.values())]
                shares.append(best.count(GOLD) / len(best) if best else 0.0)
                hits.append(GOLD in chosen)
        assert entry["maj_at"][str(k)]["value"] == pytest.approx(np.mean(shares))
        assert entry["pass_at"][str(k)]["value"] == pytest.approx(np.mean(hits))


def test_lenient_and_strict_verdicts_stand_side_by_side():
    rows = [sample(0, 0, "4", strict=False), sample(1, 0, "4"), sample(2, 0, "1")]
    entry = entry_of(graded(rows, EvalSetting(SAMPLED, 8, 1)), ExactGrader())
    assert entry["accuracy"] == pytest.approx(2 / 3)
    assert entry["strict_accuracy"] == pytest.approx(1 / 3)
    assert entry["disagreement"] == pytest.approx(1 / 3)
    assert "maj_at" not in entry


def test_levels_and_subjects_count_their_own_problems():
    entry = entry_of(drawn(ROWS), ExactGrader())
    assert {k: v["problems"] for k, v in entry["levels"].items()} == {"1": 2, "2": 1}
    assert entry["levels"]["1"]["accuracy"] == pytest.approx(6 / 8)
    assert list(entry["subjects"]) == ["algebra"]
    assert entry["subjects"]["algebra"]["accuracy"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_k_are_powers_of_two_and_all(samples, ks):
    assert numbers_of_samples(samples) == ks


def test_anytime_is_the_mean_and_the_area_of_the_curve():
    results = {
        8: drawn([["4"], ["1"]]),
        16: drawn([["4"], ["1"]], budget=16),
        64: drawn([["4"], ["4"]], budget=64),
    }
    found = anytime(results)
    assert found["mean"] == pytest.approx(2 / 3)
    # One doubling at 0.5, two between 0.5 and 1.
    assert found["area"] == pytest.approx((0.5 + 2 * 0.75) / 3)
    assert found["budgets"] == [8, 16, 64]
    assert found["mean_ci95"][0] <= found["mean"] <= found["mean_ci95"][1]


def test_tokens_of_a_dense_curve_are_those_of_its_points():
    by_cut = {}
    for cut, lengths in {3: [3, 3], 8: [4, 8]}.items():
        setting = EvalSetting(GREEDY, 8, 1, cut)
        answers = [
            sample(problem, 0, GOLD, mode=GREEDY, cut=cut, thinking=length)
            for problem, length in enumerate(lengths)
        ]
        by_cut[cut] = graded(answers, setting)
    points = dense_curve(by_cut)["curve"].values()
    # Every answer has four other tokens.
    assert [point["mean_thinking_tokens"] for point in points] == [3.0, 6.0]
    assert [point["mean_total_tokens"] for point in points] == [7.0, 10.0]


def test_self_consistency_counts_tokens_both_ways():
    results = {
        EvalSetting(SAMPLED, b, 4): drawn(ROWS, budget=b, thinking=b // 2) for b in (4, 8, 16)
    }
    result = summarise(results, ExactGrader(), budgets=[8, 16])
    assert list(result["by_budget"][SAMPLED]) == ["8", "16"]
    assert result["anytime"][SAMPLED]["budgets"] == [8, 16]
    votes = result["self_consistency"]
    assert list(votes) == ["2", "4"]
    each = votes["2"]["per_sample"]["8"]
    assert (each["budget_each"], each["budget_total"]) == (8, 16)
    assert each["mean_thinking_tokens"] == 2 * 4
    equal = votes["2"]["matched_total"]["8"]
    assert (equal["budget_each"], equal["budget_total"]) == (4, 8)
    assert equal["mean_thinking_tokens"] == 2 * 2
    assert list(votes["4"]["matched_total"]) == ["16"]  # at 8 nobody drew samples of 2 tokens


def test_problems_without_near_duplicates_are_counted_apart():
    marked = near_problems([True, False, False, True])
    result = summarise(near_results(), ExactGrader(), problems=marked)
    assert result["near_duplicates"] == {"count": 2, "of": "train"}
    for budget in ("8", "16"):
        entry = result["by_budget"][GREEDY][budget]
        assert (entry["problems"], entry["accuracy"]) == (4, 0.75)
        others = entry["without_near_duplicates"]
        # The second problem is right after 2 tokens, the third wrong after 3.
        assert (others["problems"], others["accuracy"]) == (2, 0.5)
        assert others["mean_thinking_tokens"] == 2.5
        assert others["ci95"][0] < 0.5 < others["ci95"][1]


@pytest.mark.parametrize(
    ("marks", "compared_with", "near"),
    [
        ([False] * 4, "", None),
        ([False] * 4, "train", {"count": 0, "of": "train"}),
        ([True] * 4, "train", {"count": 4, "of": "train"}),
    ],
)
def test_no_second_figure_where_it_would_be_the_same_or_about_nothing(marks, compared_with, near):
    result = summarise(near_results(), ExactGrader(), problems=near_problems(marks, compared_with))
    assert result["near_duplicates"] == near
    assert "without_near_duplicates" not in result["by_budget"][GREEDY]["8"]
