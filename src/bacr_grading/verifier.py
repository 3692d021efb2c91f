"""Grades answers with a user's verifier, a Python function that runs in killable worker processes.

The config key `grader: FILE.py:function` selects a function(question, answer_text, gold) that
returns a score in [0, 1]. Two other signatures are supported. A function whose name ends with
`_batch` takes three lists and returns a list of scores. A TRL reward function takes `completions`
and further dataset columns as keyword arguments. docs/own-grader.md documents the rules for
verifiers.

If a verifier fails on an answer, the answer gets no score and the failure is counted. The same code
runs scorers of third-party packages, but in sandboxed processes.
"""

import ast
import base64
import collections
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bacr_grading import confinement, verifier_worker
from bacr_grading.extract import after_thinking, last_box, last_tag
from bacr_grading.judge import EXTRACTED_CHARS, MAX_CHARS, STRICT, Verdict
from bacr_grading.pool import Poll, Program, WorkerPool
from bacr_grading.pooled import PooledGrader, Texts, check_request
from bacr_grading.verifier_spec import grader_problem
from bacr_io.errors import UserError
from bacr_io.files import nearest, read_file

# Reasons why an answer gets no score. Each has a counter, such as "failed_late".
FAULTS = ("late", "died", *verifier_worker.FAULTS)
# Values of `Verdict.path`, which tells how an answer was graded: with a score of the verifier, or
# not at all because the verifier failed.
SCORED = "verifier"
FAILED = "failed"
# Ending of the names of functions that score several answers at once.
BATCH_SUFFIX = "_batch"
# Maximum size in bytes of a verifier's file, because its source is sent to every worker.
MOST_SOURCE = 1 << 20
# Environment variables that are passed on to the scorer of a third-party package. They contain
# paths and locale settings, but no tokens or API keys.
PASSED_ON = (
    *("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUTF8", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"),
    *("HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
)
# Environment variables that disable the threads of linear algebra libraries. Threads do not survive
# a fork, so a forked process that waits for them would hang.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
# Maximum number of answers that a forked process scores.
FORK_ROWS = 16
# Additional seconds per batch for forking and for the scorer's `prepare` function, on top of the
# deadlines of the answers.
FORK_SECONDS = 5.0
# Parameter names by which TRL reward functions receive the questions and the reference answers.
QUESTION_COLUMNS = ("question", "prompt", "problem")
REFERENCE_COLUMNS = ("answer", "solution", "ground_truth", "gold", "target", "reference")


@dataclass(frozen=True)
class Verifier:
    """A verifier function and the source code of its file.

    Attributes:
      named: the config setting that selects the verifier, such as "grader=FILE.py:function". Used
        in messages and metrics.
      path: absolute path of the file.
      name: name of the function.
      source: source code of the file. All workers of a run use this source code, even if the file
        changes during the run.
      digest: first 16 hexadecimal digits of the SHA-256 hash of the file.
      of_rows: True if the function has the signature score(answer, row), where the row is the
        problem's entry in the dataset.
      whole: True if an answer counts as correct only with a score of 1.0. Otherwise the score
        itself is used.
      of_response: True if the function receives the whole response instead of the extracted answer.
        With `of_rows`, it only receives responses that contain an answer.
      trl: True if the function is a TRL reward function, which takes `completions` (whole
        responses) and further dataset columns.
      references: additional parameter names by which a TRL reward function receives the reference
        answers.
      third_party: True if the function is the scorer of a third-party package, with the signature
        score(answer, row). It runs in a sandbox.
    """

    named: str
    path: str
    name: str
    source: str
    digest: str
    of_rows: bool = False
    whole: bool = False
    of_response: bool = False
    trl: bool = False
    references: tuple[str, ...] = ()
    third_party: bool = False

    @property
    def batch(self) -> bool:
        """True if the function takes lists of answers and returns a list of scores."""
        return self.trl or self.name.endswith(BATCH_SUFFIX)

    def graded_text(self, text: str | None) -> str | None:
        """Returns the part of a response that is passed to the function.

        This is the whole response or the extracted answer, depending on the function. Returns None
        if the response is None, or if the function needs an answer and the response has none.
        """
        if self.trl or (self.of_response and not self.of_rows):
            return text
        answer = answer_of(text)
        return answer if answer is None or not self.of_response else text

    def extracted(self, graded_text: str) -> str:
        """Returns the answer in the text passed to the function, for logs and majority voting."""
        answer = answer_of(graded_text) if self.trl or self.of_response else None
        return _short_answer(graded_text if answer is None else answer)


def load_verifier(spec: str, key: str = "grader") -> Verifier:
    """Reads the file of a verifier without executing it.

    Args:
      spec: the verifier, in the form FILE.py:function.
      key: name of the config key or command-line option, for error messages.

    Raises:
      UserError: if `spec` is malformed, or the file cannot be read or is not valid Python.
    """
    problem = grader_problem(spec, key)
    if problem is not None:
        raise UserError(problem)
    file, _, name = spec.rpartition(":")
    path = Path(file)
    where = f"{key}={spec}"
    try:
        content = read_file(path, most=MOST_SOURCE)
        source = content.decode("utf-8-sig")
        tree = ast.parse(source, str(path))
        compile(tree, str(path), "exec")
    except FileNotFoundError:
        suggestion = nearest(path, "the path of a Python file")
        raise UserError(f"{where}: there is no file {str(path)!r}; use {suggestion}") from None
    except OSError as error:
        raise UserError(
            f"{where}: the file can't be read ({error.strerror}); use another file"
        ) from None
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{where}: the file is not valid Python ({error}); correct the file"
        ) from None
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Verifier(where, str(path.resolve()), name, source, digest, trl=_has_trl_form(tree, name))


def _has_trl_form(tree: ast.Module, name: str) -> bool:
    """True if a file defines a function called `name` with a parameter `completions`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            return any(parameter.arg == verifier_worker.COMPLETIONS for parameter in parameters)
    return False


def answer_of(text: str | None) -> str | None:
    r"""Extracts the answer from a response.

    The answer is the stripped content of the last closed `<answer>` tag after `</think>`. Without a
    closed tag, it is the content of the last closed `\boxed{...}`. Returns None if the response
    contains neither, or if `<think>` is never closed.
    """
    if not isinstance(text, str):
        return None
    response = after_thinking(text[-MAX_CHARS:])
    if response is None:
        return None
    tag_or_box = last_tag(response) or last_box(response)
    return None if tag_or_box is None else tag_or_box.content.strip()


class VerifierRequest(NamedTuple):
    """An answer to be scored, with its question and its reference answer (`gold`)."""

    question: str
    answer: str
    gold: str


class Score(NamedTuple):
    """The score of an answer, or the reason why it has no score.

    Attributes:
      score: the score in [0, 1]. It is 0 if the verifier failed.
      fault: one of `FAULTS` if the verifier failed, or "" if the answer has a score.
      message: details of the failure.
    """

    score: float
    fault: str = ""
    message: str = ""


class VerifierGrader(PooledGrader[VerifierRequest, Score]):
    """Scores answers with a user's verifier. Has the same interface as `Grader`.

    If the verifier hangs, raises or returns a value that is not a score, the answer scores 0, its
    verdict has the path "failed", and a counter for this reason is incremented. A grader is not
    thread-safe.

    Attributes:
      verifier: the verifier.
      rows: dict from (question, reference) to the problem's dataset row, serialized by `packed`.
        Needed by functions with the signature score(answer, row). None for all other functions.
      last_failure: error message of the last answer without a score, or "".
    """

    counted = (
        *("graded", "correct", "partly_correct", "score_percent", "no_answer"),
        *("cache_hits", "failed", *(f"failed_{fault}" for fault in FAULTS)),
    )

    def __init__(
        self,
        verifier: Verifier,
        *,
        rows: Mapping[tuple[str, str], str] | None = None,
        workers: int = 2,
        deadline: int | float = 3.0,
        memory_mb: int = 1024,
        batch: int = 16,
        encode: Callable[[str], list[int]] | None = None,
    ):
        """Checks the settings. Processes are started by `check` or by the first answer.

        Args:
          verifier: the verifier.
          rows: dict from (question, reference) to the problem's dataset row, serialized by
            `packed`. Needed by functions with the signature score(answer, row). None for all other
            functions.
          workers: maximum number of worker processes.
          deadline: timeout per answer in seconds. The timeout of a batch is this value times the
            number of answers.
          memory_mb: maximum size of a worker's address space in MiB.
          batch: maximum number of answers per call of a function that takes lists.
          encode: tokenizes a text and returns its token ids, for TRL reward functions. None to
            pass no token ids.

        Raises:
          UserError: if a setting is out of range.
        """
        self.verifier = verifier
        self.rows = rows
        program = _program(verifier, deadline, batch, encode)
        pool = WorkerPool(program, workers=workers, deadline=deadline, memory_mb=memory_mb)
        super().__init__(pool, is_lasting=_has_score)
        self.last_failure = ""

    def check(self, report: Callable[[str], object] | None = None) -> None:
        """Starts a worker and loads the verifier in it, so that errors are reported early.

        Args:
          report: called with a progress message if loading takes a long time.

        Raises:
          UserError: if the file cannot be loaded or does not define the function.
        """
        self._pool.check(report)

    def grade(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        poll: Poll = None,
        questions: Texts | None = None,
    ) -> list[Verdict]:
        """Scores texts like `Grader.grade`, but requires a question for each text.

        The fields `correct` and `strict` of a verdict contain the score as a float. If
        `Verifier.whole` is True, they are bools. Both modes give the same result. If `questions` is
        None and `Verifier.whole` is True, the answers are compared with the references as strings,
        which is used for majority voting.

        Raises:
          UserError: for the same reasons as `Grader.grade`, if questions are missing, or if the
            verifier could never be loaded.
        """
        if questions is None and self.verifier.whole:
            # Majority voting compares two answers with each other and only needs to know which are
            # identical.
            return [_same_spelling(answer_of(text), gold) for text, gold in zip(texts, references)]
        check_request(texts, references, mode)
        answers = [self.verifier.graded_text(text) for text in texts]
        return self.score(answers, references, _checked(questions, len(texts)), poll)

    def _requests(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[VerifierRequest]:
        # These requests may be split into different batches than those in `grade`.
        answers = map(self.verifier.graded_text, list(texts))
        questions = list(_checked(questions, len(texts)))
        requests = _requests_of(answers, list(references), questions, self.rows)
        return (request for request in requests if request is not None)

    def score(
        self, answers: Texts, references: Texts, questions: Texts, poll: Poll = None
    ) -> list[Verdict]:
        """Scores answers that are already extracted from their responses.

        Args:
          answers: the texts to be passed to the function. None is a missing answer, which scores 0.
          references: one reference for each answer.
          questions: one question for each answer.
          poll: callback as in `Grader.grade`.

        Raises:
          UserError: if a third-party scorer returned a score outside [0, 1].
        """
        requests = list(_requests_of(answers, references, questions, self.rows))
        sent = [request for request in requests if request is not None]
        scores = self._run(list(dict.fromkeys(sent)), poll)
        failures = [score.message for score in scores.values() if score.fault]
        if failures:
            self.last_failure = failures[-1]
        self._check_scores_of_packages(scores)
        verdicts = [
            self._verdict(None if request is None else scores[request], request)
            for request in requests
        ]
        self._count(verdicts, [scores[request] for request in sent])
        return verdicts

    def _check_scores_of_packages(self, scores: Mapping[VerifierRequest, Score]) -> None:
        """Raises a UserError if a third-party scorer returned a score outside [0, 1].

        Scores are at least 0 (`verifiers_v1_score`), so that such a score belongs to a very good
        answer. Without a score, this answer would count as wrong. If `Verifier.whole` is True, an
        answer counts as correct only with a score of 1.0, so no other score is refused.
        """
        if not self.verifier.third_party or self.verifier.whole:
            return
        for request, score in scores.items():
            if score.fault == verifier_worker.RANGE:
                row = verifier_worker.unpacked(request.gold)
                raise UserError(
                    f"{row.id}: a reward of this task is outside [0, 1] ({score.message}), and the "
                    "best responses would count as wrong; use another task set"
                )

    def _verdict(self, score: Score | None, request: VerifierRequest | None) -> Verdict:
        """Builds the verdict of an answer. Both arguments are None if there is no answer."""
        whole = self.verifier.whole
        if score is None or request is None:
            zero = False if whole else 0.0
            return Verdict(zero, None, "none", strict=zero)
        correct = score.score == 1.0 if whole else score.score
        return Verdict(
            correct=correct,
            extracted=self.verifier.extracted(request.answer),
            path=FAILED if score.fault else SCORED,
            timed_out=score.fault == "late",
            strict=correct,
        )

    def _count(self, verdicts: list[Verdict], scores: list[Score]) -> None:
        """Updates the counters.

        Args:
          verdicts: all verdicts of a call of `score`.
          scores: the scores of the answers that were not missing.
        """
        faults = collections.Counter(score.fault for score in scores)
        self._counts.update(
            graded=len(verdicts),
            no_answer=len(verdicts) - len(scores),
            correct=sum(verdict.correct == 1.0 for verdict in verdicts),
            partly_correct=sum(0.0 < score.score < 1.0 for score in scores),
            score_percent=round(100 * sum(score.score for score in scores)),
            failed=len(scores) - faults[""],
        )
        self._counts.update({f"failed_{fault}": faults[fault] for fault in FAULTS})


def _has_score(score: Score) -> bool:
    return not score.fault


def _requests_of(
    answers: Iterable[str | None],
    references: Texts,
    questions: Texts,
    rows: Mapping[tuple[str, str], str] | None,
) -> Iterator[VerifierRequest | None]:
    """Yields a request for each answer, or None for a missing answer.

    Args:
      answers: the answers.
      references: one reference for each answer.
      questions: one question for each answer.
      rows: dict from (question, reference) to the problem's dataset row, serialized by `packed`. If
        the dict is not None, the row is sent in place of the reference.
    """
    for question, answer, reference in zip(questions, answers, references, strict=True):
        question = question or ""
        gold = reference or ""
        if rows is not None:
            gold = rows[question, gold]
        yield None if answer is None else VerifierRequest(question, answer, gold)


def _program(
    verifier: Verifier, deadline: float, batch: int, encode: Callable[[str], list[int]] | None
) -> Program:
    """Builds the worker program from the arguments of `VerifierGrader`."""
    environment = None
    rows_per_request = batch if verifier.batch else 1
    spare_seconds = 0.0
    if verifier.third_party:
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment = {**passed_on, **ONE_THREAD}
        rows_per_request = FORK_ROWS
        spare_seconds = FORK_SECONDS
    return Program(
        script=verifier_worker.__file__,
        setup=_setup(verifier, deadline, ids=encode is not None),
        batch=rows_per_request,
        encode=_encoder(encode) if verifier.trl and encode else _encode,
        decode=_decode,
        late=Score(0.0, "late", "it took longer than grading.deadline"),
        died=Score(0.0, "died", "its worker process died"),
        advice=f"check {verifier.named}, and whether grading.memory_mb is large enough",
        foreign=True,
        environment=environment,
        spare=spare_seconds,
    )


def _setup(verifier: Verifier, deadline: float, *, ids: bool) -> bytes:
    """Returns the first line that is sent to a worker: the verifier and its settings as JSON.

    Args:
      verifier: the verifier.
      deadline: timeout per answer in seconds.
      ids: True if the requests contain token ids.
    """
    setup: dict[str, Any] = {
        "path": verifier.path,
        "source": verifier.source,
        "name": verifier.name,
        "batch": verifier.batch,
        "of_rows": verifier.of_rows,
        "third_party": verifier.third_party,
        "deadline": deadline,
        "confined": verifier.third_party and confinement.is_available(),
        "trl": None,
    }
    if verifier.trl:
        references = [*REFERENCE_COLUMNS, *verifier.references]
        setup["trl"] = {"questions": QUESTION_COLUMNS, "references": references, "ids": ids}
    return f"{json.dumps(setup)}\n".encode("ascii")


def _encode(requests: Sequence[VerifierRequest]) -> dict[str, Any]:
    return {"rows": requests}


def _encoder(
    encode: Callable[[str], list[int]],
) -> Callable[[Sequence[VerifierRequest]], dict[str, Any]]:
    """Returns a function that encodes requests together with the token ids of the answers."""

    def encode_with_ids(requests: Sequence[VerifierRequest]) -> dict[str, Any]:
        return {"rows": requests, "ids": [encode(request.answer) for request in requests]}

    return encode_with_ids


def packed(row: Mapping[str, Any]) -> str:
    """Serializes a dataset row (one problem) for the workers, as a base64-encoded pickle.

    Raises:
      UserError: if the row contains an object that cannot be pickled, such as a function.
    """
    try:
        return base64.b64encode(pickle.dumps(dict(row))).decode()
    except (pickle.PickleError, AttributeError, TypeError, RecursionError) as error:
        where = f"data: row {row.get('id')!r}"
        raise UserError(
            f"{where}: the row can't be sent to a grading process ({error}); use only plain "
            "values, such as texts, numbers and lists, in the row's metadata"
        ) from None


def _checked(questions: Texts | None, count: int) -> Texts:
    """Returns `questions`, or raises a `UserError` unless it contains one question per text."""
    if questions is None or len(questions) != count:
        raise UserError(
            "grade: a verifier also reads the questions; pass `questions` with one question for "
            f"each of the {count} texts"
        )
    return questions


def _same_spelling(answer: str | None, gold: str | None) -> Verdict:
    same = answer is not None and answer == gold
    return Verdict(same, answer, "string", strict=same)


def _short_answer(answer: str) -> str:
    """Shortens a long answer for logs. A hash keeps different answers distinct."""
    if len(answer) <= EXTRACTED_CHARS:
        return answer
    digest = hashlib.sha256(answer.encode("utf-8", "replace")).hexdigest()[:12]
    start = answer[: EXTRACTED_CHARS - 20]
    return f"{start} ... #{digest}"


def _decode(reply: dict[str, Any]) -> list[Score]:
    """Parses the scores in a worker's reply.

    Raises:
      LookupError, TypeError, ValueError: if the reply is malformed, for example because other code
        wrote to the pipe.
    """
    message = str(reply["message"])
    scores = []
    for score, fault in zip(reply["scores"], reply["faults"], strict=True):
        has_score = isinstance(score, float | int) and 0.0 <= score <= 1.0
        is_scored = fault == "" and has_score
        is_failed = fault in FAULTS and score is None
        if not is_scored and not is_failed:
            raise ValueError(
                "the worker's reply lacks the score of an answer, and the reason why it has none"
            )
        scores.append(Score(score or 0.0, fault, message if fault else ""))
    return scores
