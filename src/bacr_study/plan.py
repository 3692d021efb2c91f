"""Expands a study into its runs, with their ids, configs, folders and token counts.

This module does not run anything. `schedule` runs several planned runs in parallel, and `work`
performs a single run.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths, WarmupPaths
from bacr_jax.training import checks
from bacr_study.spec import (
    TRUNCATIONS,
    Arm,
    Evaluation,
    Study,
    Task,
    Variant,
    cell_id,
    cell_path,
)

if TYPE_CHECKING:
    # The module imports JAX, which `--list` does not need.
    from bacr_study.cells import Cell

# Config keys that must not be set in a study, with their only value, the reason, and a way to get
# what the key is for, or "".
_NOT_IN_STUDIES = {
    "grader": (
        None,
        "a study counts correct answers, but a custom grader can give scores between 0 and 1",
        ", and add your own rewards to the built-in rules by reward.weights, or train with the "
        "grader by `bacr train` and compare the runs of each seed by `bacr evaluate --compare`",
    ),
    "warmup.dir": (
        None,
        "a study stores its warm-ups in the folder of --out, where its runs share them",
        "",
    ),
    "output.log_every": (1, "a study's training curves need the metrics of every step", ""),
}


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study: one task, one method with its settings, and one seed.

    Attributes:
      study_folder: the study's folder, which contains `cells/`, `logs/` and `configs/`. All studies
        share the folders `runs/`, `warmups/` and `compiled/` next to it.
      task: id of the task.
      variant: an arm (a method with its settings), at one of its swept values.
      seed: the seed.
      config: the resolved config, including the run folder and the warm-up folder.
    """

    study_folder: Path
    task: str
    variant: Variant
    seed: int
    config: Config

    @property
    def id(self) -> str:
        """Returns the run's id, which is also the name of the file with its results."""
        return cell_id(self.task, self.variant, self.seed)

    @property
    def folder(self) -> Path:
        """Returns the run folder."""
        return Path(self.config.output.dir)

    @property
    def digest(self) -> str:
        """Returns the digest of the run's settings, the last part of the run folder's name."""
        return self.folder.name.rpartition("-")[2]

    @property
    def warmup(self) -> Path | None:
        """Returns the folder of the shared warm-up; None if the config has no warm-up folder."""
        if not self.config.warmup.dir:
            return None
        return Path(self.config.warmup.dir)

    @property
    def warmed_up(self) -> bool:
        """True if the run needs no warm-up from this study, or if its warm-up is finished."""
        return self.warmup is None or WarmupPaths(self.warmup).identity.exists()

    @property
    def trained(self) -> bool:
        """True if the run's training is finished."""
        return RunPaths(self.folder).summary.exists()

    @property
    def tokens(self) -> int | None:
        """Returns the number of generated tokens at which training stops.

        0 for an untrained policy. None if only the number of steps is limited.
        """
        if self.config.train.steps == 0:
            return 0
        return self.config.train.max_generated_tokens

    @property
    def log(self) -> Path:
        """Returns the path of the file to which the run's process writes stdout and stderr."""
        return self.study_folder / "logs" / f"{self.id}.log"

    def asked(self, study: Study, variant: Variant) -> dict[str, Any]:
        """Returns the evaluation settings of the run, or of a majority vote over its samples.

        They are stored with the results. `Study.asked` lists them; evaluations at truncation points
        that this run does not get are left out.

        Args:
          study: the study.
          variant: the run's variant, or the variant of a vote over its samples.
        """
        settings = study.asked(self.task, variant.arm)
        applicable = self._truncations(study, variant)
        for key in TRUNCATIONS:
            if key not in applicable:
                settings.pop(key, None)
        return settings

    def _truncations(self, study: Study, variant: Variant) -> list[str]:
        """Returns the keys of `TRUNCATIONS` that apply to the results of a variant."""
        # A vote is only evaluated at the budgets.
        if variant != self.variant:
            return []
        keys = []
        is_before = variant.arm == study.before
        if is_before:
            keys.append("cut_every")
        # `steps` is 0 if the run is not trained, and None if the number of epochs determines the
        # number of steps.
        is_trained = self.config.train.steps != 0
        has_dense_curve = is_before and study.evaluation.cut_every is not None
        if is_trained and not has_dense_curve and self._receives_budget:
            keys.append("swap")
        return keys

    @functools.cached_property
    def _receives_budget(self) -> bool:
        """True if the policy receives its budget as an embedding or in the prompt."""
        # Imported here because these modules import JAX, which `--help` does not need.
        from bacr_jax.evaluation.job_checks import receives_budget
        from bacr_jax.methods.registry import make_method

        method = make_method(resolve(self.config).method)
        return receives_budget(self.config.conditioning, method)

    def has_cells(self, study: Study) -> bool:
        """True if the results of the run, and of all majority votes over its samples, are stored.

        Raises:
          UserError: if one of these cells was trained or evaluated with different settings.
        """
        # Imported here because the module imports JAX, which `--list` does not need.
        from bacr_study.cells import read_cell

        are_stored = True
        for variant in (self.variant, *study.vote_numbers(self.variant)):
            path = cell_path(self.study_folder, cell_id(self.task, variant, self.seed))
            if not path.exists():
                are_stored = False
                continue
            differences = self._differences(study, variant, read_cell(path))
            if differences:
                raise UserError(
                    f"{path}: the results of this run were made with other settings than the "
                    f"study has now ({', '.join(differences)}); move the study's folder away to "
                    "run it again"
                )
        return are_stored

    def _differences(self, study: Study, variant: Variant, cell: "Cell") -> list[str]:
        """Lists the settings of stored results that differ from the settings of the study.

        Settings that the results do not contain are not compared, because results of earlier
        versions contain fewer settings. Evaluations at truncation points are the exception: if a
        cell does not contain them, it was not evaluated at truncation points.

        Args:
          study: the study.
          variant: the run's variant, or the variant of a vote over its samples.
          cell: the stored results of the variant.
        """
        from bacr_study.cells import evaluated

        asked = self.asked(study, variant)
        unused = {key: getattr(Evaluation(), key) for key in self._truncations(study, variant)}
        wanted = {"digest": self.digest, **unused, **asked}
        stored = {"digest": cell.config_sha, **unused}
        for key, value in evaluated(cell, asked).items():
            if key in unused or key not in TRUNCATIONS:
                stored[key] = value
        return [
            f"{key}: {value} then, {wanted.get(key)} now"
            for key, value in stored.items()
            if value != wanted.get(key)
        ]


