"""Sizes of the shipped studies that no CPU runs: every arm fits the GPUs that it is meant for."""

import dataclasses
from pathlib import Path

import pytest

from bacr_jax.runs.setup import decoding_mesh
from bacr_plan import memory, search
from bacr_plan.devices import GIB, MEMORY_FRACTION
from bacr_plan.search import MemoryLimit
from bacr_plan.workload import sizes_of
from bacr_study.plan import folder_of, plan_runs
from bacr_study.study_file import read_study

STUDIES = Path(__file__).parents[2] / "configs" / "studies"
TRAINED = ("main", "hard", "ablation", "scale", "told", "sensitivity")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(("size", "devices"), [("gpu", 1), ("7b", 8)])
def test_every_arm_fits_80_gib(tmp_path, name, size, devices):
    study = read_study(STUDIES / f"{name}.yaml", size=size, overrides=["seeds=[0]"])
    assert study.devices_per_run == devices
    peaks = {}
    for run in plan_runs(study, folder_of(study, tmp_path)):
        work, layout = sizes_of(run.config, devices)
        # The evaluation of the finished run has no train state beside it.
        alone = decoding_mesh(run.config.mesh, work.model, devices)
        graded = dataclasses.replace(work.evaluation, slots=study.evaluation.slots)
        phase = memory.rollout_phase(graded, alone)
        peaks[run.id, "training"] = (
            search.peak_of(work, layout, MemoryLimit(80 * MEMORY_FRACTION * GIB)) / GIB
        )
        peaks[run.id, "evaluation"] = (phase.own + phase.temporaries) / GIB
    too_much = {what: peak for what, peak in peaks.items() if peak > 80 * MEMORY_FRACTION}
    assert peaks and not too_much
