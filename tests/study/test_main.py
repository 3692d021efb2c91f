"""`bacr study`: what it lists and refuses; a killed study ends the same."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bacr_jax import evaluate, train
from bacr_jax.config import io as config_io
from bacr_jax.evaluation.samples import GREEDY, EvalSetting
from bacr_jax.files import append_line, read_lines, write_json
from bacr_jax.parallel.preemption import EXIT_CODE
from bacr_jax.runs.folder import RunPaths, lock_when_free, open_run, run_path
from bacr_jax.runs.saved_policy import read_config
from bacr_jax.training import initialize
from bacr_study import __main__ as command_line
from bacr_study import work
from bacr_study.__main__ import main
from bacr_study.cells import read_cell
from bacr_study.plan import plan_runs
from bacr_study.spec import Variant
from bacr_study.work import curve
from evaluation_world import sample
from study_world import STUDY, finished, planned, write_study

# What two equal runs differ in.
OF_THE_MACHINE = ("wall_seconds", "warmup_seconds", "provenance")


def study(folder, *arguments):
    return ["--config", str(write_study(folder)), "--out", str(folder / "studies"), *arguments]


def test_runs_are_listed_by_number(tmp_path, capsys):
    assert main(study(tmp_path, "--list")) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["0 plain.grpo.0", "1 plain.bacr.0"]


def test_a_forecast_says_tokens_and_time_and_what_is_shared(tmp_path, capsys):
    twin = "arms=[grpo,bacr]"
    assert main(study(tmp_path, "--dry-run", "--jobs", "1", twin)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "plain.grpo.0" in lines[0] and "1,000 tokens" in lines[0] and "10s" in lines[0]
    assert lines[-1].startswith("4 cells, 4 runs, 4 of them to be trained: 4,000 generated tokens")
    assert "about 40s with 1 at a time" in lines[-1]
    # Without a stated pace nobody knows.
    assert main(study(tmp_path, "--dry-run", "tokens_per_second=null")) == 0
    assert "1,000 tokens        ?" in capsys.readouterr().out
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize(("budgets", "warns"), [("[8,64]", False), ("[8,16]", True)])
def test_a_forecast_warns_of_held_out_accuracy_at_other_budgets(tmp_path, capsys, budgets, warns):
    keys = ("eval.every=5", f"eval.budgets={budgets}")
    assert main(study(tmp_path, "--dry-run", *keys)) == 0
    lines = capsys.readouterr().out.splitlines()
    warnings = [line for line in lines if line.startswith("WARNING, plain: ")]
    assert len(warnings) == int(warns)
    for line in warnings:
        assert line.endswith("set eval.budgets of the task before its first run")


def test_the_forecast_of_a_gpu_size_needs_no_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(study(tmp_path, "--dry-run", "devices_per_run=8")) == 0
    assert "about 40s with 1 at a time" in capsys.readouterr().out


def test_a_forecast_on_cpu_cores_next_to_a_gpu_begins_with_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert main(study(tmp_path, "--dry-run")) == 0
    assert capsys.readouterr().out.startswith("WARNING, devices_per_run=0: ")
    assert main(study(tmp_path, "--dry-run", "devices_per_run=1")) == 0
    assert "WARNING" not in capsys.readouterr().out


# Fits together, and neither model nor set is there.
UNMADE = [
    *("model.path=nowhere", "warmup.steps=0", "optimizer.learning_rate=1e-6"),
    *("data.train=math:x", "data.eval=['math:x']", "data.prompt_format=boxed"),
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "9"], "--only 9: no run of the study has this number"),
        (["--size", "huge"], "--size: found 'huge'"),
        (
            ["--jobs", "0"],
            "--jobs 0: at least one run must be trained at a time; set it to 1 or more",
        ),
        (["arms=[grpo,grpo]"], "arms: found ['grpo', 'grpo']; use each name only once"),
        (["budget.mox=3"], "budget.mox: there is no such key; use budget.max"),
        (["budget.max=4"], "plain, grpo: "),
        (UNMADE, "model.path=nowhere: there is no such folder"),
        (["--list", "--dry-run"], "not allowed with argument"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, arguments, words):
    assert main(study(tmp_path, *arguments)) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "studies").exists()


def test_a_run_whose_cells_are_there_is_not_made_again(tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(train, "main", lambda argv: made.append(argv) or 1)
    two, (run, *_), folder = planned(tmp_path)
    for variant in (run.variant, Variant("vote")):
        finished(two, run, variant)
    before = {path: path.read_bytes() for path in (folder / "cells").iterdir()}
    assert main(study(tmp_path, "--only", "0")) == 0
    assert capsys.readouterr().out == "plain.grpo.0: its cells are there\n"
    # A cell of other settings stays what it is, too.
    assert main(study(tmp_path, "--only", "0", "train.steps=3")) == 2
    assert (
        "plain.grpo.0.json: the results of this run were made with other settings"
        in capsys.readouterr().err
    )
    assert {path: path.read_bytes() for path in (folder / "cells").iterdir()} == before
    assert made == []
    assert main(study(tmp_path, "--only", "1")) == 1 and len(made) == 1


def test_cells_that_share_a_run_make_it_once_also_at_the_same_time(tmp_path, monkeypatch):
    twin = "  twin: {label: again, set: {loss.entropy_coef: 0.0}}\nsizes:"
    text = STUDY.replace("sizes:", twin, 1)
    two, (_, *both), _ = planned(tmp_path, "seeds=[0]", text=text)
    calls, busy = [], threading.Lock()

    def call(name, makes):
        # Where the run is in use, a command is refused.
        assert busy.acquire(blocking=False)
        calls.append(name)
        time.sleep(0.2)
        makes.parent.mkdir(parents=True, exist_ok=True)
        makes.touch()
        busy.release()
        return 0

    # Handlers are for main threads.
    nothing = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(work, "PreemptionHandler", lambda: nullcontext(nothing))
    summary, evaluated = RunPaths(both[0].folder).summary, tmp_path / "evaluated"
    monkeypatch.setattr(train, "main", lambda argv: call("train", summary))
    monkeypatch.setattr(evaluate, "main", lambda argv: call("evaluate", evaluated))
    monkeypatch.setattr(
        work, "write_cells", lambda study, run, out: finished(two, run, run.variant)
    )
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda run: work.run_one(two, run), both)) == [0, 0]
    assert calls == ["train", "evaluate", "evaluate"]
    assert all(run.has_cells(two) for run in both)


HARD = STUDY.replace(
    "budgets: [8, 64]}", "budgets: [8, 64], hard_levels: [5], data: ['gsm8k:x']}", 1
)


@pytest.mark.parametrize("mode", [[], ["--only", "0"]])
def test_hard_levels_that_no_problem_has_are_refused_before_training(
    tmp_path, capsys, monkeypatch, mode
):
    monkeypatch.setattr(train, "main", lambda argv: pytest.fail("trained"))
    monkeypatch.setattr(command_line.schedule, "run_all", lambda *_: pytest.fail("trained"))
    (tmp_path / "x.jsonl").write_text('{"question": "One?", "answer": "#### 1"}\n')
    text = HARD.replace("gsm8k:x", f"gsm8k:{tmp_path / 'x.jsonl'}")
    arguments = study(tmp_path, *mode)
    write_study(tmp_path, text)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "tasks.plain.hard_levels: found [5], but the evaluated problems of gsm8k:" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("mode", [[], ["--only", "0"]])
def test_budgets_beyond_the_positions_are_refused_before_training(
    tmp_path, capsys, monkeypatch, mode
):
    monkeypatch.setattr(train, "main", lambda argv: pytest.fail("trained"))
    monkeypatch.setattr(command_line.schedule, "run_all", lambda *_: pytest.fail("trained"))
    arguments = study(tmp_path, *mode)
    write_study(tmp_path, STUDY.replace("budgets: [8, 64]", "budgets: [8, 40000]", 1))
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "tasks.plain.budgets: found 40000" in printed and printed.count("\n") == 1


@pytest.mark.parametrize("begun", [None, "2026-11-27"])
def test_a_study_checks_the_prompts_that_its_runs_use(tmp_path, monkeypatch, begun):
    """A chat template that writes the date has the date of the run."""
    checked = []
    two, (run, *_), _ = planned(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    own = {"data.train": "math:x", "model.tokenizer": str(tmp_path)}
    run = dataclasses.replace(run, config=config_io.override(run.config, own))
    if begun:
        dated = config_io.override(run.config, {"data.prompt_date": begun})
        open_run(run.folder, dated).__exit__(None, None, None)
    monkeypatch.setattr("bacr_jax.prompts.prompt_date.today", lambda: "2026-11-28")
    monkeypatch.setattr(initialize, "check_inputs", checked.append)
    monkeypatch.setattr("bacr_study.configured.check_evaluation", lambda *_: None)
    command_line.check_inputs(two, [run])
    assert [settings.task.data.prompt_date for settings in checked] == [begun or "2026-11-28"]


def written(folder, text, monkeypatch, drawn):
    """Returns the cells that a finished run writes for samples by set."""
    two, (run, *_), _ = planned(folder, "seeds=[0]", text=text)
    summary = {"departures": [], "steps": 1, "generated_tokens": 9, "wall_seconds": 1.0}
    run.folder.mkdir(parents=True)
    write_json(RunPaths(run.folder).summary, summary)
    monkeypatch.setattr(work, "read_samples", lambda out: drawn)
    monkeypatch.setattr(work, "votes_of", lambda out, graded, arm: {})
    work.write_cells(two, run, folder)
    assert run.has_cells(two)
    return {path.stem: read_cell(path) for path in (run.study_folder / "cells").iterdir()}


def test_a_cell_has_the_settings_that_it_was_evaluated_with(tmp_path, monkeypatch):
    setting = EvalSetting(GREEDY, 8, 1)
    drawn = {"ledger": {setting: [sample(i, 0, "4", mode=GREEDY) for i in range(4)]}}
    cells = written(tmp_path, STUDY, monkeypatch, drawn)
    vote = cells["plain.vote.0"].evaluation
    assert (vote.pop("votes"), vote.pop("accounting")) == (2, "per_sample")
    assert vote == cells["plain.grpo.0"].evaluation and vote["samples"] == 2


def test_a_set_without_hard_problems_is_skipped_and_another_is_kept(tmp_path, monkeypatch):
    setting = EvalSetting(GREEDY, 8, 1)
    drawn = {
        name: {setting: [sample(i, 0, "4", mode=GREEDY, level=level) for i in range(4)]}
        for name, level in (("easy", 0), ("mixed", 5))
    }
    cells = written(tmp_path, HARD, monkeypatch, drawn)
    assert set(cells["plain.grpo.0"].sets) == {"easy", "mixed", "mixed, levels 5"}


def test_a_cell_has_the_share_of_closed_answers(tmp_path, monkeypatch):
    samples = [sample(i, 0, "4", mode=GREEDY, finished=i > 0) for i in range(4)]
    drawn = {"ledger": {EvalSetting(GREEDY, 8, 1): samples}}
    entry = written(tmp_path, STUDY, monkeypatch, drawn)["plain.grpo.0"].sets["ledger"]
    assert entry["greedy"]["8"]["closed_rate"] == 0.75
    assert entry["greedy"]["8"]["no_answer_share"] == 0.0


def test_one_that_waits_for_the_run_of_another_ends_in_good_order_when_it_is_told_to(tmp_path):
    two, (_, run, *_), _ = planned(tmp_path)
    with lock_when_free(run.folder.with_name(f"{run.folder.name}.lock")):
        warn = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        warn.start()
        assert work.run_one(two, run) == EXIT_CODE
    warn.join()


def moved(folder, *overrides):
    """Begins a run, moves its study, and returns the study and the plans before and after."""
    two, (run, *_), place = planned(folder, "seeds=[0]", *overrides)
    open_run(run.folder, run.config).__exit__(None, None, None)
    place.parent.rename(folder / "moved")
    run_now, *_ = plan_runs(two, folder / "moved" / place.name)
    assert run_now.folder.is_dir() and run_now.warmup != run.warmup
    return two, run, run_now


def test_a_run_goes_on_after_the_studies_were_moved(tmp_path, monkeypatch):
    two, before, run = moved(tmp_path)
    resumed = []

    def resume(argv):
        config, resume, allowed = train.parse(argv)
        path = run_path(config.output)
        with open_run(path, config, resume=resume, allowed=allowed) as folder:
            folder.keep_config()
        resumed.append(path)
        return EXIT_CODE

    monkeypatch.setattr(train, "main", resume)
    assert work.run_one(two, run) == EXIT_CODE
    assert resumed == [run.folder]
    assert read_config(run.folder).warmup.dir == str(run.warmup)
    (change,) = read_lines(RunPaths(run.folder).changes)
    assert change["before"] == {"warmup.dir": str(before.warmup)}


@pytest.mark.parametrize("rank", [None, 4])
def test_adapters_find_their_base_after_the_studies_were_moved(tmp_path, monkeypatch, rank):
    keys = [] if rank is None else [f"adapter.rank={rank}"]
    two, before, run = moved(tmp_path, *keys)
    RunPaths(run.folder).summary.write_text("{}")
    bases = []

    def evaluated(argv):
        bases.append(read_config(run.folder).warmup.dir)
        return 1

    monkeypatch.setattr(train, "main", lambda argv: pytest.fail("trained"))
    monkeypatch.setattr(evaluate, "main", evaluated)
    for _ in range(2):
        assert work.run_one(two, run) == 1
    # Without adapters the config stays, because it is part of a begun evaluation.
    assert bases == [str((before if rank is None else run).warmup)] * 2
    assert len(read_lines(RunPaths(run.folder).changes)) == (rank is not None)


def test_cells_of_other_settings_are_not_reported_as_the_study_s(tmp_path, capsys):
    two, runs, folder = planned(tmp_path, "arms=[grpo]", "seeds=[0]")
    finished(two, runs[0], runs[0].variant)
    here = study(tmp_path, "--report", "arms=[grpo]", "seeds=[0]")
    assert main([*here, "train.steps=3"]) == 2
    assert (
        "plain.grpo.0.json: the results of this run were made with other settings"
        in capsys.readouterr().err
    )
    assert not (folder / "results.json").exists()
    # Those that are its own are reported, whichever of them there are.
    assert main(study(tmp_path, "--report", "arms=[grpo]")) == 0
    results = json.loads((folder / "results.json").read_text())
    assert list(results["cells"]) == ["plain.grpo.0"] and results["missing"] == ["plain.grpo.1"]


def test_a_study_whose_runs_all_failed_has_nothing_to_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "run_missing", lambda *arguments: 1)
    assert main(study(tmp_path)) == 1
    assert capsys.readouterr() == ("", "")


def test_seconds_of_a_step_count_what_passed_beside_others_once(tmp_path):
    paces = {"time/tokens_per_s": 50.0, "time/overlap": 2.0}
    record = {"step": 1, "rollout/tokens_total": 9, "reward/mean": 0.5, **paces}
    append_line(RunPaths(tmp_path).metrics, {**record, "time/rollout": 3.0, "time/update": 1.5})
    assert [point["seconds"] for point in curve(RunPaths(tmp_path))] == [4.5]


def test_a_curve_shows_how_healthy_the_policy_was(tmp_path):
    record = {"step": 1, "rollout/tokens_total": 9, "reward/mean": 0.5, "time/rollout": 1.0}
    health = {"rollout/closed_answers": 0.75, "rollout/forced_share": 0.5, "policy/entropy": 0.125}
    append_line(RunPaths(tmp_path).metrics, {**record, **health})
    append_line(RunPaths(tmp_path).metrics, {**record, "step": 2})
    first, second = curve(RunPaths(tmp_path))
    names = ("closed_answers", "forced_share", "entropy")
    assert [first[name] for name in names] == [0.75, 0.5, 0.125]
    assert not set(names) & set(second)


def command(folder):
    return [sys.executable, "-m", "bacr_jax", "study", *study(folder, "--jobs", "2", "seeds=[0]")]


def cells(folder):
    """Cells by name, without what depends on the machine's mood."""
    found = {}
    for path in sorted((folder / "studies" / "two-cpu" / "cells").glob("*.json")):
        record = json.loads(path.read_text())
        for name in OF_THE_MACHINE:
            record.pop(name, None)
        for point in record["curve"]:
            point.pop("seconds")
        found[path.name] = record
    return found


@pytest.mark.slow
def test_a_study_killed_at_any_moment_goes_on_and_ends_the_same(tmp_path):
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    began = time.monotonic()
    subprocess.run(command(tmp_path / "calm"), check=True)
    whole = time.monotonic() - began
    for share, number in ((0.4, signal.SIGTERM), (0.5, signal.SIGKILL)):
        process = subprocess.Popen(command(tmp_path / "killed"), start_new_session=True)
        time.sleep(share * whole)
        process.send_signal(number)
        code = process.wait(60)
        assert code in (0, EXIT_CODE, -number)
        # Its runs are asked to leave when it is gone, and take a moment to save.
        end = time.monotonic() + 60
        while (
            subprocess.run(["pgrep", "-f", str(tmp_path / "killed")], check=False).returncode == 0
        ):
            assert time.monotonic() < end
            time.sleep(0.5)
    subprocess.run(command(tmp_path / "killed"), check=True)
    assert cells(tmp_path / "killed") == cells(tmp_path / "calm")
    assert set(cells(tmp_path / "calm")) == {
        "plain.grpo.0.json",
        "plain.vote.0.json",
        "plain.bacr.0.json",
    }
