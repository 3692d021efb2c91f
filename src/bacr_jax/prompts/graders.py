"""Opens the graders of a run, distributes grading over processes, and grades during sampling."""

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
from bacr_jax.config import GradingConfig
from bacr_jax.config.settings import GraderSettings, resolve
from bacr_jax.errors import UserError
from bacr_jax.parallel import processes
from bacr_jax.questions.loaders import REPEATING
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.questions.source import EXACT, RULES
from bacr_jax.types import Branches, Trunks


class SharedGrader:
    """A grader whose calls are distributed over all processes.

    All processes must make the same calls. Text i of a call is only graded by process i modulo the
    number of processes. Each text is graded once, because timeouts could lead to different verdicts
    on different processes.

    Attributes:
      own_seconds: total time in seconds that this process has spent on its share.
    """

    def __init__(self, own: Any):
        """Wraps the local grader of this process."""
        self._own = own
        self.own_seconds = 0.0

    def grade(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        poll: Poll = None,
        questions: Texts | None = None,
    ) -> list[Verdict]:
        """Grades texts like `Grader.grade`, but never calls `poll`.

        Waiting times differ between processes, so `poll` could interrupt only some of them.
        """
        check_request(texts, references, mode)
        index, count = processes.rank_among_all()
        share = slice(index, None, count)
        shared_questions = None if questions is None else questions[share]
        start_time = time.perf_counter()
        own_verdicts = self._own.grade(
            texts[share], references[share], mode=mode, questions=shared_questions
        )
        self.own_seconds += time.perf_counter() - start_time
        message = json.dumps([dataclasses.astuple(verdict) for verdict in own_verdicts])
        verdicts: list[Any] = [None] * len(texts)
        for start, text in enumerate(processes.texts_of_all(message)):
            verdicts[start::count] = [Verdict(*fields) for fields in json.loads(text)]
        return verdicts

    def counters(self) -> Mapping[str, int]:
        """Returns the counters, summed over all processes."""
        own_counters = self._own.counters()
        totals = processes.summed(np.array(list(own_counters.values()), np.int32))
        return dict(zip(own_counters, totals.tolist(), strict=True))

    @property
    def last_failure(self) -> str:
        """Returns the last failure of the first process that had one, or an empty string."""
        for failure in processes.texts_of_all(self._own.last_failure):
            if failure:
                return failure
        return ""


def share_grading(grader: Any) -> Any:
    """Wraps a grader in `SharedGrader` if the run has several processes."""
    return SharedGrader(grader) if processes.several() else grader


def grade_cuts(
    grader: Any, texts: Sequence[Texts], answers: Texts, questions: Texts | None, poll: Poll
) -> tuple[np.ndarray, np.ndarray]:
    """Grades M answers of each of B questions (rows) against the question's reference answer.

    Args:
      grader: grader of the answers.
      texts: M answers of each row, [B][M].
      answers: reference answer of each row.
      questions: question of each row for user-defined verifiers, or None if it is not needed.
      poll: callback that is called while waiting for the grader.

    Returns:
      (scores, verdicts), both [B, M]. The float32 scores are `Verdict.correct`, 1 if correct.
    """
    num_rows = len(texts)
    num_cuts = len(texts[0])
    flat_texts = [text for row in texts for text in row]
    references = [answer for answer in answers for _ in range(num_cuts)]
    flat_questions = None
    if questions is not None:
        flat_questions = [question for question in questions for _ in range(num_cuts)]
    verdicts = grader.grade(
        flat_texts, references, mode=STRICT, poll=poll, questions=flat_questions
    )
    outcomes = np.array([verdict.correct for verdict in verdicts], np.float32)
    # Assigned to an object array, because np.array would inspect the contents of the verdicts.
    verdict_array = np.empty(len(verdicts), object)
    verdict_array[:] = verdicts
    return outcomes.reshape(num_rows, num_cuts), verdict_array.reshape(num_rows, num_cuts)


