"""What training evaluates: a fixed subset, every budget, greedy before sampled."""

import inspect
from types import SimpleNamespace

import jax
import pytest

from bacr_grading import ExactGrader
from bacr_jax.config import EvalConfig
from bacr_jax.config.values import FrozenMap
from bacr_jax.evaluation import decoder as decoders
from bacr_jax.evaluation.decoder import Decoder
from bacr_jax.evaluation.samples import GREEDY, subset
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.model.sizes import preset
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.rollout import RolloutSpec
from evaluation_world import near_problems, sample

# Without the runtime type checks: what surrounds the policy is made up here.
evaluate_set = inspect.unwrap(decoders.evaluate_set)
CONFIG = EvalConfig(budgets=(8, 16), size=3, samples=2)


class PromptedQuestions:
    """Four problems, the first a near-duplicate."""

    set = near_problems([True, False, False, False])

    def __len__(self):
        return len(self.set)


@pytest.fixture
def evaluate(monkeypatch):
    """`evaluate_set` of a policy that is right at the second budget alone."""
    drawn = []

    def draw(decoder, questions, chosen, parts, drawing, *, name):
        found = []
        for rows, (setting,) in parts:
            drawn.append((setting.mode, setting.budget, len(rows), chosen.tolist()))
            answer = "4" if setting.budget == 16 else "1"
            found.append([
                sample(int(chosen[row // setting.samples]), int(row % setting.samples), answer,
                       budget=setting.budget, mode=setting.mode)
                for row in rows
            ])  # fmt: skip
            drawing.on_rows(len(rows))
        return found

    monkeypatch.setattr(decoders, "draw_samples", draw)
    task_data = SimpleNamespace(graded_like=lambda _: SimpleNamespace(grader=ExactGrader()))
    spec = RolloutSpec(preset("qwen2.5-0.5b"), max_thinking=16, answer_tokens=2, slots=4)

    def run(config=CONFIG, **options):
        decoder = Decoder(DecodeParams(None, (), None, None, None), spec, None, 16)
        how = {"config": config, "seed": 0, **options}
        return evaluate_set(
            decoder, task_data, PromptedQuestions(), jax.random.key(0), **how
        ), drawn

    return run


def test_a_signal_is_heard_while_answers_are_compared_for_votes(evaluate):
    def poll():
        raise Preempted("SIGTERM")

    with pytest.raises(Preempted):
        evaluate(poll=poll)


def test_greedy_and_sampled_answers_to_one_subset_at_every_budget(evaluate):
    found, drawn = evaluate()
    chosen = subset(4, 3, 0).tolist()
    assert drawn == [
        ("greedy", 8, 3, chosen),
        ("greedy", 16, 3, chosen),
        ("sampled", 8, 6, chosen),
        ("sampled", 16, 6, chosen),
    ]
    for mode in ("greedy", "sampled"):
        assert {b: e["accuracy"] for b, e in found["by_budget"][mode].items()} == {"8": 0, "16": 1}
        assert found["anytime"][mode]["mean"] == 0.5


@pytest.mark.parametrize(("spec", "samples"), [("math:x", 3), ("gsm8k:y", 0)])
def test_each_set_has_its_own_number_of_answers(evaluate, spec, samples):
    config = EvalConfig(budgets=(16,), size=3, samples=FrozenMap(math=3, gsm8k=0))
    found, drawn = evaluate(config, spec=spec)
    rows = [("greedy", 3), ("sampled", 9)][: 2 if samples else 1]
    assert [(mode, count) for mode, _, count, _ in drawn] == rows
    written = {mode: entry["16"]["samples"] for mode, entry in found["by_budget"].items()}
    assert written == {"greedy": 1, **({"sampled": samples} if samples else {})}


def test_near_duplicates_are_those_of_the_subset(evaluate):
    found, _ = evaluate(EvalConfig(budgets=(16,), size=None, samples=0))
    assert found["near_duplicates"] == {"count": 1, "of": "train"}
    entry = found["by_budget"][GREEDY]["16"]
    assert (entry["problems"], entry["without_near_duplicates"]["problems"]) == (4, 3)


def test_progress_counts_answers(evaluate):
    told = []
    evaluate(on_progress=lambda done, total: told.append((done, total)))
    assert told == [(3, 18), (6, 18), (12, 18), (18, 18)]


def test_another_seed_asks_other_problems(evaluate):
    seeds = range(5)
    subsets = {tuple(evaluate(seed=seed)[1][-1][3]) for seed in seeds}
    assert len(subsets) > 1
