"""Advantages: from rewards per cut to a number per token.

The rewards of G traces of a question, each scored at M cuts, form one array [Q, G, M]. The thinking
tokens between two cuts form a segment; they can only influence the cuts at or after its end.
Budget-conditioned advantages (BCAE) are built as

    residual = bcae_advantage(R, V)                               # Eq. 10, [Q, G, M]
    thinking = thinking_credit(residual, weights, mode="to_go")   # one per segment
    answers  = answer_credit(r, R, V, p, weights, coefficient=.3, mode="to_go")
    scale    = advantage_scale(thinking, mode="batch_rms", floor=.1)
    tokens   = scatter_segments((thinking / scale).reshape(B, M), cuts, T)

and the group baselines (GRPO, RLOO, Dr.GRPO; BRPO in `methods.anytime`) work on the same arrays.
Advantages are constants to the policy gradient: gradients into rewards and values are stopped.
"""

from bacr_jax.advantages.group import (
    advantage_scale,
    group_advantage,
    grpo_advantage,
    normalize,
    other_questions_mean,
    rloo_advantage,
)
from bacr_jax.advantages.optimal import (
    effective_traces,
    optimal_moments,
    optimal_shift,
    optimal_slopes,
    score_statistics,
    segment_surprise,
    token_baseline,
)
from bacr_jax.advantages.segments import (
    CreditMode,
    answer_credit,
    first_of_reused,
    scatter_segments,
    segment_index,
    sum_reused,
    thinking_credit,
    to_go,
)
from bacr_jax.advantages.value import (
    bcae_advantage,
    correctness_from_value,
    prior_strength,
    residual_loo_baseline,
    residual_moments,
    shrink_baseline,
)

__all__ = [
    "CreditMode",
    "advantage_scale",
    "answer_credit",
    "bcae_advantage",
    "correctness_from_value",
    "effective_traces",
    "first_of_reused",
    "group_advantage",
    "grpo_advantage",
    "normalize",
    "optimal_moments",
    "optimal_shift",
    "optimal_slopes",
    "other_questions_mean",
    "prior_strength",
    "residual_loo_baseline",
    "residual_moments",
    "rloo_advantage",
    "scatter_segments",
    "score_statistics",
    "segment_index",
    "segment_surprise",
    "shrink_baseline",
    "sum_reused",
    "thinking_credit",
    "to_go",
    "token_baseline",
]
