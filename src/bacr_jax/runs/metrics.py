"""One line of metrics.jsonl per step, and the same numbers for TensorBoard and Weights & Biases."""

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.runs.files import append_line, write_atomically
from bacr_jax.runs.folder import RunFolder

# Metrics of these groups measure the machine and the process, not the run: two equal runs, or one
# that was resumed, differ in them.
OF_THE_MACHINE = ("time/", "process/")


def as_json(value: float | int) -> float | int | str:
    """A number that JSON can hold: infinities and NaN become their names."""
    return value if math.isfinite(value) else str(value)


def start_wandb(folder: RunFolder, config: Config) -> Any:
    """The run of Weights & Biases that belongs to a run folder: a new one, or the one it had.

    Its project is the folder's name unless WANDB_PROJECT says otherwise; WANDB_MODE is honoured.

    Raises:
      UserError: the package is not installed, or it can't start (no key, no network, a bad name).
    """
    try:
        import wandb
    except ImportError:
        raise UserError(
            "output.wandb=true: wandb is not installed; write output.wandb=false, or in a clone "
            'pip install -e ".[wandb]"'
        ) from None
    kept, name = folder.wandb / "id", folder.path.absolute().name
    identity = kept.read_text().strip() if kept.exists() else uuid.uuid4().hex[:8]
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", name),
            name=os.environ.get("WANDB_NAME", name),
            id=identity,
            resume="allow",
            dir=folder.path,
            config=config_io.flatten(config),
            # The terminal's live line is no log.
            settings=wandb.Settings(console="off"),
        )
    # Settings that can't be are ValueErrors.
    except (wandb.Error, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"output.wandb=true: Weights & Biases did not start ({reason}); run `wandb login`, set "
            "WANDB_MODE=offline, or name the project by WANDB_PROJECT"
        ) from None
    folder.wandb.mkdir(exist_ok=True)
    write_atomically(kept, f"{identity}\n")
    return run


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
        self._folder, self._tensorboard = folder, config.output.tensorboard
        self._board: Any = None
        self._wandb = start_wandb(folder, config) if config.output.wandb and writes else None

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
        if self._wandb is not None:
            # Steps that a resumed run repeats are there already, and dropped there.
            self._wandb.log(values, step=step)
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
        """Flushes what the other writers hold back, and ends them."""
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


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
