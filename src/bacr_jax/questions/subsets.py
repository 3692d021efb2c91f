"""Rejects folders with several versions of the same questions, such as GSM8K's two subsets.

If the subsets `main` and `socratic` of GSM8K were read together, every question would occur twice.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from bacr_jax.errors import UserError, first_of
from bacr_jax.questions.tables import Record

# Number of a shard at the end of a file's name, as in train-00000-of-00002 or test_3.
_SHARD = re.compile(r"[-_.]?\d+(?:-of-\d+)?$")
# Two subsets are versions of the same set if at least this share of the smaller subset's questions
# is in the other subset. Two subjects of MATH share less than a hundredth.
_SAME = 0.5
# Maximum number of questions that two subsets of any size may share by chance.
_BY_CHANCE = 1


# Key of a subset: folder, file name without a shard's number, and suffix of its files.
Subset = tuple[Path, str, str]


def check_subsets(files: Mapping[Path, list[Record]], question: str, where: str) -> None:
    """Checks that the files of different subsets have different questions.

    Args:
      files: rows of each file, keyed by its path relative to the folder of the set.
      question: column of the question.
      where: the set as the user wrote it, for the error message.

    Raises:
      UserError: two subsets have the same questions.
    """
    texts: dict[Subset, set[str]] = {}
    members: dict[Subset, list[Path]] = {}
    for path, rows in files.items():
        subset = _subset_of(path, len(rows))
        members.setdefault(subset, []).append(path)
        subset_texts = texts.setdefault(subset, set())
        for row in rows:
            value = row.get(question)
            if isinstance(value, str) and value.strip():
                subset_texts.add(value.strip())
    for (first, second), count in _shared_questions(texts).items():
        smaller = min(len(texts[first]), len(texts[second]))
        if count <= _BY_CHANCE or count < _SAME * smaller:
            continue
        first_path = _path_of(first[0], members[first], files)
        second_path = _path_of(second[0], members[second], files)
        raise UserError(
            f"{where}: {first_path} and {second_path} contain the same questions ({count:,} of "
            f"{smaller:,}), so these questions would be used twice; choose one of the two, for "
            f"instance {where.rstrip('/')}/{first_path}"
        )


def _shared_questions(texts: Mapping[Subset, set[str]]) -> Counter[tuple[Subset, Subset]]:
    """Counts the questions that two subsets share, for each pair of subsets that shares any."""
    subsets_by_question: dict[str, list[Subset]] = {}
    for subset, questions in texts.items():
        for question in questions:
            subsets_by_question.setdefault(question, []).append(subset)
    counts = Counter[tuple[Subset, Subset]]()
    for subsets in subsets_by_question.values():
        counts.update(combinations(subsets, 2))
    return counts


def _subset_of(path: Path, num_rows: int) -> Subset:
    """Returns the key of a file's subset, which is the same for all shards of a table.

    In a folder, all files with a single row belong to the same subset, because the original MATH
    has one file per question.
    """
    name = _SHARD.sub("", path.stem) if num_rows > 1 else ""
    return path.parent, name, path.suffix.lower()


def _path_of(folder: Path, members: Sequence[Path], files: Iterable[Path]) -> str:
    """Returns the path of a subset, which an error message suggests to the user.

    Args:
      folder: folder of the subset.
      members: files of the subset.
      files: files of all subsets.

    Returns:
      The outermost folder that contains only this subset. If there is none, the subset's files.
    """
    others = [path for path in files if path not in members]
    outermost = None
    for candidate in (folder, *folder.parents):
        if candidate == Path():
            continue
        if not any(path.is_relative_to(candidate) for path in others):
            outermost = candidate
    if outermost is not None:
        return outermost.as_posix()
    return first_of([path.as_posix() for path in members])
