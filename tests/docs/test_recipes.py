"""The planned figures of docs/recipes.md are those that `plan` says today."""

import re
from pathlib import Path

import pytest

from bacr_jax.config import io as config_io
from bacr_plan import schedule, seconds
from bacr_plan.devices import DEVICES
from bacr_plan.workload import sizes_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
STEP = re.compile(r"^\| seconds of a step: (.*) \| (.*) \|$", re.MULTILINE)
HOURS = re.compile(r"^\| GPU-hours of (\d+) steps \| (.*) \|$", re.MULTILINE)
# Presets for CPUs, of which `plan` says nothing.
OF_CPUS = {"qwen2.5-0.5b-gsm8k"}
EVALUATION = re.compile(r"^\| minutes of an evaluation: (.*) \| (.*) \|$", re.MULTILINE)


def numbers(cell):
    return [float(number.replace(",", "")) for number in cell.split(", ")]


def planned_recipes():
    sections = re.split(r"^## `(.*)`$", PAGE, flags=re.MULTILINE)
    return [(name, text) for name, text in zip(sections[1::2], sections[2::2]) if STEP.search(text)]


def test_every_gpu_preset_has_a_plan():
    named = {name for name, _ in planned_recipes()}
    presets = [(ROOT / "configs").glob(f"{family}-*.yaml") for family in ("qwen2.5", "r1-distill")]
    assert named == {path.stem for paths in presets for path in paths} - OF_CPUS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), planned_recipes())
def test_the_page_says_what_plan_says(name, text):
    devices = 8 if name.endswith("-math") else 1
    config = config_io.load([ROOT / "configs" / f"{name}.yaml"])
    work, layout = sizes_of(config, devices)
    made = schedule.iteration(work, layout)
    cards, said = STEP.search(text).groups()
    names = [card.removeprefix("8 x ").lower().replace(" ", "-") for card in cards.split(", ")]
    taken = [
        sum(seconds.step_seconds(work, layout, DEVICES[card], made).values()) for card in names
    ]
    assert numbers(said) == [round(one) for one in taken]
    steps, said = HOURS.search(text).groups()
    assert int(steps) == (config.train.steps or 340)
    hours = [one * int(steps) * devices / 3600 for one in taken]
    assert numbers(said) == [round(one) for one in hours]
    cards, said = EVALUATION.search(text).groups()
    assert names[: len(numbers(said))] == [cards.removeprefix("8 x ").lower().replace(" ", "-")]
    minutes = seconds.evaluation_seconds(work, layout, DEVICES[names[0]]) / 60
    assert numbers(said) == [round(minutes)]
