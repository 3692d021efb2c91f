"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-mean loss, overlong punishment."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods import baselines
from bacr_jax.methods.grpo_family import single_budget
from bacr_jax.methods.method import Method, Observed, Resampling


def make(config: Config) -> Method:
    """GRPO advantages of +-1 minus the overlong punishment, on questions with mixed outcomes.

    The punishment starts a fifth before the longest possible response, the publication's 4096 of
    20480 tokens.
    """
    settings = config.dapo
    longest = config.budget.max + config.rollout.answer_tokens
    buffer = settings.overlong_share * longest

    def reward(state: Any, seen: Observed) -> Float[Array, "Q G"]:
        task = 2.0 * seen.outcomes[..., -1] - 1.0
        return task + punishment(seen)

    def punishment(seen: Observed) -> Float[Array, "Q G"]:
        return baselines.overlong_penalty(
            seen.lengths,
            max_length=longest,
            buffer=buffer,
            factor=settings.overlong_penalty,
        )

    def mixed(seen: Observed) -> Bool[Array, "Q"]:
        return baselines.dynamic_keep(seen.outcomes[..., -1])

    def complete(seen: Observed) -> Bool[Array, "Q G"]:
        return seen.closed

    def metrics(state: Any, seen: Observed) -> dict[str, Array]:
        return {
            "dapo/overlong_penalty": jnp.mean(punishment(seen)),
            "dapo/cut_share": jnp.mean(~seen.closed),
            "dapo/mixed_share": jnp.mean(mixed(seen)),
        }

    return single_budget(
        config,
        "DAPO",
        advantages.grpo_advantage,
        reward=reward,
        keep=complete if settings.overlong_filter else None,
        metrics=metrics,
        resampling=Resampling(mixed, settings.max_rounds) if settings.dynamic_sampling else None,
        loss={"aggregate": "token_mean", "kl_coef": 0.0, "clip_high": (">", "clip_low")},
    )
