"""A study: which runs there are, how they are evaluated, what is compared and what is drawn."""

import functools
import itertools
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.fields import key as setting

View = Literal[
    "accuracy",
    "hard",
    "ablation",
    "scale",
    "efficiency",
    "curriculum",
    "convergence",
    "difficulty",
    "sensitivity",
    "contrasts",
]
# The four parts of BACR in an ablation, as the paper calls them.
Part = Literal["BUP", "CAS", "TDR", "BCAE"]
PARTS: tuple[str, ...] = typing.get_args(Part)
# How the tokens of a vote are counted.
ACCOUNTING = {"per_sample": "b tokens a sample", "matched_total": "b tokens in all"}
# The place of the mean over all budgets among the budgets.
MEAN = "mean"
SEEDS = "[0, 4294967295]"
# Cells count right samples by a digit (base 36).
SAMPLES = "[0, 35]"

Value = str | float | int


@dataclass(frozen=True)
class Variant:
    """An arm at one of its swept values."""

    arm: str
    value: Value | None = None

    @property
    def key(self) -> str:
        """Its name in results.json."""
        return self.arm if self.value is None else f"{self.arm}.{self.value}"


def cell_id(task: str, variant: Variant, seed: int) -> str:
    """`task.arm.seed`, or `task.arm.value.seed`."""
    return f"{task}.{variant.key}.{seed}"


def cell_path(folder: Path, id_: str) -> Path:
    """The file of a cell in a study's folder."""
    return folder / "cells" / f"{id_}.json"


@dataclass(frozen=True)
class Sweep:
    """What is varied within an arm.

    Attributes:
      key: of the config, or a name for several that vary together.
      values: of the key; or, in a file, names, each with the keys that it sets.
      default: the value that the others are tested against; None: no tests.
      settings: keys of the config by value.
    """

    key: str
    values: Any
    label: str = ""
    default: Any = None
    settings: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    @property
    def file_name(self) -> str:
        """The key as a part of names of files."""
        return "".join(c if c.isalnum() else "_" for c in self.key)


@dataclass(frozen=True)
class Arm:
    """A method as it is run here, with every seed.

    Attributes:
      set: keys over those, `{train.steps: 10}`.
      votes: k of a Self-Consistency row: its numbers are those of maj@k over samples of `of`.
      accounting: of the votes: `per_sample` (k samples of b tokens), `matched_total` (b / k each).
      samples: answers per problem, if others than the study's.
      of: another arm whose runs are evaluated instead of own ones; None: its own.
      sweep: what is varied within it; None: nothing, or what the study says.
      parts: the four parts of BACR that are on, for ablations.
      marked: the paper has this row.
    """

    id: str
    label: str
    config: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    votes: int | None = None
    accounting: Literal["per_sample", "matched_total"] = "per_sample"
    samples: int | None = None
    of: str | None = None
    sweep: Sweep | None = None
    parts: tuple[Part, ...] = ()
    marked: bool = False

    @property
    def name(self) -> str:
        """Label, and how the tokens of its votes are counted."""
        return f"{self.label} ({ACCOUNTING[self.accounting]})" if self.votes else self.label

    @property
    def mark(self) -> str:
        """What tables say of it."""
        return "paper's row" if self.marked else ""


@dataclass(frozen=True)
class Task:
    """Questions with their base config.

    Attributes:
      budgets: thinking budgets of the tables, rising, in tokens.
      data: sets evaluated; empty: the config's own.
      hard_levels: levels whose problems are also shown by themselves (view `hard`).
      main: evaluation set of every view but `hard`; known with its runs (`configured.with_sets`).
      hard: evaluation set of the view `hard`; empty: none.
    """

    id: str
    label: str
    config: tuple[str, ...]
    set: Mapping[str, Any] = field(default_factory=dict)
    budgets: tuple[int, ...] = ()
    data: tuple[str, ...] = ()
    hard_levels: tuple[int, ...] = ()
    main: str = ""
    hard: str = ""

    def hard_set(self, name: str) -> str:
        """What the problems of a set at the hard levels are called."""
        return f"{name}, levels {', '.join(map(str, self.hard_levels))}"


@dataclass(frozen=True)
class Evaluation:
    """How finished runs are evaluated: the same problems for every arm and seed."""

    samples: int = setting(4, "answers per problem and budget, beside the greedy one", SAMPLES)
    size: int | None = setting(None, "problems per set; null: all", "[1, inf)")
    temperature: float = setting(1.0, "of the samples", "(0, inf)")
    top_p: float = setting(1.0, "nucleus of the samples", "(0, 1]")
    slots: int = setting(64, "rows decoded together", "[1, inf)")
    seed: int = setting(0, "chooses problems (and makes those of a procedural set)", SEEDS)


