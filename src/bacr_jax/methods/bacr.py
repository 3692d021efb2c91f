"""Budget-adaptive curriculum reasoning (BACR), the paper's method in four parts.

part                               equations     config
budget-conditioned unified policy  Eq. 2, 3      conditioning.budget_input
curriculum-aware scheduler         Eq. 4 to 6    budget.prior=curriculum
truncation-aware dense reward      Eq. 7 to 9    reward.dense
budget-conditioned advantages      Eq. 10 to 14  advantage.baseline=value

The training loop calls the functions of this module in the order of Algorithm 1. The budget
embedding is implemented in `model/budget.py`, the value head in `model/value.py`, and the loss (Eq.
15, 16) in `losses.py`. The folder `baselines/` extends the paper: it contains alternatives to the
baseline V(q, b), and a correction that reduces the gradient variance of any baseline.
`bacr_settings.py` checks the settings.

Shapes: Q questions, G responses per question, M truncation points (cuts) per response.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, rewards
from bacr_jax.config.settings import MethodSettings
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods import bacr_settings, budget_prior
from bacr_jax.methods.baselines import Baseline, Credit, State, baseline_of
from bacr_jax.methods.grpo_family import cut_points
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut
from bacr_jax.methods.reward_terms import cut_weights, progress_coefficient

# The registry looks up these functions in the module of a method.
problems = bacr_settings.problems
advice = bacr_settings.advice


def make(config: MethodSettings) -> Method:
    """Builds BACR with the parts that are enabled in the config."""
    baseline = baseline_of(config)
    return Method(
        name="BACR",
        conditioned=config.conditioning.embeds,
        uses_value=baseline.uses_value,
        needs_score_norms=baseline.needs_score_norms,
        follows_prior=True,
        published=bacr_settings.PUBLISHED,
        question_weights=functools.partial(question_weights, config),
        sample_budgets=functools.partial(sample_budgets, config),
        cuts=functools.partial(cut_points, config),
        rewards=functools.partial(dense_rewards, config),
        advantages=functools.partial(budget_conditioned_advantages, config, baseline),
        init_state=functools.partial(init_state, baseline),
        update=functools.partial(update, baseline),
        metrics=functools.partial(metrics, baseline),
    )


# Part 1, the budget-conditioned policy, is implemented in the model and enabled by
# `Method.conditioned`.

# Part 2: curriculum-aware scheduler -------------------------------------------------------------


def question_weights(
    config: MethodSettings, state: CurriculumState, sizes: Int[Array, "K"]
) -> Float[Array, "K"]:
    """Computes the sampling probability of each difficulty group (Eq. 6).

        w_k ~ rho_k (1 - rho_k)

    Args:
      config: config of the run.
      state: curriculum state with the pass rates rho_k, in [0, 1].
      sizes: number of questions in each group.

    Returns:
      Probabilities that sum to 1. They are proportional to `sizes` if `budget.prior` is not
      "curriculum".
    """
    return budget_prior.question_weights(config, state, sizes)


def sample_budgets(
    config: MethodSettings, key: Array, state: CurriculumState, groups: Int[Array, "Q"]
) -> Int[Array, "Q G"]:
    """Samples a thinking budget for each response, in tokens (Eq. 4, 5).

        b ~ TruncNorm(mu_k, sigma^2; b_min, b_max)
        mu_k = mu_k(0) (1 - alpha rho_k) + beta (1 - rho_k) b_max

    Args:
      config: config of the run.
      key: PRNG key.
      state: curriculum state, from which mu_k is computed for each difficulty group k.
      groups: difficulty group k of each question.

    Returns:
      Budgets. They follow another distribution if `budget.prior` is not "curriculum".
    """
    return budget_prior.sample_budgets(config, key, state, groups)


# Part 3: truncation-aware dense reward ----------------------------------------------------------


def dense_rewards(config: MethodSettings, state: State | None, batch: GroupBatch) -> PerCut:
    """Computes the reward of each response at each truncation point (Eq. 7, 8).

        R_j = r_j + lambda (r_j - r_{j-1}),   r_0 = 0

    r_j is 1 if the answer after the first b_j thinking tokens is correct. If `reward.dense` is
    false, lambda is 0. In Eq. 9, the rewards are summed over the truncation points with the weights
    of `cut_weights`, which are 1/M in the paper.
    """
    return rewards.dense_reward(batch.outcomes, coefficient=progress_coefficient(config.reward))


# Part 4: budget-conditioned advantages ----------------------------------------------------------


def budget_conditioned_advantages(
    config: MethodSettings,
    baseline: Baseline,
    state: State | None,
    batch: GroupBatch,
    reward: PerCut,
    values: PerCut | None,
) -> Advantages:
    """Computes the advantages of thinking segments and answers (Eq. 10 to 14).

        A_j = R_j - V(q, b, b_j)                      Eq. 10
        A   = sum_j w_j A_j / max(std(A), epsilon)    Eq. 9, 14

    A thinking segment consists of the tokens between two truncation points. The setting
    `advantage.credit` selects the residuals A_j that count for a segment: all residuals, as in the
    paper ("trajectory"), or only the residuals that the segment can still influence ("to_go").

    Args:
      config: config of the run.
      baseline: the baseline used in place of V. In the paper, it is `value`.
      state: running statistics of earlier batches that the baseline needs (moments), or None if the
        baseline needs none.
      batch: outcomes, lengths and budgets of the batch.
      reward: R (`dense_rewards`).
      values: V, predicted by the value head before its update on this batch. None if the baseline
        does not use V.
    """
    settings = config.advantage
    moments = state or {}
    weights = cut_weights(config.cuts)
    estimate = baseline.estimate(moments, batch, reward, values)
    residual = advantages.bcae_advantage(reward, estimate.reward)
    answers = advantages.answer_credit(
        batch.outcomes,
        reward,
        estimate.reward,
        estimate.correctness,
        weights,
        coefficient=progress_coefficient(config.reward),
        mode=settings.credit,
    )
    if settings.credit == "trajectory":
        answers = _once_per_answer(batch, answers)
    credit = Credit(
        thinking=advantages.thinking_credit(residual, weights, mode=settings.credit),
        answers=answers,
        returns=advantages.thinking_credit(reward, weights, mode=settings.credit),
    )
    credit = baseline.refine(moments, batch, credit)
    scale = advantages.advantage_scale(residual, mode=settings.normalise, floor=settings.floor)
    return Advantages(
        thinking=credit.thinking / scale,
        answers=credit.answers / scale,
        baseline=credit.returns - credit.thinking,
        returns=credit.returns,
        tokens=None if credit.tokens is None else credit.tokens / scale,
    )


def _once_per_answer(batch: GroupBatch, answers: PerCut) -> PerCut:
    """Sets advantages to 0 for truncation points that reuse the answer of an earlier one.

    Args:
      answers: advantage of the answer at each truncation point.
    """
    source = rewards.distinct_cuts(batch.cuts, batch.thinking)
    return jnp.where(source == jnp.arange(source.shape[-1]), answers, 0.0)


# The baseline's moments of earlier batches ------------------------------------------------------


def init_state(baseline: Baseline, num_questions: int) -> State | None:
    """Returns the baseline's running statistics (moments) before training, or None without any."""
    return baseline.init_state() or None


def update(
    baseline: Baseline,
    state: State | None,
    batch: GroupBatch,
    reward: PerCut,
    values: PerCut | None,
) -> State | None:
    """Returns the baseline's running statistics (moments), updated with a batch.

    Args:
      state: statistics of earlier batches, or None if the baseline needs none.
      batch: outcomes, lengths and budgets of the batch.
      reward: R (`dense_rewards`).
      values: V, predicted by the value head before its update on this batch. None if the baseline
        does not use V.
    """
    if state is None:
        return None
    return dict(baseline.update(state, batch, reward, values))


def metrics(baseline: Baseline, state: State | None, batch: GroupBatch) -> dict[str, Any]:
    """Returns metrics of the baseline to log, keyed by `group/name`."""
    return baseline.metrics(state or {})
