"""From a study to its runs: who they are, where they lie, what they will cost."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bacr_jax import train
from bacr_jax.config import Config, derived
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths, WarmupPaths
from bacr_study.spec import Study, Variant, cell_id, cell_path

_NOT_IN_STUDIES = {
    "grader": "a study counts right answers, which a score between 0 and 1 is not",
    "warmup.dir": "a study keeps its warm-ups in --out, where its runs share them",
}


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study, and the cell it fills.

    Attributes:
      place: the study's folder, with `cells/`, `logs/` and `configs/`; what studies share, `runs/`,
        `warmups/` and `compiled/`, lies beside it.
      config: resolved, with folder and warm-up.
    """

    place: Path
    task: str
    variant: Variant
    seed: int
    config: Config

    @property
    def id(self) -> str:
        """That of the cell."""
        return cell_id(self.task, self.variant, self.seed)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.dir)

    @property
    def digest(self) -> str:
        """That of the settings, with which the name of the folder ends."""
        return self.folder.name.rpartition("-")[2]

    @property
    def warmup(self) -> Path | None:
        """The folder of the shared warm-up; None: the run starts from a checkpoint on disk."""
        return Path(self.config.warmup.dir) if self.config.warmup.dir else None

    @property
    def warmed_up(self) -> bool:
        """Whether the weights that it starts from are there."""
        return self.warmup is None or WarmupPaths(self.warmup).identity.exists()

    @property
    def trained(self) -> bool:
        """Whether the run is finished."""
        return RunPaths(self.folder).summary.exists()

    @property
    def tokens(self) -> int | None:
        """Generated tokens after which training stops; None: a number of steps decides."""
        if self.config.train.steps == 0:
            return 0
        return self.config.train.max_generated_tokens

    @property
    def log(self) -> Path:
        """The output of its process."""
        return self.place / "logs" / f"{self.id}.log"

    def has_cells(self, study: Study) -> bool:
        """Whether its cell is there, and those of the votes over its samples.

        UserError: a cell of that name is there, made or evaluated with other settings.
        """
        # Imports JAX, which a listing does not need.
        from bacr_study.cells import evaluated, read_cell

        variants = (self.variant, *study.votes_over(self.variant))
        paths = [cell_path(self.place, cell_id(self.task, v, self.seed)) for v in variants]
        there = [path for path in paths if path.exists()]
        now = {"digest": self.digest, **study.asked(self.task, self.variant.arm)}
        for path in there:
            cell = read_cell(path)
            found = {"digest": cell.config_sha, **evaluated(cell, now)}
            if differing := [key for key in found if found[key] != now.get(key)]:
                said = (f"{key} {found[key]} there, {now.get(key)} now" for key in differing)
                raise UserError(
                    f"{path}: was made with other settings than the study has now "
                    f"({', '.join(said)}); move it away, and the run is made again"
                )
        return there == paths


def folder_of(study: Study, root: Path) -> Path:
    """The folder of a study and size, below that of all studies."""
    return root / f"{study.name}-{study.size}"


def _placed(config: Config, root: Path, seed: int) -> Config:
    """The config with its seed, its warm-up, and the folder that runs of equal settings share."""
    from bacr_jax.training.warmup_folder import warmup_fingerprint

    config = dataclasses.replace(config, seed=seed)
    name = f"{Path(config.method).stem}-{seed}-{settings_digest(config)}"
    output = dataclasses.replace(config.output, dir=str(root / "runs" / name))
    warmup = config.warmup
    if warmup.steps:
        # Settings of the warm-up are in its name, so that equal ones are one.
        warmup_seed = derived.warmup_config(config).seed
        folder = root / "warmups" / f"{warmup_seed}-{warmup_fingerprint(config)}"
        warmup = dataclasses.replace(warmup, dir=str(folder))
    return dataclasses.replace(config, output=output, warmup=warmup)


def settings_digest(config: Config) -> str:
    """A short hash of what a config says other than the defaults.

    A key that a later version adds leaves the runs that are there what they were. So do the folder,
    and what only shows the run.
    """
    usual = config_io.identity(Config())
    said = {**config_io.identity(config), "output.dir": ".", "output.report": True}
    own = {key: v for key, v in {**said, "warmup.dir": None}.items() if v != usual[key]}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]


def plan_runs(study: Study, folder: Path) -> list[PlannedRun]:
    """Every run of a study, seeds outermost: what is there early covers all arms."""
    trained = [arm for arm in study.arms if arm.of is None]
    configs = {}
    for task, arm in itertools.product(study.tasks, trained):
        sweep = study.sweep_of(arm)
        for variant in study.variants_of(arm):
            try:
                varied = sweep.settings[variant.value] if sweep else {}
                config = study.config_of(task.id, arm.id, varied)
                train.check(config)
                for key, why in _NOT_IN_STUDIES.items():
                    if (value := config_io.flatten(config)[key]) is not None:
                        raise UserError(f"{key}={value}: {why}; write null")
            except UserError as error:
                raise UserError(f"{task.id}, {variant.key}: {error}") from None
            configs[task.id, variant] = config
    return [
        PlannedRun(folder, task, variant, seed, _placed(config, folder.parent, seed))
        for seed in study.seeds
        for (task, variant), config in configs.items()
    ]


def find_run(runs: Sequence[PlannedRun], text: str) -> PlannedRun:
    """The run that a number of --list or an id names; UserError: none does."""
    by_id = {run.id: run for run in runs}
    if text in by_id:
        return by_id[text]
    if text.isascii() and text.isdecimal() and int(text) < len(runs):
        return runs[int(text)]
    raise UserError(f"--only {text}: names no run; write 0 to {len(runs) - 1} or an id of --list")
