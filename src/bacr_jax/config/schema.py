"""Every setting of a run, as frozen dataclasses: keys, types, defaults, bounds and meanings.

The defaults are those of the paper's 7B setting. Where the paper leaves a choice open, the default
is the one we can defend, and the meaning says which values are possible. What the paper's method
and its competitors are made of is in `method_settings`. Reading and overriding live in `io`, which
values go together is known to `checks`; these modules only state what exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bacr_jax.config.fields import key, section
from bacr_jax.config.method_settings import (
    AdvantageConfig,
    AnytimeConfig,
    BudgetConfig,
    ConditioningConfig,
    CurriculumConfig,
    CutsConfig,
    DapoConfig,
    ElasticConfig,
    HapoConfig,
    L1Config,
    LengthConfig,
    LossConfig,
    RewardConfig,
    SelfBudgeterConfig,
    ValueConfig,
)
from bacr_jax.config.values import FrozenMap


@dataclass(frozen=True)
class OutputConfig:
    """Where a run leaves its files."""

    dir: str = key("runs/default", "run folder; resumed or refused when it is not empty")
    rollouts: int = key(4, "sampled traces written to rollouts/ at each logged step", "[0, inf)")
    log_every: int = key(1, "steps between lines of metrics.jsonl", "[1, inf)")
    tensorboard: bool = key(True, "also write tensorboard/")
    report: bool = key(True, "report.html and pictures of a finished run")
    format_report: bool = key(True, "say before training how well answers keep to the format")
    wandb: bool = key(False, "also log to Weights & Biases (extra wandb; WANDB_MODE is honoured)")
    compile_cache: Literal["none"] | str | None = key(
        None,
        "folder of compiled programs, for faster starts; null: JAX_COMPILATION_CACHE_DIR's, or the "
        "user's own; none: they are not kept",
    )


@dataclass(frozen=True)
class ModelConfig:
    """The policy network."""

    path: str | None = key(None, "Hugging Face folder with config, weights and tokenizer")
    tokenizer: str | None = key(None, "tokenizer folder, if not model.path's")
    preset: str = key(
        "custom",
        "a released shape (qwen2.5-7b, qwen3-4b ..) with random weights; custom: the keys below",
    )
    hidden_size: int = key(64, "width D (preset custom)", "[2, 1048576]")
    intermediate_size: int = key(160, "width of the gated MLP (preset custom)", "[1, 16777216]")
    num_layers: int = key(3, "decoder blocks L (preset custom)", "[1, 10000]")
    num_heads: int = key(2, "query heads N (preset custom)", "[1, 65536]")
    num_kv_heads: int = key(1, "key/value heads K; divides num_heads (preset custom)", "[1, 65536]")
    head_dim: int | None = key(None, "width of a head; hidden_size/num_heads if null", "[2, 65536]")
    rope_theta: float = key(1e4, "base of the rotary frequencies (preset custom)", "(0, inf)")
    tie_embeddings: bool = key(True, "the output head is the embedding (preset custom)")
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16", "type of activations and of the decode copy"
    )
    product_dtype: Literal["bfloat16"] | None = key(
        None,
        "type that operands of the weight matrices' products are rounded to, with compute_dtype: "
        "float32 for all else; null: compute_dtype. Faster on CPUs with AMX or AVX512-BF16",
    )
    param_dtype: Literal["float32", "bfloat16"] | None = key(
        None,
        "type of the weights; null: float32 where they are trained, compute_dtype for the frozen "
        "base of adapters. What is trained is float32 always",
    )
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto", "attention implementation of learner and prefill; auto: cudnn on GPUs in bfloat16"
    )
    scan_layers: bool = key(True, "scan over layers in the learner; false unrolls (small models)")
    remat: Literal["full", "selective", "none"] = key(
        "full",
        "what the backward pass recomputes: full: every layer; selective: all but its matrix "
        "products, which are kept; none: nothing (true and false of older configs: full and none)",
    )
    logprob_chunk: int = key(
        512, "tokens per chunk of the vocabulary projection in the learner", "[1, inf)"
    )


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA: low-rank adapters on a frozen base (arXiv 2106.09685), beside phi and the gates."""

    rank: int | None = key(
        None, "rank r of the adapters; null: none, all weights are trained", "[1, 65536]"
    )
    alpha: float = key(32.0, "the adapters' product is multiplied by alpha / rank", "(0, inf)")
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = key(
        ("q", "k", "v", "o", "gate", "up", "down"), "matrices of each layer that get an adapter"
    )
    path: str | None = key(
        None, "PEFT folder of adapters to start from; null: fresh ones, which change nothing"
    )


