"""A training step of your own, from public functions alone: no method, no trainer.

GRPO's rollouts (one budget, one answer a trace), an own reward, BCAE for the advantage. As a
program it makes ten such steps on the quickstart's task:
`python examples/custom_step.py [key=value ...]`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax import advantages
from bacr_jax.config import io as config_io
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.policy import make_policy
from bacr_jax.learner.train_step import question_values, train_step
from bacr_jax.rollout import generate, sampling_params
from bacr_jax.training.run import make_run
from bacr_jax.training.start import open_inputs, untrained_state

CONFIG = Path(__file__).parents[1] / "configs/quickstart.yaml"
STEPS = 10


def brevity(correct, thinking, budget):
    """My reward: a right answer, worth a little more the less it thought."""
    return correct * (1.2 - 0.2 * thinking / budget)


def step(state, policy, environment, questions, key, *, group_size, policy_tx, head_tx):
    """Samples a group for each question, credits it and updates policy and value head."""
    rows = np.repeat(questions, group_size)
    shape = (len(questions), group_size, 1)
    budgets = np.full(len(rows), policy.b_max, np.int32)
    prompts = environment.train.at(rows, budgets)
    rollout = generate(
        policy.decode_params(state.policy),
        prompts,
        budgets,
        budgets[:, None],
        key,
        spec=policy.rollout,
        rules=environment.rules,
        sampling=sampling_params(1.0),
        phi_of=policy.phi_of(state.policy),
    )
    references = [environment.train.set.answers[i] for i in rows]
    asked = [environment.train.set.questions[i] for i in rows]
    correct = environment.verify(rollout.branches, references, questions=asked)
    reward = jnp.asarray(brevity(correct, rollout.trunks.thinking[:, None], policy.b_max))

    values, features = question_values(
        state.policy, state.head, prompts, budgets, budgets[:, None], spec=policy.learner
    )
    residual = advantages.bcae_advantage(reward.reshape(shape), values.reshape(shape))
    advantage = advantages.normalize(residual, mode="batch_rms", floor=0.1).reshape(-1, 1)

    batch = make_batch(
        prompts,
        rollout.trunks,
        rollout.branches,
        cuts=budgets[:, None],
        thinking_advantages=advantages.scatter_segments(
            advantage, jnp.asarray(budgets[:, None]), policy.b_max
        ),
        answer_advantages=advantage,
        returns=reward,
    )
    allowed_tokens, txs = (
        environment.rules.allowed_tokens,
        {"policy_tx": policy_tx, "head_tx": head_tx},
    )
    state, metrics = train_step(
        state, batch, allowed_tokens, None, None, spec=policy.learner, **txs
    )
    return state, {**metrics, "reward/mean": reward.mean()}, features


def main(overrides):
    """Steps from an untrained policy; a line each."""
    config = config_io.load([CONFIG], overrides)
    inputs = open_inputs(config)
    policy = make_policy(config, inputs.method, inputs.vocab_size)
    run = make_run(config, inputs.environment, inputs.method, policy, STEPS)
    state, draw = untrained_state(run).train, np.random.default_rng(config.seed)
    for number in range(1, STEPS + 1):
        state, metrics, _ = step(
            state,
            policy,
            inputs.environment,
            draw.choice(len(inputs.environment.train), config.rollout.questions),
            jax.random.fold_in(run.key, number),
            group_size=config.rollout.group_size,
            policy_tx=run.policy_tx,
            head_tx=run.value_tx,
        )
        reward, value = (float(metrics[name]) for name in ("reward/mean", "value/mean"))
        print(f"step {number}: reward {reward:.3f}, predicted {value:.3f}")
    inputs.environment.close()


if __name__ == "__main__":
    main(sys.argv[1:])
