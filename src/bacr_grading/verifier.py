"""A verifier of one's own: a function of a file, run in workers that can be killed.

`grader: FILE.py:function` names a function(question, answer_text, gold) that returns a score in
[0, 1]; one whose name ends with `_batch` takes three lists and returns a list, and one of TRL's
form takes `completions` and other columns. docs/grading.md says what it may do. What goes wrong in
it costs the answers at hand their score, and is counted. Packages' scorers run here too, confined.
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

# Why an answer got no score; counted as failed_late and so on.
FAULTS = ("late", "died", *verifier_worker.FAULTS)
# What a verdict's path says of answers with and without a score.
SCORED, FAILED = "verifier", "failed"
BATCH_SUFFIX = "_batch"
# A pipe's worth and more; nobody writes so long a verifier.
MOST_SOURCE = 1 << 20
# What a package's scorer gets of the environment: folders and languages, but no tokens and keys.
PASSED_ON = (
    *("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUTF8", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"),
    *("HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
)
# A fork of a process with threads of linear algebra would wait for them.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
# Answers that a fork scores, and seconds that a batch of them may take beyond their deadlines: for
# forks, and for what the scorer prepares.
FORK_ROWS = 16
FORK_SECONDS = 5.0
# Names of columns by which functions of TRL's form ask for questions and references.
QUESTION_COLUMNS = ("question", "prompt", "problem")
REFERENCE_COLUMNS = ("answer", "solution", "ground_truth", "gold", "target", "reference")


@dataclass(frozen=True)
class Verifier:
    """The source of a verifier, as it was when it was read.

    Attributes:
      named: the line of a config that names it.
      source: the file's text, which all workers of a run get, whatever becomes of the file.
      of_rows: it is a question source's score(answer, row), not function(question, answer, gold).
      whole: an answer is right at 1.0 and else wrong, whatever part of it has been earned.
      of_response: it is shown texts as they are, not the answers that stand in them.
      trl: the function has TRL's form: it takes `completions`, whole texts, and other columns.
      references: further columns by which a function of TRL's form asks for references.
      third_party: a package's scorer: it runs confined, with `score(answer, row)`.
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
        """Whether the function takes lists."""
        return self.trl or self.name.endswith(BATCH_SUFFIX)

    def shown(self, text: str | None) -> str | None:
        """What it is shown of a text; None: nothing, which scores 0."""
        return text if self.of_response or self.trl else answer_of(text)

    def extracted(self, shown: str) -> str:
        """The answer in what it was shown, for records and votes."""
        found = answer_of(shown) if self.trl else None
        return _named(shown if found is None else found)


def load_verifier(spec: str, key: str = "grader") -> Verifier:
    """Reads the file of a verifier without running it.

    UserError: it is spelled otherwise, or the file can't be read or is no Python.
    """
    problem = grader_problem(spec, key)
    if problem is not None:
        raise UserError(problem)
    file, _, name = spec.rpartition(":")
    path, where = Path(file), f"{key}={spec}"
    try:
        content = read_file(path, most=MOST_SOURCE)
        source = content.decode("utf-8-sig")
        tree = ast.parse(source, str(path))
        compile(tree, str(path), "exec")
    except FileNotFoundError:
        write = nearest(path, "the path of a Python file")
        raise UserError(f"{where}: no file {str(path)!r}; write {write}") from None
    except OSError as error:
        raise UserError(f"{where}: can't be read ({error.strerror}); write another") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where}: no Python file ({error}); fix it") from None
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Verifier(where, str(path.resolve()), name, source, digest, trl=_has_trl_form(tree, name))


