"""Slots, caches and answers on the device: the phases that `rollouts` puts in order."""

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax import parallel
from bacr_jax.errors import UserError
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.parallel.processes import to_host
from bacr_jax.rollout import branches as branching
from bacr_jax.rollout import trunks as trunking
from bacr_jax.rollout.cudnn_decoding import check_kernel
from bacr_jax.rollout.rows import CompleteRows, Sampler
from bacr_jax.rollout.sampling import Draws
from bacr_jax.rollout.scheduler import prefill_batches, smallest_holding
from bacr_jax.types import Branches, Prompts, Trunks

# Prompts are prefilled at a multiple of this width.
_PROMPT_STEP = 128

_free_slots = jax.jit(
    trunking.free_slots, static_argnames=("spec", "slots", "prompt_width", "max_new", "length")
)
_prefill_prompts = jax.jit(trunking.prefill_prompts, static_argnames=("spec",))
_insert_rows = jax.jit(trunking.insert_rows, static_argnames=("mesh",), donate_argnums=(0,))
_take_slots = jax.jit(trunking.take_slots, static_argnames=("mesh",))
_trunks_of = jax.jit(trunking.trunks_of)
_open_branches = jax.jit(
    branching.open_branches, static_argnames=("spec", "answer_tokens", "share")
)
_branches_of = jax.jit(branching.branches_of)


@dataclass(frozen=True)
class OpenBranches:
    """Branches of some slots, and what they read.

    Attributes:
      places: place of each slot among the trunks.
      first_cut: number of the first cut, where the others are answered apart.
    """

    trunk_cache: tuple[LayerCache, ...]
    trunks: Trunks
    state: branching.BranchState
    places: Int[np.ndarray, "n"]
    first_cut: int = 0


def prompt_widths(prompt_width: int) -> list[int]:
    """Widths that prompts are prefilled at, ascending."""
    return [*range(_PROMPT_STEP, prompt_width, _PROMPT_STEP), prompt_width]


def distinct_prompts(
    prompts: Prompts, count: int
) -> tuple[Int[np.ndarray, " P"], Int[np.ndarray, "n"] | None]:
    """Rows that hold the different prompts, and the place of every row's prompt among them.

    Returns:
      Indices of rows, repeated up to `count`; places, or None where there are more prompts.
    """
    text = np.column_stack([prompts.lengths, prompts.tokens])
    _, first, places = np.unique(text, axis=0, return_index=True, return_inverse=True)
    if len(first) > count:
        return first, None
    return np.resize(first, count), places.reshape(-1).astype(np.int32)


