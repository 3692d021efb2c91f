"""Slow tests in slices of about equal time: a change runs one, and ten changes run all."""

import functools
import json
from pathlib import Path

import pytest

# Seconds of a file's slow tests, or of a test that is a unit of its own, on an idle machine.
SECONDS = Path(__file__).with_name("slow_seconds.json")
# Of a file that is not in the table.
UNKNOWN = 20.0
TESTS = Path(__file__).parents[1]


def slice_of(text):
    """(3, 10) for "3/10"."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise pytest.UsageError(f"--slice {text}: write K/N with K below N, such as 3/10")
    return int(number), int(count)


def unit_of(nodeid, seconds):
    """What runs as a whole: a file, whose tests share programs, or a test that the table names.

    With or without its parameters.
    """
    file, _, _ = nodeid.partition("::")
    return next((x for x in (nodeid, nodeid.partition("[")[0]) if x in seconds), file)


def dealt(units, count, seconds):
    """The slice of every unit: the longest first, each where least is waiting."""
    waiting, slices = [0.0] * count, {}
    for unit in sorted(set(units), key=lambda unit: (-seconds.get(unit, UNKNOWN), unit)):
        slices[unit] = waiting.index(min(waiting))
        waiting[slices[unit]] += seconds.get(unit, UNKNOWN)
    return slices


def for_two(units, seconds):
    """The order of tests, given by their units, in which two workers end at about the same time.

    `--dist worksteal` cuts it in the middle, and takes over from the other's end: so the longest
    units come first in each half, and what is left at an end is short.
    """
    half = dealt(units, 2, seconds)
    longest_first = lambda i: (-seconds.get(units[i], UNKNOWN), units[i])
    longest = sorted(range(len(units)), key=longest_first)
    first, second = ([i for i in longest if half[units[i]] == number] for number in (0, 1))
    while len(first) > len(units) // 2:
        second.append(first.pop())
    while len(first) < len(units) // 2:
        first.append(second.pop())
    return [*first, *second]


def slow_files(tests):
    """Files with a slow test, also those left out here for want of a package: all have a slice."""
    files = sorted(tests.rglob("test_*.py"))
    return [str(p.relative_to(tests.parent)) for p in files if "mark.slow" in p.read_text()]


@functools.cache
def inside(text):
    """The units of a slice, and the seconds of those that the table names."""
    number, count = slice_of(text)
    seconds = json.loads(SECONDS.read_text())
    slices = dealt([*seconds, *slow_files(TESTS)], count, seconds)
    return {unit for unit in slices if slices[unit] == number}, seconds


def is_elsewhere(path, config):
    """Whether a file has nothing of `--slice`: reading all of them takes a fifth of a minute."""
    if config.option.slice is None or not path.name.startswith("test_"):
        return False
    units, _ = inside(config.option.slice)
    return str(path.relative_to(TESTS.parent)) not in {unit.partition("::")[0] for unit in units}


def keep_slice(config, items):
    """Leaves the items of `--slice`, the longest first for each of two; without it, all."""
    if config.option.slice is None:
        return
    units, seconds = inside(config.option.slice)
    kept = [unit_of(item.nodeid, seconds) in units for item in items]
    config.hook.pytest_deselected(items=[i for i, here in zip(items, kept) if not here])
    items[:] = [item for item, here in zip(items, kept) if here]
    order = for_two([unit_of(item.nodeid, seconds) for item in items], seconds)
    items[:] = [items[i] for i in order]
