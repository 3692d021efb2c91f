"""Results of made-up pools, written and read back."""

import dataclasses
import json

import numpy as np
import pytest

from research.variance import report as variance_report
from research.variance.baselines import BY_NAME, variants
from research.variance.measurement import Measured, Result
from research.variance.noise import Noise
from research.variance.settings import VarianceSettings

SETTINGS = VarianceSettings(seeds=(0, 1), checkpoints=(5,), groups=(8,), resamples=100)
ONE = dataclasses.replace(SETTINGS, regimes=("training",), answers=1)
QUESTIONS, CUTS = 6, 4


def noise(seed, arms, names):
    rng = np.random.default_rng(seed)
    variance = np.full((QUESTIONS, len(arms)), 2.0)
    # Half the variance of published BRPO, before its scale is counted.
    for quiet in {names.index(name) for name in names if name.startswith("value/")} & set(arms):
        variance[:, arms.index(quiet)] = 1.0
    parts = rng.random((QUESTIONS, CUTS)) + 0.5
    names = [names[i].split("/")[0] for i in arms]
    return Noise(
        questions=np.arange(QUESTIONS),
        variance=variance,
        own=np.ones_like(variance),
        shared=np.ones_like(variance),
        signal=parts.sum(1),
        parts=parts,
        factors=np.stack([BY_NAME[name].factors(8, CUTS) for name in names]),
    )


def result(seed, regime, answers=4):
    names, trained = variants(answers).names, variants(answers).trained
    every = list(range(len(names)))
    measured = Measured(
        noise=noise(seed, every, names),
        by_budget={
            name: noise(seed, every, names)
            for name in (("8", "16") if regime == "common" else ("8-20",))
        },
        by_value=[noise(seed + i, every, names) for i in range(3)],
        with_answers=noise(seed, list(trained), names) if regime == "common" else None,
        spread=np.linspace(0.1, 1, len(names)),
        cost=np.full(len(names), 20.0),
    )
    value = {
        "squared_error": 0.01,
        "standard_error": 0.001,
        "threshold": 0.03,
    }
    scores = {
        "with_norm": [0.9, 0.8, 0.7, 0.6],
        "cv": 1.5,
        "correlation": -0.25,
        "effective_traces": 150.0,
        "predicted_saving": 0.31,
        "deviation_of_saving": 0.05,
    }
    found = {"values": {"saved": value}, "scores": {"surprise": scores}}
    found["value_edges"] = np.array([0.1, 0.4, 0.62, 0.9])
    return Result(seed, 5, regime, {8: measured}, found, 0.8)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variance")
    results = [result(s, regime) for regime in SETTINGS.regimes for s in SETTINGS.seeds]
    paths = variance_report.write(folder, "cpu", SETTINGS, results, 90.0)
    return folder, paths


def test_numbers(written):
    folder, _ = written
    found = json.loads((folder / "variance.json").read_text())
    arms = found["cells"][0]["groups"]["8"]
    value, low, high = arms["value/several"]["reduction"]
    # Published BRPO keeps .875 to .97 of the gradient, and its variance grows by 1 / c^2.
    assert 1 - 0.5 * 0.97**2 <= value <= 1 - 0.5 * 0.875**2
    assert low <= value <= high
    assert arms["brpo/several"]["reduction"] == [0.0, 0.0, 0.0]
    assert set(found["cells"][0]["by_budget"]) == {"8", "16"}
    assert set(found["cells"][1]["by_budget"]) == {"8-20"}
    assert found["cells"][0]["with_answers"].keys() == {
        name for name in variants(4).names if name.endswith("/several")
    }


def test_tables_and_pictures_are_there(written):
    folder, paths = written
    text = (folder / "variance.md").read_text()
    assert "| BCAE, trained V(q, b, b_j); 4 answers | +" in text
    assert {p.suffix for p in paths} == {".json", ".md", ".png", ".pdf", ".svg"}
    assert all(p.stat().st_size > 1000 for p in paths)


def test_a_pools_point_is_what_a_batch_predicts_and_what_the_pool_shows(written):
    found = json.loads((written[0] / "variance.json").read_text())
    chart = variance_report.predicted_chart(found)
    names = [f"{regime}, step 5" for regime in SETTINGS.regimes]
    assert [one.label for one in chart.series] == names
    for one, cell in zip(chart.series, found["cells"]):
        # In percent, .31 with .05 to both sides, for each seed.
        np.testing.assert_allclose(one.x, [31.0] * len(SETTINGS.seeds))
        np.testing.assert_allclose(one.ends, [(26.0, 36.0)] * len(SETTINGS.seeds))
        saved = [100 * pool["measured_saving"] for pool in cell["pools"]]
        np.testing.assert_allclose(one.y, saved)
    # Pools on which nothing could be measured have no point, and without a point there is no line.
    found["cells"][0]["pools"][0]["measured_saving"] = None
    for pool in found["cells"][1]["pools"]:
        pool["measured_saving"] = None
    chart = variance_report.predicted_chart(found)
    assert [one.label for one in chart.series] == [names[0], *names[2:]]
    assert len(chart.series[0].x) == len(SETTINGS.seeds) - 1


@pytest.mark.slow
def test_without_a_measured_pool_the_picture_of_predictions_is_left_out(tmp_path, monkeypatch):
    empty = variance_report.predicted_chart({"cells": []})
    assert not empty.series
    monkeypatch.setattr(variance_report, "predicted_chart", lambda found: empty)
    paths = variance_report.write(
        tmp_path, "cpu", ONE, [result(seed, "training", answers=1) for seed in ONE.seeds], 90.0
    )
    assert not any(path.stem == "variance_predicted" for path in paths)


@pytest.mark.slow
def test_with_one_answer_everything_is_against_brpo_of_one_answer(tmp_path):
    results = [result(seed, "training", answers=1) for seed in ONE.seeds]
    variance_report.write(tmp_path, "cpu", ONE, results, 90.0)
    found = json.loads((tmp_path / "variance.json").read_text())
    (cell,) = found["cells"]
    assert found["against"] == "brpo/one"
    assert {name.split("/")[1] for name in cell["groups"]["8"]} == {"one"}
    assert len(cell["by_value"]) == 3
    assert len(set(variance_report.shown(variants(1)))) == len(variance_report.shown(variants(1)))
    assert cell["compared"]["score_weighted against value"][0] == pytest.approx(-1.0)
    assert cell["pools"][0]["measured_saving"] == pytest.approx(0.0)
    text = (tmp_path / "variance.md").read_text()
    assert "ends of the thirds, seed 0: 0.10, 0.40, 0.62, 0.90; seed 1" in text
    assert "surprise | 0.90, 0.80, 0.70, 0.60 | 1.50 | -0.25 | 150 | 31 ± 5 % | 0 % |" in text
    assert "| rescaled_interior against rescaled | +0.0" in text and "highest third" in text
