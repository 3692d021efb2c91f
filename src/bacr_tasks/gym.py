"""The source `gym:NAME?field=value&field=value`: a generator of reasoning-gym with some fields set.

`bacr_jax.questions.loaders` calls `source`. All splits use one seed; a hash of the question decides
which split an item belongs to (docs/data.md gives the reason under "Splits").

As a program it prints the items of one split (`_items_by_program`).
"""

import ast
import contextlib
import difflib
import hashlib
import os
import random
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import yaml

from bacr_tasks import gym_checked
from bacr_tasks.gym_traces import SHORT, STYLES, ShortForm, in_words

Split = Literal["train", "test"]
SEED = 0
# Items of a split without the field `size`. Items of a test split are all different.
SIZES = {"train": 8192, "test": 500}
# Index of the first training item, and the end of all indices.
TRAIN_START = 10_000
_LAST_INDEX = 1 << 31
# Share of test questions among all questions, in 256ths.
TEST_SHARE = 64
# Items that are made for one that is taken. A set stays smaller if that is not enough.
MOST_TRIES = 16
# The `size` of the data set that makes the items. A few generators make all items at the start, and
# raise IndexError above it.
COUNTED = 20_000
MOST_SIZE = 1 << 24
NUM_LEVELS = 5
# Part of an item's answer if sympy found no antiderivative; such an item is left out.
UNSOLVED = "Integral("
# Generators whose items depend on the order of Python's sets, which differs from process to process
# unless PYTHONHASHSEED is set. Measured on all generators of 0.1.25.
ORDERED_BY_HASH = frozenset(
    (
        *("codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication"),
        *("ransom_note", "word_ladder"),
    )
)
SCORER = str(Path(__file__).with_name("gym_score.py"))
# The scorers belong to another package and were read (`gym_checked`).
THIRD_PARTY = True
CHECKED = True


def source(spec: str, *, short: bool) -> SimpleNamespace:
    """Makes the source of a generator.

    Args:
      spec: the generator's name, `?` and fields, without `gym:`.
      short: True for short prompts without English sentences (`gym_traces.SHORT`).

    Raises:
      ValueError: reasoning-gym is missing, a name or value is wrong, the generator has no short
        prompts, or its scorer was not checked.
    """
    where = f"gym:{spec}"
    name, _, query = spec.partition("?")
    dataset_class, config_class = _generator(where, name)
    form = SHORT.get(name)
    if short and form is None:
        raise ValueError(
            f"{where}: data.prompt_format=characters has short prompts for {', '.join(SHORT)}; "
            "write one of these, or another prompt format and model.path"
        )
    if not gym_checked.is_checked(name, dataset_class.__module__):
        version = gym_checked.VERSION
        raise ValueError(
            f"{where}: its scorer differs from reasoning-gym {version}, whose scorers were checked "
            f"not to run answers as code; write pip install reasoning-gym=={version}, or another "
            "generator"
        )
    fields = _fields(where, query, config_class)
    dataset = _dataset(where, fields)

    def questions(split: Split) -> list[dict[str, Any]]:
        size = fields.get("size", SIZES[split])
        if name in ORDERED_BY_HASH and os.environ.get("PYTHONHASHSEED") != "0":
            items = _items_by_program(where, fields, split, size)
        else:
            items = list(_items(where, dataset, split, size))
        rows = []
        for index, item in items:
            metadata = {**item["metadata"], "reasoning_gym": (name, fields)}
            answer = item["answer"]
            if short and form is not None and form.answer is not None:
                answer = form.answer(metadata)
            row = {
                "id": f"{name}-{split}-{index}",
                "question": item["question"],
                "answer": answer,
                "metadata": metadata,
                "level": level_of(metadata),
            }
            rows.append(row)
        return rows

    result = SimpleNamespace(questions=questions, SCORE=SCORER)
    if form is not None:
        result.STYLES = STYLES
        result.trace = form.trace if short else _traces_in_words(form)
        if short:
            result.render = form.prompt
    return result


def _traces_in_words(form: ShortForm) -> Callable[[Any, str], str]:
    """Returns a function of a row and a style that writes the trace for a language model."""

    def trace(row: Any, style: str) -> str:
        return in_words(form.trace(row, style), style)

    return trace


def _generator(where: str, name: str) -> tuple[Any, Any]:
    """Returns the classes of a generator's data set and config.

    Raises:
      ValueError: reasoning-gym is missing, or has no generator of this name.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(
            f"{where}: needs reasoning-gym, which is not installed; write pip install "
            "bacr_jax[gym], or in a clone pip install -e '.[gym]'"
        ) from None
    generators = reasoning_gym.factory.DATASETS
    if name not in generators:
        nearest = _nearest(name, generators)
        raise ValueError(f"{where}: no generator {name!r}; the nearest is {nearest!r}")
    return generators[name]


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns the candidate that is most similar to a name."""
    (nearest,) = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.0)
    return nearest


def _dataset(where: str, fields: Mapping[str, Any]) -> Any:
    """Makes the data set of a generator.

    Args:
      where: `gym:` and a spec.

    Raises:
      ValueError: the fields contradict each other.
    """
    name = where.removeprefix("gym:").partition("?")[0]
    dataset_class, config_class = _generator(where, name)
    try:
        return dataset_class(config_class(**{"seed": SEED, **fields, "size": COUNTED}))
    # Fields are checked by assertions, and contradictions can raise anything.
    except Exception as error:
        raise ValueError(f"{where}: {error or type(error).__name__}; write other fields") from None


