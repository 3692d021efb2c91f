"""Implements `bacr generate --run DIR | --model HFDIR --budget 512 ["question"]`.

The command asks a policy one or several questions and prints the answers. `evaluation.ask` samples
the answers. `bacr_jax.load` uses `open_session` and `budgets_of` of this module.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bacr_io.command import INTERRUPTED
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import check_ranges
from bacr_jax.config.cli import (
    Parser,
    add_saved_policy,
    check_saved_policy,
    check_text,
    entry_point,
    failure,
    refusal,
    silence_orbax,
    whole_number,
)
from bacr_jax.config.derived import NONE, read_budgets
from bacr_jax.config.fields import LARGEST_SEED, SMALLEST_TEMPERATURE
from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.evaluation.overrides import ASKED_KEYS, override_faults
from bacr_jax.out_of_memory import OutOfMemory

if TYPE_CHECKING:
    from bacr_jax.evaluation.ask import Answer, Session
    from bacr_jax.prompts.formats import PromptFormat

DESCRIPTION = (
    "Asks a policy questions at one or several thinking budgets. Answers are printed while they "
    "are decoded; several budgets are printed in columns if the terminal is wide enough. Without "
    "a question, questions are read from the terminal, or from a pipe one per line."
)
EPILOG = (
    "Config keys of prompts and decoding can be overridden, such as rollout.answer_tokens=256 or "
    "data.prompt_format=boxed. With --model, conditioning.budget_input=prompt can be written too; "
    "it puts the budget into the prompt."
)
COMMANDS = (
    "/budget 8,64   /temperature 0.6   /top-p 0.95   /seed 1   /help; Ctrl-C stops an answer, "
    "Ctrl-D ends"
)
# Matches a config override such as budget.cap=9. Requires a dot in the key, so that a question such
# as x=5 does not match.
_OVERRIDE = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+=.*", re.DOTALL)
# Minimum width of a column in characters. On a narrower terminal, answers are printed one after
# another.
_MIN_COLUMN_WIDTH = 24


@dataclasses.dataclass(frozen=True)
class AskOptions:
    """Sampling settings for the answers to the next question.

    Attributes:
      budgets: thinking budgets in tokens, with None for no budget. One answer is sampled per
        budget.
      temperature: sampling temperature. 0 selects the most likely token (greedy decoding).
      top_p: cumulative probability for nucleus sampling.
      seed: random seed for sampling.
    """

    budgets: tuple[int | None, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def check(self, dash: str = "--") -> None:
        """Raises UserError if a setting is invalid.

        Args:
          dash: prefix of option names in error messages, such as "--" or "/".
        """
        is_sampled = SMALLEST_TEMPERATURE <= self.temperature < float("inf")
        if self.temperature != 0 and not is_sampled:
            raise UserError(
                f"{dash}temperature {self.temperature} is out of range; use 0 (always the most "
                f"likely token) or a number from {SMALLEST_TEMPERATURE:g}"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"{dash}top-p {self.top_p} is out of range; use a number above 0 and at most 1"
            )
        if self.top_p < 1 and self.temperature == 0:
            raise UserError(
                f"{dash}top-p {self.top_p} has no effect, because {dash}temperature 0 always "
                f"selects the most likely token; use {dash}temperature 0.6, or leave {dash}top-p "
                "out"
            )
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(
                f"{dash}seed {self.seed} is out of range; use a number from 0 to {LARGEST_SEED}"
            )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and validates the command line.

    Returns:
      The parsed options. `question` is None if the command line contains no question, and
      `overrides` lists the overrides of config keys.

    Raises:
      UserError: if an option or the question is invalid.
    """
    parser = Parser(prog="bacr generate", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add_saved_policy(parser)
    # `bacr evaluate` calls this option --budgets.
    add(
        "--budget",
        "--budgets",
        metavar="N,N",
        required=True,
        help="thinking tokens, one or several: numbers, 0 (answer at once), names of "
        f"budget.levels, or {NONE} (no budget in the input)",
    )
    add(
        "--temperature",
        type=float,
        help="temperature of a sampled answer; 0 takes the most likely tokens. The default is 0, "
        "but with the prompt format native it is the run's eval.temperature, or the temperature "
        "in the folder's generation_config.json",
    )
    add("--top-p", type=float, help="top-p; 1 by default, but with native as for --temperature")
    add("--seed", type=int, default=0, help="seed of a sampled answer; 0 by default")
    add(
        "words",
        nargs="*",
        metavar="question | key.sub=value",
        help="the question, and overrides of config keys",
    )
    arguments = parser.parse_intermixed_args(argv)
    check_saved_policy(arguments)
    questions = [word for word in arguments.words if not _OVERRIDE.fullmatch(word)]
    if len(questions) > 1:
        raise UserError(
            f"question: found two, {shown(questions[0])} and {shown(questions[1])}; pass a single "
            "question, in quotes"
        )
    arguments.question = questions[0] if questions else None
    arguments.overrides = [word for word in arguments.words if word not in questions]
    if questions and not arguments.question.strip():
        raise UserError("the question is empty; pass a text")
    # The defaults depend on the policy, which is opened later.
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    top_p = 1.0 if arguments.top_p is None else arguments.top_p
    AskOptions((), temperature, top_p, arguments.seed).check()
    return arguments


def prompt_format(
    settings: MethodSettings, *, is_run: bool, overrides: Sequence[str]
) -> "PromptFormat":
    """Returns the prompt format of the questions that the policy answers.

    The policy of a run gets the format that it was trained with. For the policy of a Hugging Face
    folder, the config key `data.prompt_format` specifies the format. If this key is `auto` and
    `data.train` is not overridden, the format is `think_answer`, or the format of a method whose
    policy writes a budget at the beginning of each response (SelfBudgeter).

    Args:
      settings: settings of the policy's method.
      is_run: True for the policy of a run, False for a Hugging Face folder.
      overrides: config overrides from the command line.
    """
    from bacr_jax.methods.registry import declares_budget
    from bacr_jax.prompts.formats import FORMATS, format_for, with_texts

    declares = declares_budget(settings)
    train_is_overridden = config_io.is_overridden("data.train", overrides)
    # The training set can determine the format, but a Hugging Face folder does not name it.
    # The default of `data.train`, the ledger task, must not select the format.
    if not (is_run or train_is_overridden or declares):
        name = settings.data.prompt_format
        return with_texts(FORMATS["think_answer" if name == "auto" else name], settings.data)
    return format_for(settings.data, declares_budget=declares)


def open_session(
    run: Path | None,
    model: Path | None,
    step: int | str | None = None,
    overrides: Sequence[str] = (),
    *,
    download: bool = False,
    keys: tuple[str, ...] = ASKED_KEYS,
) -> "Session":
    """Opens a saved policy. Prints the selected step of a run to stderr.

    Args:
      run: run folder, or None to open `model`.
      model: folder or hub name of a Hugging Face model.
      step: step number, "best" or "newest". None selects the best step, or the newest step if no
        best step was recorded.
      overrides: config overrides as `key.sub=value`.
      download: True to download the model if it is not on this machine.
      keys: config keys, and prefixes of config keys, that can be overridden.

    Returns:
      A session, which answers questions with the policy.

    Raises:
      UserError: if the policy can't be opened or an override is invalid.
    """
    for fault in override_faults(overrides, keys, is_run=run is not None):
        raise UserError(fault)
    from bacr_jax.runs.saved_policy import open_policy, with_recommended_sampling

    saved = open_policy(run, model, step, download=download)
    config = config_io.override(saved.config, overrides)
    check_ranges(config)
    from bacr_jax.evaluation.ask import Session
    from bacr_jax.parallel import processes
    from bacr_jax.parallel.compile_cache import keep_programs
    from bacr_jax.report.chosen_step import step_lines

    processes.check_platform()
    compile_cache = keep_programs(config.output.compile_cache)
    if compile_cache.refused:
        print(compile_cache.line, file=sys.stderr)
    saved = saved.under(config)
    style = saved.style or prompt_format(
        resolve(config).method, is_run=run is not None, overrides=overrides
    )
    if run is None and style.is_native:
        evaluation = with_recommended_sampling(config.eval, saved.folder)
        # Overrides take precedence.
        config = config_io.override(dataclasses.replace(config, eval=evaluation), overrides)
        saved = dataclasses.replace(saved, config=config)
    session = Session(saved, style)
    if saved.chosen is not None:
        for line in step_lines(saved.chosen):
            print(line, file=sys.stderr)
    return session


def budgets_of(session: "Session", text: str, option: str) -> tuple[int | None, ...]:
    """Parses a comma-separated list of budgets, such as "8,low,none".

    Args:
      session: session of the policy, whose `budget.levels` maps names such as `low` to budgets.
      text: the list of budgets.
      option: name of the option that contains `text`, for error messages.

    Returns:
      The budgets in tokens, with None for `none` (no budget).
    """
    levels = session.saved.config.budget.levels
    return tuple(read_budgets(text, option=option, levels=levels))


class Stopped(Exception):
    """Raised to stop decoding after the user pressed Ctrl-C during an answer."""


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """Yields a `poll` function that raises `Stopped` after Ctrl-C.

    The device finishes its running program before `poll` is called, so the state on the device
    stays consistent. A second Ctrl-C raises KeyboardInterrupt immediately.
    """
    signals: list[int] = []

    def on_interrupt(number: int, frame: types.FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    def poll() -> None:
        if signals:
            raise Stopped

    previous_handler = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield poll
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def answer(
    session: "Session", question: str, options: AskOptions, print_line: Callable[[str], Any]
) -> None:
    """Asks one question at every budget and prints the answers during decoding."""
    console = Console()
    settings = dataclasses.asdict(options)
    budgets = settings.pop("budgets")
    with stopping() as poll:
        ask = functools.partial(session.ask, [question], budgets, **settings, poll=poll)
        if len(budgets) == 1:
            (single,) = ask(watch=_Stream(print_line))
            print_line(_answer_text(single))
        elif LiveColumns.fit(console, budgets):
            with LiveColumns(console, budgets) as columns:
                columns.show(ask(watch=columns.watch))
        else:
            for result in ask(watch=None):
                print_line(f"--- {_budget_name(result.budget)} ---\n{result.thinking}")
                print_line(_answer_text(result))


def _answer_text(answer: "Answer") -> str:
    """Returns the text printed after the thinking: the answer and its token counts."""
    return f"\n{answer.answer_text}\n[{_counts(answer)}]\n"


def _budget_name(budget: int | None) -> str:
    """Returns the title of an answer, such as "budget 512"."""
    return "no budget" if budget is None else f"budget {budget}"


def _counts(answer: "Answer") -> str:
    """Returns the token counts of an answer as text."""
    return (
        f"{answer.thinking_tokens} thinking tokens, {answer.forced_tokens} forced, "
        f"{answer.answer_tokens} answer"
    )


class LiveColumns(Live):
    """Context manager that shows one terminal column per budget, updated during decoding."""

    def __init__(self, console: Console, budgets: Sequence[int | None]):
        """Creates empty columns that are titled with the budgets."""
        # Title, thinking, answer and token counts of each column.
        self._columns = [(_budget_name(budget), "", "", "") for budget in budgets]
        # Automatic refresh would draw from another thread while JAX computes.
        super().__init__(self._table(), console=console, auto_refresh=False)

    @staticmethod
    def fit(console: Console, budgets: Sequence[int | None]) -> bool:
        """True if the terminal is wide enough for one column per budget."""
        return console.is_terminal and console.width >= _MIN_COLUMN_WIDTH * len(budgets)

    def watch(self, row: int, thinking: str, answer: str) -> None:
        """Shows the current texts of a column. Passed as `watch` to `ask.Session.ask`.

        Args:
          row: index of the budget, and of its column.
          thinking: thinking that has been decoded so far.
          answer: answer text that has been decoded so far.
        """
        title, *_ = self._columns[row]
        self._columns[row] = (title, thinking, answer, "")
        self.update(self._table(), refresh=True)

    def show(self, answers: "Sequence[Answer]") -> None:
        """Shows the finished answers."""
        self._columns = [
            (_budget_name(answer.budget), answer.thinking, answer.answer_text, _counts(answer))
            for answer in answers
        ]
        self.update(self._table(), refresh=True)

    def _table(self) -> Table:
        """Returns the table of all columns."""
        table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
        titles, *texts = zip(*self._columns)
        for title in titles:
            table.add_column(Text(title, style="bold"), ratio=1, overflow="fold")
        for row, style in zip(texts, ("dim", "", "italic")):
            table.add_row(*(Text(text, style=style) for text in row))
        return table


class _Stream:
    """Callback that prints the thinking for a single budget while it is decoded.

    Passed as `watch` to `ask.Session.ask`.
    """

    def __init__(self, print_line: Callable[[str], Any]):
        self._say = print_line
        self._num_printed = 0

    def __call__(self, row: int, thinking: str, answer: str) -> None:
        """Prints the part of the thinking that has not been printed yet."""
        self._say(thinking[self._num_printed :])
        self._num_printed = max(self._num_printed, len(thinking))


def converse(session: "Session", options: AskOptions, print_line: Callable[[str], Any]) -> None:
    """Reads questions and commands from the terminal, and prints the answers, until end of input.

    If the input is invalid, a one-line error is printed and the next line is read.

    Args:
      session: session of the policy.
      options: initial settings, which commands can change.
    """
    # Importing readline adds line editing and a history to `input`. Some Python builds lack it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    print_line(f"{session.saved.name}; a question, or {COMMANDS}\n")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print_line("\n")
            return
        except KeyboardInterrupt:
            print_line("\nCtrl-D ends\n")
            continue
        try:
            if line.startswith("/"):
                options = _changed(session, options, line)
                print_line(f"{_settings_line(options)}\n")
            elif line:
                check_text(line, "question")
                started = time.perf_counter()
                answer(session, line, options, print_line)
                print_line(f"{time.perf_counter() - started:.1f} s\n")
        except Stopped:
            print_line("\n[stopped]\n")
        except UserError as error:
            refusal(error)
        except OutOfMemory as error:
            failure(f"{error}; use fewer or smaller numbers after /budget")


def _changed(session: "Session", options: AskOptions, line: str) -> AskOptions:
    """Applies a command such as `/budget 8,64` to the settings and returns the new settings.

    Args:
      session: session of the policy.
      options: current settings.
      line: command with its leading slash.

    Raises:
      UserError: if the command or its value is invalid.
    """
    name, _, value = line[1:].partition(" ")
    value = value.strip()
    if name == "help":
        return options
    if name == "budget":
        return dataclasses.replace(options, budgets=budgets_of(session, value, "/budget"))
    if name == "seed":
        number = whole_number(value, most=LARGEST_SEED)
        if number is None:
            raise UserError(
                f"/seed {value} is not a valid seed; use a number from 0 to {LARGEST_SEED}"
            )
        return dataclasses.replace(options, seed=number)
    if name not in ("temperature", "top-p"):
        raise UserError(f"/{name} is not a command; enter a question, or {COMMANDS}")
    try:
        setting: dict[str, Any] = {name.replace("-", "_"): float(value)}
        changed = dataclasses.replace(options, **setting)
    except ValueError:
        raise UserError(f"/{name} {value} is not a number; enter a number") from None
    if name == "temperature" and changed.temperature == 0:
        # Reset top-p, which has no effect on greedy decoding. Otherwise `check` would raise
        # an error.
        changed = dataclasses.replace(changed, top_p=1.0)
    changed.check("/")
    return changed


def _settings_line(options: AskOptions) -> str:
    """Returns a line with the sampling settings and a line with the available commands."""
    budgets = ",".join(NONE if budget is None else str(budget) for budget in options.budgets)
    return (
        f"budget {budgets}, temperature {options.temperature:g}, top-p {options.top_p:g}, "
        f"seed {options.seed}\n{COMMANDS}"
    )


def from_pipe(session: "Session", options: AskOptions, print_line: Callable[[str], Any]) -> None:
    """Asks the question in every non-empty line of standard input and prints the answers.

    Raises:
      UserError: if a line is invalid, or the input contains no question.
    """
    num_questions = 0
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Without this call, bytes that are not valid UTF-8 would raise an exception in most
        # locales. With it, they become surrogate escapes, which `check_text` reports.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(sys.stdin, 1):
        question = line.strip()
        check_text(question, f"standard input, line {number}")
        if not question:
            continue
        num_questions += 1
        print_line(f"=== {question} ===\n")
        try:
            answer(session, question, options, print_line)
        except UserError as error:
            raise UserError(f"standard input, line {number}: {error}") from None
    if not num_questions:
        raise UserError(
            "no question is given; pass one after the options, or one per line on standard input"
        )


def generate(arguments: argparse.Namespace, print_line: Callable[[str], Any]) -> None:
    """Opens the policy and answers the questions from the command line, a terminal or a pipe.

    Args:
      arguments: result of `parse`.
      print_line: function that prints a text.
    """
    session = open_session(
        arguments.run,
        arguments.model,
        arguments.step,
        arguments.overrides,
        download=arguments.download,
    )
    budgets = budgets_of(session, arguments.budget, "--budget")
    temperature, top_p = session.default_sampling()
    if arguments.temperature is not None:
        temperature = arguments.temperature
        top_p = 1.0
    if arguments.top_p is not None:
        top_p = arguments.top_p
    options = AskOptions(budgets, temperature, top_p, arguments.seed)
    options.check()
    if arguments.question is not None:
        answer(session, arguments.question, options, print_line)
    elif sys.stdin.isatty():
        converse(session, options, print_line)
    else:
        from_pipe(session, options, print_line)


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs `bacr generate`.

    Returns:
      The exit code: 0 after success, 130 after Ctrl-C, and 1 if a device ran out of memory. Invalid
        input prints one line and exits with code 2.
    """
    silence_orbax()

    def print_line(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        generate(parse(argv), print_line)
    except OutOfMemory as error:
        return failure(f"{error}; use fewer or smaller numbers in --budget")
    except (KeyboardInterrupt, Stopped):
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
