"""Tests that the predictions in docs/recipes.md agree with the current output of `bacr plan`."""

import re
from pathlib import Path

import pytest

from bacr_jax.config import io as config_io
from bacr_plan import schedule, seconds
from bacr_plan.devices import DEVICES
from bacr_plan.workload import sizes_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
HEADER = re.compile(
    r"^\| config \| .* \| seconds of a step: (.*?) \| GPU-hours \|.*$", re.MULTILINE
)
# Presets for CPUs, for which `bacr plan` makes no predictions.
OF_CPUS = {"qwen2.5-0.5b-gsm8k"}


def numbers(cell):
    return [float(number.replace(",", "")) for number in cell.split(", ")]


def planned_recipes():
    """Rows of the tables of planned figures: preset, cards, and the row's cells."""
    recipes = []
    for header in HEADER.finditer(PAGE):
        rows = PAGE[header.end() :].partition("\n\n")[0].splitlines()[2:]
        for row in rows:
            name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
            name = name.removesuffix(", adapters").strip("`")
            recipes.append((name, header[1].split(", "), cells))
    return recipes


def test_every_gpu_preset_has_a_plan():
    named = [name for name, _, _ in planned_recipes()]
    presets = [(ROOT / "configs").glob(f"{family}-*.yaml") for family in ("qwen2.5", "r1-distill")]
    assert set(named) == {path.stem for paths in presets for path in paths} - OF_CPUS
    assert len(named) == len(set(named))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cards", "cells"), planned_recipes(), ids=[name for name, _, _ in planned_recipes()]
)
def test_the_page_says_what_plan_says(name, cards, cells):
    _, page_seconds, page_hours, page_minutes = cells[:4]
    devices = 8 if name.endswith("-math") else 1
    config = config_io.load([ROOT / "configs" / f"{name}.yaml"])
    work, layout = sizes_of(config, devices)
    made = schedule.iteration(work, layout)
    names = [card.removeprefix("8 x ").lower().replace(" ", "-") for card in cards]
    planned = [
        sum(seconds.step_seconds(work, layout, DEVICES[card], made).values()) for card in names
    ]
    assert numbers(page_seconds) == [round(one) for one in planned]
    steps = config.train.steps or 340
    hours = [one * steps * devices / 3600 for one in planned]
    assert numbers(page_hours) == [round(one) for one in hours]
    minutes = seconds.evaluation_seconds(work, layout, DEVICES[names[0]]) / 60
    assert numbers(page_minutes) == [round(minutes)]
