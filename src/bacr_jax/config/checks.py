"""Validates a config before any device is used.

The validation first checks each value and then combinations of values. Every problem is reported as
a one-line message with the dotted key, the invalid value, and what to write instead.
"""

import datetime
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bacr_grading.verifier_spec import grader_problem
from bacr_jax.config.budget_checks import PRESETS, budget_problems, level_problems
from bacr_jax.config.derived import (
    CORRECT,
    function_name,
    mixture,
)
from bacr_jax.config.fields import Key, inside, range_text, walk
from bacr_jax.config.method_settings import (
    ConditioningConfig,
    RewardConfig,
)
from bacr_jax.config.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    WarmupConfig,
)
from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.config.training_checks import (
    batch_problems,
    evaluation_problems,
    loss_problems,
    rollout_problems,
    undo_problems,
)
from bacr_jax.config.values import shown, written
from bacr_jax.errors import UserError

# Names of data sets that load an arbitrary table. The columns to read are set by
# data.question_column, data.answer_column and data.trace_column.
TABLES = ("jsonl", "json", "csv", "parquet")
# Number of difficulty levels in the ledger task and in MATH. With data.groups=level, the difficulty
# groups are formed from these levels.
NUM_LEVELS = 5

# Placeholder for the number of tokens in the sentence `conditioning.prompt_text`.
BUDGET = "{budget}"

# Warm-up settings whose defaults suit a small model trained from scratch. For a pretrained model
# they would be harmful or unreachable, so the error message suggests these values instead.
_FROM_SCRATCH = {"learning_rate": "1e-5", "hold_accuracy": "0", "target_accuracy": "0"}

# String settings that may be empty.
_TEXTS = ("data.system_prompt", "data.template_variables")

# A function that checks the settings of a training method and yields one error message per problem.
Finder = Callable[[MethodSettings], Iterator[str]]


def _items(value: Any) -> tuple[Any, ...]:
    """Returns the items of a list or the values of a mapping. Wraps other values in a tuple."""
    if isinstance(value, Mapping):
        return tuple(value.values())
    return value if isinstance(value, tuple) else (value,)


def _out_of_range(settings: Mapping[str, Key]) -> Iterator[str]:
    """Yields an error message for each setting with a number outside its bounds."""
    for name, key in settings.items():
        if key.bounds is None:
            continue
        # Some keys also accept strings or null, which have no range.
        numbers = [item for item in _items(key.value) if isinstance(item, int | float)]
        outside = [number for number in numbers if not inside(number, key.bounds)]
        if outside:
            yield f"{name}: found {written(outside[0])}; it must be {range_text(key.bounds)}"


def _blank_texts(settings: Mapping[str, Key]) -> Iterator[str]:
    """Yields an error message for each blank string in a setting that requires text."""
    for name, key in settings.items():
        blank = any(isinstance(item, str) and not item.strip() for item in _items(key.value))
        if blank and name not in _TEXTS:
            yield f"{name}: the text is blank; use a name"


def _grader(grader: str | None, data: DataConfig) -> Iterator[str]:
    """Yields an error message for each problem of `grader` and `data.answers`."""
    if grader is not None and grader.strip():
        yield from filter(None, [grader_problem(grader)])
    if data.answers == "verbatim" and grader is None:
        yield (
            "data.answers=verbatim keeps reference answers as text, but the built-in grading "
            "rules compare parsed answers; set data.answers=parsed, or grader=FILE.py:function"
        )
    if data.answers == "verbatim" and data.train == "ledger":
        yield (
            "data.answers=verbatim can't be used with the ledger task, whose answers are "
            "generated and not read; set data.answers=parsed"
        )


