"""Accuracy with and without the problems that training came near to."""

import dataclasses
import json

import numpy as np
import pytest

import hf_world
from bacr_jax import evaluate
from bacr_jax.config import io as config_io
from bacr_jax.data.question_set import QuestionSet
from bacr_jax.evaluation import job
from bacr_jax.evaluation.samples import GREEDY, EvalSetting, Sample
from bacr_jax.evaluation.summary import graded, summarise
from bacr_jax.grading import ExactGrader
from bacr_jax.model import hf
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.report import evaluation as report
from bacr_jax.runs.folder import open_run
from bacr_jax.training.loop import Trainer

RIGHT = [True, True, False, True]


def cells(budgets=(8, 16)):
    def sample(problem, budget):
        return Sample(
            set="ours", id=f"p{problem}", mode=GREEDY, budget=budget, sample=0, level=0,
            subject="", text="", extracted="1", gold="1", correct=RIGHT[problem],
            strict=RIGHT[problem], path="string", timed_out=False, thinking_tokens=problem + 1,
            total_tokens=problem + 3, closed_by="tag", finished=True,
        )  # fmt: skip

    found = {EvalSetting(GREEDY, budget, 1): budget for budget in budgets}
    return {c: graded([sample(i, b) for i in range(4)], c) for c, b in found.items()}


def problems(duplicates, compared_with="train"):
    blank = np.zeros(4, np.int32)
    return QuestionSet(
        "ours", list("abcd"), list("1111"), blank, blank, [f"p{i}" for i in range(4)],
        duplicates=np.array(duplicates), compared_with=compared_with,
    )  # fmt: skip


def test_by_hand():
    marked = problems([True, False, False, True])
    result = summarise(cells(), ExactGrader(), problems=marked)
    assert result["near_duplicates"] == {"count": 2, "of": "train"}
    for budget in ("8", "16"):
        entry = result["by_budget"][GREEDY][budget]
        assert (entry["problems"], entry["accuracy"]) == (4, 0.75)
        others = entry["without_near_duplicates"]
        # The second problem is right after 2 tokens, the third wrong after 3.
        assert (others["problems"], others["accuracy"]) == (2, 0.5)
        assert others["mean_thinking_tokens"] == 2.5
        assert others["ci95"][0] < 0.5 < others["ci95"][1]


@pytest.mark.parametrize(
    ("marks", "compared_with", "near"),
    [
        ([False] * 4, "", None),
        ([False] * 4, "train", {"count": 0, "of": "train"}),
        ([True] * 4, "train", {"count": 4, "of": "train"}),
    ],
)
def test_no_second_figure_where_it_would_be_the_same_or_about_nothing(marks, compared_with, near):
    result = summarise(cells(), ExactGrader(), problems=problems(marks, compared_with))
    assert result["near_duplicates"] == near
    assert "without_near_duplicates" not in result["by_budget"][GREEDY]["8"]


def test_tables_give_both_figures_and_the_count():
    result = summarise(cells(), ExactGrader(), problems=problems([True, False, False, True]))
    results = {"name": "tiny", "sets": {"ours": {**result, "note": ""}}, "comparisons": {}}
    (grid,) = [grid for grid in report.grids(results) if "without 2 near" in grid.title]
    assert grid.header[2:4] == ["all 4", "the other 2"]
    assert [row[:2] for row in grid.rows] == [["greedy", "8"], ["greedy", "16"]]
    assert all(row[2].startswith("75.0 [") and row[3].startswith("50.0 [") for row in grid.rows)
    assert "the other 2" in grid.latex()
    first = report.grids(results)[0]
    assert "near-duplicates of training questions (train): 2" in first.caption


