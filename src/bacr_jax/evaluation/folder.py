"""Reads and writes the folder of an evaluation.

samples.jsonl stores the progress of an evaluation. If an evaluation is killed, the same command
continues after the last complete batch in this file. The module `job` writes the folder. Reports
and comparisons read it.
"""

import contextlib
import dataclasses
import json
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Int

from bacr_jax import files
from bacr_jax.errors import UserError, first_of
from bacr_jax.evaluation.samples import (
    GREEDY,
    EvalSetting,
    Sample,
    SampleKey,
    dense_cuts,
    swap_budgets,
)
from bacr_jax.runs.chosen_step import choose_step
from bacr_jax.runs.folder import (
    LOCK,
    RunPaths,
    drop_left_over,
    free_folder,
    is_begun,
    lock_folder,
    steps_in,
    usable,
)

SETTINGS = "evaluation.json"
SAMPLES = "samples.jsonl"
RESULTS = "results.json"
# Human-readable tables of the results.
MARKDOWN = "results.md"
LATEX = "results.tex"
# Section of the settings that contains digests of the tokenizer and of its chat template.
PROMPT_FINGERPRINTS = "prompt_fingerprints"
# Entry of the settings with the split of the evaluation sets. It is missing for the test split.
SPLIT = "split"
# Maximum number of differing settings listed in an error.
_MAX_LISTED = 4


@dataclass(frozen=True)
class SampleBatch:
    """A batch of answers that are sampled and written together.

    Attributes:
      set: name of the evaluation set.
      settings: settings of all rows. They have the same decoding mode and budget, and differ only
        in the truncation point.
      rows: row numbers. The row with number problem * samples + sample is one trace of a problem.
      keys: `Sample.key` of each row and setting, ordered by row and then by setting.
    """

    set: str
    settings: Sequence[EvalSetting]
    rows: Int[np.ndarray, "rows"]
    keys: list[SampleKey]


def sample_batches(
    ids: Mapping[str, Sequence[str]], settings: Sequence[Sequence[EvalSetting]], most: int
) -> list[SampleBatch]:
    """Splits an evaluation into batches, in the order of sampling.

    Args:
      ids: maps the name of each set to the ids of its evaluated problems.
      settings: groups of settings (decoding mode, budget and truncation point). All settings of a
        group use the same traces.
      most: maximum number of rows (traces) per batch.
    """
    batches = []
    for name, problems in ids.items():
        for together in settings:
            first = together[0]
            num_rows = len(problems) * first.samples
            for start in range(0, num_rows, most):
                rows = range(start, min(start + most, num_rows))
                keys: list[SampleKey] = []
                for row in rows:
                    problem, sample = divmod(row, first.samples)
                    keys += [
                        (name, first.mode, first.budget, setting.cut, problems[problem], sample)
                        for setting in together
                    ]
                batches.append(SampleBatch(name, together, np.array(rows), keys))
    return batches


def in_one_call(batches: Sequence[SampleBatch], most: int) -> Iterator[list[SampleBatch]]:
    """Groups consecutive batches that are decoded together.

    The batches of a group belong to the same set, have the same number of truncation points, and
    have at most `most` rows (traces) in total. A batch with more rows forms a group by itself.
    """
    together: list[SampleBatch] = []
    num_rows = 0
    for batch in batches:
        if together:
            fits = num_rows + len(batch.rows) <= most
            if not fits or _shape(batch) != _shape(together[0]):
                yield together
                together = []
                num_rows = 0
        together.append(batch)
        num_rows += len(batch.rows)
    if together:
        yield together


def _shape(batch: SampleBatch) -> tuple[str, int]:
    """Returns the set and the number of truncation points, which must be equal within a call."""
    return batch.set, len(batch.settings)


def resume(folder: Path, work: Sequence[SampleBatch]) -> list[list[Sample]]:
    """Reads the complete batches of samples.jsonl and truncates the file after them.

    The samples are returned without their texts, which would use much memory and do not affect the
    results.

    Args:
      folder: folder of the evaluation.
      work: all batches of the evaluation.

    Raises:
      UserError: if a line is not the expected sample, or the file can't be written.
    """
    path = folder / SAMPLES
    if not path.exists():
        return []
    done: list[list[Sample]] = []
    complete_size = 0
    with path.open("rb") as file:
        lines = enumerate(iter(file.readline, b""), 1)
        for batch in work:
            samples = [
                _read_sample(line, key, f"{path}, line {number}")
                for key, (number, line) in zip(batch.keys, lines)
                if line.endswith(b"\n")
            ]
            if len(samples) < len(batch.keys):
                break
            done.append(samples)
            complete_size = file.tell()
    try:
        if path.stat().st_size > complete_size:
            os.truncate(path, complete_size)
    except OSError as error:
        raise files.cannot_write(path, error) from None
    return done


