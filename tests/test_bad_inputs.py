"""What people get wrong on the command lines: one line that helps, exit code 2, nothing touched."""

import io
import json
import os
import subprocess
import sys

import jax
import pytest

from bacr_jax import __main__
from commands_world import EVALUATE, EXPORT, GENERATE, GRADE, PLAN, REPORT, SMALL, TRAIN, WORDS
from hostile_world import tiny_model, words_of, write_files

INSPECT = "data --inspect jsonl:{}/questions.jsonl "

WEIGHTS, CONFIG_JSON = "model/model.safetensors", "model/config.json"
TRAINED = {"run/config.yaml": SMALL}
DAMAGED = {**TRAINED, "run/checkpoints/3/state/_METADATA": "{"}
WARMED = "warmup.steps=10 warmup.dir="
LONG = "x" * 300


def edited(**changes):
    """config.json with other values."""
    return lambda content: json.dumps(json.loads(content) | changes)


# The command line, pieces of the line that refuses it, and the files that differ: a text, None for
# none, or what becomes of the content. One case for each command and kind of file, and what only a
# whole command can meet; the words of every other refusal are pinned where the module is tested.
BAD = [
    (
        "doctor budget.max=8",
        "command line: config keys (key=value) were passed without a config",
        {},
    ),
    (
        "doctor --seconds 0",
        "--seconds '0': the time limit must be a whole number of seconds; set it to 1 to 86400",
        {},
    ),
    ("train", "command line: no config is given; pass for example --config quickstart", {}),
    (TRAIN, "small.yaml, line 3: the YAML is not valid", {"small.yaml": "seed: 1\nbudget: [\n"}),
    (TRAIN + "bugdet.max=8", "bugdet.max: there is no such key; use budget.max", {}),
    (TRAIN + "budget.min=9", "budget.min=9 is above budget.max=8; set it to at most 8", {}),
    (
        TRAIN + "mesh.data=3",
        "found 3 x -1 x 1, whose product is not the number of devices, 1; set",
        {},
    ),
    (TRAIN + "method={}/own.py", "invalid syntax (own.py, line 1)", {"own.py": "def make(:"}),
    (
        TRAIN + "method={}/own.py",
        "the import of '{}/own.py' raised ZeroDivisionError: division by zero (own.py, line 2)",
        {"own.py": "x = 0\n1 / x\n"},
    ),
    (
        TRAIN + "method={}/own.py",
        "make(config) of '{}/own.py' raised AttributeError: 'no' is not one of the settings that "
        "a method can read; use one of method, conditioning, budget,",
        {"own.py": "def make(config):\n    return config.no\n"},
    ),
    (TRAIN + "method={}/own.py", "raised SystemExit: 3", {"own.py": "raise SystemExit(3)"}),
    (TRAIN + "output.dir=/proc/run", "output.dir=/proc/run can't be used (No such file", {}),
    (TRAIN + WARMED + "/proc/x", "warmup.dir=/proc/x can't be used (No such file", {}),
    (TRAIN, "contains no run, but other files such as 'notes.txt'", {"run/notes.txt": ""}),
    (
        WORDS + "model.path={}/none model.tokenizer={}/model",
        "model.path={}/none: there is no such folder; use a Hugging Face folder",
        {},
    ),
    (WORDS, "config.json: the file can't be read (No such file or directory)", {CONFIG_JSON: None}),
    (WORDS, "only 99 embedding rows; use the tokenizer of", {CONFIG_JSON: edited(vocab_size=99)}),
    (WORDS, "truncated, damaged or missing", {WEIGHTS: lambda content: content[:-50]}),
    (WORDS, "is missing or can't be read", {"model/tokenizer.json": None}),
    (
        WORDS,
        "the chat template can't be applied to a system",
        {"model/chat_template.jinja": "{% if"},
    ),
    (WORDS + "budget.max=900", "budget.max=900: the model has 512 positions", {}),
    (WORDS, "no file or folder '{}/questions.jsonl'; use a path", {"questions.jsonl": None}),
    (WORDS, "questions.jsonl contains no rows; use a file with", {"questions.jsonl": ""}),
    (WORDS, "questions.jsonl line 2: Expecting", {"questions.jsonl": '{"question": "1"}\n{\n'}),
    (
        WORDS + "data.max_prompt_tokens=1",
        "all 8 prompts are longer, with 137 tokens or more; set a",
        {},
    ),
    (WORDS + "data.num_groups=4", "have no levels; set data.num_groups=1 for a single group", {}),
    (
        WORDS + "data.groups=solve_rate data.labels={}/rates.jsonl",
        "rates.jsonl row 1: found avg=2; `avg` must be the share of correct samples, from 0 to 1",
        {"rates.jsonl": '{"id": "x", "avg": 2, "samples": 1}'},
    ),
    (f"data --inspect jsonl:{{}}/{LONG}", f"{LONG}: File name too long; use another", {}),
    ("evaluate --run {}/run", "contains no finished checkpoint yet; wait until", TRAINED),
    ("evaluate --run {}/run", "checkpoints/3/state: the policy can't be read", DAMAGED),
    (EVALUATE + "--out {}/small.yaml", "small.yaml is a file; use the name of a folder", {}),
    (
        EVALUATE + "--samples 2 --label-difficulty {}/model",
        "--label-difficulty {}/model is a folder; use the name of a file",
        {},
    ),
    ("methods grpo", "command line: unrecognized arguments: grpo", {}),
    ("methods --run {}/none", "none contains no config.yaml; use", {}),
    ("configs quickstart", "command line: unrecognized arguments: quickstart", {}),
    ("keys budgt", "command line: budgt: there is no such section or key; use budget", {}),
    (
        "serve",
        "command line: exactly one policy is required; pass either --run DIR or --model HFDIR",
        {},
    ),
    (
        "generate --budget 4 why",
        "command line: exactly one policy is required; pass either --run DIR or --model HFDIR",
        {},
    ),
    (GENERATE + "x" * 2000, "data.max_prompt_tokens=1024: all 1 prompts are longer", {}),
    (GENERATE + "why data.prompt_format=tags", "data.prompt_format: found 'tags'; use", {}),
    (
        PLAN + "--devices 0",
        "--devices 0: the number of GPUs is out of range; set a number from 1 to 100000",
        {},
    ),
    (
        GRADE,
        "line 1: the field 'gold' is missing (the fields of this line are ['pred'])",
        {"cases.jsonl": '{"pred": "1"}'},
    ),
    (
        GRADE + "--deadline inf",
        "grading: deadline=inf is out of range; set deadline to a number from 0.05 to 3600",
        {},
    ),
    (
        "import --gguf {}/questions.jsonl --out {}/out",
        "this is not a GGUF file, because it begins with b'{\"qu'",
        {},
    ),
    (EXPORT, "checkpoints/3/state: the policy can't be read", DAMAGED),
    (EXPORT + f"--out {{}}/{LONG}", "File name too long; use another path", DAMAGED),
    (REPORT + "--out {}/none/x.html", "/none does not exist; create it first", TRAINED),
    (REPORT, "the field 'step' is missing", {**TRAINED, "run/metrics.jsonl": '{"a": 1}\n'}),
    (
        REPORT,
        "the field 'sets' is missing",
        {**TRAINED, "run/eval.jsonl": '{"step": 1, "when": "x"}\n'},
    ),
    (REPORT, "summary.json is damaged; delete the file", {**TRAINED, "run/summary.json": "[]"}),
    ("study --config {}/none.yaml", "there is no such file", {}),
    (
        "serve",
        "command line: exactly one policy is required; pass either --run DIR or --model HFDIR",
        {},
    ),
    ("report --run '{}/a\nb'", r"{}/a\nb contains no config.yaml", {}),
    ("trian --config x", "'trian' is not a bacr command; use train", {}),
]


