"""Divides the slow tests into slices of about equal duration.

`.ci/run` runs one of ten slices, and the next slice at the next commit, so that ten commits run all
slow tests. A slice consists of units. A unit is a test file, or a single test that
slow_seconds.json contains.
"""

import functools
import json
from pathlib import Path

import pytest

# Duration of each unit in seconds on an idle machine.
SECONDS = Path(__file__).with_name("slow_seconds.json")
# Assumed duration of a file that is not in the table, in seconds.
UNKNOWN = 20.0
TESTS = Path(__file__).parents[1]


def slice_of(text):
    """Parses the value of `--slice`: "3/10" becomes (3, 10)."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise pytest.UsageError(f"--slice {text}: write K/N with K below N, such as 3/10")
    return int(number), int(count)


def unit_of(nodeid, seconds):
    """Returns the unit to which a test belongs.

    This is the test if the table contains it, with or without its parameters. Otherwise it is the
    test's file, because the tests of a file share compiled programs.

    Args:
      nodeid: pytest's id of the test.
      seconds: duration of each unit in the table.
    """
    file, _, _ = nodeid.partition("::")
    return next((x for x in (nodeid, nodeid.partition("[")[0]) if x in seconds), file)


def dealt(units, count, seconds):
    """Assigns units to slices, and returns the index of each unit's slice.

    The units are assigned in the order of their durations, longest first, each to the slice with
    the shortest total duration so far.

    Args:
      count: number of slices.
      seconds: duration of each unit in the table.
    """
    waiting, slices = [0.0] * count, {}
    for unit in sorted(set(units), key=lambda unit: (-seconds.get(unit, UNKNOWN), unit)):
        slices[unit] = waiting.index(min(waiting))
        waiting[slices[unit]] += seconds.get(unit, UNKNOWN)
    return slices


def for_two(units, seconds):
    """Orders tests so that two workers finish at about the same time.

    `--dist worksteal` gives each worker one half of the tests. A worker that has finished takes
    over tests from the end of the other half. Each half therefore begins with the longest units, so
    that the tests at its end are short.

    Args:
      units: unit of each test.
      seconds: duration of each unit in the table.

    Returns:
      The indices of the tests in the new order.
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
    """Returns the paths of all files with a slow test.

    Files are found by their text, so files that are skipped because a package is missing are
    included. The slices are therefore the same on all machines.
    """
    files = sorted(tests.rglob("test_*.py"))
    return [str(p.relative_to(tests.parent)) for p in files if "mark.slow" in p.read_text()]


@functools.cache
def inside(text):
    """Returns the units of a slice, and the duration of each unit in the table.

    Args:
      text: value of `--slice`.
    """
    number, count = slice_of(text)
    seconds = json.loads(SECONDS.read_text())
    slices = dealt([*seconds, *slow_files(TESTS)], count, seconds)
    return {unit for unit in slices if slices[unit] == number}, seconds


def is_elsewhere(path, config):
    """True if a test file contains no test of `--slice`, so that pytest need not import the file.

    Importing all test files takes 12 seconds.
    """
    if config.option.slice is None or not path.name.startswith("test_"):
        return False
    units, _ = inside(config.option.slice)
    return str(path.relative_to(TESTS.parent)) not in {unit.partition("::")[0] for unit in units}


def keep_slice(config, items):
    """Removes all tests that are not in `--slice`, and orders the others with `for_two`.

    Without `--slice`, nothing changes.
    """
    if config.option.slice is None:
        return
    units, seconds = inside(config.option.slice)
    kept = [unit_of(item.nodeid, seconds) in units for item in items]
    config.hook.pytest_deselected(items=[i for i, here in zip(items, kept) if not here])
    items[:] = [item for item, here in zip(items, kept) if here]
    order = for_two([unit_of(item.nodeid, seconds) for item in items], seconds)
    items[:] = [items[i] for i in order]
