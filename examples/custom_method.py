r"""Example of a custom method in one file: GRPO's rollouts, a custom reward, and BCAE advantages.

    bacr train --config configs/quickstart.yaml method=examples/custom_method.py \
        output.dir=runs/custom-method

The file of a custom method must define `make(config) -> Method`. A `Method` is a dataclass of pure
functions, so a new method can reuse the functions of an existing one.
"""

import dataclasses

from bacr_jax import advantages
from bacr_jax.methods import Advantages, Method, grpo

# Maximum bonus for a short response. A correct answer without any thinking has a reward of 1.2, and
# a correct answer that used its full budget has a reward of 1.
BREVITY = 0.2


def make(config) -> Method:
    """Returns GRPO with a bonus for unused budget, and with V(q, b) as the baseline."""

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