@dataclass(frozen=True)
class LedgerConfig:
    """The procedural task: a mod-10 ledger with levels 1-5."""

    variant: Literal["redundant", "tradeoff"] = key(
        "redundant", "redundant: traces hold useless work; tradeoff: short style is less accurate"
    )
    # Operands are single digits, one token each.
    max_operand: int = key(3, "operands are 1..max_operand", "[1, 9]")
    train_size: int = key(8192, "number of training problems", "[1, 1000000]")
    train_levels: tuple[int, ...] = key(
        (1, 2, 3, 4, 5), "levels trained on; the warm-up and evaluations have all five", "[1, 5]"
    )


@dataclass(frozen=True)
class DataConfig:
    """Questions with verifiable answers."""

    train: str | tuple[str, ...] = key(
        "ledger",
        "training set: ledger, NAME:PATH (file, folder or hf://OWNER/NAME), "
        "gym:GENERATOR?field=value or FILE.py; a list mixes sets, WEIGHT*SET",
    )
    eval: tuple[str, ...] = key(
        ("ledger",), "evaluation sets, alike (gsm8k, math, math500, aime24, minerva_math, jsonl ..)"
    )
    eval_missing: Literal["skip", "refuse"] = key(
        "refuse", "a set of data.eval that can't be had; skip: it is left out with a line"
    )
    dir: str = key(".", "folder that relative paths of sets start from")
    question_column: str | None = key(None, "question column of a jsonl/parquet/csv set")
    answer_column: str | None = key(None, "answer column of a jsonl/parquet/csv set")
    trace_column: str | tuple[str, ...] | None = key(
        None,
        "column with a way to the answer in a jsonl/parquet/csv set, for the warm-up; a list: one "
        "for each style, from short to long",
    )
    answers: Literal["parsed", "verbatim"] = key(
        "parsed",
        "gold answers: parsed from their column; verbatim: as they stand there (tests, a rubric "
        "..), for a grader of your own",
    )
    prompt_format: Literal["auto", "think_answer", "boxed", "native", "characters"] = key(
        "auto",
        "think_answer: tags; boxed: untouched Instruct models; native: models trained to think, in "
        "their own tags; characters: one token each, for a small model made from scratch; auto: "
        "the set's own, or tags",
    )
    closing_text: str | None = key(
        None,
        "put after thinking that was cut, up to where the answer begins; null: the prompt format's",
    )
    system_prompt: str | None = key(
        None, "instead of the prompt format's system message; empty: none; null: the format's"
    )
    template_variables: Mapping[str, bool | int | str | float] = key(
        FrozenMap(),
        "variables of the tokenizer's chat template, such as {date_string: 26 Jul 2024}",
        "(-inf, inf)",
    )
    prompt_date: str | None = key(
        None,
        "date, YYYY-MM-DD, that a chat template writes which asks for today's; null: the day in "
        "UTC on which the run began, which is recorded here",
    )
    order: Literal["drawn", "shuffled"] = key(
        "drawn", "questions within a group: drawn anew; shuffled: each once before any again"
    )
    max_prompt_tokens: int = key(1024, "longer prompts are left out and counted", "[1, inf)")
    groups: Literal["level", "solve_rate"] = key(
        "level", "difficulty groups from the set's levels or from measured solve rates"
    )
    labels: str | None = key(
        None, "measured solve rates of the training set, JSONL with id, avg, samples"
    )
    num_groups: int = key(4, "number of difficulty groups K", "[1, inf)")
    ledger: LedgerConfig = section(LedgerConfig, "the procedural task")


