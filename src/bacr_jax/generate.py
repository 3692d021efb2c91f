"""`python -m bacr_jax.generate --run DIR | --model HFDIR --budget 512 "question"`: asks once."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.budgets import NONE, level_problems, read_budgets
from bacr_jax.config.checks import check_ranges
from bacr_jax.config.cli import (
    Parser,
    add_saved_policy,
    check_saved_policy,
    entry_point,
    failure,
)
from bacr_jax.errors import UserError
from bacr_jax.oom import OutOfMemory

if TYPE_CHECKING:
    from bacr_jax.data.prompts import PromptFormat

DESCRIPTION = (
    "Asks a policy one question under one or several thinking budgets. With one budget the "
    "thinking is written while it is decoded; with several they are decoded side by side."
)
EPILOG = (
    "Settings can be overridden, such as rollout.answer_tokens=256, data.prompt_format=boxed or "
    "conditioning.told=words, which tells the budget in the prompt."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, its numbers checked."""
    parser = Parser(prog="python -m bacr_jax.generate", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add_saved_policy(parser)
    add(
        "--budget",
        metavar="N,N",
        required=True,
        help="thinking tokens, one number or several: 0 (answer at once), a name of budget.levels, "
        f"or {NONE} (the policy is told none)",
    )
    add("--temperature", type=float, default=0.0, help="0, the default: the most likely tokens")
    add("--top-p", type=float, default=1.0, help="nucleus of a sampled answer")
    add("--seed", type=int, default=0, help="of a sampled answer")
    add("question")
    add("overrides", nargs="*", metavar="key.sub=value")
    arguments = parser.parse_intermixed_args(argv)
    check_saved_policy(arguments)
    for fault in _faults(arguments):
        raise UserError(fault)
    return arguments


def _faults(a: argparse.Namespace) -> Iterator[str]:
    """What can be said against the options without looking at any file."""
    if not a.question.strip():
        yield "question: found an empty text; write a question"
    if not 0 <= a.temperature < float("inf"):
        yield f"--temperature {a.temperature}: write 0 (the most likely tokens) or a number above"
    if not 0 < a.top_p <= 1:
        yield f"--top-p {a.top_p}: write a number above 0, up to 1"
    if a.top_p < 1 and a.temperature == 0:
        yield (
            f"--top-p {a.top_p}: is not read, since --temperature 0 takes the most likely token; "
            "write --temperature 0.6, or leave --top-p out"
        )
    if not 0 <= a.seed < 2**32:
        yield f"--seed {a.seed}: write a number from 0 to 4294967295"


def prompt_format(arguments: argparse.Namespace, config: Config) -> "PromptFormat":
    """The format that the policy was trained with, or one that suits a bare model."""
    from bacr_jax.data.prompts import FORMATS, format_for, with_closing_text
    from bacr_jax.methods.registry import declares_budget

    declares = declares_budget(config)
    own = config.data.prompt_format == "auto" and not declares
    told = any(key.startswith("data.train=") for key in arguments.overrides)
    # Nobody says what a Hugging Face folder was trained on.
    guessed = arguments.run is None and own and not told
    if guessed:
        return with_closing_text(FORMATS["think_answer"], config.data.closing_text)
    return format_for(config, declares_budget=declares)


def generate(arguments: argparse.Namespace, say: Callable[[str], Any]) -> None:
    """Decodes and writes the answers.

    Args:
      arguments: from `parse`.
      say: writes text, without a line end of its own.

    Raises:
      UserError: the policy, the question or a budget can't be used.
    """
    from bacr_jax.runs.open import open_policy

    saved = open_policy(arguments.run, arguments.model, arguments.step)
    config = config_io.override(saved.config, arguments.overrides)
    check_ranges(config)
    for fault in level_problems(config):
        raise UserError(fault)
    budgets = read_budgets(arguments.budget, option="--budget", levels=config.budget.levels)

    from bacr_jax.evaluation.ask import ask

    alone = len(budgets) == 1
    answers = ask(
        dataclasses.replace(saved, config=config),
        arguments.question,
        budgets,
        style=prompt_format(arguments, config),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        say=say if alone else None,
    )
    for budget, said in zip(budgets, answers):
        if not alone:
            name = "no budget" if budget is None else f"budget {budget}"
            say(f"--- {name} ---\n{said.thinking}")
        tokens = f"{said.thinking_tokens} thinking tokens, {said.forced_tokens} forced"
        say(f"\n{said.answer}\n[{tokens}, {said.answer_tokens} answer]\n")


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point: 0 when answered, 2 with one line on stderr when the input can't be used."""
    # Orbax warns about a metadata file that only single-item checkpoints have.
    logging.getLogger("absl").setLevel(logging.ERROR)

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        generate(parse(argv), say)
    except OutOfMemory as error:
        return failure(f"{error}; write fewer or smaller numbers in --budget")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