# Callback of `rollout.generate` for finished rows. Arguments: row indices, prompts with thinking
# (trunks) and answers (branches).
OnRows = Callable[[Int[np.ndarray, "n"], Trunks, Branches], None]


def grade_early(
    grader: PooledGrader,
    texts_of: Callable[[Trunks, Branches], list[list[str]]],
    answers: Texts,
    questions: Texts | None,
) -> OnRows:
    """Returns a callback that starts grading the answers of a trace as soon as it is finished.

    The call that later grades all rows of the batch reuses these results. With several processes,
    each process only grades its share of the texts (see `SharedGrader`).

    Args:
      texts_of: function that returns the texts [n][M] to grade, from the prompts with thinking
        (trunks) and the answers (branches) of n rows.
      answers: reference answer of every row of the batch.
      questions: question of every row for user-defined verifiers, or None if it is not needed.
    """

    def begin(rows: Int[np.ndarray, "n"], trunks: Trunks, branches: Branches) -> None:
        process_index, num_processes = processes.rank_among_all()
        texts: list[str] = []
        text_rows: list[int] = []
        for row, row_texts in zip(np.asarray(rows).tolist(), texts_of(trunks, branches)):
            for cut, text in enumerate(row_texts):
                # Index of the text in the later call that grades all rows.
                text_index = row * len(row_texts) + cut
                if text_index % num_processes == process_index:
                    texts.append(text)
                    text_rows.append(row)
        grader.ahead(
            texts,
            [answers[row] for row in text_rows],
            mode=STRICT,
            questions=None if questions is None else [questions[row] for row in text_rows],
        )

    return begin


# Warning text for each reason why a verifier failed to score an answer.
_REASONS = {
    "late": "timed out",
    "died": "crashed their worker process",
    "memory": "ran out of memory",
    "raised": "raised an exception",
    "text": "got a score that is not a number",
    "nan": "got the score NaN",
    "range": "got a score outside [0, 1]",
    "length": "were in a batch with too few or too many scores",
}


Encode = Callable[[str], list[int]] | None


def open_graders(
    settings: GraderSettings | Any, sets: Sequence[QuestionSet], encode: Encode = None
) -> dict[tuple[str, float], Any]:
    """Opens the graders of question sets.

    A user-defined verifier (`settings.verifier`) replaces the graders of all sets.

    Args:
      settings: settings of the graders, or the config of a run.
      sets: question sets. Sets with equal `graded_by` share a grader.
      encode: function that returns the token ids of a text, for verifiers with TRL's reward
        function signature.

    Returns:
      Graders, keyed by `graded_by`.

    Raises:
      UserError: If the file of a verifier or of a data source cannot be read.
    """
    if not isinstance(settings, GraderSettings):
        settings = resolve(settings).task.grader
    kinds = {questions.graded_by for questions in sets}
    if settings.verifier is not None:
        grader = _open_verifier(settings, encode)
        return dict.fromkeys(kinds, grader)
    graders: dict[tuple[str, float], Any] = {}
    for score, tolerance in kinds:
        if score == EXACT:
            graders[score, tolerance] = ExactGrader()
        elif score == RULES:
            graders[score, tolerance] = Grader(
                relative_tolerance=tolerance, **_limits(settings.processes)
            )
        else:
            graders[score, tolerance] = _open_source_scorer(settings.processes, sets, score)
    return graders


def _open_verifier(settings: GraderSettings, encode: Encode) -> VerifierGrader:
    """Opens the user-defined verifier of answers (`settings.verifier`)."""
    assert settings.verifier is not None
    verifier = dataclasses.replace(
        load_verifier(settings.verifier), references=settings.reference_columns
    )
    limits = settings.processes
    return VerifierGrader(verifier, batch=limits.batch, encode=encode, **_limits(limits))