@dataclass(frozen=True)
class GradingConfig:
    """Worker processes of the grader, built in or one's own, and their limits."""

    workers: int = key(2, "worker processes", "[1, 1024]")
    deadline: float = key(3.0, "seconds that one answer may take", "[0.05, 3600]")
    memory_mb: int = key(1024, "address space of a worker, in MiB", "[128, inf)")
    batch: int = key(
        16, "most answers in one call of a verifier whose name ends with _batch", "[1, inf)"
    )
    flip_rate: float = key(
        0.0,
        "share of training's outcomes turned round, to see what a noisy verifier does",
        "[0, .5]",
    )


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised warm-up to an intermediate policy, for sets that have traces."""

    steps: int = key(0, "supervised steps; 0: none", "[0, 2147483647]")
    dir: str | None = key(
        None, "folder to share: the first run makes it, others wait; null: output.dir/warmup"
    )
    seed: int | None = key(
        None,
        "seed of the warm-up and of its training traces, so that runs of several seeds can start "
        "from one warm-up; null: seed",
        "[0, 4294967295]",
    )
    # The longest supervised examples are padded to 80 tokens.
    batch_tokens: int = key(3000, "tokens per step, padding included", "[80, inf)")
    learning_rate: float = key(
        3e-3, "peak rate: 50 steps up, constant, linear decay at the end", "(0, inf)"
    )
    target_accuracy: float = key(
        0.95, "greedy accuracy at the largest budget that the warm-up must end with", "[0, 1]"
    )
    hold_accuracy: float = key(
        0.85, "greedy accuracy at the largest budget from which the rate may fall", "[0, 1]"
    )
    max_hold: int = key(
        10, "most extra rounds at the full rate, 100 steps each, to get there", "[0, inf)"
    )
    short_accuracy: float = key(
        0.9,
        "share of the short traces (no line redone, labels given) that the policy must write right "
        "at every level when the warm-up ends (variant redundant)",
        "[0, 1]",
    )
    styles: Mapping[str, float] = key(
        FrozenMap(),
        "weights of the trace styles (columns of data.trace_column ..); {}: all alike",
        "(0, inf)",
    )
    style: Literal["at_once", "steps"] | None = key(
        None, "of the ledger: style whose accuracy decides when the warm-up ends; null: none does"
    )
    style_level: int = key(4, "level of the problems on which warmup.style is measured", "[1, 5]")
    style_accuracy: tuple[float, ...] = key(
        (0.6, 0.85), "the style's greedy accuracy must end between these two", "[0, 1]"
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of traces and answers during training."""

    questions: int = key(64, "questions Q per step", "[1, 1000000]")
    group_size: int = key(8, "rollouts G per question", "[1, 1000000]")
    temperature: float = key(1.0, "sampling temperature", "[0.001, inf)")
    answer_tokens: int = key(128, "most answer tokens, forced ones not counted", "[1, inf)")
    slots: int | None = key(None, "rows decoded together; null: all", "[1, inf)")
    chunk: int = key(16, "tokens decoded per call of the inner loop", "[1, 1000000]")
    windows: int = key(
        4, "lengths that caches may have; more read less and compile longer", "[1, inf)"
    )
    refill: float = key(
        0.25, "share of the slots to end before they are answered; 1 compiles least", "(0, 1]"
    )
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto",
        "attention of decoded tokens: cudnn reads each row's own keys, xla the caches' whole "
        "length; auto: cudnn on GPUs in bfloat16",
    )
    engine: Literal["own", "vllm"] = key(
        "own", "what samples: this package's decoder, or servers of vLLM with the plugin bacr-vllm"
    )
    urls: tuple[str, ...] = key(
        (), "engine vllm: addresses of the servers, such as [http://127.0.0.1:8000]"
    )
    weights_dir: str = key(
        "/dev/shm/bacr",
        "engine vllm: folder, read by the servers too, in which each step's policy is handed over",
    )
    ahead: int = key(
        0,
        "engine vllm: 1 samples the next batch while the learner is at work, under the policy "
        "before that update",
        "[0, 1]",
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = key(1e-6, "peak rate of the backbone", "[0, inf)")
    conditioning_learning_rate: float = key(1e-4, "peak rate of phi and the gates", "[0, inf)")
    single_rate: bool = key(
        False,
        "learning_rate for phi, gates and value head too, one joint step for all (paper); "
        "value.inner_steps must be 0",
    )
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "decay after warm-up")
    final_fraction: float = key(0.1, "rate at the end, as a fraction of the peak", "[0, 1]")
    warmup_steps: int = key(10, "linear steps up to the peak", "[0, 2147483647]")
    b1: float = key(0.9, "decay of the first moment", "[0, 1)")
    b2: float = key(0.95, "decay of the second moment", "[0, 1)")
    moment_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "type in which Adam's two moments are kept"
    )
    weight_decay: float = key(0.0, "decoupled weight decay of matrices", "[0, inf)")
    # Infinity: no clipping. 0 would scale every gradient to nothing.
    grad_clip: float = key(1.0, "largest global gradient norm", "(0, inf]")
    max_update_kl: float | None = key(
        None,
        "largest KL(old, new) of one update, nats per sampled token: a larger one is shortened "
        "to it, or dropped. Takes two forward passes more an update; null: not measured",
        "(0, inf)",
    )


