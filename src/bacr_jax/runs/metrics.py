"""A run's numbers: a line of metrics.jsonl per step, and TensorBoard and Weights & Biases."""

import importlib.util
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.documents import append_line, check_regular, read_lines, write_atomically
from bacr_jax.errors import UserError, attempt
from bacr_jax.runs.folder import RunFolder

# A table of traces: in each row a text or a number by the name of its column.
Rows = Sequence[Mapping[str, Any]]


class TensorBoard:
    """`tensorboard/` of a run folder."""

    def __init__(self, folder: RunFolder, config: Config):
        """Remembers where to write; the file is made by the first step."""
        self._folder, self._config = folder, config
        self._writer: Any = None

    def _at(self, first: int) -> Any:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # A resumed run repeats steps that were written before the kill: the purge step makes
            # TensorBoard forget those.
            self._writer = SummaryWriter(str(self._folder.tensorboard), purge_step=first)
            # Its thread dies of a full disk, and who adds the eleventh event after that waits for
            # ever: events are written here.
            events = self._writer._get_file_writer().event_writer
            events._worker.stop()
            events.add_event = events._ev_writer.write_event
            text = config_io.to_yaml(self._config)
            # Four spaces: Markdown shows it as it is.
            self._writer.add_text("config", "".join(f"    {x}\n" for x in text.splitlines()), first)
        return self._writer

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """`numbers` of a step; what was written of it before the run was resumed is forgotten."""
        self._at(step)
        self.numbers(step, values)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, after the metrics of their step."""
        writer = self._at(step + 1)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def pictures(self, step: int, paths: Mapping[str, Path]) -> None:
        """PNGs by name."""
        import numpy as np
        from matplotlib.image import imread

        for name, path in paths.items():
            pixels = (imread(path)[..., :3] * 255).round().astype(np.uint8)
            self._at(step + 1).add_image(f"pictures/{name}", pixels, step, dataformats="HWC")

    def traces(self, step: int, table: Rows) -> None:
        """A table in Markdown."""
        cell = lambda value: " ".join(str(value).split()).replace("|", "\\|")
        line = lambda cells: f"| {' | '.join(map(cell, cells))} |\n"
        rule = line(["---"] * len(table[0]))
        text = line(table[0]) + rule + "".join(line(row.values()) for row in table)
        self._at(step + 1).add_text("traces", text, step)

    def close(self) -> None:
        """Flushes and ends the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def check_wandb(config: Config) -> None:
    """Refuses output.wandb where the package is not installed."""
    if config.output.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "output.wandb=true: wandb is not installed; write output.wandb=false, or in a clone "
            'pip install -e ".[wandb]"'
        )


class Wandb:
    """The run of Weights & Biases that belongs to a run folder: a new one, or the one it had."""

    def __init__(self, folder: RunFolder, config: Config):
        """Starts it; its project is the folder's name unless WANDB_PROJECT says otherwise.

        WANDB_MODE is honoured.
        """
        check_wandb(config)
        import wandb

        kept, name = folder.wandb / "id", folder.path.absolute().name
        identity = kept.read_text().strip() if kept.exists() else uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
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
                f"output.wandb=true: Weights & Biases did not start ({reason}); run `wandb login`, "
                "set WANDB_MODE=offline, or name the project by WANDB_PROJECT"
            ) from None
        folder.wandb.mkdir(exist_ok=True)
        write_atomically(kept, f"{identity}\n")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step; those that a resumed run repeats are there already, and dropped."""
        self._run.log(dict(values), step=step)

    metrics = numbers

    def pictures(self, step: int, paths: Mapping[str, Path]) -> None:
        """PNGs by name."""
        import wandb

        shown = {f"pictures/{name}": wandb.Image(str(path)) for name, path in paths.items()}
        self._run.log(shown, step=step)

    def traces(self, step: int, table: Rows) -> None:
        """A table."""
        import wandb

        rows = [list(row.values()) for row in table]
        shown = wandb.Table(list(table[0]), rows, allow_mixed_types=True)
        self._run.log({"traces": shown}, step=step)

    def close(self) -> None:
        """Waits for what is on its way."""
        self._run.finish()


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

        Config `output` says who gets the numbers beside metrics.jsonl. `writes`: this process is
        the one that writes.
        """
        self._folder = folder
        self._boards: list[TensorBoard | Wandb] = []
        if writes and config.output.tensorboard:
            self._boards.append(TensorBoard(folder, config))
        if writes and config.output.wandb:
            self._boards.append(Wandb(folder, config))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a line: the step, counted from 1, and the metrics, those of the machine last.

        They are by `group/name`: anything that `float` takes.
        """
        names = sorted(metrics, key=lambda name: (name.startswith(OF_THE_MACHINE), name))
        values = {name: float(metrics[name]) for name in names}
        line = {name: as_json(value) for name, value in values.items()}
        append_line(self._folder.metrics, {"step": step, **line})
        for board in self._boards:
            attempt(f"{type(board).__name__}: a step can't be shown", board.metrics, step, values)

    def show(self, step: int, kind: Literal["numbers", "pictures", "traces"], found: Any) -> None:
        """What the boards get beside the metrics; one that fails says so, and nothing is lost.

        The step's metrics were written before. Numbers are an evaluation's and pictures PNGs, both
        by name; traces are `Rows`.
        """
        for board in self._boards if found else ():
            name = type(board).__name__
            attempt(f"{name}: {kind} can't be shown", getattr(board, kind), step, found)

    def close(self) -> None:
        """Flushes what the boards hold back, and ends them."""
        for board in self._boards:
            attempt(f"{type(board).__name__}: can't be ended", board.close)
        self._boards = []


def without_timings(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl without what depends on the machine or the process.

    Two runs of the same config, seed, software and device kind give equal lists.
    """
    check_regular(path)
    records = read_lines(path)
    keep = lambda record: {k: v for k, v in record.items() if not k.startswith(OF_THE_MACHINE)}
    return [keep(record) for record in records]