@dataclass(frozen=True)
class Study:
    """Methods x tasks x seeds, perhaps x one key.

    Attributes:
      paper: what it reproduces, "Table 1 of the paper"; empty: nothing in it.
      tasks: in a file by name, as arms are, in the order of tables.
      seeds: of the runs; an arm's run with seed s starts from the warm-up with seed s.
      set: keys over those of every arm and task, `{train.max_generated_tokens: ...}`.
      own: keys of single arms, by the arm's name, over those; rates found by a search.
      sweep: what is varied within every arm; None: nothing.
      reference: arms that the others are tested against; the first is also the one of the views
        `convergence` and `difficulty`.
      before: the arm that is the policy before training; failed runs are counted against it. Empty:
        they are not counted.
      focus: budgets of views that show one or two; empty: each task's second smallest.
      contrasts: pairs of arms by name, `{entropy: [with, without]}`, of the view `contrasts`.
      tokens_per_second: pace for a prediction, measured or planned, of one run.
      devices_per_run: GPUs of one run; 0: the study runs on CPU cores, one a run.
    """

    name: str
    size: str
    title: str
    tasks: tuple[Task, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    paper: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Evaluation = Evaluation()
    sweep: Sweep | None = None
    reference: tuple[str, ...] = ()
    before: str = ""
    views: tuple[View, ...] = ("accuracy",)
    focus: tuple[int, ...] = ()
    contrasts: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_second: float | None = None
    devices_per_run: int = 0
    folder: Path = Path(".")

    @property
    def heading(self) -> str:
        """Title, and what it reproduces."""
        return f"{self.title} ({self.paper})" if self.paper else self.title

    @property
    def references(self) -> tuple[str, ...]:
        """Those arms of `reference` that are run."""
        run = [arm.id for arm in self.arms]
        return tuple(name for name in self.reference if name in run)

    def arm(self, id_: str) -> Arm:
        """The arm of an id."""
        return next(arm for arm in self.arms if arm.id == id_)

    def task(self, id_: str) -> Task:
        """The task of an id."""
        return next(task for task in self.tasks if task.id == id_)

    def samples_of(self, arm: Arm) -> int:
        """Answers per problem that an arm's runs are evaluated with."""
        return self.evaluation.samples if arm.samples is None else arm.samples

    def asked(self, task: str, arm: str) -> dict[str, Any]:
        """What the numbers of an arm's cells depend on beside its runs; cells keep it."""
        of, samples = self.task(task), self.samples_of(self.arm(arm))
        how: dict[str, Any] = {**vars(self.evaluation), "samples": samples}
        del how["slots"]
        return how | {key: list(getattr(of, key)) for key in ("budgets", "data", "hard_levels")}

    def votes_over(self, variant: Variant) -> list[Variant]:
        """Arms that are votes over the samples of a variant's runs."""
        return [Variant(arm.id, variant.value) for arm in self.arms if arm.of == variant.arm]

    def sweep_of(self, arm: Arm) -> Sweep | None:
        """What is varied within an arm: its own sweep, or the study's."""
        return arm.sweep or self.sweep

    def sweeps(self) -> dict[Sweep, list[Arm]]:
        """What is varied, and the arms in which it is."""
        found: dict[Sweep, list[Arm]] = {}
        for arm in self.arms:
            if sweep := self.sweep_of(arm):
                found.setdefault(sweep, []).append(arm)
        return found

    def variants(self) -> list[Variant]:
        """Every arm at every value, in order."""
        return [variant for arm in self.arms for variant in self.variants_of(arm)]

    def variants_of(self, arm: Arm) -> list[Variant]:
        """An arm at each of its values."""
        sweep = self.sweep_of(arm)
        return [Variant(arm.id, v) for v in sweep.values] if sweep else [Variant(arm.id)]

    def focus_budgets(self, task: Task) -> list[str]:
        """Keys of the budgets of a task in focus, and of the mean over all its budgets."""
        chosen = self.focus or (task.budgets[min(1, len(task.budgets) - 1)],)
        return [*map(str, chosen), MEAN]

    def cell_ids(self) -> Iterator[str]:
        """Ids of all cells, in order."""
        every = itertools.product(self.tasks, self.variants(), self.seeds)
        return (cell_id(task.id, variant, seed) for task, variant, seed in every)

    def config_of(self, task: str, arm: str, varied: Mapping[str, Any]) -> Config:
        """The resolved settings of a run, without its seed and folder; `varied` wins over all."""
        here, method = self.task(task), self.arm(arm)
        files = tuple(self.folder / path for path in (*here.config, *method.config))
        layers = (here.set, self.set, method.set, self.own.get(arm, {}), varied)
        keys = [item for layer in layers for item in layer.items()]
        return config_io.override(_loaded(files), [f"{k}={json.dumps(v)}" for k, v in keys])


# Many runs start from the same files.
_loaded = functools.lru_cache(maxsize=64)(config_io.load)