# What a check can't see: devices of another machine.
UNSEEN = ("mesh.",)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder of a random model with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(path)
    return {file.name: file.read_bytes() for file in path.iterdir()}


def everything_in(folder):
    """Every file and folder, with contents, but for what Python compiled."""
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize(
    ("line", "says", "changes"),
    BAD,
    ids=[f"{line[:12].split(' ')[0]}-{says[:40]}" for line, says, _ in BAD],
)
def test_bad_input_is_one_line_and_exit_code_2(
    model, tmp_path, capsys, monkeypatch, line, says, changes
):
    write_files(tmp_path, model, changes)
    before = everything_in(tmp_path)
    # Defaults of options lie relative to where one is; nobody types anything.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert __main__.main(words_of(line, tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert says.replace("{}", str(tmp_path)) in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    if line.startswith("train ") and not any(word in line for word in UNSEEN):
        # What training would refuse, its check refuses with the same words.
        assert __main__.main([*words_of(line, tmp_path), "--check"]) == 2
        assert capsys.readouterr() == ("", captured.err)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("line", [TRAIN, TRAIN + "--check", EVALUATE, GENERATE + "why"])
@pytest.mark.parametrize("fault", [RuntimeError("No GPU. (set JAX_X)"), AssertionError()])
def test_a_platform_that_can_not_be_started_is_one_line(
    model, tmp_path, capsys, monkeypatch, line, fault
):
    write_files(tmp_path, model, {})
    before = everything_in(tmp_path)

    def start():
        raise fault

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "default_backend", start)
    monkeypatch.setattr(jax, "devices", start)
    assert __main__.main(words_of(line, tmp_path)) == 2
    named, reason = jax.config.jax_platforms, str(fault)[:6] or "no such plugin is installed"
    assert capsys.readouterr().err == (
        f"error: environment: JAX can't use JAX_PLATFORMS={named} ({reason}); unset this "
        f"variable, or "
        "install the platform\n"
    )
    assert everything_in(tmp_path) == before


