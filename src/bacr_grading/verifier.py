"""Grades by a user's verifier: a function of a file, run in workers that can be killed.

The config `grader: FILE.py:function` names a function(question, answer_text, gold) that returns a
score in [0, 1]. A function whose name ends with `_batch` takes three lists and returns a list. A
reward function of TRL's form takes `completions` and other columns. docs/grading.md has the rules
for verifiers. If a verifier fails, its answers get no score and are counted. Scorers of packages
run here too, in confined processes.
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
from bacr_grading.errors import UserError
from bacr_grading.extract import after_thinking, last_box, last_tag
from bacr_grading.files import nearest, read_file
from bacr_grading.judge import EXTRACTED_CHARS, MAX_CHARS, STRICT, Verdict
from bacr_grading.pool import Poll, Program, WorkerPool
from bacr_grading.pooled import PooledGrader, Texts, check_request
from bacr_grading.verifier_spec import grader_problem

# Reasons for which an answer gets no score; the counters are failed_late and so on.
FAULTS = ("late", "died", *verifier_worker.FAULTS)
# Paths of verdicts on answers with and without a score.
SCORED = "verifier"
FAILED = "failed"
BATCH_SUFFIX = "_batch"
# Bytes of a verifier's file, which goes to every worker.
MOST_SOURCE = 1 << 20
# Environment variables that a package's scorer gets: folders and languages, but no tokens and keys.
PASSED_ON = (
    *("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUTF8", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"),
    *("HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
)
# A fork of a process with threads of linear algebra would wait for these threads.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
# Answers that a fork scores.
FORK_ROWS = 16
# Seconds of a batch beyond the deadlines of its answers, for forks and the scorer's `prepare`.
FORK_SECONDS = 5.0
# Names of parameters by which functions of TRL's form take questions and references.
QUESTION_COLUMNS = ("question", "prompt", "problem")
REFERENCE_COLUMNS = ("answer", "solution", "ground_truth", "gold", "target", "reference")


@dataclass(frozen=True)
class Verifier:
    """A verifier with the content of its file.

    Attributes:
      named: the line of a config that names the verifier, for messages and metrics.
      path: absolute path of the file.
      name: name of the function.
      source: the file's text. All workers of a run get this text, also if the file changes.
      digest: first 16 hexadecimal digits of the file's SHA-256.
      of_rows: the function is score(answer, row) of a question source.
      whole: an answer is right with the score 1.0, and wrong with every smaller score.
      of_response: the function gets whole responses and not the answers in them.
      trl: the function has TRL's form: it takes `completions`, whole responses, and other columns.
      references: further parameters by which a function of TRL's form takes references.
      third_party: the function is a package's score(answer, row), which runs confined.
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
        """True if the function takes lists."""
        return self.trl or self.name.endswith(BATCH_SUFFIX)

    def graded_text(self, text: str | None) -> str | None:
        """Returns the part of a response that the function gets; None without an answer."""
        return text if self.of_response or self.trl else answer_of(text)

    def extracted(self, graded_text: str) -> str:
        """Returns the answer in the text that the function got, for records and votes."""
        answer = answer_of(graded_text) if self.trl else None
        return _short_answer(graded_text if answer is None else answer)


def load_verifier(spec: str, key: str = "grader") -> Verifier:
    """Reads the file of a verifier without running it.

    Args:
      spec: the verifier, FILE.py:function.
      key: name of the config key or option, for messages.

    Raises:
      UserError: `spec` has another form, or the file cannot be read or is not Python.
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
        raise UserError(f"{where}: no file {str(path)!r}; write {suggestion}") from None
    except OSError as error:
        raise UserError(f"{where}: can't be read ({error.strerror}); write another") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where}: not a Python file ({error}); fix it") from None
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Verifier(where, str(path.resolve()), name, source, digest, trl=_has_trl_form(tree, name))


def _has_trl_form(tree: ast.Module, name: str) -> bool:
    """True if a file defines a function of this name with a parameter `completions`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            return any(parameter.arg == verifier_worker.COMPLETIONS for parameter in parameters)
    return False


def answer_of(text: str | None) -> str | None:
    """Returns the stripped content of the last closed tag, else box, behind `</think>`.

    None if no tag or box is closed, or the thinking is not.
    """
    if not isinstance(text, str):
        return None
    response = after_thinking(text[-MAX_CHARS:])
    if response is None:
        return None
    tag_or_box = last_tag(response) or last_box(response)
    return None if tag_or_box is None else tag_or_box.content.strip()


class VerifierRequest(NamedTuple):
    """An answer to score, with its question and reference."""

    question: str
    answer: str
    gold: str


class Score(NamedTuple):
    """The score of an answer, or the reason for which it has none.

    Attributes:
      score: in [0, 1]; 0 with a fault.
      fault: one of `FAULTS`, or "" if the answer has a score.
      message: details of the fault.
    """

    score: float
    fault: str = ""
    message: str = ""


