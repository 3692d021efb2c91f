"""Defines the settings of the training methods as frozen dataclasses.

The sections for budgets, truncation points (cuts), rewards, advantages and the loss are shared by
most methods. A method with further constants has a section for these constants. `schema` combines
the sections.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bacr_jax.config.fields import key
from bacr_jax.config.values import FrozenMap


@dataclass(frozen=True)
class ConditioningConfig:
    """Settings for how the policy receives its thinking budget b.

    The paper adds an embedding phi(b) to the residual stream, scaled by a gate (Eq. 2-3).
    """

    budget_input: Literal["embedding", "prompt", "both", "none"] = key(
        "embedding",
        "how the policy receives its budget: embedding: as phi(b); prompt: as a sentence in the "
        "prompt; both: as both; none: not at all",
    )
    prompt_text: str = key(
        "Think for at most {budget} tokens.",
        "sentence after the question (with budget_input=prompt or both); the ledger uses special "
        "tokens "
        "instead",
    )
    sharing: Literal["shared", "per_layer"] = key(
        "shared", "shared: one phi for all layers; per_layer: a separate phi for each layer"
    )
    positions: Literal["all", "response"] = key("all", "token positions to which phi(b) is added")
    input: Literal["raw", "log", "normalised"] = key(
        "raw",
        "input of phi: raw: sinusoids of b (paper); log: of log b; normalised: of 1000 b / "
        "budget.max",
    )
    gate: Literal["sigmoid", "sigmoid_normed", "tanh"] = key(
        "sigmoid",
        "sigmoid: gate of Eq. 3, computed from the residual stream; sigmoid_normed: from the "
        "RMS-normalised residual stream; tanh: a tanh gate",
    )
    gate_bias: float = key(
        0.0, "constant added to the gate's pre-activation (-4: nearly closed)", "(-inf, inf)"
    )

    @property
    def embeds(self) -> bool:
        """True if the policy receives its budget as an embedding phi(b)."""
        return self.budget_input in ("embedding", "both")

    @property
    def in_prompt(self) -> bool:
        """True if the policy receives its budget as a sentence in the prompt."""
        return self.budget_input in ("prompt", "both")


@dataclass(frozen=True)
class BudgetConfig:
    """Settings of the thinking budgets, in tokens, and of their distribution during training."""

    min: int = key(256, "smallest budget b_min", "[1, inf)")
    max: int = key(4096, "largest budget b_max", "[1, inf)")
    prior: Literal["curriculum", "uniform", "choices", "fixed"] = key(
        "curriculum",
        "curriculum: Eq. 4-5; uniform: over [min, max]; choices: from budget.choices; fixed: "
        "always max",
    )
    choices: tuple[int, ...] = key(
        (),
        "budgets that are sampled with equal probability (prior: choices); empty: eval.budgets "
        "between min and max",
        "[1, inf)",
    )
    stages: tuple[float, ...] = key(
        (),
        "largest budget of each of equally long stages of training, as fractions of max, such as "
        "[1, 0.75, 0.5] (ThinkPrune); larger sampled budgets are lowered to it; a stage ends at "
        "its share of the steps or of train.max_generated_tokens; empty: one stage",
        "(0, 1]",
    )
    levels: Mapping[str, int] = key(
        FrozenMap(),
        "named budgets for evaluate and generate, such as {low: 512, high: 4096}",
        "[0, 2147483647]",
    )
    cap: int | None = key(
        None,
        "maximum number of thinking tokens if evaluate and generate use no budget; null: "
        "budget.max",
        "[1, 2147483647]",
    )
    grace: int = key(
        0,
        "maximum number of thinking tokens after the budget, up to the next line break; 0: none",
        "[0, inf)",
    )
    assign: Literal["independent", "shared", "stratified"] = key(
        "independent",
        "independent: one sample per rollout (paper); shared: one per question; stratified: "
        "spread over the quantiles",
    )
    shuffle_input: bool = key(
        False,
        "control experiment: in training, the policy receives the budget of a random trace of the "
        "batch, which is independent of the budget at which its own trace is truncated",
    )


@dataclass(frozen=True)
class CurriculumConfig:
    """Settings of the curriculum over budgets (paper Eq. 4-6).

    The curriculum adapts the distribution of budgets to the pass rate of each difficulty group.
    """

    alpha: float = key(0.6, "how strongly a high pass rate shortens the budget (Eq. 5)", "[0, 1]")
    beta: float = key(0.3, "how strongly a low pass rate lengthens the budget (Eq. 5)", "[0, 1]")
    mu0: float | tuple[float, ...] = key(
        1500.0,
        "initial location mu(0) of the budget distribution, one number or one per group",
        "(0, inf)",
    )
    sigma: float = key(
        512.0, "scale of the truncated normal distribution of budgets, in tokens", "(0, inf)"
    )
    clip_mu: bool = key(True, "clip mu to [budget.min, budget.max]")
    pass_rate: Literal["ema", "epoch"] = key(
        "ema", "ema: exponential moving average; epoch: the pass rate of each period (paper)"
    )
    ema_decay: float = key(0.9, "decay of the moving average per step", "[0, 1)")
    update_every: int | None = key(
        10,
        "number of steps between updates of the curriculum; null: once per epoch (paper)",
        "[1, inf)",
    )
    weight_epsilon: float = key(
        0.02,
        "constant added to rho(1-rho) so that every group keeps some weight; 0: paper",
        "[0, inf)",
    )
    size_weighted: bool = key(False, "multiply group weights by group sizes")


@dataclass(frozen=True)
class CutsConfig:
    """Settings of the points at which traces are truncated (cuts), and of the cuts' weights."""

    count: int = key(4, "number of truncation points M per trace, the last one at b", "[1, 64]")
    kind: Literal["even", "random"] = key(
        "even",
        "even: evenly spaced up to b (paper appendix); random: sampled for each trace (bacr, "
        "s_grpo)",
    )
    weights: Literal["uniform", "final_heavy", "last"] | tuple[float, ...] = key(
        "uniform",
        "weight of each cut in the objective: uniform (paper); final_heavy: 0.7 for the last cut; "
        "last: 1 for the last cut; or a list of weights",
        "[0, 1]",
    )


