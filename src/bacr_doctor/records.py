"""The input of every check (`Subject`), its result (`Record`), and the doctor's two outputs.

All modules of this package use it. It formats records as lines of the terminal, as the overlay
config and as the object of `doctor.json`; it runs no check.
"""

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.values import written
from bacr_jax.errors import printable

Status = Literal["ok", "warn", "broken"]
# Columns of a printed line, of its status, and of status and name together.
_LINE_WIDTH = 100
_STATUS_WIDTH = 8
_MARGIN = 28


@dataclass(frozen=True)
class Subject:
    """The run that the machine is checked for.

    Attributes:
      config: the run's config, or quickstart's if the command line names none.
      named: True if the command line names a config.
      device: name of the data sheet to compare with (`bacr_plan.devices`); None to choose the data
        sheet by the device's own name.
    """

    config: Config
    named: bool = False
    device: str | None = None

    @property
    def folder(self) -> Path:
        """Returns output.dir or its nearest existing parent, which is on the same file system.

        Without a named config it is the current folder.
        """
        output = Path(self.config.output.dir if self.named else ".").absolute()
        return next(folder for folder in (output, *output.parents) if folder.is_dir())

    def with_keys(self, keys: Mapping[str, Any]) -> "Subject":
        """Returns a copy whose config has other values, by dotted key."""
        overrides = [f"{key}={written(value)}" for key, value in keys.items()]
        config = config_io.override(self.config, overrides)
        return dataclasses.replace(self, config=config)


@dataclass(frozen=True)
class Record:
    """The result of one check.

    Attributes:
      status: `ok`, `warn` (a run works, but see the advice) or `broken`.
      measured: the result in one sentence.
      advice: what the user can write or do; empty if the status is ok.
      keys: config keys that work around the problem, by dotted key.
      values: numbers and texts for `doctor.json`.
      name: the check's name.
      seconds: run time of the check.
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
    """Makes a record that is broken if there are problems, and ok otherwise.

    The problems are printed before `measured`; the advice is only used with problems.
    """
    if problems:
        text = f"{'; '.join(problems)} ({measured})"
        return Record("broken", text, advice, values=values)
    return Record("ok", measured, values=values)


def format_record(record: Record) -> str:
    """Formats a record for the terminal: status, name and result, then advice and keys.

    Every piece is wrapped at 100 columns. Advice and keys are left out if the status is ok.
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
            lines.append(_wrap(f"-> write {keys}", indent))
    return "\n".join(lines)


def _wrap(text: str, first_indent: str) -> str:
    """Wraps a text; every line but the first is indented to the column of the results."""
    return textwrap.fill(
        text,
        _LINE_WIDTH,
        initial_indent=first_indent,
        subsequent_indent=" " * _MARGIN,
    )


def overlay_keys(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the config keys that work around all problems, by dotted key."""
    keys: dict[str, Any] = {}
    for record in records:
        if record.status != "ok":
            keys |= record.keys
    return keys


def to_json_object(records: Sequence[Record], **header: Any) -> dict[str, Any]:
    """Returns the content of `doctor.json`: the header, the overlay and every record.

    It contains no name of the machine.
    """
    text = json.dumps([dataclasses.asdict(record) for record in records])
    # A broken path may return NaN, which JSON does not have: it becomes the text "NaN".
    checks = json.loads(text, parse_constant=str)
    return {**header, "overlay": overlay_keys(records), "checks": checks}
