"""One line of metrics.jsonl per step, and the same numbers for TensorBoard."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bacr_jax.run_folder import RunFolder, append_line

# Metrics of this group measure the machine, not the run; two equal runs differ in them.
TIMING_GROUP = "time/"


def as_json(value: float) -> float | str:
    """A number that JSON can hold: infinities and NaN become their names."""
    return value if math.isfinite(value) else str(value)


class MetricsWriter:
    """Writes `group/name` numbers of each step."""

    def __init__(self, folder: RunFolder, *, tensorboard: bool):
        """Opens the files; TensorBoard's only if asked for."""
        self._path = folder.metrics
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(folder.path / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line: step first, then the metrics by name."""
        line = {name: as_json(float(metrics[name])) for name in sorted(metrics)}
        append_line(self._path, {"step": step, **line})
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes what is buffered."""
        if self._board is not None:
            self._board.close()


def without_timings(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl without what depends on the machine's speed.

    Two runs of the same config, seed, software and device kind give equal lists.
    """
    records = [json.loads(line) for line in path.read_text().splitlines()]
    keep = lambda record: {k: v for k, v in record.items() if not k.startswith(TIMING_GROUP)}
    return [keep(record) for record in records]
