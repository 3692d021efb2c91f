"""Tests that each mistake in docs/errors.md and more_mistakes.txt has the message given there."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from bacr_jax import __main__
from bacr_jax.config import io as config_io
from hostile_world import tiny_model

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "errors.md").read_text(), re.DOTALL)
# Further mistakes in the same format, which are not on the page.
BLOCKS.append(Path(__file__).with_name("more_mistakes.txt").read_text())
MISTAKES = [tuple(one.split("\n", 1)) for block in BLOCKS for one in block.rstrip().split("\n\n")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page says that there is, and a run that has begun."""
    place = tmp_path_factory.mktemp("errors")
    (place / "examples").symlink_to(ROOT / "examples")
    tiny_model(place / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["own_data.py", "own"])
        spec = importlib.util.spec_from_file_location("own_data", "examples/own_data.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main()
        config = config_io.load(["own-data"], ["output.dir=runs/used"])
    used = place / "runs" / "used"
    used.mkdir(parents=True)
    (used / "config.yaml").write_text(config_io.to_yaml(config))
    return place


@pytest.mark.parametrize(("line", "says"), MISTAKES, ids=[line[7:60] for line, _ in MISTAKES])
def test_a_mistake_is_answered_as_the_page_says(folder, monkeypatch, capsys, line, says):
    if "wandb" in line and importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    monkeypatch.chdir(folder)
    before = sorted(path for path in folder.rglob("*") if path.name != "__pycache__")
    assert line.startswith("$ bacr ")
    assert __main__.main(shlex.split(line)[2:]) == 2
    assert capsys.readouterr() == ("", says + "\n")
    assert sorted(path for path in folder.rglob("*") if path.name != "__pycache__") == before


def test_there_are_twenty_and_more():
    assert len(MISTAKES) > 20
