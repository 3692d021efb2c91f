"""Tests the lines that a run prints at its start, and the commands that it suggests at its end."""

import dataclasses
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bacr_jax import generate, train
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.config.shipped import names
from bacr_jax.curriculum import init_curriculum
from bacr_jax.methods import load_method
from bacr_jax.model.sizes import preset
from bacr_jax.parallel.compile_cache import CacheFolder
from bacr_jax.parallel.mesh import MeshShape
from bacr_jax.questions.question_set import LeftOut
from bacr_jax.questions.splits import REASON as HELD_OUT
from bacr_jax.report.__main__ import main as report
from bacr_jax.runs.folder import RunPaths, write_config
from bacr_jax.runs.setup import model_shape
from bacr_jax.training.initialize import open_inputs
from bacr_jax.training.run_summary import (
    NO_DEVICES,
    RunFacts,
    check_lines,
    devices_text,
    hint_lines,
    next_lines,
    number_text,
    start_lines,
    trained_budgets,
    untrained_budgets,
)

SMALL = ["data.ledger.train_size=64", "train.steps=3", "output.dir=runs/quickstart"]


@pytest.fixture(scope="module")
def task_data():
    _, task_data = open_inputs(resolve(config_io.load(["quickstart"], SMALL)))
    task_data.close()
    return task_data


def facts_of(task_data, *overrides, folder=Path("runs/quickstart")):
    config = config_io.load(["quickstart"], [*SMALL, *overrides])
    method = load_method(resolve(config).method)
    return RunFacts(
        config, folder, method, model_shape(config.model, task_data.vocab_size), task_data
    )


def test_the_quickstart_begins_with_four_entries_in_80_columns(task_data):
    lines = start_lines(facts_of(task_data), "1 CPU with 2 cores; computes in float32", 80)
    assert lines == [
        "method   bacr-bounded (BACR); 20 departures: bacr methods --run runs/quickstart",
        "model    random, 3 layers of width 64, 131,584 parameters; warm-up of 800 steps",
        "devices  1 CPU with 2 cores; computes in float32",
        "run      3 steps of 32 questions x 8 traces",
        "         budgets 8, 16, 32, 64 (eval.budgets)",
        f"         {len(task_data.train)} questions of Ledger, none left out, 6 held out for "
        "validation",
        "         in runs/quickstart; Ctrl-C saves and stops, the same command resumes",
    ]


def budgets_line(*overrides, files=()):
    settings = resolve(config_io.load(["quickstart", *files], [*SMALL, *overrides])).method
    method = load_method(settings)
    return trained_budgets(settings, method), settings, method


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["method=grpo"], "budget 64"),
        (["method=elastic"], "budget 16"),
        (["method=thinkprune", "budget.stages=[1.0, 0.5]"], "budgets 32 to 64"),
        (["budget.prior=choices", "budget.choices=[16, 32]"], "budgets 16, 32 (budget.choices)"),
        (["budget.prior=choices", "budget.choices=[16]"], "budget 16 (budget.choices)"),
        (["eval.budgets=[16, 64, 128]"], "budgets 16, 64 (eval.budgets)"),
        (["budget.max=1024"], "budgets 8, 16, 32, 64 (eval.budgets)"),
        (["eval.budgets=[8, 64]", "budget.stages=[1.0, 0.5]"], "budgets 8, 32, 64 (eval.budgets)"),
        (["budget.prior=fixed"], "budget 64"),
        (["budget.prior=uniform"], "budgets 8 to 64"),
        (["budget.prior=uniform", "budget.stages=[0.5, 0.75]"], "budgets 8 to 48"),
    ],
)
def test_the_budgets_are_those_of_the_method(overrides, text):
    assert budgets_line(*overrides)[0] == text


