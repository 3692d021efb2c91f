"""Where an evaluation's answers come from: this package, or an engine elsewhere."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax

from bacr_jax.config.budgets import largest_evaluated
from bacr_jax.config.engine import Engine
from bacr_jax.data.environment import Environment, Questions
from bacr_jax.evaluation.decoder import TraceSource, declaration, open_decoder
from bacr_jax.evaluation.served import open_served
from bacr_jax.runs.open import SavedPolicy


def open_source(
    engine: Engine | None,
    saved: SavedPolicy,
    environment: Environment,
    sets: dict[str, Questions],
    *,
    slots: int,
    say: Callable[[str], None],
) -> AbstractContextManager[TraceSource]:
    """What draws the answers, for as long as they are drawn.

    Args:
      engine: what decodes elsewhere; None: this package does.
      saved: the policy, with the evaluation's config.
      environment: tokenizer, format and rules.
      sets: questions by set.
      slots: rows decoded together.
      say: tells the reader what takes time.

    Raises:
      UserError: the policy's files and its config disagree, or the engine can't be used.
    """
    config, largest = saved.config, largest_evaluated(saved.config)
    if engine is None:
        devices = jax.device_count()
        opened = open_decoder(
            saved,
            environment.vocab_size,
            max_thinking=largest,
            slots=slots,
            num_devices=devices,
        )
        if devices > 1:
            shared = devices // opened.spec.row_shards
            copy = f", {shared} of which share a copy of the policy" if shared > 1 else ""
            say(f"{opened.spec.slots} rows at a time on {devices} devices{copy}")
        return contextlib.nullcontext(opened)
    told = declaration(environment.tokenizer, environment.style, config.eval, largest)
    return open_served(
        engine,
        saved,
        environment,
        longest_prompt=max(questions.longest for questions in sets.values()) + len(told),
        slots=slots,
        say=say,
    )
