"""What a run asks of the devices, read from its config: shapes, rows, widths; no weights.

Memory goes with the largest sizes that the config allows (prompts, budgets), so that a plan errs on
the safe side; seconds go with the lengths to be expected (`lengths`).
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
# Problems of the public test sets; others are not read, and taken to have 500.
_PROBLEMS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "minerva_math": 272}


@dataclass(frozen=True)
class Workload:
    """Sizes of one iteration: its config, and what follows from it.

    Attributes:
      value_hidden: width of the value head; 0 without one.
      rows: traces per iteration, Q G.
      micro_rows: traces per gradient accumulation step, of all devices.
      scored: passes over all rows that only score them (old and reference log-probabilities, and
        those before and after an update that has a bound).
      prompt: prompt tokens, padded.
      thinking: thinking tokens, padded: the largest budget.
      draw: gives the tokens of the rows to be expected (`lengths`); reads the data if it is there.
      cuts: branches per trace: M, or M times the answers that a method samples at each cut.
      own_keys: decoding attention reads each row's own keys (cuDNN), not the caches' whole length.
      evaluated: calls of an evaluation, each by its parts: rows and their largest budget.
      eval_slots: rows decoded together in an evaluation; 0: as many as in training.
      fused_attention: the trunk's attention never stores its scores (cuDNN).
      adapters: numbers in low-rank adapters; 0: all weights are trained.
      warmup_tokens: of a step of the supervised warm-up, padding included; 0 without a warm-up.
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
    evaluated: tuple[tuple[tuple[int, int], ...], ...]
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
        """Tokens of a branch: suffix and answer."""
        return SUFFIX_TOKENS + self.config.rollout.answer_tokens

    @property
    def trunk(self) -> int:
        """Tokens of a trunk: prompt and thinking."""
        return self.prompt + self.thinking

    @property
    def row_tokens(self) -> int:
        """Tokens of a row in the learner: a trunk and all its branches."""
        return self.trunk + self.cuts * self.branch

    @property
    def by_tokens(self) -> bool:
        """Whether micro-batches hold nearly equal numbers of tokens."""
        return self.config.train.micro_batch_tokens is not None

    def micro_batch(self, rows: int) -> dict[str, int]:
        """The config key of a micro-batch of so many rows."""
        if self.by_tokens:
            return {"train.micro_batch_tokens": rows * self.row_tokens}
        return {"train.micro_batch_rows": rows}

    @property
    def lengths(self) -> Lengths:
        """Tokens of the rows to be expected."""
        return self.draw()

    @property
    def update_rows(self) -> int:
        """Rows of one update."""
        return self.rows // self.config.train.minibatches

    @property
    def warmup(self) -> "Workload | None":
        """Sizes of a step of the supervised warm-up; None without one.

        It trains all weights of the plain model in fp32, whatever the run trains afterwards. A
        batch is one micro-batch, of rows as long as the longest example.
        """
        if not self.warmup_tokens:
            return None
        of_ledger = self.config.data.train == "ledger"
        longest = _LEDGER_EXAMPLE if of_ledger else self.trunk + self.branch
        width = min(longest, self.warmup_tokens)
        rows = self.warmup_tokens // width
        train = dataclasses.replace(
            self.config.train, micro_batch_tokens=None, padding_free=False, minibatches=1
        )
        loss = dataclasses.replace(self.config.loss, kl_coef=0.0)
        optimizer = dataclasses.replace(self.config.optimizer, max_update_kl=None)
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, train=train, loss=loss, optimizer=optimizer),
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
        """Returns the run with micro-batches of so many tokens, without padding if asked."""
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
        """What decoding is while the policy is evaluated: the largest call, of its own sizes.

        Answers of a trace are decoded together: one, or those of a dense trace.
        """
        budget, dense = self.config.budget, self.config.eval.dense
        longest = derived.largest_evaluated(self.config)
        return dataclasses.replace(
            self,
            rows=max((sum(rows for rows, _ in call) for call in self.evaluated), default=0),
            thinking=max(budget.max, longest) + budget.grace,
            cuts=1 if dense is None else min(CUTS_AT_ONCE, -(-longest // dense)),
            slots=self.eval_slots or self.slots,
        )


def _preset_of(path: str) -> str:
    """The model in `PRESETS` that a folder is named after: Qwen2.5-7B-Instruct is qwen2.5-7b."""
    name = Path(path).name.lower()
    for preset in PRESETS:
        if name == preset or name.startswith(f"{preset}-"):
            return preset
    raise UserError(
        f"model.path: no {path}/config.json here, and the name is not that of a "
        f"released model; write its shape as model.preset (one of {', '.join(PRESETS)})"
        + (", or add --download to get its config.json" if is_hub_name(path) else "")
    )


def planned_shape(config: Config) -> tuple[Qwen2Config, str]:
    """The shape of the policy and where it was read; weights are never needed.

    A folder that is here gives its own shape. Else `model.preset` does, and last the name of the
    folder, if it is that of a released model. UserError: no way to know the shape.
    """
    model, vocab_size = config.model, 0
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
        source, vocab_size = "model.* of the config", len(setup.run_tokenizer(config))
    return setup.model_shape(dataclasses.replace(config, model=model), vocab_size), source


def _evaluated(config: Config) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Calls of an evaluation: each set at all budgets, greedily and sampled; its dense traces.

    Held-out questions that select are a set too, all asked, and greedily.
    """
    asked, calls = config.eval, []
    limit = lambda budget: derived.cap(config) if budget == NO_BUDGET else budget
    there = [(spec, asked, _PROBLEMS.get(spec.partition(":")[0], 500)) for spec in config.data.eval]
    if derived.selection_set(config) == derived.HOLDOUT:
        own = dataclasses.replace(asked, size=None, samples=0)
        there.append((derived.HOLDOUT, own, asked.holdout))
    for spec, how, problems in there:
        problems = min(how.size or problems, problems)
        for call in ([[one] for one in eval_settings(how, spec)], dense_settings(how, spec)):
            calls.append(tuple((problems * one.samples, limit(one.budget)) for one, *_ in call))
    return tuple(filter(None, calls))


def sizes_of(config: Config, num_devices: int) -> tuple[Workload, MeshShape]:
    """Sizes and mesh of a run on so many devices, without touching one."""
    shape, source = planned_shape(config)
    setup.check_positions(config, shape, longest_prompt=1)
    layout = setup.mesh_shape(config, shape, num_devices)
    model, rollout, train, adapter = config.model, config.rollout, config.train, config.adapter
    method = load_method(config)
    rows, cuts = rollout.questions * rollout.group_size, method.num_cuts * method.answers
    update = rows // train.minibatches
    scored = num_scored(config.loss.old_logprobs, train.minibatches)
    fused = lambda wanted: setup.attention_for(config, shape.head_dim, "gpu", wanted) == "cudnn"
    work = Workload(
        config=config,
        model=shape,
        shape_source=source,
        conditioned=method.conditioned,
        value_hidden=config.value.hidden_size if method.uses_value else 0,
        rows=rows,
        micro_rows=min(train.micro_batch_rows or update, update),
        scored=scored / train.minibatches
        + (config.loss.kl_coef > 0)
        # Before and after each update.
        + 2 * (config.optimizer.max_update_kl is not None),
        prompt=config.data.max_prompt_tokens,
        thinking=config.budget.max + config.budget.grace,
        draw=functools.cache(lambda: rows_of(config, prompt_lengths(config), cuts=cuts)),
        cuts=cuts,
        slots=min(rollout.slots or rows, rows),
        own_keys=fused(rollout.attention),
        evaluated=_evaluated(config),
        eval_slots=config.eval.slots or 0,
        float_bytes=jnp.dtype(model.compute_dtype).itemsize,
        remat=model.remat,
        fused_attention=fused(model.attention),
        adapters=adapters.num_parameters(shape, adapter),
        frozen_bytes=jnp.dtype(param_dtype(config)).itemsize if adapter.rank else 0,
        moment_bytes=jnp.dtype(config.optimizer.moment_dtype).itemsize,
        warmup_tokens=config.warmup.batch_tokens if config.warmup.steps else 0,
    )
    if train.micro_batch_tokens is not None:
        shapes = Shapes(train.micro_batch_tokens, multiple=layout.row_shards)
        work = dataclasses.replace(work, micro_rows=shapes.rows(work.row_tokens, 0))
    return work, layout
