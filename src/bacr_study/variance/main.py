"""The variance study: gradient noise of one policy and one pool of rollouts under every baseline.

For each seed an ordinary BACR run is trained, if it is not there yet. At each of its checkpoints a
pool of rollouts is drawn (`gradient_pool`), values are fitted on other questions (`fitted_values`),
and the noise of every arm is measured on the same groups (`measurement`). Pools stay on disk: the
same command goes on where it was stopped.
"""

import dataclasses
import functools
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.methods.registry import make_method
from bacr_jax.model.value import ValueInput
from bacr_jax.prompts.environment import Questions
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.open import finished_steps
from bacr_jax.runs.progress import Progress
from bacr_study.variance import gradient_pool, measurement, noise, pool_statistics
from bacr_study.variance import report as variance_report
from bacr_study.variance.baselines import Setting
from bacr_study.variance.fitted_values import fit_value, predicted_outcomes, smoothed_means
from bacr_study.variance.gradient_pool import Drawn, Frozen, Pool, open_frozen
from bacr_study.variance.measurement import Result
from bacr_study.variance.pool_statistics import Values
from bacr_study.variance.settings import Regime, VarianceSettings, read_settings
from bacr_study.variance.summary import middle_group

# Budgets whose traces are looked at alone when budgets are mixed: so many ranges.
_BINS = 3


def run_config(settings: VarianceSettings, seed: int, folder: Path) -> Config:
    """Settings of the run that a seed's policies come from.

    UserError: it can't be the run of a variance study.
    """
    config = config_io.load(settings.config, _own_keys(settings, seed, folder))
    for problem in _problems(settings, config):
        raise UserError(problem)
    config_io.check(config)
    return config


def _own_keys(settings: VarianceSettings, seed: int, folder: Path) -> list[str]:
    return [f"seed={seed}", f"output.dir={folder}", *settings.overrides]


def _problems(settings: VarianceSettings, config: Config) -> Iterator[str]:
    """Why a run can't be measured."""
    if not make_method(config).uses_value:
        yield (
            f"overrides: the run needs a value head, found method={config.method} with "
            f"advantage.baseline={config.advantage.baseline}; write method=bacr and "
            "advantage.baseline=value"
        )
    for name, found, why in (
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
            f"{config.budget.prior}; write budget.prior=choices, or the regime independent"
        )
    if settings.answers == 1 and config.cuts.count > 1:
        yield (
            f"answers=1: the run has cuts.count={config.cuts.count}, and cuts past a trace's end "
            "need answers of their own; write 2 or more, or cuts.count=1"
        )


def trained(settings: VarianceSettings, seed: int, folder: Path, progress: Progress) -> None:
    """Trains a seed's run by the ordinary command if it is not finished.

    UserError: training failed, or the run kept none of the checkpoints that are wanted.
    """
    run_config(settings, seed, folder)
    if not RunPaths(folder).summary.exists():
        progress.say(f"training seed {seed} into {folder}")
        files = [word for path in settings.config for word in ("--config", path)]
        words = _own_keys(settings, seed, folder)
        command = [sys.executable, "-m", "bacr_jax.train", *files, *words]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"{folder}: its training failed; run it alone: {' '.join(command[1:])}")
    missing = sorted(set(settings.checkpoints) - set(finished_steps(folder)))
    if missing:
        raise UserError(
            f"{folder}: keeps no checkpoint of step {missing[0]}; write checkpoint.every and "
            f"checkpoint.keep in overrides so that steps {list(settings.checkpoints)} are kept"
        )


