"""Runs the phases of a rollout on the device: prefill, decoding of thinking and of answers.

A slot decodes one trace (row) at a time. A trunk is a prompt with its thinking, and a branch is an
answer that continues the thinking from a truncation point (cut). `rollouts` calls the phases in
order and assigns rows to slots.
"""

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
from bacr_jax.rollout.rows import ResolvedRequest, SamplingSetup
from bacr_jax.rollout.sampling import SamplingInputs, SamplingParams
from bacr_jax.rollout.scheduler import prefill_batches, smallest_at_least
from bacr_jax.types import Branches, Prompts, Trunks

# Prompts are padded to a multiple of this number of tokens, to limit the number of compiled widths.
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
    """Answers (branches) that are being decoded, with the thinking that they attend to.

    Attributes:
      trunk_cache: cached keys and values of prompts and thinking, per layer.
      trunks: the prompts with their thinking.
      state: decoding state of the answers.
      places: index in `trunks` and `state` of the trace in each requested slot.
      first_cut: index of the first truncation point in `state` among all truncation points of a
        trace. Greater than 0 for later chunks, if truncation points are answered in chunks.
    """

    trunk_cache: tuple[LayerCache, ...]
    trunks: Trunks
    state: branching.BranchState
    places: Int[np.ndarray, "n"]
    first_cut: int = 0


def prompt_widths(prompt_width: int) -> list[int]:
    """Returns the possible widths of padded prompts in the prefill, in ascending order.

    Args:
      prompt_width: largest width, in tokens.
    """
    return [*range(_PROMPT_STEP, prompt_width, _PROMPT_STEP), prompt_width]


def distinct_prompts(
    prompts: Prompts, count: int
) -> tuple[Int[np.ndarray, " P"], Int[np.ndarray, "n"] | None]:
    """Finds the distinct prompts of a batch.

    Args:
      count: maximum number of distinct prompts.

    Returns:
      (first, source). `first` contains the index of one row for each distinct prompt, repeated to a
      length of `count`. `source` contains the position of each row's prompt in `first`, or is None
      if there are more than `count` distinct prompts.
    """
    text = np.column_stack([prompts.lengths, prompts.tokens])
    _, first, source = np.unique(text, axis=0, return_index=True, return_inverse=True)
    if len(first) > count:
        return first, None
    return np.resize(first, count), source.reshape(-1).astype(np.int32)


