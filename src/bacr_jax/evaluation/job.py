"""An evaluation from prepared settings to results: what `python -m bacr_jax.evaluate` does."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bacr_jax.config import Config
from bacr_jax.data.environment import Environment, Questions, build_environment, load_sets
from bacr_jax.data.prompts import PromptFormat, format_for
from bacr_jax.data.question_set import QuestionSet
from bacr_jax.errors import UserError
from bacr_jax.evaluation import comparison, labels
from bacr_jax.evaluation.folder import (
    RESULTS,
    Batch,
    EvaluationFolder,
    find_evaluation,
    open_evaluation,
    plan,
    read_samples,
    read_settings,
)
from bacr_jax.evaluation.samples import (
    SAMPLED,
    Decoder,
    EvalSetting,
    Sample,
    cells_of,
    declaration,
    draw,
    subset,
)
from bacr_jax.evaluation.summary import Graded, graded, summarise
from bacr_jax.learner import policy as policies
from bacr_jax.methods import load_method
from bacr_jax.methods.registry import declares_budget
from bacr_jax.runs.folder import write_json
from bacr_jax.runs.open import SavedPolicy, load_tokenizer
from bacr_jax.runs.progress import Progress

__all__ = ["Work", "open_evaluation", "prepare", "run"]

# Rows of a batch for each row decoded together: more keep slots busier, fewer lose less to a kill.
_WAVES = 4


@dataclass(frozen=True)
class Work:
    """An evaluation that was checked and not started.

    Attributes:
      name: of the policy, for tables.
      saved: the policy on disk, with the evaluation's config.
      tokenizer: the policy's.
      style: prompt format.
      sets: questions by set.
      chosen: places of the problems evaluated, by set.
      cells: decodings and budgets.
      compared: folders of other evaluations by their names.
      labels: where to write measured difficulty; None: nowhere.
      settings: what the samples depend on.
    """

    name: str
    saved: SavedPolicy
    tokenizer: Any
    style: PromptFormat
    sets: dict[str, Questions]
    chosen: dict[str, Int[np.ndarray, "n"]]
    cells: list[EvalSetting]
    compared: dict[str, Path]
    labels: Path | None
    settings: dict[str, Any]

    @property
    def config(self) -> Config:
        """Settings of the evaluation."""
        return self.saved.config

    def batches(self) -> list[Batch]:
        """Everything to be drawn, in order."""
        ids = {
            name: [self.sets[name].set.ids[place] for place in places]
            for name, places in self.chosen.items()
        }
        return plan(ids, self.cells, self.settings["decoding"]["batch_rows"])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _describe(questions: Questions, places: np.ndarray) -> dict[str, Any]:
    """What makes the problems of a set these and no others."""
    data = questions.set.take(places)
    prompts = questions.take(places)
    rows = [
        np.asarray(tokens)[:length].tolist()
        for tokens, length in zip(prompts.tokens, np.asarray(prompts.lengths))
    ]
    return {
        "problems": len(data),
        "questions": _digest([data.ids, data.questions, data.answers]),
        "prompts": _digest(rows),
    }


def _more_cells(config: Config, self_consistency: int | None) -> list[EvalSetting]:
    """Cells that only serve votes at equal total tokens."""
    if self_consistency is None:
        return []
    budgets, samples = config.eval.budgets, config.eval.samples
    if budgets[0] < self_consistency:
        raise UserError(
            f"--self-consistency {self_consistency}: leaves no token for each sample at budget "
            f"{budgets[0]}; write at most {budgets[0]}, or larger budgets"
        )
    needed = {budget // self_consistency for budget in budgets} - set(budgets)
    return [EvalSetting(SAMPLED, budget, samples) for budget in sorted(needed)]


def _check_length(
    config: Config, tokenizer: Any, style: PromptFormat, shape: Any, sets: dict[str, Questions]
) -> None:
    """The longest row fits the positions that the model was made for."""
    told = len(declaration(tokenizer, style, config.eval, max(config.eval.budgets)))
    largest, answers = max(config.eval.budgets), config.rollout.answer_tokens
    for name, questions in sets.items():
        prompt = int(np.max(questions.prompts.lengths)) + told
        free = shape.max_positions - prompt - answers
        if largest > free:
            advice = f"write at most {free}" if free > 0 else "write fewer rollout.answer_tokens"
            raise UserError(
                f"--budgets {largest}: with prompts of {prompt} tokens in {name} and answers of "
                f"{answers} the model's {shape.max_positions} positions are too few; {advice}"
            )


def prepare(
    saved: SavedPolicy,
    *,
    greedy: bool,
    self_consistency: int | None = None,
    split: Literal["train", "test"] = "test",
    train: QuestionSet | None = None,
    compare: Sequence[Path] = (),
    labels: Path | None = None,
    name: str | None = None,
) -> Work:
    """Reads questions and checks that everything fits together, before any device work.

    Args:
      saved: the policy, with the evaluation's config.
      greedy: also the most likely answer, beside samples.
      self_consistency: k of votes at equal total tokens.
      split: part of the sets.
      train: near-duplicates of its questions are counted apart; None: none are looked for.
      compare: evaluated runs, or folders of evaluations.
      labels: where to write measured difficulty.
      name: of the policy, for tables.

    Raises:
      UserError: something does not.
    """
    config = saved.config
    cells = cells_of(config.eval, greedy=greedy) + _more_cells(config, self_consistency)
    if labels is not None and (len(config.data.eval) > 1 or len(config.eval.budgets) > 1):
        raise UserError(
            f"--label-difficulty {labels}: takes one set and one budget; write one --data and one "
            "number in --budgets"
        )
    others = {str(folder): find_evaluation(folder) for folder in compare}
    tokenizer = load_tokenizer(saved)
    shape = policies.model_shape(config, policies.vocabulary_rows(config, len(tokenizer)))
    if max(config.eval.budgets) >= shape.max_positions:
        raise UserError(
            f"--budgets {max(config.eval.budgets)}: the model has {shape.max_positions} positions; "
            "write fewer"
        )
    style = format_for(config, declares_budget=declares_budget(config))
    sets = load_sets(config, tokenizer, split=split, train=train, style=style)
    _check_length(config, tokenizer, style, shape, sets)
    chosen = {spec: subset(found, config.eval.size, config.seed) for spec, found in sets.items()}
    modes: dict[str, list[int]] = {}
    for cell in cells:
        modes.setdefault(cell.mode, []).append(cell.budget)
    rows = max(len(places) for places in chosen.values()) * max(cell.samples for cell in cells)
    slots = min(config.rollout.slots or rows, rows)
    settings = {
        "policy": saved.identity,
        "sets": {spec: _describe(sets[spec], places) for spec, places in chosen.items()},
        "decoding": {
            "cells": modes,
            "budgets": list(config.eval.budgets),
            "samples": config.eval.samples,
            "temperature": config.eval.temperature,
            "top_p": config.eval.top_p,
            "answer_tokens": config.rollout.answer_tokens,
            "seed": config.seed,
            "slots": slots,
            "chunk": config.rollout.chunk,
            "batch_rows": slots * _WAVES,
            "compute_dtype": config.model.compute_dtype,
            "attention": config.model.attention,
        },
    }
    if style.budget_close:
        settings["decoding"]["budget_tag"] = config.eval.budget_tag
    for where, folder in others.items():
        theirs = read_settings(folder)
        comparison.check_comparable(settings["sets"], theirs, modes, where)
        read_samples(folder)
    return Work(
        name=name or saved.name,
        saved=saved,
        tokenizer=tokenizer,
        style=style,
        sets=sets,
        chosen=chosen,
        cells=cells,
        compared=_names(list(others.values()), name or saved.name),
        labels=labels,
        settings=settings,
    )


def _names(folders: Sequence[Path], own: str) -> dict[str, Path]:
    """Evaluations by what they call their policies; by their folders where that is taken."""
    found: dict[str, Path] = {}
    for folder in folders:
        called = str(json.loads((folder / RESULTS).read_bytes()).get("name", folder))
        found[str(folder) if called in (own, *found) else called] = folder
    return found


def open_decoder(
    saved: SavedPolicy, config: Config, vocab_size: int, *, max_thinking: int, slots: int
) -> Decoder:
    """A saved policy on the device, in its compute type.

    Args:
      saved: the policy.
      config: settings it is decoded with.
      vocab_size: rows of its embedding.
      max_thinking: largest budget to come.
      slots: rows decoded together.

    Raises:
      UserError: the policy's files and its config disagree.
    """
    policy = policies.make_policy(config, load_method(config), vocab_size)
    params = saved.params()
    conditioned = policy.learner.conditioning is not None
    if conditioned and "budget" not in params:
        raise UserError(f"{saved.folder}: its policy has no budget module; copy it again")
    shape = policy.learner.model
    if params["embed"].shape != (shape.vocab_size, shape.hidden_size):
        raise UserError(
            f"{saved.folder}: its embedding has shape {params['embed'].shape}, but its config "
            f"says {(shape.vocab_size, shape.hidden_size)}; write model.path=FOLDER"
        )
    module = {"budget": params["budget"]} if conditioned else {}
    # Cast before they go to the device, which then never holds them in float32.
    dtype = policy.learner.dtype
    body = {name: leaf for name, leaf in params.items() if name != "budget"}
    body = jax.tree.map(lambda x: x if x.dtype == dtype else x.astype(dtype), body)
    decode = policy.decode_params({**body, **module})
    spec = dataclasses.replace(policy.evaluation, max_thinking=max_thinking, slots=slots)
    module = jax.tree.map(jnp.asarray, module)
    return Decoder(decode, spec, policy.phi_of(module))


def _draw_missing(
    work: Work,
    environment: Environment,
    folder: EvaluationFolder,
    progress: Progress,
    planned: Sequence[Batch],
    done: list[list[Sample]],
    poll: Callable[[], None] | None,
) -> None:
    """Draws the batches that are not there yet, and adds them to the folder and to `done`."""
    decoder = open_decoder(
        work.saved,
        work.config,
        environment.vocab_size,
        max_thinking=max(cell.budget for cell in work.cells),
        slots=work.settings["decoding"]["slots"],
    )
    key = jax.random.fold_in(jax.random.key(work.config.seed), 4)
    total, finished = sum(len(batch.rows) for batch in planned), sum(map(len, done))
    if finished:
        progress.say(f"continuing after {finished} of {total} answers")
    with progress.phase("evaluation", total) as phase:
        for batch in planned[len(done) :]:
            samples = draw(
                decoder,
                environment,
                work.sets[batch.set],
                work.chosen[batch.set],
                batch.rows,
                batch.cell,
                key,
                name=batch.set,
                config=work.config.eval,
                poll=poll,
            )
            folder.append(samples)
            done.append([dataclasses.replace(sample, text="") for sample in samples])
            finished += len(samples)
            phase.update(
                finished,
                total=total,
                set=batch.set,
                decoding=batch.cell.mode,
                budget=batch.cell.budget,
                right=float(np.mean([sample.correct for sample in samples])),
            )


def run(
    work: Work,
    folder: EvaluationFolder,
    progress: Progress,
    poll: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Draws what is missing, and computes every number from the samples.

    Args:
      work: as `prepare` gives it.
      folder: opened for `work.settings`; gets samples.jsonl and results.json.
      progress: shows how far it is.
      poll: called regularly; it may raise, and what was drawn by then stays.

    Returns:
      What results.json holds, and "labels" (lines for the reader) if labels were written.
    """
    planned = work.batches()
    done = folder.resume(planned)
    rows = policies.vocabulary_rows(work.config, len(work.tokenizer))
    environment = build_environment(
        work.config, work.tokenizer, rows, style=work.style, sets=work.sets
    )
    try:
        if len(done) < len(planned):
            _draw_missing(work, environment, folder, progress, planned, done, poll)
        found: dict[str, dict[EvalSetting, Graded]] = {name: {} for name in work.sets}
        gathered: dict[tuple[str, EvalSetting], list[Sample]] = {}
        for batch, samples in zip(planned, done, strict=True):
            gathered.setdefault((batch.set, batch.cell), []).extend(samples)
        for (name, cell), samples in gathered.items():
            found[name][cell] = graded(samples, cell)
        results: dict[str, Any] = {
            "name": work.name,
            "settings": work.settings,
            "sets": {
                name: _summary(work, environment, name, cells) for name, cells in found.items()
            },
            "comparisons": {},
        }
    finally:
        environment.close()
    for name, path in work.compared.items():
        differences = comparison.compare(found, _graded(path))
        theirs = json.loads((path / RESULTS).read_bytes())["sets"]
        for spec, difference in differences.items():
            # The other policy's own numbers, for tables and pictures.
            difference["other"] = theirs[spec]["by_budget"]
        results["comparisons"][name] = differences
    write_json(folder.path / RESULTS, results)
    if work.labels is None:
        return results
    (cells,) = found.values()
    (cell,) = [cell for cell in cells if cell.mode == SAMPLED]
    counts = labels.write_labels(work.labels, cells[cell])
    lines = {group: f"solve rate {group}: {count} problems" for group, count in counts.items()}
    return {**results, "labels": {"file": f"difficulty labels in {work.labels}", **lines}}


def _summary(
    work: Work, environment: Environment, name: str, cells: dict[EvalSetting, Graded]
) -> dict[str, Any]:
    questions = work.sets[name]
    grader = environment.graded_like(questions).grader
    problems = questions.set.take(work.chosen[name])
    numbers = summarise(cells, grader, budgets=work.config.eval.budgets, problems=problems)
    return {**numbers, "note": questions.set.note}


def _graded(folder: Path) -> dict[str, dict[EvalSetting, Graded]]:
    return {
        name: {cell: graded(samples, cell) for cell, samples in cells.items()}
        for name, cells in read_samples(folder).items()
    }
