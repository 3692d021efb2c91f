"""Defines the dataclasses of a study: tasks, arms, evaluation settings, sweeps and views.

An arm is a method with its settings. A variant is an arm at one value of a sweep. A cell contains
the results of one run, which is a combination of task, variant and seed. A view is a kind of result
that the report shows in tables and figures.

`study_file` reads studies from files and checks them, and `plan` expands them into runs. This
module does not run anything, and the only files it reads are the configs of the runs.
"""

import functools
import itertools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config, shipped
from bacr_jax.config import io as config_io
from bacr_jax.config.fields import LARGEST_SEED, SMALLEST_TEMPERATURE
from bacr_jax.config.fields import key as setting
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError

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
# The four parts of BACR that an ablation switches on and off, named as in the paper.
Part = Literal["BUP", "CAS", "TDR", "BCAE"]
PARTS: tuple[str, ...] = typing.get_args(Part)
# Label of each way to count the tokens of a majority vote with budget b.
ACCOUNTING = {
    "per_sample": "b tokens a sample",
    "matched_total": "b tokens in all",
}
# Fields of `Evaluation` that request an evaluation at truncation points. `PlannedRun.asked` decides
# which runs they apply to.
TRUNCATIONS = ("cut_every", "swap")
# Key of the mean over all budgets, used in the same places as the key of a single budget.
MEAN = "mean"
SEEDS = f"[0, {LARGEST_SEED}]"
# A cell stores the number of correct samples of a problem as one base-36 digit.
SAMPLES = "[0, 35]"
# Ranges of the options --size and --slots of `bacr evaluate`.
_SIZES = "[1, 2147483647]"
_SLOTS = "[1, 1000000]"

Value = str | float | int


@dataclass(frozen=True)
class Variant:
    """An arm (a method with its settings) at one of its swept values.

    The field `value` is None if the arm varies no setting.
    """

    arm: str
    value: Value | None = None

    @property
    def key(self) -> str:
        """Returns the name that identifies the variant in results.json: `arm` or `arm.value`."""
        if self.value is None:
            return self.arm
        return f"{self.arm}.{self.value}"


def cell_id(task: str, variant: Variant, seed: int) -> str:
    """Returns the id of a run's results: `task.arm.seed`, or `task.arm.value.seed`.

    The id contains `value` if the arm (a method with its settings) varies a setting.
    """
    return f"{task}.{variant.key}.{seed}"


def cell_path(folder: Path, id_: str) -> Path:
    """Returns the path of the file with a run's results (its cell), in a study's folder."""
    return folder / "cells" / f"{id_}.json"


@dataclass(frozen=True)
class Sweep:
    """A setting that is varied: each of its values is trained with an otherwise equal config.

    Attributes:
      key: the config key that is varied, or a name for several keys that vary together.
      values: the values of the key. A study file may instead map names to the config keys that each
        name sets.
      label: label in tables and figures; the key by default.
      default: the value that the other values are tested against; None for no tests.
      settings: the config keys that each value sets.
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
    """A method with its settings, which is run on every task with every seed.

    Attributes:
      id: id of the arm, its key in the study file.
      label: name of the arm in tables and figures.
      config: paths of config files, relative to the study file, or names of shipped configs.
      set: config keys of this arm, such as `{train.steps: 10}`. They override the study's `set`.
      votes: number k of votes in Self-Consistency. The arm's accuracy is maj@k over the samples of
        arm `of`.
      accounting: how the tokens of a vote with budget b are counted: `per_sample` uses k samples of
        b tokens each, `matched_total` uses k samples of b / k tokens each.
      samples: number of sampled responses per problem; None for the study's `evaluation.samples`.
      of: the arm whose runs are evaluated for this arm; None if this arm has runs itself.
      sweep: the setting that is varied within this arm; None for the study's sweep.
      parts: the parts of BACR that are enabled, in an ablation.
      marked: True if the paper's table contains this row.
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
        """Returns the label, followed by how tokens are counted if the arm is a vote."""
        if not self.votes:
            return self.label
        return f"{self.label} ({ACCOUNTING[self.accounting]})"

    @property
    def mark(self) -> str:
        """Returns the remark shown next to the arm's name in tables; empty if `marked` is False."""
        return "paper's row" if self.marked else ""