def _rewards(reward: RewardConfig, shares: Mapping[str, float]) -> Iterator[str]:
    """Yields an error message for each problem of the section `reward` and its shares."""
    weights = reward.weights
    if weights and CORRECT not in weights:
        yield (
            f"reward.weights={written(weights)} lacks the reward `{CORRECT}`, from which accuracy "
            f"and pass rates are computed; use {{{CORRECT}: 1, FILE.py:function: 0.2}}"
        )
    for name in weights:
        problem = None if name == CORRECT else grader_problem(name, "reward.weights", CORRECT)
        if problem is not None:
            yield problem
    names = [function_name(name) for name in weights]
    repeated = [name for index, name in enumerate(names) if name in names[:index]]
    if repeated:
        yield (
            f"reward.weights: two rewards have the name {repeated[0]!r}, so their metrics would "
            "have the same name; use functions with different names"
        )
    if reward.normalize_each and not shares:
        yield (
            "reward.normalize_each=true needs several rewards, but reward.weights has only one; "
            "add another one, or set reward.normalize_each=false"
        )


def _words(conditioning: ConditioningConfig) -> Iterator[str]:
    """Yields an error unless `conditioning.prompt_text` contains `{budget}` exactly once."""
    words = conditioning.prompt_text
    if words.count(BUDGET) != 1:
        yield (
            f"conditioning.prompt_text: found {shown(words)}; use a sentence that contains "
            f"{BUDGET} once, such as {ConditioningConfig().prompt_text!r}"
        )


def _prompt_date(data: DataConfig) -> Iterator[str]:
    """Yields an error message if `data.prompt_date` is not a date."""
    date = data.prompt_date
    if date is None:
        return
    try:
        is_date = datetime.date.fromisoformat(date).isoformat() == date
    except ValueError:
        is_date = False
    if not is_date:
        yield f"data.prompt_date: found {shown(date)}; use a date such as '2026-11-28', or null"


