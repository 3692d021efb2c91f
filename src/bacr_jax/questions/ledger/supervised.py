"""Builds the batches of the ledger's supervised warm-up as a function of seed and step.

A ledger problem of level n has n additions. Its thinking (trace) is written in one of the styles of
`questions.ledger`: *steps*, *redo*, *mixed* or *at_once*.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.errors import UserError
from bacr_jax.questions.ledger.problems import MAX_LEVEL, problem_of, split_codes
from bacr_jax.questions.ledger.styles import TAIL, Style, example, padded

Variant = Literal["redundant", "tradeoff"]

# Widths of batches in tokens. Each width is just above the longest example of one kind: 19 tokens
# for at_once, 31 for steps up to level 3, 47 for steps up to level 5, and 72 for redo.
BUCKETS = (20, 32, 48, 80)
# Probability that the trace of an example is truncated.
CUT_SHARE = 0.1
# Numbers that select separate streams of random numbers, because problems and warm-up may have the
# same seed.
_STREAM = 2
_PROMPT_BUDGET_STREAM = 3
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Stage:
    """A stage of the warm-up.

    Attributes:
      until: end of the stage, as a fraction of the steps of the warm-up.
      max_level: maximum difficulty level of its problems. All levels are sampled with equal
        probability.
      weights: relative probability of each style of the traces.
    """

    until: float
    max_level: int
    weights: tuple[tuple[Style, float], ...]


# The first stage has a single style on easy levels, because with all styles at once the loss stays
# on a plateau for thousands of steps. All fractions and weights were tuned by hand.
WARMUP: dict[Variant, tuple[Stage, ...]] = {
    "redundant": (
        Stage(0.15, 3, (("steps", 1.0),)),
        Stage(0.45, 3, (("redo", 3.0), ("mixed", 1.0), ("steps", 1.0), ("at_once", 1.0))),
        Stage(1.00, 5, (("redo", 6.0), ("mixed", 2.5), ("steps", 0.5), ("at_once", 1.0))),
    ),
    "tradeoff": (
        Stage(0.13, 3, (("steps", 1.0),)),
        Stage(0.45, 3, (("steps", 1.0), ("at_once", 1.0))),
        # With equal weights, the short style at_once became accurate before the long style steps
        # could solve the longest problems. A long style is only useful if it solves problems that
        # the short style can't solve.
        Stage(1.00, 5, (("steps", 3.0), ("at_once", 1.0))),
    ),
}

# The last stage of `redundant` with four times the weight of *steps*, for a policy that has not
# learned to solve long problems without repeating a line.
PRACTICE = Stage(1.00, 5, (("redo", 6.0), ("mixed", 2.5), ("steps", 2.0), ("at_once", 1.0)))


def _redo_lines(rng: np.random.Generator, levels: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Chooses at random which lines of each trace are written twice.

    Args:
      levels: number of lines of each trace.
      count: number of lines to write twice in each trace.

    Returns:
      A mask in which `count[i]` of the first `levels[i]` lines of trace i are True.
    """
    noise = rng.random((len(levels), MAX_LEVEL))
    noise[np.arange(MAX_LEVEL) >= levels[:, None]] = 2.0
    return noise.argsort(axis=1).argsort(axis=1) < count[:, None]


@functools.cache
def _kinds(stage: Stage) -> dict[str, np.ndarray]:
    """Returns a table of all kinds of examples in a stage.

    A kind is a combination of a style, a difficulty level and a number of lines that are written
    twice. The table also contains the probability and the length bucket of each kind.
    """
    total = sum(weight for _, weight in stage.weights)
    rows = []
    for style, weight in stage.weights:
        for level in range(1, stage.max_level + 1):
            # Probability of k repeated lines: k is 0, or `level`, or follows Binomial(level, 1/2).
            redo_probabilities = {0: 1.0}
            if style == "redo":
                redo_probabilities = {level: 1.0}
            elif style == "mixed":
                redo_probabilities = {k: math.comb(level, k) / 2**level for k in range(level + 1)}
            for k, redo_probability in redo_probabilities.items():
                prompt_length = 3 + 2 * level
                trace_length = level + 3 if style == "at_once" else 6 * level + 5 * k
                length = prompt_length + trace_length + TAIL
                bucket = int(np.searchsorted(BUCKETS, length))
                probability = weight / total / stage.max_level * redo_probability
                rows.append((style == "at_once", level, k, probability, bucket))
    names = ("at_once", "level", "redone", "probability", "bucket")
    return {name: np.array(column) for name, column in zip(names, zip(*rows))}


def draw_kinds(
    rng: np.random.Generator,
    seed: int,
    step: int,
    *,
    bucket_of: Int[np.ndarray, "K"],
    weights: Float[np.ndarray, "K"],
    rows_in: Int[np.ndarray, "N"],
) -> tuple[Int[np.ndarray, "B"], int]:
    """Samples the length bucket of a step, and the kinds of the examples in its batch.

    A kind is a combination of style, difficulty level and number of repeated lines. A bucket
    contains the kinds of similar length.

    Over many steps, the frequencies of the kinds follow the weights. The bucket of a step is
    selected by a multiple of the golden ratio modulo 1. These numbers cover [0, 1) evenly. With
    random numbers, the shares of styles and levels would be off by a fifth for hundreds of steps.

    Args:
      rng: random numbers for the kinds.
      bucket_of: index of the bucket of each of K kinds.
      weights: relative frequency of each kind.
      rows_in: number of rows in a batch of each of N buckets.

    Returns:
      (kind of each of the B rows, bucket). All of these kinds belong to the bucket.
    """
    shares = np.bincount(bucket_of, weights, len(rows_in)) / rows_in
    start = np.random.default_rng([seed, _STREAM]).random()
    position = (start + step * _GOLDEN) % 1.0
    ends = np.cumsum(shares / shares.sum())
    last_bucket = int(np.flatnonzero(shares)[-1])
    # The last cumulative sum should be 1. If rounding makes it smaller, `position` may be above it.
    bucket = min(int(np.searchsorted(ends, position, side="right")), last_bucket)
    kinds = np.flatnonzero(bucket_of == bucket)
    probabilities = weights[kinds] / weights[kinds].sum()
    indices = rng.choice(len(kinds), size=int(rows_in[bucket]), p=probabilities)
    return kinds[indices], bucket


