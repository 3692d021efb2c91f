"""A study: which runs there are, how they are evaluated, what is compared and what is drawn.

A file in `configs/studies/` has the keys of `Study`; `sizes` holds, by name, keys that replace
those at the top (`cpu`, `gpu`, `7b`). Paths of configs are relative to the file.
"""

import functools
import itertools
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.fields import inside, range_text, walk
from bacr_jax.config.fields import key as setting
from bacr_jax.config.reader import read_dataclass, read_value, refusal
from bacr_jax.config.values import any_of, shown
from bacr_jax.config.yaml import constructed, parse_file, parse_override

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
_SEEDS = "[0, 4294967295]"
# Cells count right samples by a digit (base 36).
_SAMPLES = "[0, 35]"
_LEVELS = "[1, 5]"

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

    samples: int = setting(4, "answers per problem and budget, beside the greedy one", _SAMPLES)
    size: int | None = setting(None, "problems per set; null: all", "[1, inf)")
    temperature: float = setting(1.0, "of the samples", "(0, inf)")
    top_p: float = setting(1.0, "nucleus of the samples", "(0, 1]")
    slots: int = setting(64, "rows decoded together", "[1, inf)")
    seed: int = setting(0, "chooses problems (and makes those of a procedural set)", _SEEDS)


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
        """The resolved settings of a run, without its seed and folder.

        Args:
          varied: keys that win over all of it.
        """
        here, method = self.task(task), self.arm(arm)
        files = tuple(self.folder / path for path in (*here.config, *method.config))
        layers = (here.set, self.set, method.set, self.own.get(arm, {}), varied)
        keys = [item for layer in layers for item in layer.items()]
        return config_io.override(_loaded(files), [f"{k}={json.dumps(v)}" for k, v in keys])


# Many runs start from the same files.
_loaded = functools.lru_cache(maxsize=64)(config_io.load)


# --- the file -------------------------------------------------------------------------------------

# Names become parts of file names and of identifiers.
_NAME = re.compile(r"[A-Za-z0-9_+-]+")
# So do swept values, which may have a point.
_VALUE = re.compile(r"[A-Za-z0-9_+.-]+")


def _named(cls: Any, given: Any, where: str, **unwritten: Any) -> tuple[Any, ...]:
    """Dataclasses from a mapping of names; `unwritten`: fields that no file sets."""
    if not isinstance(given, Mapping) or not given:
        raise refusal(where, f"found {shown(given)}", "at least one, by name")
    made = []
    for name, value in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise refusal(where, f"found the name {shown(name)}", "letters, digits, _ + and -")
        made.append(_with_sweep(cls, value, f"{where}.{name}", {"id": name, **unwritten}))
    return tuple(made)


def _with_sweep(cls: Any, parsed: Any, where: str, given: Mapping[str, Any]) -> Any:
    """`read_dataclass` of one that may hold a `Sweep`."""
    if cls is not Task and isinstance(parsed, Mapping) and parsed.get("sweep") is not None:
        given = {**given, "sweep": _sweep(parsed["sweep"], f"{where}.sweep")}
        parsed = {key: value for key, value in parsed.items() if key != "sweep"}
    return read_dataclass(cls, parsed, where, given=given)


def _sweep(parsed: Any, where: str) -> Sweep:
    read = read_dataclass(Sweep, parsed, where, given={"settings": {}})
    if not isinstance(read.values, list | Mapping) or not read.values:
        raise refusal(f"{where}.values", f"found {shown(read.values)}", "a list, or keys by name")
    for value in read.values:
        if not _VALUE.fullmatch(str(value)):
            raise refusal(
                f"{where}.values", f"found {shown(value)}", "letters, digits, _ + . and -"
            )
    if read.default not in (None, *read.values):
        write = any_of([str(value) for value in read.values])
        raise refusal(f"{where}.default", f"found {shown(read.default)}", write)
    named = isinstance(read.values, Mapping)
    settings = {v: (read.values[v] or {}) if named else {read.key: v} for v in read.values}
    return Sweep(read.key, tuple(settings), read.label or read.key, read.default, settings)


