"""A study as its file states it: which runs there are, how they are evaluated, what is drawn.

A file in `configs/studies/` has the keys of `Study`; `sizes` holds, by name, keys that replace
those at the top (`cpu`, `gpu`, `7b`). Paths of configs are relative to the file.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config import io as config_io


@dataclass(frozen=True)
class Sweep:
    """What is varied within an arm.

    Attributes:
      key: of the config, or a name for several that vary together.
      values: of the key; or names, each with the keys that it sets.
      default: the value that the others are tested against; None: none.
    """

    key: str
    values: Any
    label: str = ""
    default: Any = None

    @property
    def names(self) -> tuple[Any, ...]:
        """The values, as results call them."""
        return tuple(self.values)

    def settings(self, value: Any) -> Mapping[str, Any]:
        """Keys of the config at a value."""
        if isinstance(self.values, Mapping):
            found: Mapping[str, Any] = self.values[value] or {}
            return found
        return {self.key: value}


@dataclass(frozen=True)
class Arm:
    """A method as it is run here.

    Attributes:
      label: what tables call it.
      set: keys over those, `{train.steps: 10}`.
      votes: k of a Self-Consistency row: its numbers are those of maj@k over samples of `of`.
      accounting: of the votes: `per_sample` (k samples of b tokens), `matched_total` (b / k each).
      samples: answers per problem, if others than the study's.
      of: another arm whose runs are evaluated instead of own ones; None: its own.
      sweep: what is varied within it; None: nothing, or what the study says.
      parts: the four parts of BACR that are on, for ablations; None: not part of one.
      marked: the paper has this row.
    """

    label: str
    config: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    votes: int | None = None
    accounting: str = "per_sample"
    samples: int | None = None
    of: str | None = None
    sweep: Sweep | None = None
    parts: tuple[str, ...] | None = None
    marked: bool = False


@dataclass(frozen=True)
class Task:
    """Questions with their base config.

    Attributes:
      config: base configs.
      budgets: thinking budgets evaluated.
      data: sets evaluated; empty: the config's own.
      hard_levels: levels whose problems are also shown by themselves (view `hard`).
    """

    label: str
    config: tuple[str, ...]
    set: Mapping[str, Any] = field(default_factory=dict)
    budgets: tuple[int, ...] = ()
    data: tuple[str, ...] = ()
    hard_levels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """How finished runs are evaluated: the same problems for every arm and seed.

    Attributes:
      samples: answers per problem and budget, beside the greedy one.
      size: problems per set; None: all.
      top_p: nucleus of the samples.
      slots: rows decoded together.
      seed: chooses problems (and makes those of a procedural set).
    """

    samples: int = 4
    size: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    slots: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Study:
    """Methods x tasks x seeds, perhaps x one key.

    Attributes:
      title: one line for people.
      paper: what it reproduces, "Table 1 of the paper"; empty: nothing in it.
      arms: by name, in the order of tables.
      seeds: of the runs; an arm's run with seed s starts from the warm-up with seed s.
      set: keys over those of every arm and task, `{train.max_generated_tokens: ...}`.
      own: keys of single arms, by the arm's name, over those; rates found by a search.
      sweep: what is varied within every arm; None: nothing.
      reference: arms that the others are tested against.
      focus: budgets of views that show one or two; empty: each task's second smallest.
      clustered: tests take rows of one problem as one, where a set holds it several times.
      contrasts: pairs of arms by name, `{entropy: [with, without]}`, of the view `contrasts`.
      tokens_per_second: pace for a prediction, measured or planned, of one run.
      devices_per_run: GPUs of one run; 0: the study runs on CPU cores, one a run.
    """

    name: str
    size: str
    title: str
    tasks: Mapping[str, Task]
    arms: Mapping[str, Arm]
    seeds: tuple[int, ...]
    paper: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Evaluation = Evaluation()
    sweep: Sweep | None = None
    reference: tuple[str, ...] = ()
    views: tuple[str, ...] = ("accuracy",)
    focus: tuple[int, ...] = ()
    clustered: bool = False
    contrasts: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_second: float | None = None
    devices_per_run: int = 0
    folder: Path = Path(".")

    def samples_of(self, arm: str) -> int:
        """Answers per problem that an arm's runs are evaluated with."""
        own = self.arms[arm].samples
        return self.evaluation.samples if own is None else own

    def sweep_of(self, arm: str) -> Sweep | None:
        """What is varied within an arm."""
        return self.arms[arm].sweep or self.sweep

    def config_of(self, task: str, arm: str, varied: Mapping[str, Any]) -> Config:
        """The resolved settings of a run, without its seed and folder.

        Args:
          varied: keys that win over all of it.

        UserError: what `train` would refuse.
        """
        here, method = self.tasks[task], self.arms[arm]
        files = tuple(self.folder / path for path in (*here.config, *method.config))
        layers = (here.set, self.set, method.set, self.own.get(arm, {}), varied)
        overrides = [_override(key, value) for layer in layers for key, value in layer.items()]
        return config_io.override(_loaded(files), overrides)


@functools.lru_cache(maxsize=64)
def _loaded(files: tuple[Path, ...]) -> Config:
    """The config of files that many runs start from."""
    return config_io.load(files)


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"
