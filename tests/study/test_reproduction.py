"""A study run again, beside what it said before."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from bacr_study import reproduction
from bacr_study.__main__ import main
from bacr_study.cells import read_cells
from bacr_study.reproduction import (
    Pair,
    detectable,
    expected_share,
    pairs,
    summary,
    welch,
)
from bacr_study.results import build_results, write_results
from bacr_study.statistics import OVER_PROBLEMS, Estimate, mean_interval
from cells_world import ARMS, main_study, write_cells
from study_world import write_study

FIRST, SECOND = [0.50, 0.53, 0.47, 0.55, 0.51], [0.58, 0.57, 0.61, 0.50, 0.59]


def pair(before, now):
    study = main_study()
    found = mean_interval(before), mean_interval(now)
    return Pair(study.tasks[0], study.variants()[0], "8", *found)


@pytest.mark.parametrize("second", [SECOND, SECOND[:3], [0.2, 0.8]])
def test_welch_is_scipys(second):
    wanted = stats.ttest_ind(FIRST, second, equal_var=False).pvalue
    assert welch(mean_interval(FIRST), mean_interval(second)) == pytest.approx(wanted, rel=1e-9)


def test_samples_without_spread_and_single_seeds():
    same, other = mean_interval([1.0, 1.0, 1.0]), mean_interval([0.5, 0.5])
    assert welch(same, same) == 1.0 and welch(same, other) == 0.0
    assert math.isnan(welch(same, mean_interval([1.0])))


def over_problems(mean, seeds):
    return Estimate(mean, mean - 0.2, mean + 0.07, seeds, OVER_PROBLEMS)


def test_an_interval_over_problems_says_nothing_of_seeds():
    one, two = over_problems(0.9, 1), over_problems(0.9, 3)
    assert math.isnan(welch(one, two)) and math.isnan(detectable(two, one))
    assert welch(two, two) == 1.0 and detectable(two, two) == 0.0
    assert welch(two, over_problems(0.8, 3)) == 0.0
    # As if it stood there with no width.
    varied = mean_interval([0.93, 0.95, 0.97])
    assert welch(two, varied) == welch(Estimate(0.9, 0.9, 0.9, 3), varied)


def estimate(seeds, deviation=1.0):
    """A mean of 0 over seeds of this standard deviation."""
    values = np.random.default_rng(0).normal(size=seeds)
    return mean_interval(list(deviation * (values - values.mean()) / values.std(ddof=1)))


@pytest.mark.parametrize(("seeds", "difference"), [(64, 0.5), (17, 1.0)])
def test_the_detectable_difference_is_cohens(seeds, difference):
    # Cohen (1988), table 2.4.1: d of .5 needs 64 a group at 5 % and 80 %, d of 1 needs 17.
    found = detectable(estimate(seeds), estimate(seeds))
    fewer = detectable(estimate(seeds - 1), estimate(seeds - 1))
    assert found <= difference < fewer


@pytest.mark.parametrize(("spreads", "level"), [((1.0, 1.0), 0.05), ((1.0, 3.0), 0.05 / 20)])
def test_that_difference_is_found_in_four_cases_of_five(spreads, level):
    samples = [estimate(5, spread) for spread in spreads]
    shift = detectable(*samples, level=level)
    rng = np.random.default_rng(1)
    one, other = (rng.normal(0, spread, (20_000, 5)) for spread in spreads)
    found = stats.ttest_ind(one + shift, other, axis=1, equal_var=False).pvalue < level
    # Welch's estimated df cost some power.
    assert found.mean() == pytest.approx(0.8, abs=0.04)


def test_samples_without_spread_and_single_seeds_have_no_power():
    same = mean_interval([1.0, 1.0])
    assert detectable(same, same) == 0.0
    assert math.isnan(detectable(same, mean_interval([1.0])))
    one = [pair([0.4], [0.5])]
    assert "least detectable difference: unknown" in summary(one)
    # .05 apart in each of two seeds: 3.536 points of error, 2 df, 5.653 errors.
    few = summary([pair([0.45, 0.50], [0.45, 0.50])])
    assert "median 20.0, largest 20.0 points by one test" in few


def test_within_is_the_earlier_interval():
    # .512 +- 2.776 * .0303 / sqrt(5), so .474 to .550.
    assert pair(FIRST, [0.549, 0.549]).within and pair(FIRST, [0.475, 0.475]).within
    assert not pair(FIRST, [0.551, 0.551]).within and not pair(FIRST, [0.473, 0.473]).within
    assert pair([0.4], [0.4]).within and not pair([0.4], [0.41]).within


def test_what_chance_alone_leaves_within():
    # P(|T_4| < 2.776 / sqrt 2) and P(|T_2| < 4.303 / sqrt 2).
    assert expected_share([pair(FIRST, FIRST)]) == pytest.approx(0.879, abs=1e-3)
    assert expected_share([pair(FIRST[:3], FIRST)]) == pytest.approx(0.907, abs=1e-3)


def results(folder, **changes):
    arms = tuple(arm for arm in ARMS if arm.id in ("cot", "anytime", "bacr_paper"))
    study = main_study(arms=arms, reference=("anytime",), **changes)
    write_cells(folder, study, problems=12, steps=10)
    return study, build_results(read_cells(folder, study), study)


def test_a_study_agrees_with_itself_and_not_with_another(tmp_path):
    study, now = results(tmp_path)
    found = pairs(now, now, study)
    # Three arms, two tasks, five budgets and their mean.
    assert len(found) == 3 * 2 * 6
    assert summary(found).startswith("36 of 36 means lie")
    assert "\n0 of 36 differ" in summary(found)
    worse = json.loads(json.dumps(now))
    entry = worse["means"]["tradeoff"]["test"]["sampled"]["anytime"]["16"]["accuracy"]
    for key, value in {"mean": 0.01, "low": 0.009, "high": 0.011}.items():
        entry[key] = value
    said = summary(pairs(worse, now, study))
    assert "\n1 of 36 differ" in said and "differs: tradeoff, anytime, 16" in said


@pytest.mark.slow
def test_the_table_is_written_beside_the_others(tmp_path):
    study, now = results(tmp_path)
    write_results(tmp_path, study)
    files, said = reproduction.write(tmp_path, now, study)
    assert [file.name for file in files] == [f"reproduction.{end}" for end in ("md", "tex", "csv")]
    assert files[0].read_text().count("| yes |") == 36 and said.startswith("36 of 36")
    assert "| detectable | detectable, Holm |" in files[0].read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read"),
        ("{", "can't be read"),
        ("[1]", "holds no study's means"),
        ('{"study": {"name": "main", "size": "gpu"}, "means": {}}', "is of study main, size gpu"),
    ],
)
def test_what_is_no_earlier_result_is_refused_before_anything_runs(tmp_path, capsys, text, words):
    path = tmp_path / "earlier.json"
    if text is not None:
        path.write_text(text)
    where = ["--config", str(write_study(tmp_path)), "--out", str(tmp_path / "studies")]
    assert main([*where, "--against", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (tmp_path / "studies").exists()
    assert main([*where, "--against", str(path), "--list"]) == 2
    assert "--list" in capsys.readouterr().err
