"""Defines every setting of a run as frozen dataclasses: keys, types, defaults, bounds, meanings.

The defaults come from the paper's 7B setting. Where the paper leaves a choice open, the meaning
lists the possible values. `method_settings` defines the settings of the paper's method and of its
competitors. `io` reads and overrides configs, and `checks` rejects values that do not go together.
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
    """Files that a run writes, and where."""

    dir: str = key(
        "runs/default", "run folder; a run in it is resumed, other files in it are an error"
    )
    rollouts: int = key(4, "sampled traces written to rollouts/ at each logged step", "[0, inf)")
    log_every: int = key(1, "steps between lines of metrics.jsonl", "[1, inf)")
    tensorboard: bool = key(True, "also write TensorBoard logs to tensorboard/")
    report: bool = key(True, "write report.html and pictures when the run ends")
    format_report: bool = key(True, "before training, print how many answers follow the format")
    wandb: bool = key(False, "also log to Weights & Biases (extra wandb; WANDB_MODE is honoured)")
    compile_cache: Literal["none"] | str | None = key(
        None,
        "folder of compiled programs, for faster starts; null: JAX_COMPILATION_CACHE_DIR, or a "
        "folder in the user's cache; none: do not store them",
    )


@dataclass(frozen=True)
class ModelConfig:
    """The policy network."""

    path: str | None = key(None, "Hugging Face folder with config, weights and tokenizer")
    tokenizer: str | None = key(None, "tokenizer folder; null: the tokenizer in model.path")
    preset: str = key(
        "custom",
        "shape of a released model (qwen2.5-7b, qwen3-4b ..) with random weights; custom: the "
        "shape that the keys below describe",
    )
    hidden_size: int = key(64, "width D (preset custom)", "[2, 1048576]")
    intermediate_size: int = key(160, "width of the gated MLP (preset custom)", "[1, 16777216]")
    num_layers: int = key(3, "decoder blocks L (preset custom)", "[1, 10000]")
    num_heads: int = key(2, "query heads N (preset custom)", "[1, 65536]")
    num_kv_heads: int = key(1, "key/value heads K; divides num_heads (preset custom)", "[1, 65536]")
    head_dim: int | None = key(None, "width of a head; hidden_size/num_heads if null", "[2, 65536]")
    rope_theta: float = key(1e4, "base of the rotary frequencies (preset custom)", "(0, inf)")
    tie_embeddings: bool = key(True, "use the embedding matrix as the output head (preset custom)")
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16", "type of activations and of the weights' copy for decoding"
    )
    product_dtype: Literal["bfloat16"] | None = key(
        None,
        "type to which the operands of matrix products with weights are rounded; needs "
        "compute_dtype=float32; null: compute_dtype. Faster on CPUs with AMX or AVX512-BF16",
    )
    param_dtype: Literal["float32", "bfloat16"] | None = key(
        None,
        "type of the weights; null: float32 if they are trained, compute_dtype for the frozen base "
        "of adapters. Trained parameters are always float32",
    )
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto", "attention implementation of learner and prefill; auto: cudnn on GPUs in bfloat16"
    )
    scan_layers: bool = key(True, "scan over layers in the learner; false unrolls (small models)")
    remat: Literal["full", "selective", "none"] = key(
        "full",
        "what the backward pass recomputes: full: every layer; selective: everything except the "
        "matrix products, which are stored; none: nothing (older configs: true is full, false is "
        "none)",
    )
    logprob_chunk: int = key(
        512, "tokens per chunk of the vocabulary projection in the learner", "[1, inf)"
    )


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA: low-rank adapters on a frozen base (arXiv 2106.09685); phi and the gates train too."""

    rank: int | None = key(
        None, "rank r of the adapters; null: no adapters, all weights are trained", "[1, 65536]"
    )
    alpha: float = key(
        32.0, "scale: the product of the adapters is multiplied by alpha / rank", "(0, inf)"
    )
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = key(
        ("q", "k", "v", "o", "gate", "up", "down"), "matrices of each layer that get an adapter"
    )
    path: str | None = key(
        None, "PEFT folder of adapters to start from; null: new adapters, which start as no change"
    )


@dataclass(frozen=True)
class LedgerConfig:
    """The procedural task: a mod-10 ledger with levels 1-5."""

    variant: Literal["redundant", "tradeoff"] = key(
        "redundant",
        "redundant: traces contain useless work; tradeoff: the short style is less accurate",
    )
    # Operands are single digits, one token each.
    max_operand: int = key(3, "operands are 1..max_operand", "[1, 9]")
    train_size: int = key(8192, "number of training problems", "[1, 1000000]")
    train_levels: tuple[int, ...] = key(
        (1, 2, 3, 4, 5),
        "levels of the training problems; the warm-up and evaluations use all five",
        "[1, 5]",
    )


