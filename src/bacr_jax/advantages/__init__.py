"""Estimates advantages, from rewards at truncation points to one advantage per token.

A cut is a truncation point of the thinking, at which an answer is graded. The rewards of G traces
per question, each graded at M cuts, form an array [Q, G, M]. The thinking tokens between two cuts
form a segment. A segment can only influence the answers at cuts at or after its end.
Budget-conditioned advantages (BCAE) are computed from rewards R, values V, outcomes r and their
baseline p as follows:

    residual = bcae_advantage(R, V)                               # Eq. 10, [Q, G, M]
    thinking = thinking_credit(residual, weights, mode="to_go")   # one per segment
    answers  = answer_credit(r, R, V, p, weights, coefficient=.3, mode="to_go")
    scale    = advantage_scale(residual, mode="batch_rms", floor=.1)
    tokens   = scatter_segments((thinking / scale).reshape(B, M), cuts, T)

The group-based estimators (GRPO, RLOO, Dr.GRPO, and BRPO in `methods.anytime`) operate on the same
arrays. Advantages are constants in the policy gradient: gradients through rewards and values are
stopped.
"""

from bacr_jax.advantages.batch import same_budget_mean as same_budget_mean
from bacr_jax.advantages.group import (
    advantage_scale as advantage_scale,
    group_advantage as group_advantage,
    decoupled_advantage as decoupled_advantage,
    grpo_advantage as grpo_advantage,
    normalize as normalize,
    other_questions_mean as other_questions_mean,
    others_mean as others_mean,
    rloo_advantage as rloo_advantage,
)
from bacr_jax.advantages.optimal import (
    effective_traces as effective_traces,
    optimal_moments as optimal_moments,
    optimal_shift as optimal_shift,
    optimal_slopes as optimal_slopes,
    score_statistics as score_statistics,
    segment_score_norm_proxy as segment_score_norm_proxy,
    token_baseline as token_baseline,
)
from bacr_jax.advantages.segments import (
    CreditMode as CreditMode,
    answer_credit as answer_credit,
    scatter_segments as scatter_segments,
    segment_index as segment_index,
    sum_reused as sum_reused,
    thinking_credit as thinking_credit,
    to_go as to_go,
)
from bacr_jax.advantages.value import (
    bcae_advantage as bcae_advantage,
    correctness_from_value as correctness_from_value,
    prior_strength as prior_strength,
    residual_loo_baseline as residual_loo_baseline,
    residual_moments as residual_moments,
    shrink_baseline as shrink_baseline,
)
