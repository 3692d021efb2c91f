"""The supervised curriculum of the ledger: which examples at which step."""

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

# Widths of batches: the longest examples of at_once and of steps on levels up to 3, of steps on
# levels up to 5, and of redo, have 19, 31, 47 and 72 tokens.
BUCKETS = (20, 32, 48, 80)
CUT_SHARE = 0.1
# Number of the random stream, so that problems and warm-up share no draws of one seed.
_STREAM = 2
_TOLD_STREAM = 3
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Stage:
    """A stretch of the warm-up.

    Attributes:
      until: end of the stage, as a fraction of the warm-up's steps.
      max_level: levels 1..max_level are drawn evenly.
      weights: of the styles, up to a common factor.
    """

    until: float
    max_level: int
    weights: tuple[tuple[Style, float], ...]


# One style on easy levels first: with all of them at once the model stays on the plateau before
# induction for thousands of steps (found by trial, as were all fractions and weights).
WARMUP: dict[Variant, tuple[Stage, ...]] = {
    "redundant": (
        Stage(0.15, 3, (("steps", 1.0),)),
        Stage(0.45, 3, (("redo", 3.0), ("mixed", 1.0), ("steps", 1.0), ("at_once", 1.0))),
        Stage(1.00, 5, (("redo", 6.0), ("mixed", 2.5), ("steps", 0.5), ("at_once", 1.0))),
    ),
    "tradeoff": (
        Stage(0.13, 3, (("steps", 1.0),)),
        Stage(0.45, 3, (("steps", 1.0), ("at_once", 1.0))),
        # Evenly, at_once was as good as wanted before steps had learned the longest problems, and
        # a long style that is wrong there too is worth no budget.
        Stage(1.00, 5, (("steps", 3.0), ("at_once", 1.0))),
    ),
}

# The last stage of `redundant` with four times as much of its short style: for a policy that has
# not learned to go on on long problems without redoing a line.
PRACTICE = Stage(1.00, 5, (("redo", 6.0), ("mixed", 2.5), ("steps", 2.0), ("at_once", 1.0)))


def _redo_lines(rng: np.random.Generator, levels: np.ndarray, count: np.ndarray) -> np.ndarray:
    """A random choice of `count` of the first `levels` lines of each row."""
    noise = rng.random((len(levels), MAX_LEVEL))
    noise[np.arange(MAX_LEVEL) >= levels[:, None]] = 2.0
    return noise.argsort(axis=1).argsort(axis=1) < count[:, None]


@functools.cache
def _kinds(stage: Stage) -> dict[str, np.ndarray]:
    """Kinds of example of a stage: style, level, lines redone; their probability and bucket."""
    total = sum(weight for _, weight in stage.weights)
    rows = []
    for style, weight in stage.weights:
        for level in range(1, stage.max_level + 1):
            # k of n lines redone: none, all, or k ~ Binomial(n, 1/2)
            share = {0: 1.0}
            if style == "redo":
                share = {level: 1.0}
            elif style == "mixed":
                share = {k: math.comb(level, k) / 2**level for k in range(level + 1)}
            for k, chance in share.items():
                trace = level + 3 if style == "at_once" else 6 * level + 5 * k
                bucket = int(np.searchsorted(BUCKETS, 3 + 2 * level + trace + TAIL))
                probability = weight / total / stage.max_level * chance
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
    """The kinds of example in the rows of a step, all of one bucket, and that bucket.

    Over steps kinds appear by their weights: buckets take turns by multiples of the golden ratio,
    which cover [0, 1) evenly. Independent draws would let the shares of styles and levels wander by
    a fifth for hundreds of steps.

    Args:
      rows_in: rows of a batch of each bucket.
    """
    shares = np.bincount(bucket_of, weights, len(rows_in)) / rows_in
    start = np.random.default_rng([seed, _STREAM]).random()
    place = (start + step * _GOLDEN) % 1.0
    turn = np.searchsorted(np.cumsum(shares / shares.sum()), place, side="right")
    # the sum can miss 1 by rounding
    bucket = min(int(turn), int(np.flatnonzero(shares)[-1]))
    here = np.flatnonzero(bucket_of == bucket)
    chance = weights[here] / weights[here].sum()
    return here[rng.choice(len(here), size=int(rows_in[bucket]), p=chance)], bucket


