"""What an evaluation says beside its numbers: how answers keep to the format, and lost scores."""

from collections.abc import Iterator, Mapping
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config.selection import HOLDOUT
from bacr_jax.data.graders import failures
from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report import table

# Shares of the answers from which there is something to be said about them; ours.
NEVER_CLOSED, LENIENT_ONLY = 0.1, 0.05


def evaluation_notes(
    config: Config,
    grader: Any,
    record: Mapping[str, Any],
    counted: Mapping[str, int],
) -> Iterator[str]:
    """Lines for the terminal after an evaluation of a run.

    Args:
      config: of the run.
      grader: that it used.
      record: as eval.jsonl has it.
      counted: the grader's totals before it.
    """
    yield from failures(grader, counted)
    if record["when"] == "before" and config.output.format_report:
        name = HOLDOUT if HOLDOUT in record["sets"] else next(iter(record["sets"]))
        yield from format_lines(record["sets"][name], name, config)


def format_lines(summary: Summary, name: str, config: Config) -> Iterator[str]:
    """Format failures of a policy at its largest budget, and advice where they are many.

    Nothing is decoded for them: the evaluation before training has counted them.

    Args:
      summary: of a set.
      name: of the set.
      config: of the run, for the keys that the advice names.
    """
    mode = "sampled" if "sampled" in summary else next(iter(summary))
    budgets = summary[mode]
    budget = max((key for key in budgets if key != UNLIMITED), key=int, default=UNLIMITED)
    entry = budgets[budget]
    unclosed = 1.0 - entry["closed_rate"]
    lenient_only = entry["accuracy"] - entry["strict_accuracy"]
    yield (
        f"format of the starting policy ({table.set_title(name)}, {entry['problems']} questions, "
        f"{mode}, budget {budget}): {unclosed:.1%} of the answers were never closed, "
        f"{lenient_only:.1%} are right by the lenient rules alone"
    )
    if unclosed > NEVER_CLOSED:
        yield (
            "  advice: an answer that is never closed earns nothing; raise rollout.answer_tokens="
            f"{config.rollout.answer_tokens}, or look at what the model reads: python -m "
            "bacr_jax.data --config FILE --show-prompts 3"
        )
    if lenient_only > LENIENT_ONLY:
        yield (
            "  advice: rewards follow the strict rules (docs/grading.md), by which these answers "
            "are wrong; look at the answers in rollouts/, and try another data.prompt_format or "
            "data.closing_text, or a verifier of your own (grader)"
        )
