"""Extracts the commands of README.md, BUILD.md, CONTRIBUTING.md and docs/*.md.

The tables in this module specify which commands the slow tests run, and why others are not run.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "BUILD.md", "CONTRIBUTING.md")
SHELLS = ("bash", "sh", "shell", "console")
# Start of a command in inline code or in an indented block.
STARTS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python3?|bacr|pip|pytest|ruff|mypy|pre-commit|sphinx-build|sbatch|srun"
    r"|wandb|kubectl|docker|cp|mkdir|for|\.ci/run|launch/\S+|recipes/\S+)(?: |$)"
)


@dataclass(frozen=True)
class Command:
    """A command, and the page that contains it."""

    text: str
    page: str


def pages():
    """Returns the paths of the pages that are searched for commands."""
    return [*PAGES, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def commands():
    """Returns the commands of all pages, in the order of the pages.

    A command that a page repeats is only listed once for this page.
    """
    return [
        Command(text, page)
        for page in pages()
        for text in dict.fromkeys(commands_of((ROOT / page).read_text()))
    ]


def commands_of(text):
    """Returns the commands in the text of a page.

    All lines of shell blocks are commands. Lines of indented blocks and inline code are commands if
    they match `STARTS`, except for inline code that only names a program (`is_name`).
    """
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    found = []
    for kind, block in fence.findall(text):
        found += split(block) if kind in SHELLS else []
    prose = fence.sub("", text)
    indented = re.compile(r"(?<=\n\n)(?: {4}.*\n?)+", re.MULTILINE)
    for block in indented.findall(prose):
        found += [one for one in split(block) if STARTS.match(one)]
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", indented.sub("", prose)):
        inside = [one for one in split(code.replace("\n", " ")) if STARTS.match(one)]
        found += [one for one in inside if not is_name(one)]
    return found


def split(block):
    """Splits a shell block into commands.

    Continued lines are joined, comments are removed, and commands joined by `&&` are separated. A
    `for` loop is one command.
    """
    found = []
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        found += [line] if line.startswith("for ") else re.split(r" && ", line)
    return [" ".join(one.split()) for one in found if one.strip()]


def is_name(text):
    """True if a text only names a command: it has no arguments, or `...` in their place.

    The exception is `.ci/run`, which is run without arguments.
    """
    return (
        re.fullmatch(r"(python -m |bacr )?[\w./-]+( \.\.\.)?", text) is not None
        and text != ".ci/run"
    )


def words_of(text):
    """Splits a command into words that its parser accepts.

    Optional words lose their brackets, `$i` becomes 1, and `lenient|...` becomes its first choice.
    """
    text = re.sub(r"\[(-[^]]*)\]", r"\1", text)
    text = text.replace("$i", "1")
    return [re.sub(r"^(lenient)\|.*", r"\1", word) for word in shlex.split(text)]


# Overrides that shorten a training run to seconds.
FEW = (
    "train.steps=2 warmup.steps=4 warmup.target_accuracy=0 warmup.short_accuracy=0 "
    "warmup.hold_accuracy=0 eval.every=null "
    "eval.size=16 eval.samples=0 rollout.questions=4 rollout.group_size=4 "
    "train.micro_batch_rows=null output.tensorboard=false"
)
SMALL = "model.num_layers=1 data.ledger.train_size=64"
MATH500 = "bacr data --inspect math500:math500/test.jsonl"


def few(text):
    """Returns a training command with overrides that shorten it to seconds."""
    # Only the run without output.dir draws its report. Later commands of the pages use this run.
    more = " output.report=false" if "output.dir" in text else ""
    return f"{text} {FEW} {SMALL}{more}"


def as_is(text):
    """Returns the command unchanged."""
    return text


def and_also(words):
    """Returns a function that appends words to a command."""
    return lambda text: f"{text} {words}"


# Three tables of the commands that slow tests run. A key is the beginning of a command. Its value
# is a function that converts the command to the one that is run. If several keys match a command,
# the longest counts. The commands of a table run in its order, in one folder.
OF_RUNS = {
    "bacr train --config configs/quickstart.yaml": few,
    "bacr train --config quickstart": few,
    "bacr evaluate --run runs/quickstart": and_also("--size 8 --out runs/evaluation"),
    "bacr evaluate --run runs/quickstart --budgets": and_also("--size 8"),
    "bacr generate --run runs/quickstart": as_is,
    "bacr report --run runs/quickstart": as_is,
    "bacr methods --run runs/quickstart": as_is,
    "bacr report": as_is,
    "bacr generate": as_is,
    "bacr export --run runs/quickstart": as_is,
    "bacr export --run runs/lora": as_is,
    "bacr generate --model hf": as_is,
    "bacr evaluate --model hf": and_also("--size 8 --out runs/evaluation-hf"),
}
TWICE = {
    "for i in 1 2; do bacr train": lambda text: text.replace(
        "output.", f"{FEW} {SMALL} output.report=false output."
    ),
    'python -c "from bacr_jax.runs.metrics': as_is,
}
OTHERS = {
    "bacr keys": as_is,
    "bacr train --config configs/gym.yaml": and_also(f"{FEW} --check"),
    "bacr plan": and_also("--compile none"),
    "bacr grade --cases cases.jsonl": lambda text: " ".join(words_of(text)),
    MATH500: as_is,
    "bacr data --inspect math:math/train.jsonl data.dir=data": as_is,
    "bacr study --config configs/studies/main.yaml --dry-run": as_is,
    "bacr study --config F --size 7b --list": lambda text: text.replace(
        " F ", " configs/studies/main.yaml "
    ),
    "mkdir -p studies": as_is,
    "cp -r docs/results/": as_is,
    "python examples/start_here.py": as_is,
    "python examples/own_data.py own": as_is,
    "bacr data --config configs/examples/own-data.yaml": as_is,
    "bacr train --config configs/examples/own-data.yaml": and_also(FEW),
    "bacr data --inspect ledger": as_is,
    "python docs/make_configuration.py": and_also("--check"),
    "python docs/make_performance.py": and_also("--check"),
}
RUN = OF_RUNS | TWICE | OTHERS
# Beginnings of commands that no test runs, and the reason. Commands of this library are still
# parsed.
NOT_RUN = {
    "pip install": "network",
    "pre-commit install": "network",
    "wandb": "network",
    "python3 -m venv": ".ci/run",
    "python -m venv": ".ci/run",
    ". .venv/bin/activate": ".ci/run",
    ".ci/run": "minutes; it is what runs the tests",
    "PYTHON=python3.12 .ci/run": "minutes; it is what runs the tests",
    "ruff": ".ci/run",
    "sphinx-build": ".ci/run",
    "python -m pytest -n": ".ci/run",
    "python -m pytest -m slow": "hours",
    "python -m pytest -m browser": "a browser",
    "python -m pytest -m soak": "hours",
    "JAX_PLATFORMS=cuda,cpu python -m pytest": "gpu",
    "BACR_GPU_TESTS=cpu python -m pytest": "hours",
    "python benchmarks/": "hours",
    "sbatch": "cluster",
    "kubectl": "cluster",
    "launch/": "cluster",
    "recipes/": "minutes; the rehearsal has a slow test of its own, their dry runs a quick one",
    "bacr train --config configs/qwen": "gpu, weights",
    "bacr train --config qwen": "gpu, weights",
    "bacr train --config configs/smollm2-135m-gsm8k.yaml": "gpu, weights",
    "bacr study": "hours",
    "bacr data --show-prompts": "weights",
    "bacr doctor": "minutes; its parts have tests of their own",
    "bacr train --config mine.yaml": "files of the reader's own",
    "bacr grade --grader": "files of the reader's own",
    "bacr report --run runs/a": "a run of the reader's own",
    "bacr data --prepare": "network",
    "bacr data --inspect": "data of the reader's own",
    "bacr evaluate --run runs/mine": "a run of the reader's own",
    "bacr report --run runs/mine": "a run of the reader's own",
    "bacr evaluate --run runs/qwen": "gpu, weights",
    "bacr report --run runs/qwen": "gpu, weights",
    "bacr export --run runs/qwen": "gpu, weights",
    "bacr export --run runs/mine": "a run of the reader's own",
    "bacr evaluate --model": "weights",
    "bacr evaluate --model hf --data ledger --budgets 8,16,32,64 --engine": "vLLM",
    "python -m venv serving": "integrations/vllm/test.sh",
    "serving/bin/": "integrations/vllm/test.sh",
    "bacr serve": "never ends; tests/serve starts one",
    "openssl": "a key of the reader's own",
    "curl": "a server",
    "until curl": "vLLM",
    "llama-server": "llama.cpp; tests/interop/test_llama_cpp.py starts its server",
    "python llama.cpp/convert_hf_to_gguf.py": "llama.cpp",
    "python examples/ask_llama_cpp.py": "a server; tests/examples has a stand-in",
    "python examples/llama_cpp_template.py": "a folder of the reader's own",
    "bacr import": "weights",
    "bacr generate --model": "weights",
}


def beginning_of(text, table):
    """Returns the longest key of a table with which the command begins, or None."""
    found = [start for start in table if text.startswith(start)]
    return max(found, key=len, default=None)


def stands_alone(text):
    """True if the command trains a run that no other command of the pages needs."""
    a_run = text.startswith(next(iter(OF_RUNS))) and "output.dir=" in text
    return a_run and "output.dir=runs/lora" not in text


def class_of(text):
    """Returns "run", the reason why the command is not run, or None if no table contains it."""
    run, reason = beginning_of(text, RUN), beginning_of(text, NOT_RUN)
    if run is not None and len(run) > len(reason or ""):
        return "run"
    return None if reason is None else NOT_RUN[reason]
