"""What notebooks and scripts need most, in few names: `load` and `Policy`; `train` is beside it.

Nothing here decides anything: every call is one or two calls of public functions, which stay what
they are.

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
from bacr_jax.generate import Asking, budgets_of, open_session
from bacr_jax.runs.folder import RunPaths

# A budget as it may be written: tokens, None, or the name of a level.
Budget = int | str | None


class Policy:
    """A policy that was read once; programs that a call compiled serve the next calls.

    Attributes:
      folder: where it was read from.
      step: of its checkpoint; None for a Hugging Face folder.
      config: the settings it is asked with.
    """

    def __init__(self, session: Session):
        """Use `load`."""
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
        """Answers to every question at every budget.

        Args:
          budget: thinking tokens, one or several: numbers, names of `budget.levels`, or None (the
            policy is told none and thinks up to budget.cap tokens).
          temperature: 0: the most likely tokens. By default 0 for one sample, and for several
            that of the policy's own evaluations (`eval.temperature`).
          top_p: nucleus; by default `eval.top_p` where the temperature is left out too, else 1.
          seed: of sampled answers; equal calls give equal answers.

        Returns:
          Question by question, budget by budget, sample by sample.
        """
        if samples < 1:
            raise UserError(f"samples={samples}: write 1 or more")
        own = self.config.eval if temperature is None and samples > 1 else None
        temperature = (own.temperature if own else 0.0) if temperature is None else temperature
        top_p = (own.top_p if own else 1.0) if top_p is None else top_p
        budgets = self._budgets(budget)
        Asking(budgets, temperature, top_p, seed).check("")
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
        """How likely the policy finds given responses at a budget, token by token.

        Args:
          responses: what follows the prompt of each question: a text, or ids such as those of
            `Answer.tokens`. With one question, one text.
        """
        (told,) = self._budgets(budget)
        return self._session.score(
            [questions] if isinstance(questions, str) else list(questions),
            [responses] if isinstance(responses, str) else list(responses),
            told,
        )

    def _budgets(self, budget: Budget | Sequence[Budget]) -> tuple[int | None, ...]:
        if isinstance(budget, str) or not isinstance(budget, Iterable):
            budget = [budget]
        words = (NONE if one is None else str(one) for one in budget)
        return budgets_of(self._session, ",".join(words), "budget")


def load(
    folder: str | Path, *, step: int | str | None = None, overrides: Sequence[str] = ()
) -> Policy:
    """The policy of a run, or of a Hugging Face folder.

    Args:
      folder: a run folder (it holds config.yaml) or a Hugging Face folder (config.json).
      step: checkpoint of a run: a number, "best" or "newest"; by default the best, or the newest if
        no evaluation chose one.
      overrides: `key.sub=value` for how questions are read and answered.
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