def _has_trl_form(tree: ast.Module, name: str) -> bool:
    """True if a file defines a function of this name with a parameter `completions`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            return any(one.arg == verifier_worker.COMPLETIONS for one in parameters)
    return False


def answer_of(text: str | None) -> str | None:
    """What the last closed tag, or else box, after `</think>` holds, without blanks around it.

    As written; None: none was closed, or thinking never was.
    """
    if not isinstance(text, str):
        return None
    said = after_thinking(text[-MAX_CHARS:])
    found = None if said is None else last_tag(said) or last_box(said)
    return None if found is None else found.content.strip()


class Row(NamedTuple):
    """An answer to be scored."""

    question: str
    answer: str
    gold: str


class Score(NamedTuple):
    """What a verifier says of a row: a score or why there is none, one of FAULTS, and its words."""

    score: float
    fault: str = ""
    said: str = ""


class VerifierGrader(PooledGrader[Row, Score]):
    """Scores answers by a verifier of one's own, with the interface of `Grader`.

    An answer that the verifier gives no score (it hangs, raises, returns no number ...) scores 0,
    is counted under its reason, and has the path "failed". For one thread at a time.

    Args:
      deadline: seconds that one answer may take; a batch has as many for each of its answers.
      batch: most answers in a call of the batch form.
      rows: for a verifier of rows, what stands for each question and gold answer: `packed` rows.
      encode: the token ids of a text, for functions of TRL's form; None: they get none.
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
        self.verifier = verifier
        self.rows = rows
        third_party = verifier.third_party
        lent = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        program = Program(
            script=verifier_worker.__file__,
            setup=_setup(verifier, deadline, ids=encode is not None),
            batch=FORK_ROWS if third_party else batch if verifier.batch else 1,
            written=_written_with(encode) if verifier.trl and encode else _written,
            read=_read,
            late=Score(0.0, "late", "it took longer than grading.deadline"),
            died=Score(0.0, "died", "its worker process died"),
            advice=f"look at {verifier.named}, and whether grading.memory_mb is large enough",
            foreign=True,
            environment={**lent, **ONE_THREAD} if third_party else None,
            spare=FORK_SECONDS if third_party else 0.0,
        )
        pool = WorkerPool(program, workers=workers, deadline=deadline, memory_mb=memory_mb)
        super().__init__(pool, lasting=lambda score: not score.fault)
        self.last_failure = ""

    def check(self, tell: Callable[[str], object] | None = None) -> None:
        """Loads the verifier in a worker now; UserError: that fails, or it has no such function.

        `tell` gets a line when that takes long.
        """
        self._pool.check(tell)

    def grade(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        poll: Poll = None,
        questions: Texts | None = None,
    ) -> list[Verdict]:
        """As `Grader.grade`, with a question for each text; both modes mean the same.

        `correct` and `strict` are the score, a float. UserError also: the verifier could never be
        loaded.
        """
        if questions is None and self.verifier.whole:
            # Votes ask which wrong answers are the same: those that are written alike.
            return [_alike(answer_of(text), gold) for text, gold in zip(texts, references)]
        check_request(texts, references, mode)
        answers = [self.verifier.shown(text) for text in texts]
        return self.score(answers, references, _checked(questions, len(texts)), poll)

    def _asked(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[Row]:
        # Batches are made of what is there: they can be others than those of `grade`.
        answers = map(self.verifier.shown, list(texts))
        rows = self._rows(answers, list(references), list(_checked(questions, len(texts))))
        return (row for row in rows if row is not None)

    def score(
        self, answers: Texts, references: Texts, questions: Texts, poll: Poll = None
    ) -> list[Verdict]:
        """Scores answers as they are, without looking for tags or boxes; None is no answer."""
        rows = list(self._rows(answers, references, questions))
        shown = [row for row in rows if row is not None]
        scored = self._ask(list(dict.fromkeys(shown)), poll)
        failed = [score.said for score in scored.values() if score.fault]
        self.last_failure = failed[-1] if failed else self.last_failure
        whole = self.verifier.whole
        zero = False if whole else 0.0
        none = Verdict(zero, None, "none", strict=zero)
        verdicts = [
            none if r is None else _verdict(self.verifier.extracted(r.answer), scored[r], whole)
            for r in rows
        ]
        points = [scored[row].score for row in shown]
        found = collections.Counter(scored[row].fault for row in shown)
        self._counts.update(
            graded=len(rows),
            no_answer=len(rows) - len(shown),
            correct=sum(verdict.correct == 1.0 for verdict in verdicts),
            partly_correct=sum(0.0 < score < 1.0 for score in points),
            score_percent=round(100 * sum(points)),
            failed=len(shown) - found[""],
        )
        self._counts.update({f"failed_{fault}": found[fault] for fault in FAULTS})
        return verdicts

    def _rows(
        self, answers: Iterable[str | None], references: Texts, questions: Texts
    ) -> Iterator[Row | None]:
        """What the workers are shown; None is no answer."""
        for question, answer, reference in zip(questions, answers, references, strict=True):
            asked, gold = question or "", reference or ""
            if self.rows is not None:
                gold = self.rows[asked, gold]
            yield None if answer is None else Row(asked, answer, gold)


def _setup(verifier: Verifier, deadline: float, *, ids: bool) -> bytes:
    """The first line that a worker reads."""
    names = ("path", "source", "name", "batch", "of_rows", "third_party")
    setup: dict[str, Any] = {name: getattr(verifier, name) for name in names}
    setup["deadline"] = deadline
    setup["confined"] = verifier.third_party and confinement.is_available()
    setup["trl"] = None
    if verifier.trl:
        references = [*REFERENCE_COLUMNS, *verifier.references]
        setup["trl"] = {"questions": QUESTION_COLUMNS, "references": references, "ids": ids}
    return f"{json.dumps(setup)}\n".encode("ascii")


def _written(rows: Sequence[Row]) -> dict[str, Any]:
    """A request."""
    return {"rows": rows}


def _written_with(encode: Callable[[str], list[int]]) -> Callable[[Sequence[Row]], dict[str, Any]]:
    """What makes a request that has the token ids of its texts."""
    return lambda rows: {"rows": rows, "ids": [encode(row.answer) for row in rows]}


def packed(row: Mapping[str, Any]) -> str:
    """A row as the text that workers get; UserError: it holds what can't be sent, as functions."""
    try:
        return base64.b64encode(pickle.dumps(dict(row))).decode()
    except (pickle.PickleError, AttributeError, TypeError, RecursionError) as error:
        where = f"data: row {row.get('id')!r}"
        raise UserError(f"{where}: {error}; write plain values as its metadata") from None


def _checked(questions: Texts | None, count: int) -> Texts:
    """The questions, of which there has to be one for each text."""
    if questions is None or len(questions) != count:
        raise UserError(
            f"grade: a verifier of one's own sees questions; give one for each of the {count} texts"
        )
    return questions


def _verdict(answer: str, score: Score, whole: bool) -> Verdict:
    path = FAILED if score.fault else SCORED
    late = score.fault == "late"
    correct = score.score == 1.0 if whole else score.score
    return Verdict(correct, answer, path, late, strict=correct)


def _alike(answer: str | None, gold: str | None) -> Verdict:
    same = answer is not None and answer == gold
    return Verdict(same, answer, "string", strict=same)


def _named(answer: str) -> str:
    """An answer for records, in which different ones stay different."""
    if len(answer) <= EXTRACTED_CHARS:
        return answer
    digest = hashlib.sha256(answer.encode("utf-8", "replace")).hexdigest()[:12]
    return f"{answer[: EXTRACTED_CHARS - 20]} ... #{digest}"


def _read(reply: dict[str, Any]) -> list[Score]:
    """What a worker said; ValueError: something else wrote it."""
    pairs, said = list(zip(reply["scores"], reply["faults"], strict=True)), str(reply["said"])
    for score, fault in pairs:
        scored = isinstance(score, float | int) and 0.0 <= score <= 1.0
        if not (fault in FAULTS and score is None or fault == "" and scored):
            raise ValueError("neither a score nor a fault")
    return [Score(score or 0.0, fault, said if fault else "") for score, fault in pairs]