def check_batch_tokens(batch_tokens: int, longest: int) -> None:
    """Checks that a batch has space for its longest example.

    Args:
      batch_tokens: number of tokens in a batch.
      longest: number of tokens of the longest example.

    Raises:
      UserError: the batch is too small.
    """
    if batch_tokens < longest:
        raise UserError(
            f"warmup.batch_tokens={batch_tokens} is too small, because the longest warm-up "
            f"example has {longest} tokens; set it to {longest} or more"
        )


def short_traces(
    count: int, *, max_operand: int, prompt_budget: int | None = None
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"], Int[np.ndarray, "B"]]:
    """Returns training problems of every difficulty level with their traces in the style *steps*.

    Args:
      count: number of rows per level. The first training problems of the level are used, and
        repeated if there are fewer than `count`.
      prompt_budget: budget in the prompts, or None for prompts without a budget.

    Returns:
      (token ids, mask of the trace tokens to check, level of each row). The mask excludes the label
      at the start of each line, because a policy may instead repeat the previous line.
    """
    rows = []
    levels = np.repeat(np.arange(1, MAX_LEVEL + 1), count)
    for level in range(1, MAX_LEVEL + 1):
        codes = np.resize(split_codes(level, max_operand, "train"), count)
        for code in codes.tolist():
            problem = problem_of(code, level, max_operand)
            prompt, (trace, _), *tail = example(
                problem, [False] * level, False, prompt_budget=prompt_budget
            )
            row = [prompt]
            # Each line of a trace has 6 tokens, of which the first is its label.
            for start in range(0, len(trace), 6):
                row.append((trace[start : start + 1], False))
                row.append((trace[start + 1 : start + 6], True))
            row += [(ids, False) for ids, _ in tail]
            rows.append(row)
    tokens, mask = padded(rows)
    return tokens, mask, levels


def warmup_batch(
    seed: int,
    step: int,
    total_steps: int,
    *,
    variant: Variant,
    batch_tokens: int,
    max_operand: int = 3,
    prompt_budgets: Int[np.ndarray, "n"] | None = None,
    practice: bool = False,
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Builds the supervised batch of a step, which depends only on the arguments.

    All examples of a batch belong to the same length bucket (`BUCKETS`, by the length before
    truncation). Batches therefore have little padding, and only four shapes are compiled:
    batch_tokens // S rows of S tokens. Over many steps, examples appear with the probabilities of
    the stage. Problems come from the training split.

    Args:
      step: index of the step, from 0. Steps from `total_steps` on belong to the last stage.
      batch_tokens: number of tokens in the batch, including padding: at least 80, plus the length
        of a budget in the prompt.
      prompt_budgets: budgets for the prompts, or None for prompts without a budget. Each prompt
        contains one of them, sampled uniformly and independently of the trace, so the warm-up does
        not teach any relation between budget and trace.
      practice: True to use the stage `PRACTICE` instead of the stage of the variant.

    Returns:
      Token ids [B, S], and a mask [B, S] of the tokens in the loss.

    Raises:
      UserError: `batch_tokens` is too small.
    """
    widths = np.array(BUCKETS)
    if prompt_budgets is not None:
        # A budget in the prompt consists of a marker token and one token per digit.
        widths += 1 + len(str(np.max(prompt_budgets)))
    check_batch_tokens(batch_tokens, int(max(widths)))
    rng = np.random.default_rng([seed, _STREAM, step])
    stage = PRACTICE if practice else _stage(variant, step / max(total_steps, 1))
    kinds = _kinds(stage)
    kind, bucket = draw_kinds(
        rng,
        seed,
        step,
        bucket_of=kinds["bucket"],
        weights=kinds["probability"],
        rows_in=batch_tokens // widths,
    )
    levels = kinds["level"][kind]
    count = len(kind)
    codes = np.zeros(count, np.int64)
    for level in np.unique(levels):
        rows_of_level = np.flatnonzero(levels == level)
        pool = split_codes(int(level), max_operand, "train")
        codes[rows_of_level] = pool[rng.integers(len(pool), size=len(rows_of_level))]
    redo = _redo_lines(rng, levels, kinds["redone"][kind])
    is_cut = rng.random(count) < CUT_SHARE
    shares = rng.random(count)
    at_once = kinds["at_once"][kind].tolist()
    budgets: list[int | None] = [None] * count
    if prompt_budgets is not None:
        # A separate stream, so that budgets do not change the other samples.
        budget_rng = np.random.default_rng([seed, _PROMPT_BUDGET_STREAM, step])
        budgets = budget_rng.choice(prompt_budgets, size=count).tolist()
    rows = []
    for row in range(count):
        problem = problem_of(int(codes[row]), int(levels[row]), max_operand)
        share = shares[row] if is_cut[row] else None
        redo_row = redo[row].tolist()
        rows.append(
            example(problem, redo_row, at_once[row], kept=share, prompt_budget=budgets[row])
        )
    return padded(rows, int(widths[bucket]))


def _stage(variant: Variant, progress: float) -> Stage:
    """Returns the stage of the warm-up after a fraction of its steps."""
    stages = WARMUP[variant]
    for stage in stages:
        if progress < stage.until:
            return stage
    return stages[-1]
