"""What a run shows: traces of a step, notes on an evaluation, pictures, report and boards."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from bacr_grading.judge import Verdict
from bacr_jax.config import Config
from bacr_jax.config.schema import WarmupConfig
from bacr_jax.evaluation.decline import Decline
from bacr_jax.prompts.graders import failures
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.rollout import Rollout
from bacr_jax.runs.folder import RunFolder, RunPaths
from bacr_jax.runs.metrics import MetricsWriter
from bacr_jax.runs.progress import Progress
from bacr_jax.training.logging import Iteration
from bacr_jax.training.loop import Trainer
from bacr_jax.training.output import (
    decline_warning,
    end_lines,
    evaluation_notes,
    evaluation_numbers,
    format_lines,
    print_results,
    print_tables,
    publish,
    start_policy,
    trace_rows,
    write_traces,
)
from bacr_jax.training.run import Run, RunState
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Branches, Prompts, Trunks
from config_world import changed
from report_world import TRACE, entry, make_whole_run


class Recorder(MetricsWriter):
    """A writer that only remembers what it was given."""

    def __init__(self):
        self.given, self.closed = [], False

    def show(self, step, kind, found):
        self.given.append((step, {kind: found}))

    def close(self):
        self.closed = True


def shown(folder, again=False):
    metrics = Recorder()
    publish(RunFolder(folder, None), metrics, 12, report=True, again=again)
    assert metrics.closed
    return metrics.given


def test_accuracies_are_named_by_set_decoding_and_budget():
    sets = {"math500:x.jsonl": {"greedy": {"512": entry(0.5, 512), "none": entry(0.75, 512)}}}
    assert evaluation_numbers(sets, sets) == {
        "eval/math500/greedy/512": 0.5, "eval/math500/greedy/512/tokens": 9.0,
        "eval/math500/greedy/none": 0.75, "eval/math500/greedy/none/tokens": 9.0,
    }  # fmt: skip


def test_a_set_has_the_same_name_in_every_evaluation(tmp_path):
    """Evaluations during training have only the set of eval.select, here the second of its name."""
    names = ["jsonl:a.jsonl", "jsonl:b.jsonl"]
    trainer = Trainer.__new__(Trainer)
    trainer.config = changed(eval={"during": "selection"}, output={"format_report": False})
    trainer.folder = RunFolder(tmp_path, None)
    trainer.metrics = Recorder()
    trainer.writes = True
    trainer.progress = Progress(enabled=False)
    for attribute in ("on_phase", "run", "task_data", "evaluations"):
        setattr(trainer, attribute, Mock())
    trainer.task_data.eval = dict.fromkeys(names, Mock(PromptedQuestions))
    trainer.task_data.failures.return_value = ()
    trainer.evaluations.configure_mock(records=[{}], endpoints={}, selected=names[1])
    trainer.evaluations.has.return_value = False
    summary = {"greedy": {"8": entry(0.5, 8)}}
    results = {"by_budget": summary, "anytime": {}, "near_duplicates": None}
    trainer._evaluate_sets = lambda _, step, when: dict.fromkeys(
        trainer.evaluated_sets(when), results
    )
    evaluated = []
    for step, when in enumerate(("before", "during", "after")):
        trainer.evaluate(Mock(RunState, train=None), step, when)
        _, shown_numbers = trainer.metrics.given[-1]
        evaluated.append([name for name in shown_numbers["numbers"] if name.endswith("/8")])
    both = ["eval/jsonl/greedy/8", "eval/jsonl_2/greedy/8"]
    assert evaluated == [both, both[1:], both]


def test_a_set_that_lost_accuracy_gets_a_warning_and_another_does_not(monkeypatch):
    lines = []
    progress = Progress(enabled=False)
    monkeypatch.setattr(progress, "print_line", lines.append)

    def results(right):
        return {"greedy": {"8": {"accuracy": right / 100, "problems": 100}}}

    # Wilson's 95 % interval of 50 in 100 is [.4038, .5962].
    before = {"a": results(50), "b": results(50)}
    print_results(progress, 7, before, {"a": results(41), "b": results(40), "c": results(0)})
    assert lines == [
        "step 7, a: greedy 8: 41.0",
        "step 7, b: greedy 8: 40.0",
        "WARNING, step 7: worse than before training on b: greedy at 8: accuracy 50.0 to 40.0 % "
        "(may be chance with 100 questions). If it lasts, set a lower optimizer.learning_rate",
        "step 7, c: greedy 8: 0.0",
    ]


LOST = Decline("greedy", "48", "accuracy", 0.55, 0.0, problems=64, is_shown=True)
MAYBE = Decline("greedy", "12", "accuracy", 0.14, 0.05, problems=64, is_shown=False)
LOST_TEXT = "greedy at 48: accuracy 55.0 to 0.0 %"


def test_a_warning_tells_shown_declines_from_those_that_may_be_chance():
    assert list(decline_warning("b", [])) == []
    assert list(decline_warning("b", [MAYBE, LOST])) == [
        f"WARNING, worse than before training on b: {LOST_TEXT} (shown by an exact test); greedy "
        "at 12: accuracy 14.0 to 5.0 % (may be chance with 64 questions). Set a lower "
        "optimizer.learning_rate"
    ]
    assert list(decline_warning("b", [LOST], "step 3: ")) == [
        f"WARNING, step 3: worse than before training on b: {LOST_TEXT} (shown by an exact test). "
        "Set a lower optimizer.learning_rate"
    ]


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [("step 3: ", "If it lasts, set a lower"), ("", "If other seeds lose it too, set a lower")],
)
def test_the_advice_about_a_loss_that_may_be_chance_fits_the_time(prefix, advice):
    (line,) = decline_warning("b", [MAYBE], prefix)
    assert line.endswith(f"(may be chance with 64 questions). {advice} optimizer.learning_rate")


def best_json(step, *declined):
    return {
        "step": step, "accuracy": 0.5, "set": "b", "worst": None,
        "declines": [decline._asdict() for decline in declined],
    }  # fmt: skip


def test_the_last_lines_of_a_run_that_ended_worse_are_warnings(tmp_path):
    start = "Its checkpoint is step 0 (--step 0)"
    note, *warnings = end_lines(tmp_path, 30, best_json(20), {"a": [], "b": [LOST]}, start)
    assert note.startswith("the best checkpoint is step 20")
    assert [line.partition(LOST_TEXT)[0] for line in warnings] == [
        "WARNING, worse than before training on b: "
    ]
    # The last export is of the last step, not of the best one.
    (tmp_path / "exports" / "30").mkdir(parents=True)
    *_, warning = end_lines(tmp_path, 30, best_json(20), {"b": [LOST]}, start)
    assert warning == (
        f"WARNING, {tmp_path / 'exports' / '30'}: contains step 30, which is worse than before "
        "training; bacr export takes the best checkpoint"
    )
    # A sound last step has no warning, also with an export.
    (note,) = end_lines(tmp_path, 30, best_json(20), {"b": []}, start)
    assert note.startswith("the best checkpoint is step 20")
    assert list(end_lines(tmp_path, 30, best_json(30), {"b": []}, start)) == []
    assert list(end_lines(tmp_path, 30, None, {"b": []}, start)) == []


def test_if_all_checkpoints_declined_the_last_line_names_the_policy_before_training(tmp_path):
    worse = {"b": [LOST]}
    *_, last = end_lines(tmp_path, 30, best_json(20, LOST), worse, "It is elsewhere")
    assert last == (
        "WARNING, all evaluated checkpoints are worse than before training at some budget. The "
        f"policy before training had better results than the best of them: {LOST_TEXT} (shown by "
        "an exact test). It is elsewhere"
    )
    *_, last = end_lines(tmp_path, 30, best_json(20, LOST), worse, "")
    assert last.endswith(f"{LOST_TEXT} (shown by an exact test)")


def test_no_line_at_the_end_states_a_loss_that_may_be_chance_as_a_fact(tmp_path):
    _, *lines = end_lines(tmp_path, 30, best_json(20, MAYBE), {"b": [MAYBE]}, "")
    assert len(lines) == 2
    for line in lines:
        assert "accuracy 14.0 to 5.0 % (may be chance with 64 questions)" in line
        assert "If it lasts" not in line


def test_the_policy_before_training_is_where_it_was_stored(tmp_path):
    folder = RunPaths(tmp_path)
    no_warmup = WarmupConfig(steps=0)
    assert start_policy(folder, no_warmup, None, has_sft=False) == ""
    assert start_policy(folder, no_warmup, "base", has_sft=False) == (
        "It is the model in model.path=base"
    )
    warmup = WarmupConfig(steps=5)
    own = start_policy(folder, warmup, None, has_sft=False)
    assert f"warmup.dir={tmp_path / 'warmup'} starts" in own
    shared = start_policy(folder, WarmupConfig(steps=5, dir="shared/warmup"), None, has_sft=False)
    assert "weights are in shared/warmup," in shared
    # The supervised stage of a method changes the weights of the warm-up.
    assert start_policy(folder, warmup, None, has_sft=True) == ""
    (folder.checkpoints / "0").mkdir(parents=True)
    assert "--step 0" in start_policy(folder, warmup, None, has_sft=True)


@pytest.mark.parametrize("with_test_set", [True, False])
def test_validation_questions_get_a_table_only_if_no_other_set_has_one(monkeypatch, with_test_set):
    printed = []
    progress = Progress(enabled=False)
    monkeypatch.setattr(progress, "print_line", printed.append)
    names = ["ledger", "train_holdout"] if with_test_set else ["train_holdout"]
    one = np.ones(1, np.int32)
    prompts = Prompts(np.ones((1, 2), np.int32), 2 * one, 0 * one, 2 * one)
    questions = {
        name: PromptedQuestions(
            QuestionSet(
                name, ["1+1"], ["2"], levels=np.ones(1, int), groups=np.zeros(1, int), ids=["0"]
            ),
            prompts,
        )
        for name in names
    }
    results = {name: {"greedy": {"8": entry(0.5, 8)}} for name in names}
    print_tables(progress, questions, results, results, "grpo")
    tables = [item.table.title for item in printed if not isinstance(item, str)]
    lines = [item for item in printed if isinstance(item, str)]
    validation = "train_holdout (validation, not a test set)"
    if with_test_set:
        assert len(tables) == 1 and tables[0].startswith("Ledger: ")
        assert lines == [f"after training, {validation}: greedy 8: 50.0"]
    else:
        assert len(tables) == 1 and tables[0].startswith(validation)
        assert lines == []


def test_a_row_has_the_last_answer_and_its_verdict():
    without, new = trace_rows([{**TRACE, "gold": None}, TRACE])
    assert new["right"] is True and new["outcomes"] == 1.0 and new["decided_by"] == "symbolic"
    assert (new["level"], new["policy_budget"], new["segment_advantages"]) == (
        2,
        8,
        "[0.75, -0.125]",
    )
    # What is not known leaves its place empty.
    assert without["gold"] == "" and without["right"] is True and list(without) == list(new)


@pytest.mark.slow
def test_boards_get_the_pictures_and_the_traces_of_a_finished_run_once(tmp_path):
    folder = make_whole_run(tmp_path / "run")
    (first, pictures), (last, traces) = shown(folder)
    assert first == last == 12 and "training" in pictures["pictures"]
    assert not any(name.endswith("-dark") for name in pictures["pictures"])
    assert len(traces["traces"]) == 96
    assert (folder / "report.html").exists()
    assert shown(folder, again=True) == []


def test_a_damaged_trace_costs_a_warning(tmp_path, capsys):
    folder = make_whole_run(tmp_path / "run")
    (folder / "rollouts" / "000012.jsonl").write_text("{}\n")
    ((_, what),) = shown(folder)
    assert "training" in what["pictures"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("warning: ") for line in said)
    assert all(
        "000012.jsonl: this file contains records that are not traces" in line for line in said
    )


def summary(closed, lenient, strict, mode="greedy"):
    entry = {"closed_rate": closed, "accuracy": lenient, "strict_accuracy": strict, "problems": 64}
    # The largest budget counts, and "none" is no number.
    worse = {**entry, "closed_rate": 0.0}
    return {mode: {"8": worse, "64": entry, "none": worse}}


def test_a_policy_in_good_form_gets_no_advice():
    lines = list(format_lines(summary(0.98, 0.5, 0.48), "train_holdout", 128))
    assert lines == [
        "answer format before training (train_holdout (validation, not a test set), 64 questions, "
        "greedy, budget 64):",
        "  2.0% of answers were never closed, 2.0% are right only by the lenient rules",
    ]


def test_failures_of_form_get_advice():
    unclosed = list(format_lines(summary(0.5, 0.4, 0.4), "x", 128))
    assert len(unclosed) == 3
    assert "rollout.answer_tokens=128" in unclosed[2] and "--show-prompts" in unclosed[2]
    lenient = list(format_lines(summary(1.0, 0.4, 0.1), "x", 128))
    assert len(lenient) == 3
    assert "30.0% are right only by the lenient rules" in lenient[1]
    assert "data.prompt_format" in lenient[2]


class Grader:
    last_failure = "it returned None"

    def __init__(self, **counts):
        self.counts = counts

    def counters(self):
        return self.counts


def test_it_is_said_once_and_can_be_switched_off():
    notes = lambda config, when: list(
        evaluation_notes(
            (),
            {"when": when, "sets": {"a": summary(1, 1, 1)}},
            format_report=config.output.format_report,
            answer_tokens=128,
        )
    )
    assert len(notes(Config(), "before")) == 2
    assert notes(Config(), "during") == []
    assert notes(changed(output={"format_report": False}), "before") == []


def test_answers_that_a_verifier_gave_no_score_are_said_each_time():
    reasons = dict.fromkeys(
        ("late", "died", "memory", "raised", "text", "nan", "range", "length"), 0
    )
    failed = {f"failed_{name}": count for name, count in (reasons | {"late": 2, "nan": 3}).items()}
    grader = Grader(graded=20, failed=5, **failed)
    counted = {"graded": 10, "failed": 2, "failed_late": 2}
    record = {"when": "during", "sets": {}}
    failed = failures(grader, counted)
    assert list(evaluation_notes(failed, record, format_report=True, answer_tokens=128)) == [
        "WARNING: the verifier returned no score for 3 of 10 answers, which count as 0: 3 got "
        "the score NaN "
        "(last error: it returned None)"
    ]


# One question, two rollouts: the first closes its thinking after 3 of 8 tokens, the second is cut.
# Cuts at 2, 2 and 8 tokens; the closing tag is the fourth sampled token of the first.
CUTS = np.array([[[2, 2, 8], [2, 4, 6]]])
THINKING = np.array([[1.0, 1.0, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5], [0.5, 0.5, 2, 2, 3, 3, 0, 0]])


def bare(kind, **fields):
    """One of its kind with no more in it than is asked of it."""
    one = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(one, name, value)
    return one


def decided(text, path="string", timed_out=False):
    return Verdict(text == "6", text, path, timed_out)


@pytest.fixture
def world(ledger_tokens):
    """A run and an iteration of what traces are made of."""
    ids = lambda text: ledger_tokens(text, add_special_tokens=False)["input_ids"]
    tokens = np.array([[*ids("<bos>4a2<think>a4+2=6")[:11], 0, 0]] * 2)
    trunks = Trunks(
        tokens, np.array([5, 5]), np.array([4, 6]), np.array([3, 6]),
        np.array([CLOSED_BY_TAG, CLOSED_BY_BUDGET]), np.array([8, 6]), np.zeros((2, 8)),
    )  # fmt: skip
    branches = Branches(
        np.zeros((2, 3, 1), int), np.array([[7, 7, 9], [7, 9, 11]]),
        np.array([[2, 2, 1], [2, 2, 2]]), np.array([[2, 2, 1], [2, 2, 2]]),
        np.ones((2, 3), bool), np.array([[0, 0, 2], [0, 1, 2]]), np.zeros((2, 3, 1)),
    )  # fmt: skip
    verdicts = np.empty((2, 3), object)
    verdicts[0] = [decided("4"), decided("4"), decided("6")]
    verdicts[1] = [decided(None, "none"), decided("4", "symbolic", True), decided("6", "number")]
    questions = SimpleNamespace(
        ids=["ledger-0", "ledger-9"], levels=np.array([1, 3]), questions=["", "4a2"],
        answers=["", "6"],
    )  # fmt: skip
    run = bare(
        Run,
        task_data=SimpleNamespace(
            tokenizer=ledger_tokens,
            train=SimpleNamespace(set=questions, budget_prompts=None),
            answer_texts=lambda one: [[f"answer at {c}" for c in one.context[0]]],
        ),
        method=SimpleNamespace(conditioned=True),
        config=SimpleNamespace(output=SimpleNamespace(rollouts=2)),
    )
    plan = SimpleNamespace(
        rows=np.array([1, 1]),
        groups=np.array([2]),
        budgets=np.array([[8, 6]]),
        cuts=CUTS,
        input_budgets=np.array([8, 6]),
    )
    outcomes = np.array([[[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    batch = SimpleNamespace(
        plan=plan, rollout=Rollout(trunks, branches, {}), outcomes=outcomes, verdicts=verdicts,
        useful=np.array([True]),
        group_batch=SimpleNamespace(
            cuts=CUTS,
            extra={"declared": np.array([[7, 9]])},
            by_reward={"mine.py:brief": np.array([[[[0.0], [0.0], [1.0]], [[0.5]] * 3]])},
        ),
    )  # fmt: skip
    advantages = SimpleNamespace(
        thinking=THINKING, answers=np.array([[-1.0, 0.0, 1.5], [0.0, np.nan, 0.25]]),
        rewards=np.array([[[0.0, 0.0, 1.3], [0.0, 0.0, 1.3]]]),
        keep=np.array([[True, False]]),
    )  # fmt: skip
    values = np.array([[[0.1, 0.1, 0.4], [0.1, 0.2, 0.3]]])
    return run, bare(Iteration, chosen=batch, advantages=advantages, values=values)


def written(tmp_path, world, count=2):
    run, done = world
    path = tmp_path / "traces.jsonl"
    run.config.output.rollouts = count
    write_traces(path, 3, run, done)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_is_cut_where_its_answers_were_asked(tmp_path, world):
    (first,) = written(tmp_path, world, count=1)
    assert first["prompt"] == "<bos>4a2<think>" and first["thinking"] == "a4+2"
    assert first["segments"] == ["a4", "", "+2", ""] and first["context"] == [2, 2, 4]
    assert first["closed_by"] == "tag" and first["step"] == 3 and first["budget"] == 8
    assert first["answers"] == ["answer at 7", "answer at 7", "answer at 9"]


def test_the_question_is_known_by_its_name_and_what_the_policy_was_told(tmp_path, world):
    first, second = written(tmp_path, world)
    asked = {"id": "ledger-9", "level": 3, "group": 2, "question": "4a2", "gold": "6"}
    assert asked.items() <= first.items() and asked.items() <= second.items()
    assert (first["policy_budget"], first["budget_input"]) == (8, "embedding") and second[
        "policy_budget"
    ] == 6
    assert first["read"] == {"declared": 7.0} and second["read"] == {"declared": 9.0}
    run, done = world
    run.method.conditioned = False
    (silent,) = written(tmp_path, (run, done), count=1)
    assert (silent["policy_budget"], silent["budget_input"]) == (None, "none")
    run.task_data.train.budget_prompts = "the prompts"
    assert written(tmp_path, (run, done), count=1)[0]["budget_input"] == "prompt"


def test_tokens_of_the_parts_add_up(tmp_path, world):
    first, second = written(tmp_path, world)
    assert (first["prompt_tokens"], first["thinking_tokens"], first["closing_tokens"]) == (5, 3, 1)
    # Seen by the answer, forced, sampled: 2 + 2 + 2 at the first cut, 4 + 1 + 1 at the last.
    assert first["total_tokens"] == [6, 6, 6] and second["total_tokens"] == [6, 8, 10]
    assert second["closing_tokens"] == 0


def test_the_verdict_says_what_decided_it(tmp_path, world):
    first, second = written(tmp_path, world)
    assert first["outcomes"] == [0.0, 0.0, 1.0] and first["extracted"] == ["4", "4", "6"]
    assert second["decided_by"] == ["none", "deadline", "number"]
    assert second["extracted"] == [None, "4", "6"]
    assert first["reward_scores"] == {"mine.py:brief": [0.0, 0.0, 1.0]}
    assert second["reward_scores"] == {"mine.py:brief": [0.5, 0.5, 0.5]}
    run, done = world
    done.chosen.verdicts = None
    assert "decided_by" not in written(tmp_path, (run, done))[0]


def test_each_segment_has_the_advantage_of_its_tokens(tmp_path, world):
    first, second = written(tmp_path, world)
    # Tokens 1 and 2; none between the equal cuts; tokens 3 and 4 of 8.
    assert first["segment_advantages"] == [1.0, None, -0.5]
    assert second["segment_advantages"] == [0.5, 2.0, 3.0]
    assert first["values"] == [0.1, 0.1, 0.4] and first["rewards"] == [0.0, 0.0, 1.3]
    assert first["in_loss"] and not second["in_loss"]
    # What is no number is written as text that reads back.
    assert second["answer_advantages"] == [0.0, "nan", 0.25]


def test_a_segment_past_the_end_of_the_thinking_has_no_advantage(tmp_path, world):
    run, done = world
    done.chosen.rollout.trunks.sampled[0] = 2
    assert written(tmp_path, world)[0]["segment_advantages"] == [1.0, None, None]


def test_segments_end_where_the_cuts_fell(tmp_path, world):
    """The last one after a grace window of two tokens, though the budget was 2."""
    run, done = world
    done.chosen.plan.cuts = np.array([[[1, 2, 2], [2, 4, 6]]])
    done.chosen.group_batch.cuts = np.array([[[1, 2, 2], [2, 4, 6]]])
    assert written(tmp_path, world)[0]["segment_advantages"] == [1.0, 1.0, None]
    done.chosen.group_batch.cuts = np.array([[[1, 2, 4], [2, 4, 8]]])
    (first, _) = written(tmp_path, world)
    assert first["segment_advantages"] == [1.0, 1.0, -0.5] and first["cuts"] == [1, 2, 2]
