"""Defines the records of a study: tasks, arms, seeds, evaluation, comparisons and views.

`study_file` reads these records from a file and checks them; `plan` turns them into runs. Nothing
here runs or reads anything, except for the config files of the runs.
"""

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
# The four parts of BACR in an ablation, named as in the paper.
Part = Literal["BUP", "CAS", "TDR", "BCAE"]
PARTS: tuple[str, ...] = typing.get_args(Part)
# Label of each way to count the tokens of a vote.
ACCOUNTING = {
    "per_sample": "b tokens a sample",
    "matched_total": "b tokens in all",
}
# Key of the mean over all budgets, next to the keys of the budgets.
MEAN = "mean"
SEEDS = "[0, 4294967295]"
# A cell stores the number of right samples of a problem as one digit in base 36.
SAMPLES = "[0, 35]"

Value = str | float | int


@dataclass(frozen=True)
class Variant:
    """An arm at one of its swept values; `value` is None if nothing is swept."""

    arm: str
    value: Value | None = None

    @property
    def key(self) -> str:
        """Returns the variant's name in results.json: `arm` or `arm.value`."""
        if self.value is None:
            return self.arm
        return f"{self.arm}.{self.value}"


def cell_id(task: str, variant: Variant, seed: int) -> str:
    """Returns `task.arm.seed`, or `task.arm.value.seed` for a swept value."""
    return f"{task}.{variant.key}.{seed}"


def cell_path(folder: Path, id_: str) -> Path:
    """Returns the path of a cell's file in a study's folder."""
    return folder / "cells" / f"{id_}.json"


@dataclass(frozen=True)
class Sweep:
    """A setting that is varied within an arm.

    Attributes:
      key: the config key that is varied, or a name for several keys that vary together.
      values: the key's values. In a file also a mapping from names to the keys that each name sets.
      default: the value that the other values are tested against; None: no tests.
      settings: by value, the config keys that the value sets.
    """

    key: str
    values: Any
    label: str = ""
    default: Any = None
    settings: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    @property
    def file_name(self) -> str:
        """Returns the key with every character that is not alphanumeric replaced by `_`."""
        return "".join(character if character.isalnum() else "_" for character in self.key)


@dataclass(frozen=True)
class Arm:
    """A method with its settings, run with every seed and on every task.

    Attributes:
      set: config keys of this arm, such as `{train.steps: 10}`; they override those of the study.
      votes: k of Self-Consistency. The arm's numbers are maj@k over the samples of arm `of`.
      accounting: tokens of a vote: `per_sample` (k samples of b tokens), `matched_total` (k samples
        of b / k tokens).
      samples: sampled answers per problem; None: the number that the study evaluates with.
      of: the arm whose runs are evaluated for this arm; None: the arm has runs.
      sweep: the setting that is varied within this arm; None: the study's sweep.
      parts: the parts of BACR that are on, in an ablation.
      marked: True if the paper has this row.
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
        """Returns the label, with the accounting of tokens if the arm is a vote."""
        if not self.votes:
            return self.label
        return f"{self.label} ({ACCOUNTING[self.accounting]})"

    @property
    def mark(self) -> str:
        """Returns the remark that tables print next to the arm's name; empty if there is none."""
        return "paper's row" if self.marked else ""


