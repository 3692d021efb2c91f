"""Checks a config, its data and its model before a device is used.

`train.main` and `train.run` call these functions before they open the run folder. `bacr plan`,
`bacr doctor` and studies call `check` alone. Nothing here trains or writes to the run folder.
"""

import contextlib
import dataclasses
import difflib
from collections.abc import Sequence

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import uninterrupted
from bacr_jax.errors import UserError, faults_of
from bacr_jax.runs import folder as run_folder
from bacr_jax.runs.folder import Resume, check_run_folder, run_path


def check(config: Config, allowed: Sequence[str] = ()) -> None:
    """Validates the values of a config and their combinations without using any device.

    Args:
      config: config to validate.
      allowed: keys passed with --allow-change, which must be keys of the config.

    Raises:
      UserError: if the config or a key is invalid. The error lists all problems of the config.
    """
    # Imported here because the method registry imports JAX.
    with uninterrupted():
        from bacr_jax.methods.registry import problems

    config_io.check(config, also=problems)
    for key in allowed:
        if key not in config_io.flatten(config):
            near = difflib.get_close_matches(key, config_io.flatten(config), n=1, cutoff=0.0)
            raise UserError(f"--allow-change {key} is not a key of a config; use {near[0]}")


def with_local_model(config: Config, *, download: bool) -> Config:
    """Replaces the name of a Hugging Face hub model in `model.path` by a local folder.

    Args:
      config: config whose `model.path` is a folder, a name on the hub, or None.
      download: True to download the model if it is not in the hub's cache.

    Returns:
      A config whose `model.path` is a local folder, or None if it was None.
    """
    if config.model.path is None:
        return config
    from bacr_jax.model.hf.hub import local_folder

    path = local_folder(config.model.path, download=download, where="model.path")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))


def begun_config(config: Config) -> Config | None:
    """Returns the config of an existing run in `output.dir`, or None if it can't be read."""
    # An unreadable config is reported later, when the run folder is opened.
    with contextlib.suppress(UserError, OSError, ValueError):
        return run_folder.read_config_file(run_folder.RunPaths(run_path(config)).config)
    return None


def with_prompt_date(config: Config) -> Config:
    """Sets the date that the chat template writes into prompts.

    A new run uses today's date, and a resumed run uses the date that it recorded. The config is
    returned unchanged if its chat template writes no date.
    """
    from bacr_jax.prompts import prompt_date

    begun = begun_config(config)
    data = prompt_date.with_prompt_date(
        config.data,
        config.model.tokenizer or config.model.path,
        None if begun is None else begun.data,
    )
    return dataclasses.replace(config, data=data)


def with_available_sets(config: Config) -> Config:
    """Removes missing evaluation sets from the config if `data.eval_missing` is `skip`.

    Prints one line for every removed set.
    """
    from bacr_jax.questions.missing import without_missing

    begun = begun_config(config)
    data, lines = without_missing(
        config.data, config.eval, None if begun is None else begun.data, run_path(config)
    )
    for line in lines:
        print(line, flush=True)
    return dataclasses.replace(config, data=data)


def check_inputs(
    config: Config, resume: Resume, allowed: Sequence[str], *, download: bool
) -> list[str]:
    """Runs all checks that training performs before it uses a device.

    Args:
      config: config to check.
      resume: what to do with an existing run in `output.dir` (see `run`).
      allowed: keys whose values may differ from the existing run.
      download: True to download the model if it is not in the hub's cache.

    Returns:
      Lines to print: the scores that the verifiers assign to the reference answers, the data sets,
      the settings that differ from the method's publication, and a summary of the run.

    Raises:
      UserError: if at least one check failed. The error lists all failures.
    """
    from bacr_jax.runs.metrics import check_wandb
    from bacr_jax.training.warmup_folder import check_warmup

    inputs = _Inputs(config, download=download)
    path = run_path(config)
    faults = faults_of(
        inputs.resolve_model,
        inputs.resolve_sets,
        inputs.resolve_prompt_date,
        lambda: check_run_folder(path, inputs.config, resume=resume, allowed=allowed),
        lambda: check_wandb(config),
        lambda: check_warmup(inputs.config, run_folder.RunPaths(path)),
        inputs.read,
    )
    if faults:
        raise UserError(*faults)
    return inputs.lines


class _Inputs:
    """The inputs of a run, which `check_inputs` checks one after another.

    A check that fails leaves the config unchanged, so that the next checks still run.

    Attributes:
      config: config with the results of the checks so far.
      lines: lines to print about valid inputs.
    """

    def __init__(self, config: Config, *, download: bool):
        self.config = config
        self.lines: list[str] = []
        self._download = download
        # `model.path` and names of sets that are missing. They are reported once.
        self._reported: set[str] = set()

    def resolve_model(self) -> None:
        """Replaces a model's name by its folder. Raises UserError if the model is missing."""
        self._reported.add("model.path")
        self.config = with_local_model(self.config, download=self._download)
        self._reported.remove("model.path")

    def resolve_sets(self) -> None:
        """Removes sets that may be missing. Raises UserError if a needed set is missing."""
        from bacr_jax.questions.missing import missing_together

        line, missing = missing_together(self.config.data)
        if line:
            self._reported.update(missing)
            raise UserError(line)
        self.config = with_available_sets(self.config)

    def resolve_prompt_date(self) -> None:
        """Sets the date in the prompts, which depends on the model's chat template."""
        if "model.path" not in self._reported:
            self.config = with_prompt_date(self.config)

    def read(self) -> None:
        """Reads all inputs that are not reported as missing. Raises UserError if any is invalid."""
        from bacr_jax.parallel import processes
        from bacr_jax.training import initialize, run_summary

        processes.check_platform()
        if self._reported:
            faults = initialize.faults_of_inputs(self.config, frozenset(self._reported))
            if faults:
                raise UserError(*faults)
            return
        method, environment, verifier_lines = initialize.check_inputs(self.config)
        path = run_path(self.config)
        described = run_summary.check_lines(self.config, path, method, environment)
        self.lines = [*verifier_lines, *described]
