"""Settings of BACR that are refused, and advice."""

import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from bacr_jax.methods.registry import advice
from methods_world import load


def test_a_trace_is_not_weighed_as_a_whole_by_credit_of_segments(tmp_path):
    with pytest.raises(
        UserError,
        match="credit=to_go assigns a separate advantage to each segment, but loss.ratio=sequence",
    ):
        load(tmp_path, "bacr-paper", "advantage.credit=to_go")


def test_a_sampler_that_differs_is_to_be_bounded(tmp_path):
    def load_with(*own):
        config = load(tmp_path, "bacr-robust", "train.minibatches=1", *own)
        return advice(resolve(config).method)

    assert load_with() == []
    (line,) = load_with("train.minibatches=2")
    assert "train.minibatches=2 the probabilities of sampler and learner differ" in line
    assert line.endswith("set loss.importance_cap=2")
    (line,) = load_with("model.compute_dtype=bfloat16")
    assert "model.compute_dtype=bfloat16 the probabilities of sampler" in line
    assert load_with("train.minibatches=2", "loss.importance_cap=2") == []
    assert load_with("train.minibatches=2", "advantage.score_weighted=false") == []


class TestSteepWeights:
    @pytest.mark.parametrize(
        ("override", "says"),
        [
            ("cuts.weights=final_heavy", "at most 0.166,"),
            ("cuts.weights=last", "reward.coefficient"),
            ("cuts.weights=[.1, .1, .1, .7]", r"\.12, \.12, \.16, \.6"),
        ],
    )
    def test_that_punish_a_right_answer_are_refused(self, tmp_path, override, says):
        with pytest.raises(UserError, match=says):
            load(tmp_path, "bacr-full", override)

    @pytest.mark.parametrize(
        "overrides",
        [
            ["cuts.weights=final_heavy", "reward.coefficient=0.166"],
            ["cuts.weights=final_heavy", "reward.dense=false"],
            ["cuts.weights=last", "cuts.count=1"],
        ],
    )
    def test_and_their_repairs_are_not(self, tmp_path, overrides):
        load_method(resolve(load(tmp_path, "bacr-full", *overrides)).method)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["advantage.score_weighted=true", "advantage.credit=segment"], "to_go"),
        (["rollout.group_size=1"], "advantage.baseline=shrink compares several traces"),
        (["advantage.score_weighted=true", "advantage.normalise=group"], "normalise=batch_rms"),
        (["advantage.same_shift_for_batch=true"], "without advantage.score_weighted"),
        (["advantage.score_by_budget=true"], "without advantage.score_weighted"),
        (["advantage.baseline=optimal_token", "advantage.score_weighted=true"], "weighted=false"),
        (
            ["advantage.baseline=optimal_token", "advantage.credit=segment"],
            "set advantage.credit=to_go",
        ),
    ],
)
def test_combinations_that_mislead_are_refused(tmp_path, overrides, says):
    with pytest.raises(UserError, match=says):
        load(tmp_path, "bacr-full", *overrides)
