"""report.html holds everything of a run in one file, and runs nothing that a model wrote."""

import json
import re

import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.report import __main__ as command
from bacr_jax.report.page import page

HOSTILE = "<script>alert('x')</script>"


def entry(accuracy):
    return {
        "accuracy": accuracy,
        "ci95": [accuracy - 0.1, accuracy + 0.1],
        "mean_thinking_tokens": 9.0,
    }


def evaluation(step, when, accuracy):
    summary = {"greedy": {"8": entry(accuracy), "16": entry(accuracy + 0.1)}}
    return {"step": step, "when": when, "sets": {"ledger": summary}}


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path):
    """A run folder without a finished run's summary."""
    (tmp_path / "config.yaml").write_text(config_io.to_yaml(Config()))
    (tmp_path / "rollouts").mkdir()
    budgets = {"budget/p10_0": 4.0, "budget/median_0": 8.0, "budget/p90_0": 12.0}
    records = [{"step": i, "reward/mean": i / 10, **budgets} for i in (1, 2, 3)]
    lines(tmp_path / "metrics.jsonl", records)
    whens = [(0, "before", 0.2), (2, "during", 0.5), (3, "after", 0.6)]
    lines(tmp_path / "eval.jsonl", [evaluation(*when) for when in whens])
    trace = {
        "step": 3,
        "row": 0,
        "prompt": f"what is {HOSTILE}?",
        "budget": 8,
        "thinking": f"a{HOSTILE}b",
        "segments": ["one ", "two ", f"rest {HOSTILE}"],
        "thinking_tokens": 6,
        "closed_by": "tag",
        "context": [2, 4],
        "answers": ["<answer>1</answer>", HOSTILE],
        "outcomes": [0.0, 1.0],
    }
    lines(tmp_path / "rollouts" / "000003.jsonl", [trace])
    return tmp_path


def test_nothing_is_loaded_from_elsewhere_and_nothing_hostile_gets_through(run):
    found = page(run)
    assert "<script" not in found and "&lt;script&gt;" in found
    sources = re.findall(r'src="([^"]{0,22})', found)
    # Training curves, budgets, accuracy by budget, accuracy over steps.
    assert sources == ["data:image/png;base64,"] * 4
    assert not re.findall(r"https?:|<link|@import|url\(", found)


def test_traces_show_cuts_answers_and_the_rewards_of_the_dense_formula(run):
    found = page(run)
    assert "one <span class=cut>cut 1</span>two <span class=cut>cut 2</span>rest" in found
    # Eq. 7 with lambda 0.3: 0, then 1 + 0.3 (1 - 0).
    assert "outcome 0, reward +0.00" in found and "outcome 1, reward +1.30" in found
    assert "budget 8" in found and "closed by tag" in found


def test_a_run_under_way_has_a_report_too(run):
    lines(run / "eval.jsonl", [evaluation(0, "before", 0.2)])
    (run / "metrics.jsonl").unlink()
    found = page(run)
    assert "not finished" in found and "30.0 [20.0, 40.0]" in found


def test_a_finished_run_says_so(run):
    summary = {"method": "BACR", "steps": 3, "generated_tokens": 1234, "wall_seconds": 61.0}
    (run / "summary.json").write_text(json.dumps(summary))
    found = page(run)
    assert "finished, 3 steps" in found and "1,234" in found and "1m01s" in found


def test_the_command_prints_where_the_report_is(run, capsys):
    assert command.main(["--run", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_bad_input_is_one_line(run, tmp_path, capsys):
    for arguments in (["--run", str(tmp_path / "none")], [], ["--run", str(run), "--out", "/"]):
        assert command.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and captured.out == ""
    (run / "summary.json").write_text("{")
    assert command.main(["--run", str(run)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_validation_questions_stand_after_test_sets_and_are_marked(run):
    whens = [(0, "before", 0.2), (2, "during", 0.5), (3, "after", 0.6)]
    records = [evaluation(*when) for when in whens]
    for record in records:
        record["sets"]["train_holdout"] = record["sets"]["ledger"]
    lines(run / "eval.jsonl", records)
    found = page(run)
    marked = found.index("train_holdout (validation, not a test set): accuracy in %")
    assert marked > found.index("ledger: accuracy in %")
    assert (run / "evaluation_train_holdout.png").exists()


def test_departures_from_the_publication_are_listed_also_while_it_trains(run):
    config = config_io.override(Config(), ["method=grpo", "loss.kl_kind=k3"])
    (run / "config.yaml").write_text(config_io.to_yaml(config))
    found = page(run)
    assert "loss.aggregate=constant (published: seq_mean_token_mean)" in found
    assert "loss.kl_kind=k3 (published" not in found
    (run / "summary.json").write_text(json.dumps({"departures": ["a key of its own"]}))
    assert "a key of its own" in page(run)
