"""Every setting of a run, as frozen dataclasses: keys, types, defaults and meanings in one place.

The defaults are those of the paper's 7B setting. Where the paper leaves a choice open, the default
is the one we can defend, and the meaning says which values are possible. Reading, overriding and
checking live in `config_io`; this module only states what exists.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


def key(default: Any, meaning: str) -> Any:
    """A field with a one-line meaning, shown by `--help`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def section(cls: type, meaning: str) -> Any:
    """A nested section of keys."""
    return dataclasses.field(default_factory=cls, metadata={"meaning": meaning})


@dataclass(frozen=True)
class OutputConfig:
    """Where a run leaves its files."""

    dir: str = key("runs/default", "run folder; resumed or refused when it is not empty")
    rollouts: int = key(4, "sampled traces written to rollouts/ at each logged step")
    log_every: int = key(1, "steps between lines of metrics.jsonl")
    tensorboard: bool = key(True, "also write tensorboard/")
    wandb: bool = key(False, "also log to Weights & Biases (extra wandb; WANDB_MODE is honoured)")


@dataclass(frozen=True)
class ModelConfig:
    """The policy network."""

    path: str | None = key(None, "Hugging Face folder with config, weights and tokenizer")
    tokenizer: str | None = key(None, "tokenizer folder, if not model.path's")
    preset: str = key(
        "custom", "qwen2.5-0.5b .. qwen2.5-72b: shape of a random model; custom: the keys below"
    )
    hidden_size: int = key(64, "width D (preset custom)")
    intermediate_size: int = key(160, "width of the gated MLP (preset custom)")
    num_layers: int = key(3, "decoder blocks L (preset custom)")
    num_heads: int = key(2, "query heads N (preset custom)")
    num_kv_heads: int = key(1, "key/value heads K; divides num_heads (preset custom)")
    head_dim: int | None = key(None, "width of a head; hidden_size/num_heads if null")
    rope_theta: float = key(1e4, "base of the rotary frequencies (preset custom)")
    tie_embeddings: bool = key(True, "the output head is the embedding (preset custom)")
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16", "type of activations and of the decode copy; master weights are float32"
    )
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto", "attention implementation of learner and prefill; auto: cudnn on GPUs in bfloat16"
    )
    scan_layers: bool = key(True, "scan over layers in the learner; false unrolls (small models)")
    remat: bool = key(True, "recompute each layer in the backward pass")
    logprob_chunk: int = key(512, "tokens per chunk of the vocabulary projection in the learner")


@dataclass(frozen=True)
class ConditioningConfig:
    """Budget-conditioned unified policy (paper Eq. 2-3)."""

    enabled: bool = key(True, "condition the policy on phi(b) (method bacr); false: plain Qwen2.5")
    sharing: Literal["shared", "per_layer"] = key("shared", "one phi for all layers, or one each")
    positions: Literal["all", "response"] = key("all", "positions that receive phi(b)")
    input: Literal["raw", "log", "normalised"] = key(
        "raw", "sinusoids of b (paper), of log b, or of 1000 b / budget.max"
    )
    gate: Literal["sigmoid", "sigmoid_normed", "tanh"] = key(
        "sigmoid", "gate of Eq. 3 on the raw stream, on the RMS-normed stream, or a tanh gate"
    )
    gate_bias: float = key(0.0, "constant added inside the gate (-4: nearly closed)")
    site: Literal["after_block", "before_block", "after_attention"] = key(
        "after_block", "where in the block the gated embedding joins the residual stream"
    )


@dataclass(frozen=True)
class LedgerConfig:
    """The procedural task: a mod-10 ledger with levels 1-5."""

    variant: Literal["redundant", "tradeoff"] = key(
        "redundant", "redundant: traces hold useless work; tradeoff: short style is less accurate"
    )
    max_operand: int = key(3, "operands are 1..max_operand")
    train_size: int = key(8192, "number of training problems")


