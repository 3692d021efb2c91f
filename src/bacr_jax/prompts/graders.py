"""Which grader a run has, shared by its processes, and grading while others are still sampled."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_grading import STRICT, ExactGrader, Grader, Verdict, VerifierGrader, load_verifier
from bacr_grading.pool import Poll
from bacr_grading.pooled import PooledGrader, Texts, check_request
from bacr_grading.verifier import packed
from bacr_jax.config import Config
from bacr_jax.config.derived import CORRECT, reward_shares
from bacr_jax.errors import UserError
from bacr_jax.parallel import processes
from bacr_jax.questions.loaders import REPEATING
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.questions.source import EXACT, RULES
from bacr_jax.types import Branches, Trunks


class SharedGrader:
    """Has the interface of a grader; all processes must call it at the same places.

    Text i of a call is graded by process i modulo their number, by nobody else, since deadlines
    make two graders differ.

    Attributes:
      own_seconds: what this process has spent on its share, in all.
    """

    def __init__(self, own: Any):
        self._own, self.own_seconds = own, 0.0

    def grade(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        poll: Poll = None,
        questions: Texts | None = None,
    ) -> list[Verdict]:
        """As `Grader.grade`, but `poll` is not called: processes wait for different times."""
        check_request(texts, references, mode)
        index, count = processes.place_among_all()
        share = slice(index, None, count)
        asked = None if questions is None else questions[share]
        began = time.perf_counter()
        mine = self._own.grade(texts[share], references[share], mode=mode, questions=asked)
        self.own_seconds += time.perf_counter() - began
        heard = processes.texts_of_all(json.dumps([dataclasses.astuple(v) for v in mine]))
        verdicts: list[Any] = [None] * len(texts)
        for start, text in enumerate(heard):
            verdicts[start::count] = [Verdict(*fields) for fields in json.loads(text)]
        return verdicts

    def counters(self) -> Mapping[str, int]:
        """The processes' counters, added up."""
        mine = self._own.counters()
        total = processes.summed(np.array(list(mine.values()), np.int32))
        return dict(zip(mine, total.tolist(), strict=True))

    @property
    def last_failure(self) -> str:
        """What a process's verifier said last when it gave no score; of several, the first's."""
        return next(filter(None, processes.texts_of_all(self._own.last_failure)), "")


# `rollout.generate` tells of rows that are done: their indices, trunks and branches.
OnRows = Callable[[Int[np.ndarray, "n"], Trunks, Branches], None]


def grade_early(
    grader: PooledGrader,
    texts_of: Callable[[Branches], list[list[str]]],
    answers: Texts,
    questions: Texts | None,
) -> OnRows:
    """Has a process's grader start on answers as rows end.

    It is later asked about all rows, its share of them if there are several processes.
    """

    def begin(rows: Int[np.ndarray, "n"], trunks: Trunks, branches: Branches) -> None:
        del trunks
        index, count = processes.place_among_all()
        mine = [
            (text, int(row))
            for row, of_row in zip(rows, texts_of(branches))
            for j, text in enumerate(of_row)
            # Where the text stands among those of all rows.
            if (int(row) * len(of_row) + j) % count == index
        ]
        grader.ahead(
            [text for text, _ in mine],
            [answers[row] for _, row in mine],
            mode=STRICT,
            questions=None if questions is None else [questions[row] for _, row in mine],
        )

    return begin


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


Encode = Callable[[str], list[int]] | None


def open_graders(
    config: Config, sets: Sequence[QuestionSet], encode: Encode = None
) -> dict[tuple[str, float], Any]:
    """Graders of sets by what they are graded by; a verifier of one's own is the same for all.

    `encode` gives the token ids of a text to verifiers of TRL's form.

    UserError: the file of a verifier or source can't be read.
    """
    kinds = {questions.graded_by for questions in sets}
    workers = _limits(config)
    if config.grader is not None:
        verifier = dataclasses.replace(
            load_verifier(config.grader), references=_reference_columns(config)
        )
        batch = config.grading.batch
        own = VerifierGrader(verifier, batch=batch, encode=encode, **workers)
        return dict.fromkeys(kinds, own)

    def grader(score: str, tolerance: float) -> Any:
        if score == EXACT:
            return ExactGrader()
        if score == RULES:
            return Grader(relative_tolerance=tolerance, **workers)
        asked = [both for found in sets if found.score == score for both in found.rows]
        verifier = load_verifier(f"{score}:score")
        source = asked[0][0]
        verifier = dataclasses.replace(
            verifier, of_rows=True, whole=source.whole, third_party=source.third_party
        )
        return VerifierGrader(verifier, rows=_packed_rows(asked, score), **workers)

    return {kind: grader(*kind) for kind in kinds}


def _packed_rows(asked: Sequence[Any], score: str) -> dict[tuple[str, str], str]:
    """Packed rows by what a grader is given of each: its question and its answer.

    UserError: the metadata of a file's row is another's, or can't be packed.
    """
    rows: dict[tuple[str, str], str] = {}
    first: dict[tuple[str, str], Any] = {}
    for source, row in asked:
        key = source.render(row), row.answer or ""
        rows[key] = packed(dataclasses.asdict(row))
        known = first.setdefault(key, row)
        other = known is not row and not _alike(known.metadata, row.metadata)
        if other and score != REPEATING:
            raise UserError(
                f"data: {row.id!r} of {source.name} asks what {known.id!r} asks, with other "
                "metadata; make the questions differ"
            )
    return rows


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if packed(one) == packed(other):
        return True
    # Arrays give no truth.
    with contextlib.suppress(ValueError):
        return bool(one == other)
    return False


def open_rewards(config: Config, encode: Encode = None) -> dict[str, VerifierGrader]:
    """Graders of the rewards beside correctness, by what reward.weights calls them.

    They are shown whole responses. UserError: the file of one can't be read.
    """

    def opened(name: str) -> VerifierGrader:
        verifier = load_verifier(name, "reward.weights")
        columns = _reference_columns(config)
        verifier = dataclasses.replace(verifier, of_response=True, references=columns)
        limits = _limits(config)
        return VerifierGrader(verifier, batch=config.grading.batch, encode=encode, **limits)

    return {name: opened(name) for name in reward_shares(config) if name != CORRECT}


def _reference_columns(config: Config) -> tuple[str, ...]:
    """The column of the references, by which functions of TRL's form ask for them."""
    column = config.data.answer_column
    return () if column is None else (column,)


def _limits(config: Config) -> dict[str, Any]:
    """Of the workers of each grader."""
    names = ("workers", "deadline", "memory_mb")
    return {name: getattr(config.grading, name) for name in names}


# Answers shown to a verifier and those that it gave no score, since it was opened.
Shown = tuple[int, int]


def shown_and_failed(grader: Any) -> Shown:
    """How many answers a verifier was shown, and to how many of them it gave no score."""
    now = grader.counters()
    return now["graded"] - now["no_answer"], now["failed"]


def failures(grader: Any, before: Mapping[str, int], name: str = "the verifier") -> Iterator[str]:
    """A line about answers to which a verifier gave no score; none if there are none.

    `before`: its counters at the start of what the line is about.
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
            f"WARNING: {name} gave no score to {since['failed']} of {since['graded']} "
            f"answers, which count as 0: {', '.join(reasons)} (the last: {grader.last_failure})"
        )
