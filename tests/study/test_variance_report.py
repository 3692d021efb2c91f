"""Results of made-up pools, written and read back."""

import json

import numpy as np
import pytest

from bacr_jax.study import variance_report
from bacr_jax.study.baselines import BY_NAME
from bacr_jax.study.measurement import NAMES, TRAINED, Measured, Result
from bacr_jax.study.noise import Noise
from bacr_jax.study.variance_settings import VarianceSettings

SETTINGS = VarianceSettings(seeds=(0, 1), checkpoints=(5,), groups=(8,), resamples=100)
QUESTIONS, CUTS = 6, 4
# Half the variance of published BRPO, before its scale is counted.
QUIET = NAMES.index("value/several")


def noise(seed, arms):
    rng = np.random.default_rng(seed)
    variance = np.full((QUESTIONS, len(arms)), 2.0)
    if QUIET in arms:
        variance[:, arms.index(QUIET)] = 1.0
    parts = rng.random((QUESTIONS, CUTS)) + 0.5
    names = [NAMES[i].split("/")[0] for i in arms]
    return Noise(
        variance=variance,
        own=np.ones_like(variance),
        shared=np.ones_like(variance),
        signal=parts.sum(1),
        parts=parts,
        factors=np.stack([BY_NAME[name].factors(8, CUTS) for name in names]),
    )


def result(seed, regime):
    every = list(range(len(NAMES)))
    measured = Measured(
        noise=noise(seed, every),
        questions=np.arange(QUESTIONS),
        budgets=np.repeat([8, 16], 3) if regime == "common" else np.zeros(QUESTIONS, int),
        bins={} if regime == "common" else {"8-20": noise(seed, every)},
        with_answers=noise(seed, list(TRAINED)) if regime == "common" else None,
        answer_questions=np.arange(QUESTIONS),
        spread=np.linspace(0.1, 1, len(NAMES)),
        cost=np.full(len(NAMES), 20.0),
    )
    value = {
        "squared_error": 0.01,
        "standard_error": 0.001,
        "variance_of_return": 0.2,
        "threshold": 0.03,
        "predicted_excess": 1.0,
        "calibration": {"8-16": [0.5, 0.6]},
    }
    found = {"values": {"saved": value}, "icc": 0.1}
    seconds = {"one": 0.001, "several": 0.002, "scores": 0.003}
    return Result(seed, 5, regime, {8: measured}, found, 0.3, 0.8, seconds)


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
    assert found["cells"][0]["with_answers"].keys() == {NAMES[i] for i in TRAINED}


def test_tables_and_pictures_are_there(written):
    folder, paths = written
    text = (folder / "variance.md").read_text()
    assert "| BCAE, trained V(q, b, b_j); 4 answers | +" in text
    assert {p.suffix for p in paths} == {".json", ".md", ".png", ".pdf"}
    assert all(p.stat().st_size > 1000 for p in paths)
