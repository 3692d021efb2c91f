"""ThinkPrune: nothing for a response above the limit, and a limit that falls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from methods_world import NAMES, group_batch, load


def test_a_truncated_response_earns_nothing_and_its_forced_answer_has_no_advantage(tmp_path):
    """Rewards 1, 0, 0, 1 have the mean 1/2 and the deviation sqrt(1/3)."""
    config = load(tmp_path, "thinkprune", "rollout.questions=1", "rollout.group_size=4")
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [1.0], [0.0], [1.0]]])),
        closed=jnp.array([[True, False, True, True]]),
    )
    method = load_method(resolve(config).method)
    rewards = method.rewards(None, batch)
    np.testing.assert_array_equal(rewards[..., 0], [[1.0, 0.0, 0.0, 1.0]])
    credit = method.advantages(None, batch, rewards, None)
    size = 0.5 * 3**0.5
    np.testing.assert_allclose(credit.thinking[0, :, 0], [size, -size, -size, size], rtol=1e-5)
    np.testing.assert_allclose(credit.answers[0, :, 0], [size, 0.0, -size, size], rtol=1e-5)
    assert method.metrics(None, batch)["thinkprune/truncated_share"] == 0.25


def test_stages_need_a_method_that_truncates_at_its_budget(tmp_path):
    with pytest.raises(UserError, match=r"budget.stages=\[1, 0.5\]: method=l1 truncates traces at"):
        load(tmp_path, "l1_max", "budget.stages=[1,0.5]")
    load(tmp_path, "bacr-robust", "budget.stages=[1,0.5]")


@pytest.mark.parametrize("preset", NAMES)
def test_stages_are_refused_or_limit_where_a_trace_is_truncated(tmp_path, preset):
    """A limit of 8 of 12 tokens; DAPO's punishment, below, begins near the largest budget."""
    try:
        config = load(tmp_path, preset, "budget.stages=[1,0.75]", "budget.min=8")
    except UserError as error:
        assert str(error).startswith("budget.stages=[1, 0.75]: method=")
        assert str(error).endswith("set budget.stages=[], or use another method such as grpo")
        assert preset.partition("-")[0] in ("anytime", "dapo", "effort", "l1_exact", "l1_max")
        return
    cuts = load_method(resolve(config).method).cuts(jax.random.key(0), jnp.full((2, 4), 8))
    assert cuts.max() == 8 and preset not in ("anytime", "dapo")


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("anytime", "truncates traces at fixed fractions of budget.max"),
        ("dapo", "punishes lengths close to budget.max"),
    ],
)
def test_stages_are_refused_by_methods_that_measure_in_the_largest_budget(tmp_path, preset, reason):
    with pytest.raises(UserError, match=rf"budget.stages=\[1, 0.5\]: method={preset} {reason}"):
        load(tmp_path, preset, "budget.stages=[1,0.5]")