@dataclass(frozen=True)
class DataConfig:
    """Questions with verifiable answers."""

    train: str | tuple[str, ...] = key(
        "ledger",
        "training set: ledger, NAME:PATH (file, folder or hf://OWNER/NAME), "
        "gym:GENERATOR?field=value or FILE.py; a list mixes sets, each as SET or WEIGHT*SET",
    )
    eval: tuple[str, ...] = key(
        ("ledger",),
        "evaluation sets, written like data.train (gsm8k, math, math500, aime24, minerva_math, "
        "jsonl ..)",
    )
    eval_missing: Literal["skip", "refuse"] = key(
        "refuse",
        "if a set of data.eval cannot be read: refuse: stop with an error; skip: leave it out and "
        "print a line",
    )
    dir: str = key(".", "folder to which relative paths of sets are relative")
    question_column: str | None = key(None, "question column of a jsonl/parquet/csv set")
    answer_column: str | None = key(None, "answer column of a jsonl/parquet/csv set")
    trace_column: str | tuple[str, ...] | None = key(
        None,
        "column of a jsonl/parquet/csv set with worked solutions, for the warm-up; a list: one "
        "column per style, from short to long",
    )
    answers: Literal["parsed", "verbatim"] = key(
        "parsed",
        "gold answers: parsed: extracted from the answer column; verbatim: the column's text "
        "unchanged (tests, a rubric ..), for a custom grader",
    )
    prompt_format: Literal["auto", "think_answer", "boxed", "native", "characters"] = key(
        "auto",
        "think_answer: thinking and answer in tags; boxed: Instruct models without further "
        "training; native: reasoning models, with their tags; characters: one token per character, "
        "for a small model trained from scratch; auto: the set's format, or think_answer",
    )
    closing_text: str | None = key(
        None,
        "text between truncated thinking and the answer; null: the prompt format's text",
    )
    system_prompt: str | None = key(
        None, "system message; empty: no system message; null: the prompt format's message"
    )
    template_variables: Mapping[str, bool | int | str | float] = key(
        FrozenMap(),
        "variables of the tokenizer's chat template, such as {date_string: 26 Jul 2024}",
        "(-inf, inf)",
    )
    prompt_date: str | None = key(
        None,
        "date, YYYY-MM-DD, for chat templates that write today's date; null: the UTC date on which "
        "the run starts, which its config.yaml records",
    )
    order: Literal["drawn", "shuffled"] = key(
        "drawn",
        "questions within a group: drawn: at random each time; shuffled: each question once before "
        "any is repeated",
    )
    max_prompt_tokens: int = key(
        1024, "most tokens of a prompt; longer prompts are left out and counted", "[1, inf)"
    )
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
    """Worker processes of the built-in or custom grader, and their limits."""

    workers: int = key(2, "worker processes", "[1, 1024]")
    deadline: float = key(3.0, "seconds within which an answer must be graded", "[0.05, 3600]")
    memory_mb: int = key(1024, "address space of a worker, in MiB", "[128, inf)")
    batch: int = key(
        16, "most answers per call of a verifier whose name ends in _batch", "[1, inf)"
    )
    flip_rate: float = key(
        0.0,
        "share of the training outcomes that are flipped, to study a noisy verifier",
        "[0, .5]",
    )


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised warm-up to an intermediate policy, for sets that have traces."""

    steps: int = key(0, "supervised steps; 0: no warm-up", "[0, 2147483647]")
    dir: str | None = key(
        None,
        "folder that runs can share: the first run writes it, others wait for it; null: "
        "output.dir/warmup",
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
        3e-3,
        "peak learning rate: 50 steps of linear increase, constant, then linear decay",
        "(0, inf)",
    )
    target_accuracy: float = key(
        0.95, "greedy accuracy at the largest budget that the finished warm-up must reach", "[0, 1]"
    )
    hold_accuracy: float = key(
        0.85,
        "greedy accuracy at the largest budget at which the learning rate begins to decay",
        "[0, 1]",
    )
    max_hold: int = key(
        10, "most extra rounds of 100 steps at the peak rate to reach hold_accuracy", "[0, inf)"
    )
    short_accuracy: float = key(
        0.9,
        "share of the short traces (with labels and without repeated lines) that the policy must "
        "reproduce at every level when the warm-up ends (variant redundant)",
        "[0, 1]",
    )
    styles: Mapping[str, float] = key(
        FrozenMap(),
        "weights of the trace styles (columns of data.trace_column ..); {}: equal weights",
        "(0, inf)",
    )
    style: Literal["at_once", "steps"] | None = key(
        None,
        "trace style of the ledger whose accuracy ends the warm-up; null: accuracy of a style does "
        "not end it",
    )
    style_level: int = key(4, "level of the problems on which warmup.style is measured", "[1, 5]")
    style_accuracy: tuple[float, ...] = key(
        (0.6, 0.85),
        "lower and upper limit of the style's greedy accuracy when the warm-up ends",
        "[0, 1]",
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of traces and answers during training."""

    questions: int = key(64, "questions Q per step", "[1, 1000000]")
    group_size: int = key(8, "rollouts G per question", "[1, 1000000]")
    temperature: float = key(1.0, "sampling temperature", "[0.001, inf)")
    answer_tokens: int = key(
        128, "most sampled answer tokens; forced tokens are not counted", "[1, inf)"
    )
    slots: int | None = key(None, "rows decoded at a time; null: all rows", "[1, inf)")
    chunk: int = key(16, "tokens decoded per call of the inner loop", "[1, 1000000]")
    windows: int = key(
        4,
        "number of cache lengths; with more lengths, decoding reads less memory and compilation "
        "takes longer",
        "[1, inf)",
    )
    refill: float = key(
        0.25,
        "share of the slots that must end before their answers are sampled; 1 needs the least "
        "compilation",
        "(0, 1]",
    )
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto",
        "attention of decoded tokens: cudnn reads only the keys that a row has, xla reads the "
        "caches' full length; auto: cudnn on GPUs in bfloat16",
    )
    engine: Literal["own", "vllm"] = key(
        "own", "sampler: own: the decoder of bacr_jax; vllm: vLLM servers with the plugin bacr-vllm"
    )
    urls: tuple[str, ...] = key(
        (), "engine vllm: addresses of the servers, such as [http://127.0.0.1:8000]"
    )
    weights_dir: str = key(
        "/dev/shm/bacr",
        "engine vllm: folder in which each step's policy is written for the servers to read",
    )
    ahead: int = key(
        0,
        "engine vllm: 1: sample the next batch while the learner updates the policy, with the "
        "policy before that update; 0: sample after the update",
        "[0, 1]",
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = key(1e-6, "peak learning rate of the backbone", "[0, inf)")
    conditioning_learning_rate: float = key(
        1e-4, "peak learning rate of phi and the gates", "[0, inf)"
    )
    single_rate: bool = key(
        False,
        "use learning_rate for phi, the gates and the value head too, in one joint step (paper); "
        "needs value.inner_steps=0",
    )
    schedule: Literal["cosine", "linear", "constant"] = key(
        "cosine", "shape of the decay after warmup_steps"
    )
    final_fraction: float = key(0.1, "final learning rate, as a fraction of the peak", "[0, 1]")
    warmup_steps: int = key(10, "steps of linear increase to the peak rate", "[0, 2147483647]")
    b1: float = key(0.9, "decay of the first moment", "[0, 1)")
    b2: float = key(0.95, "decay of the second moment", "[0, 1)")
    moment_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "type in which Adam's two moments are stored"
    )
    weight_decay: float = key(0.0, "decoupled weight decay, applied to matrices", "[0, inf)")
    # Infinity: no clipping. 0 would scale every gradient to nothing.
    grad_clip: float = key(1.0, "largest global gradient norm", "(0, inf]")
    max_update_kl: float | None = key(
        None,
        "largest KL(old, new) of one update, in nats per sampled token; a larger update is "
        "shortened to this KL, or dropped. Costs two forward passes per update; null: not measured",
        "(0, inf)",
    )


