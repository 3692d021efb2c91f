"""Tests that the prompt of every trace contains its budget (conditioning.budget_input=prompt)."""

import jax
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from bacr_jax.questions import ledger
from bacr_jax.rollout import Callbacks
from bacr_jax.training import algorithm, warmup
from bacr_jax.training import run as runs
from methods_world import load, run_of


class Stopped(Exception):
    """Raised instead of compiling anything."""


@pytest.fixture(scope="module")
def tokenizer():
    own = ledger.ledger_tokenizer()
    return own, len(own)


@pytest.fixture
def asked(monkeypatch):
    """Returns a list of the arguments of calls that would have decoded or compiled.

    Each entry is (prompts, rollout request, sampling setup). The request is None for a compilation.
    """
    found = []

    def spy(params, prompts, rows, key, sampler, callbacks):
        found.append((jax.tree.map(np.asarray, prompts), rows, sampler))
        raise Stopped

    monkeypatch.setattr(runs, "generate", spy)

    def spy_of_programs(params, prompts, num_cuts, sampler, **_):
        spy(params, prompts, None, None, sampler, None)

    monkeypatch.setattr(runs, "precompile_rollout", spy_of_programs)
    return found


def told(tokenizer, prompts):
    """What stands between each problem and the opening tag."""
    rows = zip(prompts.tokens, prompts.lengths, prompts.question_end)
    return [tokenizer.decode(row[end:length]).removesuffix("<think>") for row, length, end in rows]


WORDS = (
    "conditioning.budget_input=prompt",
    "budget.prior=uniform",
    "eval.budgets=[12, 200]",
)


@pytest.mark.parametrize("how", ["embedding", "prompt", "both", "none"])
def test_a_policy_is_conditioned_or_reads_its_budget_or_both(tmp_path, tokenizer, asked, how):
    config = load(tmp_path, "bacr-full", *WORDS, f"conditioning.budget_input={how}")
    assert load_method(resolve(config).method).conditioned == (how in ("embedding", "both"))
    run, state = run_of(config, tokenizer)
    assert ("budget" in state.train.policy) == (how in ("embedding", "both"))
    with pytest.raises(Stopped):
        algorithm.sample_round(run, state, 0, 0, state.stream, algorithm.Clock(), None)
    ((prompts, rows, sampler),) = asked
    budgets = rows.budgets
    assert (sampler.phi_of is not None) == (how in ("embedding", "both"))
    assert len(set(budgets.tolist())) > 3
    words = how in ("prompt", "both")
    assert told(tokenizer[0], prompts) == [f"f{b}" if words else "" for b in budgets]
    # Programs are compiled in advance for the same width of prompts: the longest question, and the
    # digits of budget 200 if prompts contain budgets.
    asked.clear()
    with pytest.raises(Stopped):
        runs.precompile(run, state)
    assert asked[0][0].tokens.shape[1] == prompts.tokens.shape[1] == (17 if words else 13)


def test_budgets_that_do_not_truncate_leave_the_largest_as_the_limit(tmp_path, tokenizer, asked):
    run, state = run_of(load(tmp_path, "l1_max"), tokenizer)
    with pytest.raises(Stopped):
        algorithm.sample_round(run, state, 0, 0, state.stream, algorithm.Clock(), None)
    ((_, rows, _),) = asked
    assert len(set(rows.budgets.tolist())) > 1
    np.testing.assert_array_equal(rows.limits, np.full(16, 12))


def test_the_warm_ups_styles_are_measured_at_the_largest_budget(tmp_path, tokenizer, asked):
    run, state = run_of(load(tmp_path, "bacr-full", *WORDS), tokenizer)
    asks, _ = warmup.styled_prompts(run.task_data.train, "steps", 5, run.config.budget.max)
    given = (run.task_data, state.train.policy, asks, jax.random.key(0), Callbacks())
    with pytest.raises(Stopped):
        runs.plain_rollout(run, *given, temperature=0.0)
    prompts, _, _ = asked[0]
    assert {text.partition("<think>")[0] for text in told(tokenizer[0], prompts)} == {"f12"}


@pytest.mark.parametrize("name", ["grpo", "rloo", "hapo", "anytime", "elastic", "s_grpo"])
def test_methods_with_one_budget_for_all_traces_have_no_words_for_it(tmp_path, name):
    from bacr_jax.errors import UserError

    with pytest.raises(
        UserError, match=f"conditioning.budget_input=prompt: method={name} trains at a single"
    ):
        load(tmp_path, name, "conditioning.budget_input=prompt")
    load(tmp_path, name)


@pytest.mark.slow  # compiles a warm-up, an iteration and an evaluation
def test_a_run_from_its_warm_up_to_its_evaluation(tmp_path, capsys):
    from bacr_jax.runs.folder import RunPaths
    from bacr_jax.train import main
    from methods_world import CHANGES
    from small_config import SMALL

    (tmp_path / "changes.yaml").write_text(CHANGES)
    small = ["--config", str(SMALL), "--config", str(tmp_path / "changes.yaml")]
    options = [
        "warmup.steps=4",
        "warmup.target_accuracy=0",
        "warmup.short_accuracy=0",
        "warmup.hold_accuracy=0",
    ]
    options += [
        "train.steps=2",
        "output.report=false",
        "conditioning.budget_input=prompt",
        f"output.dir={tmp_path / 'run'}",
    ]
    assert main([*small, *options]) == 0
    assert RunPaths(tmp_path / "run").summary.is_file()
    # A run without budgets in its prompts can't start from this warm-up.
    shared = [f"warmup.dir={tmp_path / 'run' / 'warmup'}", f"output.dir={tmp_path / 'other'}"]
    other = [*small, *options[:4], *shared]
    assert main(other) == 2
    assert "or the budgets in the prompts" in capsys.readouterr().err
