"""The folder of an evaluation: its samples are its state, and what survives a kill."""

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

from bacr_jax import documents
from bacr_jax.errors import UserError, first_of
from bacr_jax.evaluation.samples import GREEDY, EvalSetting, Sample, SampleKey, dense_cuts
from bacr_jax.runs.chosen_step import choose_step
from bacr_jax.runs.folder import (
    LOCK,
    RunPaths,
    drop_left_over,
    is_begun,
    lock_folder,
    steps_in,
    usable,
)

SETTINGS, SAMPLES, RESULTS = "evaluation.json", "samples.jsonl", "results.json"
# What people read.
MARKDOWN, LATEX = "results.md", "results.tex"
# Section of the settings: digests of the tokenizer and of its chat template.
PROMPT_FINGERPRINTS = "prompt_fingerprints"
_MOST_NAMED = 4


@dataclass(frozen=True)
class SampleBatch:
    """Rows that are drawn and written together.

    Attributes:
      settings, rows: a `Part`; a row is problem x samples + sample.
      keys: `Sample.key` of each row in each setting, row by row.
    """

    set: str
    settings: Sequence[EvalSetting]
    rows: Int[np.ndarray, "rows"]
    keys: list[SampleKey]


def sample_batches(
    ids: Mapping[str, Sequence[str]], settings: Sequence[Sequence[EvalSetting]], most: int
) -> list[SampleBatch]:
    """Every batch of an evaluation, of at most `most` rows, in the order of drawing."""
    work = []
    for name, problems in ids.items():
        for together in settings:
            first = together[0]
            count = len(problems) * first.samples
            for start in range(0, count, most):
                rows = range(start, min(start + most, count))
                keys = [
                    (name, first.mode, first.budget, setting.cut, problems[place], sample)
                    for place, sample in (divmod(row, first.samples) for row in rows)
                    for setting in together
                ]
                work.append(SampleBatch(name, together, np.array(rows), keys))
    return work


def in_one_call(batches: Sequence[SampleBatch], most: int) -> Iterator[list[SampleBatch]]:
    """Batches that are decoded together: of one set, with as many cuts each, `most` rows or one."""
    together: list[SampleBatch] = []
    alike = lambda batch: (batch.set, len(batch.settings))
    for batch in batches:
        rows = sum(len(other.rows) for other in (*together, batch))
        if together and (alike(batch) != alike(together[0]) or rows > most):
            yield together
            together = []
        together.append(batch)
    if together:
        yield together


def resume(folder: Path, work: Sequence[SampleBatch]) -> list[list[Sample]]:
    """The batches that are there as a whole; what follows them is cut off.

    Texts are left out, since they are many and no number needs them.
    """
    path = folder / SAMPLES
    if not path.exists():
        return []
    done: list[list[Sample]] = []
    whole = 0
    with path.open("rb") as file:
        lines = enumerate(iter(file.readline, b""), 1)
        for batch in work:
            samples = [
                _read(line, key, f"{path}, line {number}")
                for key, (number, line) in zip(batch.keys, lines)
                if line.endswith(b"\n")
            ]
            if len(samples) < len(batch.keys):
                break
            done.append(samples)
            whole = file.tell()
    try:
        if path.stat().st_size > whole:
            os.truncate(path, whole)
    except OSError as error:
        raise documents.cannot_write(path, error) from None
    return done


