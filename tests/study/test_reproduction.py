"""A study run again, beside what it said before."""

import json
import math

import pytest
from scipy import stats

from bacr_jax.study import reproduction
from bacr_jax.study.__main__ import main
from bacr_jax.study.cells import read_cells
from bacr_jax.study.reproduction import Pair, expected_share, pairs, summary, welch
from bacr_jax.study.results import build_results, write_results
from bacr_jax.study.statistics import mean_interval
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
    study = main_study(arms=arms, references=("anytime",), **changes)
    write_cells(folder, study, problems=12, steps=10)
    return study, build_results(read_cells(folder, study), study)


def test_a_study_agrees_with_itself_and_not_with_another(tmp_path):
    study, now = results(tmp_path)
    found = pairs(now, now)
    # Three arms, two tasks, five budgets and their mean.
    assert len(found) == 3 * 2 * 6
    assert summary(found).startswith("36 of 36 means lie")
    assert "\n0 of 36 differ" in summary(found)
    worse = json.loads(json.dumps(now))
    entry = worse["means"]["tradeoff"]["test"]["sampled"]["anytime"]["16"]["accuracy"]
    for key, value in {"mean": 0.01, "low": 0.009, "high": 0.011}.items():
        entry[key] = value
    said = summary(pairs(worse, now))
    assert "\n1 of 36 differ" in said and "differs: tradeoff, anytime, 16" in said


def test_the_table_is_written_beside_the_others(tmp_path):
    study, now = results(tmp_path)
    write_results(tmp_path, study)
    files, said = reproduction.write(tmp_path, now)
    assert [file.name for file in files] == [f"reproduction.{end}" for end in ("md", "tex", "csv")]
    assert files[0].read_text().count("| yes |") == 36 and said.startswith("36 of 36")


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
