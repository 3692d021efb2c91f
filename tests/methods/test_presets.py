"""Every preset and every combination of BACR's parts, from config to credit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import curriculum
from bacr_jax.config import io as config_io
from bacr_jax.config.methods import EVALUATION_ONLY, built_in_methods, problems
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from methods_world import NAMES, PRESETS, load, seen

EXTRA = {"declared": jnp.full((4, 4), 8), "declaration": jnp.full((4, 4), 2)}


def credit_of(config, **given):
    """Rewards, credit and next state of a method on made-up observations, jitted as in the loop."""
    method = load_method(config)
    observed = seen(config, extra=EXTRA, **given)
    state = method.init_state(64)
    values = None
    if method.uses_value:
        values = jnp.asarray(np.random.default_rng(1).random(observed.outcomes.shape), jnp.float32)

    @jax.jit
    def run(state, observed, values):
        rewards = method.rewards(state, observed)
        credit = method.advantages(state, observed, rewards, values)
        return rewards, credit, method.update(state, observed, rewards, values)

    return method, observed, state, *run(state, observed, values)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_good_config_and_gives_finite_credit(tmp_path, name):
    config = load(tmp_path, name)
    method, observed, state, rewards, credit, after = credit_of(config)
    assert rewards.shape == observed.outcomes.shape
    assert credit.thinking.shape == observed.outcomes.shape
    answers = observed.outcomes.shape if method.answers == 1 else observed.by_answer.shape
    assert credit.answers.shape in (answers, observed.by_answer.shape)
    for leaf in jax.tree.leaves((rewards, credit.thinking, credit.answers, credit.baseline)):
        assert np.isfinite(leaf).all()
    assert np.abs(credit.thinking).max() > 0
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, after)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_also_fits_over_the_quickstart_and_the_7b_config(name):
    for base in ("quickstart", "qwen2.5-7b-math"):
        config = config_io.load([PRESETS.parent / f"{base}.yaml", PRESETS / f"{name}.yaml"])
        config_io.check(config, also=problems)
        load_method(config)


def test_every_method_has_a_preset():
    covered = {name.partition("-")[0] for name in NAMES}
    assert covered == set(built_in_methods())


@pytest.mark.parametrize(
    "parts",
    itertools.product([True, False], repeat=4),
    ids=lambda parts: "".join("ny"[p] for p in parts),
)
def test_all_sixteen_combinations_of_the_four_parts_give_finite_credit(tmp_path, parts):
    told, curriculum, dense, value = parts
    config = load(
        tmp_path,
        "bacr-robust",
        f"conditioning.enabled={str(told).lower()}",
        f"budget.prior={'curriculum' if curriculum else 'uniform'}",
        f"reward.dense={str(dense).lower()}",
        f"advantage.baseline={'value' if value else 'group'}",
    )
    method, observed, _, rewards, credit, _ = credit_of(config)
    assert (method.conditioned, method.uses_value) == (told, value)
    step = np.diff(observed.outcomes, axis=-1, prepend=0.0)
    expected = observed.outcomes + (0.3 if dense else 0.0) * step
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    if not value:
        np.testing.assert_allclose(credit.thinking.sum(1), 0.0, atol=1e-5)
    assert np.isfinite(credit.thinking).all() and np.isfinite(credit.answers).all()


def test_budgets_come_from_the_list_of_choices(tmp_path):
    config = load(tmp_path, "bacr-robust", "budget.prior=choices", "budget.choices=[8, 12]")
    method = load_method(config)
    state = curriculum.init_curriculum(4, mu0=10.0)
    budgets = method.sample_budgets(jax.random.key(0), state, jnp.arange(4))
    assert budgets.shape == (4, config.rollout.group_size)
    assert set(np.unique(budgets)) == {8, 12}
    # No curriculum: questions are asked as often as there are of each group.
    sizes = jnp.array([1, 2, 3, 4])
    np.testing.assert_allclose(method.question_weights(state, sizes), sizes / 10, rtol=1e-6)


@pytest.mark.parametrize("baseline", ["value", "group", "residual_loo", "shrink"])
@pytest.mark.parametrize("normalise", ["batch_rms", "group", "none"])
def test_a_group_of_equal_outcomes_gives_finite_advantages(tmp_path, baseline, normalise):
    config = load(
        tmp_path,
        "bacr-robust",
        f"advantage.baseline={baseline}",
        f"advantage.normalise={normalise}",
    )
    outcomes = np.ones((4, 4, 4))
    _, _, _, _, credit, _ = credit_of(config, outcomes=outcomes)
    assert np.isfinite(credit.thinking).all()
    assert np.abs(credit.thinking).max() <= 1.3 / 0.1


class TestContradictions:
    @pytest.mark.parametrize(
        ("preset", "override", "says"),
        [
            ("dapo", "loss.aggregate=constant", "loss.aggregate=token_mean"),
            ("dapo", "loss.clip_high=0.2", "more than loss.clip_low"),
            ("dapo", "loss.kl_coef=0.1", "loss.kl_coef=0"),
            ("dr_grpo", "loss.aggregate=token_mean", "loss.aggregate=constant"),
            ("anytime", "loss.aggregate=token_mean", "loss.aggregate=constant"),
        ],
    )
    def test_loss_settings_that_a_method_is_not_are_refused(self, tmp_path, preset, override, says):
        config = load(tmp_path, preset, override)
        with pytest.raises(UserError, match=says):
            load_method(config)

    @pytest.mark.parametrize(
        ("overrides", "says"),
        [
            (["cuts.weights=final_heavy"], "at most 0.167"),
            (["cuts.weights=own_budget"], "reward.coefficient"),
            (["cuts.weights=[.1, .1, .1, .7]"], r"\.12, \.12, \.16, \.6"),
            (["advantage.history=true", "advantage.credit=segment"], "to_go"),
            (
                ["curriculum.difficulty=continuous", "curriculum.pass_rate=probe"],
                "curriculum.pass_rate=ema",
            ),
            (
                ["curriculum.difficulty=continuous", "data.order=shuffled"],
                "data.order=drawn",
            ),
            (["curriculum.probe_budget=99"], "budget.max"),
        ],
    )
    def test_combinations_that_mislead_are_refused(self, tmp_path, overrides, says):
        with pytest.raises(UserError, match=says):
            load(tmp_path, "bacr-robust", *overrides)

    @pytest.mark.parametrize(
        "overrides",
        [
            ["cuts.weights=final_heavy", "reward.coefficient=0.16"],
            ["cuts.weights=final_heavy", "reward.dense=false"],
            ["cuts.weights=own_budget", "cuts.count=1"],
        ],
    )
    def test_and_their_repairs_are_not(self, tmp_path, overrides):
        load_method(load(tmp_path, "bacr-robust", *overrides))

    def test_selfbudgeter_keeps_wrong_below_right(self, tmp_path):
        with pytest.raises(UserError, match="-0.5"):
            load(tmp_path, "selfbudgeter", "selfbudgeter.budget_penalty=-0.6")

    @pytest.mark.parametrize("name", sorted(EVALUATION_ONLY))
    def test_methods_that_train_nothing_are_refused_with_what_to_do(self, tmp_path, name, capsys):
        from bacr_jax.train import main

        (tmp_path / "small.yaml").write_text("{}")
        assert main(["--config", str(PRESETS.parent / "quickstart.yaml"), f"method={name}"]) == 2
        error = capsys.readouterr().err
        assert "bacr_jax.evaluate" in error and error.count("\n") == 1
