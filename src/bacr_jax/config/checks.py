"""Which values of the config make sense, alone and together; checked before any device work.

A problem is a line that names the dotted keys, what was found and what to write instead.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator
from typing import Any

from bacr_jax.config.methods import method_settings
from bacr_jax.config.schema import Config
from bacr_jax.config.values import written as _shown
from bacr_jax.errors import UserError

# Legal range of every number, in interval notation; a list is checked number by number. Infinity
# is only legal where the interval says so.
BOUNDS = {
    # jax.random.key keeps 32 bits: larger seeds would repeat smaller ones.
    "seed": "[0, 4294967295]",
    "output.rollouts": "[0, inf)",
    "output.log_every": "[1, inf)",
    "model.hidden_size": "[2, inf)",
    "model.intermediate_size": "[1, inf)",
    "model.num_layers": "[1, inf)",
    "model.num_heads": "[1, inf)",
    "model.num_kv_heads": "[1, inf)",
    "model.head_dim": "[2, inf)",
    "model.rope_theta": "(0, inf)",
    "model.logprob_chunk": "[1, inf)",
    "conditioning.gate_bias": "(-inf, inf)",
    "data.max_prompt_tokens": "[1, inf)",
    "data.num_groups": "[1, inf)",
    # Operands are single digits, one token each.
    "data.ledger.max_operand": "[1, 9]",
    "data.ledger.train_size": "[1, inf)",
    "warmup.steps": "[0, inf)",
    # The longest supervised examples are padded to 80 tokens.
    "warmup.batch_tokens": "[80, inf)",
    "warmup.learning_rate": "(0, inf)",
    "warmup.target_accuracy": "[0, 1]",
    "warmup.hold_accuracy": "[0, 1]",
    "warmup.max_hold": "[0, inf)",
    "warmup.style_level": "[1, 5]",
    "warmup.style_accuracy": "[0, 1]",
    "budget.min": "[1, inf)",
    "budget.max": "[1, inf)",
    "budget.choices": "[1, inf)",
    "curriculum.alpha": "[0, 1]",
    "curriculum.beta": "[0, 1]",
    "curriculum.mu0": "(0, inf)",
    "curriculum.sigma": "(0, inf)",
    "curriculum.ema_decay": "[0, 1)",
    "curriculum.update_every": "[1, inf)",
    "curriculum.weight_epsilon": "[0, inf)",
    "curriculum.probe_size": "[1, inf)",
    "curriculum.probe_budget": "[1, inf)",
    "curriculum.bandwidth": "(0, inf)",
    "curriculum.strength": "(0, inf)",
    "curriculum.forgetting": "(0, 1]",
    "cuts.count": "[1, 64]",
    "cuts.weights": "[0, 1]",
    "reward.coefficient": "[0, inf)",
    "advantage.floor": "(0, inf)",
    "value.hidden_size": "[1, inf)",
    "value.learning_rate": "(0, inf)",
    "value.inner_steps": "[0, inf)",
    "value.warmup_iterations": "[0, inf)",
    "anytime.answers": "[1, inf)",
    "dapo.max_rounds": "[1, inf)",
    "dapo.overlong_penalty": "[0, inf)",
    "dapo.overlong_share": "(0, 1]",
    "hapo.weight": "[0, inf)",
    # A lower floor would rank a long right answer below wrong ones.
    "hapo.floor": "(-1, 0]",
    "selfbudgeter.alpha_start": "(0, inf)",
    "selfbudgeter.alpha_end": "(0, inf)",
    "selfbudgeter.correct_range": "(-inf, inf)",
    "selfbudgeter.wrong_range": "(-inf, inf)",
    "selfbudgeter.budget_penalty": "(-inf, 0]",
    "selfbudgeter.format_penalty": "(-inf, inf)",
    "selfbudgeter.cold_start_steps": "[0, inf)",
    "selfbudgeter.cold_start_questions": "[1, inf)",
    "selfbudgeter.cold_start_rate": "(0, inf)",
    "selfbudgeter.cold_start_tokens": "[1, inf)",
    # A range of ratios that is empty or reaches 0 or below would not clip.
    "loss.clip_low": "(0, 1)",
    "loss.clip_high": "(0, inf)",
    "loss.value_coef": "[0, inf)",
    "loss.entropy_coef": "[0, inf)",
    "loss.kl_coef": "[0, inf)",
    # Below 1 it would shrink the loss where sampler and learner agree.
    "loss.importance_cap": "[1, inf)",
    "rollout.questions": "[1, inf)",
    "rollout.group_size": "[1, inf)",
    "rollout.temperature": "(0, inf)",
    "rollout.answer_tokens": "[1, inf)",
    "rollout.slots": "[1, inf)",
    "rollout.chunk": "[1, inf)",
    "optimizer.learning_rate": "[0, inf)",
    "optimizer.conditioning_learning_rate": "[0, inf)",
    "optimizer.final_fraction": "[0, 1]",
    "optimizer.warmup_steps": "[0, inf)",
    "optimizer.b1": "[0, 1)",
    "optimizer.b2": "[0, 1)",
    "optimizer.weight_decay": "[0, inf)",
    # Infinity: no clipping. 0 would scale every gradient to nothing.
    "optimizer.grad_clip": "(0, inf]",
    "train.steps": "[1, inf)",
    "train.epochs": "(0, inf)",
    "train.max_generated_tokens": "[1, inf)",
    "train.minibatches": "[1, inf)",
    "train.micro_batch_rows": "[1, inf)",
    "train.micro_batch_tokens": "[1, inf)",
    "train.length_buckets": "[1, inf)",
    "eval.every": "[1, inf)",
    "eval.budgets": "[1, inf)",
    "eval.size": "[1, inf)",
    "eval.samples": "[0, inf)",
    "eval.temperature": "(0, inf)",
    "eval.top_p": "(0, 1]",
    "checkpoint.every": "[1, inf)",
    "train.max_skipped_updates": "[1, inf)",
    "checkpoint.keep": "[1, inf)",
    "mesh.data": "[1, inf)",
    "mesh.fsdp": "[-1, inf)",
    "mesh.tensor": "[1, inf)",
    "mesh.decode_tensor": "[1, inf)",
}

# Shapes that `model.preset` may name (their numbers are in model/sizes.py).
PRESETS = tuple(f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"))
# Positions the Qwen2.5 models were made for (max_position_embeddings of their config.json).
PRESET_POSITIONS = 32768

# Difficulty levels of the ledger and of MATH, from which groups are made.
NUM_LEVELS = 5

# Finds problems of a config, one line each.
Finder = Callable[[Config], Iterator[str]]


def _bounds(interval: str) -> tuple[float, float, bool, bool]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high), interval[0] == "[", interval[-1] == "]"


def _inside(value: int | float, interval: str) -> bool:
    low, high, with_low, with_high = _bounds(interval)
    if value in (low, high):
        return (value == low and with_low) or (value == high and with_high)
    return low < value < high


def range_text(interval: str) -> str:
    """The numbers of an interval, in words."""
    low, high, with_low, with_high = _bounds(interval)
    if math.isinf(low):
        return "any finite number"
    if not math.isinf(high):
        return f"in {interval}"
    least = f"{low:g} or more" if with_low else f"more than {low:g}"
    return f"{least} (.inf: no limit)" if with_high else least


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _out_of_range(config: Config) -> Iterator[str]:
    for key, value in _values(config):
        interval = BOUNDS.get(key, "(-inf, inf)")
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if is_number and not _inside(number, interval):
                yield f"{key}: found {_shown(number)}; write {range_text(interval)}"
                break


def _blank_texts(config: Config) -> Iterator[str]:
    for key, value in _values(config):
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.strip():
                yield f"{key}: found blank text; write a name"


def _model(config: Config) -> Iterator[str]:
    model, mesh = config.model, config.mesh
    if model.preset not in (*PRESETS, "custom"):
        near = difflib.get_close_matches(model.preset.lower(), PRESETS, n=1, cutoff=0.4)
        yield (
            f"model.preset: found {model.preset!r}; write {near[0] if near else 'custom'} "
            f"(possible: custom, {', '.join(PRESETS)})"
        )
    if model.attention == "cudnn" and model.compute_dtype != "bfloat16":
        yield (
            f"model.attention=cudnn: needs 16-bit numbers, found model.compute_dtype="
            f"{model.compute_dtype}; write bfloat16, or model.attention=xla"
        )
    if model.preset == "custom" and model.path is None:
        yield from _custom_shape(config)
        if model.num_kv_heads % mesh.tensor:
            yield (
                f"mesh.tensor={mesh.tensor}: must divide model.num_kv_heads={model.num_kv_heads}; "
                f"write {math.gcd(mesh.tensor, model.num_kv_heads)}"
            )
    if mesh.fsdp == 0:
        yield "mesh.fsdp: found 0; write a number of shards, or -1 for all remaining devices"


def _custom_shape(config: Config) -> Iterator[str]:
    model = config.model
    heads, kv_heads, width = model.num_heads, model.num_kv_heads, model.hidden_size
    if heads % kv_heads:
        divisors = [d for d in range(1, heads + 1) if heads % d == 0]
        yield (
            f"model.num_kv_heads={kv_heads}: must divide model.num_heads={heads}; write one of "
            f"{', '.join(map(str, divisors))}"
        )
    if width % 2:
        yield (
            f"model.hidden_size={width}: must be even, for the sines and cosines of the budget; "
            f"write {width + 1}"
        )
    if model.head_dim is None and width % heads:
        yield (
            f"model.hidden_size={width}: is not a multiple of model.num_heads={heads}; write "
            f"{heads * max(round(width / heads), 1)}, or set model.head_dim"
        )
    elif (model.head_dim or width // heads) % 2:
        name = "model.hidden_size/model.num_heads" if model.head_dim is None else "model.head_dim"
        yield (
            f"{name}={model.head_dim or width // heads}: must be even, since rotary positions turn "
            "pairs; write an even model.head_dim"
        )


def _sources(config: Config) -> Iterator[str]:
    data, model = config.data, config.model
    if not data.eval:
        yield "data.eval: found an empty list; write at least one set, such as [ledger]"
    for key, spec in (("data.train", data.train), *(("data.eval", spec) for spec in data.eval)):
        name, colon, path = spec.partition(":")
        if name == "ledger" and colon:
            yield f"{key}: found {spec!r}; write ledger (it is made, not read)"
        elif name != "ledger" and spec.strip() and not (name.strip() and path.strip()):
            yield f"{key}: found {spec!r}; write ledger, or NAME:PATH such as gsm8k:data/gsm8k"
    repeated = [spec for i, spec in enumerate(data.eval) if spec in data.eval[:i]]
    if repeated:
        yield f"data.eval: holds {repeated[0]!r} twice; write every set once"
    procedural = data.train == "ledger"
    others = [spec for spec in data.eval if (spec == "ledger") != procedural]
    if others:
        yield (
            f"data.eval: holds {others[0]!r}, but data.train is {data.train!r}, and their prompts "
            "and tokenizers differ; write "
            + ("[ledger]" if procedural else "sets in natural language only")
        )
    if procedural and (model.path or model.tokenizer):
        key = "model.path" if model.path else "model.tokenizer"
        yield f"{key}: data.train=ledger has its own small model and tokenizer; write null"
    if not procedural and not (model.path or model.tokenizer):
        yield (
            f"model.path: is null, but data.train={data.train} needs a tokenizer; write a Hugging "
            "Face folder (or model.tokenizer, with a random model)"
        )


def _groups_and_warmup(config: Config) -> Iterator[str]:
    data, warmup = config.data, config.warmup
    procedural = data.train == "ledger"
    if data.groups == "level" and data.num_groups > NUM_LEVELS:
        yield (
            f"data.num_groups={data.num_groups}: data.groups=level makes groups from "
            f"{NUM_LEVELS} levels; write 1 to {NUM_LEVELS}"
        )
    if procedural and data.groups != "level":
        yield (
            f"data.groups={data.groups}: the ledger has levels, but no measured solve rates; write "
            "level"
        )
    if not procedural and data.groups == "solve_rate" and data.labels is None:
        yield (
            "data.labels: is null, but data.groups=solve_rate needs measured solve rates; write "
            "the path of a label file"
        )
    if data.groups == "level" and data.labels is not None:
        yield (
            f"data.labels={data.labels}: is not read, since data.groups=level; write "
            "data.groups=solve_rate, or data.labels=null"
        )
    if procedural and data.prompt_format != "auto":
        yield (
            f"data.prompt_format={data.prompt_format}: the ledger has its own tokens; write auto"
        )
    if warmup.steps and not procedural:
        yield (
            f"warmup.steps={warmup.steps}: only data.train=ledger has a supervised warm-up, found "
            f"data.train={data.train}; write 0"
        )
    if warmup.dir is not None and not warmup.steps:
        yield (
            f"warmup.dir={warmup.dir}: is not read, since warmup.steps=0; write the steps of that "
            "warm-up, or warmup.dir=null"
        )


def _budgets(config: Config) -> Iterator[str]:
    budget, cuts, model = config.budget, config.cuts, config.model
    if budget.min > budget.max:
        yield (
            f"budget.min={budget.min}: is above budget.max={budget.max}; write at most {budget.max}"
        )
    if budget.prior == "choices":
        yield from _choices(config)
    if cuts.count > budget.min:
        yield (
            f"cuts.count={cuts.count}: a trace of budget.min={budget.min} tokens has fewer "
            f"distinct cuts; write at most {budget.min}, or a larger budget.min"
        )
    if isinstance(cuts.weights, tuple):
        total = math.fsum(cuts.weights)
        if len(cuts.weights) != cuts.count:
            yield (
                f"cuts.weights: found {len(cuts.weights)} weights for cuts.count={cuts.count}; "
                "write one per cut"
            )
        elif abs(total - 1.0) > 1e-4:
            yield f"cuts.weights: found weights that sum to {total:g}; write weights that sum to 1"
    mu0, groups = config.curriculum.mu0, config.data.num_groups
    if isinstance(mu0, tuple) and len(mu0) != groups:
        yield (
            f"curriculum.mu0: found {len(mu0)} values for data.num_groups={groups}; write one "
            "number, or one per group"
        )
    budgets = config.eval.budgets
    if not budgets:
        yield f"eval.budgets: found an empty list; write budgets such as [{budget.max}]"
    elif list(budgets) != sorted(set(budgets)):
        yield (
            f"eval.budgets: found {_shown(budgets)}; write every budget once, in rising order: "
            f"{_shown(tuple(sorted(set(budgets))))}"
        )
    answers = config.rollout.answer_tokens
    longest = config.data.max_prompt_tokens + max(budget.max, *budgets, 1) + answers
    if model.preset in PRESETS and longest > PRESET_POSITIONS:
        yield (
            f"budget.max={budget.max}, eval.budgets={_shown(budgets)}: with "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and rollout.answer_tokens="
            f"{answers} a row has {longest} tokens, and {model.preset} was made for "
            f"{PRESET_POSITIONS}; write smaller ones"
        )


def _choices(config: Config) -> Iterator[str]:
    budget = config.budget
    rising = tuple(sorted(set(budget.choices)))
    inside = tuple(b for b in rising if budget.min <= b <= budget.max)
    if not rising:
        yield (
            "budget.choices: found an empty list, and budget.prior=choices draws from it; write "
            f"budgets such as [{_shown(budget.min)}, {_shown(budget.max)}]"
        )
    elif inside != rising:
        outside = next(b for b in rising if b not in inside)
        yield (
            f"budget.choices: {outside} is not between budget.min={budget.min} and "
            f"budget.max={budget.max}; write {_shown(inside or (budget.min, budget.max))}, or "
            "another range"
        )
    elif budget.choices != rising:
        yield (
            f"budget.choices: found {_shown(budget.choices)}; write every budget once, in rising "
            f"order: {_shown(rising)}"
        )


def _batches(config: Config) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    if rollout.questions % train.minibatches:
        yield (
            f"train.minibatches={train.minibatches}: must divide rollout.questions="
            f"{rollout.questions}; write {math.gcd(train.minibatches, rollout.questions)}, or "
            "another number of questions"
        )
    elif train.micro_batch_rows is not None:
        rows = rollout.questions // train.minibatches * rollout.group_size
        if rows > train.micro_batch_rows and rows % train.micro_batch_rows:
            yield (
                f"train.micro_batch_rows={train.micro_batch_rows}: must divide the {rows} rows of "
                "an update (rollout.questions x rollout.group_size / train.minibatches); write "
                f"{math.gcd(rows, train.micro_batch_rows)}"
            )
    if train.micro_batch_rows is not None and train.micro_batch_tokens is not None:
        yield (
            f"train.micro_batch_tokens={train.micro_batch_tokens}: train.micro_batch_rows="
            f"{train.micro_batch_rows} splits the update too; write null for one of them"
        )
    if train.drop_zero_advantage:
        loss = config.loss
        also = [
            f"loss.{k}={getattr(loss, k):g}"
            for k in ("entropy_coef", "kl_coef")
            if getattr(loss, k)
        ]
        if also:
            yield (
                f"train.drop_zero_advantage: would change the loss, since {', '.join(also)} count "
                "every token; write false, or 0 for them"
            )
        if train.micro_batch_tokens is None:
            yield (
                "train.drop_zero_advantage: rows are only left out of micro-batches by tokens; "
                "write train.micro_batch_tokens, or false"
            )


_SECTIONS: tuple[Finder, ...] = (
    _out_of_range,
    _blank_texts,
    _model,
    _sources,
    _groups_and_warmup,
    _budgets,
    _batches,
    method_settings,
)


def problems(config: Config, also: Finder | None = None) -> Iterator[str]:
    """Every problem of a config, one line each.

    While a number is out of range, combinations are not looked at: they divide by it.

    Args:
      config: the settings.
      also: finds what is wrong with the settings of a method.
    """
    for find in (*_SECTIONS, *filter(None, [also])):
        found = list(find(config))
        yield from found
        if found and find is _out_of_range:
            return


def check_ranges(config: Config) -> None:
    """Refuses values out of range; combinations are not looked at.

    Raises:
      UserError: with the first problem.
    """
    for problem in _out_of_range(config):
        raise UserError(problem)


def check(config: Config, *, also: Finder | None = None) -> None:
    """Refuses values out of range and impossible combinations.

    Args:
      config: the settings.
      also: as in `problems`.

    Raises:
      UserError: with the first problem, and the number of others.
    """
    found = list(problems(config, also))
    if found:
        more = f" ({len(found) - 1} more to fix)" if len(found) > 1 else ""
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in found[0])
        raise UserError(line + more)
