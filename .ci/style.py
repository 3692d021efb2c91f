#!/usr/bin/env python3
"""Measures how dense the code of src is and how plain its text is, package by package.

    .ci/style.py             compare with the recorded figures; exit status 1 if one has risen
    .ci/style.py --list      also print the places of every figure over its limit
    .ci/style.py --record    record figures that have fallen; refuse if one has risen

A figure may be over its limit only as far as .ci/style.json records, and the recorded figure may
only fall. CONTRIBUTING.md has the rules behind the figures. Standard library only.
"""

import argparse
import ast
import collections
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("style.json")

FUNCTION_LINES, FILE_LINES = 80, 600
VAGUE_NAMES = frozenset(
    ("found", "own", "told", "said", "known", "made", "given", "kept", "shown", "whole", "place")
)
FIRST_WORDS = re.compile(r"(What|How|Who|Which|Whose|Of|Those|That|Where|Whether)\b")
# Words that hide the subject or the action of a sentence, by the name of their figure.
HABITS = {
    "words: say": r"\b(say|says|said|saying)\b",
    "words: tell": r"\b(tell|tells|told)\b",
    "words: that of": r"\b(that|those) of\b",
    "words: stand": r"\b(stands?|stood)\b",
    "words: beside": r"\bbesides?\b",
    "words: of its own": r"\bof (its|their|one's) own\b",
    "words: whoever": r"\b(whoever|whatever|whichever|somebody|nobody)\b",
    "words: is no": r"\b(is|are) no\b(?! longer)",
}
# Highest value of each figure; the word habits are per 1,000 words of docstrings and comments.
LIMITS = {
    "nodes per line": 5.5,
    "parallel assignments per 1,000 lines": 3.0,
    "assigned lambdas": 0.0,
    "vague names": 2.0,
    f"functions over {FUNCTION_LINES} lines": 0.0,
    f"files over {FILE_LINES} lines": 0.0,
    "odd first words (%)": 1.0,
    **dict.fromkeys(HABITS, 0.25),
}

Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Counts:
    """Counts over the files of a package.

    Attributes:
      code: lines that are neither blank, comment nor docstring.
      nodes: expressions and statements of the syntax trees.
      docstrings: number of docstrings.
      words: words of docstrings and comments.
      places: `file:line` of every finding, by the figure that counts it.
    """

    code: int = 0
    nodes: int = 0
    docstrings: int = 0
    words: int = 0
    places: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))

    def figures(self) -> dict[str, float]:
        """Returns every figure of `LIMITS`, rounded to two digits."""
        values: dict[str, float] = {}
        for name in LIMITS:
            count = len(self.places[name])
            if name == "nodes per line":
                values[name] = self.nodes / max(self.code, 1)
            elif name == "parallel assignments per 1,000 lines":
                values[name] = 1000 * count / max(self.code, 1)
            elif name == "odd first words (%)":
                values[name] = 100 * count / max(self.docstrings, 1)
            elif name in HABITS:
                values[name] = 1000 * count / max(self.words, 1)
            else:
                values[name] = count
        return {name: round(value, 2) for name, value in values.items()}


