"""The replay reports which alarms finished runs raise, and counts the false ones."""

import json
import lzma
from pathlib import Path

import pytest

import replay_alarms

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STEP = {"reward/cut_1": 0.5, "rollout/closed_answers": 0.97, "rollout/repetition": 0.02,
        "advantage/mean": 0.1, "advantage/std": 1.0}  # fmt: skip


def replayed(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["replay_alarms.py", *map(str, words)])
    replay_alarms.main()
    return capsys.readouterr().out.splitlines()


def reports(monkeypatch, capsys, *folders):
    *runs, counts = map(json.loads, replayed(monkeypatch, capsys, *folders))
    return runs, counts


def evaluation(when, accuracy, step=0):
    sets = {"ledger": {"greedy": {"8": {"accuracy": accuracy, "problems": 100}}}}
    return {"when": when, "step": step, "sets": sets}


def run_folder(path, steps, *evaluations):
    path.mkdir()
    metrics = [{"step": step} | values for step, values in enumerate(steps, 1)]
    for name, records in (("metrics", metrics), ("eval", evaluations)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (path / f"{name}.jsonl").write_text(text)
    return path


def cell(arm, steps, correct, curve=(), closed=1.0, seed=1, task="task"):
    numbers = {"accuracy": correct.count("1") / len(correct), "correct": correct,
               "no_answer_share": 1.0 - closed}  # fmt: skip
    return {
        "id": f"{task}.{arm}.{seed}", "study_size": "cpu", "task": task, "arm": arm, "seed": seed,
        "value": None, "provenance": {}, "config_sha": "", "departures": [], "steps": steps,
        "generated_tokens": 0, "wall_seconds": 0.0, "samples": {"greedy": 1},
        "sets": {"ledger": {"greedy": {"8": numbers}}}, "problems_digest": {}, "levels_of": {},
        "curve": list(curve),
    }  # fmt: skip


def point(step, reward, accuracy=None, **more):
    return {"step": step, "reward": reward, "accuracy": accuracy} | more


def pack(folder, *records):
    folder.mkdir()
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "cells.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    return folder


def test_alarms_are_replayed_over_committed_runs(monkeypatch, capsys):
    names = ("smollm2-recipe-cpu", "quickstart-cpu")
    runs, counts = reports(monkeypatch, capsys, *(RESULTS / name for name in names))
    assert runs[0]["alarms"] == {"collapse": 6, "one_sided": 6, "closed_answers": 13}
    assert [failure.split()[-3:] for failure in runs[0]["failed"]] == [
        ["greedy", "48", "accuracy"],
        ["48", "closed", "answers"],
    ]
    # docs/alarms.md has these numbers.
    assert all(run["alarms"] == {} for run in runs[1:])
    assert counts == {
        "runs": 7, "failed": 3, "failed_with_alarm": 1, "fine": 4, "fine_with_alarm": 0,
        "false_alarms": {}, "mean_measured": 0, "mean_fell": 0,
    }  # fmt: skip


def test_an_alarm_in_a_run_that_did_not_fail_is_a_false_one(monkeypatch, capsys, tmp_path):
    steps = [STEP] + [STEP | {"rollout/closed_answers": 0.8}] * 3
    run = run_folder(tmp_path / "one", steps, evaluation("before", 0.5), evaluation("after", 0.5))
    (report,), counts = reports(monkeypatch, capsys, run)
    assert report["alarms"] == {"closed_answers": 4} and report["failed"] == []
    assert counts["false_alarms"] == {"closed_answers": 1} and counts["fine_with_alarm"] == 1


def test_an_evaluation_that_is_worse_than_before_training_is_an_alarm(
    monkeypatch, capsys, tmp_path
):
    # The 95 % Wilson interval of 50 of 100 is 40.4 to 59.6 %.
    evaluations = [
        evaluation("before", 0.5),
        evaluation("during", 0.41, step=2),
        evaluation("during", 0.4, step=3),
        evaluation("after", 0.3, step=4),
    ]
    (report,), counts = reports(
        monkeypatch, capsys, run_folder(tmp_path / "one", [STEP] * 4, *evaluations)
    )
    assert report["alarms"] == {"evaluation": 3}
    assert report["failed"] == ["ledger greedy 8 accuracy"] and counts["failed_with_alarm"] == 1


def test_a_cell_is_compared_with_the_untrained_cell_of_its_seed(monkeypatch, capsys, tmp_path):
    ruined = [point(step, reward) for step, reward in enumerate([0.6, 0.5, 0.1, 0.1], 1)]
    folder = pack(
        tmp_path / "study",
        cell("cot", 0, "1100" * 25),
        cell("bacr", 4, "1000" * 25, ruined),
        cell("grpo", 4, "1100" * 25, [point(1, 0.5, closed_answers=1.0)]),
    )
    (bacr, grpo), counts = reports(monkeypatch, capsys, folder)
    assert (bacr["run"], bacr["alarms"]) == ("study/task.bacr.1", {"collapse": 4})
    assert bacr["failed"] == ["ledger greedy 8 accuracy"]
    assert grpo["alarms"] == {} and grpo["failed"] == []
    assert counts["failed_with_alarm"] == 1 and counts["fine"] == 1


def test_without_an_untrained_cell_the_held_out_mean_decides(monkeypatch, capsys, tmp_path):
    # The 95 % Wilson interval of 128 of 256 is 43.9 to 56.1 %.
    def trained(arm, after):
        return cell(arm, 1, "11", [point(0, None, 0.5), point(1, 0.5, after)])

    unmeasured = cell("last", 1, "11", [point(1, 0.5, 0.1)])
    folder = pack(tmp_path / "study", trained("one", 0.43), trained("two", 0.45), unmeasured)
    runs, counts = reports(monkeypatch, capsys, folder)
    assert [run["mean_fell"] for run in runs] == [True, False, None]
    assert [run["failed"] for run in runs] == [None] * 3
    assert (counts["failed"], counts["fine"]) == (1, 1)
    assert (counts["mean_fell"], counts["mean_measured"]) == (1, 2)
    table = replayed(monkeypatch, capsys, "--table", folder)
    assert table[2] == "| study | 3 | 1 | 0 | 1 | 0 | 1 of 2 |" and table[4] == ""


# All seeds of a task of this study start from the same warm-up (`warmup.seed`).
SHARED = RESULTS.parents[1] / "configs" / "studies" / "stability-twenty.yaml"


@pytest.mark.parametrize(("words", "failed"), [((), None), (("--study", SHARED), ["12"])])
def test_runs_of_other_seeds_are_compared_with_the_shared_warmup(
    monkeypatch, capsys, tmp_path, words, failed
):
    records = (
        cell("untrained", 0, "1100" * 25, seed=201, task="warm2"),
        cell("shipped", 1, "1000" * 25, [point(1, 0.5)], seed=202, task="warm2"),
    )
    for record in records:
        budgets = record["sets"]["ledger"]["greedy"]
        budgets["12"] = budgets.pop("8")
    (report,), _ = reports(monkeypatch, capsys, *words, pack(tmp_path / "study", *records))
    budgets = report["failed"] and [failure.split()[2] for failure in report["failed"]]
    assert budgets == failed


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_packed_run_has_the_failures_of_its_cell_and_counts_once(
    monkeypatch, capsys, tmp_path, tokens
):
    whole = {
        "id": "task.bacr.1",
        "summary": {"generated_tokens": tokens},
        "eval": [evaluation("before", 0.5), evaluation("after", 0.5)],
        "metrics": [STEP | {"step": 1}],
    }
    ruined = cell("bacr", 1, "1000" * 25, [point(1, 0.5)])
    study = pack(tmp_path / "study", cell("cot", 0, "1100" * 25), ruined)
    runs, counts = reports(monkeypatch, capsys, pack(tmp_path / "runs", whole), study)
    # A run with another number of tokens is another run, although it has the same id.
    is_same = tokens == ruined["generated_tokens"]
    assert bool(runs[0]["failed"]) == is_same
    assert (counts["runs"], counts["failed"]) == ((1, 1) if is_same else (2, 1))


@pytest.mark.parametrize("order", [1, -1])
def test_run_folders_are_not_taken_for_the_same_run(monkeypatch, capsys, tmp_path, order):
    """They have no id and number of tokens, with which a whole run and its cell are joined."""
    folders = [
        run_folder(tmp_path / "one", [STEP], evaluation("before", 0.5), evaluation("after", 0.1)),
        run_folder(tmp_path / "unevaluated", [STEP]),
        run_folder(tmp_path / "two", [STEP], evaluation("before", 0.5), evaluation("after", 0.5)),
    ][::order]
    runs, counts = reports(monkeypatch, capsys, *folders)
    assert [run["run"] for run in runs] == [folder.name for folder in folders]
    assert [run["failed"] is None for run in runs] == [False, True, False]
    assert (counts["runs"], counts["failed"], counts["fine"]) == (3, 1, 1)


def test_the_table_of_alarms_has_their_steps_by_the_end_of_the_runs(monkeypatch, capsys, tmp_path):
    fewer = STEP | {"rollout/closed_answers": 0.8}
    before = evaluation("before", 0.5)
    folders = [
        run_folder(tmp_path / "right", [STEP, *[fewer] * 3], before, evaluation("after", 0.1)),
        run_folder(tmp_path / "late", [STEP, STEP, *[fewer] * 3], before, evaluation("after", 0.1)),
        run_folder(tmp_path / "false", [STEP, *[fewer] * 3], before, evaluation("after", 0.5)),
        run_folder(tmp_path / "open", [STEP, *[fewer] * 3], before),
    ]
    table = replayed(monkeypatch, capsys, "--table", *folders)
    assert "| `closed_answers` | 2 | 4, 5 | 1 | 4 | 1 | 4 |" in table
    assert "| `collapse` | 0 | - | 0 | - | 0 | - |" in table


def test_a_folder_without_a_run_is_refused_in_a_line(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        replayed(monkeypatch, capsys, tmp_path)
    assert f"{tmp_path}: has neither metrics.jsonl nor" in capsys.readouterr().err
