"""L1 (arXiv 2503.04697): rewards responses for matching the length given in their prompt.

The length is either a target (exact) or an upper limit (max). This module also contains the
`Method` fields and the checks shared by all methods whose prompts contain a budget that does not
truncate traces (L1 and `effort`).
"""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods import grpo_family as family
from bacr_jax.methods.budget_prior import sample_budgets
from bacr_jax.methods.method import GroupBatch, Method, Published

_SCRIPT = "its released script (commit 93dd330)"
# Settings of the trainer on which both L1 and Elastic Reasoning are based, as set in their scripts.
GRPO_OF_VERL = {
    "loss.aggregate": Published("token_mean", "its released trainer: masked mean over tokens"),
    "loss.ratio": Published("token", "its released trainer"),
    "loss.clip_low": Published(0.2, "its released trainer"),
    "loss.clip_high": Published(0.2, "its released trainer"),
    "loss.entropy_coef": Published(0.001, "default of its released trainer"),
    "loss.kl_coef": Published(0.001, "its released script"),
    "loss.kl_kind": Published("k3", "its released script: low_var_kl"),
    "train.minibatches": Published(2, "its released script: mini-batches of 64 of 128 prompts"),
}
BUDGET_IN_PROMPT = {
    "conditioning.budget_input": Published("prompt", "the budget is in the prompt"),
    "budget.assign": Published("shared", "all responses of a group have one prompt"),
}
PUBLISHED = {
    **BUDGET_IN_PROMPT,
    "budget.prior": Published("uniform", "Sec. 3: drawn uniformly, 100 to 4,000"),
    "l1.weight": Published(1.2288, f"3e-4 a token, 4,096 tokens at most: {_SCRIPT}"),
    "l1.offset": Published(0.5, "Eq. 2; its code has .5 + .5 alpha (n - length) instead"),
    **GRPO_OF_VERL,
}


def length_reward(
    right: Float[Array, "*batch"],
    lengths: Int[Array, "*batch"],
    prompt_budget: Int[Array, "*batch"],
    *,
    kind: Literal["exact", "max"],
    alpha: float,
    offset: float = 0.5,
) -> Float[Array, "*batch"]:
    """Computes the reward of a response for a prompt with a budget of n tokens (L1, Eq. 1 and 2).

        exact:  right - alpha |n - length|
        max:    right clip(alpha (n - length) + offset, 0, 1)

    Args:
      right: correctness, in [0, 1].
      lengths: number of tokens of each response.
      prompt_budget: n, the budget in the prompt, in tokens.
      alpha: weight of one token.
      offset: for "max", the reward of a correct response with exactly n tokens.
    """
    remaining = prompt_budget - lengths
    if kind == "exact":
        return right - alpha * jnp.abs(remaining)
    return right * jnp.clip(alpha * remaining + offset, 0.0, 1.0)


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each incompatible setting.

    The checks apply to methods whose budget is part of the prompt and does not truncate traces.
    """
    yield from family.needs_a_group(config, f"method={config.method}")
    if config.conditioning.budget_input != "prompt":
        yield (
            f"conditioning.budget_input={config.conditioning.budget_input}: "
            f"method={config.method} needs the budget in the prompt; set "
            "conditioning.budget_input=prompt"
        )


def prompt_budget_settings(config: MethodSettings) -> dict[str, Any]:
    """Returns the fields of `Method` for budgets that are part of the prompt.

    The budgets are sampled from `budget.prior` and do not truncate traces. Traces are truncated at
    `budget.max` instead.
    """

    def cuts(key: Array, budgets: Int[Array, "Q G"]) -> Int[Array, "Q G one"]:
        return jnp.full((*budgets.shape, 1), config.budget.max, jnp.int32)

    return {
        "sample_budgets": functools.partial(sample_budgets, config),
        "cuts": cuts,
        "truncates_at_budget": False,
    }


def make(config: MethodSettings) -> Method:
    """Builds L1: GRPO on correctness and the deviation of the length from the prompt's budget."""
    settings = config.l1

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        return length_reward(
            batch.outcomes[..., -1],
            batch.lengths,
            batch.budgets,
            kind=settings.kind,
            alpha=settings.weight / config.budget.max,
            offset=settings.offset,
        )

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        excess = batch.lengths - batch.budgets
        return {
            "l1/deviation": jnp.abs(excess).mean(),
            "l1/over_share": (excess > 0).mean(),
        }

    return family.grpo_family(
        config,
        f"L1-{settings.kind.capitalize()}",
        reward=reward,
        metrics=metrics,
        published=PUBLISHED,
        **prompt_budget_settings(config),
    )