def check_batch_tokens(batch_tokens: int, longest: int) -> None:
    """Refuses a step that does not hold its longest example."""
    if batch_tokens < longest:
        raise UserError(
            f"warmup.batch_tokens: found {batch_tokens}; write {longest} or more, the longest "
            "example"
        )


def short_traces(
    count: int, *, max_operand: int, told: int | None = None
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"], Int[np.ndarray, "B"]]:
    """Training problems of every level with their traces in the style *steps*.

    Args:
      count: rows of each level; its first training problems, again and again if they are fewer.
      told: budget in the prompts; None: they tell none.

    Returns:
      Tokens; which of them stand in the trace where a policy that redoes no line has no choice,
      all but the labels; and the level of each row.
    """
    rows, levels = [], np.repeat(np.arange(1, MAX_LEVEL + 1), count)
    for level in range(1, MAX_LEVEL + 1):
        for code in np.resize(split_codes(level, max_operand, "train"), count).tolist():
            problem = problem_of(code, level, max_operand)
            prompt, (trace, _), *tail = example(problem, [False] * level, False, told=told)
            lines = [trace[at : at + 6] for at in range(0, len(trace), 6)]
            judged = [part for line in lines for part in ((line[:1], False), (line[1:], True))]
            rows.append([prompt, *judged, *((ids, False) for ids, _ in tail)])
    return *padded(rows), levels


def warmup_batch(
    seed: int,
    step: int,
    total_steps: int,
    *,
    variant: Variant,
    batch_tokens: int,
    max_operand: int = 3,
    told: Int[np.ndarray, "n"] | None = None,
    practice: bool = False,
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """The supervised batch of one step: a function of the seed and the step alone.

    All rows of a batch are of one length bucket (`BUCKETS`, by the length before cutting), so that
    little is padding and only four shapes are compiled: batch_tokens // S rows of S tokens. Buckets
    take turns so that, over steps, examples appear with the probabilities of the stage. Problems
    are from the train split.

    Args:
      step: 0-based; steps from `total_steps` on stay in the last stage.
      batch_tokens: padding included, at least 80 (and what told budgets take).
      told: budgets, one of which each prompt tells, drawn evenly and whatever the trace, so that
        nothing is learned of them yet; None: prompts tell none.
      practice: of `PRACTICE` instead of the variant's stage.
    """
    # A budget in the prompt takes its mark and its digits.
    widths = np.array(BUCKETS) + (0 if told is None else 1 + len(str(np.max(told))))
    check_batch_tokens(batch_tokens, int(max(widths)))
    rng = np.random.default_rng([seed, _STREAM, step])
    done, stages = step / max(total_steps, 1), WARMUP[variant]
    stage = next((stage for stage in stages if done < stage.until), stages[-1])
    kinds = _kinds(PRACTICE if practice else stage)
    kind, bucket = draw_kinds(
        rng,
        seed,
        step,
        bucket_of=kinds["bucket"],
        weights=kinds["probability"],
        rows_in=batch_tokens // widths,
    )
    levels, count = kinds["level"][kind], len(kind)
    codes = np.zeros(count, np.int64)
    for level in np.unique(levels):
        row = np.flatnonzero(levels == level)
        pool = split_codes(int(level), max_operand, "train")
        codes[row] = pool[rng.integers(len(pool), size=len(row))]
    redo = _redo_lines(rng, levels, kinds["redone"][kind])
    cut = rng.random(count) < CUT_SHARE
    if told is not None:
        # A stream of its own: without budgets, batches are what they would be.
        told = np.random.default_rng([seed, _TOLD_STREAM, step]).choice(told, size=count)
    share, at_once = rng.random(count), kinds["at_once"][kind].tolist()
    rows = [
        example(
            problem_of(code, level, max_operand),
            redo[row].tolist(),
            at_once[row],
            kept=share[row] if cut[row] else None,
            told=None if told is None else int(told[row]),
        )
        for row, (code, level) in enumerate(zip(codes.tolist(), levels.tolist()))
    ]
    return padded(rows, int(widths[bucket]))
