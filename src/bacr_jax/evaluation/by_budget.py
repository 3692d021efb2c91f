"""Accuracy and thinking length of a policy at each budget, greedy and sampled."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bacr_jax.config import EvalConfig
from bacr_jax.environment import Environment, Questions
from bacr_jax.evaluation.statistics import accuracy_interval
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.rollout.generate import RolloutSpec, generate
from bacr_jax.rollout.sampling import sampler

Summary = dict[str, dict[str, dict[str, Any]]]


def subset(questions: Questions, size: int | None, seed: int) -> np.ndarray:
    """Indices of the problems evaluated: all, or a fixed random subset."""
    n = len(questions)
    if size is None or size >= n:
        return np.arange(n)
    return np.sort(np.random.default_rng([seed, 7]).choice(n, size, replace=False))


def evaluate_by_budget(
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
) -> Summary:
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
      on_progress: called with (rows done, rows in all) after each budget.
      poll: passed to the rollout.

    Returns:
      {"greedy" | "sampled": {budget: {accuracy, ci95, mean_thinking_tokens, mean_total_tokens,
      forced_share, problems, samples}}}. Accuracies lie in [0, 1]; intervals are over problems.
    """
    chosen = subset(questions, config.size, seed)
    answers = [questions.set.answers[i] for i in chosen]
    passes = {"greedy": (1, sampler(0.0), False)}
    if config.samples:
        truncated = config.top_p < 1.0
        how = sampler(config.temperature, config.top_p)
        passes["sampled"] = (config.samples, how, truncated)
    total = len(chosen) * len(config.budgets) * sum(n for n, _, _ in passes.values())
    done = 0
    summary: Summary = {}
    for name, (samples, how, truncated) in passes.items():
        summary[name] = {}
        index = np.repeat(chosen, samples)
        golds = [gold for gold in answers for _ in range(samples)]
        for budget in config.budgets:
            budgets = np.full(len(index), budget, np.int32)
            rollout = generate(
                params,
                questions.take(index),
                budgets,
                budgets[:, None],
                jax.random.fold_in(key, budget),
                spec=spec,
                rules=environment.rules,
                how=how,
                phi_of=phi_of,
                truncated=truncated,
                poll=poll,
            )
            correct = environment.verify(rollout.branches, golds, poll).reshape(
                len(chosen), samples
            )
            low, high = accuracy_interval(correct)
            trunks, branches = rollout.trunks, rollout.branches
            thinking = np.asarray(trunks.thinking)
            answered = np.asarray(branches.sampled)[:, 0] + np.asarray(branches.bridge)[:, 0]
            summary[name][str(budget)] = {
                "accuracy": float(correct.mean()),
                "ci95": [float(low), float(high)],
                "mean_thinking_tokens": float(thinking.mean()),
                "mean_total_tokens": float((np.asarray(trunks.sampled) + answered).mean()),
                "forced_share": float((np.asarray(trunks.close) == 0).mean()),
                "problems": len(chosen),
                "samples": samples,
            }
            done += len(index)
            if on_progress is not None:
                on_progress(done, total)
    return summary