def _open_source_scorer(
    limits: GradingConfig, sets: Sequence[QuestionSet], score: str
) -> VerifierGrader:
    """Opens the scorer that a data source provides for answers to its questions.

    Args:
      score: name of the source (`QuestionSet.score`).
    """
    rows = [row for questions in sets if questions.score == score for row in questions.rows]
    source, _ = rows[0]
    verifier = dataclasses.replace(
        load_verifier(f"{score}:score"),
        of_rows=True,
        whole=source.whole,
        of_response=source.of_response,
        third_party=source.third_party,
    )
    return VerifierGrader(verifier, rows=_packed_rows(rows, score), **_limits(limits))


def _packed_rows(rows: Sequence[Any], score: str) -> dict[tuple[str, str], str]:
    """Serializes the rows of data sources, keyed by question and answer.

    A grader only receives questions and answers, so it needs these keys to look up a row.

    Args:
      rows: pairs of a source and one of its rows.
      score: name of the source.

    Raises:
      UserError: If two rows have the same question and answer but different metadata, or if
        metadata cannot be serialized.
    """
    packed_rows: dict[tuple[str, str], str] = {}
    first_rows: dict[tuple[str, str], Any] = {}
    for source, row in rows:
        key = (source.render(row), row.answer or "")
        packed_rows[key] = packed(dataclasses.asdict(row))
        first = first_rows.setdefault(key, row)
        if score == REPEATING or first is row:
            continue
        if not _equal_metadata(first.metadata, row.metadata):
            raise UserError(
                f"data: {row.id!r} of {source.name} has the same question and answer as "
                f"{first.id!r}, but different metadata, so a response can't be assigned to one of "
                "them; change one of the questions"
            )
    return packed_rows


def _equal_metadata(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if the metadata of two rows are equal, either serialized or as objects."""
    if packed(one) == packed(other):
        return True
    # Comparing NumPy arrays yields an array, whose truth value raises ValueError.
    with contextlib.suppress(ValueError):
        return bool(one == other)
    return False


def open_rewards(settings: GraderSettings, encode: Encode = None) -> dict[str, VerifierGrader]:
    """Opens the graders of all rewards except correctness, keyed by their names in reward.weights.

    These graders receive full responses instead of answers.

    Raises:
      UserError: If the file of a reward cannot be read.
    """
    rewards = {}
    limits = settings.processes
    for name in settings.rewards:
        verifier = dataclasses.replace(
            load_verifier(name, "reward.weights"),
            of_response=True,
            references=settings.reference_columns,
        )
        rewards[name] = VerifierGrader(
            verifier, batch=limits.batch, encode=encode, **_limits(limits)
        )
    return rewards


def _limits(grading: GradingConfig) -> dict[str, Any]:
    """Returns the settings of a grader's worker processes: number, time and memory limits."""
    names = ("workers", "deadline", "memory_mb")
    return {name: getattr(grading, name) for name in names}


# Number of answers that a verifier has received, and number of those it failed to score.
Shown = tuple[int, int]


def shown_and_failed(grader: Any) -> Shown:
    """Returns (number of answers that a verifier received, number that it failed to score)."""
    counters = grader.counters()
    return counters["graded"] - counters["no_answer"], counters["failed"]


def failures(grader: Any, before: Mapping[str, int], name: str = "the verifier") -> Iterator[str]:
    """Yields a warning if a verifier failed to score some answers.

    Args:
      before: counters of the verifier at the start of the period to report.
      name: name of the verifier in the warning.
    """
    counters = grader.counters()
    since = {key: count - before.get(key, 0) for key, count in counters.items()}
    if not since.get("failed"):
        return
    reasons = []
    for reason, words in _REASONS.items():
        count = since[f"failed_{reason}"]
        if count:
            reasons.append(f"{count} {words}")
    yield (
        f"WARNING: {name} returned no score for {since['failed']} of {since['graded']} answers, "
        f"which count as 0: {', '.join(reasons)} (last error: {grader.last_failure})"
    )
