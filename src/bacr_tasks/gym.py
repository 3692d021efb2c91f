"""Loads questions for the config value `gym:NAME?field=value&field=value` from reasoning-gym.

NAME is a reasoning-gym generator, which creates questions of one kind, such as sums. An item is one
question with its answer and metadata. `bacr_jax.questions.loaders` calls `source`. All splits use
the same seed, and a hash of the question assigns each item to the training or test split. The
section "Splits" in docs/tasks.md explains the reason.

`_items_by_program` runs this module as a script, which prints the items of one split.
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
# Default number of items per split if the field `size` is missing. Test items are unique.
SIZES = {"train": 8192, "test": 500}
# Index of the first training item, and the upper bound of all indices. Test items have lower
# indices than training items.
TRAIN_START = 10_000
_LAST_INDEX = 1 << 31
# Fraction of all questions that belong to the test split, in 256ths (64 is a quarter).
TEST_SHARE = 64
# Maximum number of items that are generated per requested item. More items than requested are
# needed, because items of the other split are dropped. If these are not enough, the split is
# smaller than requested.
MOST_TRIES = 16
# The `size` that is passed to the generator. It is limited, because a few generators create all
# items in advance. They raise an IndexError for larger indices.
COUNTED = 20_000
# Maximum value of the field `size`.
MOST_SIZE = 1 << 24
# Number of values of the field `seed`. `pool_matrix` needs seed + index below 2^32.
NUM_SEEDS = 1 << 31
# `spread_seed` multiplies seeds by this number. It is odd, so different seeds have different
# products, and its ratio to `NUM_SEEDS` is the golden ratio, so near seeds have distant products.
_SEED_FACTOR = 1_327_217_885
# Number of difficulty levels.
NUM_LEVELS = 5
# Items whose answer contains this text are skipped, because sympy found no antiderivative.
UNSOLVED = "Integral("
# Generators whose items depend on the iteration order of Python sets, which varies between
# processes unless PYTHONHASHSEED is set. Determined by testing all generators of version 0.1.25.
ORDERED_BY_HASH = frozenset(
    (
        *("codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication"),
        *("ransom_note", "word_ladder"),
    )
)
# Path of the script that scores answers.
SCORER = str(Path(__file__).with_name("gym_score.py"))
# The scorers come from another package. CHECKED is True because they were reviewed (`gym_checked`).
THIRD_PARTY = True
CHECKED = True
# True if the scorers receive whole responses instead of answers.
OF_RESPONSE = False


def source(spec: str, *, short: bool) -> SimpleNamespace:
    """Builds the source of questions for a reasoning-gym generator.

    Args:
      spec: name of the generator and optional fields, without the prefix `gym:`.
      short: True for short prompts instead of English questions. Only the generators in
        `gym_traces.SHORT` have short prompts.

    Returns:
      An object with the interface described in `bacr_tasks`.

    Raises:
      ValueError: if reasoning-gym is not installed, a name or value is invalid, the generator has
        no short prompts (or none with these values), or its scorer was not reviewed.
    """
    where = f"gym:{spec}"
    name, _, query = spec.partition("?")
    dataset_class, config_class = _generator(where, name)
    form = SHORT.get(name)
    if short and form is None:
        raise ValueError(
            f"{where}: with data.prompt_format=characters, only the generators {', '.join(SHORT)} "
            "are supported, because only they have prompts that are short enough; use one of "
            "these, or set another prompt format and model.path"
        )
    if not gym_checked.is_checked(name, dataset_class.__module__):
        version = gym_checked.VERSION
        raise ValueError(
            f"{where}: the scorer of this generator differs from version {version} of "
            "reasoning-gym, whose scorers were reviewed and don't run answers as code; run pip "
            f"install reasoning-gym=={version}, or use another generator"
        )
    fields = _fields(where, query, config_class)
    dataset = _dataset(where, fields)
    if short and form is not None:
        form.check_fields(where, fields)

    def questions(split: Split) -> list[dict[str, Any]]:
        size = fields.get("size", SIZES[split])
        if name in ORDERED_BY_HASH and os.environ.get("PYTHONHASHSEED") != "0":
            items = _items_by_program(where, fields, split, size)
        else:
            items = list(_items(where, dataset, split, size))
        if "size" in fields and len(items) < size:
            raise ValueError(
                f"{where}: with these field values, the {split} split has only {len(items)} "
                "questions, fewer than 'size'; use a smaller size, or leave it out"
            )
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
    """Returns a function trace(row, style) that writes solution traces for a language model."""

    def trace(row: Any, style: str) -> str:
        return in_words(form.trace(row, style), style)

    return trace


def _generator(where: str, name: str) -> tuple[Any, Any]:
    """Returns the data set class and the config class of a generator.

    Raises:
      ValueError: if reasoning-gym is not installed or has no generator with this name.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(
            f"{where}: the package reasoning-gym is not installed; run pip install "
            "'bacr_jax[gym]', or pip install -e '.[gym]' in a clone of the repository"
        ) from None
    generators = reasoning_gym.factory.DATASETS
    if name not in generators:
        nearest = _nearest(name, generators)
        raise ValueError(
            f"{where}: reasoning-gym has no generator {name!r}; the most similar name is "
            f"{nearest!r}"
        )
    return generators[name]


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns the candidate that is most similar to a name."""
    (nearest,) = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.0)
    return nearest


def _dataset(where: str, fields: Mapping[str, Any]) -> Any:
    """Creates the reasoning-gym data set of a generator.

    Args:
      where: the full spec, including `gym:`. Error messages begin with it.
      fields: values of the generator's config fields.

    Raises:
      ValueError: if reasoning-gym rejects the field values.
    """
    name = where.removeprefix("gym:").partition("?")[0]
    dataset_class, config_class = _generator(where, name)
    try:
        return dataset_class(config_class(**{"seed": SEED, **fields, "size": COUNTED}))
    # reasoning-gym validates fields with assertions, and inconsistent fields can raise any
    # exception.
    except Exception as error:
        raise ValueError(
            f"{where}: reasoning-gym can't create the data set with these field values "
            f"({error or type(error).__name__}); use other values"
        ) from None


def _fields(where: str, query: str, config_class: Any) -> dict[str, Any]:
    """Parses `field=value&field=value` and converts each value to the type of its field.

    Returns:
      The fields for the package. `spread_seed` has replaced the seed.

    Raises:
      ValueError: if a field is unknown or repeated, if a value has the wrong type, or if `size` or
        `seed` is out of range.
    """
    hints = typing.get_type_hints(config_class)
    fields: dict[str, Any] = {}
    for part in query.split("&"):
        if not part:
            continue
        name, _, text = part.partition("=")
        if name not in hints:
            nearest = _nearest(name, hints)
            raise ValueError(
                f"{where}: the generator has no field {name!r}; the most similar name is "
                f"{nearest!r}"
            )
        if name in fields:
            raise ValueError(f"{where}: the field {name!r} appears twice; keep only one of them")
        value = _yaml_value(text)
        try:
            fields[name] = _convert(hints[name], value)
        except (TypeError, ValueError):
            type_name = getattr(hints[name], "__name__", hints[name])
            raise ValueError(
                f"{where}: the field {name!r} can't be {value!r:.60}; use a value of type "
                f"{type_name}"
            ) from None
    if not 1 <= fields.get("size", 1) <= MOST_SIZE:
        raise ValueError(
            f"{where}: the field 'size' can't be {fields['size']}; use a number from 1 to "
            f"{MOST_SIZE}"
        )
    if "seed" in fields:
        seed = fields["seed"]
        if seed is None or not 0 <= seed < NUM_SEEDS:
            raise ValueError(
                f"{where}: the field 'seed' can't be {seed}; use a whole number from 0 to "
                f"{NUM_SEEDS - 1}"
            )
        fields["seed"] = spread_seed(seed)
    return fields


def spread_seed(seed: int) -> int:
    """Maps seeds to distant seeds for the package, and 0 to 0.

    The package seeds its random numbers with seed + index. With near seeds, two sets would
    therefore contain the same items at shifted indices.

    Args:
      seed: from 0 to `NUM_SEEDS` - 1.
    """
    return seed * _SEED_FACTOR % NUM_SEEDS


def _yaml_value(text: str) -> Any:
    """Parses a value as YAML. Text that is not valid YAML is returned unchanged."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def _convert(hint: Any, value: Any) -> Any:
    """Converts a parsed YAML value to the type of a config field.

    Raises:
      TypeError, ValueError: if the value does not match the type.
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
    # YAML 1.1 parses 1e-3 as a string.
    if origin is float and type(value) in (int, str):
        return float(value)
    if origin is Literal and value in members:
        return value
    if origin in (Any, type(value)):
        return value
    raise TypeError


def is_test(question: str) -> bool:
    """True if a question belongs to the test split, based on a hash of its text.

    Leading and trailing whitespace and the amount of whitespace between words do not affect the
    hash.
    """
    digest = hashlib.sha256(_normalized(question).encode()).digest()
    return digest[0] < TEST_SHARE


def _normalized(question: str) -> str:
    """Replaces each sequence of whitespace by one space and strips both ends."""
    return " ".join(question.split())


def _items(
    where: str, dataset: Any, split: Split, size: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields up to `size` items of a split, each with its index.

    Test items are unique, but training items may be repeated. An item depends only on its index:
    the global random state of Python and NumPy, which a few generators use, is seeded for each item
    and restored afterwards.

    Raises:
      ValueError: if the generator fails for an item.
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
            # The generator creates all items in advance and has no further items.
            if index >= COUNTED and isinstance(error, IndexError):
                return
            raise ValueError(
                f"{where}: the generator fails at item {index} ({type(error).__name__}: {error}); "
                "use other field values"
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
    """Seeds the global random state of Python and NumPy, and restores it when the context exits."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 (the generators use the global state)
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
    """Generates the items of a split in a subprocess in which sets have a fixed iteration order.

    Raises:
      ValueError: if the generator fails for an item.
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
        lines = result.stderr.strip().splitlines() or [
            f"{where}: the process that generates the items ended without returning any"
        ]
        raise ValueError(lines[-1])
    return ast.literal_eval(result.stdout)


def level_of(metadata: Mapping[str, Any]) -> int:
    """Returns the difficulty level of an item, from 1 to 5, or 0 if its metadata has no ranges.

    The entry `difficulty` of the metadata contains the range of each generator parameter, for
    example {"num_terms": (2, 6)}. The item's value of a parameter is stored in the metadata under
    the same name. The level is computed from the mean relative position of the values in their
    ranges.
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
    """Prints the items that `_items_by_program` requests, as a Python literal."""
    where, fields, split, size = ast.literal_eval(request)
    try:
        # Redirect stdout, because a few generators print to it.
        with contextlib.redirect_stdout(sys.stderr):
            items = list(_items(where, _dataset(where, fields), split, size))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    sys.stdout.write(repr(items))


if __name__ == "__main__":
    main(sys.argv[1])