def merged(path: Path, size: str | None) -> tuple[dict[str, Any], str]:
    """The keys of a size over those at the top of a file, mappings key by key; and the size."""
    document = _document(path)
    sizes = document.pop("sizes", None)
    if not isinstance(sizes, Mapping) or not sizes:
        raise refusal(f"{path}: sizes", f"found {shown(sizes)}", "at least one, by name")
    chosen = next(iter(sizes)) if size is None else size
    if chosen not in sizes:
        raise refusal("--size", f"found {shown(chosen)}", any_of([str(name) for name in sizes]))
    over = sizes[chosen] or {}
    if not isinstance(over, Mapping):
        raise refusal(f"{path}: sizes.{chosen}", f"found {shown(over)}", "keys of a study")
    for key, value in over.items():
        document[key] = _over(document.get(key), value)
    document.pop("kind", None)
    return document, chosen


def _over(below: Any, value: Any) -> Any:
    both = isinstance(value, Mapping) and isinstance(below, Mapping)
    return {**below, **value} if both else value


def overridden(text: str) -> tuple[str, Any]:
    """Key and value of `key=value` on the command line."""
    given = parse_override(text, "command line")
    return given.prefix[:-1], constructed(given)


def _document(path: Path) -> dict[str, Any]:
    """The keys at the top of a study's file."""
    return dict(constructed(parse_file(path)) or {})


def kind_of(path: Path) -> str:
    """What a study's file is: `runs`, unless it says otherwise (`kind: variance`)."""
    kind = _document(path).get("kind", "runs")
    if kind not in ("runs", "variance"):
        raise refusal(f"{path}: kind", f"found {shown(kind)}", "runs or variance")
    return str(kind)


_HINTS = typing.get_type_hints(Study)


def read_study(path: Path, *, size: str | None = None, overrides: Sequence[str] = ()) -> Study:
    """Reads and checks a study; no run's config is resolved yet.

    Args:
      overrides: `seeds=[0]` and other keys of `Study`; any other key belongs to the runs.
    """
    keys, chosen = merged(path, size)
    every = [*(keys.get("arms") or {})]
    own = _HINTS.keys() - {"name", "size", "folder"}
    # Arms and tasks are chosen there, and written in the file.
    told = {text.partition("=")[0].partition(".")[0] for text in overrides} - {"arms", "tasks"}
    place_of = lambda key: f"{'command line' if key.split('.')[0] in told else path}: {key}"
    for key, value in map(overridden, overrides):
        if key.startswith("evaluation."):
            key, value = "evaluation", {key.removeprefix("evaluation."): value}
        if key in ("arms", "tasks") and isinstance(value, list):
            keys[key] = _chosen(keys.get(key, {}), value, key)
        elif key in own:
            if not isinstance(value, Mapping):
                read_value(_HINTS[key], value, place_of(key))
            keys[key] = _over(keys.get(key), value)
        else:
            keys["set"] = {**keys.get("set", {}), key: value}
    how = keys.pop("evaluation", {})
    given = {
        "tasks": _named(Task, keys.pop("tasks", None), place_of("tasks"), main="", hard=""),
        "arms": _named(Arm, keys.pop("arms", None), place_of("arms")),
        "evaluation": read_dataclass(Evaluation, how, place_of("evaluation")),
        "name": path.stem,
        "size": chosen,
        "folder": path.parent,
    }
    study: Study = _with_sweep(Study, keys, str(path), given)
    for fits, place, found, write in _checks(study, every):
        if not fits:
            raise refusal(place_of(place), f"found {shown(found)}", write)
    return study


