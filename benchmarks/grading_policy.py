r"""Counts correct answers that the strict mode rejects, and wrong answers that it accepts.

    python benchmarks/grading_policy.py [--rows 2000] [--seed 0]

The correct answers come from MATH. Each is graded against its reference as the full reference
solution, and in the spellings of `SPELLINGS`. The wrong answers are the same number of pairs. Half
are references with one number, letter or sign changed. The other half are pairs of different
references of the same form, a quarter of all pairs plain numbers and a quarter other forms. The
script prints every row that is graded incorrectly, for wrong pairs in both modes. The last line is
one JSON object. MATH is read from the folder BACR_SHARED_DATA (default ../shared/data next to the
project).
"""

import argparse
import collections
import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bacr_grading import Grader, parse_reference

DEADLINE = 30.0
_PLAIN = re.compile(r"-?[\d,.]+|-?\\d?frac\{\d+\}\{\d+\}")
_CHANGEABLE = re.compile(r"\d+|(?<![A-Za-z\\])[a-zA-Z](?![A-Za-z])|[-+]")
_RELATION = re.compile(r"[=<>,]|\\[lg]e|\\in|text")

SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "no sizes": lambda text: text.replace("\\left", "").replace("\\right", ""),
    "a/b": lambda text: re.sub(r"^(-?)\\d?frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", text),
    "\\dfrac": lambda text: text.replace("\\frac", "\\dfrac"),
    "blanks": lambda text: text.replace("+", " + ").replace("(", "( ").replace(")", " )"),
    "x =": lambda text: text if _RELATION.search(text) else f"x = {text}",
    "\\sqrt x": lambda text: re.sub(r"\\sqrt\{(\w)\}", r"\\sqrt \1", text),
    "dollars": lambda text: f"${text}$",
    "no unit": lambda text: re.sub(r"^([-\d./\\a-z{}]*\d\}?)\s*\\text\{[^{}]*\}$", r"\1", text),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=2000, help="problems, and wrong pairs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    path = Path(os.environ.get("BACR_SHARED_DATA", root / "../shared/data")) / "math/train.jsonl"
    if not path.exists():
        print(f"{path}: not found; set BACR_SHARED_DATA to the folder that holds math/train.jsonl")
        return 2
    solutions = [json.loads(line)["solution"] for line in path.read_text("utf-8").splitlines()]
    rng = random.Random(options.seed)
    with Grader(workers=2, deadline=DEADLINE) as grader:
        result = refused_right(grader, solutions, rng, options.rows)
        result |= accepted_wrong(grader, solutions, rng, options.rows)
        result["timeouts"] = grader.counters()["timeouts"]
    print(json.dumps(result))
    return 0


def refused_right(
    grader: Grader, solutions: list[str], rng: random.Random, rows: int
) -> dict[str, int]:
    """Grades correct answers, and counts those that the strict mode rejects.

    The answers are full solutions and references in other spellings.
    """
    usable = [solution for solution in solutions if parse_reference(solution)]
    texts, references, names = [], [], []
    for solution in rng.sample(usable, min(rows, len(usable))):
        reference = parse_reference(solution).text
        spellings = {name: f"\\boxed{{{spell(reference)}}}" for name, spell in SPELLINGS.items()}
        for name, text in {"solution": solution, **spellings}.items():
            texts.append(text)
            references.append(reference)
            names.append(name)
    verdicts = grader.grade(texts, references)
    refused = collections.Counter()
    for name, text, reference, verdict in zip(names, texts, references, verdicts, strict=True):
        if not verdict.correct:
            refused["solutions" if name == "solution" else "spellings"] += 1
            print(f"  refused ({name}): {text[-120:]!r} reference {reference!r}")
    graded = collections.Counter("solutions" if n == "solution" else "spellings" for n in names)
    return {
        "solutions": graded["solutions"],
        "solutions_refused": refused["solutions"],
        "spellings": graded["spellings"],
        "spellings_refused": refused["spellings"],
    }


def accepted_wrong(
    grader: Grader, solutions: list[str], rng: random.Random, rows: int
) -> dict[str, int]:
    """Grades pairs with a wrong answer, and counts the accepted ones in each mode."""
    pairs = wrong_pairs(solutions, rng, rows)
    result = {"wrong_pairs": len(pairs)}
    for mode in ("strict", "lenient"):
        texts = [f"\\boxed{{{answer}}}" for answer, _ in pairs]
        verdicts = grader.grade(texts, [reference for _, reference in pairs], mode=mode)
        for (answer, reference), verdict in zip(pairs, verdicts, strict=True):
            if verdict.correct:
                print(f"  accepted ({mode}): {answer!r} reference {reference!r}")
        result[f"accepted_{mode}"] = sum(bool(verdict.correct) for verdict in verdicts)
    return result


def wrong_pairs(solutions: list[str], rng: random.Random, rows: int) -> list[tuple[str, str]]:
    """Returns pairs of a wrong answer and a reference of the same form."""
    parsed = [parse_reference(solution) for solution in solutions]
    references = sorted({reference.text for reference in parsed if reference})
    by_form: dict[str, list[str]] = collections.defaultdict(list)
    for text in references:
        by_form[_form(text)].append(text)
    crossed = [text for text in references if len(by_form[_form(text)]) > 1]
    numbers = [text for text in crossed if _PLAIN.fullmatch(text)]
    others = [text for text in crossed if not _PLAIN.fullmatch(text)]
    pairs = []
    for source in [numbers] * (rows // 4) + [others] * (rows // 4):
        reference = rng.choice(source)
        twins = [text for text in by_form[_form(reference)] if text != reference]
        pairs.append((rng.choice(twins), reference))
    changeable = [text for text in others if _CHANGEABLE.search(text)]
    while len(pairs) < rows:
        reference = rng.choice(changeable)
        pairs.append((_changed(reference, rng), reference))
    return pairs


def _form(text: str) -> str:
    return re.sub(r"\d+", "N", text)


def _changed(text: str, rng: random.Random) -> str:
    """Returns the text with one number, the case of one letter, or one sign changed."""
    place = rng.choice(list(_CHANGEABLE.finditer(text)))
    found = place.group()
    if found.isdigit():
        other = str(int(found) + rng.choice((1, 2, 10)))
    else:
        other = {"+": "-", "-": "+"}.get(found, found.swapcase())
    return text[: place.start()] + other + text[place.end() :]


if __name__ == "__main__":
    sys.exit(main())