@dataclass(frozen=True)
class RewardConfig:
    """Settings of the reward functions and of the dense reward (paper Eq. 7-9).

    The dense reward adds progress: the change of correctness from one truncation point of a trace
    to the next.
    """

    weights: Mapping[str, float] = key(
        FrozenMap(),
        "weights of the rewards, such as {correct: 1, FILE.py:function: .2}, which are divided by "
        "their sum; {}: only correctness",
        "(0, inf)",
    )
    normalize_each: bool = key(
        False,
        "normalise each reward within its group before the rewards are added (GDPO; method grpo)",
    )

    dense: bool = key(True, "add the progress reward; false: only outcome rewards")
    coefficient: float = key(0.3, "weight lambda of the progress reward", "[0, inf)")


@dataclass(frozen=True)
class AdvantageConfig:
    """Settings of the advantage estimation, whose baseline depends on the budget (Eq. 10-14)."""

    baseline: Literal[
        "value",
        "group",
        "residual_loo",
        "shrink",
        "constant",
        "optimal_token",
        "batch",
        "same_budget",
    ] = key(
        "value",
        "value: V(q,b) (paper); group: mean of the group; residual_loo, shrink: value plus a "
        "leave-one-out correction; constant: one running mean per cut, without a value head; "
        "optimal_token: arXiv 2602.07078, per group and position; batch: mean of the other traces "
        "of the batch; same_budget: mean of the traces with the same budget",
    )
    credit: Literal["to_go", "answer_literal", "trajectory", "segment"] = key(
        "to_go",
        "advantage of each thinking token: to_go, answer_literal: sum over the cuts after it; "
        "trajectory: sum over all cuts, the same for the whole trace (Eq. 15); segment: only the "
        "next cut",
    )
    normalise: Literal["batch_rms", "group", "none"] = key(
        "batch_rms",
        "divisor of the advantages: batch_rms: root mean square of the batch; group: standard "
        "deviation of the group; none: 1",
    )
    floor: float = key(0.1, "minimum divisor (the epsilon of Eq. 14)", "(0, inf)")
    score_weighted: bool = key(
        False,
        "shift the baseline to minimise gradient noise: weight each return by how improbable its "
        "trace was (an extension that is not in the paper)",
    )
    same_shift_for_batch: bool = key(
        False,
        "with score_weighted: shift all baselines of a batch by the same amount, the mean of "
        "their shifts (a control: docs/studies/controls.md)",
    )
    score_by_budget: bool = key(
        False,
        "with score_weighted or baseline=constant: keep separate running means for each doubling "
        "of the budget, for budgets that span more than a factor of two",
    )