@pytest.mark.parametrize("preset", names(("methods",)))
def test_every_sampled_budget_is_in_the_line(preset):
    text, settings, method = budgets_line(files=[preset])
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    least, most = numbers[0], numbers[-1]
    state = init_curriculum(settings.data.num_groups, mu0=settings.curriculum.mu0)
    groups = jax.numpy.arange(256) % settings.data.num_groups
    sampled = np.asarray(method.sample_budgets(jax.random.key(0), state, groups))
    if settings.budget.stages:
        assert (most, least) == (sampled.max(), round(min(settings.budget.stages) * most))
    else:
        assert least <= sampled.min() and sampled.max() <= most
        assert " to " in text or set(sampled.ravel()) == set(numbers)


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ([], None),
        (["budget.max=1024", "eval.budgets=[8, 64, 1024]"], None),
        (["eval.budgets=[0, 8, 64]"], None),
        (["budget.max=1024"], "WARNING, budget.max=1024: the largest trained budget is 64, "),
        (
            ["budget.max=32"],
            r"WARNING, eval.budgets=\[8, 16, 32, 64\]: no trace is trained at 64, ",
        ),
        (["eval.budgets=[4, 8, 128]"], "trained at 4, 128, .* set budget.min=4 budget.max=128 to"),
        (["budget.choices=[8, 16]", "eval.budgets=[16, 512]"], None),
        (["budget.choices=[8, 16]"], r"set budget.choices=\[8, 16, 64\] to train at 64, or "),
        # Methods that train at budget.max.
        (["method=grpo", "budget.max=1024"], None),
    ],
)
def test_budgets_that_are_never_trained_are_warned_about(task_data, overrides, warning):
    lines = start_lines(facts_of(task_data, *overrides), NO_DEVICES, 400, is_check=True)
    found = [line for line in lines if line.startswith("WARNING")]
    assert len(found) == (warning is not None)
    assert warning is None or re.search(warning, found[0])


@pytest.mark.parametrize("change", ["budget.max=1024", "eval.budgets=[4, 64]", "budget.max=32"])
def test_the_advice_on_untrained_budgets_ends_the_warning(change):
    _, settings, method = budgets_line(change)
    (warning,) = untrained_budgets(settings, method)
    advice = re.search(r"; set ((?:eval.budgets=\[.*?\]|[^ ,]+=\d+ ?)+)", warning)[1].strip()
    words = re.findall(r"[a-z.]+=(?:\[.*?\]|\d+)", advice)
    _, settings, method = budgets_line(change, *words)
    assert untrained_budgets(settings, method) == []


@pytest.mark.parametrize("name", names())
def test_no_shipped_config_has_untrained_budgets(name):
    config = config_io.load([name] if not name.startswith("methods/") else ["quickstart", name])
    settings = resolve(config).method
    assert untrained_budgets(settings, load_method(settings)) == []


def test_a_method_of_a_file_chooses_its_budgets_up_to_the_largest(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from bacr_jax.methods import grpo\n\nmake = grpo.make\n")
    assert budgets_line(f"method={file}")[0] == "budgets up to 64"


def test_a_check_points_to_its_own_list_of_departures(task_data):
    lines = start_lines(facts_of(task_data), NO_DEVICES, 80, is_check=True)
    assert (
        lines[0] == "method   bacr-bounded (BACR); 20 departures from its publication, listed above"
    )
    assert lines[2] == f"devices  {NO_DEVICES}"


def test_a_check_of_the_quickstart_fits_80_columns(task_data, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = list(check_lines(facts_of(task_data)))
    assert max(map(len, lines)) <= 80
    number = next(n for n, line in enumerate(lines) if line.startswith("  left out, held out"))
    assert lines[number + 1].startswith("    ") and lines[number + 1].endswith(" more)")


def test_commands_and_folders_are_never_broken(task_data):
    folder = Path("runs/a folder whose name has many words and is longer than a line of text")
    lines = start_lines(facts_of(task_data, folder=folder), "-", 60)
    text = "\n".join(lines)
    assert f"bacr methods --run '{folder}'" in text and f"{folder};" in text
    others = [line for line in lines if str(folder) not in line]
    assert max(map(len, others)) <= 60


def test_questions_left_out_are_counted_with_the_command_that_lists_them(task_data):
    rows = (LeftOut("a", "no question"), LeftOut("b", "no question"), LeftOut("c", HELD_OUT))
    questions = dataclasses.replace(task_data.train.set, left_out=rows)
    train_set = dataclasses.replace(task_data.train, set=questions)
    other = dataclasses.replace(task_data, train=train_set, eval={"ledger": train_set})
    text = "\n".join(start_lines(facts_of(other), "-", 200))
    assert (
        "2 left out (bacr data --config runs/quickstart/config.yaml), 1 held out for validation; "
        "3 left out of the evaluation sets" in text
    )
    checked = start_lines(facts_of(other), "-", 200, is_check=True)
    assert "2 left out (listed above), 1 held out" in "\n".join(checked)


def test_the_model_line_names_where_the_weights_come_from(task_data, tmp_path):
    def model(*overrides, folder=tmp_path):
        facts = facts_of(task_data, *overrides, folder=folder)
        facts = dataclasses.replace(facts, shape=preset("qwen2.5-1.5b"))
        return next(line for line in start_lines(facts, "-", 300) if line.startswith("model"))

    named = model("warmup.dir=shared")
    assert named.endswith("1.54 billion parameters; warm-up of 800 steps in shared")
    config = facts_of(task_data).config
    pretrained = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path="models/Qwen"),
        warmup=dataclasses.replace(config.warmup, steps=0),
        adapter=dataclasses.replace(config.adapter, rank=8),
    )
    facts = dataclasses.replace(facts_of(task_data), config=pretrained)
    facts = dataclasses.replace(facts, shape=preset("qwen2.5-1.5b"))
    line = start_lines(facts, "-", 300)[1]
    assert line == (
        "model    models/Qwen, 1.54 billion parameters; weights from this folder; trains "
        "9,232,384 in LoRA of rank 8"
    )
    (RunPaths(tmp_path).checkpoints / "20").mkdir(parents=True)
    assert model().endswith("parameters; continues from step 20")


