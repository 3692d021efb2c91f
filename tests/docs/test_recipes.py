"""Tests that documented predictions agree with the current output of `bacr plan`."""

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


def phases(name, keys, *, device="h200", devices=1):
    """Returns the planned seconds of a step of a shipped config, by phase."""
    config = config_io.load([ROOT / "configs" / f"{name}.yaml"], keys)
    work, layout = sizes_of(config, devices)
    return seconds.step_seconds(work, layout, DEVICES[device])


def overrides_of(text, command):
    """Returns the overrides of a command that a page or a comment contains, up to the next line
    that does not continue it."""
    lines = text[text.index(command) + len(command) :].splitlines()
    words = []
    for line in lines:
        words += line.replace("\\", " ").replace("#", " ").split()
        if not line.endswith("\\"):
            break
    return [word for word in words if "=" in word]


@pytest.mark.slow
def test_the_table_of_the_h200_has_the_planned_seconds():
    text = (ROOT / "docs" / "performance.md").read_text()
    keys = overrides_of(PAGE, "bacr train --config configs/smollm2-135m-gsm8k.yaml")
    small = phases("smollm2-135m-gsm8k", keys)
    rollout, update = small["prefill"] + small["decode"], small["update"]
    assert f"| .52 s (40,000 tokens/s) | {rollout:.2f} s |".replace(" 0.", " .") in text
    assert f"| .47 s | {update:.2f} s |".replace(" 0.", " .") in text
    # The launches of the 30 layers explain the measured time, and the bytes do not.
    assert 0.75 < rollout / 0.52 < 1.25

    step = phases("qwen2.5-1.5b-80gb", ["rollout.questions=24", "optimizer.max_update_kl=null"])
    assert f"| 23.0 s | {step['prefill'] + step['decode']:.0f} s |" in text
    assert f"| 31.4 s | {step['score'] + step['update']:.0f} s |" in text
    assert f"The step took 54.4 s instead of {sum(step.values()):.0f}:" in text


@pytest.mark.slow
def test_the_comments_of_r1_distill_have_the_planned_seconds():
    name = "r1-distill-1.5b-math"
    comment = (ROOT / "configs" / f"{name}.yaml").read_text().partition("\nseed:")[0]
    keys = overrides_of(comment.rpartition("On one GPU")[2], f"{name}.yaml")
    for devices, options in ((8, []), (1, keys)):
        a100, h100 = (
            round(sum(phases(name, options, device=device, devices=devices).values()))
            for device in ("a100-80", "h100")
        )
        eight = f"A step takes {a100} s on 8 x A100-80 and {h100} s on 8 x H100"
        one = f"A step takes {a100} s on an A100-80 and {h100} s on an H100"
        assert (eight if devices == 8 else one) in comment


@pytest.mark.slow
def test_scaling_has_the_seconds_that_scoring_fewer_minibatches_saves():
    text = (ROOT / "docs" / "scaling.md").read_text()
    scored, learner = (
        phases("qwen2.5-7b-math", [f"loss.old_logprobs={source}"], device="a100-80", devices=8)
        for source in ("scored", "learner")
    )
    sums = [round(sum(one.values())) for one in (learner, scored)]
    assert "{} s a step by `plan` instead of {}.".format(*sums) in " ".join(text.split())
    # Only the scoring of one of two minibatches is saved.
    assert {name for name in scored if scored[name] != learner[name]} == {"score"}
