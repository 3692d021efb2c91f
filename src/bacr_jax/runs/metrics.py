"""Writes the metrics of a run to metrics.jsonl, TensorBoard and Weights & Biases.

TensorBoard and Weights & Biases are optional. The training loop passes the metrics of every step to
`MetricsWriter`.
"""

import importlib.util
import math
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config, OutputConfig
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError, attempt
from bacr_jax.files import append_line, check_regular, read_lines, write_atomically
from bacr_jax.runs.folder import RunFolder

# Metrics of a step whose names begin with "time/", but that are not part of its duration: a
# throughput, and the time of work that overlaps with other work.
NOT_IN_DURATION = ("time/tokens_per_s", "time/overlap")

# A table of traces. Each row maps column names to texts or numbers.
TableRows = Sequence[Mapping[str, Any]]


class TensorBoard:
    """Writes TensorBoard events to the folder `tensorboard` of a run."""

    def __init__(self, folder: RunFolder, config_text: str):
        """Stores the folder and the config. The event file is created at the first step.

        Args:
          folder: folder of the run.
          config_text: config of the run, as YAML.
        """
        self._folder = folder
        self._config_text = config_text
        self._writer: Any = None

    def _open_from(self, first_step: int) -> Any:
        """Returns the event writer.

        The first call creates the writer, and purges events of `first_step` and later steps.
        """
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # A resumed run repeats the steps after its checkpoint. `purge_step` makes
            # TensorBoard ignore their earlier events.
            writer = SummaryWriter(str(self._folder.tensorboard), purge_step=first_step)
            self._writer = writer
            # Write events from this thread. The writer's own thread would exit if the
            # disk is full, and adding the eleventh event after that would block
            # forever.
            events = writer._get_file_writer().event_writer
            events._worker.stop()
            events.add_event = events._ev_writer.write_event
            # Markdown renders lines verbatim if they are indented by four spaces.
            lines = [f"    {line}\n" for line in self._config_text.splitlines()]
            writer.add_text("config", "".join(lines), first_step)
        return self._writer

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step. A resumed run replaces the metrics of repeated steps."""
        self._open_from(step)
        self.numbers(step, values)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Writes additional scalars of a step, after the metrics of the same step."""
        writer = self._open_from(step + 1)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def pictures(self, step: int, paths: Mapping[str, Path]) -> None:
        """Writes PNG files as images.

        Args:
          step: training step.
          paths: PNG files by the name of the image.
        """
        import numpy as np
        from PIL import Image

        writer = self._open_from(step + 1)
        for name, path in paths.items():
            pixels = np.asarray(Image.open(path).convert("RGB"))
            writer.add_image(f"pictures/{name}", pixels, step, dataformats="HWC")

    def traces(self, step: int, table: TableRows) -> None:
        """Writes a table of traces as Markdown."""
        header = table[0]
        lines = [_markdown_row(header), _markdown_row(["---"] * len(header))]
        lines += [_markdown_row(row.values()) for row in table]
        self._open_from(step + 1).add_text("traces", "".join(lines), step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _markdown_row(values: Iterable[Any]) -> str:
    """Returns a row of a Markdown table. Line breaks in values are replaced by spaces."""
    cells = [" ".join(str(value).split()).replace("|", "\\|") for value in values]
    return f"| {' | '.join(cells)} |\n"


def check_wandb(output: OutputConfig) -> None:
    """Raises UserError if `output.wandb` is set and the wandb package is not installed."""
    if output.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "output.wandb=true: wandb is not installed; set output.wandb=false, or run pip "
            'install -e ".[wandb]" in a clone of the repository'
        )


