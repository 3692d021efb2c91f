"""A study as its file states it: which runs there are, how they are evaluated, what is drawn.

A file in `configs/studies/` has the keys of `Study`; `sizes` holds, by name, keys that replace
those at the top (`cpu`, `gpu`, `7b`). Paths of configs are relative to the file. It is read
strictly: every refusal says where, what was found and what to write.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.derived import read_budgets
from bacr_jax.config.reader import read_dataclass, refusal
from bacr_jax.config.values import any_of, shown
from bacr_jax.config.yaml import parse_file, parse_override
from bacr_study.info import PARTS, VIEWS


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
        keys = [item for layer in layers for item in layer.items()]
        return config_io.override(_loaded(files), [f"{k}={json.dumps(v)}" for k, v in keys])


@functools.lru_cache(maxsize=64)
def _loaded(files: tuple[Path, ...]) -> Config:
    """The config of files that many runs start from."""
    return config_io.load(files)


# --- the file -------------------------------------------------------------------------------------

# Names become parts of file names and of identifiers.
_NAME = re.compile(r"[A-Za-z0-9_+-]+")


def _named(cls: Any, given: Any, where: str) -> dict[str, Any]:
    """A mapping from names to dataclasses."""
    if not isinstance(given, Mapping) or not given:
        raise refusal(where, f"found {shown(given)}", "at least one, by name")
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise refusal(where, f"found the name {shown(name)}", "letters, digits, _ + and -")
    made = {}
    for name, value in given.items():
        nested = {}
        if cls is Arm and isinstance(value, Mapping):
            nested["sweep"] = _sweep(value.get("sweep"), f"{where}.{name}.sweep")
            value = {key: item for key, item in value.items() if key != "sweep"}
        made[name] = read_dataclass(cls, value, f"{where}.{name}", given=nested)
    return made


def _merged(document: dict[str, Any], path: Path, size: str | None) -> tuple[dict[str, Any], str]:
    """The keys of a size over those at the top, mappings key by key."""
    sizes = document.pop("sizes", None)
    if not isinstance(sizes, Mapping) or not sizes:
        raise refusal(f"{path}: sizes", f"found {shown(sizes)}", "at least one, by name")
    chosen = next(iter(sizes)) if size is None else size
    if chosen not in sizes:
        raise refusal("--size", f"found {shown(chosen)}", any_of([str(name) for name in sizes]))
    over = sizes[chosen] or {}
    if not isinstance(over, Mapping):
        raise refusal(f"{path}: sizes.{chosen}", f"found {shown(over)}", "keys of a study")
    merged = dict(document)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = {**merged[key], **value} if both else value
    return merged, chosen


def _document(path: Path) -> dict[str, Any]:
    """The keys at the top of a study's file."""
    parsed = parse_file(path)
    return {} if parsed.node is None else dict(parsed.loader.construct_document(parsed.node))


def kind_of(path: Path) -> str:
    """What a study's file is: `runs`, unless it says otherwise (`kind: variance`).

    UserError: it can't be read.
    """
    kind = _document(path).get("kind", "runs")
    if kind not in ("runs", "variance"):
        raise refusal(f"{path}: kind", f"found {shown(kind)}", "runs or variance")
    return str(kind)


def read_study(path: Path, *, size: str | None = None, overrides: Sequence[str] = ()) -> Study:
    """Reads and checks a study; no run's config is resolved yet.

    Args:
      overrides: `seeds=[0]` and other keys of `Study`; any other key belongs to the runs.

    UserError: what can't be used, in one line.
    """
    merged, chosen = _merged(_document(path), path, size)
    merged.pop("kind", None)
    _check_own(merged, str(path))
    every = [*(merged.get("arms") or {})]
    own = {f.name for f in dataclasses.fields(Study)} - {"name", "size", "folder"}
    for text in overrides:
        given = parse_override(text, "command line")
        key = given.prefix[:-1]
        value = None if given.node is None else given.loader.construct_document(given.node)
        if key in ("arms", "tasks") and isinstance(value, list):
            merged[key] = _chosen(merged.get(key, {}), value, key)
        elif key in own:
            merged[key] = value
        else:
            merged["set"] = {**merged.get("set", {}), key: value}
    where = str(path)
    nested = {
        "tasks": _named(Task, merged.pop("tasks", None), f"{where}: tasks"),
        "arms": _named(Arm, merged.pop("arms", None), f"{where}: arms"),
        "evaluation": read_dataclass(
            Evaluation, merged.pop("evaluation", {}), f"{where}: evaluation"
        ),
        "sweep": _sweep(merged.pop("sweep", None), f"{where}: sweep"),
        "name": path.stem,
        "size": chosen,
        "folder": path.parent,
    }
    study: Study = read_dataclass(Study, merged, where, given=nested)
    _check(study, where, every)
    return study


