"""Prepares and runs an evaluation.

`bacr evaluate` calls `prepare`, which loads the questions and checks the settings, and then `run`,
which samples the answers and computes the results. `decoder` samples, `summary` computes the
results, and `folder` reads and writes the files.
"""

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
from bacr_jax.config import Config, DataConfig, EvalConfig, ModelConfig
from bacr_jax.config.derived import cap, samples_of
from bacr_jax.config.engine import VLLM
from bacr_jax.config.settings import resolve
from bacr_jax.config.training_checks import dense_problems
from bacr_jax.errors import UserError
from bacr_jax.evaluation import comparison, folder
from bacr_jax.evaluation.decoder import check_grace, draw_samples
from bacr_jax.evaluation.free_curve import compare_with_free_curve
from bacr_jax.evaluation.job_checks import (
    EvaluationLimits,
    OtherEvaluation,
    check_compared,
    check_free,
    check_labels,
    check_largest_budget,
    check_length,
    check_swap,
    positions_of_model,
)
from bacr_jax.evaluation.samples import (
    SAMPLED,
    EvalSampling,
    EvalSetting,
    Graded,
    Sample,
    budget_key,
    budgets_by_mode,
    dense_settings,
    eval_settings,
    evaluated_budgets,
    graded_sets,
    subset,
    swap_settings,
)
from bacr_jax.evaluation.served import check_served, open_source
from bacr_jax.evaluation.summary import summarise
from bacr_jax.files import write_json, write_lines
from bacr_jax.methods.registry import make_method
from bacr_jax.prompts.budget_prompt import budget_words
from bacr_jax.prompts.fingerprints import encoding_fingerprints
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.graders import failures
from bacr_jax.prompts.prompted_questions import PromptedQuestions, load_sets, load_training_texts
from bacr_jax.prompts.task_data import TaskData, build_task_data
from bacr_jax.questions.groups import groups_from_solve_rate
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.runs import setup
from bacr_jax.runs.progress import Phase, Progress
from bacr_jax.runs.saved_policy import SavedPolicy, trained_style
from bacr_jax.types import Poll

# Ranges of the solve rate for the paper's difficulty groups, from easiest to hardest.
GROUPS = ("above .75", "above .5, up to .75", "above .25, up to .5", "up to .25")


def write_labels(path: Path, graded: Graded) -> dict[str, int]:
    """Writes the avg@k of each problem: the share of its k samples that are correct.

    The paper groups problems by pass@8 at 0.25, 0.5 and 0.75. For a single problem, pass@8 is
    either 0 or 1, so the mean over samples is used instead.

    Args:
      path: output file in JSON Lines format.
      graded: graded samples of all problems.

    Returns:
      The number of problems in each of `GROUPS`.
    """
    rates = graded.correct.mean(1)
    lines = [
        {"id": id_, "avg": float(rate), "samples": graded.samples}
        for id_, rate in zip(graded.ids, rates)
    ]
    write_lines(path, lines)
    groups = groups_from_solve_rate(rates, num_groups=len(GROUPS))
    return {name: int((groups == group).sum()) for group, name in enumerate(GROUPS)}


# Number of traces in a batch, divided by the number of traces that are decoded at the same time
# (slots). Larger batches keep the slots busier, and smaller batches lose less work if the process
# is killed.
_WAVES = 4
# Maximum number of traces in a decoder call, divided by the number of slots. A call can contain
# several batches.
_WAVES_OF_A_CALL = 16