# --- one pool with what belongs to it -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a pool's files are, and how its rollouts are drawn."""

    settings: VarianceSettings
    frozen: Frozen
    regime: Regime
    seed: int
    folder: Path
    progress: Progress

    def path(self, name: str, *depends: str) -> Path:
        """The file of what depends on these settings, besides those that all files depend on."""
        known = ("config", "overrides", "questions", "budgets", *depends)
        chosen = {"format": 5, **{name: getattr(self.settings, name) for name in known}}
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
        return self.folder / f"{name}-{self.regime}-{self.frozen.step:06d}-{digest}.npz"

    def budgets(self, questions: int, traces: int, seed: int) -> np.ndarray:
        """Budgets of every question's traces."""
        return gradient_pool.draw_budgets(
            self.frozen.config, self.regime, self.settings.budgets, questions, traces, seed
        )

    @property
    def second(self) -> np.ndarray:
        """Rows of the calibration's second half: they choose when fits stop, and give moments."""
        half = np.arange(self.settings.calibration) % 8 >= 4
        return np.repeat(half, self.settings.calibration_traces)

    @property
    def chosen(self) -> np.ndarray:
        """Places of the pool's questions."""
        levels = np.asarray(self.frozen.pool_questions.set.levels)
        return gradient_pool.stratified(levels, self.settings.questions, self.seed)

    def pool(self) -> Pool:
        """The pool, from its file or drawn and written to it."""
        settings = self.settings
        path = self.path("pool", "traces", "answers", "answer_questions", "sketch")
        if path.exists():
            return Pool.load(path)
        budgets = self.budgets(settings.questions, settings.traces, self.seed)
        name = f"pool, step {self.frozen.step}, {self.regime} budgets"
        with self.progress.phase(name, settings.questions) as phase:
            given = self.frozen, settings, self.chosen, budgets, self.seed, self.regime
            pool = gradient_pool.make_pool(*given, phase)
        pool.save(path)
        return pool

    def _drawn(
        self,
        path: Path,
        questions: Questions,
        asked: np.ndarray,
        budgets: np.ndarray,
        key: int,
        answers: int,
    ) -> Drawn:
        """Rollouts of questions under budgets, from their file or written to it."""
        if path.exists():
            with np.load(path) as saved:
                return Drawn(**saved)
        of_step = jax.random.fold_in(jax.random.key(self.seed), 1000 + self.frozen.step)
        own = jax.random.fold_in(of_step, 2 * key + (self.regime == "common"))
        name = path.stem.partition("-")[0]
        with self.progress.phase(f"{name}, {self.regime}", len(asked)) as phase:
            flat = budgets.reshape(-1)
            given = self.frozen, questions, asked, flat, own
            drawn = gradient_pool.draw_many(*given, answers=answers, phase=phase)
        gradient_pool.save_arrays(path, vars(drawn))
        return drawn

    def calibration(self) -> Drawn:
        """Rollouts of training questions; under common budgets, one budget for each question."""
        settings, train = self.settings, self.frozen.environment.train
        count, traces = settings.calibration, settings.calibration_traces
        order = np.random.default_rng([self.seed, 13]).permutation(len(train))[:count]
        if len(order) < count:
            raise UserError(f"calibration={count}: there are {len(order)} training questions")
        budgets = self.budgets(count, traces, self.seed + 1)[:, :traces]
        if self.regime == "common":
            turns = np.resize(np.array(settings.budgets, np.int32), count)
            budgets = np.repeat(turns[:, None], traces, 1)
        path = self.path("calibration", "calibration", "calibration_traces", "answers")
        return self._drawn(path, train, np.repeat(order, traces), budgets, 0, settings.answers)

    def oracle(self) -> Drawn:
        """Further rollouts of the pool's questions."""
        budgets = self.budgets(self.settings.questions, self.settings.oracle, self.seed + 2)
        asked = np.repeat(self.chosen, budgets.shape[1])
        path, questions = self.path("oracle", "oracle"), self.frozen.pool_questions
        return self._drawn(path, questions, asked, budgets, 1, 1)