def _check_own(merged: Mapping[str, Any], where: str) -> None:
    """Refuses keys of an arm that is not there."""
    own, arms = merged.get("own") or {}, merged.get("arms") or {}
    for name, keys in own.items() if isinstance(own, Mapping) else ():
        if name not in arms:
            raise refusal(f"{where}: own", f"found {shown(name)}", any_of(list(map(str, arms))))
        if not isinstance(keys, Mapping):
            raise refusal(
                f"{where}: own.{name}", f"found {shown(keys)}", "a mapping of config keys"
            )


def _sweep(given: Any, where: str) -> Sweep | None:
    """What is varied; None where nothing is."""
    if given is None:
        return None
    built: Sweep = read_dataclass(Sweep, given, where)
    lists = isinstance(built.values, list) and built.values
    names = isinstance(built.values, Mapping) and built.values
    if not (lists or names):
        raise refusal(f"{where}.values", f"found {shown(built.values)}", "a list, or keys by name")
    return built


def _chosen(known: Mapping[str, Any], names: Sequence[Any], key: str) -> dict[str, Any]:
    """Some of the arms or tasks, in the order of the file."""
    for name in names:
        if name not in known:
            raise refusal(f"command line: {key}", f"found {shown(name)}", any_of(list(known)))
    return {name: value for name, value in known.items() if name in names}


def _check(study: Study, where: str, every: Sequence[str]) -> None:
    """Refuses what does not fit together; `every` arm of the file, chosen or not."""
    if not study.seeds or len(set(study.seeds)) < len(study.seeds):
        raise refusal(f"{where}: seeds", f"found {list(study.seeds)}", "different seeds")
    for name in study.views:
        if name not in VIEWS:
            raise refusal(f"{where}: views", f"found {shown(name)}", any_of(VIEWS))
    for name in study.reference:
        if name not in every:
            raise refusal(f"{where}: reference", f"found {shown(name)}", any_of(every))
    if "contrasts" in study.views and not study.contrasts:
        raise refusal(f"{where}: contrasts", "found none", "pairs of arms by name")
    for name, pair in study.contrasts.items():
        if not (isinstance(pair, list) and len(pair) == 2 and set(pair) <= set(study.arms)):
            found = f"found {shown(pair)}"
            raise refusal(f"{where}: contrasts.{name}", found, "two arms of the study, [of, less]")
    for name, task in study.tasks.items():
        if not task.budgets:
            raise refusal(f"{where}: tasks.{name}", "has no budgets", "budgets: [512, 1024]")
        read_budgets(",".join(map(str, task.budgets)), option="budgets", levels={})
        if list(task.budgets) != sorted(set(task.budgets)):
            place = f"{where}: tasks.{name}.budgets"
            raise refusal(place, f"found {list(task.budgets)}", "rising numbers")
        for budget in set(study.focus) - set(task.budgets):
            known = any_of(list(map(str, task.budgets)))
            raise refusal(f"{where}: focus", f"found {budget}", known)
    parts = PARTS if "ablation" in study.views else ()
    for name, arm in study.arms.items():
        if set(arm.parts or ()) - set(parts):
            write = any_of(parts) if parts else "none, or the view ablation"
            raise refusal(f"{where}: arms.{name}.parts", f"found {list(arm.parts or ())}", write)
        if {"scale", "sensitivity"} & set(study.views) and study.sweep_of(name) is None:
            raise refusal(f"{where}: arms.{name}.sweep", "found none", "the key and its values")
        if arm.of is not None and (arm.of not in study.arms or study.arms[arm.of].of):
            raise refusal(f"{where}: arms.{name}.of", f"found {shown(arm.of)}", "an arm with runs")
        if arm.accounting not in ("per_sample", "matched_total"):
            raise refusal(
                f"{where}: arms.{name}.accounting",
                f"found {shown(arm.accounting)}",
                "per_sample or matched_total",
            )
        if (arm.votes is None) != (arm.of is None):
            raise refusal(
                f"{where}: arms.{name}", "a vote names the arm whose samples vote", "votes and of"
            )
        drawn = study.samples_of(arm.of or name)
        if arm.votes is not None and not 2 <= arm.votes <= drawn:
            raise refusal(
                f"{where}: arms.{name}.votes",
                f"found {arm.votes}",
                f"2 to {drawn}, the number of samples",
            )
