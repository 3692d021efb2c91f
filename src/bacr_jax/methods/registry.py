"""Methods by name: those of this room, and files and modules of one's own."""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config.derived import reward_shares
from bacr_jax.config.own_code import guarded, module_of_file
from bacr_jax.documents import nearest
from bacr_jax.errors import UserError
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut
from bacr_jax.methods.published import departures, redefinitions

# Modules of this room that are no methods.
_NO_METHODS = (
    *("__init__", "bacr_settings", "budget_prior", "grpo_family", "method", "published"),
    *("registry", "reward_terms"),
)


def built_in_methods() -> list[str]:
    """Names of the methods that come with the package: the modules of this room."""
    names = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(name for name in names if name not in _NO_METHODS)


def load_method(config: Config) -> Method:
    """The method that `config.method` names.

    A built-in by name; your own as the path of a Python file, or as a module path, with a function
    `make(config) -> Method`.
    """
    method = make_method(config)
    for problem in redefinitions(config, method.published):
        raise UserError(problem)
    if method.conditioned and not method.held:
        raise UserError(
            f"method={config.method}: found conditioned=True with held=False; an embedding tells "
            "budgets that are held, so write conditioned=False and conditioning.told=words"
        )
    return overlong_filtered(method) if config.loss.overlong_filter else method


def overlong_filtered(method: Method) -> Method:
    """The method without the traces in its loss that the budget cut (DAPO's overlong filtering)."""

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        found = method.advantages(state, batch, rewards, values)
        keep = batch.closed if found.keep is None else found.keep & batch.closed
        return dataclasses.replace(found, keep=keep)

    return dataclasses.replace(method, advantages=advantages)


def declares_budget(config: Config) -> bool:
    """Whether responses under the config's method open with a budget; its loss does not matter."""
    return make_method(config).declares_budget


def built_in_departures(config: Config) -> list[str]:
    """Where a config departs from its method's publication; a method of one's own is not loaded."""
    ours = config.method in built_in_methods()
    return departures(config, load_method(config)) if ours else []


def advice(config: Config) -> list[str]:
    """What the settings of a method of this room would do better with; a run says it."""
    if config.method not in built_in_methods():
        return []
    return list(getattr(_module(config.method), "advice", lambda _: ())(config))


def problems(config: Config) -> Iterator[str]:
    """What is wrong with `config.method` and the settings that it reads, one line each.

    Looks at no device. Methods of one's own are loaded, and asked, when a run starts.
    """
    if config.reward.apart and config.method != "grpo":
        yield (
            f"reward.apart=true: method={config.method} doesn't divide rewards by their deviation "
            "in the group; write method=grpo, or reward.apart=false"
        )
    if config.method not in built_in_methods():
        yield from _name_problems(config.method)
        return
    module = _module(config.method)
    if own := list(getattr(module, "problems", lambda _: ())(config)):
        yield from own
        return
    method = module.make(config)
    yield from _ahead_problems(config, method)
    yield from redefinitions(config, method.published)
    if method.pays_by_verdicts and reward_shares(config):
        yield (
            f"reward.weights: method={config.method} pays by whether an answer is right, which a "
            "mixture of rewards doesn't say; write {}, or another method such as grpo"
        )


def _ahead_problems(config: Config, method: Method) -> Iterator[str]:
    if config.rollout.ahead and method.dynamic_sampling is not None:
        yield (
            f"rollout.ahead=1: how often {method.name} samples on is known once answers are "
            "graded; write dapo.dynamic_sampling=false, or 0"
        )


def make_method(config: Config) -> Method:
    """What the method's own `make` gives, whether or not the config redefines it."""
    name = config.method
    make = getattr(_module(name), "make", None)
    if not callable(make):
        raise UserError(
            f"method: {name!r} has no function make(config); write one that returns a Method"
        )
    ours = name in built_in_methods()
    method = make(config) if ours else guarded("method", name, "make(config)", lambda: make(config))
    if not isinstance(method, Method):
        raise UserError(
            f"method: make(config) of {name!r} returned {type(method).__name__}, "
            "not a Method; return one"
        )
    for problem in _ahead_problems(config, method):
        raise UserError(problem)
    # One's own may be made from a built-in one, but is another.
    return method if ours else dataclasses.replace(method, published={})


def _name_problems(name: str) -> Iterator[str]:
    """A `method` that is neither here, nor a file, nor a module."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            write = nearest(Path(name), "the path of a Python file with make(config)")
            yield f"method: no file {name!r}; write {write}"
        return
    parts = name.split(".")
    importable = False
    if all(part.isidentifier() for part in parts):
        with contextlib.suppress(ImportError, ValueError):
            importable = importlib.util.find_spec(parts[0]) is not None
    if not importable:
        known = built_in_methods()
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        choice = near[0] if near else f"one of {', '.join(known)}"
        if name in ("cot", "self_consistency"):
            choice = "bacr evaluate, since it trains nothing"
        yield (
            f"method: found {name!r}, neither a method here nor an importable module; write "
            f"{choice}, or the path of a Python file or module with a function make(config)"
        )


def _module(name: str) -> Any:
    """The module of a method."""
    path_of = f"bacr_jax.methods.{name}" if name in built_in_methods() else name
    try:
        if name.endswith(".py"):
            return module_of_file("method", name)
        return guarded("method", name, "the import", lambda: importlib.import_module(path_of))
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"method: can't import {name!r} ({error}); write one of "
            f"{', '.join(built_in_methods())}, or the path of a Python file with a function "
            "make(config)"
        ) from None
