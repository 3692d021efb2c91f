"""Which grader a run has, by its config: the built-in rules, exact match, or a verifier."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bacr_jax.config import Config
from bacr_jax.grading import ExactGrader, Grader, VerifierGrader, load_verifier

# What a run says of each reason for which a verifier gave no score.
_REASONS = {
    "late": "took too long",
    "died": "lost their worker",
    "memory": "ran out of memory",
    "raised": "raised",
    "text": "got no number",
    "nan": "got NaN",
    "range": "got a number outside [0, 1]",
    "length": "were in a batch with too few or too many scores",
}


def open_graders(
    config: Config, tolerances: Iterable[float], *, procedural: bool
) -> dict[float, Any]:
    """Graders by relative tolerance of numbers; a verifier of one's own is the same for all.

    Args:
      config: `grader` and `grading`.
      tolerances: of the sets.
      procedural: answers have one spelling.

    Raises:
      UserError: the verifier's file can't be read.
    """
    limits = config.grading
    workers: dict[str, Any] = {
        "workers": limits.workers,
        "deadline": limits.deadline,
        "memory_mb": limits.memory_mb,
    }
    if config.grader is not None:
        verifier = load_verifier(config.grader)
        return dict.fromkeys(tolerances, VerifierGrader(verifier, batch=limits.batch, **workers))
    if procedural:
        return {tolerance: ExactGrader() for tolerance in tolerances}
    return {tolerance: Grader(relative_tolerance=tolerance, **workers) for tolerance in tolerances}


def failures(grader: Any, before: Mapping[str, int]) -> Iterator[str]:
    """A line about answers to which a verifier gave no score; none if there are none.

    Args:
      grader: any.
      before: its counters at the start of what the line is about.
    """
    now = grader.counters()
    since = {name: now[name] - before.get(name, 0) for name in now}
    if since.get("failed"):
        reasons = [
            f"{since[f'failed_{name}']} {words}"
            for name, words in _REASONS.items()
            if since[f"failed_{name}"]
        ]
        yield (
            f"WARNING: the verifier gave no score to {since['failed']} of {since['graded']} "
            f"answers, which count as 0: {', '.join(reasons)} (the last: {grader.last_failure})"
        )
