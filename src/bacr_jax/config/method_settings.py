"""Settings of the methods: what the policy is told, which budgets it gets, how it is rewarded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bacr_jax.config.fields import key
from bacr_jax.config.values import FrozenMap


@dataclass(frozen=True)
class ConditioningConfig:
    """How the policy is told its budget; the paper: by an embedding (Eq. 2-3)."""

    told: Literal["embedding", "words", "both", "nothing"] = key(
        "embedding", "how the budget is told: phi(b), a sentence in the prompt, both, or not at all"
    )
    words: str = key(
        "Think for at most {budget} tokens.",
        "that sentence, after the question (told: words, both); the ledger has its own",
    )
    sharing: Literal["shared", "per_layer"] = key("shared", "one phi for all layers, or one each")
    positions: Literal["all", "response"] = key("all", "positions that receive phi(b)")
    input: Literal["raw", "log", "normalised"] = key(
        "raw", "sinusoids of b (paper), of log b, or of 1000 b / budget.max"
    )
    gate: Literal["sigmoid", "sigmoid_normed", "tanh"] = key(
        "sigmoid", "gate of Eq. 3 on the raw stream, on the RMS-normed stream, or a tanh gate"
    )
    gate_bias: float = key(0.0, "constant added inside the gate (-4: nearly closed)", "(-inf, inf)")

    @property
    def embeds(self) -> bool:
        """Whether the policy is told by phi(b)."""
        return self.told in ("embedding", "both")

    @property
    def in_words(self) -> bool:
        """Whether the policy is told in its prompt."""
        return self.told in ("words", "both")


@dataclass(frozen=True)
class BudgetConfig:
    """Thinking budgets, in tokens, and the prior they are drawn from."""

    min: int = key(256, "smallest budget b_min", "[1, inf)")
    max: int = key(4096, "largest budget b_max", "[1, inf)")
    prior: Literal["curriculum", "uniform", "choices", "fixed"] = key(
        "curriculum", "curriculum: Eq. 4-5; uniform over [min, max]; choices: below; fixed: max"
    )
    choices: tuple[int, ...] = key(
        (), "drawn equally often (prior: choices); empty: those of eval.budgets", "[1, inf)"
    )
    levels: Mapping[str, int] = key(
        FrozenMap(),
        "names that evaluate and generate take for budgets, such as {low: 512, high: 4096}",
        "[0, 2147483647]",
    )
    cap: int | None = key(
        None,
        "most thinking tokens where evaluate and generate tell no budget; null: budget.max",
        "[1, 2147483647]",
    )
    grace: int = key(
        0,
        "tokens after the budget within which thinking may go on to the next line break; 0: none",
        "[0, inf)",
    )
    assign: Literal["independent", "shared", "stratified"] = key(
        "independent", "per rollout (paper); one per question; or spread over the quantiles"
    )


@dataclass(frozen=True)
class CurriculumConfig:
    """Curriculum-aware scheduler (paper Eq. 4-6)."""

    alpha: float = key(0.6, "how much a high pass rate shortens the budget (Eq. 5)", "[0, 1]")
    beta: float = key(0.3, "how much a low pass rate lengthens it (Eq. 5)", "[0, 1]")
    mu0: float | tuple[float, ...] = key(
        1500.0, "initial location of budgets mu(0), one or one per group", "(0, inf)"
    )
    sigma: float = key(512.0, "scale of the truncated normal of budgets, in tokens", "(0, inf)")
    clip_mu: bool = key(True, "keep mu inside [budget.min, budget.max]")
    pass_rate: Literal["ema", "epoch"] = key(
        "ema", "running estimate, or each period's plain rate (paper)"
    )
    ema_decay: float = key(0.9, "decay per step of the running estimate", "[0, 1)")
    update_every: int | None = key(
        10, "steps between updates; null: once an epoch (paper)", "[1, inf)"
    )
    weight_epsilon: float = key(
        0.02, "added to rho(1-rho) so that no group is lost; 0: paper", "[0, inf)"
    )
    size_weighted: bool = key(False, "multiply group weights by group sizes")


@dataclass(frozen=True)
class CutsConfig:
    """Truncation points."""

    count: int = key(4, "truncation points M per trace, the last one at b", "[1, 64]")
    kind: Literal["even", "random"] = key(
        "even", "evenly spaced up to b (paper appendix), or drawn for every trace (bacr, s_grpo)"
    )
    weights: Literal["uniform", "final_heavy", "own_budget"] | tuple[float, ...] = key(
        "uniform",
        "weight of each cut in the objective: uniform (paper), last .7, last 1, or a list",
        "[0, 1]",
    )


@dataclass(frozen=True)
class RewardConfig:
    """What training credits, and its dense form (paper Eq. 7-9)."""

    weights: Mapping[str, float] = key(
        FrozenMap(),
        "rewards that training mixes, such as {correct: 1, FILE.py:function: .2}; they are divided "
        "by their sum; {}: correctness alone",
        "(0, inf)",
    )
    apart: bool = key(
        False, "normalise each of them in its group before they are added (GDPO; method grpo)"
    )

    dense: bool = key(True, "add the progress reward; false: outcomes only")
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
        "leave-one-out part; constant: one running number per cut, without a value head; "
        "optimal_token: arXiv 2602.07078, per group and position; batch: mean of the batch's other "
        "traces; same_budget: mean of those with the same budget",
    )
    credit: Literal["to_go", "answer_literal", "trajectory", "segment"] = key(
        "to_go",
        "which tokens get which advantage; to_go: what comes after them; trajectory: one a trace",
    )
    normalise: Literal["batch_rms", "group", "none"] = key(
        "batch_rms", "divide by the batch's root mean square, the group's deviation, or nothing"
    )
    floor: float = key(0.1, "smallest divisor (the epsilon of Eq. 14)", "(0, inf)")
    score_weighted: bool = key(
        False,
        "move the baseline to where it leaves least gradient noise: returns weighted by how "
        "improbable a trace was (an extension; not in the paper)",
    )
    score_uniform: bool = key(
        False,
        "with score_weighted: move all of a batch's baselines by the same number, the mean of what "
        "they would move by (a control: docs/studies/controls.md)",
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
        "budgets the head is told: cut: V(q, b_j) (paper); trace_and_cut: V(q, b, b_j); "
        "trace: V(q, b)",
    )
    stop_gradient: bool = key(True, "the head reads states without steering the policy")
    learning_rate: float = key(1e-3, "rate of the head's own Adam", "(0, inf)")
    inner_steps: int = key(4, "Adam steps of the head per iteration", "[0, inf)")
    warmup_iterations: int = key(0, "iterations that fit only the head, first", "[0, inf)")
    bias_start: bool = key(True, "start V at the first batch's mean reward; false: at 0")


@dataclass(frozen=True)
class AnytimeConfig:
    """AnytimeReasoner (arXiv 2505.13438); budgets are the cuts of budget.max."""

    prior: Literal["base", "uniform", "linear"] = key(
        "uniform", "weight of each budget: the largest alone, alike, or by its size"
    )
    answer_prior: Literal["base", "uniform", "linear"] = key(
        "uniform", "the same for the answers' part of the gradient (published: uniform)"
    )
    baseline: Literal["brpo", "v1", "v2", "none"] = key(
        "brpo", "published BRPO; own past; group alone (simplified BRPO); none"
    )
    loo: bool = key(False, "leave the trace itself out of the group's mean (published: false)")
    answers: int = key(4, "answers sampled at every budget (published: 4)", "[1, inf)")


@dataclass(frozen=True)
class DapoConfig:
    """DAPO (arXiv 2503.14476); loss.clip_high and loss.aggregate belong to it too."""

    dynamic_sampling: bool = key(True, "sample on until enough questions have mixed outcomes")
    max_rounds: int = key(10, "most rounds of sampling per iteration", "[1, inf)")
    overlong_penalty: float = key(1.0, "largest punishment of a long response; 0: none", "[0, inf)")
    overlong_share: float = key(
        0.2,
        "share of the longest response over which the punishment grows (published: 4096/20480)",
        "(0, 1]",
    )


@dataclass(frozen=True)
class HapoConfig:
    """HAPO (arXiv 2505.11225)."""

    weight: float = key(1.0, "weight of the length reward", "[0, inf)")
    # A lower floor would rank a long right answer below wrong ones.
    floor: float = key(-0.7, "least length reward of a correct response", "(-1, 0]")
    kind: Literal["cosine", "linear"] = key("cosine", "shape of the length reward")


@dataclass(frozen=True)
class SelfBudgeterConfig:
    """SelfBudgeter (arXiv 2505.11274). Its constants are recalled, not checked in print."""

    alpha_start: float = key(
        6.0, "tolerance at the start, as a fraction of the declared budget", "(0, inf)"
    )
    alpha_end: float = key(0.1, "tolerance at the end; it falls linearly", "(0, inf)")
    correct_range: tuple[float, ...] = key(
        (0.5, 1.0), "rewards of correct responses (recalled)", "(-inf, inf)"
    )
    wrong_range: tuple[float, ...] = key(
        (-0.5, 0.0), "rewards of wrong responses (recalled)", "(-inf, inf)"
    )
    budget_penalty: float = key(
        -0.4, "added if more is declared than the first policy needed (recalled)", "(-inf, 0]"
    )
    format_penalty: float = key(
        -1.0, "reward of a response without a budget or an end (recalled)", "(-inf, inf)"
    )
    cold_start_steps: int = key(200, "supervised steps that teach the budget tag", "[0, inf)")
    cold_start_questions: int | None = key(
        None, "training questions answered once before that; null: all", "[1, inf)"
    )
    cold_start_rate: float | None = key(
        None, "learning rate of those steps; null: 4 x optimizer.learning_rate", "(0, inf)"
    )
    cold_start_tokens: int = key(8192, "tokens per supervised step, padding included", "[1, inf)")


@dataclass(frozen=True)
class L1Config:
    """L1 (arXiv 2503.04697); its budgets are those of budget.prior."""

    kind: Literal["exact", "max"] = key("exact", "as long as told, or at most so long")
    # Published: 3e-4 a token, where a response has at most 4,096.
    weight: float = key(1.2288, "what a miss by budget.max tokens costs", "[0, inf)")
    offset: float = key(0.5, "kind max: reward of a right answer just as long as told", "[0, 1]")


@dataclass(frozen=True)
class LengthConfig:
    """Laser, ShorterBetter (arXiv 2505.15612, 2504.21370) and GFPO (2508.09726)."""

    kind: Literal["laser", "shorter_better", "gfpo"] = key("laser", "what is paid for being short")
    target: float = key(0.25, "kind laser: the target length, as a share of budget.max", "(0, 1]")
    weight: float = key(
        0.5,
        "kind laser: bonus of a right response within the target; shorter_better: what "
        "budget.max tokens away from the shortest right response cost",
        "[0, inf)",
    )
    kept: float = key(
        0.3333333333333333,
        "kind gfpo: share of a group, its shortest, that counts; two at least",
        "(0, 1]",
    )


@dataclass(frozen=True)
class ElasticConfig:
    """Elastic Reasoning (arXiv 2505.05315); rollout.answer_tokens is its budget for solutions."""

    share: float = key(0.25, "the one budget for thinking, as a share of budget.max", "(0, 1]")


@dataclass(frozen=True)
class LossConfig:
    """Clipped policy loss, value loss and entropy (paper Eq. 15-16)."""

    # A range of ratios that is empty or reaches 0 or below would not clip.
    clip_low: float = key(0.2, "epsilon_c below 1", "(0, 1)")
    clip_high: float = key(0.2, "epsilon_c above 1", "(0, inf)")
    ratio: Literal["token", "sequence", "gspo"] = key(
        "token", "importance ratio per token; of the whole trace (paper); length-normalised"
    )
    aggregate: Literal["constant", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = key(
        "constant",
        "sum over tokens / (rows x budget.max); mean over tokens; mean of row means, of row sums",
    )
    value_coef: float = key(0.5, "c_v; 0: V learns by its inner steps alone", "[0, inf)")
    entropy_coef: float = key(0.01, "c_h", "[0, inf)")
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
        "traces whose mean |log p(learner)/p(sampler)| of a token is above it have no part in the "
        "policy's loss; null: off",
        "(0, inf)",
    )
    overlong_filter: bool = key(False, "leave traces that the budget cut out of the loss")
    old_logprobs: Literal["scored", "learner", "sampler"] = key(
        "scored",
        "pi_old of the ratio: scored: a pass of the learner over all rows; learner: that of the "
        "first update itself, where the ratio is 1, and a pass over the others' rows; sampler: "
        "what was sampled with, no pass (importance_cap is then the largest ratio)",
    )
