"""Slots, caches and answers on the device: the phases that `generate` puts in order."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax import parallel
from bacr_jax.config import ConditioningConfig
from bacr_jax.data.decode_rules import DecodeRules
from bacr_jax.errors import UserError
from bacr_jax.model import attention
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel.processes import to_host
from bacr_jax.rollout import branches as branching
from bacr_jax.rollout import decode
from bacr_jax.rollout.sampling import SamplingParams
from bacr_jax.rollout.scheduler import sizes, smallest_holding
from bacr_jax.types import NO_BUDGET, Branches, Prompts, Trunks

PhiOf = Callable[[jax.Array], jax.Array]

# Prompts are prefilled at a multiple of this width.
_PROMPT_STEP = 128

_prefill = jax.jit(
    decode.prefill, static_argnames=("config", "conditioning", "implementation", "mesh")
)
_insert = jax.jit(decode.insert, static_argnames=("mesh",), donate_argnums=(0,))
_take = jax.jit(decode.take, static_argnames=("mesh",))
_empty = jax.jit(
    decode.empty,
    static_argnames=("config", "slots", "prompt_width", "max_new", "length", "dtype", "mesh"),
)
_open_branches = jax.jit(
    branching.open_branches, static_argnames=("config", "answer_tokens", "dtype", "share")
)
_branches_of = jax.jit(branching.branches_of)
_trunks_of = jax.jit(decode.trunks_of)


@dataclass(frozen=True)
class RolloutSpec:
    """Everything about a rollout that fixes a compiled shape.

    Attributes:
      config: model shape.
      conditioning: how phi joins the stream; None for the plain model.
      max_thinking: largest budget, width of the thinking buffers.
      answer_tokens: most sampled tokens per answer.
      answers: independent answers at each cut. With one, cuts at the same place share it; several
        are drawn for every cut, as AnytimeReasoner does.
      slots: rows decoded together.
      chunk: tokens per call of the inner loop.
      windows: lengths that caches may have; more of them read less and compile longer.
      refill: share of the slots that must have ended before they are answered and refilled; a small
        share keeps slots busy, a large one answers more rows at once.
      dtype: compute type.
      implementation: attention of the prefill.
      mesh: devices over which slots are spread; None for one device.
    """

    config: Qwen2Config
    conditioning: ConditioningConfig | None
    max_thinking: int
    answer_tokens: int
    slots: int
    chunk: int = 16
    windows: int = 4
    refill: float = 0.25
    dtype: Any = jnp.float32
    implementation: attention.Implementation = "xla"
    answers: int = 1
    mesh: parallel.AnyMesh | None = None


def cache_lengths(spec: RolloutSpec, prompt_width: int) -> list[int]:
    """Lengths that caches may have, ascending; the last one holds every row."""
    total = prompt_width + spec.max_thinking
    return sorted({-(-total * part // spec.windows) for part in range(1, spec.windows + 1)})


def prompt_widths(prompt_width: int) -> list[int]:
    """Widths that prompts are prefilled at, ascending."""
    return [*range(_PROMPT_STEP, prompt_width, _PROMPT_STEP), prompt_width]


def batch_sizes(spec: RolloutSpec) -> list[int]:
    """Numbers of rows that are admitted or answered at once."""
    shards = 1 if spec.mesh is None else parallel.row_shards(spec.mesh)
    if spec.slots % shards:
        nearest = max(round(spec.slots / shards), 1) * shards
        raise UserError(
            f"rollout.slots={spec.slots}: can't be split evenly over {shards} devices; write "
            f"rollout.slots={nearest}"
        )
    return sizes(spec.slots, spec.refill, shards)


class Engine:
    """Compiled pieces around one state; every method is one phase of `generate`."""

    def __init__(
        self,
        params: DecodeParams,
        prompts: Prompts,
        key: jax.Array,
        *,
        spec: RolloutSpec,
        rules: DecodeRules,
        sampling: SamplingParams,
        phi_of: PhiOf | None,
        truncated: bool,
    ):
        mesh = spec.mesh
        if mesh is not None:
            everywhere = parallel.replicated(mesh)
            key, rules, sampling = parallel.place((key, rules, sampling), everywhere)
        self.params, self.prompts, self.key = params, jax.tree.map(np.asarray, prompts), key
        self.spec, self.rules, self.sampling, self.phi_of = spec, rules, sampling, phi_of
        self.width = self.prompts.tokens.shape[1]
        self.lengths = cache_lengths(spec, self.width)
        self.sizes = batch_sizes(spec)
        self.model = {"config": spec.config, "conditioning": spec.conditioning, "mesh": mesh}
        self.statics = {**self.model, "truncated": truncated}
        self.state = _empty(
            config=spec.config,
            slots=spec.slots,
            prompt_width=self.width,
            max_new=spec.max_thinking,
            length=self.lengths[0],
            dtype=spec.dtype,
            phi=self.phi(np.zeros(spec.slots, np.int32)),
            mesh=mesh,
        )

    def phi(self, budgets: np.ndarray) -> jax.Array | None:
        """Embeds each row's budget; zero, so that nothing is added, for a row without one."""
        if self.phi_of is None:
            return None
        phi = self.phi_of(np.maximum(budgets, 0))
        return phi if (budgets >= 0).all() else phi * (budgets >= 0)[:, None]

    @property
    def length(self) -> int:
        """Positions of the caches now."""
        return self.state.cache[0].k.shape[2]

    def fit(self, positions: int) -> None:
        """Makes the caches as long as the next chunk needs."""
        length = smallest_holding(self.lengths, min(positions, self.lengths[-1]))
        if length != self.length:
            self.state = decode.resize(self.state, length)

    def enter(self, rows: np.ndarray, slots: np.ndarray, ids: np.ndarray, told: np.ndarray) -> None:
        """Prefills `rows` of the prompts into `slots`."""
        spec = self.spec
        pad = smallest_holding(self.sizes, len(rows)) - len(rows)
        taken = np.concatenate([rows, np.repeat(rows[:1], pad)])
        prompts = jax.tree.map(lambda x: x[taken], self.prompts)
        width = smallest_holding(prompt_widths(self.width), int(prompts.lengths.max()))
        prompts = dataclasses.replace(prompts, tokens=prompts.tokens[:, :width])
        budgets = told[taken]
        limits = np.where(budgets == NO_BUDGET, spec.max_thinking, budgets).astype(np.int32)
        arrivals = _prefill(
            self.params,
            prompts,
            phi=self.phi(budgets),
            implementation=spec.implementation,
            **self.model,
        )
        nowhere = np.full(pad, spec.slots)
        where = np.concatenate([slots, nowhere]).astype(np.int32)
        self.state = _insert(
            self.state, arrivals, prompts, limits, ids[taken], where, mesh=spec.mesh
        )

    def step(self) -> None:
        """One chunk of every slot."""
        self.state = decode.decode_chunk(
            self.params,
            self.state,
            self.key,
            self.rules,
            self.sampling,
            num_steps=self.spec.chunk,
            **self.statics,
        )

    def open(
        self, slots: np.ndarray, cuts: np.ndarray
    ) -> tuple[Any, Trunks, branching.BranchState, np.ndarray]:
        """Bridges at every cut of the rows in `slots`.

        Returns:
          The trunks' caches, the trunks, the branches, and the place of each slot among them.
        """
        spec = self.spec
        # All cuts' first answers, then their second: the first one's random numbers do not depend
        # on how many there are.
        cuts = np.tile(cuts, spec.answers)
        size = smallest_holding(self.sizes, len(slots))
        real = np.zeros(size, bool)
        spread = np.zeros((size, cuts.shape[1]), np.int32)
        if size == spec.slots:
            # All slots in their order: their caches are read where they are.
            places, cache, phi = slots, self.state.cache, self.state.phi
            trunks, rows = _trunks_of(self.state), self.state.rows
        else:
            places = np.arange(len(slots))
            index = np.zeros(size, np.int32)
            index[places] = slots
            cache, trunks, phi = _take(self.state, index, mesh=spec.mesh)
            rows = self.state.rows[index]
        real[places], spread[places] = True, cuts
        opened = _open_branches(
            trunks,
            spread,
            rows,
            self.rules,
            config=spec.config,
            answer_tokens=spec.answer_tokens,
            dtype=spec.dtype,
            share=spec.answers == 1,
            phi=phi,
            real=real,
        )
        return cache, trunks, opened, places

    def answer_chunk(
        self, cache: Any, opened: branching.BranchState, start: int, steps: int
    ) -> branching.BranchState:
        """Steps `start` .. `start + steps - 1` of every branch."""
        branches: branching.BranchState = branching.branch_chunk(
            self.params,
            cache,
            opened,
            np.int32(start),
            self.key,
            self.rules,
            self.sampling,
            num_steps=steps,
            **self.statics,
        )
        return branches

    @property
    def answer_steps(self) -> tuple[int, int]:
        """Steps of a whole answer, and of one chunk."""
        total = self.rules.suffix_length + self.spec.answer_tokens - 1
        return total, min(self.spec.chunk, total)

    def trunks(self, slots: np.ndarray) -> Trunks:
        """Thinking of the rows in `slots`, on the host."""
        found: Trunks = jax.tree.map(lambda x: x[slots], to_host(_trunks_of(self.state)))
        return found


def answers_of(opened: branching.BranchState, places: np.ndarray, answers: int) -> Branches:
    """Answers of the branches at `places`, on the host; those at one cut stand side by side."""
    found: Branches = jax.tree.map(lambda x: x[places], to_host(_branches_of(opened)))
    if answers == 1:
        return found
    rows, branches = found.source.shape

    def by_cut(x: np.ndarray) -> np.ndarray:
        split = x.reshape(rows, answers, branches // answers, *x.shape[2:])
        return split.swapaxes(1, 2).reshape(x.shape)

    return dataclasses.replace(jax.tree.map(by_cut, found), source=found.source)
