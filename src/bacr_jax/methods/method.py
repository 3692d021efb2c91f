"""What a method is: five pure functions, called by the loop in the order of Algorithm 1."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.errors import UserError
from bacr_jax.types import pytree

BUILT_IN = ("bacr", "grpo")


@pytree
class Credit:
    """Advantages as the learner wants them.

    Attributes:
      thinking: advantage of each thinking segment (tokens up to cut j, after cut j - 1).
      answers: advantage of the answer at each cut, before answers that serve several cuts are
      summed. baseline: what was subtracted from the rewards, for the metrics.
    """

    thinking: Float[Array, "Q G M"]
    answers: Float[Array, "Q G M"]
    baseline: Float[Array, "Q G M"]


@dataclass(frozen=True)
class Method:
    """A training method as a composition of pure functions.

    Attributes:
      name: for tables and logs.
      conditioned: the policy is told its budget.
      uses_value: a value head predicts rewards.
      question_weights: (curriculum, group sizes [K]) -> probability of each difficulty group [K].
      sample_budgets: (key, curriculum, groups [Q]) -> budgets [Q, G] in tokens.
      cuts: budgets [Q, G] -> truncation points [Q, G, M] in tokens, the last one is the budget.
      rewards: outcomes [Q, G, M] in [0, 1] -> rewards [Q, G, M].
      advantages: (outcomes, rewards, values or None) -> `Credit`.
    """

    name: str
    conditioned: bool
    uses_value: bool
    question_weights: Callable[[CurriculumState, Int[Array, "K"]], Float[Array, "K"]]
    sample_budgets: Callable[[Array, CurriculumState, Int[Array, "Q"]], Int[Array, "Q G"]]
    cuts: Callable[[Int[Array, "Q G"]], Int[Array, "Q G M"]]
    rewards: Callable[[Float[Array, "Q G M"]], Float[Array, "Q G M"]]
    advantages: Callable[..., Credit]


def load_method(config: Config) -> Method:
    """The method that `config.method` names: a built-in, or a module path with `make(config)`.

    Raises:
      UserError: no such module, or it has no `make`.
    """
    name = config.method
    path = f"bacr_jax.methods.{name}" if name in BUILT_IN else name
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise UserError(
            f"method: can't import {name!r} ({error}); write one of {', '.join(BUILT_IN)} or the "
            "path of a Python module with a function make(config)"
        ) from None
    if not hasattr(module, "make"):
        raise UserError(f"method: module {name!r} has no function make(config) -> Method")
    method = module.make(config)
    if not isinstance(method, Method):
        raise UserError(f"method: {name}.make returned {type(method).__name__}, not a Method")
    return method
