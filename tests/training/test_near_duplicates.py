"""Tests that a run reports accuracy with and without near-duplicates of training questions."""

import dataclasses
import json

import numpy as np
import pytest

from bacr_jax.runs.folder import open_run
from bacr_jax.training.loop import Trainer
from small_config import small_config

CHANGES = """
data: {ledger: {train_size: 20}, num_groups: 1}
eval: {size: 6}
"""


@pytest.mark.slow
def test_training_reports_both_figures(tmp_path, capsys):
    run = tmp_path / "run"
    settings = small_config(tmp_path, CHANGES, f"output.dir={run}")
    with open_run(run, settings) as folder:
        trainer = Trainer(settings, folder)
        held_out = trainer.task_data.eval["ledger"]
        # Mark every second problem, so that the subset of 6 problems contains both kinds.
        marks = np.arange(len(held_out)) % 2 == 0
        marked = dataclasses.replace(held_out.set, duplicates=marks, compared_with="train")
        trainer.task_data.eval["ledger"] = dataclasses.replace(held_out, set=marked)
        state, step = trainer.start()
        trainer.evaluate(state, step, "before")
        trainer.evaluate(state, step, "after")
        # Set the accuracy before training to 1, so that the run reports a decline.
        for entry in trainer.evaluations.endpoints["before"]["ledger"]["greedy"].values():
            entry["accuracy"] = 1.0
        summary = trainer.finish(state, step)
    record = json.loads((run / "eval.jsonl").read_text().splitlines()[0])
    count = record["near_duplicates"]["ledger"]["count"]
    entry = record["sets"]["ledger"]["greedy"]["8"]
    assert 0 < count < 6
    assert entry["without_near_duplicates"]["problems"] == 6 - count
    title = f"Ledger without {count} near-duplicates of training questions ({6 - count} problems)"
    printed = capsys.readouterr().out
    output = " ".join(printed.split())
    assert title in output
    assert title in (run / "report.html").read_text()
    assert [one["budget"] for one in summary["declines"]["ledger"]] == ["8"]
    # The last line of a run that ended worse is a warning, after the suggested commands.
    *_, last_line = [line for line in printed.splitlines() if line.startswith("WARNING")]
    warning = output.rindex("WARNING, worse than before training on Ledger")
    assert warning > output.rindex("bacr report --run") > output.rindex(title)
    assert output.endswith("Set a lower optimizer.learning_rate")
    assert last_line.startswith("WARNING, worse than before training on Ledger")
    saved = json.loads((run / "summary.json").read_bytes())["sets"]["after"]["ledger"]
    assert saved["greedy"]["8"]["without_near_duplicates"]["problems"] == 6 - count
