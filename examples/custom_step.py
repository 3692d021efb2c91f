"""A training step of your own, from public functions alone: no method, no trainer.

GRPO's rollouts (one budget, one answer a trace), an own reward, BCAE for the advantage.
"""

import jax.numpy as jnp
import numpy as np

from bacr_jax import advantages
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.train_step import question_values, train_step
from bacr_jax.rollout import generate, sampling_params


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
    correct = environment.verify(rollout.branches, references)
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
