"""What an evaluation asks for, checked before any device work."""

from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config.derived import largest_evaluated, samples_of
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import declaration
from bacr_jax.evaluation.samples import SAMPLED, EvalSetting, dense_cuts, told_budgets
from bacr_jax.prompts.encoding import line_breaks
from bacr_jax.prompts.environment import Questions
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.runs import setup

# Cuts of a dense curve: each is an answer of its own.
_MOST_CUTS = 256


def smaller_settings(config: Config, self_consistency: int | None) -> list[EvalSetting]:
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


def check_dense(config: Config) -> None:
    """The dense curve has some cuts, and not too many."""
    every, largest = config.eval.dense, max(config.eval.budgets, default=0)
    if every is None:
        return
    if every >= largest:
        raise UserError(
            f"--every {every}: there is no multiple below the largest budget {largest}; write fewer"
        )
    if len(dense_cuts(largest, every)) > _MOST_CUTS:
        raise UserError(
            f"--every {every}: makes {len(dense_cuts(largest, every))} cuts of {largest} tokens; "
            f"write {-(-largest // _MOST_CUTS)} or more"
        )


def check_grace(config: Config, tokenizer: Any) -> None:
    """A grace window ends at line breaks, which some text must hold."""
    if config.budget.grace and not line_breaks(tokenizer, len(tokenizer)).any():
        raise UserError(
            f"budget.grace={config.budget.grace}: the tokenizer has no line break at which "
            "thinking could end; write 0"
        )


def _asked(config: Config) -> str:
    """The option that asks for the longest thinking."""
    largest = largest_evaluated(config)
    unlimited = config.eval.no_budget and largest not in config.eval.budgets
    return f"--budgets none, budget.cap={largest}" if unlimited else f"--budgets {largest}"


def check_labels(config: Config, labels: Path | None) -> None:
    """Measured difficulty is that of one set at one budget."""
    if labels is not None and (len(config.data.eval) > 1 or len(told_budgets(config.eval)) > 1):
        raise UserError(
            f"--label-difficulty {labels}: takes one set and one budget; write one --data and one "
            "number in --budgets"
        )


def positions(config: Config, tokenizer: Any) -> int:
    """Positions that the model was made for; the largest budget is less."""
    rows = setup.vocabulary_rows(config, len(tokenizer))
    positions = setup.model_shape(config, rows).max_positions
    largest = largest_evaluated(config) + config.budget.grace
    if largest >= positions:
        raise UserError(f"{_asked(config)}: the model has {positions} positions; write fewer")
    return positions


def check_length(
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