@dataclass(frozen=True)
class Task:
    """A set of questions, and the base config of the runs that train on them.

    Attributes:
      id: id of the task, its key in the study file.
      label: name of the task in tables and figures.
      config: paths of config files, relative to the study file, or names of shipped configs.
      set: config keys of all runs on this task. They override the config files.
      budgets: thinking budgets in tokens that tables show, in increasing order.
      data: names of the evaluation sets; empty for the evaluation sets of the config.
      hard_levels: difficulty levels that the view `hard` evaluates separately.
      main: the evaluation set of all views except `hard`, filled in by `configured.with_sets`.
      hard: the evaluation set of the view `hard`, filled in by `configured.with_sets`; empty if
        there are neither hard levels nor this view.
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
        """Returns the name for the hard problems of an evaluation set.

        The hard problems are the ones whose level is in `hard_levels`.
        """
        levels = ", ".join(map(str, self.hard_levels))
        return f"{name}, levels {levels}"


@dataclass(frozen=True)
class Evaluation:
    """Evaluation settings of finished runs. They are the same for all methods and seeds."""

    samples: int = setting(
        4, "sampled answers per problem and budget, in addition to one greedy answer", SAMPLES
    )
    size: int | None = setting(None, "number of problems per set; null: all problems", _SIZES)
    temperature: float = setting(
        1.0, "temperature of sampled answers", f"[{SMALLEST_TEMPERATURE:g}, inf)"
    )
    top_p: float = setting(1.0, "top-p of sampled answers", "(0, 1]")
    slots: int = setting(64, "number of traces that are decoded together", _SLOTS)
    seed: int = setting(
        0, "seed that selects the problems, and generates the problems of a procedural set", SEEDS
    )
    cut_every: int | None = setting(
        None,
        "number of tokens between two truncation points at which the policy before training (arm "
        "`before`) is evaluated; null: evaluated at the task's budgets only",
        "[1, inf)",
    )
    swap: bool = setting(
        False,
        "evaluate trained policies for every pair of a budget as input and a truncation point",
    )


@dataclass(frozen=True)
class Study:
    """A comparison of methods x tasks x seeds, optionally x the values of a sweep.

    Attributes:
      name: name of the study, which is the name of its file.
      size: the chosen entry of the file's section `sizes`.
      title: title of the report.
      tasks: tasks in the order of the tables. A study file specifies them as a mapping from ids.
      arms: arms in the order of the tables. A study file specifies them as a mapping from ids.
      seeds: seeds of the runs. The run with seed s starts from the warm-up with seed s.
      paper: the part of the paper that the study reproduces, such as "Table 1 of the paper"; empty
        if it does not reproduce any.
      set: config keys of all arms and tasks, such as `{train.max_generated_tokens: ...}`.
      own: config keys by arm, which override `set` and the arm's `set`. Used, for example, for
        learning rates found by a search.
      evaluation: evaluation settings of finished runs.
      sweep: the setting that is varied within every arm; None for no sweep.
      reference: ids of the arms that the other arms are tested against. The views `convergence` and
        `difficulty` only use the first one.
      before: id of the arm that represents the policy before training. Failed runs are determined
        by comparison with this arm; empty to not count failed runs.
      views: the tables and figures of the report.
      focus: budgets shown in views that only cover a few budgets; empty for the second-smallest
        budget of each task.
      contrasts: pairs of arms for the view `contrasts` by name, such as `{entropy: [with,
        without]}`.
      tokens_per_second: measured or planned throughput of one run, used to predict training times.
      devices_per_run: number of GPUs per run; 0 if each run uses one share of the CPU cores.
      folder: folder of the study file, which the paths of configs are relative to.
      overrides: config keys of all runs from the command line, as texts `a.b=value`. They override
        all other keys.
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
    overrides: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Returns the title, followed by the part of the paper that the study reproduces."""
        if not self.paper:
            return self.title
        return f"{self.title} ({self.paper})"

    @property
    def references(self) -> tuple[str, ...]:
        """Returns the ids of the reference arms (methods) that are among the study's arms."""
        chosen_arms = [arm.id for arm in self.arms]
        return tuple(name for name in self.reference if name in chosen_arms)

    def arm(self, id_: str) -> Arm:
        """Returns the arm with the given id."""
        return next(arm for arm in self.arms if arm.id == id_)

    def task(self, id_: str) -> Task:
        """Returns the task with the given id."""
        return next(task for task in self.tasks if task.id == id_)

    def samples_of(self, arm: Arm) -> int:
        """Returns the number of sampled responses per problem in evaluations of an arm (method)."""
        return self.evaluation.samples if arm.samples is None else arm.samples

    def asked(self, task: str, arm: str) -> dict[str, Any]:
        """Returns the evaluation settings that affect the results of an arm (a method) on a task.

        A majority vote has the settings of the arm whose samples vote, and the number of votes and
        their accounting. The number of slots is left out because it only affects the speed.
        """
        arm_spec = self.arm(arm)
        settings: dict[str, Any] = dict(vars(self.evaluation))
        settings["samples"] = self.samples_of(self.arm(arm_spec.of or arm))
        del settings["slots"]
        # These settings are omitted if they are not used. Otherwise the settings of cells from
        # earlier versions, which do not contain them, would differ.
        for key in TRUNCATIONS:
            if not settings[key]:
                del settings[key]
        for key in ("budgets", "data", "hard_levels"):
            settings[key] = list(getattr(self.task(task), key))
        if arm_spec.votes:
            settings["votes"] = arm_spec.votes
            settings["accounting"] = arm_spec.accounting
        return settings

    def vote_numbers(self, variant: Variant) -> list[Variant]:
        """Returns the variants that are majority votes over the samples of a variant's runs.

        A variant is an arm (a method with its settings) at one of its swept values.
        """
        return [Variant(arm.id, variant.value) for arm in self.arms if arm.of == variant.arm]

    def sweep_of(self, arm: Arm) -> Sweep | None:
        """Returns the arm's sweep, or the study's sweep if the arm does not define one."""
        return arm.sweep or self.sweep

    def sweeps(self) -> dict[Sweep, list[Arm]]:
        """Returns every sweep (a setting that is varied), with the arms (methods) that vary it."""
        arms_by_sweep: dict[Sweep, list[Arm]] = {}
        for arm in self.arms:
            sweep = self.sweep_of(arm)
            if sweep:
                arms_by_sweep.setdefault(sweep, []).append(arm)
        return arms_by_sweep

    def variants(self) -> list[Variant]:
        """Returns all variants, in the order of the study file.

        A variant is an arm (a method with its settings) at one of its swept values.
        """
        return [variant for arm in self.arms for variant in self.variants_of(arm)]

    def variants_of(self, arm: Arm) -> list[Variant]:
        """Returns an arm's variants: one per swept value, or only one if nothing is swept."""
        sweep = self.sweep_of(arm)
        if sweep is None:
            return [Variant(arm.id)]
        return [Variant(arm.id, value) for value in sweep.values]

    def focus_budgets(self, task: Task) -> list[str]:
        """Returns the keys of the budgets that the study lists in `focus`, followed by `MEAN`.

        Without `focus`, the only budget is the second-smallest one of the task.
        """
        second_smallest = task.budgets[min(1, len(task.budgets) - 1)]
        budgets = self.focus or (second_smallest,)
        return [*map(str, budgets), MEAN]

    def cell_ids(self, *, has_votes: bool = True) -> Iterator[str]:
        """Yields the ids of all runs' results, ordered by task, variant and seed.

        Args:
          has_votes: True to include majority votes, which have results but no runs.
        """
        combinations = itertools.product(
            self.tasks,
            self.variants(),
            self.seeds,
        )
        for task, variant, seed in combinations:
            if has_votes or self.has_runs(variant.arm):
                yield cell_id(task.id, variant, seed)

    def has_runs(self, arm: str) -> bool:
        """True if an arm (a method) has runs, False if its results are votes over other runs."""
        return self.arm(arm).of is None

    def config_of(self, task: str, arm: str, varied: Mapping[str, Any]) -> Config:
        """Builds the resolved config of a run, without seed and folders.

        Config files of the task and of the arm are loaded first. The keys that override them are
        applied in this order: the task's `set`, the study's `set`, the arm's `set`, the study's
        `own` for this arm, `varied`, and the config keys of the command line. An arm without
        training steps keeps `train.steps` at 0.

        Args:
          task: id of the task.
          arm: id of the arm.
          varied: config keys of the swept value.

        Raises:
          UserError: if a config file or a key is invalid.
        """
        task_spec = self.task(task)
        arm_spec = self.arm(arm)
        names = (*task_spec.config, *arm_spec.config)
        files = tuple(_config_path(self.folder, name) for name in names)
        layers = (
            task_spec.set,
            self.set,
            arm_spec.set,
            self.own.get(arm, {}),
            varied,
        )
        overrides = []
        for layer in layers:
            overrides += config_io.override_texts(_with_order(layer))
        config = config_io.override(_loaded(files), overrides)
        if not self.overrides:
            return config
        last = list(self.overrides)
        if config.train.steps == 0:
            # The arm is the policy before training.
            last.append("train.steps=0")
        return config_io.override(_loaded(files), [*overrides, *last])


