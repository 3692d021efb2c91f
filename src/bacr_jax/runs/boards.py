"""TensorBoard and Weights & Biases: the numbers of metrics.jsonl again, pictures, traces."""

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError, printable
from bacr_jax.runs.files import write_atomically
from bacr_jax.runs.folder import RunFolder


@dataclass(frozen=True)
class Rows:
    """A table of traces.

    Attributes:
      columns: their names.
      rows: a text or a number for each column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


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
            text = config_io.to_yaml(self._config)
            # Four spaces: Markdown shows it as it is.
            self._writer.add_text("config", "".join(f"    {x}\n" for x in text.splitlines()), first)
        return self._writer

    def numbers(self, step: int, values: Mapping[str, float], *, repeats: bool = True) -> None:
        """Numbers of a step.

        Args:
          step: of the run.
          values: by name.
          repeats: what was written of this step before the run was resumed is forgotten.
        """
        writer = self._at(step if repeats else step + 1)
        for name, value in values.items():
            writer.add_scalar(name, value, step)

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
        rule = line(["---"] * len(table.columns))
        text = line(table.columns) + rule + "".join(map(line, table.rows))
        self._at(step + 1).add_text("traces", text, step)

    def close(self) -> None:
        """Flushes and ends the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Wandb:
    """The run of Weights & Biases that belongs to a run folder: a new one, or the one it had."""

    def __init__(self, folder: RunFolder, config: Config):
        """Starts it.

        Its project is the folder's name unless WANDB_PROJECT says otherwise; WANDB_MODE is
        honoured.

        Raises:
          UserError: the package is not installed, or it can't start (no key, no network, a bad
            name).
        """
        try:
            import wandb
        except ImportError:
            raise UserError(
                "output.wandb=true: wandb is not installed; write output.wandb=false, or in a "
                'clone pip install -e ".[wandb]"'
            ) from None
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

    def numbers(self, step: int, values: Mapping[str, float], *, repeats: bool = True) -> None:
        """Numbers of a step; those that a resumed run repeats are there already, and dropped."""
        self._run.log(dict(values), step=step)

    def pictures(self, step: int, paths: Mapping[str, Path]) -> None:
        """PNGs by name."""
        import wandb

        shown = {f"pictures/{name}": wandb.Image(str(path)) for name, path in paths.items()}
        self._run.log(shown, step=step)

    def traces(self, step: int, table: Rows) -> None:
        """A table."""
        import wandb

        rows = [list(row) for row in table.rows]
        shown = wandb.Table(list(table.columns), rows, allow_mixed_types=True)
        self._run.log({"traces": shown}, step=step)

    def close(self) -> None:
        """Waits for what is on its way."""
        self._run.finish()


def open_boards(folder: RunFolder, config: Config) -> list[TensorBoard | Wandb]:
    """The boards that `output.tensorboard` and `output.wandb` ask for.

    Raises:
      UserError: one can't be had.
    """
    boards: list[TensorBoard | Wandb] = []
    if config.output.tensorboard:
        boards.append(TensorBoard(folder, config))
    if config.output.wandb:
        boards.append(Wandb(folder, config))
    return boards


def attempt(what: str, show: Any, *args: Any) -> None:
    """Shows something; a failure is a warning, since results must not depend on what is shown."""
    try:
        show(*args)
    # A picture, a network or a library can fail in any way.
    except Exception as error:
        reason = printable(str(error).splitlines()[0] if str(error) else type(error).__name__)
        print(f"warning: {what} can't be shown ({reason})", file=sys.stderr)
