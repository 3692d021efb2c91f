"""Subsets of one folder that hold the same questions, such as GSM8K's `main` and `socratic`.

Read together, every question would count as often as there are subsets.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from bacr_jax.errors import UserError, first_of
from bacr_jax.questions.tables import Record

# At the end of the name of one of several files of a table: train-00000-of-00002, test_3.
_SHARD = re.compile(r"[-_.]?\d+(?:-of-\d+)?$")
# Share of the smaller subset's questions that the other one holds, from which on both are one set
# told twice. Two subjects of MATH share less than a hundredth.
_SAME = 0.5
# Questions that two subsets may share by chance, whatever their size.
_BY_CHANCE = 1


# Folder, name without a shard's number, and suffix of the files of a subset.
Subset = tuple[Path, str, str]


def check_subsets(files: Mapping[Path, list[Record]], question: str, where: str) -> None:
    """Refuses files of different subsets that hold the same questions.

    Args:
      files: rows by their files, whose paths are relative to the folder.
      question: column of the question.
      where: the set as it is written, for the refusal.
    """
    texts: dict[Subset, set[str]] = {}
    members: dict[Subset, list[Path]] = {}
    for path, rows in files.items():
        subset = _subset_of(path, len(rows))
        values = [row.get(question) for row in rows]
        questions = {value.strip() for value in values if isinstance(value, str)}
        texts.setdefault(subset, set()).update(questions - {""})
        members.setdefault(subset, []).append(path)
    for (one, other), count in _shared_questions(texts).items():
        smaller = min(len(texts[one]), len(texts[other]))
        if count > _BY_CHANCE and count >= _SAME * smaller:
            choices = [_path_of(subset[0], members[subset], files) for subset in (one, other)]
            raise UserError(
                f"{where}: {choices[0]} and {choices[1]} hold the same questions ({count:,} of "
                f"{smaller:,}), which would count twice; choose one, for instance "
                f"{where.rstrip('/')}/{choices[0]}"
            )


def _shared_questions(texts: Mapping[Subset, set[str]]) -> Counter[tuple[Subset, Subset]]:
    """Counts the questions that two subsets share, by pairs that share any."""
    holders: dict[str, list[Subset]] = {}
    for subset, questions in texts.items():
        for question in questions:
            holders.setdefault(question, []).append(subset)
    return Counter(pair for subsets in holders.values() for pair in combinations(subsets, 2))


def _subset_of(path: Path, rows: int) -> Subset:
    """Returns the key of a file's subset; shards of one table have the same.

    A file with a single row, as the original MATH has them, is no table but belongs to its folder.
    """
    stem = _SHARD.sub("", path.stem) if rows > 1 else ""
    return path.parent, stem, path.suffix.lower()


def _path_of(folder: Path, members: Sequence[Path], files: Iterable[Path]) -> str:
    """Returns the path to write for a subset: its folder, or a file if the folder has others.

    `members`: the subset's files, in `folder`. `files`: those of all subsets.
    """
    others = [path for path in files if path not in members]
    parents = [one for one in (folder, *folder.parents) if one != Path()]
    # The outermost folder that holds this subset and no other.
    own = [one for one in parents if not any(path.is_relative_to(one) for path in others)]
    return own[-1].as_posix() if own else first_of([path.as_posix() for path in members])
