"""Checks a config, its data and its model before a device is used.

`train.main` and `train.run` call these functions before they open the run folder. `bacr plan` and
`bacr doctor` only call `check`, and studies also call `completed`. This module does not train or
write to the run folder.
"""

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Sequence

from bacr_jax.config import Config, DataConfig, ModelConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import uninterrupted
from bacr_jax.config.settings import resolve
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
            raise UserError(f"--allow-change {key}: {key} is not a config key; use {near[0]}")


def with_local_model(model: ModelConfig, *, download: bool) -> ModelConfig:
    """Replaces the name of a Hugging Face hub model in `model.path` by a local folder.

    Args:
      model: settings whose `path` is a folder, a name on the hub, or None.
      download: True to download the model if it is not in the hub's cache.

    Returns:
      Settings whose `path` is a local folder, or None if it was None.
    """
    if model.path is None:
        return model
    from bacr_jax.model.hf.hub import local_folder

    path = local_folder(model.path, download=download, where="model.path")
    return dataclasses.replace(model, path=path)


def completed(config: Config, *, download: bool) -> Config:
    """Resolves the config values that depend on files: model, evaluation sets and prompt date.

    The model's hub name is replaced by a local folder, missing evaluation sets may be removed, and
    the date in the prompts is set.

    Args:
      config: config that `check` accepts.
      download: True to download the model if it is not in the hub's cache.

    Raises:
      UserError: the model or a set is missing.
    """
    inputs = _Inputs(config, download)
    inputs.resolve_model()
    inputs.resolve_sets()
    inputs.resolve_prompt_date()
    return inputs.config


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
    from bacr_jax.training.warmup_folder import check_warmup, warmup_fingerprint

    inputs = _Inputs(config, download)
    path = run_path(config.output)
    faults = faults_of(
        inputs.resolve_model,
        inputs.check_sets,
        inputs.resolve_prompt_date,
        lambda: check_run_folder(
            path, config_io.flatten(inputs.config), resume=resume, allowed=allowed
        ),
        lambda: check_wandb(config.output),
        lambda: check_warmup(
            config.warmup, warmup_fingerprint(inputs.config), run_folder.RunPaths(path)
        ),
        inputs.read,
    )
    if faults:
        # Two checks report the same line about a shared warm-up with other settings.
        raise UserError(*dict.fromkeys(faults))
    return inputs.lines


@dataclasses.dataclass
class _Inputs:
    """The inputs of a run, which `completed` resolves and `check_inputs` checks one after another.

    A step that fails leaves the config unchanged, so that the next checks still run.

    Attributes:
      config: config with the results of the checks so far.
      download: True to download the model if it is not in the hub's cache.
      lines: lines to print about valid inputs.
      reported: missing inputs (`model.path` or names of data sets) that are already reported.
        Later checks do not open them, so that each is reported only once.
    """

    config: Config
    download: bool
    lines: list[str] = dataclasses.field(default_factory=list)
    reported: set[str] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def begun_data(self) -> DataConfig | None:
        """Data settings of the run in `output.dir`, or None if there is no readable run."""
        # An unreadable config is reported later, when the run folder is opened.
        with contextlib.suppress(UserError, OSError, ValueError):
            path = run_folder.RunPaths(run_path(self.config.output)).config
            return run_folder.read_config_file(path).data
        return None

    def resolve_model(self) -> None:
        """Replaces a model's name by its folder. Raises UserError if the model is missing."""
        self.reported.add("model.path")
        model = with_local_model(self.config.model, download=self.download)
        self.config = dataclasses.replace(self.config, model=model)
        self.reported.remove("model.path")

    def check_sets(self) -> None:
        """Calls `resolve_sets`. Raises a single UserError if several needed sets are missing."""
        from bacr_jax.questions.missing import missing_together

        line, missing = missing_together(self.config.data)
        if line:
            self.reported.update(missing)
            raise UserError(line)
        self.resolve_sets()

    def resolve_sets(self) -> None:
        """Removes missing evaluation sets if `data.eval_missing` is `skip`.

        Prints one line for every removed set.

        Raises:
          UserError: a set that the run needs is missing.
        """
        from bacr_jax.questions.missing import without_missing

        config = self.config
        path = run_path(config.output)
        data, lines = without_missing(config.data, config.eval, self.begun_data, path)
        for line in lines:
            print(line, flush=True)
        self.config = dataclasses.replace(config, data=data)

    def resolve_prompt_date(self) -> None:
        """Sets the date in the prompts, which depends on the model's chat template."""
        from bacr_jax.prompts.prompt_date import with_prompt_date

        config = self.config
        if "model.path" not in self.reported:
            folder = config.model.tokenizer or config.model.path
            data = with_prompt_date(config.data, folder, self.begun_data)
            self.config = dataclasses.replace(config, data=data)

    def read(self) -> None:
        """Reads all inputs that are not reported as missing. Raises UserError if any is invalid."""
        from bacr_jax.parallel import processes
        from bacr_jax.runs.setup import model_shape
        from bacr_jax.training import initialize, run_summary
        from bacr_jax.training.warmup_folder import check_warmup, warmup_fingerprint

        processes.check_platform()
        settings = resolve(self.config)
        if self.reported:
            faults = initialize.faults_of_inputs(settings, frozenset(self.reported))
            if faults:
                raise UserError(*faults)
            return
        path = run_path(self.config.output)

        def check_texts(texts_digest: str) -> None:
            fingerprint = warmup_fingerprint(self.config)
            run = run_folder.RunPaths(path)
            check_warmup(self.config.warmup, fingerprint, run, texts_digest)

        method, task_data, verifier_lines = initialize.check_inputs(settings, check_texts)
        shape = model_shape(self.config.model, task_data.vocab_size)
        facts = run_summary.RunFacts(self.config, path, method, shape, task_data)
        described = run_summary.check_lines(facts)
        self.lines = [*verifier_lines, *described]