@dataclass(frozen=True)
class TrainConfig:
    """Length and batching of reinforcement learning."""

    steps: int | None = key(
        None, "iterations; 0: only evaluate; null: computed from train.epochs", "[0, 2147483647]"
    )
    epochs: float = key(3.0, "passes over the training set when train.steps is null", "(0, 1000]")
    max_generated_tokens: int | None = key(
        None,
        "stop after this many generated tokens (to compare methods at equal cost); null: no limit",
        "[1, inf)",
    )
    minibatches: int = key(
        2, "updates per iteration; each uses an equal share of the questions", "[1, inf)"
    )
    micro_batch_rows: int | None = key(
        None, "rows per gradient accumulation step; null: all rows", "[1, inf)"
    )
    micro_batch_tokens: int | None = key(
        None,
        "instead of micro_batch_rows: tokens per gradient accumulation step on all devices, with "
        "padding",
        "[1, inf)",
    )
    padding_free: bool = key(
        False,
        "micro_batch_tokens counts no padding: only attention pads rows, and neighbouring rows "
        "share one pass over their prompt if it contains no budget. Needs one device",
    )
    length_buckets: int = key(
        4, "number of padded lengths into which rows are sorted (micro_batch_tokens)", "[1, inf)"
    )
    max_skipped_updates: int | None = key(
        10,
        "stop after this many consecutive updates with a gradient that is not finite; null: never",
        "[1, inf)",
    )
    undo_closed_answers: float | None = key(
        None,
        "undo an update, once, if the share of closed answers in the next step is below this value "
        "and below the share before the update; stores a copy of the state in host memory; null: "
        "off",
        "[0, 1]",
    )
    undo_filled_budgets: float | None = key(
        None,
        "undo an update, once, if the share of traces that fill their budget in the next step is "
        "above this value and above the share before the update; null: off",
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
        "sets of the evaluations between the first and the last: all; selection: only the set that "
        "chooses best.json",
    )
    budgets: tuple[int, ...] = key(
        (512, 1024, 2048, 4096),
        "thinking budgets in tokens; 0: answer without thinking",
        "[0, inf)",
    )
    no_budget: bool = key(
        False,
        "also evaluate without a budget: the policy receives no budget and thinks up to budget.cap "
        "tokens",
    )
    dense: int | None = key(
        None,
        "also sample one trace with the largest budget, and force its answer at every multiple of "
        "this number of tokens; null: off",
        "[1, inf)",
    )
    size: int | None = key(500, "problems per set; null: all problems", "[1, inf)")
    slots: int | None = key(None, "rows decoded at a time; null: rollout.slots", "[1, inf)")
    samples: int | Mapping[str, int] = key(
        4,
        "sampled answers per problem; 0: greedy only; or one number per set of data.eval, such as "
        "{math500: 4, aime24: 32}",
        "[0, inf)",
    )
    temperature: float = key(0.6, "temperature of the sampled answers", "[0.001, inf)")
    top_p: float = key(0.95, "top-p (nucleus) of the sampled answers", "(0, 1]")
    select: str = key(
        "train_holdout",
        "set that chooses best.json: train_holdout (held-out training questions) or a set of "
        "data.eval",
    )
    # The same for all methods and seeds: it depends only on the questions' texts.
    holdout: int = key(
        256,
        "distinct training questions excluded from training; at most a tenth of all; 0: none",
        "[0, inf)",
    )
    budget_tag: Literal["given", "declared"] = key(
        "given",
        "content of SelfBudgeter's budget tag: given: the evaluated budget; declared: the budget "
        "that the policy writes",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int | None = key(20, "steps between checkpoints; null: only at the end", "[1, inf)")
    keep: int = key(2, "number of newest checkpoints to keep", "[1, inf)")


@dataclass(frozen=True)
class ExportConfig:
    """Hugging Face folders that a run writes in addition to its checkpoints."""

    every: int | None = key(
        None,
        "steps between exports to Hugging Face folders in exports/; none is deleted, and the end "
        "of the run is exported too; null: no exports",
        "[1, inf)",
    )


@dataclass(frozen=True)
class MeshConfig:
    """Layout of the devices; the product of the shards must be the number of devices."""

    data: int = key(1, "data-parallel copies", "[1, inf)")
    fsdp: int = key(-1, "parameter shards; -1: all remaining devices", "[-1, inf)")
    tensor: int = key(1, "tensor-parallel shards; divides the key/value heads", "[1, inf)")
    decode_tensor: int | None = key(
        None,
        "tensor shards of the weights' copy for decoding, if it does not fit on one device; null: "
        "mesh.tensor",
        "[1, inf)",
    )


@dataclass(frozen=True)
class Config:
    """One run."""

    # jax.random.key keeps 32 bits: larger seeds would repeat smaller ones.
    seed: int = key(0, "seed of all random numbers", "[0, 4294967295]")
    method: str = key(
        "bacr",
        "bacr, anytime, grpo, dr_grpo, rloo, dapo, hapo, selfbudgeter, s_grpo, l1, dler, elastic, "
        "effort, length, or the path of a custom method: a Python file or module with make(config)",
    )
    grader: str | None = key(
        None,
        "a custom verifier, FILE.py:function(question, answer_text, gold) -> [0, 1]; null: "
        "the built-in rules",
    )
    reproducible: bool = key(
        False,
        "bit-identical runs on GPUs too: XLA uses fixed-order kernels, chosen without timing "
        "(slower)",
    )
    output: OutputConfig = section(OutputConfig, "files that a run writes")
    model: ModelConfig = section(ModelConfig, "the policy network")
    adapter: AdapterConfig = section(AdapterConfig, "LoRA: adapters on a frozen base")
    conditioning: ConditioningConfig = section(
        ConditioningConfig, "how the policy receives its budget; its embedding (Eq. 2-3)"
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
