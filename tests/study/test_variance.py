"""The whole study on a policy of two steps."""

import json

import numpy as np
import pytest

from bacr_jax.study import variance
from bacr_jax.study.gradient_pool import stratified

STUDY = """
kind: variance
sizes:
  cpu:
    config: [configs/quickstart.yaml]
    overrides:
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
