"""Measures the speed of grading, and its agreement with plain math-verify.

    python benchmarks/grading.py [--rows 2000] [--record FILE]

There are two measurements:

* Numbers: completions that end in a number, eight per reference, graded in this process on one core
  with empty caches.
* Mixed: answers from MATH, graded with two workers, and by plain math-verify in this process. A
  third are full reference solutions, a third are rewritten answers, and a third are answers of the
  same form to another problem. For each disagreement, the script prints the pair and the rule of
  docs/grading.md that explains it.

The last line is one JSON object. MATH is read from the folder BACR_SHARED_DATA (default
../shared/data next to the project).
"""

import argparse
import json
import logging
import os
import random
import re
import sys
import time
from pathlib import Path

import record
from bacr_grading import Grader, parse_reference
from bacr_grading.compare import bases_clash
from bacr_grading.extract import reference_answer
from bacr_grading.guards import refuse
from bacr_grading.parsed_answer import read

_THINKING = "Let us add what both of them have and divide by the number of days. " * 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=2000, help="rows of the mixed batch")
    parser.add_argument("--numbers", type=int, default=48_000, help="rows of the number batch")
    record.add_option(parser)
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    data = Path(os.environ.get("BACR_SHARED_DATA", root / "../shared/data"))
    path = data / "math/train.jsonl"
    if not path.exists():
        print(f"{path}: not found; set BACR_SHARED_DATA to the folder that holds math/train.jsonl")
        return 2
    # Reports the fastest of three batches, because other load on the machine only slows them down.
    rates = [numbers_per_second(options.numbers, seed) for seed in range(3)]
    result = {"numbers_per_s": round(max(rates))}
    print(f"numbers: {result['numbers_per_s']:,} verdicts/s")
    ours_seconds, theirs_seconds, disagreements = mixed(path, options.rows)
    speedup = round(theirs_seconds / ours_seconds, 2)
    measurements = {
        "numbers": record.measurement(rates, "verdicts/s", "higher"),
        **record.seconds(
            {"bacr_grading": [ours_seconds], "math-verify": [theirs_seconds]}, "mixed"
        ),
    }
    ratios = {"mixed_vs_math_verify": ("mixed, math-verify", "mixed, bacr_grading")}
    record.write(options, measurements, ratios)
    print(json.dumps(result | {"mixed_vs_math_verify": speedup, "disagreements": disagreements}))
    return 0


def numbers_per_second(rows: int, seed: int) -> float:
    rng = random.Random(seed)

    def number() -> str:
        return rng.choice(
            (
                str(rng.randint(0, 99_999)),
                str(-rng.randint(0, 999)),
                f"{rng.randint(1, 999)}.{rng.randint(0, 99)}",
                f"{rng.randint(1, 99)},{rng.randint(100, 999)}",
                f"\\frac{{{rng.randint(1, 99)}}}{{{rng.randint(2, 99)}}}",
            )
        )

    texts, references = [], []
    for _ in range(rows // 8):
        reference = number()
        for _ in range(8):
            answer = reference if rng.random() < 0.5 else number()
            texts.append(f"{_THINKING}\n</think>\n<answer>{answer}</answer>")
            references.append(reference)
    with Grader(workers=1) as grader:
        start = time.perf_counter()
        verdicts = grader.grade(texts, references)
        seconds = time.perf_counter() - start
        assert not grader.worker_pids, "numbers must not need a worker"
    # Checks that only the fast paths were used. A fraction that is not in lowest terms is rejected
    # as a string.
    assert {verdict.path for verdict in verdicts} <= {"number", "string"}
    return len(texts) / seconds


def mixed(path: Path, rows: int) -> tuple[float, float, int]:
    """Returns our seconds, the seconds of plain math-verify, and the number of disagreements."""
    texts, references = mixed_batch(path, rows)
    with Grader(workers=2) as grader:
        # Starts the workers before the measurement, because a run only starts them once.
        grader.grade(["\\boxed{x+1}", "\\boxed{x+2}"], ["1+x", "2+x"])
        start = time.perf_counter()
        verdicts = grader.grade(texts, references)
        ours_seconds = time.perf_counter() - start
        print(f"mixed: {len(texts)} rows in {ours_seconds:.1f} s; {grader.counters()}")
    start = time.perf_counter()
    theirs = plain_math_verify(texts, references)
    theirs_seconds = time.perf_counter() - start
    print(f"plain math-verify: {theirs_seconds:.1f} s")
    differing = [row for row in range(len(texts)) if verdicts[row].correct != theirs[row]]
    for row in differing:
        pred, ours = reference_answer(texts[row]), verdicts[row].correct
        late = "our deadline passed, on a machine that does other work too"
        why = late if verdicts[row].timed_out else explain(pred, references[row], ours)
        print(
            f"  disagreement: pred {pred!r} reference {references[row]!r} ours {ours} "
            f"math-verify {theirs[row]}: {why}"
        )
    return ours_seconds, theirs_seconds, len(differing)


def mixed_batch(path: Path, rows: int) -> tuple[list[str], list[str]]:
    """Returns texts and references from MATH, a third of each kind.

    The kinds are a full solution, a rewritten answer, and the answer to another problem.
    """
    rng = random.Random(1)
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    parsed = [(row["solution"], parse_reference(row["solution"])) for row in problems]
    usable = [(solution, reference) for solution, reference in parsed if reference is not None]
    rng.shuffle(usable)
    by_kind: dict[str, list[str]] = {}
    for _, reference in usable:
        by_kind.setdefault(reference.kind, []).append(reference.text)
    texts, references = [], []
    for row, (solution, reference) in enumerate(usable[:rows]):
        if row % 3 == 0:
            texts.append(solution)
        elif row % 3 == 1:
            texts.append(f"So the answer is $\\boxed{{{rewrite(reference.text)}}}$.")
        else:
            texts.append(f"So the answer is $\\boxed{{{rng.choice(by_kind[reference.kind])}}}$.")
        references.append(reference.text)
    return texts, references


def rewrite(answer: str) -> str:
    """Returns another LaTeX spelling of the same answer."""
    answer = answer.replace("\\dfrac", "\\frac").replace("\\left", "").replace("\\right", "")
    answer = re.sub(r"\\sqrt\{(\w)\}", r"\\sqrt \1", answer)
    return re.sub(r"^(-?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", answer)


def plain_math_verify(texts: list[str], references: list[str]) -> list[bool]:
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    return [
        verify(parse(f"\\boxed{{{r}}}"), parse(t)) for t, r in zip(texts, references, strict=True)
    ]


def explain(pred: str, reference: str, ours: bool) -> str:
    """Returns the rule of docs/grading.md that explains a disagreement with math-verify."""
    left, right = read(pred), read(reference)
    if bases_clash(left.key, right.key) or left.based or right.based:
        return "base subscripts are compared"
    if refuse(left.text) or refuse(right.text):
        return "refused by a guard"
    if left.words or right.words:
        return "words are compared as text"
    if left.key == right.key:
        return "the same spelling is the same answer; math-verify could not parse it"
    if left.number and right.number:
        return "numbers, percent signs and units are read by our rules"
    if left.items and right.items:
        return "lists are compared item by item"
    return "a box joined with its neighbours, or spelling that only one of the two reads"


if __name__ == "__main__":
    sys.exit(main())
