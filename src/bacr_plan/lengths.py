"""How long the rows of an iteration are: prompts, thinking, answers.

A plan's seconds go with the lengths that come up, not with the largest ones a config allows (its
memory does). Rows are drawn once, with a fixed seed, so that equal settings give equal plans.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bacr_jax.config import Config, derived
from bacr_jax.config.values import written
from bacr_jax.curriculum import init_curriculum, truncnorm_ppf
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method

# Tokens of the longer suffix, rounded up: "\n</think>\n<answer>\n" is 7 tokens of Qwen2.5.
SUFFIX_TOKENS = 8


@dataclass(frozen=True)
class PromptLengths:
    """A distribution: `tokens` that so large `shares` of all prompts have at most, ascending."""

    source: str
    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def at_most(self, limit: int) -> "PromptLengths":
        """The same where longer prompts are left out; they are so few that the rest stays."""
        return dataclasses.replace(self, tokens=tuple(min(n, limit) for n in self.tokens))


# Quantiles of the 7,498 MATH training problems in the format think_answer, Qwen2.5's tokenizer, as
# `bacr data --inspect` counts them: every twentieth, then the longest.
MATH = PromptLengths(
    "MATH's training problems, mean 119: the data, or a tokenizer for them, are not here",
    (*(float(share) for share in np.arange(0, 0.96, 0.05).round(2)), 0.99, 0.995, 0.999, 1.0),
    (
        *(51, 60, 65, 69, 73, 76, 79, 82, 86, 89, 93, 97, 102, 107, 114, 124, 136, 156, 193, 273),
        *(476, 635, 874, 1004),
    ),
)
# Those problems' own answers with the closing tag.
_ANSWER_SHARES, _ANSWER_TOKENS = (0.0, 0.5, 0.9, 0.99, 1.0), (5, 7, 12, 28, 90)


def prompt_lengths(config: Config) -> PromptLengths:
    """Those of the run's own training set where it and a tokenizer are here, else those of MATH."""
    from bacr_jax.prompts.environment import load_sets
    from bacr_jax.runs.setup import run_tokenizer

    limit, names = config.data.max_prompt_tokens, derived.mixture(config.data.train)
    data = dataclasses.replace(config.data, eval=tuple(name for _, name in names))
    only = dataclasses.replace(config, data=data)
    try:
        sets = load_sets(only, run_tokenizer(config), split="train").values()
    except UserError:
        return MATH.at_most(limit)
    found = np.concatenate([np.asarray(questions.prompts.lengths) for questions in sets])
    shares = np.linspace(0, 1, 101)
    return PromptLengths(
        f"{written(config.data.train)}, mean {found.mean():.0f}",
        tuple(map(float, shares)),
        tuple(map(float, np.quantile(found, shares))),
    )


@dataclass(frozen=True)
class Lengths:
    """Tokens of every row of an iteration; thinking uses the budget up."""

    prompts: Int[np.ndarray, "B"]
    thinking: Int[np.ndarray, "B"]
    answers: Int[np.ndarray, "B M"]
    source: str = ""


def rows_of(config: Config, prompts: PromptLengths, *, cuts: int) -> Lengths:
    """Rows of an iteration, of `cuts` branches each; a group shares its question's prompt."""
    rng = np.random.default_rng(0)
    questions, group = config.rollout.questions, config.rollout.group_size
    tokens = np.interp(rng.random(questions), prompts.shares, prompts.tokens).astype(int)
    thinking = _thinking(config, rng, questions * group)
    drawn = rng.random((len(thinking), cuts))
    answers = np.interp(drawn, _ANSWER_SHARES, _ANSWER_TOKENS).astype(int)
    answers = np.minimum(answers, config.rollout.answer_tokens)
    return Lengths(np.repeat(tokens, group), thinking, answers, prompts.source)


def _thinking(config: Config, rng: np.random.Generator, rows: int) -> Int[np.ndarray, "B"]:
    """Budgets of the prior, or the method's own; all used up, groups come up equally often."""
    budget, curriculum, method = config.budget, config.curriculum, load_method(config)
    if not method.held:
        return np.full(rows, budget.max)
    if budget.prior == "fixed" or not method.follows_prior:
        state = init_curriculum(config.data.num_groups, mu0=curriculum.mu0)
        groups = jnp.arange(config.rollout.questions) % config.data.num_groups
        return np.asarray(method.sample_budgets(jax.random.key(0), state, groups)).reshape(-1)
    if budget.prior == "uniform":
        return rng.integers(budget.min, budget.max + 1, rows)
    if budget.prior == "choices":
        return rng.choice(np.array(derived.drawn(config)), rows)
    means = np.resize(np.array(curriculum.mu0, float), rows)
    least, most = budget.min, budget.max
    if curriculum.sigma == 0:
        return np.clip(means, least, most).astype(int)
    drawn = rng.normal(means, curriculum.sigma)
    inside = truncnorm_ppf(rng.random(rows), means, curriculum.sigma, least, most)
    return np.where((drawn < least) | (drawn > most), inside, drawn).astype(int)
