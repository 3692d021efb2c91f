"""An evaluation from prepared settings to results: what `bacr evaluate` does."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int

from bacr_grading import load_verifier
from bacr_jax.config import Config
from bacr_jax.config.checks import dense_problems
from bacr_jax.config.derived import cap, largest_evaluated, samples_of
from bacr_jax.config.engine import VLLM
from bacr_jax.documents import write_json, write_lines
from bacr_jax.errors import UserError
from bacr_jax.evaluation import comparison, folder
from bacr_jax.evaluation.decoder import check_grace, declaration, draw_samples
from bacr_jax.evaluation.samples import (
    SAMPLED,
    Drawing,
    EvalSetting,
    Graded,
    Sample,
    budget_key,
    dense_settings,
    eval_settings,
    graded,
    subset,
    told_budgets,
)
from bacr_jax.evaluation.served import check_served, open_source
from bacr_jax.evaluation.summary import summarise
from bacr_jax.methods.registry import declares_budget
from bacr_jax.prompts.environment import Environment, Questions, build_environment, load_sets
from bacr_jax.prompts.fingerprints import template_fingerprint, tokenizer_fingerprint
from bacr_jax.prompts.formats import PromptFormat, format_for
from bacr_jax.prompts.graders import failures
from bacr_jax.prompts.told import budget_words
from bacr_jax.questions.groups import groups_from_solve_rate
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.runs import setup
from bacr_jax.runs.open import SavedPolicy
from bacr_jax.runs.progress import Phase, Progress
from bacr_jax.types import Poll

# What the paper's groups are called, from the easiest on.
GROUPS = ("above .75", "above .5, up to .75", "above .25, up to .5", "up to .25")


def write_labels(path: Path, graded: Graded) -> dict[str, int]:
    """Writes each problem's avg@k, the share of its k samples that are right; counts `GROUPS`.

    The paper names pass@8, which is 0 or 1 for a single problem and can't be cut at .25, .5 and
    .75; the mean of the samples can.
    """
    rates = graded.correct.mean(1)
    lines = [
        {"id": id_, "avg": float(rate), "samples": graded.samples}
        for id_, rate in zip(graded.ids, rates)
    ]
    write_lines(path, lines)
    groups = groups_from_solve_rate(rates, num_groups=len(GROUPS))
    return {name: int((groups == group).sum()) for group, name in enumerate(GROUPS)}


# Rows of a batch for each row decoded together: more keep slots busier, fewer lose less to a kill.
_WAVES = 4
# The same for batches of several budgets and decodings that are decoded in one call.
_WAVES_OF_A_CALL = 16


@dataclass(frozen=True)
class Work:
    """An evaluation that was checked and not started.

    Attributes:
      chosen: places of the problems evaluated, by set.
      eval_settings: decodings and budgets, those together that the same traces serve.
      compared: folders of other evaluations by their names.
      labels: where to write measured difficulty; None: nowhere.
      settings: what the samples depend on.
      url: address of the server that decodes; None if this package decodes.
    """

    name: str
    saved: SavedPolicy
    tokenizer: Any
    sets: dict[str, Questions]
    chosen: dict[str, Int[np.ndarray, "n"]]
    eval_settings: list[list[EvalSetting]]
    compared: dict[str, Path]
    labels: Path | None
    settings: dict[str, Any]
    style: PromptFormat
    url: str | None = None

    @property
    def config(self) -> Config:
        """Settings of the evaluation."""
        return self.saved.config

    def batches(self) -> list[folder.SampleBatch]:
        """Everything to be drawn, in order."""
        ids = {name: self.sets[name].set.take(at).ids for name, at in self.chosen.items()}
        most = self.settings["decoding"]["batch_rows"]
        return folder.sample_batches(ids, self.eval_settings, most)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _describe(questions: Questions, places: np.ndarray) -> dict[str, Any]:
    """What makes the problems of a set these and no others."""
    data, prompts = questions.set.take(places), questions.prompts.take(places)
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths)]
    return {
        "problems": len(data),
        "questions": _digest([data.ids, data.questions, data.answers]),
        "prompts": _digest(rows),
    }


def _decoding(
    config: Config,
    style: PromptFormat,
    settings: Sequence[EvalSetting],
    problems: int,
    modes: Mapping[str, list[int]],
    url: str | None,
) -> dict[str, Any]:
    """What samples depend on beside policy and problems; what is not asked for has no entry."""
    rows = problems * max(setting.samples for setting in settings)
    slots = min(config.rollout.slots or rows, rows)
    decoding: dict[str, Any] = {
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
    }
    decode_attention = config.rollout.attention
    asked = {
        "every": config.eval.dense,
        "cap": cap(config) if config.eval.no_budget else None,
        "closing_text": config.data.closing_text,
        "grace": config.budget.grace or None,
        "budget_tag": config.eval.budget_tag if style.budget_close else None,
        "budget_words": budget_words(config, style) or None,
        "prompt_date": style.date or None,
        "engine": None if url is None else VLLM,
        "product_dtype": config.model.product_dtype,
        "decode_attention": None if decode_attention == "auto" else decode_attention,
    }
    return decoding | {name: value for name, value in asked.items() if value is not None}


def arithmetic_line(config: Config) -> str:
    """Describes the types and kernels that an evaluation computes with."""
    model, decode = config.model, config.rollout.attention
    products = model.product_dtype or model.compute_dtype
    return (
        f"computes in {model.compute_dtype}, products with weight matrices in {products}; "
        f"attention of prompts {model.attention}, of decoded tokens {decode}"
    )


def _smaller_settings(config: Config, self_consistency: int | None) -> list[EvalSetting]:
    """Settings that only serve votes at equal total tokens."""
    if self_consistency is None:
        return []
    budgets, samples = [b for b in config.eval.budgets if b], samples_of(config.eval, "")
    if not budgets or budgets[0] < self_consistency:
        least = budgets[0] if budgets else 0
        advice = f"at most {least}, or larger budgets" if least > 1 else "larger budgets"
        raise UserError(
            f"--self-consistency {self_consistency}: leaves no token for each sample at budget "
            f"{least}; write {advice}"
        )
    needed = {budget // self_consistency for budget in budgets} - set(budgets)
    return [EvalSetting(SAMPLED, budget, samples) for budget in sorted(needed)]


def _asked(config: Config) -> str:
    """The option that asks for the longest thinking."""
    largest = largest_evaluated(config)
    unlimited = config.eval.no_budget and largest not in config.eval.budgets
    return f"--budgets none, budget.cap={largest}" if unlimited else f"--budgets {largest}"


def _check_labels(config: Config, labels: Path | None) -> None:
    """Measured difficulty is that of one set at one budget."""
    if labels is not None and (len(config.data.eval) > 1 or len(told_budgets(config.eval)) > 1):
        raise UserError(
            f"--label-difficulty {labels}: takes one set and one budget; write one --data and one "
            "number in --budgets"
        )


def _positions(config: Config, tokenizer: Any) -> int:
    """Positions that the model was made for; the largest budget is less."""
    rows = setup.vocabulary_rows(config, len(tokenizer))
    positions = setup.model_shape(config, rows).max_positions
    largest = largest_evaluated(config) + config.budget.grace
    if largest >= positions:
        raise UserError(f"{_asked(config)}: the model has {positions} positions; write fewer")
    return positions


def _check_length(
    config: Config, tokenizer: Any, style: PromptFormat, most: int, sets: dict[str, Questions]
) -> None:
    """The longest row fits the `most` positions that the model was made for."""
    largest, answers = largest_evaluated(config), config.rollout.answer_tokens
    told = len(declaration(tokenizer, style, config.eval, largest))
    for name, questions in sets.items():
        prompt = questions.longest + told
        free = most - prompt - answers - config.budget.grace
        if largest > free:
            advice = f"write at most {free}" if free > 0 else "write fewer rollout.answer_tokens"
            raise UserError(
                f"{_asked(config)}: with prompts of {prompt} tokens in {name} and answers of "
                f"{answers} the model's {most} positions are too few; {advice}"
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
    url: str | None = None,
) -> Work:
    """Reads questions and checks that everything fits together, before any device work.

    Args:
      self_consistency: k of votes at equal total tokens.
      train: near-duplicates of its questions are counted apart; None: none are looked for.
    """
    config = saved.config
    if url is not None:
        check_served(saved)
    settings = eval_settings(config.eval, greedy=greedy)
    settings += _smaller_settings(config, self_consistency)
    for problem in dense_problems(config, "--every "):
        raise UserError(problem)
    dense = dense_settings(config.eval, greedy=greedy)
    _check_labels(config, labels)
    others = {str(path): folder.find_evaluation(path) for path in compare}
    tokenizer = saved.tokenizer()
    check_grace(config, tokenizer)
    most = _positions(config, tokenizer)
    style = saved.style or format_for(config, declares_budget=declares_budget(config))
    sets = load_sets(config, tokenizer, split=split, train=train, style=style)
    _check_length(config, tokenizer, style, most, sets)
    take = lambda questions: subset(len(questions), config.eval.size, config.seed)
    chosen = {name: take(questions) for name, questions in sets.items()}
    modes = {s.mode: [t.budget for t in settings if t.mode == s.mode] for s in settings}
    described = {name: _describe(sets[name], places) for name, places in chosen.items()}
    # A verifier of one's own; nothing for the built-in rules.
    grader: dict[str, str] = {}
    if config.grader is not None:
        grader = {"file": config.grader, "digest": load_verifier(config.grader).digest}
    name, compared = name or saved.name, dict[str, Path]()
    for where, path in others.items():
        folder.read_samples(path)
        there = folder.read_settings(path)
        comparison.check_comparable(described, there, modes, where, grader=grader)
        called = str(folder.read_results(path, there["sets"]).get("name", path))
        # By its folder where the name is taken.
        compared[str(path) if called in (name, *compared) else called] = path
    decoding = _decoding(config, style, settings, max(map(len, chosen.values())), modes, url)
    return Work(
        name=name,
        saved=saved,
        tokenizer=tokenizer,
        sets=sets,
        chosen=chosen,
        eval_settings=[[setting] for setting in settings] + dense,
        compared=compared,
        labels=labels,
        settings={
            "policy": saved.identity,
            "sets": described,
            "decoding": decoding,
            folder.PROMPT_FINGERPRINTS: {
                "tokenizer": tokenizer_fingerprint(tokenizer),
                "template": template_fingerprint(tokenizer, style),
            },
        }
        | ({"grader": grader} if grader else {}),
        style=style,
        url=url,
    )


def _draw_missing(
    work: Work,
    environment: Environment,
    out: Path,
    progress: Progress,
    planned: Sequence[folder.SampleBatch],
    done: list[list[Sample]],
    poll: Poll,
) -> None:
    """Draws the batches that are not in the folder yet, and adds them to it and to `done`."""
    key = jax.random.fold_in(jax.random.key(work.config.seed), 4)
    total, finished = sum(len(batch.keys) for batch in planned), sum(map(len, done))
    if finished:
        progress.say(f"continuing after {finished} of {total} answers")
    slots = work.settings["decoding"]["slots"]
    source = open_source(work.url, work.saved, environment, slots=slots, say=progress.say)
    with source as decoder, progress.phase("evaluation", total) as phase:
        # A server keeps its slots busy by itself, and may go away at any moment.
        most = 0 if work.url is not None else _WAVES_OF_A_CALL * slots
        for together in folder.in_one_call(planned[len(done) :], most):
            name, on_rows = together[0].set, _counter(phase, finished, together[0])
            drawn = draw_samples(
                decoder,
                work.sets[name],
                work.chosen[name],
                [(batch.rows, batch.settings) for batch in together],
                Drawing(environment, key, work.config.eval, poll, on_rows),
                name=name,
            )
            for batch, samples in zip(together, drawn, strict=True):
                folder.append(out, samples)
                done.append([dataclasses.replace(sample, text="") for sample in samples])
                finished += len(samples)
                phase.update(
                    finished,
                    set=name,
                    decoding=batch.settings[0].mode,
                    budget=budget_key(batch.settings[0].budget),
                    right=float(np.mean([sample.correct for sample in samples])),
                )


def _counter(phase: Phase, finished: int, batch: folder.SampleBatch) -> Callable[[int], None]:
    """Shows rows of a call as they are decoded; they are graded and written at its end."""

    def count(rows: int) -> None:
        nonlocal finished
        finished += rows * len(batch.settings)
        phase.update(finished, set=batch.set)

    return count


def run(work: Work, out: Path, progress: Progress, poll: Poll = None) -> dict[str, Any]:
    """Draws what is missing and computes every number from the samples; what results.json holds.

    Args:
      out: folder, opened for `work.settings`; gets samples.jsonl and results.json.
      poll: called regularly; it may raise, and what was drawn by then stays.
    """
    planned = work.batches()
    done = folder.resume(out, planned)
    rows = setup.vocabulary_rows(work.config, len(work.tokenizer))
    environment = build_environment(
        work.config, work.tokenizer, rows, style=work.style, sets=work.sets
    )
    try:
        if len(done) < len(planned):
            environment.check_verifier()
            _draw_missing(work, environment, out, progress, planned, done, poll)
        drawn: dict[str, dict[EvalSetting, list[Sample]]] = {name: {} for name in work.sets}
        for batch, samples in zip(planned, done, strict=True):
            for place, setting in enumerate(batch.settings):
                of_setting = samples[place :: len(batch.settings)]
                drawn[batch.set].setdefault(setting, []).extend(of_setting)
        own = graded_sets(drawn)
        # Of this process; samples.jsonl and `paths` in results.json have them all.
        for line in failures(environment.grader, {}):
            progress.say(line)
        results: dict[str, Any] = {
            "name": work.name,
            "settings": work.settings,
            "sets": {},
            "comparisons": {},
        }
        told = told_budgets(work.config.eval)
        for name, questions in work.sets.items():
            grader = environment.graded_like(questions).grader
            problems = questions.set.take(work.chosen[name])
            numbers = summarise(own[name], grader, budgets=told, problems=problems, poll=poll)
            results["sets"][name] = {**numbers, "note": questions.set.note}
    finally:
        environment.close()
    for name, path in work.compared.items():
        differences = comparison.compare(own, graded_sets(folder.read_samples(path)))
        theirs = folder.read_results(path)["sets"]
        for spec, difference in differences.items():
            # The other policy's own numbers, for tables and pictures.
            difference["other"] = theirs[spec]["by_budget"]
        results["comparisons"][name] = differences
    write_json(out / folder.RESULTS, results)
    if work.labels is not None:
        (of_set,) = own.values()
        (setting,) = [s for s in of_set if s.mode == SAMPLED and s.cut is None]
        progress.say(f"difficulty labels in {work.labels}")
        for group, count in write_labels(work.labels, of_set[setting]).items():
            progress.say(f"solve rate {group}: {count} problems")
    return results


def graded_sets(
    drawn: Mapping[str, Mapping[EvalSetting, Sequence[Sample]]],
) -> dict[str, dict[EvalSetting, Graded]]:
    """Samples by set and setting, as arrays."""
    return {
        name: {setting: graded(samples, setting) for setting, samples in of_set.items()}
        for name, of_set in drawn.items()
    }
