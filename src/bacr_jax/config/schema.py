"""Defines the settings of a run as frozen dataclasses.

`Config` contains all settings, in sections such as `ModelConfig`. Each field has a type, a default,
a description for `--help`, and optional bounds. The defaults follow the paper's setting for a 7B
model. `method_settings` defines the sections of the training methods. `io` loads and overrides
configs, and `checks` validates them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bacr_jax.config.fields import LARGEST_SEED, SMALLEST_TEMPERATURE, key, section
from bacr_jax.config.method_settings import (
    AdvantageConfig,
    AnytimeConfig,
    BudgetConfig,
    ConditioningConfig,
    CurriculumConfig,
    CutsConfig,
    DapoConfig,
    DistillConfig,
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
    """Settings of the run folder and of the files that a run writes."""

    dir: str = key(
        "runs/default",
        "run folder; an earlier run in it is resumed, other files in it are an error",
    )
    rollouts: int = key(4, "sampled traces written to rollouts/ at each logged step", "[0, inf)")
    log_every: int = key(1, "number of steps between records of metrics.jsonl", "[1, inf)")
    tensorboard: bool = key(True, "also write TensorBoard logs to tensorboard/")
    report: bool = key(True, "write report.html and its figures when the run ends")
    format_report: bool = key(True, "before training, print the rate of format failures")
    wandb: bool = key(False, "also log to Weights & Biases (extra wandb; respects WANDB_MODE)")
    compile_cache: Literal["none"] | str | None = key(
        None,
        "folder in which compiled programs are cached, for faster starts; null: "
        "JAX_COMPILATION_CACHE_DIR, or a folder in the user's cache; none: no cache",
    )


@dataclass(frozen=True)
class ModelConfig:
    """Settings of the policy's model: architecture, dtypes, attention kernels and memory."""

    path: str | None = key(None, "Hugging Face folder with config, weights and tokenizer")
    tokenizer: str | None = key(None, "folder of the tokenizer; null: the tokenizer in model.path")
    preset: str = key(
        "custom",
        "architecture of a released model (qwen2.5-7b, qwen3-4b ..), initialised with random "
        "weights; custom: the architecture that the keys below describe",
    )
    hidden_size: int = key(64, "hidden size D (preset custom)", "[2, 1048576]")
    intermediate_size: int = key(160, "width of the gated MLP (preset custom)", "[1, 16777216]")
    num_layers: int = key(3, "number of decoder layers L (preset custom)", "[1, 10000]")
    num_heads: int = key(2, "number of query heads N (preset custom)", "[1, 65536]")
    num_kv_heads: int = key(1, "key/value heads K; divides num_heads (preset custom)", "[1, 65536]")
    head_dim: int | None = key(None, "size of a head; null: hidden_size / num_heads", "[2, 65536]")
    rope_theta: float = key(1e4, "base of the rotary frequencies (preset custom)", "(0, inf)")
    tie_embeddings: bool = key(True, "use the embedding matrix as the output head (preset custom)")
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16",
        "dtype of the activations, and of the copy of the weights that is used for decoding",
    )
    product_dtype: Literal["bfloat16"] | None = key(
        None,
        "dtype to which the operands of matrix products with weights are rounded; requires "
        "compute_dtype=float32; null: compute_dtype. Faster on CPUs with AMX or AVX512-BF16",
    )
    param_dtype: Literal["float32", "bfloat16"] | None = key(
        None,
        "dtype of the weights; null: float32 if they are trained, compute_dtype for the frozen "
        "base of adapters. Trained parameters are always float32",
    )
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto",
        "attention implementation of the learner and of prefill; auto: cudnn on GPUs in bfloat16, "
        "otherwise xla",
    )
    scan_layers: bool = key(True, "scan over layers in the learner; false: unrolled (small models)")
    remat: Literal["full", "selective", "none"] = key(
        "full",
        "activations that the backward pass recomputes: full: all activations of every layer; "
        "selective: all except the results of matrix products, which are stored; none: no "
        "activations",
    )
    logprob_chunk: int = key(
        512, "number of tokens for which the learner computes logits at a time", "[1, inf)"
    )


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of LoRA adapters on a frozen base model (arXiv 2106.09685).

    The budget embedding phi, which gives the model its thinking budget as input, is trained
    together with the adapters, and so are the gates that scale phi.
    """

    rank: int | None = key(
        None, "rank r of the adapters; null: train all weights, without adapters", "[1, 65536]"
    )
    alpha: float = key(
        32.0, "scaling: the adapters' product is multiplied by alpha / rank", "(0, inf)"
    )
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = key(
        ("q", "k", "v", "o", "gate", "up", "down"),
        "matrices of each layer to which adapters are added",
    )
    path: str | None = key(
        None,
        "PEFT folder with adapters to start from; null: new adapters, initialised so that the "
        "model is unchanged",
    )


@dataclass(frozen=True)
class LedgerConfig:
    """Settings of the generated task `ledger`: sums modulo 10, with difficulty levels 1 to 5."""

    variant: Literal["redundant", "tradeoff"] = key(
        "redundant",
        "redundant: the traces contain unnecessary work; tradeoff: the short style is less "
        "accurate",
    )
    # At most 9, because every operand is a single digit and a single token.
    max_operand: int = key(3, "operands are integers from 1 to max_operand", "[1, 9]")
    train_size: int = key(8192, "number of training problems", "[1, 1000000]")
    train_levels: tuple[int, ...] = key(
        (1, 2, 3, 4, 5),
        "levels of the training problems; the warm-up and the evaluations use all five levels",
        "[1, 5]",
    )


@dataclass(frozen=True)
class DataConfig:
    """Settings of the data sets (questions with verifiable answers) and of the prompts."""

    train: str | tuple[str, ...] = key(
        "ledger",
        "training set: ledger, NAME:PATH (a file, a folder or hf://OWNER/NAME), "
        "gym:GENERATOR?field=value or FILE.py; a list is a mixture of sets, each written as SET "
        "or WEIGHT*SET",
    )
    eval: tuple[str, ...] = key(
        ("ledger",),
        "evaluation sets, written as in data.train (gsm8k, math, math500, aime24, minerva_math, "
        "jsonl ..)",
    )
    eval_missing: Literal["skip", "refuse"] = key(
        "refuse",
        "action if a set of data.eval cannot be read: refuse: stop with an error; skip: print a "
        "message and continue without the set",
    )
    dir: str = key(".", "folder to which relative paths of data sets are relative")
    question_column: str | None = key(None, "question column of a jsonl/parquet/csv set")
    answer_column: str | None = key(None, "answer column of a jsonl/parquet/csv set")
    trace_column: str | tuple[str, ...] | None = key(
        None,
        "name of the column with worked solutions in a jsonl/parquet/csv set, for the warm-up; a "
        "list: one column per style, ordered from short to long",
    )
    answers: Literal["parsed", "verbatim"] = key(
        "parsed",
        "gold answers: parsed: extracted from the answer column; verbatim: the unchanged text of "
        "the column (unit tests, a rubric ..), for a custom grader",
    )
    prompt_format: Literal["auto", "think_answer", "boxed", "native", "characters"] = key(
        "auto",
        "think_answer: thinking and answer in tags; boxed: for Instruct models without further "
        "training; native: for reasoning models, with the model's tags; characters: one token per "
        "character, for a small model trained from scratch; auto: the default format of the data "
        "set, or think_answer",
    )
    closing_text: str | None = key(
        None,
        "text inserted between truncated thinking and the answer; null: the default text of the "
        "prompt format",
    )
    system_prompt: str | None = key(
        None,
        "system message; empty: no system message; null: the default message of the prompt format",
    )
    template_variables: Mapping[str, bool | int | str | float] = key(
        FrozenMap(),
        "variables passed to the tokenizer's chat template, such as {date_string: 26 Jul 2024}",
        "(-inf, inf)",
    )
    prompt_date: str | None = key(
        None,
        "date (YYYY-MM-DD) for chat templates that contain the current date; null: the UTC date "
        "on which the run starts, which is recorded in its config.yaml",
    )
    order: Literal["drawn", "shuffled"] = key(
        "drawn",
        "order of the questions within a difficulty group: drawn: sampled at random each time; "
        "shuffled: each question is used once before any is repeated",
    )
    max_prompt_tokens: int = key(
        1024,
        "maximum number of tokens of a prompt; questions with longer prompts are left out, and "
        "their number is reported",
        "[1, inf)",
    )
    groups: Literal["level", "solve_rate"] = key(
        "level",
        "how difficulty groups are formed: level: from the levels of the data set; solve_rate: "
        "from measured solve rates",
    )
    labels: str | None = key(
        None, "JSONL file with measured solve rates of the training set (fields id, avg, samples)"
    )
    num_groups: int = key(4, "number of difficulty groups K", "[1, inf)")
    ledger: LedgerConfig = section(LedgerConfig, "the procedural task")


@dataclass(frozen=True)
class GradingConfig:
    """Settings of the worker processes that grade answers."""

    workers: int = key(2, "number of worker processes", "[1, 1024]")
    deadline: float = key(3.0, "timeout for grading one answer, in seconds", "[0.05, 3600]")
    memory_mb: int = key(1024, "maximum address space of a worker process, in MiB", "[128, inf)")
    batch: int = key(
        16, "maximum number of answers per call of a verifier whose name ends in _batch", "[1, inf)"
    )
    flip_rate: float = key(
        0.0,
        "fraction of the training outcomes that are flipped, to study a noisy verifier",
        "[0, .5]",
    )


@dataclass(frozen=True)
class WarmupConfig:
    """Settings of the supervised warm-up on worked solutions, before reinforcement learning."""

    steps: int = key(0, "number of supervised steps; 0: no warm-up", "[0, 2147483647]")
    dir: str | None = key(
        None,
        "folder of the warmed-up policy, which several runs can share: the first run writes it, "
        "and the others wait for it; null: output.dir/warmup",
    )
    seed: int | None = key(
        None,
        "seed of the warm-up and of its training traces, so that runs with different seeds can "
        "start from the same warm-up; null: seed",
        f"[0, {LARGEST_SEED}]",
    )
    # At least 80, because the longest supervised examples are padded to 80 tokens.
    batch_tokens: int = key(3000, "number of tokens per step, including padding", "[80, inf)")
    learning_rate: float = key(
        3e-3,
        "peak learning rate; the schedule is 50 steps of linear increase, then constant, then "
        "linear decay",
        "(0, inf)",
    )
    target_accuracy: float = key(
        0.95,
        "greedy accuracy at the largest budget that the policy must reach by the end of the "
        "warm-up; 0: none, and it is measured only if the traces have several styles",
        "[0, 1]",
    )
    hold_accuracy: float = key(
        0.85,
        "greedy accuracy at the largest budget at which the decay of the learning rate begins",
        "[0, 1]",
    )
    max_hold: int = key(
        10,
        "maximum number of additional rounds of 100 steps at the peak learning rate to reach "
        "hold_accuracy",
        "[0, inf)",
    )
    short_accuracy: float = key(
        0.9,
        "fraction of the short traces (with labels and without repeated lines) that the policy "
        "must reproduce at every level when the warm-up ends (variant redundant)",
        "[0, 1]",
    )
    styles: Mapping[str, float] = key(
        FrozenMap(),
        "sampling weights of the trace styles (columns of data.trace_column ..); {}: equal weights",
        "(0, inf)",
    )
    style: Literal["at_once", "steps"] | None = key(
        None,
        "trace style of the ledger whose accuracy determines the end of the warm-up; null: no "
        "such criterion",
    )
    style_level: int = key(4, "level of the problems for measuring warmup.style", "[1, 5]")
    style_accuracy: tuple[float, ...] = key(
        (0.6, 0.85),
        "lower and upper bound of the style's greedy accuracy at the end of the warm-up",
        "[0, 1]",
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Settings for sampling reasoning traces and answers during training."""

    questions: int = key(64, "number of questions Q per step", "[1, 1000000]")
    group_size: int = key(8, "number of rollouts G per question", "[1, 1000000]")
    temperature: float = key(1.0, "sampling temperature", f"[{SMALLEST_TEMPERATURE:g}, inf)")
    answer_tokens: int = key(
        128, "maximum number of sampled answer tokens; forced tokens are not counted", "[1, inf)"
    )
    slots: int | None = key(None, "number of rows decoded at a time; null: all rows", "[1, inf)")
    chunk: int = key(16, "number of tokens decoded per call of the inner loop", "[1, 1000000]")
    windows: int = key(
        4,
        "number of different lengths of the KV cache that are compiled; with more lengths, "
        "decoding reads less memory but compilation takes longer",
        "[1, inf)",
    )
    refill: float = key(
        0.25,
        "fraction of the slots that must have finished before their answers are sampled; 1 needs "
        "the least compilation",
        "(0, 1]",
    )
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto",
        "attention implementation for decoding: cudnn reads only the keys in use, xla reads the "
        "full length of the KV cache; auto: cudnn on GPUs in bfloat16, otherwise xla",
    )
    engine: Literal["jax", "vllm"] = key(
        "jax", "sampler: jax: the decoder of bacr_jax; vllm: vLLM servers with the plugin bacr-vllm"
    )
    urls: tuple[str, ...] = key(
        (), "engine vllm: addresses of the servers, such as [http://127.0.0.1:8000]"
    )
    weights_dir: str = key(
        "/dev/shm/bacr",
        "engine vllm: folder to which the policy is written at each step, for the servers to load",
    )
    async_steps: int = key(
        0,
        "engine vllm: 1: sample the next batch during the update of the policy, with the policy "
        "before this update; 0: sample after the update",
        "[0, 1]",
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the AdamW optimizer and of the learning rate schedule."""

    learning_rate: float = key(1e-6, "peak learning rate of the backbone", "[0, inf)")
    conditioning_learning_rate: float = key(
        1e-4, "peak learning rate of phi and the gates", "[0, inf)"
    )
    single_rate: bool = key(
        False,
        "use learning_rate also for phi, the gates and the value head, which are then updated in "
        "one joint step (paper); requires value.inner_steps=0",
    )
    schedule: Literal["cosine", "linear", "constant"] = key(
        "cosine", "shape of the learning rate's decay after warmup_steps"
    )
    final_fraction: float = key(0.1, "final learning rate, as a fraction of the peak", "[0, 1]")
    warmup_steps: int = key(
        10, "updates of linear learning rate warm-up, train.minibatches per step", "[0, 2147483647]"
    )
    b1: float = key(0.9, "decay rate of Adam's first moment", "[0, 1)")
    b2: float = key(0.95, "decay rate of Adam's second moment", "[0, 1)")
    moment_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "dtype in which Adam's moments are stored"
    )
    weight_decay: float = key(0.0, "decoupled weight decay, applied only to matrices", "[0, inf)")
    # Infinity disables clipping. 0 is excluded because it would scale every gradient to zero.
    grad_clip: float = key(1.0, "maximum global gradient norm", "(0, inf]")
    max_update_kl: float | None = key(
        None,
        "maximum KL(old, new) of an update, in nats per sampled token; a larger update is scaled "
        "down to this KL, or dropped. Measured on about 64 traces; null: not measured",
        "(0, inf)",
    )


@dataclass(frozen=True)
class TrainConfig:
    """Settings of reinforcement learning: number of steps and batch sizes."""

    steps: int | None = key(
        None, "iterations; 0: only evaluate; null: computed from train.epochs", "[0, 2147483647]"
    )
    epochs: float = key(3.0, "passes over the training set if train.steps is null", "(0, 1000]")
    max_generated_tokens: int | None = key(
        None,
        "stop after this number of generated tokens (to compare methods at equal cost); null: no "
        "limit",
        "[1, inf)",
    )
    minibatches: int = key(
        2, "number of updates per iteration; each uses an equal share of the questions", "[1, inf)"
    )
    micro_batch_rows: int | None = key(
        None, "number of rows per gradient accumulation step; null: all rows", "[1, inf)"
    )
    micro_batch_tokens: int | None = key(
        None,
        "alternative to micro_batch_rows: number of tokens per gradient accumulation step on all "
        "devices, including padding",
        "[1, inf)",
    )
    padding_free: bool = key(
        False,
        "do not count padding in micro_batch_tokens: only attention pads rows, and neighbouring "
        "rows share one forward pass over their prompt if it contains no budget. Requires a "
        "single device",
    )
    length_buckets: int = key(
        4, "number of padded lengths for sorting rows (micro_batch_tokens)", "[1, inf)"
    )
    max_skipped_updates: int | None = key(
        10,
        "stop after this number of consecutive updates with a non-finite gradient; null: never",
        "[1, inf)",
    )
    undo_closed_answers: float | None = key(
        None,
        "undo an update if the share of closed answers in the next step is below this value, and "
        "below the share before the update by more than two standard errors; stops after three in "
        "a row; keeps a copy of the state in host memory; null: off",
        "[0, 1]",
    )
    undo_filled_budgets: float | None = key(
        None,
        "the same with an upper bound on the share of traces that use their full budget; counts "
        "only traces with the largest budget, because nearly all traces fill small ones; null: off",
        "[0, 1]",
    )


@dataclass(frozen=True)
class EvalConfig:
    """Settings of the evaluations, which measure accuracy at several thinking budgets."""

    every: int | None = key(
        None, "steps between evaluations; null: only before and after training", "[1, inf)"
    )
    during: Literal["all", "selection"] = key(
        "all",
        "data sets of the evaluations between the first and the last: all; selection: only the "
        "set that selects best.json",
    )
    budgets: tuple[int, ...] = key(
        (512, 1024, 2048, 4096),
        "thinking budgets in tokens; 0: answer without thinking",
        "[0, inf)",
    )
    no_budget: bool = key(
        False,
        "also evaluate without a budget: the policy receives no budget and thinks for up to "
        "budget.cap tokens",
    )
    cut_every: int | None = key(
        None,
        "also sample one trace with the largest budget, and force an answer at every multiple of "
        "this number of tokens; null: off",
        "[1, inf)",
    )
    size: int | None = key(500, "number of problems per set; null: all problems", "[1, inf)")
    slots: int | None = key(None, "rows decoded at a time; null: rollout.slots", "[1, inf)")
    samples: int | Mapping[str, int] = key(
        4,
        "number of sampled answers per problem; 0: only greedy decoding; a mapping has one number "
        "per set of data.eval, such as {math500: 4, aime24: 32}",
        "[0, inf)",
    )
    temperature: float = key(
        0.6, "temperature of sampled answers", f"[{SMALLEST_TEMPERATURE:g}, inf)"
    )
    top_p: float = key(0.95, "top-p (nucleus sampling) of the sampled answers", "(0, 1]")
    select: str = key(
        "train_holdout",
        "data set that selects best.json: train_holdout (held-out training questions) or a set of "
        "data.eval",
    )
    # The held-out questions are chosen by their texts, so they are the same for all methods and
    # seeds.
    holdout: int = key(
        256,
        "number of distinct training questions that are held out from training; at most a tenth "
        "of all questions; 0: none",
        "[0, inf)",
    )
    budget_tag: Literal["given", "declared"] = key(
        "given",
        "content of SelfBudgeter's budget tag: given: the evaluated budget; declared: the budget "
        "that the policy generates",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings for how often checkpoints are saved, and how many are kept."""

    every: int | None = key(20, "steps between checkpoints; null: only at the end", "[1, inf)")
    keep: int = key(2, "number of most recent checkpoints to keep", "[1, inf)")


@dataclass(frozen=True)
class ExportConfig:
    """Settings of the exports to Hugging Face folders, which are written during training."""

    every: int | None = key(
        None,
        "number of steps between exports to Hugging Face folders in exports/; the end of the run "
        "is exported too, and exports are never deleted; null: no exports",
        "[1, inf)",
    )


@dataclass(frozen=True)
class MeshConfig:
    """Axis sizes of the device mesh. Their product must equal the number of devices."""

    data: int = key(1, "number of data-parallel replicas", "[1, inf)")
    fsdp: int = key(-1, "number of parameter shards (FSDP); -1: all remaining devices", "[-1, inf)")
    tensor: int = key(1, "tensor-parallel shards; must divide the key/value heads", "[1, inf)")
    decode_tensor: int | None = key(
        None,
        "number of tensor-parallel shards of the decoding copy of the weights, if it does not fit "
        "on one device; null: mesh.tensor",
        "[1, inf)",
    )


@dataclass(frozen=True)
class Config:
    """All settings of a training run. Most fields are sections with further settings."""

    seed: int = key(0, "seed of the random number generators", f"[0, {LARGEST_SEED}]")
    method: str = key(
        "bacr",
        "bacr, anytime, grpo, dr_grpo, rloo, dapo, hapo, selfbudgeter, s_grpo, l1, dler, elastic, "
        "effort, length, thinkprune, or the path of a custom method: a Python file or module that "
        "defines make(config)",
    )
    grader: str | None = key(
        None,
        "a custom verifier, FILE.py:function(question, answer_text, gold) -> [0, 1]; null: "
        "the built-in rules",
    )
    reproducible: bool = key(
        False,
        "bit-identical runs on GPUs too: XLA uses kernels with a fixed order of operations, "
        "selected without timing (slower)",
    )
    output: OutputConfig = section(OutputConfig, "files that a run writes")
    model: ModelConfig = section(ModelConfig, "the policy network")
    adapter: AdapterConfig = section(AdapterConfig, "LoRA: adapters on a frozen base")
    conditioning: ConditioningConfig = section(
        ConditioningConfig, "how the policy receives its budget, and the budget embedding (Eq. 2-3)"
    )
    data: DataConfig = section(DataConfig, "questions with verifiable answers")
    grading: GradingConfig = section(GradingConfig, "worker processes of the grader")
    warmup: WarmupConfig = section(WarmupConfig, "supervised warm-up on traces")
    budget: BudgetConfig = section(BudgetConfig, "thinking budgets")
    curriculum: CurriculumConfig = section(CurriculumConfig, "curriculum for the budgets (Eq. 4-6)")
    cuts: CutsConfig = section(CutsConfig, "truncation points (cuts) of the traces")
    reward: RewardConfig = section(RewardConfig, "reward weights and the dense reward (Eq. 7-9)")
    advantage: AdvantageConfig = section(AdvantageConfig, "advantage estimation (Eq. 10-14)")
    value: ValueConfig = section(ValueConfig, "value head (Eq. 11)")
    anytime: AnytimeConfig = section(AnytimeConfig, "method anytime")
    dapo: DapoConfig = section(DapoConfig, "methods dapo and dler")
    hapo: HapoConfig = section(HapoConfig, "method hapo")
    selfbudgeter: SelfBudgeterConfig = section(SelfBudgeterConfig, "method selfbudgeter")
    l1: L1Config = section(L1Config, "method l1")
    length: LengthConfig = section(LengthConfig, "method length")
    elastic: ElasticConfig = section(ElasticConfig, "method elastic")
    distill: DistillConfig = section(DistillConfig, "on-policy distillation, with any method")
    loss: LossConfig = section(LossConfig, "policy and value loss (Eq. 15-16)")
    rollout: RolloutConfig = section(RolloutConfig, "sampling during training")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW and the learning rate schedule")
    train: TrainConfig = section(TrainConfig, "length of training and batching")
    eval: EvalConfig = section(EvalConfig, "accuracy as a function of the budget")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving and resuming")
    export: ExportConfig = section(ExportConfig, "Hugging Face folders that a run writes")
    mesh: MeshConfig = section(MeshConfig, "device mesh")
