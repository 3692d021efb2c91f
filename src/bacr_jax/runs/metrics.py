"""Writes a run's metrics: metrics.jsonl, and TensorBoard and Weights & Biases if wanted.

The training loop passes every step's metrics to `MetricsWriter`.
"""

import importlib.util
import math
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.documents import append_line, check_regular, read_lines, write_atomically
from bacr_jax.errors import UserError, attempt
from bacr_jax.runs.folder import RunFolder

# A table of traces: each row is a text or a number by the name of its column.
Rows = Sequence[Mapping[str, Any]]


class TensorBoard:
    """Writes events into `tensorboard/` of a run folder."""

    def __init__(self, folder: RunFolder, config: Config):
        """Stores the folder; the first step creates the file."""
        self._folder = folder
        self._config = config
        self._writer: Any = None

    def _open_from(self, first_step: int) -> Any:
        """Returns the writer; the first call creates it and purges steps from `first_step` on."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # A resumed run repeats the steps after its checkpoint. The purge step lets TensorBoard
            # ignore their earlier events.
            writer = SummaryWriter(str(self._folder.tensorboard), purge_step=first_step)
            self._writer = writer
            # Events are written by this thread. The writer's own thread would end on a full disk,
            # and adding the eleventh event after that would block forever.
            events = writer._get_file_writer().event_writer
            events._worker.stop()
            events.add_event = events._ev_writer.write_event
            # Markdown shows lines that are indented by four spaces unchanged.
            lines = [f"    {line}\n" for line in config_io.to_yaml(self._config).splitlines()]
            writer.add_text("config", "".join(lines), first_step)
        return self._writer

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step, which replace its metrics from before a resume."""
        self._open_from(step)
        self.numbers(step, values)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Writes further numbers by name, after the metrics of their step."""
        writer = self._open_from(step + 1)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def pictures(self, step: int, paths: Mapping[str, Path]) -> None:
        """Writes PNG files by name."""
        import numpy as np
        from matplotlib.image import imread

        writer = self._open_from(step + 1)
        for name, path in paths.items():
            pixels = (imread(path)[..., :3] * 255).round().astype(np.uint8)
            writer.add_image(f"pictures/{name}", pixels, step, dataformats="HWC")

    def traces(self, step: int, table: Rows) -> None:
        """Writes a table as Markdown."""
        header = table[0]
        lines = [_markdown_row(header), _markdown_row(["---"] * len(header))]
        lines += [_markdown_row(row.values()) for row in table]
        self._open_from(step + 1).add_text("traces", "".join(lines), step)

    def close(self) -> None:
        """Flushes and closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _markdown_row(values: Iterable[Any]) -> str:
    """Returns a row of a Markdown table, with each value in one line."""
    cells = [" ".join(str(value).split()).replace("|", "\\|") for value in values]
    return f"| {' | '.join(cells)} |\n"


def check_wandb(config: Config) -> None:
    """Raises UserError if output.wandb is set and the package is not installed."""
    if config.output.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "output.wandb=true: wandb is not installed; write output.wandb=false, or in a clone "
            'pip install -e ".[wandb]"'
        )


class Wandb:
    """Logs to a run of Weights & Biases, whose id is stored in the run folder."""

    def __init__(self, folder: RunFolder, config: Config):
        """Starts a new run, or continues the run that the folder names.

        Project and name are WANDB_PROJECT and WANDB_NAME, or the folder's name. WANDB_MODE is
        respected.

        Raises:
          UserError: wandb is not installed or did not start.
        """
        check_wandb(config)
        import wandb

        id_file = folder.wandb / "id"
        name = folder.path.absolute().name
        identity = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", name),
                name=os.environ.get("WANDB_NAME", name),
                id=identity,
                resume="allow",
                dir=folder.path,
                config=config_io.flatten(config),
                # The progress line of the terminal would fill the log.
                settings=wandb.Settings(console="off"),
            )
        # Invalid settings raise ValueError.
        except (wandb.Error, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"output.wandb=true: Weights & Biases did not start ({reason}); run `wandb login`, "
                "set WANDB_MODE=offline, or name the project by WANDB_PROJECT"
            ) from None
        folder.wandb.mkdir(exist_ok=True)
        write_atomically(id_file, f"{identity}\n")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a step. W&B ignores steps that a resumed run repeats."""
        self._run.log(dict(values), step=step)

    metrics = numbers

    def pictures(self, step: int, paths: Mapping[str, Path]) -> None:
        """Logs PNG files by name."""
        import wandb

        images = {f"pictures/{name}": wandb.Image(str(path)) for name, path in paths.items()}
        self._run.log(images, step=step)

    def traces(self, step: int, table: Rows) -> None:
        """Logs a table."""
        import wandb

        rows = [list(row.values()) for row in table]
        wandb_table = wandb.Table(list(table[0]), rows, allow_mixed_types=True)
        self._run.log({"traces": wandb_table}, step=step)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


# Groups of metrics that measure the machine and the process. They differ between equal runs, and
# after a resume.
OF_THE_MACHINE = ("time/", "process/")


def as_json(value: float | int) -> float | int | str:
    """Returns a number for JSON; infinities and NaN become their names."""
    return value if math.isfinite(value) else str(value)


class MetricsWriter:
    """Writes the `group/name` numbers of each step."""

    def __init__(self, folder: RunFolder, config: Config, *, writes: bool = True):
        """Opens the outputs that config `output` enables in addition to metrics.jsonl.

        Files are created with the first metrics.

        Args:
          writes: True for the process that writes.
        """
        self._folder = folder
        self._boards: list[TensorBoard | Wandb] = []
        if writes and config.output.tensorboard:
            self._boards.append(TensorBoard(folder, config))
        if writes and config.output.wandb:
            self._boards.append(Wandb(folder, config))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a step's metrics to metrics.jsonl, machine metrics last.

        Args:
          step: counted from 1.
          metrics: values that `float` accepts, by `group/name`.
        """
        values = {}
        for name in sorted(metrics, key=lambda name: (name.startswith(OF_THE_MACHINE), name)):
            values[name] = float(metrics[name])
        line = {name: as_json(value) for name, value in values.items()}
        append_line(self._folder.metrics, {"step": step, **line})
        for board in self._boards:
            attempt(f"{type(board).__name__}: a step can't be shown", board.metrics, step, values)

    def show(self, step: int, kind: Literal["numbers", "pictures", "traces"], content: Any) -> None:
        """Passes further results of a step to TensorBoard and Weights & Biases.

        Call it after `write` of the same step. If one of them fails, its error is printed.

        Args:
          content: numbers of an evaluation by name, PNG files by name, or `Rows` of traces.
        """
        if not content:
            return
        for board in self._boards:
            name = type(board).__name__
            attempt(f"{name}: {kind} can't be shown", getattr(board, kind), step, content)

    def close(self) -> None:
        """Flushes and closes TensorBoard and Weights & Biases."""
        for board in self._boards:
            attempt(f"{type(board).__name__}: can't be ended", board.close)
        self._boards = []


def without_timings(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl without the metrics of machine and process.

    Two runs with the same config, seed, software and device kind have equal lists.
    """
    check_regular(path)
    return [
        {name: value for name, value in record.items() if not name.startswith(OF_THE_MACHINE)}
        for record in read_lines(path)
    ]
