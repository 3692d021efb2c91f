"""Loads policies for notebooks and scripts: `load` and `Policy`, next to `bacr_jax.train`.

Every function calls one or two public functions of other modules and contains no rules.

    import bacr_jax

    done = bacr_jax.train("quickstart", ["train.steps=20"], callbacks=[print])
    policy = bacr_jax.load(done.folder)
    for answer in policy.generate(["7a2b3"], budget=[8, 64]):
        print(answer.budget, answer.thinking, answer.answer)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bacr_jax.config import Config
from bacr_jax.config.cli import quieten_orbax
from bacr_jax.config.derived import NONE
from bacr_jax.errors import UserError
from bacr_jax.evaluation.ask import Answer, ResponseScore, Session
from bacr_jax.generate import AskOptions, budgets_of, open_session
from bacr_jax.runs.folder import RunPaths

# A budget: tokens, None for no budget, or the name of a level.
Budget = int | str | None


class Policy:
    """A policy whose weights and compiled programs serve any number of calls.

    Attributes:
      folder: the run, or the Hugging Face folder.
      step: step of the checkpoint; None for a Hugging Face folder.
      config: settings of prompts and answers.
    """

    def __init__(self, session: Session):
        """Wraps a session; use `load`."""
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
        """Answers every question at every budget.

        Args:
          budget: thinking tokens, one or several: numbers, names of `budget.levels`, or None for
            no budget, with thinking up to budget.cap tokens.
          samples: answers per question and budget.
          temperature: 0 takes the most likely tokens. The default is 0 for one sample, and
            `eval.temperature` for several.
          top_p: the default is `eval.top_p` if `eval.temperature` is used, else 1.
          seed: seed of sampled answers; equal calls return equal answers.

        Returns:
          Answers question by question, budget by budget, sample by sample.

        Raises:
          UserError: an argument can't be used.
        """
        if samples < 1:
            raise UserError(f"samples={samples}: write 1 or more")
        default_temperature = 0.0
        default_top_p = 1.0
        if temperature is None and samples > 1:
            default_temperature = self.config.eval.temperature
            default_top_p = self.config.eval.top_p
        if temperature is None:
            temperature = default_temperature
        if top_p is None:
            top_p = default_top_p
        budgets = self._budgets(budget)
        AskOptions(budgets, temperature, top_p, seed).check("")
        if samples > 1 and temperature == 0:
            raise UserError(
                f"samples={samples}: temperature 0 gives the same answer each time; write "
                "temperature=1.0, or samples=1"
            )
        return self._session.ask(
            [questions] if isinstance(questions, str) else list(questions),
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
        """Computes the log-probability of each token of given responses at a budget.

        Args:
          responses: response to each question, as a text or as ids such as `Answer.tokens`. One
            text is a response to one question.

        Raises:
          UserError: an argument can't be used.
        """
        (budget_number,) = self._budgets(budget)
        return self._session.score(
            [questions] if isinstance(questions, str) else list(questions),
            [responses] if isinstance(responses, str) else list(responses),
            budget_number,
        )

    def _budgets(self, budget: Budget | Sequence[Budget]) -> tuple[int | None, ...]:
        """Returns one or several budgets as numbers of tokens; None for no budget."""
        if isinstance(budget, str) or not isinstance(budget, Iterable):
            budget = [budget]
        words = [NONE if item is None else str(item) for item in budget]
        return budgets_of(self._session, ",".join(words), "budget")


def load(
    folder: str | Path, *, step: int | str | None = None, overrides: Sequence[str] = ()
) -> Policy:
    """Loads the policy of a run, or of a Hugging Face folder.

    Args:
      folder: a run folder (with config.yaml) or a Hugging Face folder (with config.json).
      step: checkpoint of a run: a number, "best" or "newest"; None for the best, or the newest if
        no evaluation chose one.
      overrides: config keys of reading and answering questions, as `key.sub=value`.

    Raises:
      UserError: the folder contains no policy, or an argument can't be used.
    """
    quieten_orbax()
    path = Path(folder).expanduser()
    if RunPaths(path).config.is_file():
        return Policy(open_session(path, None, step, overrides))
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path}: holds neither config.yaml nor config.json; write the folder of a run or of a "
            "Hugging Face model"
        )
    if step is not None:
        raise UserError(f"step={step}: only a run has steps; leave it out")
    return Policy(open_session(None, path, None, overrides))