@dataclass(frozen=True)
class TrainConfig:
    """Length and batching of reinforcement learning."""

    steps: int | None = key(
        None, "iterations; 0: only evaluate; null: from train.epochs", "[0, 2147483647]"
    )
    epochs: float = key(3.0, "passes over the training set when train.steps is null", "(0, 1000]")
    max_generated_tokens: int | None = key(
        None,
        "stop after this many generated tokens (to compare methods at equal tokens)",
        "[1, inf)",
    )
    minibatches: int = key(
        2, "updates per iteration, each on its share of the questions", "[1, inf)"
    )
    micro_batch_rows: int | None = key(
        None, "rows per gradient accumulation step; null: all", "[1, inf)"
    )
    micro_batch_tokens: int | None = key(
        None,
        "instead: tokens per gradient accumulation step, padding included, all devices",
        "[1, inf)",
    )
    padding_free: bool = key(
        False,
        "those of micro_batch_tokens are real ones: padding is left to attention alone, and a "
        "prompt runs once for neighbouring rows if it is told no budget. One device",
    )
    length_buckets: int = key(
        4, "padded lengths that rows are sorted into (micro_batch_tokens)", "[1, inf)"
    )
    max_skipped_updates: int | None = key(
        10,
        "stop after this many updates in a row whose gradient is not finite; null: never",
        "[1, inf)",
    )
    undo_closed_answers: float | None = key(
        None,
        "undo an update, once, if less than this share of the next step's answers is closed, and "
        "less than before the update; keeps a copy of the state in host memory; null: off",
        "[0, 1]",
    )
    undo_filled_budgets: float | None = key(
        None,
        "undo an update, once, if more than this share of the next step's traces fill their "
        "budget, and more than before the update; null: off",
        "[0, 1]",
    )