def _values(place: _Place, pool: Pool, calibration: Drawn, oracle: Drawn) -> tuple[Values, Values]:
    """Predicted outcomes of the pool's rows, and of those of the calibration, by value."""
    frozen, train = place.frozen, place.frozen.environment.train
    questions, second = frozen.pool_questions, place.second
    assert frozen.head is not None
    heads = {"saved": (frozen.head, frozen.policy.learner)}
    kinds: tuple[ValueInput, ...] = ("cut", "trace_and_cut")
    for kind in kinds:
        heads[kind] = fit_value(frozen, calibration, kind, held_out=second, seed=place.seed)
    predicted = functools.partial(predicted_outcomes, frozen)
    of_pool = {name: predicted(*read, questions, pool.drawn) for name, read in heads.items()}
    of_calibration = {name: predicted(*read, train, calibration) for name, read in heads.items()}
    # Budgets of a list come again and again: an oracle needs no neighbours of theirs.
    bandwidth = place.settings.bandwidth if place.regime == "independent" else 1e-3
    drawn = pool.drawn
    of_pool["oracle"] = smoothed_means(oracle, drawn.questions, drawn.budgets, bandwidth)
    earlier = {name: values[second] for name, values in of_calibration.items()}
    # One number for each cut, of earlier batches: what there is without a value head.
    mean = calibration.by_answer[second].mean((0, -1), dtype=np.float32)
    of_pool["constant"] = np.broadcast_to(mean, pool.drawn.cuts.shape)
    earlier["constant"] = np.broadcast_to(mean, earlier["saved"].shape)
    return of_pool, earlier


def _bins(pool: Pool, regime: Regime) -> list[tuple[int, int]]:
    """Ranges of mixed budgets with about as many traces each; of a list, each budget."""
    if regime == "common":
        return []
    if regime == "training":
        return [(int(budget), int(budget)) for budget in np.unique(pool.drawn.budgets)]
    edges = np.quantile(pool.drawn.budgets, np.linspace(0, 1, _BINS + 1)).astype(int)
    return [(int(low) + (i > 0), int(high)) for i, (low, high) in enumerate(zip(edges, edges[1:]))]


def _measured(place: _Place) -> Result:
    """Draws a pool, or takes the one that is there, and measures every arm on it."""
    settings, frozen, regime, seed = place.settings, place.frozen, place.regime, place.seed
    calibration, oracle, pool = place.calibration(), place.oracle(), place.pool()
    of_pool, of_calibration = _values(place, pool, calibration, oracle)
    half = calibration.only(place.second)
    by_group = {}
    middle = middle_group(settings.groups)
    partition = lambda group: noise.partitions(
        [seed, group], settings.traces, group, settings.partitions
    )
    with place.progress.phase(f"arms, {regime}", len(settings.groups)) as phase:
        for number, group in enumerate(settings.groups):
            setting = measurement.calibrated(
                frozen.config, half, of_calibration, settings.calibration_traces, group, seed
            )
            by_group[group] = measurement.measure(
                pool,
                of_pool,
                setting,
                partition(group),
                budget_bins=_bins(pool, regime) if group == middle else (),
                value_bins=group == middle,
            )
            phase.update(number + 1, group=group)
    weights = Setting(frozen.config).weights
    return Result(
        seed=seed,
        step=frozen.step,
        regime=regime,
        by_group=by_group,
        diagnostics=pool_statistics.diagnostics(pool, of_pool, weights, partition(middle)),
        right=float(pool.drawn.by_answer[:, -1].mean()),
    )


def _of_run(
    settings: VarianceSettings, seed: int, run: Path, progress: Progress
) -> Iterator[Result]:
    """Every pool of a seed's run, at each of the checkpoints in each regime."""
    environment = None
    for step in settings.checkpoints:
        frozen = open_frozen(run, step, environment)
        environment = frozen.environment
        for regime in settings.regimes:
            folder = run.parent / "pools"
            yield _measured(_Place(settings, frozen, regime, seed, folder, progress))


def main(path: Path, size: str, overrides: Sequence[str] = ()) -> list[Path]:
    """Runs the study of a file at one of its sizes; the files written into `output`."""
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
            progress.say(f"seed {seed}: {folder}")
            results += _of_run(settings, seed, folder, progress)
        written = variance_report.write(output, size, settings, results, time.time() - started)
        for file in written:
            progress.say(str(file))
    return written
