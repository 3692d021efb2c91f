"""A policy on one set at several budgets, in one go: what training does between its steps."""

import itertools
from collections.abc import Callable
from typing import Any

import jax

from bacr_jax.config import EvalConfig
from bacr_jax.data.environment import Environment, Questions
from bacr_jax.evaluation.decoder import Decoder, draw_samples
from bacr_jax.evaluation.graded import graded
from bacr_jax.evaluation.samples import batches, dense_settings, eval_settings, subset
from bacr_jax.evaluation.summary import Summary, summarise
from bacr_jax.evaluation.trace_source import Part
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.rollout import RolloutSpec


def evaluate_set(
    params: DecodeParams,
    environment: Environment,
    questions: Questions,
    key: jax.Array,
    *,
    config: EvalConfig,
    spec: RolloutSpec,
    seed: int,
    phi_of: Callable[[jax.Array], jax.Array] | None,
    on_progress: Callable[[int, int], None] | None = None,
    poll: Callable[[], None] | None = None,
    cap: int | None = None,
) -> dict[str, Any]:
    """Forced termination at each budget, the same for every method.

    Args:
      params: decoding parameters.
      environment: tokenizer, rules and grader.
      questions: held-out set.
      key: key of the sampled pass; the greedy one needs none.
      config: budgets, number of problems, samples, temperature and nucleus.
      spec: rollout shapes; its thinking width must hold the largest budget.
      seed: chooses the fixed subset of problems.
      phi_of: budget embedding; None for an unconditioned policy.
      on_progress: called with (rows done, rows in all).
      poll: passed to the rollout and the grader.
      cap: most thinking tokens without a budget (config.no_budget); None: as many as spec allows.

    Returns:
      What `summary.summarise` says of the set.
    """
    decoder = Decoder(params, spec, phi_of, spec.max_thinking if cap is None else cap)
    chosen = subset(len(questions), config.size, seed)
    settings = [[setting] for setting in eval_settings(config)] + dense_settings(config)
    total, done = len(chosen) * sum(together[0].samples for together in settings), 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if on_progress is not None:
            on_progress(done, total)

    results = {}
    # As many cuts in every part of a call.
    for _, alike in itertools.groupby(settings, key=len):
        parts: list[Part] = []
        for together in alike:
            (rows,) = batches(len(chosen), together[0], None)
            parts.append((rows, together))
        samples = draw_samples(
            decoder,
            environment,
            questions,
            chosen,
            parts,
            key,
            name=questions.set.name,
            config=config,
            poll=poll,
            on_rows=count,
        )
        for (_, cuts), drawn in zip(parts, samples):
            for place, setting in enumerate(cuts):
                results[setting] = graded(drawn[place :: len(cuts)], setting)
    grader = environment.graded_like(questions).grader
    return summarise(results, grader, problems=questions.set.take(chosen))


def evaluate_by_budget(*arguments: Any, **options: Any) -> Summary:
    """The numbers of each budget alone; arguments as for `evaluate_set`.

    Returns:
      {"greedy" | "sampled": {budget: entry}}; `summary.entry_of` says what an entry holds.
    """
    by_budget: Summary = evaluate_set(*arguments, **options)["by_budget"]
    return by_budget