@dataclass(frozen=True)
class Work:
    """A validated evaluation that has not started.

    Attributes:
      name: name of the policy in tables.
      saved: policy to evaluate.
      tokenizer: tokenizer of the policy.
      sets: questions and prompts by set.
      chosen: indices of the evaluated problems, by set.
      eval_settings: groups of settings (decoding mode, budget and truncation point). All settings
        of a group use the same traces.
      compared: other evaluations to compare with, by name of their policy.
      free: evaluation of the policy before training, or None.
      labels: output file for difficulty labels, or None to write none.
      settings: all settings that affect the samples, which are written to evaluation.json.
      style: prompt format.
      url: address of the server that samples, or None to sample in this process.
    """

    name: str
    saved: SavedPolicy
    tokenizer: Any
    sets: dict[str, PromptedQuestions]
    chosen: dict[str, Int[np.ndarray, "n"]]
    eval_settings: list[list[EvalSetting]]
    compared: dict[str, OtherEvaluation]
    labels: Path | None
    settings: dict[str, Any]
    style: PromptFormat
    url: str | None = None
    free: OtherEvaluation | None = None

    @property
    def config(self) -> Config:
        """Returns the config of the evaluation."""
        return self.saved.config

    def batches(self) -> list[folder.SampleBatch]:
        """Returns all batches of the evaluation in the order of sampling."""
        ids = {}
        for name, index in self.chosen.items():
            problems = self.sets[name].set.take(index)
            ids[name] = problems.ids
        batch_rows = self.settings["decoding"]["batch_rows"]
        return folder.sample_batches(ids, self.eval_settings, batch_rows)


def _digest(value: Any) -> str:
    """Returns the first 12 hexadecimal digits of the SHA-256 hash of a value's JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _describe(questions: PromptedQuestions, chosen: np.ndarray) -> dict[str, Any]:
    """Returns the number of evaluated problems, and digests of the problems and prompts."""
    data = questions.set.take(chosen)
    prompts = questions.prompts.take(chosen)
    tokens = np.asarray(prompts.tokens)
    lengths = np.asarray(prompts.lengths)
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
    chosen: Mapping[str, Int[np.ndarray, "n"]],
    url: str | None,
    *,
    swap: bool,
) -> dict[str, Any]:
    """Returns all settings that affect the samples, except the policy and the problems.

    The result is a section of evaluation.json. Options that are not used are omitted.

    Args:
      config: config of the evaluation.
      style: prompt format.
      settings: all evaluation settings.
      chosen: indices of the evaluated problems, by set.
      url: address of the server, or None to decode in this process.
      swap: True if every pair of input budget and truncation point is evaluated.
    """
    most_problems = max(map(len, chosen.values()))
    rows = most_problems * max(setting.samples for setting in settings)
    slots = min(config.rollout.slots or rows, rows)
    decoding: dict[str, Any] = {
        "cells": budgets_by_mode(settings),
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
    options = {
        "every": config.eval.cut_every,
        "swap": swap or None,
        "cap": cap(config.budget) if config.eval.no_budget else None,
        "closing_text": config.data.closing_text,
        "grace": config.budget.grace or None,
        "budget_tag": config.eval.budget_tag if style.budget_close else None,
        "budget_words": budget_words(resolve(config).task.budget_text, style) or None,
        "prompt_date": style.date or None,
        "engine": None if url is None else VLLM,
        "product_dtype": config.model.product_dtype,
        "decode_attention": None if decode_attention == "auto" else decode_attention,
    }
    decoding |= {name: value for name, value in options.items() if value is not None}
    if url is not None:
        folder.drop_decoder_entries(decoding)
    return decoding


def arithmetic_line(model: ModelConfig, decode_attention: str) -> str:
    """Returns a line that describes the dtypes and attention kernels of an evaluation.

    Args:
      model: section `model` of the config.
      decode_attention: `rollout.attention`.
    """
    products = model.product_dtype or model.compute_dtype
    return (
        f"computes in {model.compute_dtype}, products with weight matrices in {products}; "
        f"attention of prompts {model.attention}, of decoded tokens {decode_attention}"
    )


def _smaller_settings(evaluation: EvalConfig, self_consistency: int | None) -> list[EvalSetting]:
    """Returns additional settings at smaller budgets, which are needed for majority votes.

    A majority vote of k samples (maj@k) is compared with a single sample that uses the same total
    number of tokens. Therefore each of the k samples needs a budget of 1/k of the single budget.

    Args:
      evaluation: section `eval` of the config.
      self_consistency: number of samples that vote, or None for no votes.

    Raises:
      UserError: if a budget has fewer tokens than the number of voting samples.
    """
    if self_consistency is None:
        return []
    budgets = [budget for budget in evaluation.budgets if budget]
    samples = samples_of(evaluation, "")
    least = budgets[0] if budgets else 0
    if least < self_consistency:
        advice = f"at most {least}, or larger budgets" if least > 1 else "larger budgets"
        raise UserError(
            f"--self-consistency {self_consistency}: the samples of a vote share the budget, so "
            f"at budget {least} there is less than one token for each; use {advice}"
        )
    needed = {budget // self_consistency for budget in budgets} - set(budgets)
    return [EvalSetting(SAMPLED, budget, samples) for budget in sorted(needed)]


def _grader_settings(grader: str | None) -> dict[str, str]:
    """Returns file and digest of the user's verifier, or {} for the built-in rules."""
    if grader is None:
        return {}
    return {"file": grader, "digest": load_verifier(grader).digest}


