"""Decodes several requests at the same time, although they arrive at different times.

`rollout.generate` decodes a batch whose rows are known when it starts. A server needs the same
phases, but its requests arrive and end at any time. Chunks of thinking for all requests that still
think alternate with chunks of answers for a group of requests that have finished thinking.

Only the worker thread of `embedded` calls this module.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bacr_jax.evaluation.decoder import Decoder
from bacr_jax.evaluation.samples import CLOSE_NAMES
from bacr_jax.out_of_memory import phase_memory
from bacr_jax.parallel.processes import to_host
from bacr_jax.prompts.decode_rules import DecodeRules
from bacr_jax.rollout.engine import OpenBranches, SlotDecoder
from bacr_jax.rollout.rollouts import slot_sizes
from bacr_jax.rollout.rows import ResolvedRequest, SamplingSetup
from bacr_jax.rollout.sampling import sampling_params
from bacr_jax.types import CLOSED_BY_EOS, NO_BUDGET, Prompts, Trunks
from bacr_serve.generation import ANSWER, FORCED, THINKING, BackendError, Generation, Piece

# Value that disables top-p for a row if other rows of the batch use top-p. It is above 1, because
# the probabilities of all tokens may add up to slightly less than 1.
_ALL_TOKENS = 2.0
_NOT_FINITE = "the logits of this request are not finite; the weights contain NaN or infinity"


@dataclass(frozen=True)
class Event:
    """A new piece of the response to a request, or the error that ends the request.

    Attributes:
      handle: the object that was passed to `Slots.add` to identify the request.
      result: the piece or the error.
      is_last: True if the request has ended and its slot is free.
    """

    handle: Any
    result: Piece | BackendError
    is_last: bool = False


@dataclass
class _Row:
    """A request that is being decoded in a slot.

    Attributes:
      handle: the object that identifies the request in events.
      request: the request.
      is_thinking: True until the thinking has ended.
      num_thinking: number of thinking tokens returned in events so far.
      num_answer: number of answer tokens returned in events so far, or None if the forced tokens
        have not been returned yet.
      closed_by: reason why the thinking ended.
    """

    handle: Any
    request: Generation
    is_thinking: bool
    num_thinking: int = 0
    num_answer: int | None = None
    closed_by: str = ""


class Slots:
    """A decoder with a fixed number of slots, each of which decodes one request at a time.

    Attributes:
      size: number of slots.
    """

    def __init__(self, decoder: Decoder, rules: DecodeRules, *, prompt_tokens: int):
        """Allocates the KV caches.

        Args:
          decoder: decoder of the policy. Its spec contains the number of slots, the tokens per
            chunk and the largest budget. The grace window, in which the thinking may exceed its
            budget, is not used.
          rules: decoding rules of the policy's prompt format.
          prompt_tokens: maximum number of tokens of a prompt.
        """
        spec = dataclasses.replace(
            decoder.spec,
            windows=1,
            refill=1.0,
            grace=0,
            answers=1,
            group_size=1,
            max_parallel_cuts=None,
            cuts_relative_to_length=False,
        )
        self.size = spec.slots
        self._rows: dict[int, _Row] = {}
        lengths: Any = np.ones(self.size, np.int32)
        tokens: Any = np.zeros((self.size, prompt_tokens), np.int32)
        zeros: Any = np.zeros(self.size, np.int32)
        self._prompts = Prompts(tokens, lengths, zeros, lengths)
        self._request = ResolvedRequest(
            budgets=np.zeros(self.size, np.int32),
            cuts=np.zeros((self.size, 1), np.int32),
            # All rows have the same id, so the samples of a row depend only on its seed.
            ids=np.zeros(self.size, np.int32),
            limits=np.zeros(self.size, np.int32),
            streams=np.arange(self.size, dtype=np.int32),
        )
        self._keys = [jax.random.key(0)] * self.size
        self._temperatures = [0.0] * self.size
        self._top_ps = [_ALL_TOKENS] * self.size
        setup = SamplingSetup(spec, rules, self._sampling(), decoder.phi_of)
        with phase_memory("serve", slots=spec.slots, positions=prompt_tokens + spec.max_sampled):
            self._engine = SlotDecoder(decoder.params, self._prompts, jnp.stack(self._keys), setup)
        # The answers that are being decoded, or None if there are none.
        self._opened: OpenBranches | None = None
        self._answered_steps = 0
        self._group: list[int] = []

    @property
    def free(self) -> int:
        """Returns the number of free slots, which is the number of requests that can be added."""
        return self.size - len(self._rows)

    def add(self, requests: list[tuple[Any, Generation]]) -> None:
        """Assigns requests to free slots and prefills their prompts.

        Args:
          requests: pairs of a handle and a request. The handle identifies the request in events.
        """
        free_slots = [slot for slot in range(self.size) if slot not in self._rows]
        entering = np.array(free_slots[: len(requests)], np.int64)
        for slot, (handle, request) in zip(entering.tolist(), requests, strict=True):
            self._fill(slot, handle, request)
        self._engine.set_sampling(jnp.stack(self._keys), self._sampling())
        with phase_memory("prefill", **slot_sizes(self._engine), entering_rows=len(entering)):
            self._engine.prefill(self._request, entering, entering)

    def _fill(self, slot: int, handle: Any, request: Generation) -> None:
        """Copies a request into the arrays of its slot (the row of the decoding batch).

        The arrays stay in host memory until the next prefill.
        """
        length = len(request.prompt)
        tokens: Any = self._prompts.tokens
        lengths: Any = self._prompts.lengths
        tokens[slot] = 0
        tokens[slot, :length] = request.prompt
        lengths[slot] = length
        self._request.budgets[slot] = NO_BUDGET if request.budget is None else request.budget
        self._request.limits[slot] = request.limit
        self._request.cuts[slot] = request.limit
        self._keys[slot] = jax.random.key(request.seed)
        self._temperatures[slot] = request.temperature
        self._top_ps[slot] = _ALL_TOKENS
        if request.temperature and request.top_p < 1:
            self._top_ps[slot] = request.top_p
        self._rows[slot] = _Row(handle, request, is_thinking=request.limit > 0)

    def _sampling(self) -> Any:
        return sampling_params(self._temperatures, self._top_ps)

    def remove(self, handle: Any) -> None:
        """Frees the slot of a cancelled request. Does nothing if the request has ended."""
        for slot, row in list(self._rows.items()):
            if row.handle is handle:
                self._release(slot)

    def _release(self, slot: int) -> None:
        del self._rows[slot]
        # Reset the top-p of the freed slot. Otherwise it would still select the slower program,
        # which supports top-p.
        self._top_ps[slot] = _ALL_TOKENS
        if slot in self._group:
            self._group.remove(slot)
        if not self._group:
            self._opened = None

    def step(self) -> list[Event]:
        """Decodes one chunk of thinking and one chunk of answers, and returns the new pieces."""
        events = []
        if any(row.is_thinking for row in self._rows.values()):
            events += list(self._think())
        if self._opened is None:
            self._open_answers()
        if self._opened is not None:
            events += list(self._answer())
        return events

    def _think(self) -> Iterator[Event]:
        """Decodes one chunk of thinking and yields the new piece of each request."""
        with phase_memory("decode", **slot_sizes(self._engine)):
            self._engine.decode()
            ended, broken, _ = self._engine.status()
            trunks = self._engine.trunks(np.arange(self.size))
        for slot, row in list(self._rows.items()):
            if not row.is_thinking:
                continue
            if broken[slot]:
                self._release(slot)
                yield Event(row.handle, BackendError(_NOT_FINITE), is_last=True)
                continue
            tokens = _thinking_tokens(trunks, slot, is_ended=bool(ended[slot]))
            new_tokens = tuple(tokens[row.num_thinking :].tolist())
            row.num_thinking = len(tokens)
            row.is_thinking = not ended[slot]
            if new_tokens:
                yield Event(row.handle, Piece(THINKING, new_tokens))

    def _open_answers(self) -> None:
        """Starts decoding the answers of all requests whose thinking has ended."""
        self._group = sorted(slot for slot, row in self._rows.items() if not row.is_thinking)
        if not self._group:
            return
        slots = np.array(self._group)
        trunks = self._engine.trunks(slots)
        for slot, close in zip(self._group, trunks.close.tolist()):
            self._rows[slot].closed_by = CLOSE_NAMES[close]
        with phase_memory("answers", **slot_sizes(self._engine), answered_rows=len(slots)):
            self._opened = self._engine.open_branches(slots, self._request.cuts[slots])
        self._answered_steps = 0

    def _answer(self) -> Iterator[Event]:
        """Decodes one chunk of the answers in progress, and yields the new piece of each answer."""
        assert self._opened is not None
        total, steps = self._engine.answer_steps
        with phase_memory("answers", **slot_sizes(self._engine), answered_rows=len(self._group)):
            opened = self._engine.with_current_caches(self._opened)
            opened = self._engine.decode_branches(opened, self._answered_steps)
            state = opened.state
            arrays = (state.tokens, state.forced, state.sampled)
            tokens, forced, sampled = to_host(arrays)
            ended, broken, finished = to_host((state.ended, state.broken, state.finished))
        self._opened = opened
        self._answered_steps += steps
        is_over = self._answered_steps >= total
        for slot in list(self._group):
            row = self._rows[slot]
            if broken[slot, 0]:
                self._release(slot)
                yield Event(row.handle, BackendError(_NOT_FINITE), is_last=True)
                continue
            start = int(forced[slot, 0])
            answer = tokens[slot, 0, start : start + int(sampled[slot, 0])]
            if row.num_answer is None:
                row.num_answer = 0
                forced_tokens = tuple(tokens[slot, 0, :start].tolist())
                yield Event(row.handle, Piece(FORCED, forced_tokens, row.closed_by))
            new_tokens = tuple(answer[row.num_answer :].tolist())
            row.num_answer = len(answer)
            is_last = bool(ended[slot, 0]) or is_over
            if is_last:
                self._release(slot)
            if new_tokens or is_last:
                piece = Piece(ANSWER, new_tokens, finished=bool(finished[slot, 0]))
                yield Event(row.handle, piece, is_last)


def _thinking_tokens(trunks: Trunks, slot: int, *, is_ended: bool) -> Int[np.ndarray, "n"]:
    """Returns the token ids of a slot's thinking so far, without an end-of-turn token."""
    count = int(trunks.sampled[slot])
    if is_ended and int(trunks.close[slot]) == CLOSED_BY_EOS:
        count = int(trunks.thinking[slot])
    start = int(trunks.prompt_lengths[slot])
    return np.asarray(trunks.tokens[slot])[start : start + count]
