"""Predicts the lengths of all traces (rows) in an iteration: prompts, thinking and answers.

A plan predicts durations from these expected lengths, and memory from the maximum lengths that the
config allows. The lengths are sampled with a fixed seed, so identical settings produce identical
plans.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bacr_jax.config import BudgetConfig, CurriculumConfig, ModelConfig
from bacr_jax.config.derived import mixture
from bacr_jax.config.settings import MethodSettings, TaskSettings
from bacr_jax.config.values import written
from bacr_jax.curriculum import init_curriculum, truncnorm_ppf
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method

# Assumed number of forced tokens between thinking and answer. With Qwen2.5's tokenizer, suffixes of
# the formats think_answer and budget_solution have 7 tokens, of boxed 8, and of native 12. Other
# tokenizers and data.closing_text can give longer suffixes. A plan is then too low by a few tokens
# per answer.
SUFFIX_TOKENS = 8


@dataclass(frozen=True)
class PromptLengths:
    """A distribution of prompt lengths, represented by quantiles.

    Attributes:
      source: source of the lengths, which is printed with the plan.
      shares: cumulative fractions of the prompts in increasing order.
      tokens: for each fraction, the corresponding quantile of the prompt length in tokens.
    """

    source: str
    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def at_most(self, limit: int) -> "PromptLengths":
        """Returns the distribution with all quantiles clipped to `limit` tokens.

        A run drops longer prompts, but they are so rare that the other quantiles are not changed.
        """
        tokens = tuple(min(quantile, limit) for quantile in self.tokens)
        return dataclasses.replace(self, tokens=tokens)


# Quantiles of the 7,498 MATH training prompts in the format think_answer, in tokens of Qwen2.5, as
# reported by `bacr data --inspect`. They are five percent apart, except for the longest prompts.
_TWENTIETHS = np.arange(0, 0.96, 0.05).round(2)
MATH = PromptLengths(
    source="those of MATH's training problems (mean 119), because the data or their tokenizer are "
    "missing",
    shares=(*map(float, _TWENTIETHS), 0.99, 0.995, 0.999, 1.0),
    tokens=(
        *(51, 60, 65, 69, 73, 76, 79, 82, 86, 89, 93, 97, 102, 107, 114, 124, 136, 156, 193, 273),
        *(476, 635, 874, 1004),
    ),
)
# Lengths of the answers to MATH's training problems, in tokens and with the closing tag, at these
# quantiles.
_ANSWER_SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)
_ANSWER_TOKENS = (5, 7, 12, 28, 90)


def prompt_lengths(task: TaskSettings, model: ModelConfig) -> PromptLengths:
    """Returns the distribution of prompt lengths in the run's training set.

    Falls back to `MATH` if the training set or its tokenizer is not available locally.
    """
    from bacr_jax.prompts.prompted_questions import load_sets
    from bacr_jax.runs.setup import run_tokenizer

    data = task.data
    limit = data.max_prompt_tokens
    set_names = tuple(name for _, name in mixture(data.train))
    task = dataclasses.replace(task, data=dataclasses.replace(data, eval=set_names))
    try:
        tokenizer = run_tokenizer(data, model)
        sets = load_sets(task, tokenizer, split="train")
    except UserError:
        return MATH.at_most(limit)
    lengths = np.concatenate([np.asarray(one.prompts.lengths) for one in sets.values()])
    shares = np.linspace(0, 1, 101)
    return PromptLengths(
        source=f"{written(data.train)}, mean {lengths.mean():.0f}",
        shares=tuple(map(float, shares)),
        tokens=tuple(map(float, np.quantile(lengths, shares))),
    )


@dataclass(frozen=True)
class Lengths:
    """The number of tokens in each part of the traces (rows) of an iteration.

    The thinking of every trace uses its whole budget.

    Attributes:
      prompts: number of prompt tokens per trace.
      thinking: number of thinking tokens per trace.
      answers: number of tokens of each answer (branch) per trace.
      source: source of the prompt lengths.
    """

    prompts: Int[np.ndarray, "B"]
    thinking: Int[np.ndarray, "B"]
    answers: Int[np.ndarray, "B M"]
    source: str = ""


def rows_of(settings: MethodSettings, prompts: PromptLengths, *, cuts: int) -> Lengths:
    """Samples the lengths of an iteration's traces (rows). Traces of a group share their prompt.

    Args:
      settings: settings of the run's method.
      prompts: the distribution of prompt lengths.
      cuts: number of answers (branches) per trace.
    """
    rng = np.random.default_rng(0)
    rollout = settings.rollout
    questions = rollout.questions
    group_size = rollout.group_size
    prompt_quantiles = rng.random(questions)
    prompt_tokens = np.interp(prompt_quantiles, prompts.shares, prompts.tokens).astype(int)
    thinking = _thinking(settings, rng, questions * group_size)
    answer_quantiles = rng.random((len(thinking), cuts))
    answers = np.interp(answer_quantiles, _ANSWER_SHARES, _ANSWER_TOKENS).astype(int)
    return Lengths(
        prompts=np.repeat(prompt_tokens, group_size),
        thinking=thinking,
        answers=np.minimum(answers, rollout.answer_tokens),
        source=prompts.source,
    )


def _thinking(
    settings: MethodSettings, rng: np.random.Generator, rows: int
) -> Int[np.ndarray, "B"]:
    """Samples the number of thinking tokens of each trace (row).

    A trace uses its whole budget, or `budget.max` tokens if the method does not enforce budgets.
    Budgets are sampled from the prior or by the method. All difficulty groups are assumed to be
    equally frequent.
    """
    budget = settings.budget
    method = load_method(settings)
    if not method.truncates_at_budget:
        return np.full(rows, budget.max)
    if budget.prior == "fixed" or not method.follows_prior:
        num_groups = settings.data.num_groups
        state = init_curriculum(num_groups, mu0=settings.curriculum.mu0)
        groups = jnp.arange(settings.rollout.questions) % num_groups
        budgets = method.sample_budgets(jax.random.key(0), state, groups)
        return np.asarray(budgets).reshape(-1)
    if budget.prior == "uniform":
        return rng.integers(budget.min, budget.max + 1, rows)
    if budget.prior == "choices":
        return rng.choice(np.array(settings.budget_choices), rows)
    return _curriculum_budgets(budget, settings.curriculum, rng, rows)


def _curriculum_budgets(
    budget: BudgetConfig, curriculum: CurriculumConfig, rng: np.random.Generator, rows: int
) -> Int[np.ndarray, "B"]:
    """Samples budgets from the curriculum's initial truncated normal distributions."""
    least = budget.min
    most = budget.max
    sigma = curriculum.sigma
    means = np.resize(np.array(curriculum.mu0, float), rows)
    if sigma == 0:
        return np.clip(means, least, most).astype(int)
    budgets = rng.normal(means, sigma)
    truncated = truncnorm_ppf(rng.random(rows), means, sigma, least, most)
    outside = (budgets < least) | (budgets > most)
    return np.where(outside, truncated, budgets).astype(int)