def measure_file(path: Path, name: str, counts: Counts) -> None:
    """Adds the counts of a Python file. `name` is the file's name in places."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings = list(docstrings_of(tree))
    inside = {line for scope, _ in docstrings for line in docstring_lines(scope)}
    lines = source.splitlines()
    counts.code += sum(
        1
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in inside
    )
    if len(lines) > FILE_LINES:
        counts.places[f"files over {FILE_LINES} lines"].append(f"{name}: {len(lines)}")
    for node in ast.walk(tree):
        counts.nodes += isinstance(node, ast.expr | ast.stmt)
        for figure, detail in findings(node):
            counts.places[figure].append(f"{name}:{node.lineno} {detail}".rstrip())

    for scope, text in docstrings:
        counts.docstrings += 1
        place = f"{name}:{getattr(scope, 'lineno', 1)}"
        if FIRST_WORDS.match(text):
            counts.places["odd first words (%)"].append(f"{place} {text.splitlines()[0]}")
        count_words(text, place, counts)
    for number, text in comments_of(path):
        count_words(text, f"{name}:{number}", counts)


def findings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the figures that count a node, each with a detail for its place."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"functions over {FUNCTION_LINES} lines", f"{node.name}: {length}"
    if not isinstance(node, ast.Assign):
        return
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield "parallel assignments per 1,000 lines", ""
    if isinstance(target, ast.Name) and isinstance(node.value, ast.Lambda):
        yield "assigned lambdas", target.id
    if isinstance(target, ast.Name) and target.id in VAGUE_NAMES:
        yield "vague names", target.id


def docstrings_of(tree: ast.Module) -> Iterator[tuple[Scope, str]]:
    """Yields every module, class and function that has a docstring, and the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Scope):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def docstring_lines(scope: Scope) -> range:
    """Returns the numbers of the lines that a docstring occupies."""
    statement = scope.body[0]
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def comments_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and the text of every comment of a file."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def count_words(text: str, place: str, counts: Counts) -> None:
    """Adds the words of a docstring or comment, and the habits in it, to the counts."""
    counts.words += len(text.split())
    for figure, pattern in HABITS.items():
        matches = len(re.findall(pattern, text, re.IGNORECASE))
        counts.places[figure] += [place] * matches


def measure(source: Path) -> dict[str, Counts]:
    """Measures every package of a source folder; packages without a Python file are left out."""
    packages: dict[str, Counts] = {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source)
        counts = packages.setdefault(name.parts[0], Counts())
        measure_file(path, name.as_posix(), counts)
    return packages


def risen(figures: dict[str, dict[str, float]], recorded: dict[str, dict[str, float]]) -> list[str]:
    """Returns a line for every figure that is over both its limit and its recorded value."""
    lines = []
    for package, values in figures.items():
        for name, value in values.items():
            allowed = max(LIMITS[name], recorded.get(package, {}).get(name, 0.0))
            if value > allowed:
                lines.append(f"{package}, {name}: {value:g}, allowed {allowed:g}")
    return lines


def lowered(
    figures: dict[str, dict[str, float]], recorded: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Returns the record of the figures over their limits, none of them above the old record."""
    record = {}
    for package, values in figures.items():
        old = recorded.get(package, {})
        over = {name: value for name, value in values.items() if value > LIMITS[name]}
        record[package] = {name: min(value, old.get(name, value)) for name, value in over.items()}
    return record


def print_table(packages: dict[str, Counts]) -> None:
    """Prints every figure by package, and marks figures over their limit with `!`."""
    figures = {package: counts.figures() for package, counts in packages.items()}
    print(f"{'':38}{'limit':>7}" + "".join(f"{package[5:]:>9}" for package in figures))
    for name, limit in LIMITS.items():
        values = [figures[package][name] for package in figures]
        cells = "".join(f"{value:>8g}{'!' if value > limit else ' '}" for value in values)
        print(f"{name:38}{limit:>7g}{cells}")


def print_places(packages: dict[str, Counts]) -> None:
    """Prints the places of every figure that is over its limit."""
    for package, counts in packages.items():
        for name, value in counts.figures().items():
            if value > LIMITS[name]:
                print(f"\n{package}, {name}: {value:g}, limit {LIMITS[name]:g}")
                for place in counts.places[name]:
                    print(f"  {place}")


def main() -> int:
    """Compares the figures of src with the record; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print places over their limit")
    parser.add_argument("--record", action="store_true", help="record figures that have fallen")
    options = parser.parse_args()

    packages = measure(ROOT / "src")
    figures = {package: counts.figures() for package, counts in packages.items()}
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    print_table(packages)
    if options.list:
        print_places(packages)
    problems = risen(figures, recorded) if recorded else []
    for line in problems:
        print(f"has risen: {line}; .ci/style.py --list shows places")
    if options.record and not problems:
        RECORD.write_text(json.dumps(lowered(figures, recorded), indent=1, sort_keys=True) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
