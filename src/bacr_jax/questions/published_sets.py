"""Lists the public question sets: hub names, row counts, fingerprints and licences."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublishedSet:
    """A public question set.

    Attributes:
      hub: `hf://` address of the dataset.
      rows: number of rows of each split.
      licence: licence of the dataset.
      folders: accepted names of a folder with a copy of the dataset.
      fingerprints: `fingerprint` of the usable questions of each split. May lack some splits.
    """

    hub: str
    rows: dict[str, int]
    licence: str
    folders: tuple[str, ...]
    fingerprints: dict[str, str] = field(default_factory=dict)


PUBLISHED_SETS = {
    "gsm8k": PublishedSet(
        hub="hf://openai/gsm8k/main",
        rows={"train": 7473, "test": 1319},
        licence="MIT (openai/grade-school-math; arXiv 2110.14168)",
        folders=("gsm8k", "grade-school-math", "grade_school_math"),
        fingerprints={"train": "ce7d77b169655317", "test": "b88d6477309b457f"},
    ),
    "math": PublishedSet(
        hub="hf://EleutherAI/hendrycks_math",
        rows={"train": 7500, "test": 5000},
        licence="MIT (hendrycks/math; arXiv 2103.03874)",
        folders=("math", "MATH", "hendrycks_math"),
        fingerprints={"train": "fd40a9328eaf3f5f"},
    ),
    "math500": PublishedSet(
        hub="hf://HuggingFaceH4/MATH-500",
        rows={"test": 500},
        licence="MIT (openai/prm800k; arXiv 2305.20050)",
        folders=("math500", "MATH-500", "math_500"),
        fingerprints={"test": "badb339aeeb9bb27"},
    ),
    "aime24": PublishedSet(
        hub="hf://HuggingFaceH4/aime_2024",
        rows={"test": 30},
        licence="copyright of the Mathematical Association of America; for your own use",
        folders=("aime24", "aime_2024", "AIME_2024", "aime2024"),
    ),
    "minerva_math": PublishedSet(
        hub="hf://math-ai/minervamath",
        rows={"test": 272},
        licence="CC BY-NC-SA (MIT OpenCourseWare; arXiv 2206.14858)",
        folders=("minerva_math", "minervamath", "minerva"),
    ),
}


def fingerprint(questions: Iterable[str], answers: Iterable[str]) -> str:
    """Returns 16 hexadecimal digits of SHA-256 over the sorted pairs of question and gold answer.

    The order, columns and file format of the set do not matter.
    """
    pairs = sorted(f"{question}\0{answer}" for question, answer in zip(questions, answers))
    return hashlib.sha256("".join(f"{pair}\1" for pair in pairs).encode()).hexdigest()[:16]
