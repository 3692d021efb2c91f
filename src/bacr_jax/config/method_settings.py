"""Settings of the methods: how budgets are drawn and passed to the policy, rewards and losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bacr_jax.config.fields import key
from bacr_jax.config.values import FrozenMap


@dataclass(frozen=True)
class ConditioningConfig:
    """Input through which the policy receives its budget; in the paper an embedding (Eq. 2-3)."""

    told: Literal["embedding", "words", "both", "nothing"] = key(
        "embedding",
        "input of the budget: embedding: phi(b); words: a sentence in the prompt; both; or nothing",
    )
    words: str = key(
        "Think for at most {budget} tokens.",
        "sentence after the question (told: words or both); the ledger uses tokens instead",
    )
    sharing: Literal["shared", "per_layer"] = key(
        "shared", "shared: one phi for all layers; per_layer: one phi per layer"
    )
    positions: Literal["all", "response"] = key("all", "positions to which phi(b) is added")
    input: Literal["raw", "log", "normalised"] = key(
        "raw", "raw: sinusoids of b (paper); log: of log b; normalised: of 1000 b / budget.max"
    )
    gate: Literal["sigmoid", "sigmoid_normed", "tanh"] = key(
        "sigmoid",
        "sigmoid: gate of Eq. 3 on the raw stream; sigmoid_normed: on the RMS-normed stream; tanh: "
        "a tanh gate",
    )
    gate_bias: float = key(0.0, "constant added inside the gate (-4: nearly closed)", "(-inf, inf)")

    @property
    def embeds(self) -> bool:
        """True if the policy receives its budget as phi(b)."""
        return self.told in ("embedding", "both")

    @property
    def in_words(self) -> bool:
        """True if the policy receives its budget in the prompt."""
        return self.told in ("words", "both")


@dataclass(frozen=True)
class BudgetConfig:
    """Thinking budgets, in tokens, and the prior they are drawn from."""

    min: int = key(256, "smallest budget b_min", "[1, inf)")
    max: int = key(4096, "largest budget b_max", "[1, inf)")
    prior: Literal["curriculum", "uniform", "choices", "fixed"] = key(
        "curriculum",
        "curriculum: Eq. 4-5; uniform: over [min, max]; choices: from budget.choices; fixed: max",
    )
    choices: tuple[int, ...] = key(
        (),
        "budgets with equal probability (prior: choices); empty: eval.budgets between min and max",
        "[1, inf)",
    )
    levels: Mapping[str, int] = key(
        FrozenMap(),
        "names of budgets for evaluate and generate, such as {low: 512, high: 4096}",
        "[0, 2147483647]",
    )
    cap: int | None = key(
        None,
        "most thinking tokens if evaluate and generate use no budget; null: budget.max",
        "[1, 2147483647]",
    )
    grace: int = key(
        0,
        "most tokens of thinking after the budget, up to the next line break; 0: none",
        "[0, inf)",
    )
    assign: Literal["independent", "shared", "stratified"] = key(
        "independent",
        "independent: one draw per rollout (paper); shared: one per question; stratified: spread "
        "over the quantiles",
    )


@dataclass(frozen=True)
class CurriculumConfig:
    """Curriculum-aware scheduler (paper Eq. 4-6)."""

    alpha: float = key(0.6, "how strongly a high pass rate shortens the budget (Eq. 5)", "[0, 1]")
    beta: float = key(0.3, "how strongly a low pass rate lengthens the budget (Eq. 5)", "[0, 1]")
    mu0: float | tuple[float, ...] = key(
        1500.0, "initial location mu(0) of the budgets, one number or one per group", "(0, inf)"
    )
    sigma: float = key(512.0, "scale of the truncated normal of budgets, in tokens", "(0, inf)")
    clip_mu: bool = key(True, "keep mu inside [budget.min, budget.max]")
    pass_rate: Literal["ema", "epoch"] = key(
        "ema", "ema: running estimate; epoch: the pass rate of each period (paper)"
    )
    ema_decay: float = key(0.9, "decay per step of the running estimate", "[0, 1)")
    update_every: int | None = key(
        10, "steps between updates; null: once an epoch (paper)", "[1, inf)"
    )
    weight_epsilon: float = key(
        0.02, "added to rho(1-rho) so that every group keeps some weight; 0: paper", "[0, inf)"
    )
    size_weighted: bool = key(False, "multiply group weights by group sizes")


@dataclass(frozen=True)
class CutsConfig:
    """Truncation points."""

    count: int = key(4, "truncation points M per trace, the last one at b", "[1, 64]")
    kind: Literal["even", "random"] = key(
        "even",
        "even: evenly spaced up to b (paper appendix); random: drawn per trace (bacr, s_grpo)",
    )
    weights: Literal["uniform", "final_heavy", "own_budget"] | tuple[float, ...] = key(
        "uniform",
        "weight of each cut in the objective: uniform (paper); final_heavy: last cut .7; "
        "own_budget: last cut 1; or a list",
        "[0, 1]",
    )


@dataclass(frozen=True)
class RewardConfig:
    """Rewards of training, and the dense reward (paper Eq. 7-9)."""

    weights: Mapping[str, float] = key(
        FrozenMap(),
        "weights of the rewards, such as {correct: 1, FILE.py:function: .2}; divided by their sum; "
        "{}: only correctness",
        "(0, inf)",
    )
    apart: bool = key(
        False, "normalise each reward in its group before they are added (GDPO; method grpo)"
    )

    dense: bool = key(True, "add the progress reward; false: only outcomes")
    coefficient: float = key(0.3, "lambda, weight of the progress reward", "[0, inf)")


@dataclass(frozen=True)
class AdvantageConfig:
    """Budget-conditioned advantage estimation (paper Eq. 10-14)."""

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
        "value: V(q,b) (paper); group: mean of the group; residual_loo, shrink: value with a "
        "leave-one-out part; constant: one running mean per cut, without a value head; "
        "optimal_token: arXiv 2602.07078, per group and position; batch: mean of the batch's other "
        "traces; same_budget: mean of the traces with the same budget",
    )
    credit: Literal["to_go", "answer_literal", "trajectory", "segment"] = key(
        "to_go",
        "advantage of each token; to_go: from the rewards after it; trajectory: one per trace",
    )
    normalise: Literal["batch_rms", "group", "none"] = key(
        "batch_rms",
        "divisor: batch_rms: the batch's root mean square; group: the group's standard deviation; "
        "none: 1",
    )
    floor: float = key(0.1, "smallest divisor (the epsilon of Eq. 14)", "(0, inf)")
    score_weighted: bool = key(
        False,
        "move the baseline to minimise gradient noise: weight returns by how improbable a trace "
        "was (an extension; not in the paper)",
    )
    score_uniform: bool = key(
        False,
        "with score_weighted: move all baselines of a batch by the same number, the mean of their "
        "shifts (a control: docs/studies/controls.md)",
    )
    score_by_budget: bool = key(
        False,
        "with score_weighted or baseline=constant: separate running means for every doubling of "
        "the budget, for budgets that span more than a factor of two",
    )


@dataclass(frozen=True)
class ValueConfig:
    """Value head V(q, b) (paper Eq. 11)."""

    hidden_size: int = key(1024, "width of the two-layer head", "[1, inf)")
    input: Literal["cut", "trace_and_cut", "trace"] = key(
        "trace_and_cut",
        "budgets that the head receives: cut: V(q, b_j) (paper); trace_and_cut: V(q, b, b_j); "
        "trace: V(q, b)",
    )
    stop_gradient: bool = key(True, "do not propagate the value loss into the policy")
    learning_rate: float = key(1e-3, "learning rate of the head's Adam optimizer", "(0, inf)")
    inner_steps: int = key(4, "Adam steps of the head per iteration", "[0, inf)")
    warmup_iterations: int = key(0, "first iterations, which fit only the head", "[0, inf)")
    bias_start: bool = key(True, "start V at the mean reward of the first batch; false: at 0")


@dataclass(frozen=True)
class AnytimeConfig:
    """AnytimeReasoner (arXiv 2505.13438); budgets are the cuts of budget.max."""

    prior: Literal["base", "uniform", "linear"] = key(
        "uniform",
        "weight of each budget: base: only the largest; uniform: equal; linear: by its size",
    )
    answer_prior: Literal["base", "uniform", "linear"] = key(
        "uniform", "weight of each budget in the answers' part of the gradient (published: uniform)"
    )
    baseline: Literal["brpo", "v1", "v2", "none"] = key(
        "brpo",
        "brpo: published BRPO; v1: the trace's earlier cuts; v2: only the group (simplified BRPO); "
        "none",
    )
    loo: bool = key(False, "leave the trace itself out of the group's mean (published: false)")
    answers: int = key(4, "answers sampled at every budget (published: 4)", "[1, inf)")


@dataclass(frozen=True)
class DapoConfig:
    """DAPO (arXiv 2503.14476); loss.clip_high and loss.aggregate belong to it too."""

    dynamic_sampling: bool = key(
        True, "continue sampling until enough questions have mixed outcomes"
    )
    max_rounds: int = key(10, "most rounds of sampling per iteration", "[1, inf)")
    overlong_penalty: float = key(
        1.0, "largest penalty of a long response; 0: no penalty", "[0, inf)"
    )
    overlong_share: float = key(
        0.2,
        "last share of the longest response, in which the penalty grows (published: 4096/20480)",
        "(0, 1]",
    )


@dataclass(frozen=True)
class HapoConfig:
    """HAPO (arXiv 2505.11225)."""

    weight: float = key(1.0, "weight of the length reward", "[0, inf)")
    # A lower floor would rank a long right answer below wrong ones.
    floor: float = key(-0.7, "smallest length reward of a correct response", "(-1, 0]")
    kind: Literal["cosine", "linear"] = key("cosine", "shape of the length reward")


@dataclass(frozen=True)
class SelfBudgeterConfig:
    """SelfBudgeter (arXiv 2505.11274). Its constants are from memory, not checked in print."""

    alpha_start: float = key(
        6.0, "tolerance at the start, as a fraction of the declared budget", "(0, inf)"
    )
    alpha_end: float = key(
        0.1, "tolerance at the end; the tolerance decreases linearly", "(0, inf)"
    )
    correct_range: tuple[float, ...] = key(
        (0.5, 1.0), "range of rewards of correct responses (from memory)", "(-inf, inf)"
    )
    wrong_range: tuple[float, ...] = key(
        (-0.5, 0.0), "range of rewards of wrong responses (from memory)", "(-inf, inf)"
    )
    budget_penalty: float = key(
        -0.4,
        "added if the declared budget is larger than the initial policy needed (from memory)",
        "(-inf, 0]",
    )
    format_penalty: float = key(
        -1.0, "reward of a response without a budget or an end (from memory)", "(-inf, inf)"
    )
    cold_start_steps: int = key(200, "supervised steps that teach the budget tag", "[0, inf)")
    cold_start_questions: int | None = key(
        None, "training questions answered once before these steps; null: all", "[1, inf)"
    )
    cold_start_rate: float | None = key(
        None, "learning rate of these steps; null: 4 x optimizer.learning_rate", "(0, inf)"
    )
    cold_start_tokens: int = key(8192, "tokens per supervised step, padding included", "[1, inf)")


@dataclass(frozen=True)
class L1Config:
    """L1 (arXiv 2503.04697); budget.prior draws its budgets."""

    kind: Literal["exact", "max"] = key(
        "exact", "exact: reward responses as long as the budget; max: at most as long"
    )
    # Published: 3e-4 a token, where a response has at most 4,096.
    weight: float = key(
        1.2288, "penalty if the length differs from the budget by budget.max tokens", "[0, inf)"
    )
    offset: float = key(
        0.5, "kind max: reward of a correct response exactly as long as the budget", "[0, 1]"
    )


@dataclass(frozen=True)
class LengthConfig:
    """Laser, ShorterBetter (arXiv 2505.15612, 2504.21370) and GFPO (2508.09726)."""

    kind: Literal["laser", "shorter_better", "gfpo"] = key(
        "laser", "rule that rewards short responses"
    )
    target: float = key(0.25, "kind laser: the target length, as a share of budget.max", "(0, 1]")
    weight: float = key(
        0.5,
        "kind laser: bonus of a correct response within the target; shorter_better: penalty if the "
        "length differs from the shortest correct response by budget.max tokens",
        "[0, inf)",
    )
    kept: float = key(
        0.3333333333333333,
        "kind gfpo: share of a group, its shortest traces, that is trained on; at least two traces",
        "(0, 1]",
    )


@dataclass(frozen=True)
class ElasticConfig:
    """Elastic Reasoning (arXiv 2505.05315); rollout.answer_tokens is its budget for solutions."""

    share: float = key(0.25, "budget for thinking, as a share of budget.max", "(0, 1]")


@dataclass(frozen=True)
class LossConfig:
    """Clipped policy loss, value loss and entropy (paper Eq. 15-16)."""

    # A range of ratios that is empty or reaches 0 or below would not clip.
    clip_low: float = key(0.2, "clipping range epsilon_c below a ratio of 1", "(0, 1)")
    clip_high: float = key(0.2, "clipping range epsilon_c above a ratio of 1", "(0, inf)")
    ratio: Literal["token", "sequence", "gspo"] = key(
        "token",
        "importance ratio: token: per token; sequence: of the trace (paper); gspo: of the trace, "
        "length-normalised",
    )
    aggregate: Literal["constant", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = key(
        "constant",
        "constant: sum over tokens / (rows x budget.max); token_mean: mean over tokens; "
        "seq_mean_token_mean: mean of row means; seq_mean_token_sum: mean of row sums",
    )
    value_coef: float = key(
        0.5, "weight c_v of the value loss; 0: only the inner steps train V", "[0, inf)"
    )
    entropy_coef: float = key(0.01, "weight c_h of the entropy bonus", "[0, inf)")
    kl_coef: float = key(
        0.0, "weight of the divergence from the starting policy; 0: off", "[0, inf)"
    )
    kl_kind: Literal["k1", "k2", "k3", "k3+"] = key(
        "k3+", "estimator of that divergence; k3+ has k3's value and k2's (exact) gradient"
    )
    # Below 1 it would shrink the loss where sampler and learner agree.
    importance_cap: float | None = key(
        None,
        "largest weight p(learner)/p(sampler) of a token (truncated importance); null: off",
        "[1, inf)",
    )
    sequence_mask: float | None = key(
        None,
        "leave traces out of the policy loss whose mean |log p(learner)/p(sampler)| per token is "
        "above this value; null: off",
        "(0, inf)",
    )
    overlong_filter: bool = key(
        False, "leave traces that were truncated at the budget out of the loss"
    )
    old_logprobs: Literal["scored", "learner", "sampler"] = key(
        "scored",
        "pi_old of the ratio: scored: a learner pass over all rows; learner: the first update's "
        "forward pass, so that its ratio is 1, and a learner pass over the rows of later updates; "
        "sampler: the sampler's log-probabilities, no pass (importance_cap bounds the ratio)",
    )
