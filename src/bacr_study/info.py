"""What a study compares: tasks, arms, seeds, a swept key, and what is drawn of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
# The place of the mean over all budgets among the budgets.
MEAN = "mean"

Value = str | float | int


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      main: evaluation set of every view but `hard`.
      hard: evaluation set of the view `hard`; empty: none.
      budgets: thinking budgets of the tables, rising, in tokens.
    """

    id: str
    label: str
    main: str
    hard: str = ""
    budgets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """A key that takes several values.

    Attributes:
      key: the config's name of it, or what else varies.
      default: the value that the others are tested against; None: no tests.
    """

    key: str
    label: str
    values: tuple[Value, ...]
    default: Value | None = None

    @property
    def file_name(self) -> str:
        """The key as a part of names of files."""
        return "".join(c if c.isalnum() else "_" for c in self.key)


@dataclass(frozen=True)
class Arm:
    """A configuration that is run with every seed.

    Attributes:
      marks: what is said of it in tables, such as "paper row".
      parts: of an ablation, those of `StudyInfo.parts` that are on.
      accounting: how the tokens of a vote are counted ("per sample", "matched total").
    """

    id: str
    label: str
    marks: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    accounting: str = ""
    sweep: Sweep | None = None

    @property
    def name(self) -> str:
        """Label and accounting."""
        return f"{self.label} ({self.accounting})" if self.accounting else self.label


@dataclass(frozen=True)
class Variant:
    """An arm at one of its swept values."""

    arm: str
    value: Value | None = None

    @property
    def key(self) -> str:
        """Its name in results.json."""
        return self.arm if self.value is None else f"{self.arm}.{self.value}"


@dataclass(frozen=True)
class StudyInfo:
    """A study.

    Attributes:
      references: ids of the arms that the others are tested against; the first is also the one of
        the views `convergence` and `difficulty`.
      parts: of an ablation, the names of its parts in order.
      focus: budgets of the views that show one or two; empty: the task's second smallest.
      size: the size that is run, such as `cpu`.
      contrasts: name, arm, and the arm that it is compared with, of the view `contrasts`.
    """

    name: str
    title: str
    tasks: tuple[Task, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    views: tuple[str, ...] = ("accuracy", "efficiency")
    references: tuple[str, ...] = ()
    sweep: Sweep | None = None
    parts: tuple[str, ...] = ()
    focus: tuple[int, ...] = ()
    size: str = ""
    clustered: bool = False
    contrasts: tuple[tuple[str, str, str], ...] = ()

    def sweep_of(self, arm: Arm) -> Sweep | None:
        """The arm's own sweep, or the study's."""
        return arm.sweep or self.sweep

    def sweeps(self) -> dict[Sweep, list[Arm]]:
        """What is varied, and the arms in which it is."""
        found: dict[Sweep, list[Arm]] = {}
        for arm in self.arms:
            if sweep := self.sweep_of(arm):
                found.setdefault(sweep, []).append(arm)
        return found

    def arm(self, id_: str) -> Arm:
        """The arm of an id."""
        return next(arm for arm in self.arms if arm.id == id_)

    def variants(self) -> list[Variant]:
        """Every arm at every value, in order."""
        return [variant for arm in self.arms for variant in self.variants_of(arm)]

    def variants_of(self, arm: Arm) -> list[Variant]:
        """An arm at each of its values."""
        sweep = self.sweep_of(arm)
        return [Variant(arm.id, v) for v in sweep.values] if sweep else [Variant(arm.id)]

    def task(self, id_: str) -> Task:
        """The task of an id."""
        return next(task for task in self.tasks if task.id == id_)

    def focus_budgets(self, task: Task) -> list[str]:
        """Keys of the budgets of a task in focus, and of the mean over all its budgets."""
        chosen = self.focus or (task.budgets[min(1, len(task.budgets) - 1)],)
        return [*map(str, chosen), MEAN]

    def cell_ids(self) -> Iterator[str]:
        """Ids of all cells, in order."""
        for task in self.tasks:
            for variant in self.variants():
                for seed in self.seeds:
                    yield cell_id(task.id, variant, seed)


def cell_id(task: str, variant: Variant, seed: int) -> str:
    """`task.arm.seed`, or `task.arm.value.seed`."""
    return f"{task}.{variant.key}.{seed}"