@dataclass(frozen=True)
class ValueConfig:
    """Settings of the value head V(q, b) and its optimizer (paper Eq. 11).

    V predicts the return for question q at budget b.
    """

    hidden_size: int = key(1024, "hidden size of the two-layer head", "[1, inf)")
    input: Literal["cut", "trace_and_cut", "trace"] = key(
        "trace_and_cut",
        "budgets that are the input of the head: cut: V(q, b_j) (paper); trace_and_cut: V(q, b, "
        "b_j); trace: V(q, b)",
    )
    stop_gradient: bool = key(True, "do not propagate the value loss into the policy")
    learning_rate: float = key(1e-3, "learning rate of the head's Adam optimizer", "(0, inf)")
    inner_steps: int = key(4, "number of Adam steps of the head per iteration", "[0, inf)")
    warmup_iterations: int = key(
        0, "number of initial iterations in which only the head is trained", "[0, inf)"
    )
    bias_start: bool = key(True, "initialise V to the mean reward of the first batch; false: to 0")


@dataclass(frozen=True)
class AnytimeConfig:
    """Settings of the method AnytimeReasoner (arXiv 2505.13438).

    Its budgets are the truncation points of a trace with the budget `budget.max`.
    """

    prior: Literal["base", "uniform", "linear"] = key(
        "uniform",
        "weight of each budget: base: only the largest; uniform: equal; linear: proportional to "
        "its size",
    )
    answer_prior: Literal["base", "uniform", "linear"] = key(
        "uniform", "weight of each budget in the gradient of the answer tokens (published: uniform)"
    )
    baseline: Literal["brpo", "v1", "v2", "none"] = key(
        "brpo",
        "brpo: the published BRPO; v1: only the earlier cuts of the trace; v2: only the group "
        "(simplified BRPO); none: no baseline",
    )
    loo: bool = key(False, "exclude the trace itself from the mean of its group (published: false)")
    answers: int = key(4, "number of answers sampled at every budget (published: 4)", "[1, inf)")


@dataclass(frozen=True)
class DapoConfig:
    """Settings of the method DAPO (arXiv 2503.14476).

    DAPO also uses `loss.clip_high` and `loss.aggregate`. The method DLER uses `dynamic_sampling`
    and `max_rounds`.
    """

    dynamic_sampling: bool = key(
        True, "continue sampling until enough questions have mixed outcomes"
    )
    max_rounds: int = key(10, "maximum number of sampling rounds per iteration", "[1, inf)")
    overlong_penalty: float = key(
        1.0, "maximum penalty of a long response; 0: no penalty", "[0, inf)"
    )
    overlong_share: float = key(
        0.2,
        "final part of the maximum response length, as a fraction of it, over which the penalty "
        "grows (published: 4096/20480)",
        "(0, 1]",
    )


@dataclass(frozen=True)
class HapoConfig:
    """Settings of the method HAPO (arXiv 2505.11225)."""

    weight: float = key(1.0, "weight of the length reward", "[0, inf)")
    # Above -1, which is the length reward of a wrong response. A long correct response must not get
    # a lower reward than a wrong one.
    floor: float = key(-0.7, "minimum length reward of a correct response", "(-1, 0]")
    kind: Literal["cosine", "linear"] = key("cosine", "shape of the length reward")


