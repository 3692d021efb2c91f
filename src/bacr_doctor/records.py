"""Defines the input of every check (`Subject`) and its result (`Record`), and formats the results.

Records are formatted as lines for the terminal, as a config overlay (a YAML file with overrides),
and as the content of `doctor.json`. All modules of this package use these classes. This module does
not run checks.
"""

import contextlib
import dataclasses
import json
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.values import written
from bacr_jax.errors import printable
from bacr_jax.runs.folder import DOCTOR_PREFIX

Status = Literal["ok", "warn", "broken"]
# Widths in characters: of a printed line, of the status column, and of the columns for the status
# and the name of a check together.
_LINE_WIDTH = 100
_STATUS_WIDTH = 8
_MARGIN = 28
# Maximum number of problems listed in a record.
MOST_PROBLEMS = 3


@dataclass(frozen=True)
class Subject:
    """The training run for which the machine is checked.

    Attributes:
      config: config of the run. It is the `quickstart` config if the command line contains no
        config.
      named: True if the command line contains a config.
      device: name of the data sheet to compare with (see `bacr_plan.devices`). If None, the data
        sheet is selected by the name of the device.
      temporary: temporary folder in `folder` for the files of all checks. None if a check has to
        create a folder itself.
    """

    config: Config
    named: bool = False
    device: str | None = None
    temporary: Path | None = None

    @property
    def folder(self) -> Path:
        """Returns `output.dir` or its nearest existing parent, which is on the same file system.

        Without a config on the command line, this is the current folder.
        """
        output = Path(self.config.output.dir if self.named else ".").absolute()
        return next(folder for folder in (output, *output.parents) if folder.is_dir())

    @contextlib.contextmanager
    def with_temporary(self) -> Iterator["Subject"]:
        """Context manager that creates the folder `temporary`, and removes it with its content.

        It is used in the parent process, because the process of a check may be killed before it
        removes its files. If `folder` is not writable, the folder is missing in the yielded copy.
        """
        with contextlib.ExitStack() as stack:
            subject = self
            with contextlib.suppress(OSError):
                path = stack.enter_context(self.temporary_folder())
                subject = dataclasses.replace(self, temporary=path)
            yield subject

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Context manager that creates an empty folder on the file system of `output.dir`.

        Raises:
          OSError: if the folder can't be created.
        """
        parent = self.temporary or self.folder
        # A process that a check has started may still be writing files when they are removed.
        folder = tempfile.TemporaryDirectory(
            prefix=DOCTOR_PREFIX, dir=parent, ignore_cleanup_errors=True
        )
        with folder as name:
            yield Path(name)

    def with_keys(self, keys: Mapping[str, Any]) -> "Subject":
        """Returns a copy in which some config values are replaced.

        Args:
          keys: new values by dotted config key.
        """
        overrides = [f"{key}={written(value)}" for key, value in keys.items()]
        config = config_io.override(self.config, overrides)
        return dataclasses.replace(self, config=config)


@dataclass(frozen=True)
class Record:
    """The result of a check.

    Attributes:
      status: `ok`, `warn` (a run works, but the user should read the advice), or `broken` (the
        check failed).
      measured: the result in one sentence.
      advice: suggestion for the user. Empty if the status is `ok`.
      keys: config overrides that work around the problem, by dotted key.
      values: numbers and strings to store in `doctor.json`.
      name: name of the check.
      seconds: wall-clock time of the check in seconds.
    """

    status: Status
    measured: str
    advice: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


def ok_or_broken(
    measured: str, problems: Sequence[str], values: Mapping[str, Any], advice: str = ""
) -> Record:
    """Builds a record that is `broken` if `problems` is not empty, and `ok` otherwise.

    Args:
      measured: the result in one sentence. It is printed after the problems.
      problems: one description per problem.
      values: numbers and strings to store in `doctor.json`.
      advice: suggestion for the user. Ignored if `problems` is empty.
    """
    if problems:
        text = f"{'; '.join(problems)} ({measured})"
        return Record("broken", text, advice, values=values)
    return Record("ok", measured, values=values)


def format_record(record: Record) -> str:
    """Formats a record for the terminal.

    The first line contains status, name and result. Advice and config keys follow on separate
    lines, unless the status is `ok`. Lines are wrapped at 100 columns.
    """
    status = f"{record.status:<{_STATUS_WIDTH}}"
    name = f"{record.name:<{_MARGIN - _STATUS_WIDTH}}"
    indent = " " * _MARGIN
    lines = [_wrap(f"{status}{name}{printable(record.measured)}", "")]
    if record.status != "ok":
        keys = " ".join(f"{key}={written(value)}" for key, value in record.keys.items())
        if record.advice:
            lines.append(_wrap(f"-> {record.advice}", indent))
        if keys:
            lines.append(_wrap(f"-> set {keys}", indent))
    return "\n".join(lines)


def _wrap(text: str, first_indent: str) -> str:
    """Wraps text at the line width and indents continuation lines to the column of the results."""
    return textwrap.fill(
        text,
        _LINE_WIDTH,
        initial_indent=first_indent,
        subsequent_indent=" " * _MARGIN,
    )


def overlay_keys(records: Sequence[Record]) -> dict[str, Any]:
    """Merges the config overrides of all records whose status is not `ok`, by dotted key."""
    keys: dict[str, Any] = {}
    for record in records:
        if record.status != "ok":
            keys |= record.keys
    return keys


def to_json_object(records: Sequence[Record], **header: Any) -> dict[str, Any]:
    """Returns the content of `doctor.json`: the header, the config overlay and all records.

    The result does not contain the name of the machine.

    Args:
      header: additional top-level entries.
    """
    text = json.dumps([dataclasses.asdict(record) for record in records])
    # A broken code path may return NaN, which JSON cannot represent. Store it as the string "NaN".
    checks = json.loads(text, parse_constant=str)
    return {**header, "overlay": overlay_keys(records), "checks": checks}