class Wandb:
    """Logs to a run of Weights & Biases, whose id is stored in the run folder."""

    def __init__(self, folder: RunFolder, values: Mapping[str, Any]):
        """Starts a new W&B run, or resumes the W&B run whose id is stored in the folder.

        The project and the run name are read from the environment variables WANDB_PROJECT and
        WANDB_NAME, and default to the name of the folder. WANDB_MODE is respected.

        Args:
          folder: folder of the run.
          values: values of the run's config, keyed by dotted name.

        Raises:
          UserError: if wandb is not installed or could not start.
        """
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
                config=dict(values),
                # Do not capture terminal output, because the progress line would fill the log.
                settings=wandb.Settings(console="off"),
            )
        # wandb raises ValueError for invalid settings.
        except (wandb.Error, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"output.wandb=true: Weights & Biases could not be started ({reason}); run `wandb "
                "login`, set WANDB_MODE=offline, or set WANDB_PROJECT to the name of the project"
            ) from None
        folder.wandb.mkdir(exist_ok=True)
        write_atomically(id_file, f"{identity}\n")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Logs scalars of a step. W&B ignores steps that a resumed run repeats."""
        self._run.log(dict(values), step=step)

    metrics = numbers

    def pictures(self, step: int, paths: Mapping[str, Path]) -> None:
        """Logs PNG files as images.

        Args:
          step: training step.
          paths: PNG files by the name of the image.
        """
        import wandb

        images = {f"pictures/{name}": wandb.Image(str(path)) for name, path in paths.items()}
        self._run.log(images, step=step)

    def traces(self, step: int, table: TableRows) -> None:
        """Logs a table of traces."""
        import wandb

        rows = [list(row.values()) for row in table]
        wandb_table = wandb.Table(list(table[0]), rows, allow_mixed_types=True)
        self._run.log({"traces": wandb_table}, step=step)

    def close(self) -> None:
        """Waits until all data has been uploaded."""
        self._run.finish()


# Prefixes of metrics that depend on the machine and the process. They differ between otherwise
# identical runs, and after a resume.
OF_THE_MACHINE = ("time/", "process/")


def as_json(value: float | int) -> float | int | str:
    """Returns a number that can be serialized as JSON. Infinities and NaN become strings."""
    return value if math.isfinite(value) else str(value)


class MetricsWriter:
    """Writes the metrics of each step, which have names of the form `group/name`."""

    def __init__(self, folder: RunFolder, config: Config, *, writes: bool = True):
        """Opens TensorBoard and Weights & Biases if the config section `output` enables them.

        Files are created when the first metrics are written.

        Args:
          folder: folder of the run.
          config: config of the run.
          writes: False in processes that do not write to TensorBoard and Weights & Biases.
        """
        self._folder = folder
        self._boards: list[TensorBoard | Wandb] = []
        if writes and config.output.tensorboard:
            self._boards.append(TensorBoard(folder, config_io.to_yaml(config)))
        if writes and config.output.wandb:
            check_wandb(config.output)
            self._boards.append(Wandb(folder, config_io.flatten(config)))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the metrics of a step to metrics.jsonl. Metrics of the machine are last.

        Args:
          step: training step, counted from 1.
          metrics: values, keyed by `group/name`. Each value must be convertible with `float`. They
            are sorted by name.
        """
        values = {}
        for name in sorted(metrics, key=lambda name: (name.startswith(OF_THE_MACHINE), name)):
            values[name] = float(metrics[name])
        line = {name: as_json(value) for name, value in values.items()}
        append_line(self._folder.metrics, {"step": step, **line})
        for board in self._boards:
            attempt(
                f"{type(board).__name__}: metrics of a step can't be logged",
                board.metrics,
                step,
                values,
            )

    def show(self, step: int, kind: Literal["numbers", "pictures", "traces"], content: Any) -> None:
        """Logs additional results of a step to TensorBoard and Weights & Biases.

        Call it after `write` for the same step. Errors of TensorBoard and Weights & Biases are
        printed.

        Args:
          step: training step of the results.
          kind: type of `content`.
          content: scalars by name, PNG files by name, or a table of traces (`TableRows`).
        """
        if not content:
            return
        for board in self._boards:
            name = type(board).__name__
            attempt(f"{name}: {kind} can't be logged", getattr(board, kind), step, content)

    def close(self) -> None:
        """Flushes and closes TensorBoard and Weights & Biases."""
        for board in self._boards:
            attempt(f"{type(board).__name__}: the log can't be closed", board.close)
        self._boards = []


def without_timings(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl file without timings and other machine metrics.

    The remaining records are equal for two runs with the same config, seed, software and device
    type.
    """
    check_regular(path)
    return [
        {name: value for name, value in record.items() if not name.startswith(OF_THE_MACHINE)}
        for record in read_lines(path)
    ]