@dataclass(frozen=True)
class SelfBudgeterConfig:
    """Settings of the method SelfBudgeter (arXiv 2505.11274).

    The default constants were written from memory and have not been verified against the
    publication.
    """

    alpha_start: float = key(
        6.0, "tolerance at the start, as a fraction of the declared budget", "(0, inf)"
    )
    alpha_end: float = key(
        0.1,
        "tolerance at the end of the steps or of train.max_generated_tokens; the tolerance "
        "decreases linearly",
        "(0, inf)",
    )
    correct_range: tuple[float, ...] = key(
        (0.5, 1.0), "range of the rewards of correct responses (from memory)", "(-inf, inf)"
    )
    wrong_range: tuple[float, ...] = key(
        (-0.5, 0.0), "range of the rewards of wrong responses (from memory)", "(-inf, inf)"
    )
    budget_penalty: float = key(
        -0.4,
        "added to the reward if the declared budget is larger than the initial policy needed "
        "(from memory)",
        "(-inf, 0]",
    )
    format_penalty: float = key(
        -1.0, "reward of a response without a budget tag or an end (from memory)", "(-inf, inf)"
    )
    cold_start_steps: int = key(
        200, "number of supervised steps that teach the budget tag", "[0, inf)"
    )
    cold_start_questions: int | None = key(
        None,
        "number of training questions that are answered once before these steps; null: all",
        "[1, inf)",
    )
    cold_start_rate: float | None = key(
        None, "learning rate of these steps; null: 4 x optimizer.learning_rate", "(0, inf)"
    )
    cold_start_tokens: int = key(
        8192, "number of tokens per supervised step, including padding", "[1, inf)"
    )


@dataclass(frozen=True)
class L1Config:
    """Settings of the method L1 (arXiv 2503.04697).

    Its budgets are sampled from the distribution that `budget.prior` selects.
    """

    kind: Literal["exact", "max"] = key(
        "exact",
        "exact: reward responses whose length equals the budget; max: reward responses of at most "
        "this length",
    )
    # The published penalty is 3e-4 per token, for responses of at most 4,096 tokens.
    weight: float = key(
        1.2288, "penalty if the length differs from the budget by budget.max tokens", "[0, inf)"
    )
    offset: float = key(
        0.5, "kind max: reward of a correct response whose length equals the budget", "[0, 1]"
    )


@dataclass(frozen=True)
class LengthConfig:
    """Settings of the methods that reward short responses.

    The methods are Laser (arXiv 2505.15612), ShorterBetter (arXiv 2504.21370), GFPO (arXiv
    2508.09726), and the length rewards of two training libraries: `gated_bonus` from prime-rl and
    `gated_penalty` from miles.
    """

    kind: Literal["laser", "shorter_better", "gfpo", "gated_bonus", "gated_penalty"] = key(
        "laser", "method that rewards short responses"
    )
    target: float = key(0.25, "kind laser: target length, as a fraction of budget.max", "(0, 1]")
    weight: float = key(
        0.5,
        "kind laser: bonus of a correct response within the target length; shorter_better: "
        "penalty if the length differs from the shortest correct response by budget.max tokens; "
        "gated_bonus: bonus of a correct response of length 0; gated_penalty: penalty of a "
        "correct response that exceeds the allowed length by the reference length",
        "[0, inf)",
    )
    keep_fraction: float = key(
        0.3333333333333333,
        "kind gfpo: fraction of each group, its shortest traces, that is used for training; at "
        "least two traces",
        "(0, 1]",
    )
    # Below 1, because a larger penalty would rank a correct response below wrong responses.
    cap: float = key(0.2, "kind gated_penalty: maximum penalty", "[0, 1)")
    quantile: float = key(
        0.25,
        "kind gated_penalty: quantile of the lengths of a group's correct responses that is the "
        "reference length",
        "[0, 1]",
    )
    relative_slack: float = key(
        0.1, "kind gated_penalty: tolerance, as a fraction of the reference length", "[0, inf)"
    )
    absolute_slack: float = key(
        0.03125, "kind gated_penalty: additional tolerance, as a fraction of budget.max", "[0, inf)"
    )


