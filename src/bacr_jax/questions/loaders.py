"""Opens question sets by their names in data.train and data.eval."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bacr_grading import confinement
from bacr_jax.config import DataConfig
from bacr_jax.config.checks import NUM_LEVELS
from bacr_jax.config.derived import builtin_vocab, mixture
from bacr_jax.config.user_modules import guarded, module_of_file
from bacr_jax.errors import UserError
from bacr_jax.questions import ledger, math_sets
from bacr_jax.questions.characters import LONGEST, VOCABULARY, CharacterTokenizer
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.questions.source import EXACT, RULES, Row, Source, Split, question_of, question_set
from bacr_tasks import gym, verifiers_v1

# Test problems of the ledger: 400 per level, so that the error of an accuracy is about one point.
LEDGER_TEST_SIZE = 2000
# Optional packages that generate questions, by the part of a set's name before the colon.
_PACKAGES: dict[str, Any] = {"gym": gym, "verifiers": verifiers_v1}
# Scorer of the package `gym`, which can generate the same question several times with different
# indices. Equal questions get equal scores, so such repetitions are allowed.
REPEATING = gym.SCORER


def _ledger(path: str, config: DataConfig, seed: int) -> Source:
    if path:
        raise UserError(
            f"data: found 'ledger:{path}', but the problems of the ledger task are generated and "
            "not read from a file; use ledger without a path"
        )
    settings = config.ledger

    def questions(split: Split) -> list[Row]:
        size = settings.train_size if split == "train" else LEDGER_TEST_SIZE
        all_levels = tuple(range(1, ledger.MAX_LEVEL + 1))
        problems = ledger.make_problems(
            seed,
            size,
            max_operand=settings.max_operand,
            levels=settings.train_levels if split == "train" else all_levels,
            split=split,
        )
        rows = []
        for index, problem in enumerate(problems):
            row_id = f"ledger-{split}-{index}"
            rows.append(Row(row_id, problem.question, problem.answer, {}, problem.level))
        return rows

    def trace(row: Row, style: Any) -> str:
        assert row.answer is not None
        problem = ledger.Problem(row.question, row.answer, row.level)
        return ledger.render(problem, style, np.random.default_rng(0))

    styles = ("at_once", "steps", "redo")
    return Source("ledger", questions, score=EXACT, trace=trace, styles=styles)


def _refused(call: Callable[[], Any]) -> Any:
    """Calls an optional package and re-raises its ValueError as a UserError."""
    try:
        return call()
    except ValueError as error:
        raise UserError(str(error)) from None


def _others(package: str, path: str, config: DataConfig) -> Source:
    """Returns a source of the package `bacr_tasks`. Its questions do not depend on the seed."""
    options: dict[str, Any] = {}
    if package == "gym":
        options["short"] = config.prompt_format == "characters"
    tasks = _PACKAGES[package]
    if not tasks.CHECKED and not confinement.is_available():
        raise UserError(
            f"{package}:{path}: the code that scores its answers was not reviewed and must run in "
            "a sandbox, which this machine does not support (it needs Linux with seccomp on "
            "x86_64 or aarch64); use another set"
        )
    module = _refused(lambda: tasks.source(path, **options))
    questions = module.questions

    def checked_questions(split: Split) -> list[Mapping[str, Any]]:
        rows = _refused(lambda: questions(split))
        if module.SCORE == REPEATING:
            return list(rows)
        return _without_ambiguous(rows)

    module.questions = checked_questions
    base_path, _, _ = path.partition("?")
    source = _source_of(module, f"{package}:{base_path}", module.SCORE, whole=package == "gym")
    return dataclasses.replace(source, third_party=True, of_response=tasks.OF_RESPONSE)


def _without_ambiguous(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Removes rows with the same question and answer as an earlier row but different metadata."""
    first: dict[Any, Mapping[str, Any]] = {}
    unambiguous = []
    for row in rows:
        first_row = first.setdefault((row["question"], row["answer"]), row)
        if first_row["metadata"] == row["metadata"]:
            unambiguous.append(row)
    return unambiguous


def own_source(spec: str, key: str = "data") -> Source:
    """Returns the source that a user's Python file defines with its function `questions(split)`.

    The file may also define the functions render, score and trace, and the list STYLES.

    Raises:
      UserError: if the file can't be loaded, has no `questions`, or one of its functions fails.
    """
    try:
        module = module_of_file(key, spec)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"data: {spec!r} can't be imported ({error}); fix the file") from None
    if not callable(getattr(module, "questions", None)):
        raise UserError(
            f"data: {spec!r} does not define the function questions(split), which returns the "
            "rows of a split; add it"
        )
    styles = getattr(module, "STYLES", ())
    are_texts = isinstance(styles, tuple | list) and all(isinstance(one, str) for one in styles)
    if not are_texts or (hasattr(module, "trace") and not styles):
        raise UserError(
            f"data: STYLES of {spec!r} is {styles!r:.60}; it must be a list with the names of the "
            "trace styles, from short to long"
        )
    name = module.__name__.removeprefix("bacr_data_")
    return _source_of(module, name, spec if hasattr(module, "score") else RULES)


