"""Entry point of `bacr COMMAND ...` and of `python -m bacr_jax COMMAND ...`.

Only the module of the requested command is imported. Its `main` parses the remaining arguments.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from bacr_jax.config.cli import entry_point, uninterrupted

# Module and description of each command.
COMMANDS = {
    "train": ("bacr_jax.train", "train a policy to reason within a token budget"),
    "data": ("bacr_jax.questions.__main__", "show the content of a set of questions"),
    "evaluate": ("bacr_jax.evaluate", "measure a policy at several thinking budgets"),
    "generate": ("bacr_jax.generate", "ask one question under one or several budgets"),
    "serve": ("bacr_serve.__main__", "answer OpenAI clients over HTTP, with a budget per request"),
    "configs": ("bacr_jax.list_configs", "list the configs of the package, with one line each"),
    "keys": ("bacr_jax.list_keys", "list the keys of a config: default, meaning, values"),
    "methods": ("bacr_jax.list_methods", "list the presets, and which are not verified"),
    "export": ("bacr_jax.export.__main__", "write the policy of a run as a Hugging Face folder"),
    "import": ("bacr_gguf.__main__", "convert a GGUF file to a Hugging Face folder"),
    "report": ("bacr_jax.report.__main__", "write the report of a run as one HTML file"),
    "study": ("bacr_study.__main__", "train and compare many runs: the experiments of the paper"),
    "plan": (
        "bacr_plan.__main__",
        "predict memory and step time of a run on given GPUs; needs no GPU",
    ),
    "doctor": (
        "bacr_doctor.__main__",
        "check this machine for a run; with --config, for that run",
    ),
    "grade": ("bacr_grading.__main__", "grade answers against references"),
}


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs the requested command with the remaining arguments and returns its exit code.

    An unknown command prints an error and returns 2.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: bacr COMMAND ...\n")
        for name, (_, meaning) in COMMANDS.items():
            print(f"  {name:{width}}  {meaning}")
        return 0
    if arguments == ["--version"]:
        print(f"bacr_jax {importlib.import_module('bacr_jax').__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        suggestion = near[0] if near else f"one of {', '.join(COMMANDS)}"
        print(f"error: {name!r} is not a bacr command; use {suggestion}", file=sys.stderr)
        return 2
    with uninterrupted():
        command = importlib.import_module(COMMANDS[name][0])
    return int(command.main(rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