@dataclass(frozen=True)
class ElasticConfig:
    """Settings of the method Elastic Reasoning (arXiv 2505.05315).

    The method has separate budgets for thinking and for the solution. The budget for the solution
    is `rollout.answer_tokens`.
    """

    share: float = key(0.25, "thinking budget, as a fraction of budget.max", "(0, 1]")


@dataclass(frozen=True)
class DistillConfig:
    """Settings of on-policy distillation, which every method can add to its advantages.

    The teacher scores the policy's own traces. Each sampled token gets the additional advantage
    coef (log pi_teacher - log pi_old).
    """

    coef: float = key(
        0.0,
        "weight of the teacher's log-probabilities in the advantages; 0: no teacher",
        "[0, inf)",
    )
    teacher: str | None = key(
        None,
        "Hugging Face folder of the teacher, with the policy's vocabulary; null: the policy "
        "itself, with budget.max as its budget embedding",
    )


@dataclass(frozen=True)
class LossConfig:
    """Settings of the policy loss, the value loss and the entropy bonus (paper Eq. 15-16)."""

    # Between 0 and 1, because a lower limit 1 - clip_low of 0 or less would never clip a ratio.
    clip_low: float = key(0.2, "clipping range epsilon_c for ratios below 1", "(0, 1)")
    clip_high: float = key(0.2, "clipping range epsilon_c for ratios above 1", "(0, inf)")
    # Above 1, because a lower limit would remove the gradient at a ratio of 1.
    dual_clip: float | None = key(
        None,
        "maximum ratio of tokens with a negative advantage (dual-clip PPO); null: off",
        "(1, inf)",
    )
    ratio: Literal["token", "sequence", "gspo"] = key(
        "token",
        "importance ratio: token: of each token; sequence: of the whole trace (paper); gspo: of "
        "the whole trace, length-normalised",
    )
    aggregate: Literal["constant", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = key(
        "constant",
        "constant: sum over tokens / (rows x budget.max); token_mean: mean over all tokens; "
        "seq_mean_token_mean: mean over rows of token means; seq_mean_token_sum: mean over rows "
        "of token sums",
    )
    value_coef: float = key(
        0.5, "weight c_v of the value loss; 0: V is trained only by the inner steps", "[0, inf)"
    )
    entropy_coef: float = key(0.01, "weight c_h of the entropy bonus", "[0, inf)")
    kl_coef: float = key(
        0.0, "weight of the KL divergence from the starting policy; 0: off", "[0, inf)"
    )
    kl_kind: Literal["k1", "k2", "k3", "k3+"] = key(
        "k3+",
        "estimator of this KL divergence; k3+ has the value of k3 and the (exact) gradient of k2",
    )
    # At least 1, because a lower cap would scale down the loss even where the sampler and the
    # learner assign the same probability.
    importance_cap: float | None = key(
        None,
        "maximum importance weight p(learner)/p(sampler) of a token (truncated importance "
        "sampling); null: off",
        "[1, inf)",
    )
    # At least 1, because traces on which the sampler and the learner agree have weight 1.
    sequence_cap: float | None = key(
        None,
        "weight the tokens of a trace by p(learner)/p(sampler) of the whole trace, and exclude the "
        "trace from the policy loss if this ratio is above this value (masked importance "
        "sampling); null: off",
        "[1, inf)",
    )
    sequence_mask: float | None = key(
        None,
        "exclude a trace from the policy loss if its mean |log p(learner)/p(sampler)| per token "
        "is above this value; null: off",
        "(0, inf)",
    )
    overlong_filter: bool = key(
        False, "exclude traces that were truncated at the budget from the loss"
    )
    old_logprobs: Literal["scored", "learner", "sampler"] = key(
        "scored",
        "source of pi_old for the ratio: scored: a learner forward pass over all rows; learner: "
        "the forward pass of the first update, so that its ratio is 1, and an additional pass "
        "over the rows of later updates; sampler: the log-probabilities of the sampler, without a "
        "pass (importance_cap bounds the ratio)",
    )
