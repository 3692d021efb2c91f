"""Tests iterations of the methods on a tiny model. The grader accepts about half of all answers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_grading.pool import Program, WorkerPool
from bacr_grading.pooled import PooledGrader
from bacr_grading.verifier import Score, Verifier, VerifierGrader
from bacr_jax.config import CurriculumConfig
from bacr_jax.config import io as config_io
from bacr_jax.curriculum import init_curriculum
from bacr_jax.methods.selfbudgeter import alpha_schedule
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.questions import ledger
from bacr_jax.training.algorithm import iterate, plan_round
from bacr_jax.training.stages import update_curriculum
from methods_world import NAMES, PRESETS, Odd, load, run_of


@pytest.fixture(scope="module")
def tokenizer():
    own = ledger.ledger_tokenizer()
    return own, len(own)


def train(config, tokenizer, steps=2):
    run, state = run_of(config, tokenizer, Odd())
    start = jax.tree.map(np.array, state.train.policy)
    history = []
    for step in range(steps):
        state, done = iterate(run, state, step)
        assert all(np.isfinite(value) for value in done.metrics.values())
        history.append((done.metrics, done.chosen.rollout, done.chosen.outcomes))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), start, state.train.policy)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.train.policy))
    assert max(jax.tree.leaves(moved)) > 0
    return state, history


@pytest.mark.slow
def test_dapo_samples_until_the_batch_is_mixed_and_counts_what_it_dropped(tmp_path, tokenizer):
    config = load(tmp_path, "dapo", "rollout.group_size=2")
    state, history = train(config, tokenizer)
    for metrics, rollout, outcomes in history:
        assert metrics["sampling/rounds"] > 1 and metrics["sampling/filled"] == 0
        by_question = outcomes.reshape(4, 2)
        assert (by_question.max(1) > by_question.min(1)).all()
        assert 0 < metrics["sampling/dropped_tokens"] < metrics["rollout/tokens"]
        kept = metrics["rollout/tokens"] - metrics["sampling/dropped_tokens"]
        assert kept == rollout.trunks.sampled.sum() + rollout.branches.sampled.sum()
    assert state.generated_tokens == sum(m["rollout/tokens"] for m, _, _ in history)
    # Half of the answers to a mixed question are correct here, but pass rates are measured on all
    # questions of the first round.
    assert (np.asarray(state.curriculum.ema_rate) != 0.5).any()


REWARDS = """
def brief(question, response, gold):
    return 1 / (1 + response.count("+") + response.count("="))

def broken(question, response, gold):
    raise ValueError("never a score")