class Engine:
    """Compiled pieces around the state of the slots; every method is one phase of a rollout.

    Attributes:
      lengths: lengths that the caches may have, ascending.
      sizes: numbers of rows that are prefilled or answered at once, ascending.
    """

    def __init__(self, params: DecodeParams, prompts: Prompts, key: jax.Array, sampler: Sampler):
        """Free slots; arguments as for `rollouts.generate`."""
        spec, draws = sampler.spec, Draws(key, sampler.rules, sampler.sampling)
        if sampler.phi_of is not None and (spec.conditioning is None or params.gates is None):
            raise UserError(
                "rollout: phi_of is given, and the decode copy has no gates or the spec no "
                "conditioning; take all three from one policy, or leave phi_of out"
            )
        if spec.mesh is not None:
            draws = parallel.place(draws, parallel.replicated(spec.mesh))
        self.spec = spec
        self.prompts = jax.tree.map(np.asarray, prompts)
        self.width = self.prompts.tokens.shape[1]
        self.lengths = spec.cache_lengths(self.width)
        self.sizes = spec.batch_sizes()
        check_kernel(spec, self.lengths[-1])
        self._params, self._phi_of, self._draws = params, sampler.phi_of, draws
        self._state = _free_slots(
            spec=spec.decode,
            slots=spec.slots,
            prompt_width=self.width,
            max_new=spec.max_sampled,
            length=self.lengths[0],
            phi=self._phi(np.zeros(spec.slots, np.int32)),
        )

    def _phi(self, budgets: Int[np.ndarray, "n"]) -> jax.Array | None:
        """Embeds each row's budget; zero, so that nothing is added, for a row without one."""
        if self._phi_of is None:
            return None
        phi = self._phi_of(np.maximum(budgets, 0))
        return phi if (budgets >= 0).all() else phi * (budgets >= 0)[:, None]

    @property
    def length(self) -> int:
        """Positions of the caches now."""
        return self._state.cache[0].length

    @property
    def answer_steps(self) -> tuple[int, int]:
        """Steps of a whole answer, and of one chunk."""
        total = self._draws.rules.suffix_length + self.spec.answer_tokens - 1
        return total, min(self.spec.chunk, total)

    def fit_caches(self, positions: int) -> None:
        """Makes the caches as long as the next chunk needs."""
        length = smallest_holding(self.lengths, min(positions, self.lengths[-1]))
        if length != self.length:
            self._state = trunking.resize_caches(self._state, length)

    def prefill(
        self,
        rows: CompleteRows,
        entering: Int[np.ndarray, "n"],
        slots: Int[np.ndarray, "n"],
        *,
        together: bool = False,
    ) -> None:
        """Prefills some rows into `slots`, and waits until they are there.

        Args:
          together: these are all rows; they share prompts if `spec.shares_prompts`.
        """
        widths = prompt_widths(self.width)
        wide = np.asarray(widths)[np.searchsorted(widths, self.prompts.lengths[entering])]
        for part in prefill_batches(wide, self.sizes):
            pad = smallest_holding(self.sizes, len(part)) - len(part)
            taken = np.concatenate([entering[part], np.repeat(entering[part][:1], pad)])
            nowhere = np.full(pad, self.spec.slots)
            where = np.concatenate([slots[part], nowhere]).astype(np.int32)
            self._prefill(rows.take(taken), taken, where, together)
        jax.block_until_ready(self._state.ended)

    def _prefill(
        self,
        rows: CompleteRows,
        taken: Int[np.ndarray, "n"],
        slots: Int[np.ndarray, "n"],
        together: bool,
    ) -> None:
        """See `prefill`: rows of a number that is compiled, their prompts and their slots."""
        prompts = jax.tree.map(lambda x: x[taken], self.prompts)
        width = smallest_holding(prompt_widths(self.width), int(prompts.lengths.max()))
        prompts = dataclasses.replace(prompts, tokens=prompts.tokens[:, :width])
        phi, sources = self._phi(rows.budgets), None
        distinct, distinct_phi = prompts, phi
        if together and self.spec.shares_prompts:
            first, sources = distinct_prompts(prompts, -(-len(slots) // self.spec.group_size))
        if sources is not None:
            distinct = jax.tree.map(lambda x: x[first], prompts)
            distinct_phi = self._phi(rows.budgets[first])
        spec = self.spec.decode
        prefilled = _prefill_prompts(self._params, distinct, phi=distinct_phi, spec=spec)
        prefilled = dataclasses.replace(prefilled, phi=phi)
        self._state = _insert_rows(
            self._state,
            prefilled,
            prompts,
            rows.limits,
            rows.row_ids,
            slots,
            sources,
            mesh=self.spec.mesh,
        )

    def decode(self) -> None:
        """One chunk of every slot."""
        self._state = trunking.decode_trunks(
            self._params, self._state, self._draws, spec=self.spec.decode, num_steps=self.spec.chunk
        )

    def status(
        self,
    ) -> tuple[Bool[np.ndarray, "slots"], Bool[np.ndarray, "slots"], Int[np.ndarray, "slots"]]:
        """Of each slot, on the host: has it ended, is it broken, how many tokens has it sampled."""
        state = self._state
        return to_host((state.ended, state.broken, state.sampled))

    def tokens(self) -> Int[np.ndarray, "slots S"]:
        """Prompt and sampled tokens of each slot, on the host."""
        return to_host(self._state.tokens)

    def trunks(self, slots: Int[np.ndarray, "n"]) -> Trunks:
        """Thinking of the rows in `slots`, on the host."""
        return jax.tree.map(lambda x: x[slots], to_host(_trunks_of(self._state)))

    def open_branches(
        self,
        slots: Int[np.ndarray, "n"],
        cuts: Int[np.ndarray, "n M"],
        wanted: Bool[np.ndarray, "n M"] | None = None,
        first_cut: int = 0,
    ) -> OpenBranches:
        """Suffixes at every cut of the rows in `slots`, or at those wanted.

        Args:
          wanted: cuts with an answer of their own; None: all.
        """
        spec, state = self.spec, self._state
        # All cuts' first answers, then their second: the first one's random numbers do not depend
        # on how many there are.
        cuts = np.tile(cuts, spec.answers)
        size = smallest_holding(self.sizes, len(slots))
        real = np.zeros((size, cuts.shape[1]), bool)
        spread = np.zeros((size, cuts.shape[1]), np.int32)
        if size == spec.slots:
            # All slots in their order: their caches are read where they are.
            places, cache, phi = slots, state.cache, state.phi
            trunks, ids = _trunks_of(state), state.ids
        else:
            places = np.arange(len(slots))
            index = np.zeros(size, np.int32)
            index[places] = slots
            cache, trunks, phi = _take_slots(state, index, mesh=spec.mesh)
            ids = jax.tree.map(lambda x: x[index], state.ids)
        real[places], spread[places] = True if wanted is None else wanted, cuts
        opened = _open_branches(
            trunks,
            spread,
            ids,
            self._draws.rules,
            spec=spec.decode,
            answer_tokens=spec.answer_tokens,
            share=spec.answers == 1,
            phi=phi,
            wanted=real,
        )
        return OpenBranches(cache, trunks, opened, places, first_cut)

    def decode_branches(self, opened: OpenBranches, start: int) -> OpenBranches:
        """One chunk of every branch, from step `start`; the branches given are used up."""
        state = branching.decode_branches(
            self._params,
            opened.trunk_cache,
            opened.state,
            np.int32(start),
            self._draws,
            np.int32(opened.first_cut),
            spec=self.spec.decode,
            num_steps=self.answer_steps[1],
        )
        return dataclasses.replace(opened, state=state)

    def first_answers(self, opened: OpenBranches) -> list[Int[np.ndarray, "n"]]:
        """Forced and sampled tokens so far at each slot's first cut, on the host."""
        state = opened.state
        tokens, forced, sampled = to_host((state.tokens, state.forced, state.sampled))
        return [tokens[i, 0, : forced[i, 0] + sampled[i, 0]] for i in opened.places]

    def answers(self, opened: OpenBranches) -> Branches:
        """Answers of the slots' branches, on the host; those at one cut stand side by side."""
        branches: Branches = jax.tree.map(
            lambda x: x[opened.places], to_host(_branches_of(opened.state))
        )
        answers = self.spec.answers
        if answers == 1:
            return branches
        rows, count = branches.source.shape

        def by_cut(x: np.ndarray) -> np.ndarray:
            split = x.reshape(rows, answers, count // answers, *x.shape[2:])
            return split.swapaxes(1, 2).reshape(x.shape)

        return dataclasses.replace(jax.tree.map(by_cut, branches), source=branches.source)
