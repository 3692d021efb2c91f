"""What stays fixed in a run, and the state it starts from."""

from types import SimpleNamespace

import numpy as np
import pytest

from bacr_jax.data import ledger
from bacr_jax.training.run import difficulty_coordinate
from methods_world import load, run_of


def questions(levels, lengths):
    return SimpleNamespace(
        set=SimpleNamespace(levels=np.array(levels)),
        prompts=SimpleNamespace(lengths=np.array(lengths)),
    )


def unchecked(function):
    import inspect

    return inspect.unwrap(function)


@pytest.mark.parametrize(
    ("levels", "kind", "expected"),
    [
        ([1, 3, 0], "level", [1, 3, 3]),  # an unknown level counts as the hardest
        ([0, 0, 0], "level", [1, 1, 1]),
        ([1, 3, 0], "prompt_length", [7, 5, 9]),
    ],
)
def test_where_a_problem_stands_on_the_scale_of_difficulty(levels, kind, expected):
    found = unchecked(difficulty_coordinate)(questions(levels, [7, 5, 9]), kind)
    np.testing.assert_array_equal(found, expected)


def test_with_continuous_difficulty_every_problem_starts_at_its_groups_mean(tmp_path):
    tokenizer = ledger.ledger_tokenizer()
    config = load(
        tmp_path, "bacr-full", "curriculum.difficulty=continuous", "curriculum.mu0=[5, 6, 7, 8]"
    )
    run, state = run_of(config, (tokenizer, len(tokenizer)))
    # 64 problems without the six that are held out and their copies.
    trained = len(run.environment.train)
    assert len(run.environment.holdout) == 6 and 50 < trained <= 58
    assert run.continuous and run.num_groups == len(run.levels) == trained
    np.testing.assert_array_equal(state.curriculum.mu0, np.array([5, 6, 7, 8])[run.levels])
    np.testing.assert_array_equal(run.group_sizes, np.ones(trained))
    assert state.generated_tokens == 0 and state.difficulty is not None


def test_groups_are_counted_and_keep_one_mean_each(tmp_path):
    tokenizer = ledger.ledger_tokenizer()
    run, state = run_of(load(tmp_path, "grpo"), (tokenizer, len(tokenizer)))
    np.testing.assert_array_equal(run.group_sizes, np.bincount(run.levels, minlength=4))
    assert not run.continuous and state.curriculum.mu0.shape == (4,) and state.difficulty is None
    assert run.rollout_spec(3).answers == 3