def _fields(where: str, query: str, config_class: Any) -> dict[str, Any]:
    """Reads `field=value&field=value` into values of the fields' types.

    Raises:
      ValueError: a field is unknown or repeated, or a value has the wrong type or size.
    """
    hints = typing.get_type_hints(config_class)
    fields: dict[str, Any] = {}
    for part in query.split("&"):
        if not part:
            continue
        name, _, text = part.partition("=")
        if name not in hints:
            nearest = _nearest(name, hints)
            raise ValueError(f"{where}: no field {name!r}; the nearest is {nearest!r}")
        if name in fields:
            raise ValueError(f"{where}: {name} appears twice; write it once")
        value = _yaml_value(text)
        try:
            fields[name] = _convert(hints[name], value)
        except (TypeError, ValueError):
            type_name = getattr(hints[name], "__name__", hints[name])
            raise ValueError(
                f"{where}: {name} can't be {value!r:.60}; write a value of type {type_name}"
            ) from None
    if not 1 <= fields.get("size", 1) <= MOST_SIZE:
        raise ValueError(f"{where}: size can't be {fields['size']}; write 1 to {MOST_SIZE}")
    return fields


def _yaml_value(text: str) -> Any:
    """Reads a value as YAML; a text that YAML refuses stays a text."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def _convert(hint: Any, value: Any) -> Any:
    """Converts a value of YAML to the type of a field.

    Raises:
      TypeError, ValueError: the value does not fit the type.
    """
    origin = typing.get_origin(hint) or hint
    members = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for member in members:
            with contextlib.suppress(TypeError, ValueError):
                return _convert(member, value)
        raise TypeError
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        item_hint = members[0] if members else Any
        items = [_convert(item_hint, item) for item in value]
        return items if origin is list else tuple(items)
    # YAML 1.1 reads 1e-3 as a text.
    if origin is float and type(value) in (int, str):
        return float(value)
    if origin is Literal and value in members:
        return value
    if origin in (Any, type(value)):
        return value
    raise TypeError


def is_test(question: str) -> bool:
    """True if a question belongs to the test split, by a hash of its text.

    Blanks at the ends and the width of blanks do not change the hash.
    """
    digest = hashlib.sha256(_normalized(question).encode()).digest()
    return digest[0] < TEST_SHARE


def _normalized(question: str) -> str:
    """Returns a text with single blanks between words."""
    return " ".join(question.split())


def _items(
    where: str, dataset: Any, split: Split, size: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields up to `size` items of a split, each with its index.

    Test items are all different. Training items repeat as often as the generator makes them. An
    item depends on its index alone: the global random numbers of Python and NumPy, which a few
    generators use, are seeded for each item and restored afterwards.

    Raises:
      ValueError: the generator fails on an item.
    """
    test = split == "test"
    start = 0 if test else TRAIN_START
    end = TRAIN_START if test else _LAST_INDEX
    texts: set[str] = set()
    count = 0
    for index in range(start, min(end, start + MOST_TRIES * size)):
        try:
            with _seeded_global_random(index):
                item = dataset[index]
        except Exception as error:
            # A generator with a fixed number of items has no more.
            if index >= COUNTED and isinstance(error, IndexError):
                return
            raise ValueError(
                f"{where}: its item {index} fails ({type(error).__name__}: {error}); write other "
                "fields"
            ) from None
        text = _normalized(item["question"])
        if is_test(text) != test or UNSOLVED in str(item["answer"]):
            continue
        if test:
            if text in texts:
                continue
            texts.add(text)
        yield index, item
        count += 1
        if count == size:
            return


@contextlib.contextmanager
def _seeded_global_random(seed: int) -> Iterator[None]:
    """Seeds the global random numbers of Python and NumPy, and restores them at the end."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 (the generators call the global functions)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _items_by_program(
    where: str, fields: Mapping[str, Any], split: Split, size: int
) -> list[tuple[int, dict[str, Any]]]:
    """Returns the items of `_items`, made by a process in which the order of sets is fixed.

    Raises:
      ValueError: the generator fails on an item.
    """
    request = repr((where, dict(fields), split, size))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bacr_tasks.gym", request],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"{where}: its process ended without items"]
        raise ValueError(lines[-1])
    return ast.literal_eval(result.stdout)


def level_of(metadata: Mapping[str, Any]) -> int:
    """Returns an item's level from 1 to 5, or 0 if its metadata has no ranges.

    `difficulty` contains the generator's ranges, such as {"num_terms": (2, 6)}, and the metadata
    contains the item's values by the same names. The level is the mean position in these ranges.
    """
    ranges = metadata.get("difficulty")
    if not isinstance(ranges, dict):
        return 0
    positions = []
    for name, bounds in ranges.items():
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            continue
        low, high = bounds
        value = metadata.get(name)
        are_numbers = all(isinstance(number, int | float) for number in (value, low, high))
        if are_numbers and low < high:
            positions.append((value - low) / (high - low))
    if not positions:
        return 0
    level = int(NUM_LEVELS * sum(positions) / len(positions))
    return 1 + min(max(level, 0), NUM_LEVELS - 1)


def main(request: str) -> None:
    """Prints the items that `_items_by_program` asks for, as a Python literal."""
    where, fields, split, size = ast.literal_eval(request)
    try:
        # A few generators print.
        with contextlib.redirect_stdout(sys.stderr):
            items = list(_items(where, _dataset(where, fields), split, size))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    sys.stdout.write(repr(items))


if __name__ == "__main__":
    main(sys.argv[1])
