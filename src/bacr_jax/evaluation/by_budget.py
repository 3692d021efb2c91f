"""A policy on one set at several budgets, in one go: what training does between its steps."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bacr_jax.config import EvalConfig
from bacr_jax.evaluation.decoder import Decoder, draw_samples
from bacr_jax.evaluation.samples import Drawing, dense_settings, eval_settings, graded, subset
from bacr_jax.evaluation.summary import summarise
from bacr_jax.prompts.environment import Environment, Questions
from bacr_jax.types import Poll


def evaluate_set(
    decoder: Decoder,
    environment: Environment,
    questions: Questions,
    key: jax.Array,
    *,
    config: EvalConfig,
    seed: int,
    spec: str = "",
    on_progress: Callable[[int, int], None] | None = None,
    poll: Poll = None,
) -> dict[str, Any]:
    """Forced termination at each budget, the same for every method.

    Args:
      decoder: the policy; its thinking width must hold the largest budget.
      spec: the set of data.eval, where `config.samples` is not one number.
    """
    chosen = subset(len(questions), config.size, seed)
    settings = [[setting] for setting in eval_settings(config, spec)]
    settings += dense_settings(config, spec)
    total, done = len(chosen) * sum(together[0].samples for together in settings), 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if on_progress is not None:
            on_progress(done, total)

    drawing = Drawing(environment, key, config, poll, count)
    results = {}
    # As many cuts in every part of a call.
    for _, alike in itertools.groupby(settings, key=len):
        parts = [(np.arange(len(chosen) * cuts[0].samples), cuts) for cuts in alike]
        samples = draw_samples(decoder, questions, chosen, parts, drawing, name=questions.set.name)
        for (_, cuts), drawn in zip(parts, samples):
            for place, setting in enumerate(cuts):
                results[setting] = graded(drawn[place :: len(cuts)], setting)
    grader = environment.graded_like(questions).grader
    return summarise(results, grader, problems=questions.set.take(chosen))
