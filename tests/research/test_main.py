"""The whole study on a policy of two steps."""

import json

import numpy as np
import pytest

from research.variance import main as variance
from research.variance.gradient_pool import Pool, stratified

# Four cuts, a curriculum and V, as research/variance/variance.yaml has them.
CURRICULUM = """\
      - budget.prior=curriculum
      - cuts.count=4
      - cuts.weights=uniform
      - advantage.baseline=value
      - advantage.score_weighted=false
"""
STUDY = f"""
sizes:
  cpu:
    config: [configs/quickstart.yaml]
    overrides:
      - model.num_layers=1
      - output.report=false
      - output.tensorboard=false
{CURRICULUM}\
      - warmup.steps=2
      - warmup.target_accuracy=0
      - warmup.short_accuracy=0
      - warmup.hold_accuracy=0
      - data.ledger.train_size=400
      - rollout.questions=4
      - train.steps=2
      - checkpoint.every=1
      - "eval.budgets=[8]"
      - eval.size=20
      - eval.samples=0
    seeds: [1]
    checkpoints: [2]
    questions: 4
    traces: 8
    budgets: [8, 16]
    groups: [4]
    partitions: 2
    calibration: 8
    calibration_traces: 4
    oracle: 4
    answer_questions: 1
    sketch: 256
    resamples: 100
"""
# As bacr-robust trains: a told budget each from a list, one cut, one answer.
TRAINING = (
    STUDY.replace(
        "[configs/quickstart.yaml]", "[configs/tradeoff.yaml, configs/methods/bacr-weighted.yaml]"
    )
    .replace(CURRICULUM, "")
    .replace("      - warmup.steps=2\n", "      - warmup.steps=2\n      - warmup.style=null\n")
    .replace('"eval.budgets=[8]"', '"budget.choices=[8, 12, 24]"')
    .replace("budgets: [8, 16]", "regimes: [training]\n    answers: 1\n    budgets: [8]")
)


def test_questions_are_spread_over_levels():
    levels = np.repeat([1, 2, 3], [50, 10, 2])
    chosen = stratified(levels, 8, seed=0)
    assert len(set(chosen)) == 8
    np.testing.assert_array_equal(np.bincount(levels[chosen]), [0, 3, 3, 2])
    np.testing.assert_array_equal(chosen, stratified(levels, 8, seed=0))


@pytest.mark.slow
def test_a_study_goes_on_from_its_pools_and_ends_with_the_same_numbers(tmp_path):
    def cells():
        variance.main(variance_file, "cpu", [f"output={tmp_path}"])
        return json.loads((tmp_path / "variance.json").read_text())["cells"]

    variance_file = tmp_path / "study.yaml"
    variance_file.write_text(STUDY)
    first = cells()
    pools = sorted((tmp_path / "seed-1" / "pools").glob("*.npz"))
    assert len(pools) == 6
    pools[0].unlink()
    assert cells() == first
    arms = first[0]["groups"]["4"]
    assert arms["brpo/several"]["reduction"] == [0.0, 0.0, 0.0]
    assert arms["brpo/one"]["tokens_a_trace"] < arms["brpo/several"]["tokens_a_trace"]


@pytest.mark.slow
def test_a_study_in_the_regime_that_trains(tmp_path):
    variance_file = tmp_path / "study.yaml"
    variance_file.write_text(TRAINING)
    variance.main(variance_file, "cpu", [f"output={tmp_path}"])
    found = json.loads((tmp_path / "variance.json").read_text())
    (cell,) = found["cells"]
    assert (cell["regime"], found["against"]) == ("training", "brpo/one")
    assert set(cell["by_budget"]) == {"8", "12", "24"} and len(cell["by_value"]) == 3
    arms = cell["groups"]["4"]
    # With one cut BRPO as published is the group's mean.
    assert arms["group_mean/one"] == arms["brpo/one"]
    assert arms["opo_loo/one"]["scale"] == arms["token_loo/one"]["scale"] == 1.0
    (pool,) = cell["pools"]
    assert set(pool["scores"]) == {"surprise", "energy", "tokens", "norm"}
    assert pool["scores"]["norm"]["with_norm"] == pytest.approx([1.0])
    (file,) = (tmp_path / "seed-1" / "pools").glob("pool-*.npz")
    drawn = Pool(**np.load(file))
    # The exact energy has, besides the token's own (1 - p)^2, at most as much again of the others.
    assert (drawn.energy > drawn.surprise - 1e-4).all()
    assert (drawn.energy < 2 * drawn.surprise + 1e-4).all()
