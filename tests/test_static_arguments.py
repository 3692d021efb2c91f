"""Every public function of the maths works under `jax.jit`, with the static arguments it names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import advantages, curriculum, losses, qwen2, rewards
from bacr_jax.model.compute import Compute

KEY = jax.random.key(0)
RATES = np.array([0.2, 0.5, 0.9], np.float32)
BUDGETS = np.array([[4, 9], [12, 16]], np.int32)
CUTS = np.array([[2, 4], [5, 9], [6, 12], [8, 16]], np.int32)
LENGTHS = np.array([4, 7, 12, 3], np.int32)
X = np.linspace(-1.0, 2.0, 8, dtype=np.float32).reshape(2, 2, 2)
OUTCOMES = (X > 0).astype(np.float32)
WEIGHTS = np.array([0.3, 0.7], np.float32)
TOKENS = np.linspace(-3.0, -0.1, 12, dtype=np.float32).reshape(4, 3)
MASK = np.arange(3) < np.array([1, 3, 2, 0])[:, None]
RANGE = {"b_min": 2.0, "b_max": 16.0}
STATE = curriculum.init_curriculum(3, mu0=8.0)
SQUARE = np.array([[[2.0, 0.5], [0.5, 1.0]]] * 2, np.float32)

CALLS = {
    curriculum: {
        "sample_budgets": ((KEY, RATES * 10, [0, 2]), {"sigma": 3.0, **RANGE, "num_rollouts": 4}),
        "uniform_budgets": ((KEY,), {**RANGE, "shape": (2, 3), "assign": "stratified"}),
        "choice_budgets": ((KEY, [4, 8, 16]), {"shape": (2, 3), "assign": "shared"}),
        "fixed_budgets": ((8,), {"shape": (2, 3)}),
        "group_weights": ((RATES,), {"epsilon": 0.1}),
        "sample_groups": ((KEY, RATES), {"num": 4}),
        "sample_questions": ((KEY, RATES, [0, 1, 1, 2]), {"num": 4}),
        "init_curriculum": ((), {"num_groups": 3, "mu0": 8.0}),
        "budget_mean": ((RATES, 8.0), {"alpha": 0.6, "beta": 0.3, **RANGE, "clip": False}),
        "scheduled_mean": ((STATE,), {"alpha": 0.6, "beta": 0.3, **RANGE, "clip": True}),
        "record_outcomes": ((STATE, [0, 2], OUTCOMES[..., 0]), {"ema_decay": 0.9}),
        "update_pass_rates": ((STATE,), {"source": "epoch"}),
        "truncnorm_ppf": ((RATES, 8.0, 3.0, 2.0, 16.0), {}),
    },
    rewards: {
        "cut_points": ((BUDGETS,), {"num_cuts": 4}),
        "random_cut_points": ((KEY, BUDGETS), {"num_cuts": 4}),
        "with_grace": ((CUTS, LENGTHS, 3), {}),
        "distinct_cuts": ((CUTS, LENGTHS), {}),
        "cut_shares": ((), {"kind": "final_heavy", "num_cuts": 4}),
        "cut_weights": ((), {"kind": (0.25, 0.75), "num_cuts": 2}),
        "progress": ((OUTCOMES,), {}),
        "dense_reward": ((OUTCOMES,), {"coefficient": 0.3}),
        "outcome_coefficients": ((WEIGHTS,), {"coefficient": 0.3}),
    },
    advantages: {
        "same_budget_mean": ((X, BUDGETS), {}),
        "advantage_scale": ((X,), {"mode": "group", "floor": 0.1}),
        "group_advantage": ((X,), {"axis": 1}),
        "decoupled_advantage": ((X, WEIGHTS), {}),
        "grpo_advantage": ((X,), {"axis": 0}),
        "normalize": ((X,), {"mode": "batch_rms", "floor": 0.1}),
        "other_questions_mean": ((X,), {}),
        "others_mean": ((X,), {}),
        "rloo_advantage": ((X,), {"axis": 1}),
        "effective_traces": ((SQUARE, WEIGHTS), {}),
        "optimal_moments": ((X, X * 0.5, X**2), {}),
        "optimal_shift": ((X, SQUARE[0]), {}),
        "optimal_slopes": ((SQUARE, SQUARE[0], WEIGHTS), {}),
        "score_statistics": ((X, X**2), {}),
        "segment_score_norm_proxy": ((TOKENS, [1, 3, 2, 0], np.minimum(CUTS, 3)), {}),
        "token_baseline": ((X, X**2), {}),
        "answer_credit": (
            (OUTCOMES, X, X * 0.5, OUTCOMES * 0.5, WEIGHTS),
            {"coefficient": 0.3, "mode": "to_go"},
        ),
        "scatter_segments": ((X.reshape(4, 2), CUTS), {"num_tokens": 16}),
        "segment_index": ((np.arange(1, 5)[None], CUTS[:1]), {}),
        "sum_reused": ((X.reshape(4, 2), [[0, 0], [0, 1], [0, 0], [0, 1]]), {}),
        "thinking_credit": ((X, WEIGHTS), {"mode": "trajectory"}),
        "to_go": ((X, WEIGHTS), {}),
        "bcae_advantage": ((X, X * 0.5), {}),
        "correctness_from_value": ((X,), {"coefficient": 0.3}),
        "prior_strength": ((0.2, 0.1), {}),
        "residual_loo_baseline": ((X, X * 0.5), {}),
        "residual_moments": ((X, X * 0.5), {}),
        "shrink_baseline": ((X, X * 0.5), {"prior_strength": 2.0}),
    },
    losses: {
        "token_ratio": ((TOKENS, TOKENS * 0.9, MASK), {}),
        "sequence_ratio": ((TOKENS, TOKENS * 0.9, MASK), {}),
        "gspo_ratio": ((TOKENS, TOKENS * 0.9, MASK), {}),
        "policy_loss": (
            (TOKENS, TOKENS * 0.9),
            {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 2.0},
        ),
        "is_clipped": ((TOKENS, TOKENS * 0.9), {"clip_low": 0.2, "clip_high": 0.3}),
        "truncated_importance_weight": ((TOKENS, TOKENS * 0.9, MASK), {"cap": 2.0}),
        "masked_sequence_weight": ((TOKENS, TOKENS * 0.9, MASK), {"cap": 2.0}),
        "distilled_advantages": ((X, X * 0.9, X * 0.8, X > 0), {"weight": 0.5}),
        "sequence_mask": ((TOKENS, TOKENS * 0.9, MASK), {"bound": 0.1}),
        "aggregate_sum": ((TOKENS, MASK), {"mode": "seq_mean_token_mean"}),
        "loss_denominator": ((MASK,), {"mode": "constant", "constant": 16}),
        "value_loss": ((X, X * 0.5), {}),
        "kl_penalty": ((TOKENS, TOKENS * 0.9, MASK), {"kind": "k3+"}),
        "total_loss": ((1.0, 2.0, 3.0), {"value_coef": 0.5, "entropy_coef": 0.01}),
    },
}
# The products of `cuts_of_trace` need 64-bit integers; `stage_limit` takes Python numbers.
WITHOUT_JIT = {"cuts_of_trace", "stage_limit"}
NAMED = [(room, name) for room, calls in CALLS.items() for name in calls]


def public_functions(room):
    """The functions of a room, without those it imports from another room."""
    for name, value in vars(room).items():
        is_function = callable(value) and not isinstance(value, type)
        if is_function and value.__module__.startswith(room.__name__) and name[0] != "_":
            yield name


@pytest.mark.parametrize("room", CALLS, ids=lambda room: room.__name__)
def test_every_public_function_of_the_maths_is_called_here(room):
    assert set(public_functions(room)) - WITHOUT_JIT == CALLS[room].keys()


@pytest.mark.parametrize(("room", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_function_gives_under_jit_what_it_gives_without(room, name):
    function = getattr(room, name)
    args, keywords = CALLS[room][name]
    args = [jnp.asarray(x) if isinstance(x, np.ndarray | list) else x for x in args]
    static = getattr(function, "static_argnames", ())
    jitted = jax.jit(function, static_argnames=static)(*args, **keywords)
    expected = function(*args, **keywords)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), jitted, expected)


def test_a_traced_argument_that_must_be_static_is_refused_with_the_call_to_write():
    says = (
        r"cut_points: the argument `num_cuts` is traced by jax.jit, but must be a Python "
        r"value; use jax.jit\(cut_points, static_argnames="
    )
    with pytest.raises(TypeError, match=says):
        jax.jit(rewards.cut_points)(jnp.asarray(BUDGETS), num_cuts=4)
    with pytest.raises(TypeError, match="scatter_segments: the argument `num_tokens` is traced"):
        jax.jit(advantages.scatter_segments)(jnp.asarray(X.reshape(4, 2)), jnp.asarray(CUTS), 16)
    with pytest.raises(TypeError, match="fixed_budgets: the argument `shape` is traced"):
        jax.jit(curriculum.fixed_budgets)(8, shape=(2, 3))


def test_signatures_of_the_model_show_no_settings_that_are_defaults():
    assert str(inspect.signature(qwen2.forward).parameters["compute"].default) == "Compute()"
    assert repr(Compute(scan=False)) == "Compute(scan=False)"


def test_the_signature_and_the_documentation_stay():
    assert list(inspect.signature(rewards.cut_points).parameters) == ["budgets", "num_cuts"]
    assert rewards.cut_points.__doc__.startswith("Returns M evenly spaced")
    assert rewards.cut_points.static_argnames == ("num_cuts",)