@pytest.mark.parametrize(
    ("count", "text"),
    [(131584, "131,584"), (134_515_008, "134.5 million"), (1_543_714_304, "1.54 billion")],
)
def test_numbers_of_parameters(count, text):
    assert number_text(count) == text


def test_advice_and_a_cache_that_cannot_be_written_are_hints(task_data):
    facts = facts_of(task_data)
    assert hint_lines(facts, CacheFolder(None, "kept")) == []
    assert hint_lines(facts, CacheFolder(None, "WARNING", refused=True)) == ["WARNING"]


def test_several_devices_have_their_mesh(monkeypatch):
    devices = [SimpleNamespace(device_kind="NVIDIA H100", platform="gpu")] * 8
    monkeypatch.setattr(jax, "devices", lambda: devices)
    config = config_io.load([], [])
    text = devices_text(config.model.compute_dtype, MeshShape(2, 4, 1, 1))
    assert text == "8 x NVIDIA H100; data 2, fsdp 4, tensor 1; computes in bfloat16"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "tensor 1; 2 processes; computes" in devices_text(
        config.model.compute_dtype, MeshShape(2, 4, 1, 1)
    )
    monkeypatch.undo()
    one = [SimpleNamespace(device_kind="cpu", platform="cpu")]
    monkeypatch.setattr(jax, "devices", lambda: one)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    text = devices_text(config_io.load(["quickstart"]).model.compute_dtype, MeshShape(1, 1, 1, 1))
    assert text == "1 CPU with 2 cores; computes in float32"


class TestNext:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        config = config_io.load(["quickstart"], SMALL)
        folder = Path("runs/quickstart")
        folder.mkdir(parents=True)
        write_config(RunPaths(folder).config, config)
        return resolve(config).method, config.warmup, folder

    def test_the_commands_are_typed_out(self, run):
        assert list(next_lines(*run, "7a1")) == [
            "look     bacr report --run runs/quickstart",
            "ask      bacr generate --run runs/quickstart --budget 8,64 7a1",
            "compare  bacr train --config runs/quickstart/config.yaml --config methods/grpo \\",
            "           output.dir=runs/quickstart-grpo warmup.dir=runs/quickstart/warmup",
            "         bacr report --run runs/quickstart --run runs/quickstart-grpo",
        ]

    @pytest.mark.parametrize("base", ["quickstart", "smollm2-135m"])
    def test_grpo_is_compared_with_the_recommended_method(self, run, base):
        *_, folder = run
        config = config_io.load([base, "grpo"])
        write_config(RunPaths(folder).config, config)
        lines = list(next_lines(resolve(config).method, config.warmup, folder, "7a1"))
        assert lines[2].endswith("--config methods/bacr-bounded \\")

    def test_the_commands_are_accepted(self, run):
        text = "\n".join(line[9:] for line in next_lines(*run, "7a1"))
        _, ask, compare, both = text.replace("\\\n", "").split("\n")
        assert generate.parse(shlex.split(ask)[2:]).budget == "8,64"
        config, _, _ = train.parse(shlex.split(compare)[2:])
        assert config.method == "grpo" and config.output.dir == "runs/quickstart-grpo"
        assert config.warmup.dir == "runs/quickstart/warmup"
        assert report(shlex.split(both)[2:]) == 2  # Neither run has a result yet.

    def test_a_long_question_is_left_to_the_reader_and_a_special_one_quoted(self, run):
        lines = list(next_lines(*run, "x" * 41))
        assert lines[1].endswith("--budget 8,64")
        assert list(next_lines(*run, "What's 1+1?"))[1].endswith("""'What'"'"'s 1+1?'""")

    def test_without_another_method_for_this_config_the_other_run_is_a_placeholder(self, run):
        *_, folder = run
        RunPaths(folder).config.write_text("seed: x\n")
        assert list(next_lines(*run, "7a1"))[2:] == [
            "compare  bacr report --run runs/quickstart --run OTHER_RUN"
        ]
