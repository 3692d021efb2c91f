"""What configs are checked for by method: names, and settings that contradict each other."""

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bacr_jax.config.schema import Config
from bacr_jax.config.values import written

# Methods that train nothing, and what to do with them.
EVALUATION_ONLY = {
    name: f"method={name}: trains nothing; write python -m bacr_jax.evaluate {how}"
    for name, how in (
        ("cot", "with the model's folder and its budgets"),
        ("self_consistency", "with several samples per question"),
    )
}
# The method whose responses open with a budget of their own.
SELF_BUDGETER = "selfbudgeter"
# Baselines and methods that compare the rollouts of one question with each other.
GROUP_BASELINES = ("group", "residual_loo", "shrink")
GROUP_METHODS = ("grpo", "dr_grpo", "rloo", "dapo", "hapo", "selfbudgeter")
# Modules of the room `methods` that are no methods of training.
_NO_METHODS = ("__init__", "method", "grpo_family", "baselines", *EVALUATION_ONLY)


def built_in_methods() -> list[str]:
    """Names of the methods that come with the package: the modules of its `methods` room."""
    # Importing that room would import JAX.
    folder = Path(__file__).parents[1] / "methods"
    return sorted(p.stem for p in folder.glob("*.py") if p.stem not in _NO_METHODS)


def method_name(config: Config) -> Iterator[str]:
    """A `method` that is neither here, nor a file, nor a module; or one that trains nothing."""
    name, known = config.method, built_in_methods()
    if name in EVALUATION_ONLY:
        yield EVALUATION_ONLY[name]
        return
    if name.endswith(".py"):
        if not Path(name).is_file():
            yield f"method: no file {name!r}; write the path of a Python file with make(config)"
        return
    parts = name.split(".")
    found = name in known
    if not found and all(part.isidentifier() for part in parts):
        try:
            found = importlib.util.find_spec(parts[0]) is not None
        except (ImportError, ValueError):
            found = False
    if not found:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        choice = near[0] if near else f"one of {', '.join(known)}"
        yield (
            f"method: found {name!r}, neither a method here nor an importable module; write "
            f"{choice}, or the path of a Python file or module with a function make(config)"
        )


def loss_problems(config: Config, wanted: Mapping[str, Any]) -> Iterator[str]:
    """What a method asks of `config.loss` and the config does not give.

    Args:
      config: the settings.
      wanted: value by key of the section, or (">", other key) for a value above that key's.
    """
    preset = f"configs/methods/{config.method}.yaml has it"
    for name, want in wanted.items():
        found = getattr(config.loss, name)
        if isinstance(want, tuple):
            other = getattr(config.loss, want[1])
            if not found > other:
                yield (
                    f"loss.{name}={written(found)}: method={config.method} needs more than "
                    f"loss.{want[1]}={written(other)}; write a larger one ({preset})"
                )
        elif found != want:
            yield (
                f"loss.{name}={written(found)}: method={config.method} is defined with "
                f"{written(want)}; write loss.{name}={written(want)} ({preset})"
            )


def steep_weights(config: Config) -> Iterator[str]:
    """Weights under which the objective pays for a wrong answer at some cut.

    The outcome at cut j has the coefficient (1 + lambda) w_j - lambda w_(j+1) in sum_j w_j R_j.
    """
    cuts, reward = config.cuts, config.reward
    if config.method != "bacr" or not reward.dense or cuts.count == 1:
        return
    shares = {
        "uniform": [1.0 / cuts.count] * cuts.count,
        "final_heavy": [0.3 / (cuts.count - 1)] * (cuts.count - 1) + [0.7],
        "own_budget": [0.0] * (cuts.count - 1) + [1.0],
    }
    weights = shares[cuts.weights] if isinstance(cuts.weights, str) else list(cuts.weights)
    if len(weights) != cuts.count:
        return
    for j, (weight, following) in enumerate(zip(weights, weights[1:])):
        if (1.0 + reward.coefficient) * weight - reward.coefficient * following < -1e-6:
            most = weight / (following - weight)
            yield (
                f"cuts.weights={written(cuts.weights)}: with reward.coefficient="
                f"{written(reward.coefficient)} a right answer at cut {j + 1} would be punished, "
                f"since losing it pays for progress at cut {j + 2}; write reward.coefficient of at "
                f"most {most:.3g}, reward.dense=false, or flatter weights such as "
                "[.12, .12, .16, .6]"
            )
            return


def method_settings(config: Config) -> Iterator[str]:
    """Settings of methods that contradict each other."""
    own, advantage = config.selfbudgeter, config.advantage
    for name in ("correct_range", "wrong_range"):
        found = getattr(own, name)
        if len(found) != 2 or found[0] > found[1]:
            yield f"selfbudgeter.{name}: found {written(found)}; write [low, high]"
            return
    if config.method == "selfbudgeter" and (
        own.correct_range[0] + own.budget_penalty < own.wrong_range[1]
    ):
        yield (
            f"selfbudgeter.budget_penalty={written(own.budget_penalty)}: a correct response could "
            "earn less than a wrong one; write at least "
            f"{written(own.wrong_range[1] - own.correct_range[0])}"
        )
    if advantage.history and advantage.credit not in ("to_go", "answer_literal"):
        yield (
            f"advantage.history=true: needs credit that starts at the segment, found "
            f"advantage.credit={advantage.credit}; write to_go"
        )


def single_rollouts(config: Config) -> Iterator[str]:
    """Comparisons of a question's rollouts where there is one."""
    if config.rollout.group_size > 1:
        return
    name, advantage = config.method, config.advantage
    comparing = {
        f"method={name}": name in GROUP_METHODS,
        f"advantage.baseline={advantage.baseline}": name == "bacr"
        and advantage.baseline in GROUP_BASELINES,
        f"advantage.normalise={advantage.normalise}": name == "bacr"
        and advantage.normalise == "group",
    }
    for what in (what for what, compares in comparing.items() if compares):
        yield (f"rollout.group_size=1: {what} compares the rollouts of a question; write 2 or more")


def problems(config: Config) -> Iterator[str]:
    """What is wrong with the settings of `config.method`, one line each."""
    for find in (method_name, single_rollouts, steep_weights, method_settings):
        yield from find(config)