def _chosen(known: Mapping[str, Any], names: Sequence[Any], key: str) -> dict[str, Any]:
    """Some of the arms or tasks, in the order of the file."""
    for name in names:
        if name not in known:
            raise refusal(f"command line: {key}", f"found {shown(name)}", any_of(list(known)))
    if len(set(names)) < len(names):
        raise refusal(f"command line: {key}", f"found {shown(list(names))}", "each of them once")
    return {name: value for name, value in known.items() if name in names}


def _checks(study: Study, every: Sequence[str]) -> Iterator[tuple[Any, str, Any, str]]:
    """What must fit together: whether it does, where, what is there and what to write.

    A check builds on those before it. `every` has the file's arms, chosen or not.
    """
    seeds, views, matched = study.seeds, set(study.views), dict[str | None, int]()
    yield 0 < len(seeds) == len(set(seeds)), "seeds", list(seeds), "different seeds"
    for seed in seeds:
        yield inside(seed, _SEEDS), "seeds", seed, range_text(_SEEDS)
    for name, number in walk(study.evaluation):
        if (bounds := number.bounds) and (value := number.value) is not None:
            yield inside(value, bounds), f"evaluation.{name}", value, range_text(bounds)
    for name, keys in study.own.items():
        yield name in every, "own", name, any_of(every)
        yield isinstance(keys, Mapping), f"own.{name}", keys, "a mapping of config keys"
    for name in study.reference:
        yield name in every, "reference", name, any_of(every)
    yield study.contrasts or "contrasts" not in views, "contrasts", None, "pairs of arms by name"
    arms = {arm.id: arm for arm in study.arms}
    single = [arm.id for arm in study.arms if study.sweep_of(arm) is None]
    for name, pair in study.contrasts.items():
        fits = isinstance(pair, list) and len(pair) == 2 and all(one in single for one in pair)
        yield fits, f"contrasts.{name}", pair, "two arms of the study without a sweep, [of, less]"
    for task in study.tasks:
        where, budgets = f"tasks.{task.id}", list(task.budgets)
        fits = budgets == sorted(set(budgets)) and min(budgets, default=-1) >= 0
        yield fits, f"{where}.budgets", budgets, "rising numbers, such as [512, 1024]"
        for budget in study.focus:
            yield budget in budgets, "focus", budget, any_of(list(map(str, budgets)))
        for level in task.hard_levels:
            yield inside(level, _LEVELS), f"{where}.hard_levels", level, range_text(_LEVELS)
    for arm in study.arms:
        where, k = f"arms.{arm.id}", arm.votes
        fits = not arm.parts or "ablation" in views
        yield fits, f"{where}.parts", list(arm.parts), "none, or the view ablation"
        fits = arm.id not in single or not {"scale", "sensitivity"} & views
        yield fits, f"{where}.sweep", None, "the key and its values"
        fits = arm.of is None or (arm.of in arms and arms[arm.of].of is None)
        yield fits, f"{where}.of", arm.of, "an arm with runs"
        fits = (k is None) == (arm.of is None)
        yield fits, where, k, "both votes and of: the arm whose samples vote"
        drawn = study.samples_of(arms[arm.of or arm.id])
        yield inside(drawn, _SAMPLES), f"{where}.samples", drawn, range_text(_SAMPLES)
        # Those that an evaluation has.
        fits = k is None or (2 <= k <= drawn and (k == drawn or k.bit_count() == 1))
        yield fits, f"{where}.votes", k, f"a power of 2, up to {drawn}, or {drawn}, all samples"
        if k and arm.accounting == "matched_total":
            fits = matched.setdefault(arm.of, k) == k
            yield fits, f"{where}.votes", k, f"{matched[arm.of]}, as another vote over {arm.of}"
            for task in study.tasks:
                fits = min(filter(None, task.budgets), default=0) >= k
                write = f"{k} or more, a token for each vote of {arm.id}"
                yield fits, f"tasks.{task.id}.budgets", list(task.budgets), write
