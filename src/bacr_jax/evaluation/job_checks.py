"""Checks the inputs of an evaluation before any work on a device.

The module `job` calls these functions while it prepares an evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax.config import BudgetConfig, ConditioningConfig, EvalConfig, ModelConfig
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.errors import UserError
from bacr_jax.evaluation import comparison, folder
from bacr_jax.evaluation.decoder import declaration
from bacr_jax.evaluation.samples import evaluated_budgets, graded_sets, swap_budgets
from bacr_jax.methods.method import Method
from bacr_jax.prompts.encoding import suffix_length
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.runs import setup


@dataclass(frozen=True)
class EvaluationLimits:
    """The settings that limit the length of prompt, thinking and answer in an evaluation.

    Attributes:
      evaluation: section `eval` of the config.
      budget: section `budget` of the config.
      answer_tokens: `rollout.answer_tokens`.
    """

    evaluation: EvalConfig
    budget: BudgetConfig
    answer_tokens: int

    @property
    def largest(self) -> int:
        """The maximum number of thinking tokens, without the grace window."""
        return largest_evaluated(self.budget, self.evaluation)


def _largest_option(limits: EvaluationLimits) -> str:
    """Returns the options that set the maximum thinking length, for error messages."""
    largest = limits.largest
    if limits.evaluation.no_budget and largest not in limits.evaluation.budgets:
        return f"--budgets none, budget.cap={largest}"
    return f"--budgets {largest}"


def check_labels(sets: Sequence[str], evaluation: EvalConfig, labels: Path | None) -> None:
    """Raises UserError if difficulty labels are requested for several sets or budgets.

    Args:
      sets: evaluation sets, `data.eval`.
      evaluation: section `eval` of the config.
      labels: file to write the labels to, or None.
    """
    if labels is None:
        return
    if len(sets) > 1 or len(evaluated_budgets(evaluation)) > 1:
        raise UserError(
            f"--label-difficulty {labels}: difficulty labels are made from one data set at one "
            "budget; pass one --data and one number in --budgets"
        )


def receives_budget(conditioning: ConditioningConfig, method: Method) -> bool:
    """True if the policy receives its budget as an embedding or in the prompt.

    `conditioning.budget_input` alone is not sufficient, because methods such as GRPO ignore the
    value `embedding`.
    """
    return conditioning.in_prompt or method.conditioned


def check_swap(
    evaluation: EvalConfig, conditioning: ConditioningConfig, method: Method, style: PromptFormat
) -> None:
    """Raises UserError if this policy can't be evaluated with --swap.

    --swap evaluates the policy with every pair of an input budget and a truncation point. This
    requires a policy that receives a budget as input or as a tag at the beginning of its response,
    and at least two budgets.

    Args:
      evaluation: section `eval` of the config.
      conditioning: section `conditioning` of the config.
      method: training method of the policy.
      style: prompt format.
    """
    if not style.budget_close and not receives_budget(conditioning, method):
        reason = f"conditioning.budget_input={conditioning.budget_input}"
        if conditioning.embeds:
            reason = f"the method {method.name} has no budget embedding"
        raise UserError(
            f"--swap: this policy does not read its budget ({reason}), so a different budget can't "
            "change its answers; leave out the option --swap"
        )
    if style.budget_close and evaluation.budget_tag == "declared":
        raise UserError(
            "--swap: with eval.budget_tag=declared, the policy chooses its own budget, so no "
            "other budget can be given to it; set eval.budget_tag=given"
        )
    if len(swap_budgets(evaluation.budgets)) < 2:
        raise UserError(
            "--swap: at least two budgets above 0 are needed to evaluate one with another; pass "
            "for example --budgets 512,1024"
        )


def positions_of_model(model: ModelConfig, tokenizer: Any) -> int:
    """Returns the model's number of positions, before its weights are read."""
    rows = setup.vocabulary_rows(model, len(tokenizer))
    return setup.model_shape(model, rows).max_positions


def fits_alone(budget: int, grace: int, positions: int) -> bool:
    """True if a budget and its grace window fit next to a prompt of one token, without an answer.

    Budgets that do not fit can be refused before the prompts are known.
    """
    needed = setup.positions_needed(prompt=1, forced=0, answers=0, grace=grace, thinking=budget)
    return needed <= positions


