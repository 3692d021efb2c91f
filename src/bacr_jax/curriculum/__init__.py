"""Curriculum-aware scheduler: chooses questions and thinking budgets by pass rate.

One iteration of the schedule for K difficulty groups:

    weights = group_weights(state.pass_rate)                              # Eq. 6
    index   = sample_questions(key, weights, group_of, num=Q)
    mu      = scheduled_mean(state, alpha=.6, beta=.3, b_min=256, b_max=4096)   # Eq. 5
    budgets = sample_budgets(key, mu, group_of[index], ...)               # Eq. 4
    ...                                                                   # roll out, grade
    state   = record_outcomes(state, group_of[index], correct, ema_decay=.9)
    state   = update_pass_rates(state, source="ema")                      # every few steps

The functions do not depend on where the outcomes come from. If the outcomes of the training
rollouts are used, the schedule follows the policy during training, at the budgets that the schedule
itself chose.
"""

from bacr_jax.curriculum.budgets import (
    Assignment as Assignment,
    choice_budgets as choice_budgets,
    fixed_budgets as fixed_budgets,
    sample_budgets as sample_budgets,
    stage_limit as stage_limit,
    uniform_budgets as uniform_budgets,
)
from bacr_jax.curriculum.questions import (
    group_weights as group_weights,
    sample_groups as sample_groups,
    sample_questions as sample_questions,
)
from bacr_jax.curriculum.schedule import (
    CurriculumState as CurriculumState,
    budget_mean as budget_mean,
    init_curriculum as init_curriculum,
    record_outcomes as record_outcomes,
    scheduled_mean as scheduled_mean,
    update_pass_rates as update_pass_rates,
)
from bacr_jax.curriculum.truncnorm import truncnorm_ppf as truncnorm_ppf