@dataclass(frozen=True)
class DataConfig:
    """Questions with verifiable answers."""

    train: str = key(
        "ledger", "training set: ledger, or NAME:PATH; PATH: file, folder or hf://OWNER/NAME"
    )
    eval: tuple[str, ...] = key(
        ("ledger",), "evaluation sets, alike (gsm8k, math, math500, aime24, minerva_math, jsonl ..)"
    )
    dir: str = key(".", "folder that relative paths of sets start from")
    question_column: str | None = key(None, "question column of a jsonl/parquet/csv set")
    answer_column: str | None = key(None, "answer column of a jsonl/parquet/csv set")
    prompt_format: Literal["auto", "think_answer", "boxed"] = key(
        "auto", "think_answer: tags; boxed: untouched Instruct models; auto: the set's own, or tags"
    )
    order: Literal["drawn", "shuffled"] = key(
        "drawn", "questions within a group: drawn anew; shuffled: each once before any again"
    )
    max_prompt_tokens: int = key(1024, "longer prompts are left out and counted")
    groups: Literal["level", "solve_rate"] = key(
        "level", "difficulty groups from the set's levels or from measured solve rates"
    )
    labels: str | None = key(
        None, "measured solve rates of the training set, JSONL with id, avg, samples"
    )
    num_groups: int = key(4, "number of difficulty groups K")
    ledger: LedgerConfig = section(LedgerConfig, "the procedural task")


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised warm-up to an intermediate policy (procedural task only)."""

    steps: int = key(0, "supervised steps; 0: none")
    dir: str | None = key(None, "folder of a finished warm-up to share; null: output.dir/warmup")
    batch_tokens: int = key(3000, "tokens per step, padding included")
    learning_rate: float = key(3e-3, "peak rate: 50 steps up, constant, linear decay at the end")
    target_accuracy: float = key(
        0.95, "greedy accuracy at the largest budget that the warm-up must end with"
    )
    hold_accuracy: float = key(
        0.85, "greedy accuracy at the largest budget from which the rate may fall"
    )
    max_hold: int = key(10, "most extra rounds at the full rate, 100 steps each, to get there")
    style: Literal["at_once", "steps"] | None = key(
        None, "trace style whose accuracy decides when the warm-up ends; null: none does"
    )
    style_level: int = key(4, "level of the problems on which warmup.style is measured")
    style_accuracy: tuple[float, ...] = key(
        (0.6, 0.85), "the style's greedy accuracy must end between these two"
    )


@dataclass(frozen=True)
class BudgetConfig:
    """Thinking budgets, in tokens, and the prior they are drawn from."""

    min: int = key(256, "smallest budget b_min")
    max: int = key(4096, "largest budget b_max")
    prior: Literal["curriculum", "uniform", "choices", "fixed"] = key(
        "curriculum", "curriculum: Eq. 4-5; uniform over [min, max]; choices: below; fixed: max"
    )
    choices: tuple[int, ...] = key((), "budgets drawn equally often (prior: choices)")
    assign: Literal["independent", "shared", "stratified"] = key(
        "independent", "per rollout (paper); one per question; or spread over the quantiles"
    )


@dataclass(frozen=True)
class CurriculumConfig:
    """Curriculum-aware scheduler (paper Eq. 4-6)."""

    alpha: float = key(0.6, "how much a high pass rate shortens the budget (Eq. 5)")
    beta: float = key(0.3, "how much a low pass rate lengthens it (Eq. 5)")
    mu0: float | tuple[float, ...] = key(1500.0, "initial mean budget, one or one per group")
    sigma: float = key(512.0, "standard deviation of the budget distribution, in tokens")
    clip_mu: bool = key(True, "keep mu inside [budget.min, budget.max]")
    pass_rate: Literal["ema", "epoch", "probe"] = key(
        "ema", "running estimate, each period's plain rate (paper), or that of a fixed probe set"
    )
    probe_size: int = key(128, "training questions in the probe set, spread over the groups")
    probe_budget: int | None = key(None, "thinking budget of the probe; null: budget.max")
    ema_decay: float = key(0.9, "decay per step of the running estimate")
    update_every: int | None = key(10, "steps between updates; null: once an epoch (paper)")
    weight_epsilon: float = key(0.02, "added to rho(1-rho) so that no group is lost; 0: paper")
    size_weighted: bool = key(False, "multiply group weights by group sizes")
    difficulty: Literal["groups", "continuous"] = key(
        "groups", "pass rates per group (paper), or per problem by smoothing (an extension)"
    )
    coordinate: Literal["level", "prompt_length"] = key(
        "level", "what makes problems neighbours (difficulty: continuous)"
    )
    bandwidth: float = key(0.5, "width of the neighbourhood, in levels or tokens")
    strength: float = key(4.0, "attempts that the neighbourhood is worth beside a problem's own")
    forgetting: float = key(0.995, "decay per step of old attempts (difficulty: continuous)")


@dataclass(frozen=True)
class CutsConfig:
    """Truncation points."""

    count: int = key(4, "truncation points M per trace, evenly spaced up to b")
    weights: Literal["uniform", "final_heavy", "own_budget"] | tuple[float, ...] = key(
        "uniform",
        "weight of each cut in the objective: uniform (paper), last .7, last 1, or a list",
    )


@dataclass(frozen=True)
class RewardConfig:
    """Truncation-aware dense reward (paper Eq. 7-9)."""

    dense: bool = key(True, "add the progress reward; false: outcomes only")
    coefficient: float = key(0.3, "lambda, weight of the progress reward")


@dataclass(frozen=True)
class AdvantageConfig:
    """Budget-conditioned advantage estimation (paper Eq. 10-14)."""

    baseline: Literal["value", "group", "residual_loo", "shrink"] = key(
        "value", "value: V(q,b) (paper); group: mean of the group; value with a leave-one-out part"
    )
    credit: Literal["to_go", "answer_literal", "trajectory", "segment"] = key(
        "to_go", "which tokens get which advantage; to_go is the exact gradient"
    )
    normalise: Literal["batch_rms", "group", "none"] = key(
        "batch_rms", "divide by the batch's root mean square, the group's deviation, or nothing"
    )
    floor: float = key(0.1, "smallest divisor (the epsilon of Eq. 14)")
    history: bool = key(
        False, "correct the value by the trace's previous outcome (an extension; not in the paper)"
    )


@dataclass(frozen=True)
class ValueConfig:
    """Value head V(q, b) (paper Eq. 11)."""

    hidden_size: int = key(1024, "width of the two-layer head")
    cut_input: bool = key(True, "V(q, b, b_j): the cut's budget is an input too; false: V(q, b)")
    stop_gradient: bool = key(True, "the head reads states without steering the policy")
    learning_rate: float = key(1e-3, "rate of the head's own Adam")
    inner_steps: int = key(4, "Adam steps of the head per iteration")
    warmup_iterations: int = key(0, "iterations that fit only the head, first")


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
    answers: int = key(4, "answers sampled at every budget (published: 4)")


@dataclass(frozen=True)
class DapoConfig:
    """DAPO (arXiv 2503.14476); loss.clip_high and loss.aggregate belong to it too."""

    dynamic_sampling: bool = key(True, "sample on until enough questions have mixed outcomes")
    max_rounds: int = key(10, "most rounds of sampling per iteration")
    overlong_penalty: float = key(1.0, "largest punishment of a long response; 0: none")
    overlong_share: float = key(
        0.2, "share of the longest response over which the punishment grows (published: 4096/20480)"
    )
    overlong_filter: bool = key(False, "leave traces that the budget cut out of the loss")


@dataclass(frozen=True)
class HapoConfig:
    """HAPO (arXiv 2505.11225)."""

    weight: float = key(1.0, "weight of the length reward")
    floor: float = key(-0.7, "least length reward of a correct response")
    kind: Literal["cosine", "linear"] = key("cosine", "shape of the length reward")


@dataclass(frozen=True)
class SelfBudgeterConfig:
    """SelfBudgeter (arXiv 2505.11274). Its constants are recalled, not checked in print."""

    alpha_start: float = key(6.0, "tolerance at the start, as a fraction of the declared budget")
    alpha_end: float = key(0.1, "tolerance at the end; it falls linearly")
    correct_range: tuple[float, ...] = key((0.5, 1.0), "rewards of correct responses (recalled)")
    wrong_range: tuple[float, ...] = key((-0.5, 0.0), "rewards of wrong responses (recalled)")
    budget_penalty: float = key(
        -0.4, "added if more is declared than the first policy needed (recalled)"
    )
    format_penalty: float = key(-1.0, "reward of a response without a budget or an end (recalled)")
    cold_start_steps: int = key(200, "supervised steps that teach the budget tag")
    cold_start_questions: int | None = key(
        None, "training questions answered once before that; null: all"
    )
    cold_start_rate: float | None = key(
        None, "learning rate of those steps; null: 4 x optimizer.learning_rate"
    )
    cold_start_tokens: int = key(8192, "tokens per supervised step, padding included")


@dataclass(frozen=True)
class LossConfig:
    """Clipped policy loss, value loss and entropy (paper Eq. 15-16)."""

    clip_low: float = key(0.2, "epsilon_c below 1")
    clip_high: float = key(0.2, "epsilon_c above 1")
    ratio: Literal["token", "sequence", "gspo"] = key(
        "token", "importance ratio per token; of the whole sequence (literal); length-normalised"
    )
    aggregate: Literal["constant", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = key(
        "constant",
        "sum over tokens / (rows x budget.max); mean over tokens; mean of row means, of row sums",
    )
    value_coef: float = key(0.5, "c_v; only matters when value.stop_gradient is false")
    entropy_coef: float = key(0.01, "c_h")
    kl_coef: float = key(0.0, "weight of the divergence from the starting policy; 0: off")
    kl_kind: Literal["k1", "k2", "k3", "k3+"] = key(
        "k3+", "estimator of that divergence; k3+ has k3's value and k2's (exact) gradient"
    )
    importance_cap: float | None = key(
        None, "largest weight p(learner)/p(sampler) of a token (truncated importance); null: off"
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of traces and answers during training."""

    questions: int = key(64, "questions Q per step")
    group_size: int = key(8, "rollouts G per question")
    temperature: float = key(1.0, "sampling temperature")
    answer_tokens: int = key(128, "most answer tokens, forced ones not counted")
    slots: int | None = key(None, "rows decoded together; null: all")
    chunk: int = key(16, "tokens decoded per call of the inner loop")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = key(1e-6, "peak rate of the backbone")
    conditioning_learning_rate: float = key(1e-4, "peak rate of phi and the gates")
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "decay after warm-up")
    final_fraction: float = key(0.1, "rate at the end, as a fraction of the peak")
    warmup_steps: int = key(10, "linear steps up to the peak")
    b1: float = key(0.9, "decay of the first moment")
    b2: float = key(0.95, "decay of the second moment")
    weight_decay: float = key(0.0, "decoupled weight decay of matrices")
    grad_clip: float = key(1.0, "largest global gradient norm")