"""


@pytest.mark.slow
def test_rewards_are_mixed_by_their_weights_and_each_is_a_metric(tmp_path, tokenizer):
    file = tmp_path / "mine.py"
    file.write_text(REWARDS)
    weights = f"reward.weights={{correct: 1, {file}:brief: 1, {file}:broken: 2}}"
    config = load(tmp_path, "dapo", "rollout.group_size=2", "dapo.overlong_penalty=0", weights)
    run, state = run_of(config, tokenizer, Odd())
    _, done = iterate(run, state, 0)
    for reward in run.task_data.rewards.values():
        reward.close()
    by_name = {name: np.asarray(x)[..., 0] for name, x in done.chosen.group_batch.by_reward.items()}
    correct, brief = by_name["correct"], by_name[f"{file}:brief"]
    assert len(np.unique(brief)) > 1 and not by_name[f"{file}:broken"].any()
    # Dynamic sampling keeps a question only if one answer is correct and one is wrong. The other
    # rewards do not matter.
    np.testing.assert_array_equal(correct, done.chosen.group_batch.outcomes)
    assert (correct.max(1) > correct.min(1)).all()
    # DAPO scales rewards from [0, 1] to [-1, 1]. The normalized weights are 1/4, 1/4 and 1/2, and
    # the broken reward is 0.
    want = 2 * (correct / 4 + brief / 4) - 1
    np.testing.assert_allclose(done.advantages.rewards, want, atol=1e-6)
    shown = {name: value for name, value in done.metrics.items() if name.startswith("rewards/")}
    assert set(shown) == {"rewards/correct", "rewards/brief", "rewards/broken"}
    assert 0 < shown["rewards/brief"] < 1 and shown["rewards/broken"] == 0
    asked = 8 * done.metrics["sampling/rounds"]
    assert done.metrics["process/grader_rewards_failed"] == asked


def closed(texts):
    """A random policy hardly ever closes an answer."""
    return [f"{text}</answer>" for text in texts]


class Slow(VerifierGrader):
    """Notes when it begins with answers and which of them the workers get; they need no process."""

    def __init__(self):
        pool = WorkerPool(Program(), workers=1, deadline=1, memory_mb=256)
        pool.run = self.look
        PooledGrader.__init__(self, pool, is_lasting=lambda score: False)
        self.verifier, self.rows = Verifier("sums.py:score", *4 * [""]), None
        self.notes, self.last_failure = [], ""

    def look(self, rows, poll):
        self.notes.append(("workers", len(rows)))
        return {row: Score(sum(map(ord, row.answer)) % 2) for row in rows}

    def ahead(self, texts, references, **options):
        self.notes.append(("begun", len(texts)))
        super().ahead(closed(texts), references, **options)

    def grade(self, texts, references, **options):
        self.notes.append(("asked", len(texts)))
        return super().grade(closed(texts), references, **options)


@pytest.mark.slow
def test_answers_are_graded_while_others_are_sampled_and_no_number_changes(
    tmp_path, tokenizer, monkeypatch
):
    config = load(tmp_path, None, "rollout.slots=4")
    early, late = Slow(), Slow()
    step = lambda grader: iterate(*run_of(config, tokenizer, grader), 0)[1]
    one = step(early)
    monkeypatch.setattr(TaskData, "early_grading", lambda *_: None)
    other = step(late)
    begun = [count for kind, count in early.notes if kind == "begun"]
    # 16 traces are sampled in four slots and have four answers each. Their grading begins in
    # several parts, before the verdicts are requested.
    assert sum(begun) == 64 and len(begun) > 1
    asked = early.notes.index(("asked", 64))
    assert all(kind != "begun" for kind, _ in early.notes[asked:])
    # No answer is graded twice.
    looked = lambda notes: sum(count for kind, count in notes if kind == "workers")
    assert looked(early.notes) == looked(late.notes) > 0
    for a, b in zip(jax.tree.leaves(one.chosen.outcomes), jax.tree.leaves(other.chosen.outcomes)):
        np.testing.assert_array_equal(a, b)
    own = lambda metrics: {k: v for k, v in metrics.items() if not k.startswith(("time", "roll"))}
    assert own(one.metrics) == own(other.metrics)


@pytest.mark.slow  # Three answers per cut need separately compiled programs.
def test_anytime_asks_for_several_answers_at_every_cut(tmp_path, tokenizer):
    config = load(tmp_path, "anytime", "anytime.answers=3", "cuts.count=2")
    _, history = train(config, tokenizer, steps=1)
    metrics, rollout, outcomes = history[0]
    trunks, branches = rollout.trunks, rollout.branches
    assert outcomes.shape == (4, 4, 6) and branches.sampled.shape == (16, 6)
    assert (np.asarray(branches.sampled) > 0).all()
    np.testing.assert_array_equal(branches.source, np.tile(np.arange(6), (16, 1)))
    # All answers at a cut have the same context. Independent samples of a random policy differ.
    context = np.asarray(branches.context).reshape(16, 2, 3)
    assert (context == context[..., :1]).all()
    tokens = np.asarray(branches.tokens).reshape(16, 2, 3, -1)
    assert (tokens[:, :, 0] != tokens[:, :, 1]).any(-1).mean() > 0.5
    assert metrics["rollout/tokens"] == trunks.sampled.sum() + branches.sampled.sum()
    # Learner and sampler compute the same log-probabilities, for every answer.
    assert abs(metrics["mismatch/k1"]) < 1e-5 and metrics["mismatch/k3"] < 1e-6


@pytest.mark.slow
def test_the_value_head_starts_at_the_first_batchs_mean_reward(tmp_path, tokenizer):
    config = load(tmp_path, "bacr-full", "value.inner_steps=0")
    run, state = run_of(config, tokenizer, Odd())
    state, done = iterate(run, state, 0)
    # The weights of the value head's last layer are initially 0, so every value equals the bias.
    assert abs(done.metrics["reward/mean"]) > 0.1
    assert done.metrics["value/mean"] == pytest.approx(done.metrics["reward/mean"], abs=1e-6)
    bias = float(state.train.head["out"]["bias"][0])
    _, done = iterate(run, state, 1)
    # The bias is set only in the first step. Then it is learned.
    assert done.metrics["value/mean"] == pytest.approx(bias, abs=0.02)


@pytest.mark.slow
def test_stages_lower_the_largest_budget_as_training_goes_on(tmp_path, tokenizer):
    """Four steps have three stages: 12 tokens twice, then 9, then 6."""
    config = load(tmp_path, "thinkprune", "train.steps=4")
    _, history = train(config, tokenizer, steps=4)
    assert [metrics["budget/mean"] for metrics, _, _ in history] == [12.0, 12.0, 9.0, 6.0]
    longest = [metrics["rollout/thinking_max"] for metrics, _, _ in history]
    assert longest[2] <= 9.0 and longest[3] <= 6.0


LIMITED = ("train.steps=2000", "train.max_generated_tokens=1500")


def test_stages_lower_the_largest_budget_as_tokens_are_generated(tmp_path, tokenizer):
    run, state = run_of(load(tmp_path, "thinkprune", *LIMITED), tokenizer)
    budgets = []
    for tokens in (0, 499, 500, 999, 1000, 1499, 1600):
        state = dataclasses.replace(state, generated_tokens=tokens)
        plan, _, _ = plan_round(run, state, 3, run.key, state.stream)
        budgets.append(int(plan.budgets.max()))
    assert budgets == [12, 12, 9, 9, 6, 6, 6]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selfbudgeter", "thinkprune"])
def test_schedules_end_where_the_token_limit_ends_the_run(tmp_path, tokenizer, name):
    run, state = run_of(load(tmp_path, name, *LIMITED), tokenizer, Odd())
    before, values = [], []
    while state.generated_tokens < 1500:
        before.append(state.generated_tokens)
        state, done = iterate(run, state, len(values))
        values.append(
            done.metrics["selfbudgeter/alpha" if name == "selfbudgeter" else "budget/mean"]
        )
    assert 3 < len(values) < 20 and before[-1] > 1000
    if name == "selfbudgeter":
        want = [pytest.approx(float(alpha_schedule(tokens / 1500))) for tokens in before]
        assert values[0] == 6.0 and values[-1] < 2.1
    else:
        want = [(12.0, 9.0, 6.0)[tokens // 500] for tokens in before]
        assert set(values) == {12.0, 9.0, 6.0}
    assert values == want


@pytest.mark.slow
def test_the_policy_teaches_itself_under_smaller_budgets_alone(tmp_path, tokenizer):
    """With the largest budget it is its own teacher, and nothing is added to the advantages."""
    config = load(tmp_path, "self_distill", "budget.choices=[4,12]")
    _, history = train(config, tokenizer)
    # A new budget embedding is zero, so the policy equals its teacher in the first step.
    first, second = (metrics["distill/reverse_kl"] for metrics, _, _ in history)
    assert first == pytest.approx(0.0, abs=1e-6) and abs(second) > 1e-6
    largest = {}
    for preset in ("self_distill", "bacr-robust"):
        config = load(tmp_path, preset, "budget.choices=[12]")
        _, largest[preset] = train(config, tokenizer)
    for (taught, _, _), (plain, _, _) in zip(*largest.values()):
        assert taught["distill/reverse_kl"] == pytest.approx(0.0, abs=1e-6)
        assert taught["loss/total"] == pytest.approx(plain["loss/total"], abs=1e-6)


@pytest.mark.slow
def test_two_steps_with_dual_clip_and_a_sequence_cap(tmp_path, tokenizer):
    """The sampler and the learner are the same policy here, so that no trace is left out."""
    keys = ("loss.importance_cap=null", "loss.dual_clip=10", "loss.sequence_cap=3")
    config = load(tmp_path, "bacr-robust", "train.minibatches=2", *keys)
    _, history = train(config, tokenizer)
    for metrics, _, _ in history:
        assert metrics["mismatch/weight"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["mismatch/masked"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_method_trains_from_a_shared_warm_up(warm, tmp_path, name):
    """Six steps by the command, from the quickstart's warm-up cut short."""
    from bacr_jax.train import main

    base, folder = warm
    preset = str(PRESETS / f"{name}.yaml")
    arguments = ["--config", str(base), "--config", preset, "output.report=false"]
    # Methods whose prompts contain the budget need a separate warm-up.
    if config_io.load([base, preset]).conditioning.budget_input != "prompt":
        arguments.append(f"warmup.dir={folder / 'warmup'}")
    elif name.startswith("l1"):
        # 40 steps are enough, because rewards of wrong answers differ too, by their lengths.
        arguments.append("warmup.steps=40")
    assert main([*arguments, f"output.dir={tmp_path}", "train.steps=6"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(np.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["policy/skipped"] == 0
    own = {"dapo": "dapo/mixed_share", "hapo": "hapo/known_share", "anytime": "anytime/accuracy",
           "selfbudgeter": "selfbudgeter/well_formed", "s_grpo": "s_grpo/exits",
           "l1_exact": "l1/deviation", "l1_max": "l1/over_share", "dler": "dler/mixed_share",
           "effort": "effort/met_share"}  # fmt: skip
    if name.partition("-")[0] in own:
        assert own[name.partition("-")[0]] in lines[0]
    norms = [line["policy/grad_norm"] for line in lines]
    assert max(norms) > 0 and len(set(norms)) > 3
    if name == "hapo":
        known = [line["hapo/known_share"] for line in lines]
        assert known == sorted(known) and known[-1] > 0
    if name == "selfbudgeter":
        assert lines[0]["selfbudgeter/well_formed"] > 0.5
        assert lines[0]["selfbudgeter/alpha"] == pytest.approx(6.0)


SHORTER = {
    "  compute_dtype: float32": "  compute_dtype: float32\n  num_layers: 1",
    "  steps: 800": "  steps: 120\n  target_accuracy: 0\n  short_accuracy: 0\n  hold_accuracy: 0",
    "  train: ledger": "  train: ledger\n  ledger: {train_size: 640}",
    "size: 500": "size: 16",
    "samples: 2": "samples: 0",
    "questions: 32": "questions: 8",
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The quickstart with one layer and a shorter warm-up, and the folder of a run that made it."""
    from bacr_jax.train import main

    folder = tmp_path_factory.mktemp("warm")
    base = folder / "base.yaml"
    text = (PRESETS.parent / "quickstart.yaml").read_text()
    for name, less in SHORTER.items():
        assert text.count(name) == 1
        text = text.replace(name, less)
    cold = "selfbudgeter: {cold_start_steps: 40, cold_start_tokens: 2048}"
    base.write_text(f"{text}\n# shorter\n{cold}\ncheckpoint: {{every: 5}}\n")
    assert main(["--config", str(base), f"output.dir={folder / 'run'}", "train.steps=1"]) == 0
    return base, folder / "run"


def test_what_a_method_remembers_is_part_of_every_checkpoint(tmp_path, tokenizer):
    from bacr_jax.runs.checkpoint import Checkpoints

    config = load(tmp_path, "hapo")
    _, fresh = run_of(config, tokenizer)
    history = fresh.method_state.at[7].set(11)
    state = dataclasses.replace(fresh, method_state=history, generated_tokens=2**40)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, state, {})
    _, back, _ = checkpoints.restore(fresh)
    checkpoints.close()
    np.testing.assert_array_equal(back.method_state, history)
    assert int(back.generated_tokens) == 2**40


GROUPS = jnp.array([0, 1])


def after(correct, due, **settings):
    return update_curriculum(
        init_curriculum(2, mu0=8.0), GROUPS, jnp.asarray(correct), due,
        settings=CurriculumConfig(**settings),
    )  # fmt: skip


def test_outcomes_count_at_once_and_the_schedule_moves_when_it_is_due():
    right = [[1.0, 1.0], [0.0, 0.0]]
    waiting, moved = after(right, False), after(right, True)
    np.testing.assert_array_equal(waiting.ema_rate, moved.ema_rate)
    assert int(waiting.updates) == 0 and int(moved.updates) == 1
    assert waiting.pass_rate[0] == waiting.pass_rate[1]
    assert moved.pass_rate[0] > moved.pass_rate[1]


def test_one_outcome_that_is_no_number_records_nothing():
    fresh = init_curriculum(2, mu0=8.0)
    spoilt = after([[1.0, jnp.nan], [0.0, 0.0]], True)
    np.testing.assert_array_equal(spoilt.pass_rate, fresh.pass_rate)
    np.testing.assert_array_equal(spoilt.ema_rate, fresh.ema_rate)
