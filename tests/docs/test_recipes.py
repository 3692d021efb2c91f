"""The recipes: syntax, what they would run, and a page that has one for each config."""

import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from bacr_jax.config import cli
from bacr_jax.config import io as config_io

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
NAMES = ("quickstart", "tradeoff", "rehearsal")
# What every recipe goes through; the rehearsal also asks in transformers.
ALL = ["train", "evaluate", "export"]


def run(name, *arguments):
    return subprocess.run(
        ["bash", RECIPES / f"{name}.sh", *arguments],
        env={"PATH": os.environ["PATH"]},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def steps(name, *arguments):
    done = run(name, "--dry-run", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line, comments=True) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.sh")), ids=lambda path: path.name)
def test_bash_can_parse_it(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_shows_commands_that_are_understood_and_does_nothing(name, tmp_path, monkeypatch):
    out = tmp_path / "new folder"
    commands = steps(name, "--out", str(out))
    assert not out.exists()
    modules = [words[2].removeprefix("bacr_jax.") for words in commands if words[1] == "-m"]
    assert [module for module in dict.fromkeys(modules) if module in ALL] == ALL
    monkeypatch.chdir(ROOT)

    class Parsed(BaseException):
        pass

    for kind in ("parse_args", "parse_intermixed_args"):
        original = getattr(cli.Parser, kind)

        def parse(self, *arguments, _original=original):
            raise Parsed(_original(self, *arguments))

        monkeypatch.setattr(cli.Parser, kind, parse)
    for words in commands:
        if words[1] != "-m":
            assert (ROOT / words[1]).is_file()
            continue
        module = words[2] if words[2] != "bacr_jax.data" else "bacr_jax.data.__main__"
        module = "bacr_jax.report.__main__" if words[2] == "bacr_jax.report" else module
        with pytest.raises(Parsed) as understood:
            importlib.import_module(module).main(words[3:])
        options = understood.value.args[0]
        if getattr(options, "config", None):
            keys = [word for word in words[3:] if re.fullmatch(r"[a-z_.]+=.*", word)]
            config_io.check(config_io.load(options.config, keys))


@pytest.mark.parametrize("name", NAMES)
def test_help_and_bad_words(name):
    assert "--dry-run" in run(name, "--help").stdout
    done = run(name, "--oops")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "found '--oops'" in done.stderr


def test_the_rehearsal_is_refused_before_it_begins_without_a_tokenizer(tmp_path):
    done = run("rehearsal", "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "none"))
    assert done.returncode == 2 and "no such folder; run hf download" in done.stderr
    done = run("rehearsal", "--out", str(tmp_path))
    assert done.returncode == 2 and "is there already; write a new folder" in done.stderr


def test_the_page_has_a_recipe_for_every_config_of_a_run():
    page = (ROOT / "docs" / "recipes.md").read_text()
    configs = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert re.findall(r"^## `([^`]+)`", page, re.MULTILINE) and configs
    assert sorted(re.findall(r"^## `([^`]+)`", page, re.MULTILINE)) == configs