def _arithmetic(model: ModelConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yields an error message for each dtype that conflicts with a kernel or another dtype."""
    if model.product_dtype is not None and model.compute_dtype != "float32":
        yield (
            f"model.product_dtype={model.product_dtype} needs a model that computes in float32, "
            f"but model.compute_dtype is {model.compute_dtype}; set model.compute_dtype=float32, "
            "or model.product_dtype=null"
        )
    for key, attention in {
        "model.attention": model.attention,
        "rollout.attention": rollout.attention,
    }.items():
        if attention == "cudnn" and model.compute_dtype != "bfloat16":
            yield (
                f"{key}=cudnn supports only 16-bit floating-point numbers, but "
                f"model.compute_dtype is {model.compute_dtype}; set model.compute_dtype=bfloat16, "
                f"or {key}=xla"
            )


def _model(model: ModelConfig, rollout: RolloutConfig, mesh: MeshConfig) -> Iterator[str]:
    """Yields an error message for each problem of the sections `model` and `mesh`."""
    if model.preset not in (*PRESETS, "custom"):
        near = difflib.get_close_matches(model.preset.lower(), PRESETS, n=1, cutoff=0.4)
        yield (
            f"model.preset: found {model.preset!r}; use {near[0] if near else 'custom'} "
            f"(possible: custom, {', '.join(PRESETS)})"
        )
    yield from _arithmetic(model, rollout)
    if model.preset == "custom" and model.path is None:
        yield from _custom_shape(model)
        if model.num_kv_heads % mesh.tensor:
            yield (
                f"mesh.tensor={mesh.tensor} does not divide "
                f"model.num_kv_heads={model.num_kv_heads}; set it to "
                f"{math.gcd(mesh.tensor, model.num_kv_heads)}"
            )
    if mesh.fsdp == 0:
        yield "mesh.fsdp: found 0; set it to a number of shards, or to -1 for all remaining devices"


def _custom_shape(model: ModelConfig) -> Iterator[str]:
    """Yields an error message for each conflict between the sizes of a custom architecture."""
    heads = model.num_heads
    kv_heads = model.num_kv_heads
    width = model.hidden_size
    if heads % kv_heads:
        divisors = [d for d in range(1, heads + 1) if heads % d == 0]
        yield (
            f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}; use one of "
            f"{', '.join(map(str, divisors))}"
        )
    if width % 2:
        yield (
            f"model.hidden_size={width} is odd, but the budget embedding consists of pairs of a "
            f"sine and a cosine; set it to {width + 1}"
        )
    if model.head_dim is None and width % heads:
        yield (
            f"model.hidden_size={width} is not a multiple of model.num_heads={heads}; set it to "
            f"{heads * max(round(width / heads), 1)}, or set model.head_dim"
        )
    elif (model.head_dim or width // heads) % 2:
        name = "model.hidden_size/model.num_heads" if model.head_dim is None else "model.head_dim"
        yield (
            f"{name}={model.head_dim or width // heads} is odd, but rotary position embeddings "
            "rotate pairs of dimensions; set model.head_dim to an even number"
        )


def _adapter(adapter: AdapterConfig, model: ModelConfig) -> Iterator[str]:
    """Yields an error message for each problem of the section `adapter` and `model.param_dtype`."""
    if adapter.rank is None:
        if adapter.path is not None:
            yield (
                "adapter.path is set, but adapter.rank is null; set adapter.rank to the rank of "
                "these adapters"
            )
        if model.param_dtype == "bfloat16":
            yield (
                "model.param_dtype=bfloat16: trained weights would lose most of their updates to "
                "rounding; set it to float32, or set adapter.rank=32 to train adapters on a "
                "frozen base"
            )
        return
    if not adapter.targets or len(set(adapter.targets)) < len(adapter.targets):
        yield "adapter.targets: a matrix appears twice; list each matrix once, such as [q, v]"


def _sources(data: DataConfig, model: ModelConfig, vocab: str | None) -> Iterator[str]:
    """Yields an error message for each invalid setting of data sets and their tokenizer."""
    if not data.eval:
        yield "data.eval: the list is empty; use at least one set, such as [ledger]"
    trained = [name for _, name in mixture(data.train)]
    weights = [weight for weight, _ in mixture(data.train)]
    if not trained or not all(0 < weight < math.inf for weight in weights):
        yield (
            f"data.train={written(data.train)} is empty, or contains a set whose weight is not a "
            "finite number above 0; use one or more sets with weights above 0"
        )
    if "ledger" in trained and data.train != "ledger":
        yield (
            "data.train: the ledger task has its own tokenizer and can't be mixed with other "
            "sets; use ledger alone"
        )
    named = [("data.train", spec) for spec in trained] + [("data.eval", s) for s in data.eval]
    for key, spec in named:
        name, colon, path = spec.partition(":")
        if name == "ledger" and colon:
            yield (
                f"{key}: found {spec!r}, but the problems of the ledger task are generated and "
                "not read from a file; use ledger without a path"
            )
        # The ledger is generated rather than read, and the name of a Python file is already a path.
        needs_no_path = name == "ledger" or name.endswith(".py")
        if spec.strip() and not (needs_no_path or (name.strip() and path.strip())):
            yield f"{key}: found {spec!r}; use ledger, or NAME:PATH such as gsm8k:data/gsm8k"
    for kind, sets in {"question": named, "answer": named, "trace": named[: len(trained)]}.items():
        column = getattr(data, f"{kind}_column")
        if column is not None and not any(s.partition(":")[0] in TABLES for _, s in sets):
            yield (
                f"data.{kind}_column={written(column)} has no effect, because no set is a table "
                f"({', '.join(TABLES)}); leave the key out"
            )
    repeated = [spec for i, spec in enumerate(data.eval) if spec in data.eval[:i]]
    if repeated:
        yield f"data.eval contains {repeated[0]!r} twice; list every set once"
    procedural = data.train == "ledger"
    others = [spec for spec in data.eval if (spec == "ledger") != procedural]
    if others:
        yield (
            f"data.eval contains {others[0]!r}, but data.train is {written(data.train)}, and "
            "their prompts and tokenizers differ; use "
            + ("[ledger]" if procedural else "sets in natural language only")
        )
    setting_of = {"ledger": "data.train=ledger", "characters": "data.prompt_format=characters"}
    if vocab and (model.path or model.tokenizer):
        key = "model.path" if model.path else "model.tokenizer"
        yield (
            f"{key}: {setting_of[vocab]} has its own small model and tokenizer, so no other model "
            "can be used; set it to null"
        )
    if not vocab and not (model.path or model.tokenizer):
        yield (
            f"model.path is null, but data.train={written(data.train)} needs a tokenizer; set it "
            "to a Hugging Face folder (or set model.tokenizer, for a random model; or "
            "data.prompt_format=characters, for a small model of characters)"
        )


def _groups(data: DataConfig, conditioning: ConditioningConfig, vocab: str | None) -> Iterator[str]:
    """Yields an error message for each problem of the difficulty groups and their levels."""
    procedural = data.train == "ledger"
    if data.groups == "level" and data.num_groups > NUM_LEVELS:
        yield (
            f"data.num_groups={data.num_groups}: data.groups=level makes groups from {NUM_LEVELS} "
            f"levels; set it to 1 to {NUM_LEVELS}"
        )
    levels = data.ledger.train_levels
    if procedural and (not levels or len(set(levels)) < len(levels)):
        yield f"data.ledger.train_levels: found {written(levels)}; list each level once"
    if procedural and data.groups != "level":
        yield (
            f"data.groups={data.groups}: the ledger has levels, but no measured solve rates; set "
            "data.groups=level"
        )
    if not procedural and data.groups == "solve_rate" and data.labels is None:
        yield (
            "data.labels is null, but data.groups=solve_rate needs measured solve rates; set it "
            "to the path of a label file"
        )
    if data.groups == "level" and data.labels is not None:
        yield (
            f"data.labels={data.labels} has no effect with data.groups=level; set "
            "data.groups=solve_rate, or data.labels=null"
        )
    if procedural and data.prompt_format != "auto":
        yield (
            f"data.prompt_format={data.prompt_format}: the ledger task has its own prompt format; "
            "set data.prompt_format=auto"
        )
    if vocab and conditioning.prompt_text != ConditioningConfig().prompt_text:
        yield (
            "conditioning.prompt_text has no effect, because this data set has special tokens "
            "for the budget; leave the key out"
        )


def _scratch_defaults(warmup: WarmupConfig, model: ModelConfig, vocab: str | None) -> Iterator[str]:
    """Yields an error message if the warm-up of a pretrained model uses unsuitable defaults.

    The defaults in `_FROM_SCRATCH` are meant for a small model that is trained from scratch.
    """
    # `_sources` reports the conflict between a built-in vocabulary and a pretrained model.
    if not warmup.steps or not model.path or vocab:
        return
    names = [
        name for name in _FROM_SCRATCH if getattr(warmup, name) == getattr(WarmupConfig(), name)
    ]
    if names:
        defaults = ", ".join(f"warmup.{name}={getattr(warmup, name):g}" for name in names)
        others = " ".join(f"warmup.{name}={_FROM_SCRATCH[name]}" for name in names)
        plural = len(names) > 1
        yield (
            f"{defaults} {'are defaults' if plural else 'is a default'} for a small model made "
            f"from scratch, not for model.path={model.path}; set {others}, or other values "
            "that suit the model (with accuracies of 0, the number of steps is fixed)"
        )


def _warmup(warmup: WarmupConfig, data: DataConfig) -> Iterator[str]:
    """Yields an error message for each problem of the supervised warm-up."""
    procedural = data.train == "ledger"
    if warmup.steps and data.prompt_format == "boxed":
        yield (
            "data.prompt_format=boxed has no closing tag, which the warm-up needs; set "
            "data.prompt_format=think_answer"
        )
    if procedural and warmup.styles:
        yield (
            "warmup.styles has no effect on the ledger task, whose trace styles are fixed; leave "
            "this key out"
        )
    if not procedural and warmup.style is not None:
        yield (
            f"warmup.style={warmup.style} determines when the warm-up of the ledger task ends, "
            f"but data.train is {written(data.train)}; set warmup.style=null"
        )
    if warmup.dir is not None and not warmup.steps:
        yield (
            f"warmup.dir={warmup.dir} has no effect with warmup.steps=0; set warmup.steps to the "
            "steps of that warm-up, or warmup.dir=null"
        )
    if procedural and warmup.style is not None and data.ledger.variant != "tradeoff":
        yield (
            f"warmup.style={warmup.style}: the accuracy of a single style can't end the warm-up of "
            f"data.ledger.variant={data.ledger.variant}, which trains several styles; set "
            "data.ledger.variant=tradeoff, or warmup.style=null"
        )
    levels = data.ledger.train_levels
    needed = {warmup.style_level, NUM_LEVELS} - set(levels)
    if procedural and warmup.steps and warmup.style is not None and needed:
        yield (
            f"data.ledger.train_levels={written(levels)}: warmup.style is measured on training "
            f"problems of level {min(needed)}; add this level, or set warmup.style=null"
        )
    band = warmup.style_accuracy
    if len(band) != 2 or band[0] >= band[1]:
        yield (
            f"warmup.style_accuracy={written(band)} is not an interval; use [low, high] with low "
            "below high"
        )


def problems(config: Config, also: Finder | None = None) -> Iterator[str]:
    """Yields a one-line error message for every problem of a config.

    If any number is out of range, combinations of values are not checked, because those checks may
    divide by such a number.

    Args:
      config: the config to check.
      also: an additional check, usually of the training method's settings.
    """
    settings = dict(walk(config))
    out_of_range = list(_out_of_range(settings))
    yield from out_of_range
    if out_of_range:
        return
    resolved = resolve(config)
    vocab = resolved.task.builtin_vocab
    model = config.model
    data = config.data
    yield from _blank_texts(settings)
    yield from _grader(config.grader, data)
    yield from _rewards(config.reward, resolved.method.reward_shares)
    yield from _words(config.conditioning)
    yield from _prompt_date(data)
    yield from _model(model, config.rollout, config.mesh)
    yield from _adapter(config.adapter, model)
    yield from _sources(data, model, vocab)
    yield from _groups(data, config.conditioning, vocab)
    yield from _scratch_defaults(config.warmup, model, vocab)
    yield from _warmup(config.warmup, data)
    yield from budget_problems(resolved.method, vocab)
    yield from batch_problems(config.rollout, config.train, config.budget)
    yield from rollout_problems(config.rollout, config.loss, config.train)
    yield from undo_problems(config.train, config.budget)
    yield from loss_problems(config.loss, config.value, config.optimizer, config.distill)
    yield from evaluation_problems(config.eval, data)
    if also is not None:
        yield from also(resolved.method)


def check_ranges(config: Config) -> None:
    """Checks the config of a saved policy before the policy is loaded.

    This function checks only value ranges, texts, the names in `budget.levels`, and that dtypes and
    attention kernels are compatible. All other combinations were checked when the policy was
    trained.

    Raises:
      UserError: if a check fails. The error contains the first problem.
    """
    for problem in (
        *_out_of_range(dict(walk(config))),
        *_words(config.conditioning),
        *_prompt_date(config.data),
        *level_problems(config.budget),
        *_arithmetic(config.model, config.rollout),
    ):
        raise UserError(problem)


def check(config: Config, *, also: Finder | None = None) -> None:
    """Validates a config.

    Args:
      config: the config to check.
      also: an additional check, usually of the training method's settings.

    Raises:
      UserError: with one line for each problem that `problems` finds.
    """
    lines = list(problems(config, also))
    if lines:
        raise UserError(*lines)
