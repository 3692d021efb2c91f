"""reasoning-gym's generators: `gym:NAME?field=value&field=value`, any of them and of its fields.

All splits have one seed, and pass over the items that a hash gives to another split; docs/data.md
says why ("Splits").
"""

import contextlib
import difflib
import hashlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

from bacr_tasks import gym_checked
from bacr_tasks.gym_traces import SHORT, STYLES, in_words

Split = Literal["train", "test"]
SEED = 0
# Items of a split where `size` says nothing; test items are all different.
SIZES = {"train": 8192, "test": 500}
TRAIN_START = 10_000
# Test questions among all, in 256ths.
TEST_SHARE = 64
# Items looked at for one that is taken, before a set stays smaller.
MOST_TRIES = 16
# A few generators make or count their items at the start, and refuse more than this.
COUNTED = 20_000
MOST_SIZE = 1 << 24
NUM_LEVELS = 5
# In the reference of an item for which sympy found no antiderivative: the item is passed over.
UNSOLVED = "Integral("
SCORER = str(Path(__file__).with_name("gym_score.py"))
# The scorer is a package's, which was read.
CHECKED = True


def source(spec: str, *, short: bool) -> SimpleNamespace:
    """The source that `gym:` and this name.

    Args:
      short: prompts are what the question is about, without its English (`gym_traces.SHORT`).

    Raises:
      ValueError: no reasoning-gym, no such generator or field, a value it can't have, no short
        form, or a scorer that was not checked.
    """
    where = f"gym:{spec}"
    generators = _generators(where)
    name, _, query = spec.partition("?")
    if name not in generators:
        near = difflib.get_close_matches(name, generators, n=1, cutoff=0.0)
        raise ValueError(f"{where}: no generator {name!r}; the nearest is {near[0]!r}")
    form = SHORT.get(name)
    if short and form is None:
        raise ValueError(
            f"{where}: data.prompt_format=characters has short prompts for {', '.join(SHORT)}; "
            "write one of these, or another prompt format and model.path"
        )
    dataset_class, config_class = generators[name]
    if not gym_checked.is_checked(name, dataset_class.__module__):
        raise ValueError(
            f"{where}: its scorer is not one of those of reasoning-gym {gym_checked.VERSION} that "
            "were checked not to run answers as code; write pip install "
            f"reasoning-gym=={gym_checked.VERSION}, or another generator"
        )
    fields = _fields(where, query, config_class)
    try:
        dataset = dataset_class(config_class(**{"seed": SEED, **fields, "size": COUNTED}))
    # Their checks are assertions, and fields that contradict each other fail as they may.
    except Exception as error:
        raise ValueError(f"{where}: {error or type(error).__name__}; write other fields") from None

    def questions(split: Split) -> list[dict[str, Any]]:
        rows = []
        for index, item in _items(where, dataset, split, fields.get("size", SIZES[split])):
            metadata = {**item["metadata"], "reasoning_gym": (name, fields)}
            answer = item["answer"]
            if short and form is not None and form.answer is not None:
                answer = form.answer(metadata)
            level, id = level_of(metadata), f"{name}-{split}-{index}"
            made = (id, item["question"], answer, metadata, level)
            rows.append(dict(zip(("id", "question", "answer", "metadata", "level"), made)))
        return rows

    found = SimpleNamespace(questions=questions, SCORE=SCORER)
    if short and form is not None:
        found.render = form.prompt
    if form is not None:
        found.STYLES = STYLES
        found.trace = (
            form.trace if short else lambda row, style: in_words(form.trace(row, style), style)
        )
    return found


def _generators(where: str) -> Mapping[str, tuple[Any, Any]]:
    """Classes of data set and config by registered name."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(
            f"{where}: needs reasoning-gym, which is not installed; write pip install "
            "bacr_jax[gym], or in a clone pip install -e '.[gym]'"
        ) from None
    return dict(reasoning_gym.factory.DATASETS)


def _fields(where: str, query: str, config_class: Any) -> dict[str, Any]:
    """The fields that are set, with values of their types."""
    hints, fields = typing.get_type_hints(config_class), {}
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0.0)
            raise ValueError(f"{where}: no field {name!r}; the nearest is {near[0]!r}")
        if name in fields:
            raise ValueError(f"{where}: {name} stands twice; write it once")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            value = text
        try:
            fields[name] = _converted(hints[name], value)
        except (TypeError, ValueError):
            wanted = getattr(hints[name], "__name__", hints[name])
            raise ValueError(
                f"{where}: {name} can't be {value!r:.60}; write a value of type {wanted}"
            ) from None
    if not 1 <= fields.get("size", 1) <= MOST_SIZE:
        raise ValueError(f"{where}: size can't be {fields['size']}; write 1 to {MOST_SIZE}")
    return fields


def _converted(hint: Any, value: Any) -> Any:
    """A value of YAML in a field's type; TypeError or ValueError: it is none of that type."""
    origin, members = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for member in members:
            with contextlib.suppress(TypeError, ValueError):
                return _converted(member, value)
    elif origin in (list, tuple, Sequence) and isinstance(value, list):
        items = [_converted((*members, Any)[0], item) for item in value]
        return items if origin is list else tuple(items)
    elif origin is float and type(value) in (int, str):
        # YAML 1.1 reads 1e-3 as text.
        return float(value)
    elif (origin is Literal and value in members) or origin in (Any, type(value)):
        return value
    raise TypeError


def is_test(question: str) -> bool:
    """Whether a question belongs to the test split, by a hash of its text, blanks aside."""
    text = " ".join(question.split())
    return hashlib.sha256(text.encode()).digest()[0] < TEST_SHARE


def _items(
    where: str, dataset: Any, split: Split, size: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Items of a split by their index; all of the test split are different."""
    start, end = (0, TRAIN_START) if split == "test" else (TRAIN_START, 1 << 31)
    seen: set[str] = set()
    for index in range(start, min(end, start + MOST_TRIES * size)):
        try:
            item = dataset[index]
        except Exception as error:
            if index >= COUNTED and isinstance(error, IndexError):
                return
            raise ValueError(
                f"{where}: its item {index} fails ({type(error).__name__}: {error}); write other "
                "fields"
            ) from None
        text = " ".join(item["question"].split())
        of_test = is_test(text)
        if of_test != (split == "test") or (of_test and text in seen):
            continue
        if UNSOLVED in str(item["answer"]):
            continue
        # Training items are as often alike as the generator makes them.
        seen.add(text if of_test else str(index))
        yield index, item
        if len(seen) == size:
            return


def level_of(metadata: Mapping[str, Any]) -> int:
    """Where an item lies between its generator's ranges, as a level; 0: it doesn't say.

    The difficulty names ranges, {"num_terms": (2, 6)}; the item has its own value of that name.
    """
    shares, ranges = [], metadata.get("difficulty")
    for name, bounds in ranges.items() if isinstance(ranges, dict) else ():
        ends = bounds if isinstance(bounds, tuple | list) and len(bounds) == 2 else (0, 0)
        numbers = [x for x in (metadata.get(name), *ends) if isinstance(x, int | float)]
        if len(numbers) == 3 and ends[0] < ends[1]:
            shares.append((numbers[0] - ends[0]) / (ends[1] - ends[0]))
    if not shares:
        return 0
    return 1 + min(max(int(NUM_LEVELS * sum(shares) / len(shares)), 0), NUM_LEVELS - 1)
