"""A method of your own in one file: GRPO's rollouts, an own reward, BCAE for the advantage.

    bacr train --config configs/quickstart.yaml method=examples/custom_method.py

A file with `make(config) -> Method` is all the registry asks for. A method is a record of pure
functions, so a new one can take over what an existing one does well.
"""

import dataclasses

from bacr_jax import advantages
from bacr_jax.methods import Advantages, Method, grpo

# A right answer without any thinking is worth 1.2, one that used its whole budget 1.
BREVITY = 0.2


def make(config) -> Method:
    """GRPO at the largest budget with a bonus for what was left of it, against V(q, b)."""

    def rewards(state, batch):
        saved = 1.0 - batch.thinking / batch.budgets
        return batch.outcomes * (1.0 + BREVITY * saved[..., None])

    def credit(state, batch, reward, values):
        residual = advantages.bcae_advantage(reward, values)
        scaled = advantages.normalize(
            residual, mode=config.advantage.normalise, floor=config.advantage.floor
        )
        return Advantages(thinking=scaled, answers=scaled, baseline=values)

    def metrics(state, batch):
        return {"brief/thinking_share": (batch.thinking / batch.budgets).mean()}

    return dataclasses.replace(
        grpo.make(config),
        name="Brief BCAE",
        uses_value=True,
        rewards=rewards,
        advantages=credit,
        metrics=metrics,
    )