class SlotDecoder:
    """A decoder with a fixed number of slots, each of which decodes one trace (row) at a time.

    It stores the state of all slots on the device, and its methods run compiled functions on it.

    Attributes:
      spec: static settings of the rollout.
      prompts: prompts of all rows, on the host.
      width: number of tokens per padded prompt.
      lengths: possible lengths of the caches in tokens, in ascending order.
      sizes: possible numbers of rows that are prefilled or answered together, in ascending order.
    """

    def __init__(
        self, params: DecodeParams, prompts: Prompts, key: jax.Array, setup: SamplingSetup
    ):
        """Creates a decoder in which all slots (places for one trace each) are free.

        The arguments are as for `rollouts.generate`.

        Raises:
          UserError: `setup.phi_of` is set but the model has no budget conditioning or no gates
            for the budget embedding, or cuDNN has no kernel for these shapes.
        """
        spec = setup.spec
        if setup.phi_of is not None and (spec.conditioning is None or params.gates is None):
            raise UserError(
                "rollout: `phi_of`, which computes budget embeddings, is set, but the decode "
                "parameters contain no gates for them, or `spec.conditioning` is None; use all "
                "three from the same policy, or set phi_of=None"
            )
        self.spec = spec
        self.prompts = jax.tree.map(np.asarray, prompts)
        self.width = self.prompts.tokens.shape[1]
        self.lengths = spec.cache_lengths(self.width)
        self.sizes = spec.batch_sizes()
        check_kernel(spec, self.lengths[-1])
        self._params = params
        self._phi_of = setup.phi_of
        self._rules = setup.rules
        self.set_sampling(key, setup.sampling)
        self._state = _free_slots(
            spec=spec.decode,
            slots=spec.slots,
            prompt_width=self.width,
            max_new=spec.max_sampled,
            length=self.lengths[0],
            phi=self._phi(np.zeros(spec.slots, np.int32)),
        )

    def set_sampling(self, key: jax.Array, sampling: SamplingParams) -> None:
        """Replaces the PRNG keys and the sampling parameters for all later tokens."""
        draws = SamplingInputs(key, self._rules, sampling)
        if self.spec.mesh is not None:
            draws = parallel.place(draws, parallel.replicated(self.spec.mesh))
        self._draws = draws

    def _phi(self, budgets: Int[np.ndarray, "n"]) -> jax.Array | None:
        """Returns the budget embedding of each trace, zero for traces without a budget.

        The result is None if the policy has no budget embedding.
        """
        if self._phi_of is None:
            return None
        phi = self._phi_of(np.maximum(budgets, 0))
        has_budget = budgets >= 0
        if has_budget.all():
            return phi
        return phi * has_budget[:, None]

    @property
    def length(self) -> int:
        """Returns the current number of positions in the caches."""
        return self._state.cache[0].length

    @property
    def answer_steps(self) -> tuple[int, int]:
        """Returns (number of decoding steps of an answer, number of steps per compiled call)."""
        total = self._draws.rules.suffix_length + self.spec.answer_tokens - 1
        return total, min(self.spec.chunk, total)

    def fit_caches(self, positions: int) -> None:
        """Resizes the caches to the smallest possible length of at least `positions`."""
        longest = self.lengths[-1]
        length = smallest_at_least(self.lengths, min(positions, longest))
        if length != self.length:
            self._state = trunking.resize_caches(self._state, length)

    def prefill(
        self,
        rows: ResolvedRequest,
        entering: Int[np.ndarray, "n"],
        slots: Int[np.ndarray, "n"],
        *,
        together: bool = False,
    ) -> None:
        """Prefills the prompts of rows (traces) into slots, and waits for the device.

        Args:
          rows: all rows of the rollout.
          entering: indices of the rows to prefill.
          slots: slot of each of these rows.
          together: True if all rows of the rollout are prefilled at once. If `spec.shares_prompts`,
            each distinct prompt is then prefilled only once.
        """
        widths = prompt_widths(self.width)
        width_index = np.searchsorted(widths, self.prompts.lengths[entering])
        padded = np.asarray(widths)[width_index]
        for batch in prefill_batches(padded, self.sizes):
            # Pad the batch by repeating its first row. Repeated rows have an out-of-range slot, so
            # they are dropped.
            num_repeats = smallest_at_least(self.sizes, len(batch)) - len(batch)
            repeats = np.repeat(entering[batch][:1], num_repeats)
            indices = np.concatenate([entering[batch], repeats])
            dropped = np.full(num_repeats, self.spec.slots)
            targets = np.concatenate([slots[batch], dropped]).astype(np.int32)
            self._prefill(rows.take(indices), indices, targets, together)
        jax.block_until_ready(self._state.ended)

    def _prefill(
        self,
        rows: ResolvedRequest,
        indices: Int[np.ndarray, "n"],
        slots: Int[np.ndarray, "n"],
        together: bool,
    ) -> None:
        """Prefills the prompts of one batch of traces. The batch size must be in `self.sizes`.

        Args:
          rows: the rows of this batch.
          indices: index of each row's prompt in `self.prompts`.
          slots, together: as for `prefill`.
        """
        prompts = jax.tree.map(lambda x: x[indices], self.prompts)
        longest = int(prompts.lengths.max())
        width = smallest_at_least(prompt_widths(self.width), longest)
        prompts = dataclasses.replace(prompts, tokens=prompts.tokens[:, :width])
        phi = self._phi(rows.budgets)
        sources = None
        distinct = prompts
        distinct_phi = phi
        if together and self.spec.shares_prompts:
            num_groups = -(-len(slots) // self.spec.group_size)
            first, sources = distinct_prompts(prompts, num_groups)
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
        """Decodes `spec.chunk` thinking tokens of every trace that is in a decoding slot."""
        self._state = trunking.decode_trunks(
            self._params, self._state, self._draws, spec=self.spec.decode, num_steps=self.spec.chunk
        )

    def status(
        self,
    ) -> tuple[Bool[np.ndarray, "slots"], Bool[np.ndarray, "slots"], Int[np.ndarray, "slots"]]:
        """Returns (ended, broken, number of sampled tokens) for each decoding slot, on the host.

        A slot decodes one trace at a time. `ended` is True if the thinking of the trace has ended
        or the slot is free. `broken` is True if the thinking ended because logits were non-finite.
        """
        state = self._state
        return to_host((state.ended, state.broken, state.sampled))

    def tokens(self) -> Int[np.ndarray, "slots S"]:
        """Returns the prompt and the sampled tokens of the trace in each slot, on the host."""
        return to_host(self._state.tokens)

    def trunks(self, slots: Int[np.ndarray, "n"]) -> Trunks:
        """Returns prompts and thinking (trunks) of the traces in the given slots, on the host."""
        trunks = to_host(_trunks_of(self._state))
        return jax.tree.map(lambda x: x[slots], trunks)

    def open_branches(
        self,
        slots: Int[np.ndarray, "n"],
        cuts: Int[np.ndarray, "n M"],
        wanted: Bool[np.ndarray, "n M"] | None = None,
        first_cut: int = 0,
    ) -> OpenBranches:
        """Starts an answer (branch) at every truncation point (cut) of the traces in given slots.

        Args:
          slots: slots of the traces.
          cuts: number of thinking tokens before each cut.
          wanted: True for cuts at which an answer is decoded. None for all cuts.
          first_cut: index of the first given cut among all cuts of a trace.
        """
        spec = self.spec
        state = self._state
        # Order the answers so that the first answers of all cuts come first. Their PRNG keys then
        # do not depend on the number of answers per cut.
        cuts = np.tile(cuts, spec.answers)
        size = smallest_at_least(self.sizes, len(slots))
        if size == spec.slots:
            # Use all slots in order, so that the caches are read in place.
            places = slots
            cache = state.cache
            phi = state.phi
            trunks = _trunks_of(state)
            ids = state.ids
        else:
            places = np.arange(len(slots))
            index = np.zeros(size, np.int32)
            index[places] = slots
            cache, trunks, phi = _take_slots(state, index, mesh=spec.mesh)
            ids = jax.tree.map(lambda x: x[index], state.ids)
        padded_wanted = np.zeros((size, cuts.shape[1]), bool)
        padded_wanted[places] = True if wanted is None else wanted
        padded_cuts = np.zeros((size, cuts.shape[1]), np.int32)
        padded_cuts[places] = cuts
        opened = _open_branches(
            trunks,
            padded_cuts,
            ids,
            self._draws.rules,
            spec=spec.decode,
            answer_tokens=spec.answer_tokens,
            share=spec.answers == 1,
            phi=phi,
            wanted=padded_wanted,
        )
        return OpenBranches(cache, trunks, opened, places, first_cut)

    def decode_branches(self, opened: OpenBranches, start: int) -> OpenBranches:
        """Decodes one chunk of tokens of every answer (branch), and donates `opened.state`.

        Args:
          opened: the answers and the thinking that they attend to.
          start: index of the first decoding step. The number of steps is `answer_steps[1]`.
        """
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

    def with_current_caches(self, opened: OpenBranches) -> OpenBranches:
        """Makes unfinished answers (branches) use the current caches of the thinking.

        Call this after other prompts were prefilled or other thinking was decoded, which replaces
        the caches. The answers must use all slots in order, and their slots must not have been
        prefilled again.
        """
        return dataclasses.replace(opened, trunk_cache=self._state.cache)

    def first_answers(self, opened: OpenBranches) -> list[Int[np.ndarray, "n"]]:
        """Returns the tokens so far of the answer at the first truncation point of each trace.

        The tokens, forced and sampled, are on the host.
        """
        state = opened.state
        arrays = (state.tokens, state.forced, state.sampled)
        tokens, forced, sampled = to_host(arrays)
        lengths = forced[:, 0] + sampled[:, 0]
        return [tokens[i, 0, : lengths[i]] for i in opened.places]

    def answers(self, opened: OpenBranches) -> Branches:
        """Returns the decoded answers on the host.

        If there are several answers per truncation point, they are adjacent.
        """
        branches: Branches = jax.tree.map(
            lambda x: x[opened.places], to_host(_branches_of(opened.state))
        )
        answers = self.spec.answers
        if answers == 1:
            return branches
        rows, count = branches.source.shape

        def by_cut(x: np.ndarray) -> np.ndarray:
            by_answer = x.reshape(rows, answers, count // answers, *x.shape[2:])
            return by_answer.swapaxes(1, 2).reshape(x.shape)

        return dataclasses.replace(jax.tree.map(by_cut, branches), source=branches.source)