@dataclass(frozen=True)
class Task:
    """Questions and the base config of the runs on them.

    Attributes:
      budgets: thinking budgets that tables show, in tokens, rising.
      data: evaluation sets; empty: the sets that the config names.
      hard_levels: difficulty levels that the view `hard` evaluates separately.
      main: evaluation set of every view except `hard`. `configured.with_sets` fills it in.
      hard: evaluation set of the view `hard`; empty if the study has no such view.
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
        """Returns the name of the problems of an evaluation set that are at the hard levels."""
        levels = ", ".join(map(str, self.hard_levels))
        return f"{name}, levels {levels}"


@dataclass(frozen=True)
class Evaluation:
    """Settings with which finished runs are evaluated, equal for every arm and seed."""

    samples: int = setting(4, "answers per problem and budget, beside the greedy one", SAMPLES)
    size: int | None = setting(None, "problems per set; null: all", "[1, inf)")
    temperature: float = setting(1.0, "of the samples", "(0, inf)")
    top_p: float = setting(1.0, "nucleus of the samples", "(0, 1]")
    slots: int = setting(64, "rows decoded together", "[1, inf)")
    seed: int = setting(0, "chooses problems (and makes those of a procedural set)", SEEDS)


@dataclass(frozen=True)
class Study:
    """Methods x tasks x seeds, optionally x one swept setting.

    Attributes:
      paper: the part of the paper that the study reproduces, such as "Table 1 of the paper"; empty
        if none.
      tasks: tasks in the order of the tables; a file has them as a mapping, like arms.
      seeds: seeds of the runs. A run with seed s starts from the warm-up with seed s.
      set: config keys of all arms and tasks, such as `{train.max_generated_tokens: ...}`.
      own: by arm, config keys of that arm that override `set`; for example rates from a search.
      sweep: the setting that is varied within every arm; None: none.
      reference: arms that the other arms are tested against. The views `convergence` and
        `difficulty` use the first one.
      before: the arm that is the policy before training. Failed runs are counted against it; empty:
        failed runs are not counted.
      focus: budgets of the views that show one or two; empty: the second smallest of each task.
      contrasts: by name, pairs of arms for the view `contrasts`: `{entropy: [with, without]}`.
      tokens_per_second: pace of one run, measured or planned, for predictions of the time.
      devices_per_run: GPUs of one run; 0: each run uses one CPU core.
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
        """Returns the title, with the part of the paper that the study reproduces."""
        if not self.paper:
            return self.title
        return f"{self.title} ({self.paper})"

    @property
    def references(self) -> tuple[str, ...]:
        """Returns the reference arms that are among the study's chosen arms."""
        chosen_arms = [arm.id for arm in self.arms]
        return tuple(name for name in self.reference if name in chosen_arms)

    def arm(self, id_: str) -> Arm:
        """Returns the arm with an id."""
        return next(arm for arm in self.arms if arm.id == id_)

    def task(self, id_: str) -> Task:
        """Returns the task with an id."""
        return next(task for task in self.tasks if task.id == id_)

    def samples_of(self, arm: Arm) -> int:
        """Returns the number of sampled answers per problem in an arm's evaluation."""
        return self.evaluation.samples if arm.samples is None else arm.samples

    def asked(self, task: str, arm: str) -> dict[str, Any]:
        """Returns the evaluation settings that an arm's numbers on a task depend on.

        Cells store them. The number of slots is left out, because it changes the speed only.
        """
        settings: dict[str, Any] = dict(vars(self.evaluation))
        settings["samples"] = self.samples_of(self.arm(arm))
        del settings["slots"]
        for key in ("budgets", "data", "hard_levels"):
            settings[key] = list(getattr(self.task(task), key))
        return settings

    def votes_over(self, variant: Variant) -> list[Variant]:
        """Returns the variants that are votes over the samples of a variant's runs."""
        return [Variant(arm.id, variant.value) for arm in self.arms if arm.of == variant.arm]

    def sweep_of(self, arm: Arm) -> Sweep | None:
        """Returns the arm's sweep, or the study's sweep if the arm has none."""
        return arm.sweep or self.sweep

    def sweeps(self) -> dict[Sweep, list[Arm]]:
        """Returns every sweep with the arms that it is varied in."""
        arms_by_sweep: dict[Sweep, list[Arm]] = {}
        for arm in self.arms:
            sweep = self.sweep_of(arm)
            if sweep:
                arms_by_sweep.setdefault(sweep, []).append(arm)
        return arms_by_sweep

    def variants(self) -> list[Variant]:
        """Returns every arm at every value, in the order of the file."""
        return [variant for arm in self.arms for variant in self.variants_of(arm)]

    def variants_of(self, arm: Arm) -> list[Variant]:
        """Returns an arm at each of its swept values, or the arm if nothing is swept."""
        sweep = self.sweep_of(arm)
        if sweep is None:
            return [Variant(arm.id)]
        return [Variant(arm.id, value) for value in sweep.values]

    def focus_budgets(self, task: Task) -> list[str]:
        """Returns the keys of a task's budgets in focus, then `MEAN`."""
        second_smallest = task.budgets[min(1, len(task.budgets) - 1)]
        budgets = self.focus or (second_smallest,)
        return [*map(str, budgets), MEAN]

    def cell_ids(self) -> Iterator[str]:
        """Yields the ids of all cells, in the order of tasks, variants and seeds."""
        combinations = itertools.product(
            self.tasks,
            self.variants(),
            self.seeds,
        )
        for task, variant, seed in combinations:
            yield cell_id(task.id, variant, seed)

    def config_of(self, task: str, arm: str, varied: Mapping[str, Any]) -> Config:
        """Returns the resolved config of a run, without seed and folder.

        Args:
          varied: config keys of the swept value. Later layers win: the task's keys, the study's,
            the arm's, `own` of the arm, then these.

        Raises:
          UserError: if a file or a key cannot be used.
        """
        task_spec = self.task(task)
        arm_spec = self.arm(arm)
        names = (*task_spec.config, *arm_spec.config)
        files = tuple(self.folder / name for name in names)
        layers = (
            task_spec.set,
            self.set,
            arm_spec.set,
            self.own.get(arm, {}),
            varied,
        )
        overrides = []
        for layer in layers:
            for key, value in layer.items():
                overrides.append(f"{key}={json.dumps(value)}")
        return config_io.override(_loaded(files), overrides)


# Cached because many runs start from the same files.
_loaded = functools.lru_cache(maxsize=64)(config_io.load)
