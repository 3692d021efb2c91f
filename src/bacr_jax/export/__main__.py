"""Implements `bacr export --run DIR --out HFDIR`, which exports a policy for transformers."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.cli import (
    Parser,
    add_step,
    entry_point,
    failure,
    silence_orbax,
    uninterrupted,
)
from bacr_jax.config.settings import resolve
from bacr_jax.out_of_memory import OutOfMemory

# Dtypes in which weights can be stored.
DTYPES = ("float32", "bfloat16", "float16")
DESCRIPTION = (
    "Writes a checkpoint of a run as a Hugging Face folder that contains the policy's prompt and "
    "rules. AutoModelForCausalLM.from_pretrained(HFDIR, trust_remote_code=True) returns a model "
    "whose generate takes budget= and enforces it. Prints the files written."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(
        prog="bacr export",
        description=DESCRIPTION,
        advice="run bacr export --run DIR --out HFDIR",
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder")
    parser.add_argument("--out", type=Path, required=True, metavar="HFDIR", help="a new folder")
    add_step(parser)
    parser.add_argument(
        "--merge-budget-prompt",
        action="store_true",
        help="write a plain folder without code, for a policy that reads its budget in the "
        "prompt; the chat template writes the budget, and nothing enforces it",
    )
    parser.add_argument(
        "--adapter",
        choices=("merged", "peft"),
        default="merged",
        help="form of a run that trained adapters: merged into the model (default), or only the "
        "adapters as a PEFT folder",
    )
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="present folder of model.path, if it was moved"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights; float32 by default")
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the folder to a model repository of the hub; a new repository is private",
    )
    return parser.parse_args(argv)


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs `bacr export`.

    Returns:
      The exit code: 0 after success, and 1 if the memory ran out. Invalid input exits with code 2.
    """
    silence_orbax()
    arguments = parse(argv)
    # Imported here because it imports JAX, which --help does not need.
    with uninterrupted():
        from bacr_jax.export.from_run import export, trained_style
        from bacr_jax.model.hf import hub
        from bacr_jax.model.hf.hf_config import WORDS
        from bacr_jax.prompts.budget_prompt import budget_words
        from bacr_jax.runs.saved_policy import read_config

    if arguments.push is not None:
        hub.check_push(arguments.push)
    try:
        files = export(
            arguments.run,
            arguments.out,
            base=arguments.base,
            dtype=arguments.dtype,
            step=arguments.step,
            merge_budget_prompt=arguments.merge_budget_prompt,
            adapter=arguments.adapter,
            print_line=lambda line: print(line, file=sys.stderr),
        )
    except OutOfMemory as error:
        return failure(f"{error}; free memory, or use a machine with more of it")
    for name in files:
        print(arguments.out / name)
    settings = resolve(read_config(arguments.run))
    words = budget_words(settings.task.budget_text, trained_style(settings.method))
    # A PEFT folder contains no config.json.
    if words and arguments.adapter == "merged":
        print(f"its prompts have the budget after the question: {words} (config.json, {WORDS})")
    if arguments.push is not None:
        print(f"pushed to {hub.push(arguments.out, arguments.push)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
