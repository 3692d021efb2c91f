"""Tests that the commands on pages are valid, and that slow tests run them or a table excuses them.

The tables are in `documented_commands`.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest

from bacr_jax.__main__ import COMMANDS
from bacr_jax.config import Config, cli
from bacr_jax.config import io as config_io
from bacr_study.study_file import read_study
from documented_commands import (
    NOT_RUN,
    OF_RUNS,
    OTHERS,
    ROOT,
    RUN,
    TWICE,
    beginning_of,
    class_of,
    commands,
    commands_of,
    stands_alone,
    words_of,
)

# Modules that pages may also run with `python -m`.
MODULES = ("train", "evaluate", "generate", "export", "report")
PREFIXES = {("python", "-m", f"bacr_jax.{name}"): COMMANDS[name][0] for name in MODULES}
# Files that a page expects the reader to write, and the existing files that replace them here.
FILES = {"F": "configs/studies/main.yaml", "mine.yaml": "configs/quickstart.yaml"}


class Parsed(BaseException):
    """A command line was understood; nothing more is to be done."""


@pytest.fixture
def stops_when_parsed(monkeypatch):
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(cli.Parser, name)

        def parse(self, *arguments, _original=original):
            raise Parsed(_original(self, *arguments))

        monkeypatch.setattr(cli.Parser, name, parse)


def refusal_of(text, capsys):
    """What a command of the library says against its line; "" if it understands it."""
    words = words_of(re.sub(r"^for .*?do (.*); done$", r"\1", text))
    module = PREFIXES.get(tuple(words[:3]))
    if words[:1] == ["bacr"]:
        module = COMMANDS[words[1]][0]
    if module is None:
        return ""
    rest = words[2:] if words[0] == "bacr" else words[3:]
    try:
        importlib.import_module(module).main([FILES.get(word, word) for word in rest])
    except Parsed as parsed:
        return refused_settings(module, parsed.args[0])
    return capsys.readouterr().err


def refused_settings(module, options):
    """What is wrong with the files and keys of a command line."""
    files, overrides = getattr(options, "config", None), getattr(options, "overrides", [])
    if getattr(options, "prepare", None) is not None:
        overrides = []  # These arguments are names of data sets.
    try:
        if module == "bacr_study.__main__":
            read_study(ROOT / options.config, size=options.size, overrides=overrides)
        elif files:
            config_io.check(config_io.load(files, overrides))
        else:
            config_io.override(Config(), overrides)
    except cli.UserError as error:
        return str(error)
    return ""


def test_every_command_is_understood(stops_when_parsed, capsys, tmp_path):
    _prepare(tmp_path)
    refused = {one: refusal_of(one.text, capsys) for one in commands()}
    wrong = [f"{one.page}: {one.text}\n  {said}" for one, said in refused.items() if said]
    assert wrong == [], "\n".join(["correct these commands:", *wrong])
    # Verify that the check can fail: by a wrong option, a wrong key, and a value out of range.
    start = "bacr train --config configs/quickstart.yaml"
    assert "--sed" in refusal_of(f"{start} --sed 3", capsys)
    assert "no such key" in refusal_of(f"{start} trian.steps=3", capsys)
    assert "budget.max" in refusal_of(f"{start} budget.max=-3", capsys)
    assert "--config" in refusal_of("bacr study --dry-run", capsys)


# Arguments of recipes in addition to the folder for the results.
TOLD = {"rehearsal": ["--data", "DATA", "--tokenizer", "TOKENIZER"]}
RECIPES = [p for p in sorted((ROOT / "recipes").glob("*.sh")) if p.stem != "steps"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_shows_commands_that_are_understood(recipe, tmp_path, stops_when_parsed, capsys):
    told = ["--out", str(tmp_path / "out"), *TOLD.get(recipe.stem, [])]
    done = subprocess.run(
        ["bash", recipe, "--dry-run", *told], capture_output=True, text=True, check=True
    )
    assert not (tmp_path / "out").exists()
    shown = [re.sub(" # .*", "", line) for line in done.stdout.splitlines()]
    assert sum("bacr train" in one for one in shown) >= 2
    assert {one: said for one in shown if (said := refusal_of(one, capsys))} == {}
    wrong = subprocess.run(["bash", recipe, "--ouput", "x"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "found '--ouput'" in wrong.stderr


# Recipes that take overrides of the training config.
TAKES_KEYS = [path for path in RECIPES if path.stem not in TOLD]


@pytest.mark.parametrize("recipe", TAKES_KEYS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "key", ["output.dir=x", " output.dir =x", "output={dir: x}", """output={"a": 1, 'dir': x}"""]
)
def test_a_recipe_refuses_another_folder_for_its_run(recipe, key):
    """Its later steps would not find the run."""
    done = subprocess.run(
        ["bash", recipe, "--dry-run", "seed=1", key], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {key}: ") and "use --out DIR" in done.stderr
    # Other keys are passed to the training.
    others = ["seed=1", "output.tensorboard=false", "output={report: false}", "a b=c"]
    done = subprocess.run(
        ["bash", recipe, "--dry-run", *others], capture_output=True, text=True, check=True
    )
    trained = [shlex.split(one) for one in done.stdout.splitlines() if "bacr train" in one]
    assert all(set(others) <= set(words) for words in trained)


def test_every_command_is_run_or_it_is_said_why_not():
    wrong = [f"{one.page}: {one.text}" for one in commands() if class_of(one.text) is None]
    assert wrong == [], "\n".join(
        [
            "tests/support/documented_commands.py: add the beginning of each command to RUN (the "
            "slow test then runs it), or to NOT_RUN with a reason (gpu, network, weights, hours, "
            "cluster):",
            *wrong,
        ]
    )
    texts = [one.text for one in commands()]
    gone = [key for table in (RUN, NOT_RUN) for key in table if not _used(key, table, texts)]
    assert gone == [], "tests/support/documented_commands.py: take out what no page says any more"


def _used(start, table, texts):
    return any(beginning_of(text, table) == start for text in texts)


def test_commands_are_found_wherever_a_reader_would_copy_them():
    page = """
