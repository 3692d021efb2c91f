"""One line of metrics.jsonl per step, and the same numbers for TensorBoard and Weights & Biases."""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.runs import boards
from bacr_jax.runs.files import append_line
from bacr_jax.runs.folder import RunFolder

# Metrics of these groups measure the machine and the process, not the run: two equal runs, or one
# that was resumed, differ in them.
OF_THE_MACHINE = ("time/", "process/")


def as_json(value: float | int) -> float | int | str:
    """A number that JSON can hold: infinities and NaN become their names."""
    return value if math.isfinite(value) else str(value)


class MetricsWriter:
    """Writes the `group/name` numbers of each step."""

    def __init__(self, folder: RunFolder, config: Config, *, writes: bool = True):
        """Remembers where to write; files are made by the first line.

        Args:
          folder: the opened run folder.
          config: of the run; its `output` says who gets the numbers beside metrics.jsonl.
          writes: this process is the one that writes.

        Raises:
          UserError: `output.wandb` asks for what can't be had.
        """
        self._folder = folder
        self._boards = boards.open_boards(folder, config) if writes else []

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a line: the step, the metrics by name, those of the machine last.

        Args:
          step: number of the step, counted from 1.
          metrics: numbers by `group/name`; anything that `float` takes.
        """
        names = sorted(metrics, key=lambda name: (name.startswith(OF_THE_MACHINE), name))
        values = {name: float(metrics[name]) for name in names}
        line = {name: as_json(value) for name, value in values.items()}
        append_line(self._folder.metrics, {"step": step, **line})
        for board in self._boards:
            board.numbers(step, values)

    def show(
        self,
        step: int,
        *,
        numbers: Mapping[str, float] | None = None,
        pictures: Mapping[str, Path] | None = None,
        traces: boards.Rows | None = None,
    ) -> None:
        """What the boards get beside the metrics; one that fails says so, and nothing is lost.

        Args:
          step: of the run; its metrics were written before.
          numbers: by name, of an evaluation.
          pictures: PNGs by name.
          traces: a table.
        """
        for board in self._boards:
            where = type(board).__name__
            if numbers:
                number = functools.partial(board.numbers, repeats=False)
                boards.attempt(f"{where}: an evaluation", number, step, numbers)
            if pictures:
                boards.attempt(f"{where}: pictures", board.pictures, step, pictures)
            if traces is not None and traces.rows:
                boards.attempt(f"{where}: traces", board.traces, step, traces)

    def close(self) -> None:
        """Flushes what the boards hold back, and ends them."""
        for board in self._boards:
            board.close()
        self._boards = []


def without_timings(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl without what depends on the machine or the process.

    Two runs of the same config, seed, software and device kind give equal lists.
    """
    records = [json.loads(line) for line in path.read_text().splitlines()]
    keep = lambda record: {k: v for k, v in record.items() if not k.startswith(OF_THE_MACHINE)}
    return [keep(record) for record in records]


def same_metrics(one: Path, other: Path) -> bool:
    """Whether two metrics.jsonl agree in every digit, timings aside."""
    return without_timings(one) == without_timings(other)