TRAIN = ["What is seven plus eight minus two?", "How many legs have three spiders together?"]
# The first two share most of their words with a training question, the last no three in a row.
TEST = [
    "what is seven plus eight minus 2",
    "How many legs have three spiders together, and why?",
    "How many pages remain of a book of 90 when 30 are read?",
    "Two trains meet after an hour; how far apart were they?",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny model that reads English, and two sets."""
    folder = tmp_path_factory.mktemp("near")
    tokenizer = hf_world.chat_tokenizer()
    shape = Qwen2Config(
        len(tokenizer), 16, 24, 1, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=2048
    )
    params = hf_world.random_params(shape)
    hf.save_policy(folder / "tiny", params, config=shape, tokenizer=tokenizer)
    for name, texts in (("train", TRAIN), ("test", TEST)):
        rows = [{"question": text, "answer": str(i)} for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(world, out, *more):
    how = ["--model", world / "tiny", "--data", f"jsonl:{world / 'test.jsonl'}", "--budgets", "4,8"]
    keys = ["rollout.answer_tokens=3", "model.compute_dtype=float32"]
    return evaluate.main([str(a) for a in [*how, "--out", out, *more, *keys]])


def test_the_command_compares_with_the_set_it_is_told(world, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert run(world, out) == 0
    (before,) = json.loads((out / "results.json").read_bytes())["sets"].values()
    assert before["near_duplicates"] is None
    # The training set can be named later: nothing is drawn again.
    monkeypatch.setattr(job, "draw", lambda *a, **k: pytest.fail("drew again"))
    assert run(world, out, "--train", f"jsonl:{world / 'train.jsonl'}") == 0
    (after,) = json.loads((out / "results.json").read_bytes())["sets"].values()
    assert after["near_duplicates"] == {"count": 2, "of": "jsonl"}
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for budget, entry in after["by_budget"]["greedy"].items():
        others = [s for s in lines if s["budget"] == int(budget) and s["id"][-1] in ("2", "3")]
        assert len(others) == entry["without_near_duplicates"]["problems"] == 2
        for name, key in (("accuracy", "correct"), ("mean_total_tokens", "total_tokens")):
            expected = sum(s[key] for s in others) / 2
            assert entry["without_near_duplicates"][name] == pytest.approx(expected)
        del entry["without_near_duplicates"]
    # Nothing else changed.
    assert {**after, "near_duplicates": None} == before
    assert "the other 2" in (out / "results.md").read_text()
    assert "the other 2" in (out / "results.tex").read_text()
    capsys.readouterr()
    assert run(world, out, "--train", "jsonl:nowhere.jsonl") == 2
    assert run(world, out, "--train", "ledger") == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 2 and "no file or folder" in errors and "leave it out" in errors


SMALL = """
model: {compute_dtype: float32, hidden_size: 16, intermediate_size: 32, num_layers: 1,
        scan_layers: false, remat: false}
data: {ledger: {train_size: 20}, num_groups: 1}
budget: {min: 4, max: 8}
curriculum: {mu0: 8, sigma: 4}
rollout: {questions: 4, group_size: 2, answer_tokens: 2, chunk: 4}
value: {hidden_size: 8, inner_steps: 1}
train: {steps: 1, minibatches: 1}
eval: {budgets: [8], size: 6, samples: 0}
output: {tensorboard: false}
"""


def test_training_reports_both_figures(tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(SMALL)
    run = tmp_path / "run"
    settings = config_io.load([tmp_path / "small.yaml"], [f"output.dir={run}"])
    with open_run(run, settings) as folder:
        trainer = Trainer(settings, folder)
        held_out = trainer.environment.eval["ledger"]
        # Every other problem; the subset of 6 that is evaluated has some of both kinds.
        marks = np.arange(len(held_out)) % 2 == 0
        marked = dataclasses.replace(held_out.set, duplicates=marks, compared_with="train")
        trainer.environment.eval["ledger"] = dataclasses.replace(held_out, set=marked)
        state, step = trainer.start()
        trainer.evaluate(state, step, "before")
        trainer.evaluate(state, step, "after")
        trainer.finish(state, step, 1.0)
    record = json.loads((run / "eval.jsonl").read_text().splitlines()[0])
    count = record["near_duplicates"]["ledger"]["count"]
    entry = record["sets"]["ledger"]["greedy"]["8"]
    assert 0 < count < 6
    assert entry["without_near_duplicates"]["problems"] == 6 - count
    title = f"ledger without {count} near-duplicates of training questions ({6 - count} problems)"
    assert title in " ".join(capsys.readouterr().out.split())
    assert title in (run / "report.html").read_text()
    saved = json.loads((run / "summary.json").read_bytes())["sets"]["after"]["ledger"]
    assert saved["greedy"]["8"]["without_near_duplicates"]["problems"] == 6 - count
