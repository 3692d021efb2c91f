"""What a study says: read from its cells."""

from collections.abc import Sequence
from pathlib import Path

from bacr_jax.study.plan import PlannedRun, StudyPaths
from bacr_jax.study.spec import Study


def write_report(study: Study, runs: Sequence[PlannedRun], paths: StudyPaths) -> list[Path]:
    """Writes results, tables, figures and study.html from the cells that are there."""
    return []