@dataclass(frozen=True)
class TrainConfig:
    """Length and batching of reinforcement learning."""

    steps: int | None = key(None, "iterations; null: from train.epochs")
    epochs: float = key(3.0, "passes over the training set when train.steps is null")
    max_generated_tokens: int | None = key(
        None, "stop after this many generated tokens (to compare methods at equal tokens)"
    )
    minibatches: int = key(2, "updates per iteration, each on its share of the questions")
    micro_batch_rows: int | None = key(None, "rows per gradient accumulation step; null: all")
    micro_batch_tokens: int | None = key(
        None, "instead: tokens per gradient accumulation step, padding included, all devices"
    )
    length_buckets: int = key(4, "padded lengths that rows are sorted into (micro_batch_tokens)")
    drop_zero_advantage: bool = key(
        False, "leave out rows without advantage (micro_batch_tokens, no value head); same loss"
    )
    max_skipped_updates: int | None = key(
        10, "stop after this many updates in a row whose gradient is not finite; null: never"
    )


@dataclass(frozen=True)
class EvalConfig:
    """Accuracy by budget, before, during and after training."""

    every: int | None = key(None, "steps between evaluations; null: only before and after")
    budgets: tuple[int, ...] = key((512, 1024, 2048, 4096), "thinking budgets")
    size: int | None = key(500, "problems per set; null: all")
    samples: int = key(4, "sampled answers per problem; 0: greedy only")
    temperature: float = key(0.6, "temperature of the sampled answers")
    top_p: float = key(0.95, "nucleus of the sampled answers")
    budget_tag: Literal["given", "declared"] = key(
        "given", "SelfBudgeter's tag: given: holds the evaluated budget; declared: the policy's own"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int | None = key(20, "steps between checkpoints; null: only at the end")
    keep: int = key(2, "newest checkpoints kept")


@dataclass(frozen=True)
class MeshConfig:
    """How devices are laid out; the product must be the number of devices."""

    data: int = key(1, "data-parallel copies")
    fsdp: int = key(-1, "parameter shards; -1: all remaining devices")
    tensor: int = key(1, "tensor-parallel shards; divides the key/value heads")
    decode_tensor: int | None = key(
        None, "tensor shards of the decode copy, if it doesn't fit whole; null: mesh.tensor"
    )


@dataclass(frozen=True)
class Config:
    """One run."""

    seed: int = key(0, "seed of everything random")
    method: str = key(
        "bacr",
        "bacr, anytime, grpo, dr_grpo, rloo, dapo, hapo, selfbudgeter, or the path of your own: a "
        "Python file or module with make(config)",
    )
    reproducible: bool = key(
        False,
        "bit-identical runs on GPUs too: XLA's fixed-order kernels, chosen without timing (slower)",
    )
    output: OutputConfig = section(OutputConfig, "where a run leaves its files")
    model: ModelConfig = section(ModelConfig, "the policy network")
    conditioning: ConditioningConfig = section(ConditioningConfig, "budget embedding (Eq. 2-3)")
    data: DataConfig = section(DataConfig, "questions with verifiable answers")
    warmup: WarmupConfig = section(WarmupConfig, "supervised warm-up (procedural task)")
    budget: BudgetConfig = section(BudgetConfig, "thinking budgets")
    curriculum: CurriculumConfig = section(CurriculumConfig, "budget scheduler (Eq. 4-6)")
    cuts: CutsConfig = section(CutsConfig, "truncation points")
    reward: RewardConfig = section(RewardConfig, "dense reward (Eq. 7-9)")
    advantage: AdvantageConfig = section(AdvantageConfig, "advantages (Eq. 10-14)")
    value: ValueConfig = section(ValueConfig, "value head (Eq. 11)")
    anytime: AnytimeConfig = section(AnytimeConfig, "method anytime")
    dapo: DapoConfig = section(DapoConfig, "method dapo")
    hapo: HapoConfig = section(HapoConfig, "method hapo")
    selfbudgeter: SelfBudgeterConfig = section(SelfBudgeterConfig, "method selfbudgeter")
    loss: LossConfig = section(LossConfig, "policy loss (Eq. 15-16)")
    rollout: RolloutConfig = section(RolloutConfig, "sampling during training")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW and its schedule")
    train: TrainConfig = section(TrainConfig, "length and batching")
    eval: EvalConfig = section(EvalConfig, "accuracy by budget")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving and resuming")
    mesh: MeshConfig = section(MeshConfig, "layout of the devices")
