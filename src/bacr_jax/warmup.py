"""The supervised warm-up: from random weights to a policy that can do the task, at length.

Procedural task only. The finished weights lie in a folder of their own, with the settings that made
them, so that several methods can start from the same policy.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bacr_jax import config_io
from bacr_jax.checkpoint import Checkpoints
from bacr_jax.config import Config
from bacr_jax.data import ledger
from bacr_jax.errors import UserError
from bacr_jax.learner.objective import LearnerSpec
from bacr_jax.learner.supervised import supervised_optimizer, supervised_step
from bacr_jax.model import qwen2
from bacr_jax.parallel import processes
from bacr_jax.policy import Policy

Params = dict[str, Any]


# Shape of the rate, found by trial: 50 steps up, constant, linear over the last 35 % down to 3 %.
RISE, FALL_SHARE, FINAL_FRACTION = 50, 0.35, 0.03
HOLD_STEPS = 100


@dataclasses.dataclass
class _Run:
    """A warm-up in progress."""

    config: Config
    spec: LearnerSpec
    tx: Any
    params: Params
    opt_state: Any
    on_progress: Callable[[int, int, float], None] | None
    poll: Callable[[], None] | None
    planned: int = 0
    step: int = 0

    def advance(self, steps: int, rate: Callable[[int], float]) -> None:
        """`steps` steps at rate(0), rate(1), ..."""
        settings, task = self.config.warmup, self.config.data.ledger
        for i in range(steps):
            tokens, loss_mask = ledger.warmup_batch(
                self.config.seed,
                self.step,
                settings.steps,
                variant=task.variant,
                batch_tokens=settings.batch_tokens,
                max_operand=task.max_operand,
            )
            self.params, self.opt_state, loss = supervised_step(
                self.params,
                self.opt_state,
                tokens,
                loss_mask,
                rate(i),
                spec=self.spec,
                tx=self.tx,
            )
            self.step += 1
            if self.step % 20 == 0 or self.step == self.planned:
                if self.on_progress is not None:
                    self.on_progress(self.step, self.planned, float(loss))
                if self.poll is not None:
                    self.poll()


def fingerprint(config: Config) -> str:
    """Identifies the warm-up that a config asks for."""
    return config_io.fingerprint(
        dataclasses.replace(config, warmup=dataclasses.replace(config.warmup, dir=None)),
        "seed",
        "model",
        "data.ledger",
        "warmup",
    )


def warm_up(
    config: Config,
    policy: Policy,
    folder: Path,
    *,
    accuracy_of: Callable[[Params], float],
    on_progress: Callable[[int, int, float], None] | None = None,
    poll: Callable[[], None] | None = None,
) -> Params:
    """Weights after the warm-up, trained now or read from `folder`.

    The rate rises, stays, and falls over the last 35 % of the steps. How soon a model of this size
    learns the longest problems differs between seeds by hundreds of steps, and once the rate falls
    it learns no new skill; so the rate stays until greedy accuracy at the largest budget is
    `warmup.hold_accuracy` (measured every 100 steps, `warmup.max_hold` times), and only then falls.

    Args:
      config: the run's config.
      policy: settings of the policy; the warm-up trains the plain model inside it.
      folder: where the finished weights are kept.
      accuracy_of: greedy accuracy of given weights at the largest budget.
      on_progress: called with (step, steps in all, loss).
      poll: called every few steps.

    Returns:
      Parameters of the plain model (no budget module), fp32.

    Raises:
      UserError: the folder holds another warm-up, or the target was not reached.
    """
    spec = dataclasses.replace(policy.learner, conditioning=None, value=None)
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    params = policy.make(lambda: qwen2.init(key, spec.model))
    identity = folder / "warmup.json"
    if identity.exists():
        found = json.loads(identity.read_text())
        if found["fingerprint"] != fingerprint(config):
            raise UserError(
                f"{folder}: holds a warm-up with other settings (seed, model, data.ledger or "
                "warmup differ); write another warmup.dir"
            )
        checkpoints = Checkpoints(folder / "weights", keep=1)
        _, params, _ = checkpoints.restore(params)
        checkpoints.close()
        return params
    settings = config.warmup
    tx = supervised_optimizer()
    run = _Run(config, spec, tx, params, policy.make(tx.init, params), on_progress, poll)
    fall = int(FALL_SHARE * settings.steps)
    run.planned = settings.steps
    run.advance(settings.steps - fall, lambda i: settings.learning_rate * min((i + 1) / RISE, 1.0))
    holds = 0
    while holds < settings.max_hold and accuracy_of(run.params) < settings.hold_accuracy:
        holds += 1
        run.planned += HOLD_STEPS
        run.advance(HOLD_STEPS, lambda i: settings.learning_rate)
    last = 1.0 - FINAL_FRACTION
    run.advance(fall, lambda i: settings.learning_rate * (1.0 - last * (i + 1) / fall))
    params, step, accuracy = run.params, run.step, accuracy_of(run.params)
    if accuracy < settings.target_accuracy:
        raise UserError(
            f"warm-up: greedy accuracy {accuracy:.2f} at the largest budget after {step} steps is "
            f"below warmup.target_accuracy={settings.target_accuracy}; write a larger warmup.steps "
            "or another seed"
        )
    checkpoints = Checkpoints(folder / "weights", keep=1)
    checkpoints.save(step, params, {"steps": step, "accuracy": accuracy})
    checkpoints.close()
    if processes.is_first():
        record = {"fingerprint": fingerprint(config), "steps": step, "accuracy": accuracy}
        identity.write_text(json.dumps(record) + "\n")
    return params
