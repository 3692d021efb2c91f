"""What is examined, and what a check found: a record, as lines of a page and in a file."""

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
_WIDTH, _MARGIN = 100, 28


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
      config: of the run to be started; the quickstart's if none was named.
      named: whether one was.
      device: the data sheet to measure against (`bacr_plan.devices`); None: the device's own.
    """

    config: Config
    named: bool = False
    device: str | None = None

    @property
    def folder(self) -> Path:
        """The folder nearest to output.dir that is there: of the same file system."""
        wanted = Path(self.config.output.dir if self.named else ".").absolute()
        return next(place for place in (wanted, *wanted.parents) if place.is_dir())

    def under(self, keys: Mapping[str, Any]) -> "Subject":
        """The same with other settings, by dotted name."""
        texts = [f"{key}={written(value)}" for key, value in keys.items()]
        return dataclasses.replace(self, config=config_io.override(self.config, texts))


@dataclass(frozen=True)
class Record:
    """What one check found.

    Attributes:
      measured: what was seen, in a line.
      advice: what to write or do, where it is not all well.
      keys: of a config, that go round it.
      values: numbers and texts for the file.
    """

    status: Status
    measured: str
    advice: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


def held(
    measured: str, wrong: Sequence[str], values: Mapping[str, Any], advice: str = ""
) -> Record:
    """A record that is ok, or broken by what is wrong."""
    if wrong:
        return Record("broken", f"{'; '.join(wrong)} ({measured})", advice, values=values)
    return Record("ok", measured, values=values)


def line(record: Record) -> str:
    """A record on the page: the status, the check, what was seen, and below it what to write."""
    said = [f"{record.status:<8}{record.name:<{_MARGIN - 8}}{printable(record.measured)}"]
    keys = " ".join(f"{key}={written(value)}" for key, value in record.keys.items())
    if record.status != "ok":
        said += [f"-> {text}" for text in (record.advice, keys and f"write {keys}") if text]
    hang = " " * _MARGIN
    wrapped = [
        textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=hang)
        for text, start in zip(said, ["", *[hang] * len(said)])
    ]
    return "\n".join(wrapped)


def overlay(records: Sequence[Record]) -> dict[str, Any]:
    """The keys that go round what is not well, by dotted name."""
    return {k: v for one in records if one.status != "ok" for k, v in one.keys.items()}


def as_object(records: Sequence[Record], **more: Any) -> dict[str, Any]:
    """Everything, for the JSON file; no name of the machine is in it."""
    told = json.dumps([dataclasses.asdict(one) for one in records])
    # JSON has no NaN, which is what a broken path may give: it is written as a text.
    checks = json.loads(told, parse_constant=str)
    return {**more, "overlay": overlay(records), "checks": checks}