def _choose_problems(
    size: int | None, seed: int, sets: Mapping[str, PromptedQuestions]
) -> tuple[dict[str, Int[np.ndarray, "n"]], dict[str, dict[str, Any]]]:
    """Returns the indices of the evaluated problems, and the result of `_describe`, by set.

    Args:
      size: maximum number of problems per set, or None for all problems.
      seed: seed that selects the problems.
      sets: evaluation sets by name.
    """
    chosen = {}
    described = {}
    for name, questions in sets.items():
        indices = subset(len(questions), size, seed)
        chosen[name] = indices
        described[name] = _describe(questions, indices)
    return chosen, described


def training_set(
    spec: str | Sequence[str] | None, data: DataConfig, seed: int, *, is_optional: bool
) -> tuple[QuestionSet | None, str]:
    """Loads the training questions that are compared with the evaluated questions.

    Near-duplicates of training questions are marked in the evaluation sets.

    docs/evaluation.md describes the search for near-duplicates.

    Args:
      spec: training set, or None if near-duplicates are not searched.
      data: section `data` of the evaluation's config.
      seed: seed of the evaluation.
      is_optional: True if a set that can't be read does not stop the evaluation.

    Returns:
      A tuple of the questions and a warning to print. The questions are None if there is no search.
      The warning is empty if the set was read.

    Raises:
      UserError: if the set can't be read and is not optional.
    """
    if spec is None:
        return None, ""
    try:
        return load_training_texts(spec, data, seed), ""
    except UserError as error:
        if not is_optional:
            raise
        return None, f"near-duplicates of training questions were not searched: {error}"


