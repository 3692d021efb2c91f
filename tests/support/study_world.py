"""Creates a study file of three arms, its planned runs, and cells, without training.

Two arms are trained: `grpo` and `bacr`. The arm `vote` is a majority vote over samples of `grpo`.
"""

import dataclasses

from bacr_study.cells import write_cell
from bacr_study.plan import folder_of, plan_runs
from bacr_study.study_file import read_study
from cells_world import make_cell

BASE = """
data: {train: ledger, eval: [ledger], ledger: {train_size: 64}}
warmup: {steps: 10, target_accuracy: 0.0, short_accuracy: 0.0, hold_accuracy: 0.0}
budget: {min: 8, max: 64}
curriculum: {mu0: 32, sigma: 16}
rollout: {questions: 4, group_size: 2, answer_tokens: 3, windows: 1, refill: 1.0}
model: {compute_dtype: float32, hidden_size: 16, intermediate_size: 32, num_layers: 1,
        scan_layers: false, remat: none}
train: {minibatches: 1}
eval: {budgets: [8, 64], size: 10, samples: 0}
output: {tensorboard: false, report: false}
"""
STUDY = """
title: Two arms
reference: [grpo]
arms:
  grpo: {label: GRPO, set: {method: grpo, cuts.count: 1, conditioning.budget_input: none}}
  vote: {label: a vote, of: grpo, votes: 2}
  bacr: {label: BACR, set: {loss.entropy_coef: 0.0}}
sizes:
  cpu:
    seeds: [0, 1]
    tokens_per_second: 100
    set: {train.max_generated_tokens: 1000, optimizer.learning_rate: 1.0e-4}
    evaluation: {samples: 2, size: 10}
    tasks:
      plain: {label: plain, config: [base.yaml], budgets: [8, 64]}
  wide:
    seeds: [0]
    tasks:
      plain: {label: plain, config: [base.yaml], budgets: [8]}
      wide: {label: wide, config: [base.yaml], set: {model.hidden_size: 24}, budgets: [8]}
"""


def write_study(folder, text=STUDY, base=BASE):
    """Writes a study file and the base config of its tasks, and returns the study's path."""
    (folder / "base.yaml").write_text(base)
    (folder / "two.yaml").write_text(text)
    return folder / "two.yaml"


def planned(folder, *overrides, text=STUDY, size=None):
    """Writes and reads a study file, and plans its runs.

    Args:
      folder: folder for the study file and for the study's results.
      overrides: overrides of the study file.
      text: content of the study file.
      size: key of `sizes` in the study file. None for the first one.

    Returns:
      The study, its planned runs, and the folder of its results.
    """
    study = read_study(write_study(folder, text), size=size, overrides=overrides)
    place = folder_of(study, folder / "studies")
    return study, plan_runs(study, place), place


def finished(study, run, variant, **changes):
    """Writes the cell that a finished run would write.

    Args:
      variant: variant of the cell, either the run's or a vote over its samples.
      changes: fields of `Cell` with other values.
    """
    cell = make_cell(study, run.task, variant, run.seed, problems=10, samples=2, steps=1)
    sets = {m: {b: of[b] for b in ("8", "64")} for m, of in cell.sets["test"].items()}
    changes = {"config_sha": run.digest, "sets": {"test": sets}, **changes}
    write_cell(run.study_folder, dataclasses.replace(cell, **changes))