def append(folder: Path, samples: Sequence[Sample]) -> None:
    """Adds a batch, on the disk before this returns."""
    path = folder / SAMPLES
    lines = (json.dumps(dataclasses.asdict(sample), ensure_ascii=False) for sample in samples)
    # Half a surrogate pair can come out of a tokenizer and can't be written.
    text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    try:
        with path.open("ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise documents.cannot_write(path, error) from None


# What the fields of a sample hold; a score may be a whole number.
_KINDS = {**typing.get_type_hints(Sample), **dict.fromkeys(("correct", "strict"), int | float)}


def _read(line: bytes, key: SampleKey | None, where: str) -> Sample:
    try:
        sample = Sample(**{**documents.parse_json(line), "text": ""})
        if not all(isinstance(getattr(sample, name), kind) for name, kind in _KINDS.items()):
            raise TypeError
    except (ValueError, TypeError):
        raise UserError(f"{where}: is no sample; write another --out") from None
    if key is not None and sample.key != key:
        raise UserError(
            f"{where}: found the sample {sample.key}, expected {key}; write another --out"
        )
    return sample


@contextlib.contextmanager
def open_evaluation(path: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Makes the folder of an evaluation, or opens the one that the same settings made before.

    It is locked against other processes until it is left. A new folder in which nothing was
    evaluated disappears when a UserError leaves it.
    """
    where = f"--out {path}"
    with usable(where):
        _refuse_unless_ours(path, settings, where)
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path, where)
    with lock:
        _refuse_unless_ours(path, settings, where)
        drop_left_over(path)
        is_new = not (path / SETTINGS).exists()
        if is_new:
            documents.write_json(path / SETTINGS, settings)
        try:
            yield
        except UserError:
            if is_new and {p.name for p in path.iterdir()} <= {SETTINGS, LOCK}:
                for name in (SETTINGS, LOCK):
                    (path / name).unlink(missing_ok=True)
                path.rmdir()
            raise


def _refuse_unless_ours(path: Path, settings: dict[str, Any], where: str) -> None:
    if not is_begun(path, where, SETTINGS, "evaluation"):
        return
    recorded = read_settings(path)
    present = json.loads(json.dumps(settings))
    if PROMPT_FINGERPRINTS not in recorded:
        # The folder was made by a version that kept none.
        present.pop(PROMPT_FINGERPRINTS, None)
    there = flatten_dict(recorded, sep=".")
    now = flatten_dict(present, sep=".")
    differing = [
        f"{name} ({there.get(name)} there, {now.get(name)} now)"
        for name in {**now, **there}
        if there.get(name) != now.get(name)
    ]
    if differing:
        advice = "another --out"
        other_step = there.get("policy.step")
        if other_step not in (None, now.get("policy.step")):
            advice = f"--step {other_step}, or {advice}"
        raise UserError(
            f"{where}: holds another evaluation, which differs in "
            f"{first_of(differing, _MOST_NAMED)}; write {advice}"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of an evaluation."""
    try:
        settings = documents.read_json(path / SETTINGS)
    except (OSError, ValueError):
        raise UserError(
            f"{path}: holds no evaluation; make one with bacr evaluate, or write "
            "the folder that its --out named"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(f"{path / SETTINGS}: is damaged; write another folder")
    return settings


def recorded_prompt_date(path: Path) -> str:
    """Returns the date that the prompts of an unfinished or finished evaluation write.

    Empty if they write none, or if the folder holds no evaluation.
    """
    if not (path / SETTINGS).is_file():
        return ""
    decoding = read_settings(path).get("decoding")
    date = decoding.get("prompt_date") if isinstance(decoding, dict) else None
    return date if isinstance(date, str) else ""


def read_results(path: Path, names: Iterable[str] = ()) -> dict[str, Any]:
    """The results of a finished evaluation; `names`: sets that it must have."""
    try:
        results = documents.read_object(path / RESULTS)
        if not all("by_budget" in results["sets"][name] for name in (*results["sets"], *names)):
            raise ValueError
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        raise UserError(f"{path / RESULTS}: is damaged; run its evaluation again") from None
    return results


def read_samples(path: Path) -> dict[str, dict[EvalSetting, list[Sample]]]:
    """Samples of a finished evaluation by set and setting, without their texts."""
    settings = read_settings(path)
    if not (path / RESULTS).exists() or not (path / SAMPLES).exists():
        raise UserError(f"{path}: holds an unfinished evaluation; run its command again first")
    try:
        rows = _rows(settings)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path / SETTINGS}: is damaged; write another folder") from None
    by_key: dict[tuple[Any, ...], list[Sample]] = {key: [] for key in rows}
    with (path / SAMPLES).open("rb") as file:
        for number, line in enumerate(file, 1):
            sample = _read(line, None, f"{path / SAMPLES}, line {number}")
            by_key.setdefault(sample.key[:4], []).append(sample)
    drawn: dict[str, dict[EvalSetting, list[Sample]]] = {}
    for (name, mode, budget, cut), of in by_key.items():
        if len(of) != (expected := rows.get((name, mode, budget, cut), 0)):
            raise UserError(
                f"{path / SAMPLES}: holds {len(of)} answers of {name}, {mode}, budget {budget}, "
                f"not {expected}; run its command again first"
            )
        setting = EvalSetting(mode, budget, len({sample.sample for sample in of}), cut)
        drawn.setdefault(name, {})[setting] = of
    return drawn


def _rows(settings: dict[str, Any]) -> dict[tuple[Any, ...], int]:
    """How many answers an evaluation has when it is finished: by set, mode, budget and cut."""
    decoding = settings["decoding"]
    every, largest = decoding.get("every"), max(decoding["budgets"], default=0)
    return {
        (name, mode, budget, cut): of["problems"] * (1 if mode == GREEDY else decoding["samples"])
        for name, of in settings["sets"].items()
        for mode, budgets in decoding["cells"].items()
        for budget in budgets
        for cut in (None, *(dense_cuts(largest, every) if every and budget == largest else ()))
    }


def default_folder(run: Path | None, step: int | None, model: Path | None) -> Path:
    """Where an evaluation goes unless --out says otherwise."""
    if run is not None and step is not None:
        return RunPaths(run).evaluation_of(step)
    assert model is not None
    return Path("runs") / f"evaluation-{model.absolute().name}"


def finished_evaluations(run: Path) -> list[Path]:
    """The results of the evaluations that were made of a run's checkpoints afterwards."""
    return sorted(RunPaths(run).later_evaluations.glob(f"*/{RESULTS}"))


def find_evaluation(folder: Path) -> Path:
    """Returns an evaluation to compare with: the folder itself, or one of the run in it.

    That is the evaluation of the run's best checkpoint, or of the last one that was evaluated if no
    checkpoint was chosen as the best. UserError: there is none, or the best was not evaluated.
    """
    if (folder / SETTINGS).is_file():
        return folder
    if best := _evaluation_of_best(folder):
        return best
    made = sorted(RunPaths(folder).later_evaluations.glob(f"step-*/{SETTINGS}"))
    if not made:
        raise UserError(
            f"--compare {folder}: holds no evaluation; run bacr evaluate for it "
            "first, with the same sets and budgets"
        )
    return made[-1].parent


def _evaluation_of_best(run: Path) -> Path | None:
    """Returns the evaluation of a run's best checkpoint; None if commands take another one.

    UserError: only other checkpoints were evaluated, which are not compared in its place.
    """
    paths = RunPaths(run)
    evaluations = sorted(paths.later_evaluations.glob(f"step-*/{SETTINGS}"))
    if not evaluations or not steps_in(paths.checkpoints):
        return None
    chosen = choose_step(run)
    if not chosen.is_best:
        return None
    evaluation = paths.evaluation_of(chosen.step)
    if evaluation / SETTINGS not in evaluations:
        raise UserError(
            f"--compare {run}: step {chosen.step} is its best and was not evaluated; run python -m "
            f"bacr_jax.evaluate for it first, or write {evaluations[-1].parent}"
        )
    return evaluation
