"""Runs the variance study, which measures the gradient noise of each baseline on the same rollouts.

docs/studies/variance.md defines the measured quantities. Runs and pools of rollouts are stored on
disk. If the study is interrupted, the same command resumes it.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods.registry import make_method
from bacr_jax.model.value import ValueInput
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.runs.folder import RunPaths, steps_in
from bacr_jax.runs.progress import Progress
from bacr_jax.runs.saved_policy import read_config
from bacr_jax.training.initialize import tokenizer_of
from research.variance import measurement, noise
from research.variance import report as variance_report
from research.variance.baselines import Setting
from research.variance.fitted_values import fit_value, predicted_outcomes, smoothed_means
from research.variance.gradient_pool import Drawn, Draws, Pool, open_frozen
from research.variance.measurement import Result, Values
from research.variance.settings import VarianceSettings, read_settings


def run_config(settings: VarianceSettings, seed: int, folder: Path) -> Config:
    """Returns the config of the training run that provides the policies of a seed."""
    config = config_io.load(settings.config, _own_keys(settings, seed, folder))
    for problem in _problems(settings, config):
        raise UserError(problem)
    config_io.check(config)
    return config


def _own_keys(settings: VarianceSettings, seed: int, folder: Path) -> list[str]:
    return [f"seed={seed}", f"output.dir={folder}", *settings.overrides]


def _problems(settings: VarianceSettings, config: Config) -> Iterator[str]:
    """Yields an error message for each reason why a run can't be measured."""
    if not make_method(resolve(config).method).uses_value:
        yield (
            f"overrides: the run needs a value head, found method={config.method} with "
            f"advantage.baseline={config.advantage.baseline}; set method=bacr and "
            "advantage.baseline=value"
        )
    for name, found, why in (
        ("budget.grace", config.budget.grace, "tokens after the budget are in no segment"),
        ("reward.weights", dict(config.reward.weights), "the study's outcomes are right or wrong"),
        ("adapter.rank", config.adapter.rank, "the study takes gradients of all weights"),
    ):
        if found:
            yield f"overrides: {name}: found {found}; {why}; leave it out"
    if max(settings.budgets) > config.budget.max:
        yield (
            f"budgets: {max(settings.budgets)} is over the run's budget.max={config.budget.max}; "
            "write smaller ones"
        )
    if "training" in settings.regimes and config.budget.prior != "choices":
        yield (
            "regimes: training draws budgets from the run's budget.choices, found budget.prior="
            f"{config.budget.prior}; set budget.prior=choices, or the regime independent"
        )
    if settings.answers == 1 and config.cuts.count > 1:
        yield (
            f"answers=1: the run has cuts.count={config.cuts.count}, and cuts past a trace's end "
            "need answers of their own; use 2 or more, or cuts.count=1"
        )


def trained(settings: VarianceSettings, seed: int, folder: Path, progress: Progress) -> None:
    """Trains the run of a seed with the ordinary training command, unless it is finished."""
    run_config(settings, seed, folder)
    if not RunPaths(folder).summary.exists():
        progress.print_line(f"training seed {seed} into {folder}")
        files = [word for path in settings.config for word in ("--config", path)]
        words = _own_keys(settings, seed, folder)
        command = [sys.executable, "-m", "bacr_jax.train", *files, *words]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"{folder}: its training failed; run it alone: {' '.join(command[1:])}")
    missing = sorted(set(settings.checkpoints) - set(steps_in(RunPaths(folder).checkpoints)))
    if missing:
        raise UserError(
            f"{folder}: keeps no checkpoint of step {missing[0]}; set checkpoint.every and "
            f"checkpoint.keep in overrides so that steps {list(settings.checkpoints)} are kept"
        )


def _values(draws: Draws, pool: Pool, calibration: Drawn, oracle: Drawn) -> tuple[Values, Values]:
    """Returns the predicted outcomes of the pool, and of the second half of the calibration set.

    Both are keyed by the name of the predictor.
    """
    frozen, train, second = draws.frozen, draws.frozen.task_data.train, draws.second
    heads = {"saved": (frozen.head, frozen.policy.learner)}
    kinds: tuple[ValueInput, ...] = ("cut", "trace_and_cut")
    for kind in kinds:
        heads[kind] = fit_value(frozen, calibration, kind, held_out=second, seed=draws.seed)
    of_pool, earlier = {}, {}
    for name, read in heads.items():
        of_pool[name] = predicted_outcomes(frozen, *read, frozen.pool_questions, pool)
        earlier[name] = predicted_outcomes(frozen, *read, train, calibration)[second]
    # Budgets from a list occur many times, so the oracle does not have to average over similar
    # budgets.
    bandwidth = draws.settings.bandwidth if draws.regime == "independent" else 1e-3
    of_pool["oracle"] = smoothed_means(oracle, pool.questions, pool.budgets, bandwidth)
    # The mean outcome at each cut in earlier batches, as a baseline without a value head.
    mean = calibration.by_answer[second].mean((0, -1), dtype=np.float32)
    of_pool["constant"] = np.broadcast_to(mean, pool.cuts.shape)
    earlier["constant"] = np.broadcast_to(mean, earlier["saved"].shape)
    return of_pool, earlier


def _measured(draws: Draws) -> Result:
    """Samples a pool of rollouts, or loads it if it exists, and measures every arm on it."""
    settings, frozen, regime, seed = draws.settings, draws.frozen, draws.regime, draws.seed
    calibration, oracle, pool = draws.calibration(), draws.oracle(), draws.pool()
    of_pool, earlier = _values(draws, pool, calibration, oracle)
    half, middle = calibration.only(draws.second), variance_report.middle_group(settings.groups)
    weights = Setting(frozen.config).weights
    partition = lambda group: noise.partitions(
        [seed, group], settings.traces, group, settings.partitions
    )
    by_group = {}
    with draws.progress.phase(f"arms, {regime}", len(settings.groups)) as phase:
        for number, group in enumerate(settings.groups, 1):
            setting = measurement.calibrated(
                frozen.config, half, earlier, settings.calibration_traces, group, seed
            )
            given = pool, of_pool, setting, partition(group)
            by_group[group] = measurement.measure(*given, regime if group == middle else None)
            phase.update(number, group=group)
    return Result(
        seed=seed,
        step=frozen.step,
        regime=regime,
        by_group=by_group,
        diagnostics=measurement.diagnostics(pool, of_pool, weights, partition(middle)),
        right=float(pool.by_answer[:, -1].mean()),
    )


def main(path: Path, size: str, overrides: Sequence[str] = ()) -> None:
    """Runs the study of a file.

    Args:
      path: YAML file of the study.
      size: name of one of the sizes in the file.
      overrides: overrides of the settings, as `key=value`.
    """
    settings = read_settings(path, size, overrides)
    started = time.time()
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(output.absolute() / "compiled"))
    results: list[Result] = []
    with Progress() as progress:
        for seed in settings.seeds:
            folder = output / f"seed-{seed}" / "run"
            trained(settings, seed, folder, progress)
            progress.print_line(f"seed {seed}: {folder}")
            config = read_config(folder)
            task_data = build_task_data(
                resolve(config).task, *tokenizer_of(config.data, config.model)
            )
            for step in settings.checkpoints:
                frozen = open_frozen(config, folder, step, task_data)
                for regime in settings.regimes:
                    pools = folder.parent / "pools"
                    draws = Draws(settings, frozen, regime, seed, pools, progress)
                    results.append(_measured(draws))
        for file in variance_report.write(output, size, settings, results, time.time() - started):
            progress.print_line(str(file))