def prepare(
    saved: SavedPolicy,
    *,
    greedy: bool,
    self_consistency: int | None = None,
    split: Literal["train", "test"] = "test",
    train: QuestionSet | None = None,
    compare: Sequence[Path] = (),
    settings_name: str = "",
    labels: Path | None = None,
    name: str | None = None,
    url: str | None = None,
    swap: bool = False,
    free: Path | None = None,
) -> Work:
    """Loads the questions and validates all settings, before any work on a device.

    Args:
      saved: policy to evaluate.
      greedy: True to evaluate greedy answers, even if samples are drawn as well.
      self_consistency: number of samples that share a budget and vote, or None for no votes.
      split: split of the evaluation sets.
      train: training questions whose near-duplicates are marked, or None to skip the search.
      compare: folders of runs or evaluations to compare with.
      settings_name: see `folder.find_evaluation`.
      labels, name, url: see `Work`. If `name` is None, the name of the saved policy is used.
      swap: True to evaluate every pair of input budget and truncation point.
      free: folder of the evaluation of the policy before training, or None for no comparison.

    Raises:
      UserError: if an input is invalid.
    """
    config = saved.config
    if url is not None:
        check_served(saved)
    settings = eval_settings(config.eval, greedy=greedy)
    settings += _smaller_settings(config.eval, self_consistency)
    for problem in dense_problems(config.eval, "--every "):
        raise UserError(problem)
    truncated = dense_settings(config.eval, greedy=greedy)
    check_labels(config.data.eval, config.eval, labels)
    others = {str(path): folder.find_evaluation(path, settings_name) for path in compare}
    tokenizer = saved.tokenizer()
    limits = EvaluationLimits(config.eval, config.budget, config.rollout.answer_tokens)
    check_grace(config.budget.grace, tokenizer)
    positions = positions_of_model(config.model, tokenizer)
    check_largest_budget(limits, positions)
    style = saved.style or trained_style(resolve(config).method)
    if swap:
        method = make_method(resolve(config).method)
        check_swap(config.eval, config.conditioning, method, style)
        truncated = swap_settings(config.eval, greedy=greedy)
    sets = load_sets(resolve(config).task, tokenizer, split=split, train=train, style=style)
    check_length(limits, tokenizer, style, positions, sets)
    chosen, described = _choose_problems(config.eval.size, config.seed, sets)
    grader = _grader_settings(config.grader)
    name = name or saved.name
    all_settings: dict[str, Any] = {
        "policy": saved.recorded_identity(),
        "sets": described,
        "decoding": _decoding(config, style, settings, chosen, url, swap=swap),
        folder.PROMPT_FINGERPRINTS: encoding_fingerprints(tokenizer, style),
    }
    all_settings |= {"grader": grader} if grader else {}
    all_settings |= {folder.SPLIT: split} if split != "test" else {}
    compared = check_compared(others, name, all_settings)
    return Work(
        name=name,
        saved=saved,
        tokenizer=tokenizer,
        sets=sets,
        chosen=chosen,
        eval_settings=[[setting] for setting in settings] + truncated,
        compared=compared,
        labels=labels,
        settings=all_settings,
        style=style,
        url=url,
        free=check_free(free, all_settings),
    )


def _draw_missing(
    work: Work,
    task_data: TaskData,
    out: Path,
    progress: Progress,
    planned: Sequence[folder.SampleBatch],
    done: list[list[Sample]],
    poll: Poll,
) -> None:
    """Samples the missing batches, and appends their answers to the folder and to `done`.

    Args:
      planned: all batches of the evaluation.
      done: answers of the batches that are already sampled.
    """
    key = jax.random.fold_in(jax.random.key(work.config.seed), 4)
    total = sum(len(batch.keys) for batch in planned)
    finished = sum(map(len, done))
    if finished:
        progress.print_line(f"continuing after {finished} of {total} answers")
    slots = work.settings["decoding"]["slots"]
    source = open_source(
        work.url, work.saved, task_data, slots=slots, print_line=progress.print_line
    )
    with source as decoder, progress.phase("evaluation", total) as phase:
        # With a server, every batch is a separate call, because a server schedules its requests by
        # itself and can fail at any time.
        most = 0 if work.url is not None else _WAVES_OF_A_CALL * slots
        for together in folder.in_one_call(planned[len(done) :], most):
            name = together[0].set
            on_rows = _row_counter(phase, finished, together[0])
            samples_of_batches = draw_samples(
                decoder,
                work.sets[name],
                work.chosen[name],
                [(batch.rows, batch.settings) for batch in together],
                EvalSampling(task_data, key, work.config.eval, poll, on_rows),
                name=name,
            )
            for batch, samples in zip(together, samples_of_batches, strict=True):
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