def check_largest_budget(limits: EvaluationLimits, positions: int) -> None:
    """Raises UserError if the largest budget exceeds the model's number of positions."""
    if not fits_alone(limits.largest, limits.budget.grace, positions):
        raise UserError(
            f"{_largest_option(limits)}: the model has only {positions} positions for prompt, "
            "thinking and answer together; use a smaller number"
        )


def check_length(
    limits: EvaluationLimits,
    tokenizer: Any,
    style: PromptFormat,
    positions: int,
    sets: dict[str, PromptedQuestions],
) -> None:
    """Raises UserError if prompt, thinking and answer can exceed the model's positions."""
    largest = limits.largest
    answers = limits.answer_tokens
    forced = suffix_length(tokenizer, style)
    declared = len(declaration(tokenizer, style, limits.evaluation, largest))
    for name, questions in sets.items():
        prompt = questions.longest + declared
        free = positions - setup.positions_needed(
            prompt=prompt, forced=forced, answers=answers, grace=limits.budget.grace
        )
        if largest > free:
            advice = "set a smaller rollout.answer_tokens"
            if free > 0:
                advice = f"use at most {free}"
            raise UserError(
                f"{_largest_option(limits)}: this budget does not fit in the model's {positions} "
                f"positions next to the prompts of {name} (up to {prompt} tokens), the forced text "
                f"({forced}) and the answers (up to {answers}); {advice}"
            )


@dataclass(frozen=True)
class OtherEvaluation:
    """A finished evaluation with which this evaluation is compared.

    Attributes:
      name: name of its policy, or its folder if results.json has no name.
      samples: graded samples by set and setting (decoding mode, budget and truncation point).
      sets: entry `sets` of results.json.
    """

    name: str
    samples: comparison.Results
    sets: Mapping[str, Any]


def check_compared(
    others: Mapping[str, Path],
    name: str,
    settings: Mapping[str, Any],
) -> dict[str, OtherEvaluation]:
    """Checks that other evaluations can be compared with this one.

    Args:
      others: folder of each other evaluation, keyed by the path that the user wrote.
      name: name of this evaluation's policy.
      settings: settings of this evaluation.

    Returns:
      The other evaluations with their samples at the requested budgets, keyed by the name of the
      policy. If two policies have the same name, the path of the folder is used as the name.

    Raises:
      UserError: if an evaluation can't be read or compared.
    """
    compared: dict[str, OtherEvaluation] = {}
    for where, path in others.items():
        samples_by_set = folder.read_samples(path)
        other_settings = folder.read_settings(path)
        comparison.check_comparable(settings, other_settings, where)
        results = folder.read_results(path, other_settings["sets"])
        other_name = str(results.get("name", path))
        if other_name == name or other_name in compared:
            other_name = str(path)
        samples = comparison.reported(graded_sets(samples_by_set), other_settings["decoding"])
        compared[other_name] = OtherEvaluation(other_name, samples, results["sets"])
    return compared


def check_free(path: Path | None, settings: Mapping[str, Any]) -> OtherEvaluation | None:
    """Checks the evaluation that the option --free names.

    It must be an evaluation of the policy before training with the same problems and grader,
    because its accuracy by thinking tokens is compared with the accuracy of this evaluation.

    Args:
      path: folder of the evaluation, or None to check nothing.
      settings: settings of this evaluation.

    Returns:
      The evaluation with all of its samples, or None if `path` is None.

    Raises:
      UserError: if the evaluation can't be read, has other problems, another grader or other
        sampling options, has no decoding mode in common with this one, or was made with --swap.
    """
    if path is None:
        return None
    samples_by_set = folder.read_samples(path)
    other_settings = folder.read_settings(path)
    # The budgets of the other evaluation may differ, because its curve is interpolated.
    comparison.check_comparable(
        settings, other_settings, str(path), option="--free", same_budgets=False
    )
    if other_settings["decoding"].get("swap"):
        raise UserError(
            f"--free {path}: that evaluation was made with --swap and can't be used here; "
            "evaluate the policy before training with --every 16, or without --every"
        )
    results = folder.read_results(path)
    name = results.get("name", str(path))
    return OtherEvaluation(name, graded_sets(samples_by_set), results["sets"])
