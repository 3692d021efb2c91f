"""`bacr generate --run DIR | --model HFDIR --budget 512 ["question"]`: asks."""

import argparse
import contextlib
import dataclasses
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

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import check_ranges
from bacr_jax.config.cli import (
    Parser,
    add_saved_policy,
    check_saved_policy,
    check_text,
    entry_point,
    failure,
    quieten_orbax,
    refusal,
    whole_number,
)
from bacr_jax.config.derived import NONE, read_budgets
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.oom import OutOfMemory

if TYPE_CHECKING:
    from bacr_jax.evaluation.ask import Answer, Session
    from bacr_jax.prompts.formats import PromptFormat

DESCRIPTION = (
    "Asks a policy questions under one or several thinking budgets. What it says is written while "
    "it is decoded; several budgets stand side by side where the terminal is wide enough. Without "
    "a question it asks for them, one after the other; from a pipe it reads one per line."
)
EPILOG = (
    "Settings can be overridden, such as rollout.answer_tokens=256, data.prompt_format=boxed or "
    "conditioning.told=words, which tells the budget in the prompt."
)
COMMANDS = (
    "/budget 8,64   /temperature 0.6   /top-p 0.95   /seed 1   /help; Ctrl-C stops an answer, "
    "Ctrl-D ends"
)
# A word that sets a key and is no question: x=5 is one, budget.cap=9 is none.
_OVERRIDE = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+=.*", re.DOTALL)
# Columns narrower than this are no text to read; answers then stand below each other.
_NARROWEST = 24