def _row_counter(phase: Phase, finished: int, batch: folder.SampleBatch) -> Callable[[int], None]:
    """Returns a callback that updates the progress display with the traces that have been decoded.

    The answers are graded and written only at the end of the decoding call, which may contain
    several batches.

    Args:
      phase: entry of the progress display.
      finished: number of answers before the call.
      batch: first batch of the call.
    """

    def count(rows: int) -> None:
        nonlocal finished
        finished += rows * len(batch.settings)
        phase.update(finished, set=batch.set)

    return count


def run(work: Work, out: Path, progress: Progress, poll: Poll = None) -> dict[str, Any]:
    """Samples the missing answers and computes the results from all samples.

    Args:
      work: prepared evaluation.
      out: folder for samples.jsonl and results.json, which was opened with `work.settings`.
      progress: progress display.
      poll: called regularly. It may raise an exception to stop. All complete batches remain in the
        folder.

    Returns:
      The content of results.json.
    """
    planned = work.batches()
    done = folder.resume(out, planned)
    rows = setup.vocabulary_rows(work.config.model, len(work.tokenizer))
    task_data = build_task_data(
        resolve(work.config).task, work.tokenizer, rows, style=work.style, sets=work.sets
    )
    try:
        if len(done) < len(planned):
            task_data.check_verifier()
            _draw_missing(work, task_data, out, progress, planned, done, poll)
        graded_by_set = graded_sets(_by_setting(work, planned, done))
        # Print only the grading failures of this process. `paths` in results.json counts all
        # failures.
        for line in failures(task_data.grader, {}):
            progress.print_line(line)
        numbers_by_set = {}
        budgets = evaluated_budgets(work.config.eval)
        for name, questions in work.sets.items():
            grader = task_data.graded_like(questions).grader
            problems = questions.set.take(work.chosen[name])
            numbers = summarise(
                graded_by_set[name], grader, budgets=budgets, problems=problems, poll=poll
            )
            numbers_by_set[name] = {**numbers, "note": questions.set.note}
    finally:
        task_data.close()
    reported = comparison.reported(graded_by_set, work.settings["decoding"])
    results: dict[str, Any] = {
        "name": work.name,
        "settings": work.settings,
        "sets": numbers_by_set,
        "comparisons": {
            name: _compare_with(other, reported) for name, other in work.compared.items()
        },
    }
    if work.free is not None:
        results["free_curve"] = {
            "name": work.free.name,
            "sets": compare_with_free_curve(reported, work.free.samples),
        }
    write_json(out / folder.RESULTS, results)
    if work.labels is not None:
        _label_difficulty(work.labels, reported, progress)
    return results


def _label_difficulty(path: Path, reported: comparison.Results, progress: Progress) -> None:
    """Writes the difficulty labels of the only set and budget, and prints the sizes of groups."""
    (graded_settings,) = reported.values()
    (setting,) = [s for s in graded_settings if s.mode == SAMPLED and s.cut is None]
    progress.print_line(f"difficulty labels in {path}")
    for group, count in write_labels(path, graded_settings[setting]).items():
        progress.print_line(f"solve rate {group}: {count} problems")


def _by_setting(
    work: Work, planned: Sequence[folder.SampleBatch], done: Sequence[Sequence[Sample]]
) -> dict[str, dict[EvalSetting, list[Sample]]]:
    """Groups the samples of all batches by set and setting (mode, budget, truncation point)."""
    by_set: dict[str, dict[EvalSetting, list[Sample]]] = {name: {} for name in work.sets}
    for batch, samples in zip(planned, done, strict=True):
        num_settings = len(batch.settings)
        for lane, setting in enumerate(batch.settings):
            by_set[batch.set].setdefault(setting, []).extend(samples[lane::num_settings])
    return by_set


def _compare_with(other: OtherEvaluation, reported: comparison.Results) -> dict[str, Any]:
    """Returns the differences from another evaluation, and the results of the other evaluation."""
    differences = comparison.compare(reported, other.samples)
    for name, difference in differences.items():
        # Tables and plots also show the results of the other evaluation.
        difference["other"] = other.sets[name]["by_budget"]
    return differences
