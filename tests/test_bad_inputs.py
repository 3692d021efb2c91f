"""What people get wrong on the command lines: one line that helps, exit code 2, nothing touched."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

import hf_world
from bacr_jax import __main__
from bacr_jax.model import hf
from bacr_jax.model.sizes import Qwen2Config
from commands_world import (
    EVALUATE,
    EXPORT,
    GENERATE,
    GRADE,
    PLAN,
    QUESTIONS,
    REPORT,
    SMALL,
    TEMPLATE,
    TRAIN,
    WORDS,
)

SHAPE = Qwen2Config(257, 16, 24, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=512)

INSPECT = "data --inspect jsonl:{}/questions.jsonl "

WEIGHTS, CONFIG_JSON = "model/model.safetensors", "model/config.json"
TRAINED = {"run/config.yaml": SMALL}
DAMAGED = {**TRAINED, "run/checkpoints/3/state/_METADATA": "{"}
LONG = "x" * 300


def edited(**changes):
    """config.json with other values."""
    return lambda content: json.dumps(json.loads(content) | changes)


# The command line, pieces of the line that refuses it, and the files that differ: a text, None for
# none, or what becomes of the content.
BAD = [
    # Configs and overrides.
    ("train", "command line: no config; write --config quickstart", {}),
    ("train --config", "argument --config: expected one argument; --help shows", {}),
    ("train --config {}/smal.yaml", "smal.yaml: no such file; write {}/small.yaml", {}),
    (TRAIN, "small.yaml, line 3: not valid YAML", {"small.yaml": "seed: 1\nbudget: [\n"}),
    (
        TRAIN,
        "line 2: seed: already given in line 1; write it once",
        {"small.yaml": "seed: 1\n" * 2},
    ),
    (TRAIN, "line 1: byte 0xff is not UTF-8; write the file as UTF-8", {"small.yaml": b"\xff"}),
    (TRAIN, "line 1: sed: no such key; write seed", {"small.yaml": "sed: 1"}),
    (TRAIN + "bugdet.max=8", "bugdet.max: no such key; write budget.max", {}),
    (TRAIN + "budget.max", "found 'budget.max'; write key=value, such as seed=1", {}),
    (TRAIN + "budget=8", "budget: found 8, but it is a section; write one of budget.min", {}),
    (TRAIN + "seed=one", "seed: found 'one'; write a whole number", {}),
    (TRAIN + "seed=-1", "seed: found -1; write in [0, 4294967295]", {}),
    (TRAIN + "budget.max=1e400", "budget.max: found '1e400'; write a whole number", {}),
    (TRAIN + "rollout.temperature=.nan", "rollout.temperature: found nan; write more than 0", {}),
    (TRAIN + "optimizer.learning_rate=1e999", "learning_rate: found inf; write 0 or more", {}),
    (TRAIN + "reproducible=yes-please", "reproducible: found 'yes-please'; write true or", {}),
    (TRAIN + "budget.min=9", "budget.min=9: is above budget.max=8; write at most 8", {}),
    (TRAIN + "cuts.count=5", "cuts.count=5: a trace of budget.min=4 tokens has fewer", {}),
    (TRAIN + "cuts.weights=[.5,.5]", "found 2 weights for cuts.count=4; write one per cut", {}),
    (TRAIN + "cuts.weights=[.5,.5,.5,.5]", "weights that sum to 2; write weights that sum to", {}),
    (TRAIN + "train.minibatches=3", "must divide rollout.questions=4; write 1", {}),
    (TRAIN + "train.micro_batch_rows=3", "train.micro_batch_rows=3: must divide the 8 rows", {}),
    (TRAIN + "--oops", "command line: unrecognized arguments: --oops; --help shows", {}),
    (TRAIN + "data.train=gsm8k", "data.train: found 'gsm8k'; write ledger, or NAME:PATH", {}),
    # Devices.
    (TRAIN + "mesh.data=3", "found 3 x -1 x 1, which does not make 1 devices; write", {}),
    (TRAIN + "mesh.tensor=2", "mesh.tensor=2: must divide model.num_kv_heads=1; write 1", {}),
    (WORDS + "mesh.fsdp=0", "mesh.fsdp: found 0; write a number of shards, or -1", {}),
    # Methods.
    (TRAIN + "method=bcar", "method: found 'bcar', neither a method here nor an importable", {}),
    (TRAIN + "method=cot", "method=cot: trains nothing; write python -m bacr_jax.evaluate", {}),
    (TRAIN + "method={}/own.py", "no file '{}/own.py'; write the path of a Python file", {}),
    (TRAIN + "method={}/own.py", "has no function make(config); write one", {"own.py": "x = 1"}),
    (TRAIN + "method={}/own.py", "no function make(config)", {"own.py": "make = 3"}),
    (TRAIN + "method={}/own.py", "invalid syntax (own.py, line 1)", {"own.py": "def make(:"}),
    (TRAIN + "method={}/own.py", "No module named 'no_such'", {"own.py": "import no_such"}),
    (
        TRAIN + "method={}/own.py",
        "the import of '{}/own.py' raised ZeroDivisionError: division by zero (own.py, line 2)",
        {"own.py": "x = 0\n1 / x\n"},
    ),
    (
        TRAIN + "method={}/own.py",
        "make(config) of '{}/own.py' raised AttributeError: 'Config' object has no attribute 'no' "
        "(own.py, line 2); fix the file",
        {"own.py": "def make(config):\n    return config.no\n"},
    ),
    (TRAIN + "method={}/own.py", "raised SystemExit: 3", {"own.py": "raise SystemExit(3)"}),
    (
        PLAN + "method={}/own.py",
        "returned int, not a Method; return one",
        {"own.py": "def make(config):\n    return 3\n"},
    ),
    # The run folder.
    (TRAIN + "output.dir=", "output.dir: found nothing; write text", {}),
    (TRAIN + "output.dir={}/small.yaml", "is a file; write the name of a folder", {}),
    (TRAIN + "output.dir={}/small.yaml/x", "can't be used (Not a directory); write a folder", {}),
    (TRAIN + "output.dir=/proc/run", "output.dir=/proc/run: can't be used (No such file", {}),
    (TRAIN + f"output.dir={{}}/{LONG}", "can't be used (File name too long); write", {}),
    (TRAIN + "output.dir={}/a\0b", "b', which holds NUL; --help shows", {}),
    (TRAIN, "is not empty and holds no run (found 'notes.txt')", {"run/notes.txt": ""}),
    (TRAIN + "seed=7", "another config, which differs in seed (0 there, 7 now); write", TRAINED),
    (TRAIN, "holds a run whose config can't be read", {"run/config.yaml": "old_key: 1"}),
    # The model.
    (WORDS + "model.path={}/none", "no folder '{}/none'; write a Hugging Face folder", {}),
    (
        WORDS + "model.path={}/none model.tokenizer={}/model",
        "{}/none: no such folder; write a Hugging Face folder",
        {},
    ),
    (WORDS + "model.path=Qwen/no-such", "add --download to get it, or run hf download Qwen/no", {}),
    (WORDS, "config.json: can't read it (No such file or directory)", {CONFIG_JSON: None}),
    (WORDS, "config.json: not JSON", {CONFIG_JSON: "{"}),
    (WORDS, "config.json: model_type 'llama'", {CONFIG_JSON: edited(model_type="llama")}),
    (WORDS, "config.json: hidden_size is 'x'; write", {CONFIG_JSON: edited(hidden_size="x")}),
    (WORDS, "has the wrong shape: expected [257, 32]", {CONFIG_JSON: edited(hidden_size=32)}),
    (WORDS, "only 99 embedding rows; write the model's own", {CONFIG_JSON: edited(vocab_size=99)}),
    (WORDS, "missing tensor model.layers.2.", {CONFIG_JSON: edited(num_hidden_layers=3)}),
    (WORDS, "extra tensor model.layers.1.", {CONFIG_JSON: edited(num_hidden_layers=1)}),
    (WORDS, "truncated, damaged or missing", {WEIGHTS: lambda content: content[:-50]}),
    (WORDS, "truncated, damaged or missing", {WEIGHTS: "<html>not found</html>"}),
    (WORDS, "holds neither model.safetensors nor model.safetensors.index", {WEIGHTS: None}),
    (WORDS, "no tokenizer that can be read in", {"model/tokenizer.json": None}),
    (WORDS, "no tokenizer that can be read in", {"model/tokenizer.json": "{}"}),
    (WORDS, "found no chat template, which the prompt", {"model/chat_template.jinja": None}),
    (WORDS, "its chat template fails on a system", {"model/chat_template.jinja": "{% if"}),
    (WORDS, "writes the question 0 times; write one", {"model/chat_template.jinja": "Hello"}),
    (WORDS + "budget.max=900", "budget.max=900: with prompts of 137 tokens", {}),
    (WORDS + "eval.budgets=[374]", "leave 373 for thinking; write at most 373", {}),
    (WORDS + "rollout.answer_tokens=512", "leave 0 for thinking; write fewer rollout.answ", {}),
    # Questions.
    (WORDS, "no file or folder '{}/questions.jsonl'; write a path", {"questions.jsonl": None}),
    (WORDS, "found no row in questions.jsonl; write a set with", {"questions.jsonl": ""}),
    (WORDS, "questions.jsonl line 2: Expecting", {"questions.jsonl": '{"question": "1"}\n{\n'}),
    (WORDS, "line 1: found list; write one JSON object a line", {"questions.jsonl": "[1]\n"}),
    (WORDS, "is not UTF-8 at byte 2; write a text file", {"questions.jsonl": b'{"\xff": 1}\n'}),
    (WORDS, "no question column 'problem' or", {"questions.jsonl": '{"q": "1", "answer": "1"}\n'}),
    (
        WORDS,
        "none of its 1 rows can be used",
        {"questions.jsonl": '{"question": "1", "answer": ""}'},
    ),
    (WORDS + "data.max_prompt_tokens=1", "found 8 prompts of 137 tokens or more; write a", {}),
    (
        WORDS + "eval.every=1",
        "eval.holdout=256: at most a tenth of the questions is held out, and jsonl:{}/questions",
        {},
    ),
    (WORDS + "eval.select=gsm8k", "which names none of data.eval; write train_holdout or", {}),
    (WORDS + "data.num_groups=4", "has no levels; write data.num_groups=1, or data.groups=", {}),
    (
        WORDS + "data.groups=solve_rate data.labels={}/rates.jsonl",
        "rates.jsonl line 1: found avg=2; write the share of correct samples, 0 to 1",
        {"rates.jsonl": '{"id": "x", "avg": 2, "samples": 1}'},
    ),
    ("data", "command line: no set; write --inspect NAME:PATH, or --config FILE", {}),
    ("data --inspect nowhere", "data.train: found 'nowhere'; write ledger, or NAME:PATH", {}),
    (f"data --inspect jsonl:{{}}/{LONG}", f"{LONG}: File name too long; make room or", {}),
    (INSPECT + "--against jsonl:{}/none", "no file or folder '{}/none'; write a path", {}),
    (INSPECT + "--split dev", "argument --split: invalid choice: 'dev' (choose from", {}),
    (INSPECT + "data.question_column=q", "no question column 'q', found the columns quest", {}),
    (
        "data --inspect csv:{}/set.csv",
        "set.csv row 1: has not as many fields as the header; put texts with commas in quotes",
        {"set.csv": "question,answer\n1, 2 or 3,4\n"},
    ),
    # Evaluation.
    ("evaluate", "command line: write --run DIR or --model HFDIR", {}),
    ("evaluate --run {}/run", "{}/run: holds no config.yaml; write the folder of a run", {}),
    ("evaluate --run {}/run", "holds no finished checkpoint; let the run save one", TRAINED),
    ("evaluate --run {}/run", "checkpoints/3/state: damaged, can't read the policy", DAMAGED),
    ("evaluate --run {}/run --step 4", "holds no such checkpoint; write one of 3", DAMAGED),
    (EVALUATE + "--budgets 4,-8", "--budgets 4,-8: found '-8'; write whole numbers such as", {}),
    (EVALUATE + "--budgets 1" + "0" * 5000, "write whole numbers such as 512,1024, none", {}),
    (EVALUATE + "--budgets 600", "the model has 512 positions; write fewer", {}),
    (EVALUATE + "--samples 2 --temperature nan", "--temperature nan: write a number above 0", {}),
    (EVALUATE + "--samples two", "argument --samples: invalid int value: 'two'", {}),
    (EVALUATE + "--out {}/small.yaml", "small.yaml: is a file; write the name of a folder", {}),
    (EVALUATE + "--out /proc/out", "/proc/out: can't be used (No such file", {}),
    (EVALUATE + f"--out {{}}/{LONG}", "can't be used (File name too long); write a folder", {}),
    (EVALUATE + "--compare {}/none", "--compare {}/none: holds no evaluation; run python", {}),
    (
        EVALUATE + "--samples 2 --label-difficulty {}/model",
        "--label-difficulty {}/model: is a folder; write the name of a file",
        {},
    ),
    (EVALUATE + "budget.max=4", "budget.max: an evaluation leaves the policy as it is", {}),
    (EVALUATE, "truncated, damaged or missing", {WEIGHTS: lambda content: content[:-50]}),
    # One question.
    ("generate --budget 4 why", "command line: write --run DIR or --model HFDIR", {}),
    (GENERATE, "question: found none; write one behind the options, or one per line on", {}),
    (GENERATE + "''", "question: found an empty text; write a question", {}),
    (GENERATE + "--budget 1" + "0" * 5000 + " why", "write whole numbers such as 512,1024", {}),
    (GENERATE + "--budget 400 why", "--budget 400: the model's 512 positions leave 249 for", {}),
    (GENERATE + "x" * 2000, "data.max_prompt_tokens=1024: found 1 prompts", {}),
    (GENERATE + "why data.prompt_format=tags", "data.prompt_format: found 'tags'; write", {}),
    # Planning.
    (PLAN + "--devices 0", "--devices: found '0'; write a number of GPUs, 1 to 100000", {}),
    (PLAN + "--devices 1000000007", "write a number of GPUs, 1 to 100000", {}),
    (PLAN + "--devices 3", "mesh.fsdp=3: must divide the model's width", {}),
    (PLAN + "--device v100", "--device: no device 'v100'; write one of rtx-4090", {}),
    (PLAN + "--device-memory 1e999", "--device-memory: found '1e999'; write GiB of a GPU", {}),
    (PLAN + "--compile tpu", "argument --compile: invalid choice: 'tpu'", {}),
    # Grading.
    (GRADE, "cases.jsonl: No such file or directory; name a JSONL file", {}),
    (GRADE, "line 1: no field 'gold', found ['pred']", {"cases.jsonl": '{"pred": "1"}'}),
    (GRADE, "line 1: gold is no string", {"cases.jsonl": '{"pred": "1", "gold": 1}'}),
    (GRADE, "a number of 5,000 digits; write one", {"cases.jsonl": '{"pred": ' + "9" * 5000 + "}"}),
    (GRADE, "nested deeper than 64 levels; write", {"cases.jsonl": "[" * 100_000}),
    (GRADE + "--workers 0", "--workers 0: write 1 or more", {}),
    (GRADE + "--deadline inf", "--deadline inf: write seconds, 0.05 or more", {}),
    (GRADE + "--mode harsh", "argument --mode: invalid choice: 'harsh'", {}),
    ("grade --cases {}/questions.jsonl --out {}/model", "no field 'pred', found", {}),
    # Export and report.
    (EXPORT, "{}/run: holds no config.yaml; write the folder of a run", {}),
    (EXPORT, "{}/run: holds no finished checkpoint; let the run save one", TRAINED),
    (EXPORT, "checkpoints/3/state: damaged, can't read the policy", DAMAGED),
    (
        EXPORT + "--out {}/model",
        "{}/model: already exists; write the name of a new folder",
        DAMAGED,
    ),
    (EXPORT + f"--out {{}}/{LONG}", "File name too long; make room or rights, or write", DAMAGED),
    (EXPORT + "--dtype int8", "argument --dtype: invalid choice: 'int8'", DAMAGED),
    (REPORT, "{}/run: holds no config.yaml; write the folder of a run", {}),
    (REPORT + "--out {}/none/x.html", "its folder does not exist; make it first", TRAINED),
    (REPORT, "line 1: is not a JSON record", {**TRAINED, "run/metrics.jsonl": "{\n{}\n"}),
    (REPORT, "its field 'step' is missing", {**TRAINED, "run/metrics.jsonl": '{"a": 1}\n'}),
    (
        REPORT,
        "its field 'sets' is missing",
        {**TRAINED, "run/eval.jsonl": '{"step": 1, "when": "x"}\n'},
    ),
    (REPORT, "summary.json: is damaged; remove it", {**TRAINED, "run/summary.json": "[]"}),
    # A study of runs, and one of gradient noise.
    ("study --config {}/none.yaml", "no such file", {}),
    ("study --config {}/small.yaml", "sizes: found null; write at least one, by name", {}),
    ("study --config {}/s.yaml", "s.yaml: tasks: found null", {"s.yaml": "sizes: {cpu: {}}"}),
    ("study --config {}/s.yaml", "kind: found 3; write runs or variance", {"s.yaml": "kind: 3"}),
    ("study --config {}/s.yaml", "no size 'cpu'", {"s.yaml": "kind: variance\nsizes: {}"}),
    ("report --run '{}/a\nb'", r"{}/a\nb: holds no config.yaml", {}),
    # The command of all commands.
    ("trian --config x", "no command 'trian'; write one of train, data", {}),
]


# What a check can't see: devices of another machine, and a folder that only writing tells about.
UNSEEN = ("mesh.", "/proc/")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder of a random model with a tokenizer of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("models") / "tiny"
    hf.save_policy(path, hf_world.random_params(SHAPE), config=SHAPE, tokenizer=tokenizer)
    return {file.name: file.read_bytes() for file in path.iterdir()}


def words_of(line, folder):
    """The line as a shell would hand it over."""
    words = [a or b for a, b in re.findall(r"'([^']*)'|(\S+)", line)]
    return [word.replace("{}", str(folder)) for word in words]


def write_files(folder, model, changes):
    """The files that command lines name, with changes."""
    files = {f"model/{name}": content for name, content in model.items()}
    files |= {"small.yaml": SMALL, "questions.jsonl": QUESTIONS}
    for name, change in changes.items():
        files[name] = change(files[name]) if callable(change) else change
    for name, content in files.items():
        if content is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def everything_in(folder):
    """Every file and folder, with contents."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


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
    assert capsys.readouterr().err.replace("--tokenizer", "model.tokenizer") == trained


@pytest.mark.slow  # a run is made ready as far as its checkpoint
def test_a_change_that_the_run_can_not_go_on_with_changes_nothing(model, tmp_path, capsys):
    write_files(tmp_path, model, DAMAGED)
    before = everything_in(tmp_path)
    line = words_of(TRAIN + "seed=3 --allow-change seed", tmp_path)
    assert __main__.main(line) == 2
    captured = capsys.readouterr()
    assert "the run can't go on with another seed" in captured.err.splitlines()[-1]
    after = everything_in(tmp_path)
    assert {path: after.pop(path) for path in before} == before
    # What is new tells nothing of the run.
    assert {path.name for path in after} <= {".lock", "rollouts"}


def test_the_table_is_long_and_names_every_command():
    commands = {line.split(" ")[0] for line, _, _ in BAD}
    assert len(BAD) >= 100
    assert commands >= set(__main__.COMMANDS)


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
    assert "can't be used (Permission denied); write a folder" in capsys.readouterr().err