@dataclasses.dataclass(frozen=True)
class Asking:
    """How the next question is asked.

    Attributes:
      budgets: thinking tokens; None: the policy is told none.
    """

    budgets: tuple[int | None, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def check(self, dash: str = "--") -> None:
        """Refuses what no answer can be drawn with."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"{dash}temperature {self.temperature}: write 0 (the most likely tokens) or a "
                "number above"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"{dash}top-p {self.top_p}: write a number above 0, up to 1")
        if self.top_p < 1 and self.temperature == 0:
            raise UserError(
                f"{dash}top-p {self.top_p}: is not read, since {dash}temperature 0 takes the most "
                f"likely token; write {dash}temperature 0.6, or leave {dash}top-p out"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"{dash}seed {self.seed}: write a number from 0 to 4294967295")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, its numbers checked; `question` is None where none was given."""
    parser = Parser(prog="bacr generate", description=DESCRIPTION, epilog=EPILOG)
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
    add("words", nargs="*", metavar="question | key.sub=value", help="the question, and settings")
    arguments = parser.parse_intermixed_args(argv)
    check_saved_policy(arguments)
    questions = [word for word in arguments.words if not _OVERRIDE.fullmatch(word)]
    if len(questions) > 1:
        raise UserError(
            f"question: found {shown(questions[0])} and {shown(questions[1])}; write one, in quotes"
        )
    arguments.question = questions[0] if questions else None
    arguments.overrides = [word for word in arguments.words if word not in questions]
    if questions and not arguments.question.strip():
        raise UserError("question: found an empty text; write a question")
    Asking((), arguments.temperature, arguments.top_p, arguments.seed).check()
    return arguments


def prompt_format(config: Config, *, is_run: bool, overrides: Sequence[str]) -> "PromptFormat":
    """The format that the policy was trained with, or one that suits a bare model."""
    from bacr_jax.methods.registry import declares_budget
    from bacr_jax.prompts.formats import FORMATS, format_for, with_texts

    declares = declares_budget(config)
    own = config.data.prompt_format == "auto" and not declares
    told = any(key.startswith("data.train=") for key in overrides)
    # Nobody says what a Hugging Face folder was trained on.
    if not is_run and own and not told:
        return with_texts(FORMATS["think_answer"], config)
    return format_for(config, declares_budget=declares)


def open_session(
    run: Path | None,
    model: Path | None,
    step: int | str | None = None,
    overrides: Sequence[str] = (),
    *,
    download: bool = False,
) -> "Session":
    """Opens a policy on disk; standard error gets a line with the step of a run and why."""
    from bacr_jax.runs.open import open_policy

    saved = open_policy(run, model, step, download=download)
    config = config_io.override(saved.config, overrides)
    check_ranges(config)
    from bacr_jax.evaluation.ask import Session
    from bacr_jax.parallel import processes
    from bacr_jax.parallel.compile_cache import keep_programs
    from bacr_jax.report.chosen_step import step_lines

    processes.check_platform()
    if (kept := keep_programs(config.output.compile_cache)).refused:
        print(kept.line, file=sys.stderr)
    saved = saved.under(config)
    style = saved.style or prompt_format(config, is_run=run is not None, overrides=overrides)
    session = Session(saved, style)
    if saved.chosen is not None:
        for line in step_lines(saved.chosen):
            print(line, file=sys.stderr)
    return session


def budgets_of(session: "Session", text: str, option: str) -> tuple[int | None, ...]:
    """Budgets as somebody wrote them, with the names of the policy's levels."""
    levels = session.saved.config.budget.levels
    return tuple(read_budgets(text, option=option, levels=levels))


class Stopped(Exception):
    """Ctrl-C during an answer."""


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """Within it Ctrl-C is noted, for the `poll` that is yielded; a second one ends the program.

    The program under way is finished, so that nothing on the device is left half-made.
    """
    noted: list[int] = []

    def note(number: int, frame: types.FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    def poll() -> None:
        if noted:
            raise Stopped

    before = signal.signal(signal.SIGINT, note)
    try:
        yield poll
    finally:
        signal.signal(signal.SIGINT, before)


def answer(session: "Session", question: str, asking: Asking, say: Callable[[str], Any]) -> None:
    """Asks one question and writes what comes, while it comes."""
    settings = dataclasses.asdict(asking)
    budgets = settings.pop("budgets")
    with stopping() as poll:
        ask: Callable[..., list[Answer]] = lambda watch: session.ask(
            [question], budgets, **settings, watch=watch, poll=poll
        )
        console, alone = Console(), len(budgets) == 1
        if not alone and LiveColumns.fit(console, budgets):
            with LiveColumns(console, budgets) as columns:
                columns.show(ask(columns.watch))
            return
        for found in ask(_Stream(say) if alone else None):
            if not alone:
                say(f"--- {_budget_name(found.budget)} ---\n{found.thinking}")
            say(f"\n{found.answer}\n[{_counts(found)}]\n")


def _budget_name(budget: int | None) -> str:
    return "no budget" if budget is None else f"budget {budget}"


def _counts(answer: "Answer") -> str:
    return (
        f"{answer.thinking_tokens} thinking tokens, {answer.forced_tokens} forced, "
        f"{answer.answer_tokens} answer"
    )


class LiveColumns(Live):
    """Budgets side by side on a terminal, filled while their tokens come; a context manager."""

    def __init__(self, console: Console, budgets: Sequence[int | None]):
        self._columns = [(_budget_name(budget), "", "", "") for budget in budgets]
        # Redrawn when something came: a thread of its own would draw while JAX computes.
        super().__init__(self._table(), console=console, auto_refresh=False)

    @staticmethod
    def fit(console: Console, budgets: Sequence[int | None]) -> bool:
        """Whether so many columns can be read on this terminal."""
        return console.is_terminal and console.width >= _NARROWEST * len(budgets)

    def watch(self, row: int, thinking: str, answer: str) -> None:
        """Takes the texts of a row so far; see `ask.Session`."""
        self._columns[row] = (self._columns[row][0], thinking, answer, "")
        self.update(self._table(), refresh=True)

    def show(self, answers: "Sequence[Answer]") -> None:
        """Puts the finished answers into their columns."""
        self._columns = [
            (_budget_name(one.budget), one.thinking, one.answer, _counts(one)) for one in answers
        ]
        self.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
        names, *texts = zip(*self._columns)
        for name in names:
            table.add_column(Text(name, style="bold"), ratio=1, overflow="fold")
        for row, style in zip(texts, ("dim", "", "italic")):
            table.add_row(*(Text(text, style=style) for text in row))
        return table


class _Stream:
    """Writes the thinking of the only row while it comes."""

    def __init__(self, say: Callable[[str], Any]):
        self._say, self._shown = say, 0

    def __call__(self, row: int, thinking: str, answer: str) -> None:
        self._say(thinking[self._shown :])
        self._shown = max(self._shown, len(thinking))


def converse(session: "Session", asking: Asking, say: Callable[[str], Any]) -> None:
    """Asks for questions until the input ends; what can't be used costs a line."""
    # Keeps a history and lets the line be edited; not every Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    say(f"{session.saved.name}; a question, or {COMMANDS}\n")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            say("\n")
            return
        except KeyboardInterrupt:
            say("\nCtrl-D ends\n")
            continue
        try:
            if line.startswith("/"):
                asking = _changed(session, asking, line)
                say(f"{_said(asking)}\n")
            elif line:
                check_text(line, "question")
                started = time.perf_counter()
                answer(session, line, asking, say)
                say(f"{time.perf_counter() - started:.1f} s\n")
        except Stopped:
            say("\n[stopped]\n")
        except UserError as error:
            refusal(error)
        except OutOfMemory as error:
            failure(f"{error}; write fewer or smaller numbers after /budget")


def _changed(session: "Session", asking: Asking, line: str) -> Asking:
    """What a line such as `/budget 8,64` makes of the settings."""
    name, _, value = line[1:].partition(" ")
    value = value.strip()
    if name == "help":
        return asking
    if name == "budget":
        return dataclasses.replace(asking, budgets=budgets_of(session, value, "/budget"))
    if name == "seed":
        number = whole_number(value, most=2**32 - 1)
        if number is None:
            raise UserError(f"/seed {value}: write a number from 0 to 4294967295")
        return dataclasses.replace(asking, seed=number)
    if name not in ("temperature", "top-p"):
        raise UserError(f"/{name}: is no command; write a question, or {COMMANDS}")
    try:
        setting: dict[str, Any] = {name.replace("-", "_"): float(value)}
        changed = dataclasses.replace(asking, **setting)
    except ValueError:
        raise UserError(f"/{name} {value}: write a number") from None
    if name == "temperature" and changed.temperature == 0:
        # The most likely tokens know no nucleus.
        changed = dataclasses.replace(changed, top_p=1.0)
    changed.check("/")
    return changed


def _said(asking: Asking) -> str:
    """The settings in one line, and how they are changed."""
    budgets = ",".join(NONE if budget is None else str(budget) for budget in asking.budgets)
    return (
        f"budget {budgets}, temperature {asking.temperature:g}, top-p {asking.top_p:g}, "
        f"seed {asking.seed}\n{COMMANDS}"
    )


def from_pipe(session: "Session", asking: Asking, say: Callable[[str], Any]) -> None:
    """Asks every line of the standard input that is not empty."""
    asked = 0
    if isinstance(sys.stdin, io.TextIOWrapper):
        # In the C locale bytes that are no UTF-8 pass as halves of surrogate pairs, in others they
        # would raise.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(sys.stdin, 1):
        question = line.strip()
        check_text(question, f"standard input, line {number}")
        if not question:
            continue
        asked += 1
        say(f"=== {question} ===\n")
        try:
            answer(session, question, asking, say)
        except UserError as error:
            raise UserError(f"standard input, line {number}: {error}") from None
    if not asked:
        raise UserError(
            "question: found none; write one behind the options, or one per line on the standard "
            "input"
        )


def generate(arguments: argparse.Namespace, say: Callable[[str], Any]) -> None:
    """Opens the policy and answers: one question, those that are typed, or those of a pipe."""
    a = arguments
    session = open_session(a.run, a.model, a.step, a.overrides, download=a.download)
    asking = Asking(budgets_of(session, a.budget, "--budget"), a.temperature, a.top_p, a.seed)
    if a.question is not None:
        answer(session, a.question, asking, say)
    elif sys.stdin.isatty():
        converse(session, asking, say)
    else:
        from_pipe(session, asking, say)


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point: 0 when answered, 2 with one line on stderr when the input can't be used."""
    quieten_orbax()

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        generate(parse(argv), say)
    except OutOfMemory as error:
        return failure(f"{error}; write fewer or smaller numbers in --budget")
    except (KeyboardInterrupt, Stopped):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
