"""Computes the sizes of a run from its config: model shape, batch sizes and lengths.

No weights are needed. Memory is predicted for the maximum lengths that the config allows, so that
it is not underestimated. Durations are predicted for the expected lengths (see `lengths`).

A row is one sampled trace. Its trunk consists of the prompt and the thinking. At every cut (a
position at which the thinking is truncated), a branch with a suffix and an answer continues from
the trunk. A slot decodes one row at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from bacr_jax.config import Config, DataConfig, EvalConfig, ModelConfig
from bacr_jax.config.derived import HOLDOUT, largest_evaluated, selection_set
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.evaluation.samples import dense_settings, eval_settings
from bacr_jax.learner.micro_batches import Shapes
from bacr_jax.learner.trust_region import MEASURED_TRACES
from bacr_jax.learner.updates import num_scored
from bacr_jax.methods import load_method
from bacr_jax.model import adapters
from bacr_jax.model.compute import Remat
from bacr_jax.model.hf.hub import is_hub_name
from bacr_jax.model.sizes import PRESETS, Qwen2Config
from bacr_jax.parallel import MeshShape
from bacr_jax.questions.math_sets import LAYOUTS
from bacr_jax.questions.published_sets import PUBLISHED_SETS
from bacr_jax.rollout.branches import CUTS_AT_ONCE
from bacr_jax.runs import setup
from bacr_jax.types import NO_BUDGET
from bacr_plan.lengths import SUFFIX_TOKENS, Lengths, prompt_lengths, rows_of

# Padded length of the longest supervised examples of the ledger task, in tokens.
_LEDGER_EXAMPLE = 80
_FP32 = 4
# Assumed number of problems of an evaluation set that is not public. A plan does not read the sets.
_PROBLEMS_OF_OTHERS = 500

# A decoding call of an evaluation: for each part, the number of traces and their largest budget in
# tokens.
EvaluationCall = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Workload:
    """The sizes of one iteration.

    Attributes:
      config: the config of the run.
      model: the model's shape.
      shape_source: source of the model's shape, which is printed with the plan.
      conditioned: True if the run has a budget module.
      value_hidden: hidden width of the value head, or 0 without a value head.
      rows: number of traces per iteration (questions times group size).
      micro_rows: number of traces with the maximum length per gradient accumulation step, on all
        devices.
      rest_tokens: number of tokens by which micro-batches of shorter traces can be larger, if they
        are formed by tokens.
      scored: number of forward passes over all traces that only compute log-probabilities:
        old and reference ones, and those after an update whose KL divergence is limited by
        optimizer.max_update_kl. Passes over a part of the traces count as fractions.
      prompt: padded prompt length in tokens.
      thinking: padded thinking length in tokens: the largest budget plus the grace window.
      draw: returns the expected lengths of the traces. It reads the training data if available.
      cuts: number of answers (branches) per trace: the number of cuts times the number of answers
        that the method samples at each cut.
      slots: number of traces decoded together.
      own_keys: True if attention in decoding reads only the valid keys of each trace (cuDNN)
        instead of the complete KV caches.
      evaluated: the decoding calls of an evaluation.
      eval_slots: number of traces decoded together in an evaluation, or 0 to use `slots`.
      float_bytes: bytes per number of the compute dtype.
      remat: the setting of model.remat.
      fused_attention: True if attention within trunks does not store its scores (cuDNN).
      adapters: number of parameters of low-rank adapters, or 0 if all weights are trained.
      frozen_bytes: bytes per frozen base weight, or 0 without adapters.
      moment_bytes: bytes per number of Adam's moments.
      warmup_tokens: number of tokens per step of the supervised warm-up, including padding, or 0
        without a warm-up.
    """

    config: Config
    model: Qwen2Config
    shape_source: str
    conditioned: bool
    value_hidden: int
    rows: int
    micro_rows: int
    rest_tokens: int
    scored: float
    prompt: int
    thinking: int
    draw: Callable[[], Lengths] = dataclasses.field(compare=False, repr=False)
    cuts: int
    slots: int
    own_keys: bool
    evaluated: tuple[EvaluationCall, ...]
    eval_slots: int
    float_bytes: int
    remat: Remat
    fused_attention: bool
    adapters: int
    frozen_bytes: int
    moment_bytes: int
    warmup_tokens: int

    @property
    def branch(self) -> int:
        """Returns the maximum number of tokens of an answer with its forced closing text."""
        return SUFFIX_TOKENS + self.config.rollout.answer_tokens

    @property
    def trunk(self) -> int:
        """Returns the maximum number of tokens of a prompt with its thinking."""
        return self.prompt + self.thinking

    @property
    def row_tokens(self) -> int:
        """Returns the padded tokens per trace in the learner: prompt, thinking and all answers."""
        return self.trunk + self.cuts * self.branch

    def with_micro_rows(self, rows: int) -> "Workload":
        """Returns the run with micro-batches that fit exactly `rows` traces of maximum length."""
        return dataclasses.replace(self, micro_rows=rows, rest_tokens=0)

    @property
    def by_tokens(self) -> bool:
        """True if micro-batches are formed by tokens (`train.micro_batch_tokens`)."""
        return self.config.train.micro_batch_tokens is not None

    def micro_batch(self, rows: int) -> dict[str, int]:
        """Returns the config key and its value for a micro-batch with `rows` traces."""
        if self.by_tokens:
            return {"train.micro_batch_tokens": rows * self.row_tokens}
        return {"train.micro_batch_rows": rows}

    @property
    def lengths(self) -> Lengths:
        """Returns the expected lengths of the traces of an iteration, in tokens."""
        return self.draw()

    @property
    def update_rows(self) -> int:
        """Returns the number of traces in one optimizer update."""
        return self.rows // self.config.train.minibatches

    @property
    def warmup(self) -> "Workload | None":
        """Returns the sizes of a step in the supervised warm-up, or None without a warm-up.

        The warm-up trains all weights of the plain model in fp32, even if the run trains adapters
        afterwards. A batch is a single micro-batch, in which all examples have the maximum length.
        """
        if not self.warmup_tokens:
            return None
        longest = self.trunk + self.branch
        if self.config.data.train == "ledger":
            longest = _LEDGER_EXAMPLE
        width = min(longest, self.warmup_tokens)
        rows = self.warmup_tokens // width
        train = dataclasses.replace(
            self.config.train,
            micro_batch_tokens=None,
            padding_free=False,
            minibatches=1,
        )
        loss = dataclasses.replace(self.config.loss, kl_coef=0.0)
        optimizer = dataclasses.replace(self.config.optimizer, max_update_kl=None)
        config = dataclasses.replace(self.config, train=train, loss=loss, optimizer=optimizer)
        return dataclasses.replace(
            self,
            config=config,
            conditioned=False,
            value_hidden=0,
            rows=rows,
            micro_rows=rows,
            rest_tokens=0,
            scored=0.0,
            prompt=0,
            thinking=width,
            cuts=0,
            adapters=0,
            frozen_bytes=0,
            moment_bytes=_FP32,
        )

    @property
    def measures_warmup(self) -> bool:
        """False if the warm-up certainly measures no accuracy (`training.warmup`).

        A warm-up measures an accuracy to reach a target, or to compare several trace styles. The
        styles of generated tasks are not known here, so several are assumed.
        """
        warmup = self.config.warmup
        data = self.config.data
        has_target = max(warmup.target_accuracy, warmup.hold_accuracy) > 0
        if has_target or warmup.style is not None:
            return True
        if warmup.styles:
            return len(warmup.styles) > 1
        if isinstance(data.train, str):
            layout = LAYOUTS.get(data.train.partition(":")[0])
            if layout is not None:
                return len(layout.traces) > 1
        return not isinstance(data.trace_column, str)

    def by_real_tokens(self, tokens: int, *, padding_free: bool) -> "Workload":
        """Returns the run with micro-batches of `tokens` tokens, optionally without padding."""
        train = dataclasses.replace(
            self.config.train,
            micro_batch_rows=None,
            micro_batch_tokens=tokens,
            padding_free=padding_free,
        )
        config = dataclasses.replace(self.config, train=train)
        rows, rest_tokens = divmod(tokens, self.row_tokens)
        return dataclasses.replace(self, config=config, micro_rows=rows, rest_tokens=rest_tokens)

    @property
    def evaluation(self) -> "Workload":
        """Returns the sizes of the largest decoding call of an evaluation.

        A trace has one answer, or several with `eval.cut_every`, which are decoded together.
        """
        budget = self.config.budget
        spacing = self.config.eval.cut_every
        longest = largest_evaluated(self.config.budget, self.config.eval)
        cuts = 1
        if spacing is not None:
            cuts = min(CUTS_AT_ONCE, -(-longest // spacing))
        rows_of_calls = [sum(rows for rows, _ in call) for call in self.evaluated]
        return dataclasses.replace(
            self,
            rows=max(rows_of_calls, default=0),
            thinking=max(budget.max, longest) + budget.grace,
            cuts=cuts,
            slots=self.eval_slots or self.slots,
        )


def _preset_of(path: str) -> str:
    """Returns the preset with the shape of the model that a model folder is named after.

    For example, Qwen2.5-7B-Instruct uses the preset qwen2.5-7b.

    Raises:
      UserError: if the name does not match any released model in `PRESETS`.
    """
    name = Path(path).name.lower()
    for preset in PRESETS:
        if name == preset or name.startswith(f"{preset}-"):
            return preset
    advice = f"set model.preset to a model with the same shape (one of {', '.join(PRESETS)})"
    if is_hub_name(path):
        advice += ", or add --download to get its config.json"
    raise UserError(
        f"model.path: the shape of the model {path!r} is unknown, because {path}/config.json does "
        f"not exist and no known model has this name; {advice}"
    )


def planned_shape(data: DataConfig, model: ModelConfig) -> tuple[Qwen2Config, str]:
    """Returns the shape of the policy's model, and a description of the shape's source.

    No weights are needed. The shape comes from the model's folder if it exists. Otherwise it comes
    from `model.preset`, or from the folder's name if it matches a released model.

    Raises:
      UserError: if the shape is unknown.
    """
    vocab_size = 0
    if model.path is not None and (Path(model.path) / "config.json").is_file():
        source = f"{model.path}/config.json"
    elif model.preset != "custom":
        source = f"model.preset={model.preset}"
        model = dataclasses.replace(model, path=None)
    elif model.path is not None:
        preset = _preset_of(model.path)
        source = f"{preset}, guessed from the name {model.path}, because this folder does not exist"
        model = dataclasses.replace(model, path=None, preset=preset)
    else:
        source = "model.* of the config"
        vocab_size = len(setup.run_tokenizer(data, model))
    return setup.model_shape(model, vocab_size), source


def _evaluated(eval_config: EvalConfig, data: DataConfig, limit: int) -> tuple[EvaluationCall, ...]:
    """Returns the decoding calls of an evaluation, each with its numbers of traces and budgets.

    For each set, one call decodes all budgets, greedy and sampled. With `eval.cut_every`, a second
    call decodes the traces that are truncated at many positions. Held-out questions for selecting a
    checkpoint count as another set, which is evaluated completely with greedy decoding.

    Args:
      eval_config: section `eval` of the config.
      data: section `data` of the config.
      limit: maximum number of thinking tokens if the policy receives no budget.
    """
    sets = []
    for spec in data.eval:
        problems = _PROBLEMS_OF_OTHERS
        published = PUBLISHED_SETS.get(spec.partition(":")[0])
        if published is not None:
            problems = published.rows["test"]
        sets.append((spec, eval_config, problems))
    if selection_set(eval_config, data) == HOLDOUT:
        holdout_config = dataclasses.replace(eval_config, size=None, samples=0)
        sets.append((HOLDOUT, holdout_config, eval_config.holdout))
    calls = []
    for spec, set_config, problems in sets:
        problems = min(set_config.size or problems, problems)
        settings = eval_settings(set_config, spec)
        dense = [setting for setting, *_ in dense_settings(set_config, spec)]
        for settings_of_call in (settings, dense):
            call = []
            for setting in settings_of_call:
                rows = problems * setting.samples
                budget = limit if setting.budget == NO_BUDGET else setting.budget
                call.append((rows, budget))
            if call:
                calls.append(tuple(call))
    return tuple(calls)


def sizes_of(config: Config, num_devices: int) -> tuple[Workload, MeshShape]:
    """Computes the sizes and the mesh of a run on a number of devices, without using a device.

    Raises:
      UserError: if the model's shape is unknown, or if no valid mesh exists.
    """
    shape, source = planned_shape(config.data, config.model)
    settings = resolve(config)
    # The prompts are not known here, so the check is as lenient as possible.
    setup.check_positions(settings.limits, shape, longest_prompt=1, suffix_length=0)
    layout = setup.mesh_shape(settings.policy, shape, num_devices)
    method = load_method(settings.method)
    train = config.train
    compute_dtype = config.model.compute_dtype
    rows = config.rollout.questions * config.rollout.group_size
    cuts = method.num_cuts * method.answers
    update_rows = rows // train.minibatches
    bound_passes = 0.0
    if config.optimizer.max_update_kl is not None:
        # Some traces of each update are scored after it.
        bound_passes = min(MEASURED_TRACES / update_rows, 1.0)
    old_passes = num_scored(config.loss.old_logprobs, train.minibatches) / train.minibatches
    reference_passes = 1 if config.loss.kl_coef > 0 else 0
    if config.distill.coef > 0:
        # The teacher is assumed to be as large as the policy.
        reference_passes += 1

    def is_fused(attention: str) -> bool:
        """True if a setting of the attention kernel selects cuDNN on a GPU."""
        return setup.attention_for(compute_dtype, shape.head_dim, "gpu", attention) == "cudnn"

    def draw() -> Lengths:
        """Samples the expected lengths of all traces (see `Workload.lengths`)."""
        return rows_of(settings.method, prompt_lengths(settings.task, config.model), cuts=cuts)

    slots = setup.rollout_slots(config.rollout, layout.slot_shards)
    eval_slots = config.eval.slots or 0
    wanted_slots = config.rollout.slots or 0
    if not eval_slots and wanted_slots > slots:
        # Evaluations use all of these slots, because they may have more traces than a rollout.
        eval_slots = wanted_slots
    frozen_bytes = 0
    if config.adapter.rank:
        frozen_bytes = jnp.dtype(settings.policy.param_dtype).itemsize
    work = Workload(
        config=config,
        model=shape,
        shape_source=source,
        conditioned=method.conditioned,
        value_hidden=config.value.hidden_size if method.uses_value else 0,
        rows=rows,
        micro_rows=min(train.micro_batch_rows or update_rows, update_rows),
        rest_tokens=0,
        scored=old_passes + reference_passes + bound_passes,
        prompt=config.data.max_prompt_tokens,
        thinking=config.budget.max + config.budget.grace,
        draw=functools.cache(draw),
        cuts=cuts,
        slots=slots,
        own_keys=is_fused(config.rollout.attention),
        evaluated=_evaluated(config.eval, config.data, settings.limits.cap),
        eval_slots=eval_slots,
        float_bytes=jnp.dtype(compute_dtype).itemsize,
        remat=config.model.remat,
        fused_attention=is_fused(config.model.attention),
        adapters=adapters.num_parameters(shape, config.adapter),
        frozen_bytes=frozen_bytes,
        moment_bytes=jnp.dtype(config.optimizer.moment_dtype).itemsize,
        warmup_tokens=config.warmup.batch_tokens if config.warmup.steps else 0,
    )
    if train.micro_batch_tokens is not None:
        shapes = Shapes(train.micro_batch_tokens, multiple=layout.row_shards)
        micro_rows = shapes.rows(work.row_tokens, 0)
        rest_tokens = max(train.micro_batch_tokens - micro_rows * work.row_tokens, 0)
        work = dataclasses.replace(work, micro_rows=micro_rows, rest_tokens=rest_tokens)
    return work, layout