def folder_of(study: Study, root: Path) -> Path:
    """Returns the folder of a study, whose name contains the study's name and size.

    Args:
      study: the study.
      root: the folder of all studies.
    """
    return root / f"{study.name}-{study.size}"


def settings_digest(config: Config) -> str:
    """Returns a short hash of the settings in a config that differ from the defaults.

    Default values are not hashed, so that adding a config key in a later version does not change
    the digests of existing runs. Folders, and keys that only affect how a run is displayed, are not
    hashed either.
    """
    defaults = config_io.flatten(Config())
    settings = config_io.identity(config_io.flatten(config))
    settings["output.dir"] = "."
    settings["output.report"] = True
    settings["warmup.dir"] = None
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    text = json.dumps(changed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def plan_runs(study: Study, folder: Path) -> list[PlannedRun]:
    """Returns all runs of a study.

    The seed is the outermost loop, so that early results cover all methods.

    Args:
      study: the study.
      folder: the study's folder.

    Raises:
      UserError: if a run's config is invalid. The message names the task and the variant.
    """
    arms_with_runs = [arm for arm in study.arms if arm.of is None]
    configs: dict[tuple[str, Variant], Config] = {}
    for task, arm in itertools.product(study.tasks, arms_with_runs):
        for variant in study.variants_of(arm):
            try:
                configs[task.id, variant] = _checked_config(study, task, arm, variant)
            except UserError as error:
                raise UserError(f"{task.id}, {variant.key}: {error}") from None
    runs = []
    for seed in study.seeds:
        for (task_id, variant), config in configs.items():
            config_of_seed = _with_folders(config, folder.parent, seed)
            runs.append(PlannedRun(folder, task_id, variant, seed, config_of_seed))
    return runs


def _checked_config(study: Study, task: Task, arm: Arm, variant: Variant) -> Config:
    """Builds and checks the config of a run, without seed and folders."""
    sweep = study.sweep_of(arm)
    varied = sweep.settings[variant.value] if sweep else {}
    config = study.config_of(task.id, arm.id, varied)
    checks.check(config)
    flat = config_io.flatten(config)
    for key, (value, reason, alternative) in _NOT_IN_STUDIES.items():
        if flat[key] != value:
            raise UserError(
                f"{key}={flat[key]}: this key can't be set in a study, because {reason}; set it "
                f"to {config_io.value_text(value)}{alternative}"
            )
    return config


def _with_folders(config: Config, root: Path, seed: int) -> Config:
    """Returns the config with its seed, warm-up folder and run folder filled in.

    The name of the run folder contains the digest of the settings, so runs with identical settings
    share a folder.

    Args:
      config: the config without seed and folders.
      root: the folder of all studies.
      seed: the seed.
    """
    from bacr_jax.training.warmup_folder import warmup_fingerprint

    config = dataclasses.replace(config, seed=seed)
    method = Path(config.method).stem
    run_name = f"{method}-{seed}-{settings_digest(config)}"
    output = dataclasses.replace(config.output, dir=str(root / "runs" / run_name))
    warmup = config.warmup
    if warmup.steps:
        # The name contains a fingerprint of the warm-up's settings, so runs with identical warm-up
        # settings share the folder.
        warmup_seed = resolve(config).warmup.seed
        warmup_name = f"{warmup_seed}-{warmup_fingerprint(config)}"
        warmup = dataclasses.replace(warmup, dir=str(root / "warmups" / warmup_name))
    return dataclasses.replace(config, output=output, warmup=warmup)


def find_run(runs: Sequence[PlannedRun], text: str) -> PlannedRun:
    """Returns the run with a given number or id, as printed by `--list`.

    Raises:
      UserError: if no run has this number or id.
    """
    by_id = {run.id: run for run in runs}
    if text in by_id:
        return by_id[text]
    is_number = text.isascii() and text.isdecimal()
    if is_number and int(text) < len(runs):
        return runs[int(text)]
    raise UserError(
        f"--only {text}: no run of the study has this number or id; use a number from 0 to "
        f"{len(runs) - 1}, or an id that --list prints"
    )