class VerifierGrader(PooledGrader[VerifierRequest, Score]):
    """Scores answers by a user's verifier, with the interface of `Grader`.

    If the verifier hangs, raises or returns something else than a score, the answer scores 0, is
    counted under its fault, and has the path "failed". Only one thread may use a grader at a time.

    Attributes:
      verifier: the verifier.
      rows: `packed` rows by question and reference, for score(answer, row); else None.
      last_failure: message about the last answer without a score, or "".
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
        """Checks the settings; processes start with `check` or the first answer.

        Args:
          verifier: the verifier.
          rows: `packed` rows by question and reference, for score(answer, row).
          workers: largest number of worker processes.
          deadline: seconds for one answer; a batch has as many seconds for each of its answers.
          memory_mb: limit of a worker's address space in MiB.
          batch: largest number of answers in a call of a function that takes lists.
          encode: returns the token ids of a text, for functions of TRL's form; None if they get no
            token ids.

        Raises:
          UserError: a setting is out of range.
        """
        self.verifier = verifier
        self.rows = rows
        program = _program(verifier, deadline, batch, encode)
        pool = WorkerPool(program, workers=workers, deadline=deadline, memory_mb=memory_mb)
        super().__init__(pool, is_lasting=_has_score)
        self.last_failure = ""

    def check(self, report: Callable[[str], object] | None = None) -> None:
        """Loads the verifier in a worker now.

        Args:
          report: called with a message if this takes long.

        Raises:
          UserError: the file cannot be loaded or does not have the function.
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
        """Scores texts, as `Grader.grade`; needs a question for each text.

        `correct` and `strict` of a verdict are the score, a float. Both modes are the same. Without
        questions, a verifier with `whole` compares answers by their spelling, for votes.

        Raises:
          UserError: also if the verifier could never be loaded.
        """
        if questions is None and self.verifier.whole:
            # A vote only needs to know which answers are the same.
            return [_same_spelling(answer_of(text), gold) for text, gold in zip(texts, references)]
        check_request(texts, references, mode)
        answers = [self.verifier.graded_text(text) for text in texts]
        return self.score(answers, references, _checked(questions, len(texts)), poll)

    def _requests(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[VerifierRequest]:
        # The batches of these requests can differ from the batches of `grade`.
        answers = map(self.verifier.graded_text, list(texts))
        questions = list(_checked(questions, len(texts)))
        requests = _requests_of(answers, list(references), questions, self.rows)
        return (request for request in requests if request is not None)

    def score(
        self, answers: Texts, references: Texts, questions: Texts, poll: Poll = None
    ) -> list[Verdict]:
        """Scores answers without a search for tags or boxes.

        Args:
          answers: the texts for the function; None for a missing answer, which scores 0.
          references: one reference for each answer.
          questions: one question for each answer.
          poll: as of `Grader.grade`.
        """
        requests = list(_requests_of(answers, references, questions, self.rows))
        sent = [request for request in requests if request is not None]
        scores = self._run(list(dict.fromkeys(sent)), poll)
        failures = [score.message for score in scores.values() if score.fault]
        if failures:
            self.last_failure = failures[-1]
        verdicts = [
            self._verdict(None if request is None else scores[request], request)
            for request in requests
        ]
        self._count(verdicts, [scores[request] for request in sent])
        return verdicts

    def _verdict(self, score: Score | None, request: VerifierRequest | None) -> Verdict:
        """Returns the verdict on a scored request, or on a missing answer."""
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
        """Adds a call's verdicts, and the scores of the answers that were sent, to the counters."""
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
    """Yields the request of each answer; None for a missing answer.

    Args:
      rows: `packed` rows by question and reference, which replace the references; or None.
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
    """Returns the program of the workers, from the arguments of `VerifierGrader`."""
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
        advice=f"look at {verifier.named}, and whether grading.memory_mb is large enough",
        foreign=True,
        environment=environment,
        spare=spare_seconds,
    )


def _setup(verifier: Verifier, deadline: float, *, ids: bool) -> bytes:
    """Returns the first line for a worker: the verifier and its settings in JSON.

    Args:
      ids: requests contain token ids.
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
    """Returns a function that encodes requests together with the token ids of their texts."""

    def encode_with_ids(requests: Sequence[VerifierRequest]) -> dict[str, Any]:
        return {"rows": requests, "ids": [encode(request.answer) for request in requests]}

    return encode_with_ids


def packed(row: Mapping[str, Any]) -> str:
    """Returns a row of a question source as text for the workers: pickle in base64.

    Raises:
      UserError: the row contains an object that pickle cannot store, such as a function.
    """
    try:
        return base64.b64encode(pickle.dumps(dict(row))).decode()
    except (pickle.PickleError, AttributeError, TypeError, RecursionError) as error:
        where = f"data: row {row.get('id')!r}"
        raise UserError(f"{where}: {error}; write plain values as its metadata") from None


def _checked(questions: Texts | None, count: int) -> Texts:
    """Returns the questions; raises a `UserError` unless there is one for each text."""
    if questions is None or len(questions) != count:
        raise UserError(
            f"grade: a verifier needs questions; give one for each of the {count} texts"
        )
    return questions


def _same_spelling(answer: str | None, gold: str | None) -> Verdict:
    same = answer is not None and answer == gold
    return Verdict(same, answer, "string", strict=same)


def _short_answer(answer: str) -> str:
    """Shortens an answer for records; a hash keeps different answers different."""
    if len(answer) <= EXTRACTED_CHARS:
        return answer
    digest = hashlib.sha256(answer.encode("utf-8", "replace")).hexdigest()[:12]
    start = answer[: EXTRACTED_CHARS - 20]
    return f"{start} ... #{digest}"


def _decode(reply: dict[str, Any]) -> list[Score]:
    """Returns the scores in a worker's reply.

    Raises:
      LookupError, TypeError, ValueError: other code wrote the reply.
    """
    message = str(reply["message"])
    scores = []
    for score, fault in zip(reply["scores"], reply["faults"], strict=True):
        has_score = isinstance(score, float | int) and 0.0 <= score <= 1.0
        is_scored = fault == "" and has_score
        is_failed = fault in FAULTS and score is None
        if not is_scored and not is_failed:
            raise ValueError("neither a score nor a fault")
        scores.append(Score(score or 0.0, fault, message if fault else ""))
    return scores
