"""Loads policies in notebooks and scripts with `load` and `Policy`.

The functions here set defaults and delegate to public functions of other modules.

    import bacr_jax

    settings = {"train.steps": 20, "output.dir": "runs/notebook"}
    done = bacr_jax.train("quickstart", settings, callbacks=[print])
    policy = bacr_jax.load(done.folder)
    for answer in policy.generate(["7a2b3"], budget=[8, 64]):
        print(answer.budget, answer.thinking, answer.answer)
"""

import contextlib
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config.cli import silence_orbax
from bacr_jax.config.derived import NONE
from bacr_jax.config.io import Overrides, override_texts
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.evaluation.ask import Answer, ResponseScore, Session
from bacr_jax.evaluation.overrides import ASKED_KEYS
from bacr_jax.files import expand_home
from bacr_jax.generate import AskOptions, budgets_of, open_session
from bacr_jax.runs.folder import RunPaths

# Config keys that `load` can override: the keys of `bacr generate`, and the defaults of
# `Policy.generate`.
_KEYS = (*ASKED_KEYS, "eval.temperature", "eval.top_p")
# A thinking budget: a number of tokens, a name that `budget.levels` maps to a number, or None for
# no budget.
Budget = int | str | None


class Policy:
    """A loaded policy. Its weights and compiled programs are reused by all calls.

    Attributes:
      folder: run folder or Hugging Face folder of the policy.
      step: training step of the checkpoint, or None for a Hugging Face folder.
      config: config that defines how prompts are built and answers are sampled.
    """

    def __init__(self, session: Session):
        """Wraps an open session. Users create a policy with `load` instead."""
        self._session = session
        self.folder: Path = session.saved.folder
        self.step: int | None = session.saved.step
        self.config: Config = session.saved.config

    def __repr__(self) -> str:
        return f"Policy({self._session.saved.name})"

    def generate(
        self,
        questions: str | Sequence[str],
        budget: Budget | Sequence[Budget],
        *,
        samples: int = 1,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[Answer]:
        """Generates answers to every question at every budget.

        Args:
          questions: one question, or several.
          budget: one or several thinking budgets. Each is a number of tokens, a name from
            `budget.levels`, or None for no budget. Without a budget, the thinking is limited to
            `budget.cap` tokens.
          samples: number of answers per question and budget.
          temperature: sampling temperature. 0 selects the most likely tokens. The default is
            `eval.temperature` for several samples and for the prompt format `native`, otherwise 0.
          top_p: cumulative probability for nucleus sampling. The default is `eval.top_p` if
            `temperature` defaults to `eval.temperature`, and otherwise 1.
          seed: random seed. Identical calls return identical answers.

        Returns:
          The answers, ordered by question, then budget, then sample.

        Raises:
          UserError: if an argument is invalid.
        """
        samples = _integer("samples", samples)
        seed = _integer("seed", seed)
        if samples < 1:
            raise UserError(f"samples={samples} is too small; use 1 or more samples per question")
        default_temperature, default_top_p = self._session.default_sampling()
        if samples > 1:
            default_temperature = self.config.eval.temperature
            default_top_p = self.config.eval.top_p
        if top_p is None:
            top_p = default_top_p if temperature is None else 1.0
        if temperature is None:
            temperature = default_temperature
        temperature = _number("temperature", temperature)
        top_p = _number("top_p", top_p)
        budgets = self._budgets(budget)
        AskOptions(budgets, temperature, top_p, seed).check("")
        if samples > 1 and temperature == 0:
            raise UserError(
                f"samples={samples}: with temperature 0, all samples would be the same; use "
                "temperature=1.0, or samples=1"
            )
        return self._session.ask(
            _strings("questions", questions),
            budgets,
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )

    def logprobs(
        self,
        questions: str | Sequence[str],
        responses: str | Sequence[str | Sequence[int]],
        budget: Budget,
    ) -> list[ResponseScore]:
        """Computes the log-probability of each response token at a budget.

        Args:
          questions: one question, or several.
          responses: one response per question, as text or as token ids such as `Answer.tokens`. A
            single string is the response to a single question.
          budget: thinking budget of all prompts: a number of tokens, a name from `budget.levels`,
            or None for no budget.

        Returns:
          The score of each response, which contains the log-probabilities of its tokens.

        Raises:
          UserError: if an argument is invalid.
        """
        budgets = self._budgets(budget)
        if len(budgets) != 1:
            names = ", ".join(NONE if number is None else str(number) for number in budgets)
            raise UserError(
                f"budget: found {len(budgets)} budgets ({names}); call logprobs once per budget"
            )
        return self._session.score(
            _strings("questions", questions), _items("responses", responses), budgets[0]
        )

    def _budgets(self, budget: Budget | Sequence[Budget]) -> tuple[int | None, ...]:
        """Returns the budgets as numbers of tokens, with None for no budget."""
        # A scalar array is an Iterable that can't be iterated.
        is_single = isinstance(budget, str) or getattr(budget, "shape", None) == ()
        items: Iterable[Any] = [budget]
        if isinstance(budget, Iterable) and not is_single:
            items = budget
        words = [NONE if item is None else str(item) for item in items]
        return budgets_of(self._session, ",".join(words), "budget")


def _items(name: str, argument: Any) -> list[Any]:
    """Returns the items of an argument that is a string or a sequence."""
    if isinstance(argument, str):
        return [argument]
    if not isinstance(argument, Iterable):
        raise UserError(f"{name}: found {shown(argument)}; pass a text or a list")
    return list(argument)


def _strings(name: str, argument: Any) -> list[str]:
    """Converts a string or a sequence of strings to a list, or raises UserError."""
    items = _items(name, argument)
    for item in items:
        if not isinstance(item, str):
            raise UserError(f"{name}: found {shown(item)}; pass a text, or a list of texts")
    return items


def _integer(name: str, argument: Any) -> int:
    """Converts an argument to a Python integer, or raises UserError."""
    with contextlib.suppress(TypeError):
        return operator.index(argument)
    raise UserError(f"{name}={shown(argument)}: use a whole number")


def _number(name: str, argument: Any) -> float:
    """Converts an argument to a Python float, or raises UserError."""
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(argument, str):
            return float(argument)
    raise UserError(f"{name}={shown(argument)}: use a number")


def load(folder: str | Path, *, step: int | str | None = None, overrides: Overrides = ()) -> Policy:
    """Loads the policy of a run or of a Hugging Face folder.

    Args:
      folder: a run folder, which contains config.yaml, or a Hugging Face folder, which contains
        config.json.
      step: checkpoint of a run: a step number, "best" or "newest". None selects the best step, or
        the newest step if no evaluation selected a best one.
      overrides: overrides of config keys that define how prompts are built and answers are sampled.
        Other keys are refused. Either a dict such as `{"rollout.answer_tokens": 256}`, or strings
        such as `rollout.answer_tokens=256`.

    Returns:
      The loaded policy.

    Raises:
      UserError: if the folder contains no policy, or an argument is invalid.
    """
    silence_orbax()
    texts = override_texts(overrides)
    try:
        path = expand_home(folder)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    if RunPaths(path).config.is_file():
        return Policy(open_session(path, None, step, texts, keys=_KEYS))
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} contains neither config.yaml nor config.json; use the folder of a run or of "
            "a Hugging Face model"
        )
    if step is not None:
        raise UserError(
            f"step={step} can't be used with a Hugging Face model, because only a run has "
            "checkpoints of several steps; leave the argument out"
        )
    return Policy(open_session(None, path, None, texts, keys=_KEYS))
