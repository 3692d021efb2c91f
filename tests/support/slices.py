"""Slow tests in slices of about equal time: a change runs one, and ten changes run all."""

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


def slow_files(tests):
    """Files with a slow test, also those left out here for want of a package: all have a slice."""
    files = sorted(tests.rglob("test_*.py"))
    return [str(p.relative_to(tests.parent)) for p in files if "mark.slow" in p.read_text()]


def keep_slice(config, items):
    """Leaves the items of `--slice`; without it, all."""
    if config.option.slice is None:
        return
    number, count = slice_of(config.option.slice)
    seconds = json.loads(SECONDS.read_text())
    units = [unit_of(item.nodeid, seconds) for item in items]
    slices = dealt([*units, *seconds, *slow_files(TESTS)], count, seconds)
    inside = [slices[unit] == number for unit in units]
    config.hook.pytest_deselected(items=[i for i, kept in zip(items, inside) if not kept])
    items[:] = [item for item, kept in zip(items, inside) if kept]