# Lines about a set and its tokenizer; what a run asks of a set beyond them, an inspection shows.
OF_A_SET = {"questions.jsonl", "rates.jsonl", "model/tokenizer.json", "model/chat_template.jinja"}
SETS = [
    (overrides, changes)
    for line, _, changes in BAD
    for overrides in [line.removeprefix(WORDS)]
    if line.startswith(WORDS)
    and (OF_A_SET & set(changes) or "data." in overrides)
    and "eval." not in overrides
]


@pytest.mark.parametrize(("overrides", "changes"), SETS)
def test_inspecting_a_set_says_what_training_on_it_would(
    model, tmp_path, capsys, monkeypatch, overrides, changes
):
    write_files(tmp_path, model, changes)
    monkeypatch.chdir(tmp_path)
    assert __main__.main([*words_of(WORDS + overrides, tmp_path), "--check"]) == 2
    trained = capsys.readouterr().err
    inspected = INSPECT + "--tokenizer {}/model data.num_groups=1 " + overrides
    assert __main__.main(words_of(inspected, tmp_path)) == 2
    assert capsys.readouterr().err.replace("--tokenizer", "model.path") == trained


@pytest.mark.slow  # a run is made ready as far as its checkpoint
def test_a_change_that_the_run_can_not_go_on_with_changes_nothing(model, tmp_path, capsys):
    write_files(tmp_path, model, DAMAGED)
    before = everything_in(tmp_path)
    line = words_of(TRAIN + "seed=3 --allow-change seed", tmp_path)
    assert __main__.main(line) == 2
    captured = capsys.readouterr()
    assert "if the new value of seed is the cause" in captured.err.splitlines()[-1]
    after = everything_in(tmp_path)
    assert {path: after.pop(path) for path in before} == before
    # What is new tells nothing of the run.
    assert {path.name for path in after} <= {".lock", "rollouts"}


def test_the_table_names_every_command():
    commands = {line.split(" ")[0] for line, _, _ in BAD}
    assert commands >= set(__main__.COMMANDS)


@pytest.mark.slow  # a process
def test_the_same_holds_for_a_real_process(model, tmp_path):
    write_files(tmp_path, model, {})
    before = everything_in(tmp_path)
    command = [sys.executable, "-m", "bacr_jax", *words_of(WORDS + "data.num_groups=4", tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ") and "levels" in done.stderr
    assert everything_in(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
@pytest.mark.parametrize(
    "line", [TRAIN + "output.dir={}/closed/run", EVALUATE + "--out {}/closed/out"]
)
def test_a_folder_without_rights_is_one_line(model, tmp_path, capsys, line):
    write_files(tmp_path, model, {})
    (tmp_path / "closed").mkdir(mode=0o500)
    assert __main__.main(words_of(line, tmp_path)) == 2
    assert "can't be used (Permission denied); use a folder" in capsys.readouterr().err