def append(folder: Path, samples: Sequence[Sample]) -> None:
    """Appends a batch to samples.jsonl and flushes it to disk."""
    path = folder / SAMPLES
    lines = (json.dumps(dataclasses.asdict(sample), ensure_ascii=False) for sample in samples)
    # A tokenizer can decode to an unpaired surrogate, which can't be encoded as UTF-8.
    text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    try:
        with path.open("ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise files.cannot_write(path, error) from None


# JSON types of the fields of a sample. Scores may be stored as integers.
_FIELD_TYPES = {
    **typing.get_type_hints(Sample),
    "correct": int | float,
    "strict": int | float,
}


def _read_sample(line: bytes, key: SampleKey | None, where: str) -> Sample:
    """Parses a line of samples.jsonl without its text. Raises UserError if the line is malformed.

    Args:
      line: line of the file.
      key: expected key of the sample, or None to accept any key.
      where: file and line number for error messages.
    """
    try:
        sample = Sample(**{**files.parse_json(line), "text": ""})
        for name, field_type in _FIELD_TYPES.items():
            if not isinstance(getattr(sample, name), field_type):
                raise TypeError
    except (ValueError, TypeError):
        raise UserError(
            f"{where}: this line is not a sample of an evaluation, so the file was edited or is "
            "damaged; use another folder"
        ) from None
    if key is not None and sample.key != key:
        raise UserError(
            f"{where}: this line contains the sample {sample.key} instead of {key}, so the file "
            "was edited or is damaged; use another folder for --out"
        )
    return sample


@contextlib.contextmanager
def open_evaluation(path: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Creates the folder of an evaluation, or opens a folder with the same settings.

    This is a context manager that locks the folder against other processes. If a UserError is
    raised in the `with` block before any sample was written, a newly created folder is removed.

    Raises:
      UserError: if the folder contains something else, is in use, or can't be written.
    """
    where = f"--out {path}"
    with usable(where):
        _check_same_settings(path, settings, where)
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path, where)
    with lock:
        # Check again, because another process may have written the settings before the
        # folder was locked.
        _check_same_settings(path, settings, where)
        drop_left_over(path)
        is_new = not (path / SETTINGS).exists()
        if is_new:
            files.write_json(path / SETTINGS, settings)
        try:
            yield
        except UserError:
            if is_new and {file.name for file in path.iterdir()} <= {SETTINGS, LOCK}:
                for name in (SETTINGS, LOCK):
                    (path / name).unlink(missing_ok=True)
                path.rmdir()
            raise


def _check_same_settings(path: Path, settings: dict[str, Any], where: str) -> None:
    """Raises UserError if a non-empty folder is not an evaluation with the same settings."""
    if not is_begun(path, where, SETTINGS, "evaluation"):
        return
    recorded_sections = read_settings(path)
    # Convert tuples to lists by a round trip through JSON, as in the recorded settings.
    present_sections = json.loads(json.dumps(settings))
    _drop_uncompared_entries(recorded_sections.get("policy"), present_sections.get("policy"))
    recorded = flatten_dict(recorded_sections, sep=".")
    present = flatten_dict(present_sections, sep=".")
    differences = [
        f"{name} ({recorded.get(name)} in the folder, {present.get(name)} now)"
        for name in {**present, **recorded}
        if recorded.get(name) != present.get(name)
    ]
    if differences:
        advice = free_folder(where, path)
        other_step = recorded.get("policy.step")
        if other_step not in (None, present.get("policy.step")):
            advice = f"--step {other_step}, or {advice}"
        raise UserError(
            f"{where}: the folder contains an evaluation with different settings, namely "
            f"{first_of(differences, _MAX_LISTED)}; use {advice}"
        )


def drop_decoder_entries(decoding: dict[str, Any]) -> None:
    """Removes the dtypes and attention kernels of this package's decoder, if a server decodes.

    Args:
      decoding: section "decoding" of the settings of an evaluation. It is changed in place.
    """
    for name in ("compute_dtype", "product_dtype", "attention", "decode_attention"):
        decoding.pop(name, None)


def _drop_uncompared_entries(recorded: Any, present: Any) -> None:
    """Removes entries of two policies that are not compared, if both policies are runs.

    Runs are compared by their weights. The fingerprint of the whole config is not compared, because
    it also contains settings that do not affect an existing checkpoint, such as `train.steps`.

    Args:
      recorded: section "policy" of the settings in the folder.
      present: section "policy" of the settings of this evaluation.
    """
    policies = (recorded, present)
    if not all(isinstance(policy, dict) and "run" in policy for policy in policies):
        return
    uncompared = ["run"]
    if recorded.get("step") != present.get("step"):
        # The error names the step, so the weights would add nothing.
        uncompared.append("weights")
    for policy in policies:
        for name in uncompared:
            policy.pop(name, None)


def read_settings(path: Path) -> dict[str, Any]:
    """Reads the settings of an evaluation. Raises UserError if they are missing or damaged."""
    try:
        settings = files.read_json(path / SETTINGS)
    except (OSError, ValueError):
        raise UserError(
            f"{path} does not contain an evaluation; run bacr evaluate with this folder as --out "
            "first, or pass the folder of another evaluation"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(
            f"{path / SETTINGS} does not contain the settings of an evaluation; run the "
            "evaluation again in another folder"
        )
    return settings


def recorded_prompt_date(path: Path) -> str:
    """Returns the date in the prompts of an existing evaluation.

    Returns "" if the prompts contain no date or if the folder contains no evaluation.
    """
    if not (path / SETTINGS).is_file():
        return ""
    decoding = read_settings(path).get("decoding")
    date = decoding.get("prompt_date") if isinstance(decoding, dict) else None
    return date if isinstance(date, str) else ""


def read_results(path: Path, names: Iterable[str] = ()) -> dict[str, Any]:
    """Reads the results of a finished evaluation.

    Args:
      path: folder of the evaluation.
      names: sets that the results must contain.

    Raises:
      UserError: if results.json is missing or damaged.
    """
    try:
        results = files.read_object(path / RESULTS)
        for name in (*results["sets"], *names):
            if "by_budget" not in results["sets"][name]:
                raise ValueError
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        raise UserError(
            f"{path / RESULTS} is missing or damaged; run the bacr evaluate command of this "
            "folder again, which writes the file from the stored samples"
        ) from None
    return results


# Samples by evaluation set and setting (decoding mode, budget and truncation point).
SamplesBySet = dict[str, dict[EvalSetting, list[Sample]]]


def read_samples(path: Path) -> SamplesBySet:
    """Reads the samples of a finished evaluation by set and setting, without texts.

    A setting is a decoding mode, a budget and a truncation point.

    Raises:
      UserError: if the evaluation is missing, unfinished or damaged.
    """
    settings = read_settings(path)
    files = (path / RESULTS, path / SAMPLES)
    if not all(file.exists() for file in files):
        raise UserError(
            f"{path}: the evaluation in this folder is not finished; run its bacr evaluate "
            "command again, which continues it"
        )
    try:
        expected_counts = _expected_counts(settings)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path / SETTINGS} does not contain all settings of an evaluation; run the "
            "evaluation again in another folder"
        ) from None
    samples_path = path / SAMPLES
    by_key: dict[tuple[Any, ...], list[Sample]] = {key: [] for key in expected_counts}
    with samples_path.open("rb") as file:
        for number, line in enumerate(file, 1):
            sample = _read_sample(line, None, f"{samples_path}, line {number}")
            by_key.setdefault(sample.key[:4], []).append(sample)
    samples_by_set: SamplesBySet = {}
    for key, samples in by_key.items():
        name, mode, budget, cut = key
        expected = expected_counts.get(key, 0)
        if len(samples) != expected:
            raise UserError(
                f"{samples_path}: the evaluation is incomplete. For {name}, {mode} decoding and "
                f"budget {budget}, the file has {len(samples)} answers instead of {expected}; run "
                "its bacr evaluate command again"
            )
        sample_numbers = {sample.sample for sample in samples}
        setting = EvalSetting(mode, budget, len(sample_numbers), cut)
        samples_by_set.setdefault(name, {})[setting] = samples
    return samples_by_set


def _expected_counts(settings: dict[str, Any]) -> dict[tuple[Any, ...], int]:
    """Returns the expected number of answers, keyed by set, mode, budget and truncation point."""
    decoding = settings["decoding"]
    every = decoding.get("every")
    largest = max(decoding["budgets"], default=0)
    swapped = swap_budgets(decoding["budgets"]) if decoding.get("swap") else []
    counts: dict[tuple[Any, ...], int] = {}
    for name, problem_set in settings["sets"].items():
        for mode, budgets in decoding["cells"].items():
            samples = 1 if mode == GREEDY else decoding["samples"]
            for budget in budgets:
                cuts: list[int | None] = [None]
                if every and budget == largest:
                    cuts += dense_cuts(largest, every)
                if budget in swapped:
                    cuts += swapped
                for cut in cuts:
                    counts[name, mode, budget, cut] = problem_set["problems"] * samples
    return counts


def default_folder(
    run: Path | None, step: int | None, model: Path | None, settings_name: str = ""
) -> Path:
    """Returns the default output folder for an evaluation of a run's step or of a model.

    Args:
      settings_name: name of the evaluation's settings (see `evaluate.settings_name`), so that
        evaluations with different settings have different folders. Empty for the settings of the
        run.
    """
    if run is not None and step is not None:
        return RunPaths(run).evaluation_of(step, settings_name)
    assert model is not None
    dash = "-" if settings_name else ""
    return Path("runs") / f"evaluation-{model.absolute().name}{dash}{settings_name}"


def finished_evaluations(run: Path) -> list[Path]:
    """Returns the paths of all results.json files that `bacr evaluate` wrote for a run."""
    return sorted(RunPaths(run).later_evaluations.glob(f"*/{RESULTS}"))


def evaluations_after(run: Path, step: int) -> list[Path]:
    """Returns the folders of a run's evaluations of checkpoints after a step.

    The step is read from the name of the folder, or from its settings if a study or `--out` named
    the folder.
    """
    folders = sorted(path for path in RunPaths(run).later_evaluations.glob("*") if path.is_dir())
    return [path for path in folders if _evaluated_step(path) > step]


def _evaluated_step(evaluation: Path) -> int:
    """Returns the step of an evaluated checkpoint, or -1 if the folder contains none."""
    if evaluation.name.startswith("step-"):
        return _step_of(evaluation)
    try:
        policy = read_settings(evaluation).get("policy")
    except UserError:
        return -1
    step = policy.get("step") if isinstance(policy, dict) else None
    return step if isinstance(step, int) else -1


def find_evaluation(folder: Path, settings_name: str = "") -> Path:
    """Returns the folder of the evaluation to compare with.

    If `folder` is an evaluation, it is returned. If it is a run, the result is an evaluation of the
    run's best checkpoint, or of its last evaluated checkpoint if no best checkpoint was determined.
    If the checkpoint has several evaluations, an evaluation with the same settings is preferred,
    then an evaluation with the settings of the run, then the first by name.

    Args:
      settings_name: name of the settings of this evaluation (see `evaluate.settings_name`).

    Raises:
      UserError: if the folder contains no evaluation, or the best checkpoint was not evaluated.
    """
    if (folder / SETTINGS).is_file():
        return folder
    paths = RunPaths(folder)
    evaluations = sorted(paths.later_evaluations.glob(f"step-*/{SETTINGS}"))
    if not evaluations:
        raise UserError(
            f"--compare {folder}: the folder contains no evaluation; run bacr evaluate for it "
            "first, with the same data sets and budgets"
        )
    step = _best_step(folder)
    if step is None:
        step = max(_step_of(path.parent) for path in evaluations)
    preferred = (paths.evaluation_of(step, settings_name), paths.evaluation_of(step))
    for evaluation in (*preferred, *paths.evaluations_of(step)):
        if (evaluation / SETTINGS).is_file():
            return evaluation
    raise UserError(
        f"--compare {folder}: the best checkpoint of this run, step {step}, was not evaluated; "
        f"run bacr evaluate for the run first, or pass its evaluation {evaluations[-1].parent}"
    )


def settings_name_of(evaluation: Path) -> str:
    """Returns the name of the settings in the name of an evaluation's folder (`evaluation_of`)."""
    _, settings_name = _parts_of(evaluation)
    return settings_name


def _parts_of(evaluation: Path) -> tuple[str, str]:
    """Splits the name of an evaluation's folder into the step and the name of the settings."""
    step, _, settings_name = evaluation.name.removeprefix("step-").partition("-")
    return step, settings_name


def _step_of(evaluation: Path) -> int:
    """Returns the step in the name of an evaluation's folder, or -1 if it contains none."""
    digits, _ = _parts_of(evaluation)
    return int(digits) if digits.isdecimal() else -1


def _best_step(run: Path) -> int | None:
    """Returns the step of a run's best checkpoint, or None if no evaluation determined it."""
    if not steps_in(RunPaths(run).checkpoints):
        return None
    chosen = choose_step(run)
    return chosen.step if chosen.is_best else None