def _config_path(folder: Path, written: str) -> Path:
    """Returns the path of a config that a study names.

    Args:
      folder: folder of the study file.
      written: a path relative to `folder`, or the name of a config that ships with the package,
        such as `quickstart` or `methods/grpo`. An existing file takes precedence over a name.

    Raises:
      UserError: if `written` is the name of a shipped config, and a file of this name with the
        suffix .yaml or .yml is in `folder`.
    """
    path = folder / written
    if path.is_file():
        return path
    # Configs without a folder come first, so that a full name precedes the last part of another.
    names = (name for name in shipped.names() if written in (name, name.rpartition("/")[2]))
    name = next(names, None)
    if name is None:
        return path
    shipped_path = shipped.root() / f"{name}.yaml"
    for suffix in shipped.ENDINGS:
        other = folder / f"{written}{suffix}"
        if other.is_file() and other.resolve() != shipped_path.resolve():
            raise UserError(
                f"config: {written!r} is the name of a shipped config, and {other} exists; write "
                f"{written}{suffix} for this file, or {shipped_path} for the shipped config"
            )
    return shipped_path


def _with_order(value: Any) -> Any:
    """Converts mappings, also nested ones, so that `override_texts` keeps the order of their keys.

    The order can matter, for example for the rewards in `reward.weights`.
    """
    if isinstance(value, Mapping):
        return FrozenMap({key: _with_order(item) for key, item in value.items()})
    if isinstance(value, list):
        return [_with_order(item) for item in value]
    return value


# Cached because many runs load the same files.
_loaded = functools.lru_cache(maxsize=64)(config_io.load)
