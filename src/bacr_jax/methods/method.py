"""What a method is: pure functions that the loop calls in the order of Algorithm 1."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config import Config
from bacr_jax.config.methods import EVALUATION_ONLY, built_in_methods, loss_problems
from bacr_jax.curriculum import CurriculumState
from bacr_jax.errors import UserError
from bacr_jax.types import pytree


@pytree
class Observed:
    """What a method may look at when it makes rewards of a batch.

    Attributes:
      questions: index of each question in the training set.
      budgets: thinking budget of each rollout, in tokens.
      cuts: truncation points, in tokens.
      outcomes: correctness at each cut in [0, 1], averaged over the answers of a cut.
      by_answer: correctness of every answer of a cut.
      thinking: thinking tokens of each rollout.
      lengths: response tokens of each rollout: thinking and the answer at its end, without what
        was forced.
      closed: the thinking ended by itself, before the budget.
      fraction: share of training done, in [0, 1].
      extra: [Q, G] numbers that the method's own `read` found in the text.
    """

    questions: Int[Array, "Q"]
    budgets: Int[Array, "Q G"]
    cuts: Int[Array, "Q G M"]
    outcomes: Float[Array, "Q G M"]
    by_answer: Float[Array, "Q G M A"]
    thinking: Int[Array, "Q G"]
    lengths: Int[Array, "Q G"]
    closed: Bool[Array, "Q G"]
    fraction: Float[Array, ""]
    extra: dict[str, Array]


@pytree
class Credit:
    """Advantages as the learner wants them.

    Attributes:
      thinking: advantage of each thinking segment (tokens up to cut j, after cut j - 1).
      answers: advantage of the answers at each cut, before answers that serve several cuts are
        summed; [Q, G, M], or one more axis with several answers per cut.
      baseline: what was subtracted from the rewards, for the metrics.
      keep: rollouts that count in the loss; None: all.
    """

    thinking: Float[Array, "Q G M"]
    answers: Float[Array, "Q G M"] | Float[Array, "Q G M A"]
    baseline: Float[Array, "Q G M"]
    keep: Bool[Array, "Q G"] | None = None


def no_state(num_questions: int) -> None:
    """State of a method that remembers nothing."""
    return


def unchanged(
    state: Any, seen: Observed, rewards: Float[Array, "Q G M"], values: Float[Array, "Q G M"] | None
) -> Any:
    """The state as it was."""
    return state


def no_metrics(state: Any, seen: Observed) -> dict[str, Array]:
    """No metrics of its own."""
    return {}


@dataclass(frozen=True)
class Resampling:
    """Sampling more questions until enough are of use (DAPO's dynamic sampling).

    Attributes:
      keep: `Observed` -> questions of use [Q].
      max_rounds: most rounds of sampling in an iteration, the first one included.
    """

    keep: Callable[[Observed], Bool[Array, "Q"]]
    max_rounds: int


@dataclass(frozen=True)
class ColdStart:
    """A supervised stage before training, on the policy's own correct responses.

    Attributes:
      questions: training questions answered once; None: all.
      steps: supervised steps.
      learning_rate: their constant rate.
      batch_tokens: tokens per step, padding included.
      opening: length of a response in tokens -> text put before it, to be learned.
      remember: (state, lengths [n], correct [n]) -> state; lengths are 0 where nothing was asked.
    """

    questions: int | None
    steps: int
    learning_rate: float
    batch_tokens: int
    opening: Callable[[int], str]
    remember: Callable[[Any, np.ndarray, np.ndarray], Any]


@dataclass(frozen=True, eq=False)
class Method:
    """A training method as a composition of pure functions.

    The functions on arrays are jitted by the loop, with the method as a static argument (equal to
    itself alone); `state` is the method's own pytree, saved with every checkpoint.

    Attributes:
      name: for tables and logs.
      conditioned: the policy is told its budget.
      uses_value: a value head predicts rewards.
      question_weights: (curriculum, group sizes [K]) -> probability of each difficulty group [K].
      sample_budgets: (key, curriculum, groups [Q]) -> budgets [Q, G] in tokens.
      cuts: budgets [Q, G] -> truncation points [Q, G, M] in tokens, nondecreasing.
      rewards: (state, `Observed`) -> rewards [Q, G, M].
      advantages: (state, `Observed`, rewards, values or None) -> `Credit`.
      init_state: number of training questions -> state before training.
      update: (state, `Observed`, rewards, values or None) -> state after the batch.
      metrics: (state, `Observed`) -> scalars by `group/name`, from the state before the batch.
      answers: answers A sampled at every cut.
      resampling: when more questions are to be sampled; None: never.
      read: (tokenizer, sampled thinking ids by row) -> arrays [rows] for `Observed.extra`, on the
        host; None: the text is not looked at.
      cold_start: the method's own supervised stage before training; None: there is none.
      loss: what the method asks of `config.loss`, value or (comparison, value) by key; a config
        that says otherwise is refused.
    """

    name: str
    conditioned: bool
    uses_value: bool
    question_weights: Callable[[CurriculumState, Int[Array, "K"]], Float[Array, "K"]]
    sample_budgets: Callable[[Array, CurriculumState, Int[Array, "Q"]], Int[Array, "Q G"]]
    cuts: Callable[[Int[Array, "Q G"]], Int[Array, "Q G M"]]
    rewards: Callable[[Any, Observed], Float[Array, "Q G M"]]
    advantages: Callable[..., Credit]
    init_state: Callable[[int], Any] = no_state
    update: Callable[..., Any] = unchanged
    metrics: Callable[[Any, Observed], dict[str, Array]] = no_metrics
    answers: int = 1
    resampling: Resampling | None = None
    read: Callable[[Any, Sequence[Sequence[int]]], dict[str, Any]] | None = None
    cold_start: ColdStart | None = None
    loss: Mapping[str, Any] = field(default_factory=dict)


def load_method(config: Config) -> Method:
    """The method that `config.method` names.

    A built-in by name; your own as the path of a Python file, or as a module path, with a function
    `make(config) -> Method`.

    Raises:
      UserError: no such file or module, it has no `make`, or the config contradicts the method.
    """
    name = config.method
    if name in EVALUATION_ONLY:
        raise UserError(EVALUATION_ONLY[name])
    make = getattr(_module(name), "make", None)
    if not callable(make):
        raise UserError(
            f"method: {name!r} has no function make(config); write one that returns a Method"
        )
    ours = name in built_in_methods()
    method = make(config) if ours else _guarded(name, "make(config)", lambda: make(config))
    if not isinstance(method, Method):
        raise UserError(
            f"method: make(config) of {name!r} returned {type(method).__name__}, "
            "not a Method; return one"
        )
    for problem in loss_problems(config, method.loss):
        raise UserError(problem)
    return method


def _guarded(name: str, what: str, call: Callable[[], Any]) -> Any:
    """The result of somebody's code, or one line that says where it stumbled.

    Raises:
      ImportError, SyntaxError: its own.
      UserError: it raised something else, or tried to end the process.
    """
    try:
        return call()
    except (ImportError, SyntaxError, UserError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if Path(frame.filename).name == Path(name).name]
        last = [*frames, *theirs][-1]
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"method: {what} of {name!r} raised {type(error).__name__}: {reason} "
            f"({Path(last.filename).name}, line {last.lineno}); fix the file"
        ) from error


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"method: no file {name!r}; write the path of a Python file")
        spec = importlib.util.spec_from_file_location(f"bacr_method_{path.stem}", path.resolve())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        run = spec.loader.exec_module
        load: Callable[[], Any] = lambda: run(module) or module
    else:
        known = built_in_methods()
        path_of = f"bacr_jax.methods.{name}" if name in known else name
        load = lambda: importlib.import_module(path_of)
    try:
        return _guarded(name, "the import", load)
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"method: can't import {name!r} ({error}); write one of "
            f"{', '.join(built_in_methods())}, or the path of a Python file with a function "
            "make(config)"
        ) from None