Try `bacr report --run A`, not `bacr report` or `reward/mean`:

```bash
bacr train --config F \\
    seed=1   # a seed
ls && pwd
```

    JAX_NUM_PROCESSES=2
    cp -r a b

```python
import jax
```
"""
    assert commands_of(page) == [
        "bacr train --config F seed=1",
        "ls",
        "pwd",
        "cp -r a b",
        "bacr report --run A",
    ]


TO_RUN = list(dict.fromkeys(one.text for one in commands() if class_of(one.text) == "run"))


@pytest.mark.slow
@pytest.mark.parametrize("text", filter(stands_alone, TO_RUN))
def test_a_training_of_a_page_runs(tmp_path, text):
    _prepare(tmp_path)
    _run(RUN[beginning_of(text, RUN)](text), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "least"), [(OF_RUNS, 14), (TWICE, 2), (OTHERS, 20)], ids=["runs", "twice", "others"]
)
def test_commands_run_as_they_stand_there(tmp_path, table, least):
    """In one folder, in the order of the table: later ones find the runs of earlier ones."""
    _prepare(tmp_path)
    texts = [text for text in TO_RUN if not stands_alone(text)]
    ran = []
    for start, made in table.items():
        for text in texts:
            needs_data = re.search(r"=data\b|:data/", text) and not (tmp_path / "data").exists()
            if beginning_of(text, RUN) == start and not needs_data:
                _run(made(text), tmp_path)
                ran.append(text)
    assert len(ran) >= least
    if table is OF_RUNS:
        assert (tmp_path / "runs/quickstart/report.html").exists()
        assert (tmp_path / "hf/config.json").exists()


def _prepare(folder):
    """What a clone has, and what its pages tell a reader to have."""
    for name in ("configs", "examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    shared = os.environ.get("BACR_SHARED_DATA")
    if shared:
        (folder / "data").symlink_to(shared)
        (folder / "models").mkdir()
        (folder / "models/Qwen2.5-7B-Instruct").symlink_to(f"{shared}/qwen_tokenizer")
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a method\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    (folder / "brief_grpo.py").write_text(code)
    (folder / "cases.jsonl").write_text('{"pred": "\\\\boxed{4}", "gold": "4"}\n')


def _run(text, folder):
    paths = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT / "src")}
    # Define `bacr` as a function, because the console script only exists in an installed package.
    script = f'bacr() {{ python -m bacr_jax "$@"; }}\n{text}'
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
