"""Tests the length, the badges and the figure of README.md and docs/index.md."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def figure():
    """The script that draws the figure, as a module."""
    path = IMAGES / "make_front_figure.py"
    spec = importlib.util.spec_from_file_location("make_front_figure", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_has_at_most_800_words():
    assert len(README.split()) <= 800


def test_the_install_line_is_on_the_first_screen():
    line = README[: README.index("pip install")].count("\n") + 1
    assert line <= 20


def test_the_badges_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=") + "+"
    for name, label in (
        ("python", f"Python {python}"),
        ("licence", f"licence: {project['license']}"),
    ):
        assert f"![{label}](docs/images/badge-{name}.svg)" in README
        assert f'aria-label="{label}"' in (IMAGES / f"badge-{name}.svg").read_text()


@pytest.mark.parametrize(
    ("arm", "row"),
    [
        ("grpo", "GRPO | 58, 0"),
        ("bacr-paper", "BACR (paper) | 99, .01"),
        ("bacr-robust", "BACR (robust) | 90, .02"),
    ],
)
def test_the_figure_draws_the_numbers_of_the_study(figure, arm, row):
    page = (ROOT / "docs/studies/main.md").read_text()
    line = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", page, re.MULTILINE)[1]
    trade_off = [column.replace("*", "").split(" ")[0] for column in line.split(" | ")][-5:]
    estimates = figure.accuracy_by_budget(arm)
    assert [f"{estimate.mean:.0f}" for estimate in estimates.values()] == trade_off
    assert list(estimates) == [8, 12, 16, 24, 32]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_alternative_text_has_the_numbers_of_the_figure(figure, page):
    ends = {}
    for arm in ("grpo", "bacr-paper", "bacr-robust"):
        estimates = figure.accuracy_by_budget(arm)
        ends[arm] = [f"{estimates[budget].mean:.0f}" for budget in (8, 32)]
    text = " ".join((ROOT / page).read_text().split())
    names = {"grpo": "GRPO", "bacr-paper": "BACR as published", "bacr-robust": "bacr-robust"}
    for arm, name in names.items():
        assert f"{name} {ends[arm][0]} to {ends[arm][1]} %" in text


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pictures_have_two_pixels_per_pixel_of_the_page(figure, theme):
    path = IMAGES / f"front-{theme}.png"
    with Image.open(path) as image:
        assert image.size == (2 * figure.WIDTH, 2 * figure.HEIGHT)
    assert path.stat().st_size <= 200_000
    for page in ("README.md", "docs/index.md"):
        assert path.name in (ROOT / page).read_text()
