"""One line of metrics.jsonl per step, and the same numbers for TensorBoard."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bacr_jax.runs.folder import RunFolder, append_line

# Metrics of these groups measure the machine and the process, not the run: two equal runs, or one
# that was resumed, differ in them.
OF_THE_MACHINE = ("time/", "process/")


def as_json(value: float | int) -> float | int | str:
    """A number that JSON can hold: infinities and NaN become their names."""
    return value if math.isfinite(value) else str(value)


class MetricsWriter:
    """Writes the `group/name` numbers of each step."""

    def __init__(self, folder: RunFolder, *, tensorboard: bool):
        """Remembers where to write; files are made by the first line.

        Args:
          folder: the opened run folder.
          tensorboard: also write TensorBoard's files.
        """
        self._folder, self._tensorboard = folder, tensorboard
        self._board: Any = None

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
        if not self._tensorboard:
            return
        if self._board is None:
            from tensorboardX import SummaryWriter

            # A resumed run repeats steps that were written before the kill: the purge step makes
            # TensorBoard forget those.
            self._board = SummaryWriter(str(self._folder.tensorboard), purge_step=step)
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes what TensorBoard's writer holds back."""
        if self._board is not None:
            self._board.close()
            self._board = None


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
