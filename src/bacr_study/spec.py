"""A study as its file states it: which runs there are, how they are evaluated, what is drawn.

A file in `configs/studies/` has the keys of `Study`; `sizes` holds, by name, keys that replace
those at the top (`cpu`, `gpu`, `7b`). Paths of configs are relative to the file. It is read
strictly: every refusal says where, what was found and what to write.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.reader import read_dataclass, refusal
from bacr_jax.config.values import any_of, shown
from bacr_jax.config.yaml import Parsed, parse_file, parse_override
from bacr_study.info import Part, View


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

    def settings(self) -> dict[Any, Mapping[str, Any]]:
        """Keys of the config by value, or by the name of what varies."""
        if isinstance(self.values, Mapping):
            return {name: keys or {} for name, keys in self.values.items()}
        return {value: {self.key: value} for value in self.values}


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
      parts: the four parts of BACR that are on, for ablations.
      marked: the paper has this row.
    """

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
    views: tuple[View, ...] = ("accuracy",)
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
    made = {}
    for name, value in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise refusal(where, f"found the name {shown(name)}", "letters, digits, _ + and -")
        made[name] = _with_sweep(cls, value, f"{where}.{name}")
    return made


def _with_sweep(cls: Any, parsed: Any, where: str, given: Mapping[str, Any] | None = None) -> Any:
    """`read_dataclass` of one that may hold a `Sweep`."""
    given = dict(given or {})
    if isinstance(parsed, Mapping) and parsed.get("sweep") is not None:
        sweep = read_dataclass(Sweep, parsed["sweep"], f"{where}.sweep")
        if not isinstance(sweep.values, list | Mapping) or not sweep.values:
            found = f"found {shown(sweep.values)}"
            raise refusal(f"{where}.sweep.values", found, "a list, or keys by name")
        given["sweep"] = sweep
        parsed = {key: value for key, value in parsed.items() if key != "sweep"}
    return read_dataclass(cls, parsed, where, given=given)


def merged(path: Path, size: str | None) -> tuple[dict[str, Any], str]:
    """The keys of a size over those at the top of a file, mappings key by key; and the size.

    UserError: the file can't be read, or has no such size.
    """
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
        both = isinstance(value, Mapping) and isinstance(document.get(key), Mapping)
        document[key] = {**document[key], **value} if both else value
    document.pop("kind", None)
    return document, chosen


def overridden(text: str) -> tuple[str, Any]:
    """Key and value of `key=value` on the command line."""
    given = parse_override(text, "command line")
    return given.prefix[:-1], _constructed(given)


def _constructed(parsed: Parsed) -> Any:
    return parsed.node and parsed.loader.construct_document(parsed.node)


def _document(path: Path) -> dict[str, Any]:
    """The keys at the top of a study's file."""
    return dict(_constructed(parse_file(path)) or {})


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
    keys, chosen = merged(path, size)
    every = [*(keys.get("arms") or {})]
    own = {f.name for f in dataclasses.fields(Study)} - {"name", "size", "folder"}
    for key, value in map(overridden, overrides):
        if key in ("arms", "tasks") and isinstance(value, list):
            keys[key] = _chosen(keys.get(key, {}), value, key)
        elif key in own:
            keys[key] = value
        else:
            keys["set"] = {**keys.get("set", {}), key: value}
    where = str(path)
    nested = {
        "tasks": _named(Task, keys.pop("tasks", None), f"{where}: tasks"),
        "arms": _named(Arm, keys.pop("arms", None), f"{where}: arms"),
        "evaluation": read_dataclass(
            Evaluation, keys.pop("evaluation", {}), f"{where}: evaluation"
        ),
        "name": path.stem,
        "size": chosen,
        "folder": path.parent,
    }
    study: Study = _with_sweep(Study, keys, where, nested)
    for place, found, write in _misfits(study, every):
        raise refusal(f"{where}: {place}", f"found {shown(found)}", write)
    return study


def _chosen(known: Mapping[str, Any], names: Sequence[Any], key: str) -> dict[str, Any]:
    """Some of the arms or tasks, in the order of the file."""
    for name in names:
        if name not in known:
            raise refusal(f"command line: {key}", f"found {shown(name)}", any_of(list(known)))
    return {name: value for name, value in known.items() if name in names}


def _misfits(study: Study, every: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """What does not fit together: where, what is there and what to write.

    Args:
      every: arms of the file, chosen or not.
    """
    if not study.seeds or len(set(study.seeds)) < len(study.seeds):
        yield "seeds", list(study.seeds), "different seeds"
    for name, keys in study.own.items():
        if name not in every:
            yield "own", name, any_of(every)
        if not isinstance(keys, Mapping):
            yield f"own.{name}", keys, "a mapping of config keys"
    for name in set(study.reference) - set(every):
        yield "reference", name, any_of(every)
    if "contrasts" in study.views and not study.contrasts:
        yield "contrasts", None, "pairs of arms by name"
    for name, pair in study.contrasts.items():
        if not (isinstance(pair, list) and len(pair) == 2 and set(pair) <= set(study.arms)):
            yield f"contrasts.{name}", pair, "two arms of the study, [of, less]"
    for name, task in study.tasks.items():
        budgets = list(task.budgets)
        if not budgets or budgets != sorted(set(budgets)) or budgets[0] < 0:
            yield f"tasks.{name}.budgets", budgets, "rising numbers, such as [512, 1024]"
        for budget in set(study.focus) - set(budgets):
            yield "focus", budget, any_of(list(map(str, budgets)))
    for name, arm in study.arms.items():
        if arm.parts and "ablation" not in study.views:
            yield f"arms.{name}.parts", list(arm.parts), "none, or the view ablation"
        if {"scale", "sensitivity"} & set(study.views) and study.sweep_of(name) is None:
            yield f"arms.{name}.sweep", None, "the key and its values"
        if arm.of is not None and (arm.of not in study.arms or study.arms[arm.of].of):
            yield f"arms.{name}.of", arm.of, "an arm with runs"
        if (arm.votes is None) != (arm.of is None):
            yield f"arms.{name}", arm.votes, "both votes and of: the arm whose samples vote"
        drawn = study.samples_of(arm.of or name)
        if arm.votes is not None and not 2 <= arm.votes <= drawn:
            yield f"arms.{name}.votes", arm.votes, f"2 to {drawn}, the number of samples"
