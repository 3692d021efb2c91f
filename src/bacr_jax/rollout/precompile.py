"""Every compiled form that a rollout can need, run once before the first one."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.oom import phase_memory
from bacr_jax.rollout.engine import Engine
from bacr_jax.rollout.rollouts import slot_sizes
from bacr_jax.rollout.rows import Rows, Sampler
from bacr_jax.rollout.scheduler import smallest_holding
from bacr_jax.types import Prompts


def precompile(
    params: DecodeParams,
    prompts: Prompts,
    num_cuts: int,
    sampler: Sampler,
    *,
    rows: int | None = None,
    on_program: Callable[[int, int], None] | None = None,
) -> None:
    """Runs every compiled form that `generate` can need once, whatever lengths come up later.

    Prompts are prefilled at multiples of 128 tokens: of wide prompts, other multiples than that of
    the first one are compiled when they come up.

    Args:
      prompts: any prompts of the width that will be used.
      sampler: of the calls to come; of its sampling only whether it truncates matters.
      rows: rows of the calls to come; with no more than there are slots nothing is refilled.
      on_program: called with (programs done, programs in all) before each and after the last;
        raises to leave the rest.
    """
    engine = Engine(params, prompts, jax.random.key(0), sampler)
    refilled = rows is None or rows > sampler.spec.slots
    programs = _programs(engine, num_cuts, refilled=refilled, rows=rows)
    for done, program in enumerate(programs):
        if on_program is not None:
            on_program(done, len(programs))
        program()
    if on_program is not None:
        on_program(len(programs), len(programs))


def _programs(
    engine: Engine, num_cuts: int, *, refilled: bool, rows: int | None
) -> list[Callable[[], None]]:
    """What runs each compiled form of an engine once, in their order."""

    def prefill(length: int, count: int) -> None:
        engine.fit_caches(length)
        zeros = np.zeros(count, np.int64)
        nothing = Rows(zeros, zeros[:, None]).complete(engine.spec)
        with phase_memory("prefill", **slot_sizes(engine)):
            engine.prefill(nothing, zeros, np.arange(count), together=not refilled)

    def decode(length: int) -> None:
        with phase_memory("decode", **slot_sizes(engine)):
            engine.fit_caches(length)
            engine.decode()

    def answer(count: int) -> None:
        cuts = np.zeros((count, num_cuts), np.int32)
        with phase_memory("answers", **slot_sizes(engine), answered_rows=count, cuts=num_cuts):
            opened = engine.open_branches(np.arange(count), cuts)
            engine.decode_branches(opened, 0)

    entering = engine.sizes if refilled else [smallest_holding(engine.sizes, rows or 1)]
    answering = engine.sizes if refilled else [engine.spec.slots]
    programs: list[Callable[[], None]] = []
    for length in engine.lengths:
        if length == engine.lengths[0] or refilled:
            programs += [functools.partial(prefill, length, count) for count in entering]
        programs.append(functools.partial(decode, length))
        programs += [functools.partial(answer, count) for count in answering if num_cuts]
    # Back at the shortest: growing is compiled by now, and so is this.
    return [*programs, functools.partial(engine.fit_caches, engine.lengths[0])]
