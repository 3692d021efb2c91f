"""Answers for people: one after the other as plain text, or side by side while they come."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bacr_jax.evaluation.ask import Answer

# Columns narrower than this are no text to read; answers then stand below each other.
_NARROWEST = 24


def budget_name(budget: int | None) -> str:
    """What a budget is called above its answer."""
    return "no budget" if budget is None else f"budget {budget}"


def counts(answer: Answer) -> str:
    """Tokens of each part of an answer."""
    return (
        f"{answer.thinking_tokens} thinking tokens, {answer.forced_tokens} forced, "
        f"{answer.answer_tokens} answer"
    )


def in_plain_text(answers: Sequence[Answer], say: Callable[[str], Any], *, streamed: bool) -> None:
    """Writes answers below each other.

    Args:
      streamed: the thinking of the only answer is written already.
    """
    for answer in answers:
        if not streamed:
            say(f"--- {budget_name(answer.budget)} ---\n{answer.thinking}")
        say(f"\n{answer.answer}\n[{counts(answer)}]\n")


class LiveColumns:
    """Budgets side by side on a terminal, filled while their tokens come; a context manager."""

    def __init__(self, console: Console, budgets: Sequence[int | None]):
        """Empty columns."""
        self._columns = [(budget_name(budget), "", "", "") for budget in budgets]
        # Redrawn when something came: a thread of its own would draw while JAX computes.
        self._live = Live(console=console, auto_refresh=False)

    @staticmethod
    def fit(console: Console, budgets: Sequence[int | None]) -> bool:
        """Whether so many columns can be read on this terminal."""
        return console.is_terminal and console.width >= _NARROWEST * len(budgets)

    def __enter__(self) -> "LiveColumns":
        """Takes over the lines below the cursor."""
        self._live.__enter__()
        self._draw()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leaves what was drawn last."""
        self._live.__exit__(*error)

    def watch(self, row: int, thinking: str, answer: str) -> None:
        """Takes the texts of a row so far; see `ask.Session`."""
        self._columns[row] = (self._columns[row][0], thinking, answer, "")
        self._draw()

    def show(self, answers: Sequence[Answer]) -> None:
        """Puts the finished answers into their columns."""
        self._columns = [
            (budget_name(one.budget), one.thinking, one.answer, counts(one)) for one in answers
        ]
        self._draw()

    def _draw(self) -> None:
        table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
        names, *texts = zip(*self._columns)
        for name in names:
            table.add_column(Text(name, style="bold"), ratio=1, overflow="fold")
        for row, style in zip(texts, ("dim", "", "italic")):
            table.add_row(*(Text(text, style=style) for text in row))
        self._live.update(table, refresh=True)
