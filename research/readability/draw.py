"""Draws docstrings, comments and error messages of several code bases for a blind rating.

    python draw.py SEED TEXTS.jsonl KEY.json ours=DIR trl=DIR rlax=DIR ...

TEXTS.jsonl contains the texts, shuffled and without labels, for the readers. KEY.json maps the
number of a text to its code base, kind and place. Half of the texts come from `ours`, and the other
half in equal parts from the other code bases.
"""

import argparse
import ast
import json
import random
import tokenize
from pathlib import Path
from typing import NamedTuple

# Number of texts of each kind from `ours`, and from the other code bases together.
COUNTS = {"docstring": 36, "comment": 12, "error message": 12}
MIN_CHARS = 25
MAX_CHARS = 900
_NO_PROSE = ("noqa", "Copyright", "License", "pylint", "type: ignore")


class Text(NamedTuple):
    """A text with the code that a reader sees together with it."""

    kind: str
    shown: str
    place: str


def docstrings(path: Path, tree: ast.Module) -> list[Text]:
    """Returns the docstrings of classes and functions, below their signatures."""
    texts = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or not MIN_CHARS < len(docstring) < MAX_CHARS:
            continue
        if isinstance(node, ast.ClassDef):
            signature = f"class {node.name}"
        else:
            signature = f"def {node.name}({ast.unparse(node.args)})"
        texts.append(Text("docstring", f"{signature[:300]}\n{docstring}", f"{path}:{node.lineno}"))
    return texts


def comments(path: Path, source: str) -> list[Text]:
    """Returns whole blocks of comment lines, with the three lines of code that follow."""
    lines = source.splitlines()
    rows = {}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            row = token.start[0]
            if token.type == tokenize.COMMENT and lines[row - 1].lstrip().startswith("#"):
                rows[row] = token.string
    texts = []
    for row in rows:
        # The first 20 lines of a file often contain its licence.
        if row - 1 in rows or row <= 20:
            continue
        end = row
        while end + 1 in rows:
            end += 1
        block = "\n".join(rows[number] for number in range(row, end + 1))
        if MIN_CHARS < len(block) < MAX_CHARS and not any(word in block for word in _NO_PROSE):
            following = "\n".join(lines[end : end + 3])
            texts.append(Text("comment", f"{block}\n{following}", f"{path}:{row}"))
    return texts


def error_messages(path: Path, tree: ast.Module) -> list[Text]:
    """Returns raise statements whose exception has a message of at least five words."""
    texts = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        arguments = node.exc.args
        if not arguments or not isinstance(arguments[0], ast.Constant | ast.JoinedStr):
            continue
        parts = [part for part in ast.walk(arguments[0]) if isinstance(part, ast.Constant)]
        words = " ".join(part.value for part in parts if isinstance(part.value, str)).split()
        if len(words) >= 5:
            shown = f"raise {ast.unparse(node.exc)}"
            texts.append(Text("error message", shown, f"{path}:{node.lineno}"))
    return texts


def texts_of(folder: Path) -> list[Text]:
    """Returns all texts of the Python files below a folder, except for its tests."""
    texts = []
    for path in sorted(folder.rglob("*.py")):
        if "test" in path.name or "/tests/" in str(path):
            continue
        try:
            source = path.read_text()
            tree = ast.parse(source)
            comment_texts = comments(path, source)
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue
        texts += [*docstrings(path, tree), *comment_texts, *error_messages(path, tree)]
    return texts


def draw(folders: dict[str, Path], seed: int) -> list[tuple[str, Text]]:
    """Draws texts and shuffles them.

    Args:
      folders: folder of each code base, by its name. One name is "ours".
      seed: seed of the random numbers.

    Returns:
      Pairs of the name of a code base and a text.
    """
    rng = random.Random(seed)
    others = [name for name in folders if name != "ours"]
    chosen = []
    for name, folder in folders.items():
        texts = texts_of(folder)
        for kind, total in COUNTS.items():
            count = total if name == "ours" else total // len(others)
            of_kind = [text for text in texts if text.kind == kind]
            picked = rng.sample(of_kind, min(count, len(of_kind)))
            chosen += [(name, text) for text in picked]
    rng.shuffle(chosen)
    return chosen


def main() -> None:
    """Writes the texts and their key."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("texts", type=Path)
    parser.add_argument("key", type=Path)
    parser.add_argument("folders", nargs="+", metavar="NAME=DIR")
    arguments = parser.parse_args()
    folders = {}
    for pair in arguments.folders:
        name, _, folder = pair.partition("=")
        folders[name] = Path(folder)
    chosen = draw(folders, arguments.seed)
    with arguments.texts.open("w") as file:
        for number, (_, text) in enumerate(chosen):
            file.write(json.dumps({"id": number, "kind": text.kind, "text": text.shown}) + "\n")
    key = {str(i): [name, text.kind, text.place] for i, (name, text) in enumerate(chosen)}
    arguments.key.write_text(json.dumps(key))


if __name__ == "__main__":
    main()
