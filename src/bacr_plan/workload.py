"""Computes the sizes of a run from its config: shapes, rows and widths, without weights.

Memory is planned with the largest sizes that the config allows (prompts, budgets), so that a plan
errs on the safe side. Seconds are planned with the lengths to be expected (`lengths`).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from bacr_jax.config import Config, derived
from bacr_jax.config.derived import param_dtype
from bacr_jax.errors import UserError
from bacr_jax.evaluation.samples import dense_settings, eval_settings
from bacr_jax.learner.micro_batches import Shapes
from bacr_jax.learner.updates import num_scored
from bacr_jax.methods import load_method
from bacr_jax.model import adapters
from bacr_jax.model.compute import Remat
from bacr_jax.model.hf.hub import is_hub_name
from bacr_jax.model.sizes import PRESETS, Qwen2Config
from bacr_jax.parallel import MeshShape
from bacr_jax.rollout.branches import CUTS_AT_ONCE
from bacr_jax.runs import setup
from bacr_jax.types import NO_BUDGET
from bacr_plan.lengths import SUFFIX_TOKENS, Lengths, prompt_lengths, rows_of

# Tokens to which the longest supervised examples of the ledger are padded.
_LEDGER_EXAMPLE = 80
_FP32 = 4
# Problems of the public test sets. Other sets are not read, and are assumed to have 500.
_PROBLEMS = {
    "gsm8k": 1319,
    "math500": 500,
    "aime24": 30,
    "minerva_math": 272,
}
_PROBLEMS_OF_OTHERS = 500

# A call of an evaluation: for each part its rows and their largest budget in tokens.
EvaluationCall = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Workload:
    """The sizes of one iteration.

    Attributes:
      shape_source: where the model's shape was read, for the plan's text.
      value_hidden: width of the value head; 0 without a value head.
      rows: traces per iteration, Q G.
      micro_rows: traces per gradient accumulation step, on all devices.
      scored: passes over all rows that only score them (old and reference log-probabilities,
        and those before and after an update that optimizer.max_update_kl bounds).
      prompt: prompt tokens, padded.
      thinking: thinking tokens, padded: the largest budget.
      draw: returns the tokens of the expected rows (`lengths`); reads the data if it exists.
      cuts: branches per trace: M, or M times the answers that a method samples at each cut.
      slots: rows decoded together.
      own_keys: True if attention in decoding reads each row's keys only (cuDNN), not the whole
        length of the caches.
      evaluated: the calls of an evaluation.
      eval_slots: rows decoded together in an evaluation; 0: as many as in training.
      float_bytes: bytes of a number of the compute type.
      fused_attention: True if the trunk's attention does not store its scores (cuDNN).
      adapters: parameters of low-rank adapters; 0: all weights are trained.
      frozen_bytes: bytes of a number of the frozen base; 0 without adapters.
      moment_bytes: bytes of a number of Adam's moments.
      warmup_tokens: tokens of a step of the supervised warm-up, padding included; 0 without one.
    """

    config: Config
    model: Qwen2Config
    shape_source: str
    conditioned: bool
    value_hidden: int
    rows: int
    micro_rows: int
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
    warmup_tokens: int = 0

    @property
    def branch(self) -> int:
        """Returns the tokens of a branch: suffix and answer."""
        return SUFFIX_TOKENS + self.config.rollout.answer_tokens

    @property
    def trunk(self) -> int:
        """Returns the tokens of a trunk: prompt and thinking."""
        return self.prompt + self.thinking

    @property
    def row_tokens(self) -> int:
        """Returns the tokens of a row in the learner: a trunk and all its branches."""
        return self.trunk + self.cuts * self.branch

    @property
    def by_tokens(self) -> bool:
        """True if micro-batches have nearly equal numbers of tokens."""
        return self.config.train.micro_batch_tokens is not None

    def micro_batch(self, rows: int) -> dict[str, int]:
        """Returns the config key and value of a micro-batch with so many rows."""
        if self.by_tokens:
            return {"train.micro_batch_tokens": rows * self.row_tokens}
        return {"train.micro_batch_rows": rows}

    @property
    def lengths(self) -> Lengths:
        """Returns the tokens of the expected rows."""
        return self.draw()

    @property
    def update_rows(self) -> int:
        """Returns the rows of one update."""
        return self.rows // self.config.train.minibatches

    @property
    def warmup(self) -> "Workload | None":
        """Returns the sizes of a step of the supervised warm-up; None without a warm-up.

        The warm-up trains all weights of the plain model in fp32, also for a run that trains
        adapters. A batch is one micro-batch, with rows as long as the longest example.
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
            scored=0.0,
            prompt=0,
            thinking=width,
            cuts=0,
            adapters=0,
            frozen_bytes=0,
            moment_bytes=_FP32,
        )

    def by_real_tokens(self, tokens: int, *, padding_free: bool) -> "Workload":
        """Returns the run with micro-batches of so many tokens, optionally without padding."""
        train = dataclasses.replace(
            self.config.train,
            micro_batch_rows=None,
            micro_batch_tokens=tokens,
            padding_free=padding_free,
        )
        config = dataclasses.replace(self.config, train=train)
        return dataclasses.replace(self, config=config, micro_rows=tokens // self.row_tokens)

    @property
    def evaluation(self) -> "Workload":
        """Returns the sizes of the largest call of an evaluation.

        The answers of a trace are decoded together: one, or several with `eval.dense`.
        """
        budget = self.config.budget
        spacing = self.config.eval.dense
        longest = derived.largest_evaluated(self.config)
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
    """Returns the preset of a folder's name, such as qwen2.5-7b of Qwen2.5-7B-Instruct.

    Raises:
      UserError: if no released model in `PRESETS` has the name.
    """
    name = Path(path).name.lower()
    for preset in PRESETS:
        if name == preset or name.startswith(f"{preset}-"):
            return preset
    advice = f"write its shape as model.preset (one of {', '.join(PRESETS)})"
    if is_hub_name(path):
        advice += ", or add --download to get its config.json"
    raise UserError(
        f"model.path: no {path}/config.json here, and the name is not that of a "
        f"released model; {advice}"
    )


def planned_shape(config: Config) -> tuple[Qwen2Config, str]:
    """Returns the shape of the policy, and where it was read; weights are not needed.

    The shape comes from the model's folder if it exists, else from `model.preset`, else from the
    name of the folder, if a released model has it.

    Raises:
      UserError: if the shape is unknown.
    """
    model = config.model
    vocab_size = 0
    if model.path is not None and (Path(model.path) / "config.json").is_file():
        source = f"{model.path}/config.json"
    elif model.preset != "custom":
        source = f"model.preset={model.preset}"
        model = dataclasses.replace(model, path=None)
    elif model.path is not None:
        preset = _preset_of(model.path)
        source = f"{preset}, after the name of {model.path}, which is not here"
        model = dataclasses.replace(model, path=None, preset=preset)
    else:
        source = "model.* of the config"
        vocab_size = len(setup.run_tokenizer(config))
    config = dataclasses.replace(config, model=model)
    return setup.model_shape(config, vocab_size), source


def _evaluated(config: Config) -> tuple[EvaluationCall, ...]:
    """Returns the calls of an evaluation.

    Each set has a call with all budgets, greedily and sampled, and a call with its dense traces.
    Held-out questions that select a checkpoint are evaluated as a set, all of them, greedily.
    """
    eval_config = config.eval
    sets = []
    for spec in config.data.eval:
        name = spec.partition(":")[0]
        problems = _PROBLEMS.get(name, _PROBLEMS_OF_OTHERS)
        sets.append((spec, eval_config, problems))
    if derived.selection_set(config) == derived.HOLDOUT:
        holdout_config = dataclasses.replace(eval_config, size=None, samples=0)
        sets.append((derived.HOLDOUT, holdout_config, eval_config.holdout))
    calls = []
    for spec, set_config, problems in sets:
        problems = min(set_config.size or problems, problems)
        settings = eval_settings(set_config, spec)
        dense = [setting for setting, *_ in dense_settings(set_config, spec)]
        for settings_of_call in (settings, dense):
            call = []
            for setting in settings_of_call:
                rows = problems * setting.samples
                call.append((rows, _budget_limit(config, setting.budget)))
            if call:
                calls.append(tuple(call))
    return tuple(calls)


def _budget_limit(config: Config, budget: int) -> int:
    """Returns a budget in tokens; without a budget it is the longest thinking allowed."""
    return derived.cap(config) if budget == NO_BUDGET else budget


def sizes_of(config: Config, num_devices: int) -> tuple[Workload, MeshShape]:
    """Returns the sizes and the mesh of a run on a number of devices, without using a device.

    Raises:
      UserError: if the model's shape is unknown, or no mesh is possible.
    """
    shape, source = planned_shape(config)
    setup.check_positions(config, shape, longest_prompt=1)
    layout = setup.mesh_shape(config, shape, num_devices)
    method = load_method(config)
    train = config.train
    rows = config.rollout.questions * config.rollout.group_size
    cuts = method.num_cuts * method.answers
    update_rows = rows // train.minibatches
    # Before and after each update.
    bound_passes = 2 if config.optimizer.max_update_kl is not None else 0
    old_passes = num_scored(config.loss.old_logprobs, train.minibatches) / train.minibatches
    reference_passes = 1 if config.loss.kl_coef > 0 else 0

    def is_fused(attention: str) -> bool:
        """True if an attention setting means cuDNN on a GPU."""
        return setup.attention_for(config, shape.head_dim, "gpu", attention) == "cudnn"

    def draw() -> Lengths:
        """Draws the expected rows; see `lengths`."""
        return rows_of(config, prompt_lengths(config), cuts=cuts)

    work = Workload(
        config=config,
        model=shape,
        shape_source=source,
        conditioned=method.conditioned,
        value_hidden=config.value.hidden_size if method.uses_value else 0,
        rows=rows,
        micro_rows=min(train.micro_batch_rows or update_rows, update_rows),
        scored=old_passes + reference_passes + bound_passes,
        prompt=config.data.max_prompt_tokens,
        thinking=config.budget.max + config.budget.grace,
        draw=functools.cache(draw),
        cuts=cuts,
        slots=min(config.rollout.slots or rows, rows),
        own_keys=is_fused(config.rollout.attention),
        evaluated=_evaluated(config),
        eval_slots=config.eval.slots or 0,
        float_bytes=jnp.dtype(config.model.compute_dtype).itemsize,
        remat=config.model.remat,
        fused_attention=is_fused(config.model.attention),
        adapters=adapters.num_parameters(shape, config.adapter),
        frozen_bytes=jnp.dtype(param_dtype(config)).itemsize if config.adapter.rank else 0,
        moment_bytes=jnp.dtype(config.optimizer.moment_dtype).itemsize,
        warmup_tokens=config.warmup.batch_tokens if config.warmup.steps else 0,
    )
    if train.micro_batch_tokens is not None:
        shapes = Shapes(train.micro_batch_tokens, multiple=layout.row_shards)
        micro_rows = shapes.rows(work.row_tokens, 0)
        work = dataclasses.replace(work, micro_rows=micro_rows)
    return work, layout