@dataclass(frozen=True)
class EvalConfig:
    """Accuracy by budget, before, during and after training."""

    every: int | None = key(
        None, "steps between evaluations; null: only before and after", "[1, inf)"
    )
    during: Literal["all", "selection"] = key(
        "all",
        "sets that evaluations between the first and the last look at: all, or selection: only the "
        "one that chooses best.json",
    )
    budgets: tuple[int, ...] = key(
        (512, 1024, 2048, 4096), "thinking budgets; 0: answer at once", "[0, inf)"
    )
    no_budget: bool = key(
        False, "also without a budget: the policy is told none, and thinks up to budget.cap tokens"
    )
    dense: int | None = key(
        None,
        "also one trace told the largest budget, its answer forced at every multiple of so many "
        "tokens; null: none",
        "[1, inf)",
    )
    size: int | None = key(500, "problems per set; null: all", "[1, inf)")
    slots: int | None = key(
        None, "rows decoded together; null: as many as in training (rollout.slots)", "[1, inf)"
    )
    samples: int | Mapping[str, int] = key(
        4,
        "sampled answers per problem; 0: greedy only; or of each set of data.eval, such as "
        "{math500: 4, aime24: 32}",
        "[0, inf)",
    )
    temperature: float = key(0.6, "temperature of the sampled answers", "[0.001, inf)")
    top_p: float = key(0.95, "nucleus of the sampled answers", "(0, 1]")
    select: str = key(
        "train_holdout",
        "chooses best.json: train_holdout (questions kept from training), or a set of data.eval",
    )
    # The same for all methods and seeds: it depends on the questions' texts alone.
    holdout: int = key(
        256,
        "different training questions held out of training; at most a tenth of them; 0: none",
        "[0, inf)",
    )
    budget_tag: Literal["given", "declared"] = key(
        "given", "SelfBudgeter's tag: given: holds the evaluated budget; declared: the policy's own"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int | None = key(20, "steps between checkpoints; null: only at the end", "[1, inf)")
    keep: int = key(2, "newest checkpoints kept", "[1, inf)")


@dataclass(frozen=True)
class ExportConfig:
    """Hugging Face folders of a run, beside its checkpoints."""

    every: int | None = key(
        None,
        "steps between Hugging Face folders in exports/, which all stay, one of the end too; null: "
        "none",
        "[1, inf)",
    )


@dataclass(frozen=True)
class MeshConfig:
    """How devices are laid out; the product must be the number of devices."""

    data: int = key(1, "data-parallel copies", "[1, inf)")
    fsdp: int = key(-1, "parameter shards; -1: all remaining devices", "[-1, inf)")
    tensor: int = key(1, "tensor-parallel shards; divides the key/value heads", "[1, inf)")
    decode_tensor: int | None = key(
        None,
        "tensor shards of the decode copy, if it doesn't fit whole; null: mesh.tensor",
        "[1, inf)",
    )


@dataclass(frozen=True)
class Config:
    """One run."""

    # jax.random.key keeps 32 bits: larger seeds would repeat smaller ones.
    seed: int = key(0, "seed of everything random", "[0, 4294967295]")
    method: str = key(
        "bacr",
        "bacr, anytime, grpo, dr_grpo, rloo, dapo, hapo, selfbudgeter, s_grpo, l1, dler, elastic, "
        "effort, length, or the path of your own: a Python file or module with make(config)",
    )
    grader: str | None = key(
        None,
        "a verifier of your own, FILE.py:function(question, answer_text, gold) -> [0, 1]; null: "
        "the built-in rules",
    )
    reproducible: bool = key(
        False,
        "bit-identical runs on GPUs too: XLA's fixed-order kernels, chosen without timing (slower)",
    )
    output: OutputConfig = section(OutputConfig, "where a run leaves its files")
    model: ModelConfig = section(ModelConfig, "the policy network")
    adapter: AdapterConfig = section(AdapterConfig, "LoRA: adapters on a frozen base")
    conditioning: ConditioningConfig = section(
        ConditioningConfig, "how the budget is told; its embedding (Eq. 2-3)"
    )
    data: DataConfig = section(DataConfig, "questions with verifiable answers")
    grading: GradingConfig = section(GradingConfig, "worker processes of the grader")
    warmup: WarmupConfig = section(WarmupConfig, "supervised warm-up on traces")
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
    l1: L1Config = section(L1Config, "method l1")
    length: LengthConfig = section(LengthConfig, "method length")
    elastic: ElasticConfig = section(ElasticConfig, "method elastic")
    loss: LossConfig = section(LossConfig, "policy loss (Eq. 15-16)")
    rollout: RolloutConfig = section(RolloutConfig, "sampling during training")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW and its schedule")
    train: TrainConfig = section(TrainConfig, "length and batching")
    eval: EvalConfig = section(EvalConfig, "accuracy by budget")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving and resuming")
    export: ExportConfig = section(ExportConfig, "Hugging Face folders of a run")
    mesh: MeshConfig = section(MeshConfig, "layout of the devices")
