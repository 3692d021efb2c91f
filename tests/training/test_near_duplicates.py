"""A run reports accuracy with and without the problems that training came near to."""

import dataclasses
import json

import numpy as np
import pytest

from bacr_jax.config import io as config_io
from bacr_jax.runs.folder import open_run
from bacr_jax.training.loop import Trainer

SMALL = """
model: {compute_dtype: float32, hidden_size: 16, intermediate_size: 32, num_layers: 1,
        scan_layers: false, remat: none}
data: {ledger: {train_size: 20}, num_groups: 1}
budget: {min: 4, max: 8}
curriculum: {mu0: 8, sigma: 4}
rollout: {questions: 4, group_size: 2, answer_tokens: 2, chunk: 4}
value: {hidden_size: 8, inner_steps: 1}
train: {steps: 1, minibatches: 1}
eval: {budgets: [8], size: 6, samples: 0}
output: {tensorboard: false}
"""


@pytest.mark.slow
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
        trainer.finish(state, step)
    record = json.loads((run / "eval.jsonl").read_text().splitlines()[0])
    count = record["near_duplicates"]["ledger"]["count"]
    entry = record["sets"]["ledger"]["greedy"]["8"]
    assert 0 < count < 6
    assert entry["without_near_duplicates"]["problems"] == 6 - count
    title = f"Ledger without {count} near-duplicates of training questions ({6 - count} problems)"
    assert title in " ".join(capsys.readouterr().out.split())
    assert title in (run / "report.html").read_text()
    saved = json.loads((run / "summary.json").read_bytes())["sets"]["after"]["ledger"]
    assert saved["greedy"]["8"]["without_near_duplicates"]["problems"] == 6 - count