def _source_of(module: Any, name: str, score: str, *, whole: bool = False) -> Source:
    """Builds a source from the functions of a module, and checks their results.

    Args:
      module: object whose attributes are the functions.
      name: name of the source.
      score: as in `Source`.
      whole: as in `Source`.
    """

    def read_rows(split: Split) -> list[Row]:
        return _as_rows(module.questions(split), f"{name}-{split}", name)

    def questions(split: Split) -> list[Row]:
        return guarded("data", name, "questions", lambda: read_rows(split))

    def call_for_text(function: str, *args: Any) -> str:
        text = guarded("data", name, function, lambda: getattr(module, function)(*args))
        if not isinstance(text, str):
            raise UserError(
                f"data: the function {function} of {name!r} returned {text!r:.60} instead of a "
                "string; return a string"
            )
        return text

    render: Callable[[Row], str] = question_of
    if hasattr(module, "render"):
        render = functools.partial(call_for_text, "render")
    trace = None
    if hasattr(module, "trace"):
        trace = functools.partial(call_for_text, "trace")
    return Source(
        name,
        questions,
        render=render,
        score=score,
        whole=whole,
        trace=trace,
        styles=tuple(getattr(module, "STYLES", ())),
    )


def _as_rows(values: Iterable[Any], prefix: str, spec: str) -> list[Row]:
    """Converts mappings with question, and optionally id, answer, metadata and level, to rows.

    Args:
      values: the mappings.
      prefix: rows without an id get the id PREFIX-INDEX.
      spec: name of the set in error messages.
    """
    if not isinstance(values, Iterable):
        raise UserError(
            f"data: the function questions of {spec!r} returned {values!r:.60} instead of a list; "
            "return a list of rows"
        )
    rows: dict[str, Row] = {}
    for index, value in enumerate(values):
        row = _as_row(value, f"{prefix}-{index}")
        if row is None or row.id in rows:
            raise UserError(
                f"data: row {index} of {spec!r} is {value!r:.60}; a row must be a mapping with "
                "the string `question`, and optionally `id` (unique), `answer`, `metadata` (a "
                "mapping) and `level` (1 to 5)"
            )
        rows[row.id] = row
    return list(rows.values())


def _as_row(value: Any, default_id: str) -> Row | None:
    """Converts a mapping to a row. Returns None if a field or a value is not valid."""
    if not isinstance(value, Mapping):
        return None
    fields: dict[str, Any] = {"id": default_id, "answer": None}
    fields.update(value)
    try:
        row = Row(**fields)
    except TypeError:
        return None
    texts = (row.question, row.id, row.answer or "")
    if not all(isinstance(text, str) for text in texts):
        return None
    if not isinstance(row.metadata, Mapping) or row.level not in range(NUM_LEVELS + 1):
        return None
    return row


def open_source(spec: str, config: DataConfig, seed: int, key: str = "data") -> Source:
    """Opens the source that is specified as NAME, NAME:PATH or FILE.py.

    Raises:
      UserError: if the name is unknown, or the source reports an error.
    """
    name, _, path = spec.partition(":")
    if spec.endswith(".py"):
        return own_source(spec, key)
    if name == "ledger":
        return _ledger(path, config, seed)
    if name in _PACKAGES:
        return _others(name, path, config)
    tables = (*math_sets.LAYOUTS, *math_sets.TABLES)
    if name in tables:
        return math_sets.table_source(name, path, config)
    near = difflib.get_close_matches(name, ("ledger", *_PACKAGES, *tables), n=1, cutoff=0.0)
    raise UserError(
        f"{key}: {spec!r} does not begin with the name of a known data set; the most similar "
        f"known name is {near[0]!r}"
    )


def load_questions(
    spec: str | Sequence[str], config: DataConfig, seed: int, split: Split
) -> QuestionSet:
    """Reads or generates the questions of a set, or of a mixture such as `[ledger, 2*gym:gcd]`.

    Args:
      spec: name of the set, or the names of several sets, each with an optional weight.
      config: data settings of the run.
      seed: seed of the run, for sets that are generated.
      split: "train" or "test".
    """
    key = "data.train" if split == "train" else "data.eval"
    parts = [(weight, open_source(name, config, seed, key)) for weight, name in mixture(spec)]
    return question_set(parts, config, split)


def is_made(spec: str | Sequence[str]) -> bool:
    """True if the train and test splits of all sets in `spec` are disjoint by construction."""
    return all(
        name.partition(":")[0] in ("ledger", "gym", "verifiers") for _, name in mixture(spec)
    )


def own_tokenizer(data: DataConfig) -> CharacterTokenizer | None:
    """Returns the built-in tokenizer of a task, or None if a tokenizer folder must be loaded."""
    tokens = builtin_vocab(data)
    if tokens == "ledger":
        return ledger.ledger_tokenizer()
    if tokens:
        return CharacterTokenizer(VOCABULARY, longest=LONGEST)
    return None
