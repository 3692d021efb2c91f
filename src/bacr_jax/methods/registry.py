"""Looks up methods by name: built-in methods, and Python files and modules of users.

This module also checks a config for compatibility with its method before any device is used.
Training runs and the command line call this module.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.training_checks import loss_advice
from bacr_jax.config.user_modules import guarded, module_of_file
from bacr_jax.config.values import written
from bacr_jax.errors import UserError
from bacr_jax.files import nearest
from bacr_jax.methods.grpo_family import no_stages
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut
from bacr_jax.methods.published import departures, redefinitions, with_common

# Modules of this package that do not define a method.
_NO_METHODS = (
    *("__init__", "bacr_settings", "budget_prior", "grpo_family", "method", "published"),
    *("registry", "reward_terms"),
)
# Digests of the files of modules with user-defined methods when they were imported, by module name.
_module_digests: dict[str, str | None] = {}


def built_in_methods() -> list[str]:
    """Returns the names of the built-in methods, sorted alphabetically."""
    modules = [path.stem for path in Path(__file__).parent.glob("*.py")]
    return sorted(name for name in modules if name not in _NO_METHODS)


def load_method(config: MethodSettings) -> Method:
    """Loads the method specified by `config.method`.

    The value is the name of a built-in method, the path of a Python file, or an importable module.
    A file or module must define a function `make(config) -> Method`.

    Raises:
      UserError: If the method cannot be loaded or is incompatible with the config.
    """
    method = make_method(config)
    for problem in _method_problems(config, method):
        raise UserError(problem)
    if config.loss.overlong_filter:
        return overlong_filtered(method)
    return method


def overlong_filtered(method: Method) -> Method:
    """Returns a method that excludes truncated traces from the loss (DAPO's overlong filtering)."""

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        unfiltered = method.advantages(state, batch, rewards, values)
        keep = batch.closed
        if unfiltered.keep is not None:
            keep = unfiltered.keep & batch.closed
        return dataclasses.replace(unfiltered, keep=keep)

    return dataclasses.replace(method, advantages=advantages)


def declares_budget(config: MethodSettings) -> bool:
    """True if the responses of the config's method begin with a budget chosen by the policy.

    Unlike `load_method`, this function accepts configs that are incompatible with the method.
    """
    return make_method(config).declares_budget


def built_in_departures(config: MethodSettings) -> list[str]:
    """Lists the settings of a config that differ from its method's publication.

    The list is empty for user-defined methods, which are not loaded.
    """
    if config.method not in built_in_methods():
        return []
    return departures(config, load_method(config))


def advice(config: MethodSettings) -> list[str]:
    """Returns recommendations about the loss, and a built-in method's about the other settings.

    A training run prints them and continues.
    """
    lines = list(loss_advice(config.loss))
    if config.method in built_in_methods():
        module, _ = _module(config.method)
        if hasattr(module, "advice"):
            lines += module.advice(config)
    return lines


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each problem with `config.method` and the settings it uses.

    No device is used. User-defined methods are not loaded. `load_method` checks them when a
    training run starts.
    """
    if config.reward.normalize_each and config.method != "grpo":
        yield (
            f"reward.normalize_each=true: method={config.method} does not divide rewards by the "
            "standard deviation of their group, so the rewards can't be normalized one by one; "
            "set method=grpo, or reward.normalize_each=false"
        )
    if config.method not in built_in_methods():
        yield from _name_problems(config.method)
        return
    module, _ = _module(config.method)
    method_problems = list(module.problems(config)) if hasattr(module, "problems") else []
    if method_problems:
        yield from method_problems
        return
    method = module.make(config)
    yield from _ahead_problems(config, method)
    yield from _method_problems(config, method)


def _method_problems(config: MethodSettings, method: Method) -> Iterator[str]:
    """Yields an error message for each setting that a method does not support."""
    yield from redefinitions(config, method.published)
    yield from _stage_problems(config, method)
    yield from _teacher_problems(config, method)
    yield from _verdict_problems(config, method)
    yield from _embedding_problems(config, method)
    yield from _shuffled_input_problems(config, method)


def _ahead_problems(config: MethodSettings, method: Method) -> Iterator[str]:
    """Yields an error message if dynamic sampling is combined with asynchronous rollouts."""
    if config.rollout.async_steps and method.dynamic_sampling is not None:
        yield (
            f"rollout.async_steps=1: {method.name} decides only after grading whether to sample "
            "more questions, so the next batch can't be sampled in advance; set "
            "dapo.dynamic_sampling=false, or rollout.async_steps=0"
        )


def _stage_problems(config: MethodSettings, method: Method) -> Iterator[str]:
    """Yields an error message if `budget.stages` is set but budgets do not truncate traces."""
    if not method.truncates_at_budget:
        yield from no_stages(
            config,
            "truncates traces at budget.max and not at their budgets, so stages have no effect",
        )


def _teacher_problems(config: MethodSettings, method: Method) -> Iterator[str]:
    """Yields an error message if the policy is its own teacher but gets no budget embedding.

    The teacher would then not differ from the policy, or would receive the trace's budget in the
    prompt.
    """
    distill = config.distill
    if distill.coef == 0.0 or distill.teacher is not None:
        return
    budget_input = config.conditioning.budget_input
    if not method.conditioned or budget_input != "embedding":
        yield (
            f"distill.coef={written(distill.coef)}: with distill.teacher=null, the teacher is the "
            "policy itself with the embedding of the largest budget, but this policy has no "
            f"budget embedding (conditioning.budget_input={budget_input}, "
            f"method={config.method}); set distill.teacher=FOLDER, or "
            "conditioning.budget_input=embedding with method=bacr"
        )


def _verdict_problems(config: MethodSettings, method: Method) -> Iterator[str]:
    """Yields an error message if a method that depends on correctness gets a sum of rewards."""
    if method.pays_by_verdicts and config.reward_shares:
        yield (
            f"reward.weights: method={config.method} needs to know whether an answer is right, "
            "which a weighted sum of rewards does not show; set reward.weights={}, or use "
            "another method such as grpo"
        )


def _embedding_problems(config: MethodSettings, method: Method) -> Iterator[str]:
    """Yields an error message if a budget is embedded that does not truncate its trace."""
    if method.conditioned and not method.truncates_at_budget:
        yield (
            f"method={config.method}: make(config) returned conditioned=True with "
            "truncates_at_budget=False, but a budget embedding needs traces that are truncated "
            "at their budget; return conditioned=False, and set conditioning.budget_input=prompt"
        )


def _shuffled_input_problems(config: MethodSettings, method: Method) -> Iterator[str]:
    """Yields an error message if the method does not support `budget.shuffle_input`.

    The input budget of a trace then differs from the budget at which the trace is truncated. A
    value head and score norms do not support this, because they are computed with one budget.
    """
    if not config.budget.shuffle_input:
        return
    reason = ""
    if not method.truncates_at_budget:
        reason = "truncates no trace at its budget"
    elif method.uses_value:
        reason = "has a value head, which receives the budget too"
    elif method.needs_score_norms:
        reason = "needs score norms, which are computed with the budget of the trace"
    if reason:
        yield (
            f"budget.shuffle_input=true: method={config.method} {reason}; set "
            "budget.shuffle_input=false, or use another method or advantage.baseline"
        )


def make_method(config: MethodSettings) -> Method:
    """Builds the method specified by `config.method` without checking its compatibility.

    Raises:
      UserError: If the module cannot be imported or has no `make`, if `make` fails or does not
        return a `Method`, or if dynamic sampling is combined with asynchronous rollouts.
    """
    name = config.method
    module, digest = _module(name)
    make = getattr(module, "make", None)
    if not callable(make):
        raise UserError(
            f"method: {name!r} does not define the function make(config), which returns a Method; "
            "add it"
        )
    is_built_in = name in built_in_methods()
    if is_built_in:
        method = make(config)
    else:
        method = guarded("method", name, "make(config)", lambda: make(config))
    if not isinstance(method, Method):
        raise UserError(
            f"method: make(config) of {name!r} returned an object of the type "
            f"{type(method).__name__}; return a Method"
        )
    for problem in _ahead_problems(config, method):
        raise UserError(problem)
    if is_built_in:
        return dataclasses.replace(method, published=with_common(method.published))
    # A user-defined method can be derived from a built-in method but is not the published method.
    return dataclasses.replace(method, published={}, source_digest=digest)


def _name_problems(name: str) -> Iterator[str]:
    """Yields an error message if `name` is not a built-in method, an existing file or a module."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            suggestion = nearest(Path(name), "the path of a Python file with make(config)")
            yield f"method: there is no file {name!r}; use {suggestion}"
        return
    if _is_importable(name):
        return
    yield (
        f"method: {name!r} is neither a built-in method nor an importable module; use "
        f"{_suggestion(name)}, or the path of a Python file or module with a function make(config)"
    )


def _is_importable(name: str) -> bool:
    """True if Python can find the top-level package of a dotted name. Nothing is imported."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    try:
        return importlib.util.find_spec(parts[0]) is not None
    except (ImportError, ValueError):
        return False


def _suggestion(name: str) -> str:
    """Returns a suggested replacement for an unknown method name."""
    if name in ("cot", "self_consistency"):
        return "bacr evaluate, because this method does not train"
    choices = built_in_methods()
    similar_names = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.4)
    if similar_names:
        return similar_names[0]
    return f"one of {', '.join(choices)}"


def _module(name: str) -> tuple[ModuleType, str | None]:
    """Imports the module of a method.

    Returns:
      The module, and the digest of the code that was imported: None for a built-in method, and for
      a module that was imported elsewhere before, because its file may have changed since.

    Raises:
      UserError: If the module cannot be imported or raises an error during import.
    """
    is_built_in = name in built_in_methods()
    module_path = f"bacr_jax.methods.{name}" if is_built_in else name
    was_imported = module_path in sys.modules
    try:
        if name.endswith(".py"):
            # A file is executed again each time.
            module = module_of_file("method", name)
            return module, _digest_of_file(module)
        importing = functools.partial(importlib.import_module, module_path)
        module = guarded("method", name, "the import", importing)
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"method: {name!r} can't be imported ({error}); use one of "
            f"{', '.join(built_in_methods())}, or the path of a Python file with a function "
            "make(config)"
        ) from None
    if is_built_in:
        return module, None
    if not was_imported:
        _module_digests[name] = _digest_of_file(module)
    return module, _module_digests.get(name)


def _digest_of_file(module: ModuleType) -> str | None:
    """Returns the digest of a module's source file, or None for a module without a file."""
    file = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else None
