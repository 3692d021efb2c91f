"""Start here: one training step of budgeted reasoning, written with the public functions.

The policy thinks under a budget, its thinking is truncated there, it answers, the answer is graded,
and the policy is updated. This file implements the step in four functions, `sample`, `grade`,
`token_advantages` and `update`, without a `Method`, a trainer or hidden state. As a script, it runs
ten steps on the quickstart's task from random weights. Its rewards stay near 0, because it skips
the supervised warm-up with which the trainer begins.

    python examples/start_here.py [key=value ...]

The corresponding function of the library is `bacr_jax.training.algorithm.iterate`. It has the same
four stages, preceded by a curriculum that samples the budgets, and it supports several cuts per
trace. Read next: `advantages` and `rewards` (the equations of the paper), `rollout` (sampling with
exact budgets), and `learner` (the loss).

Axis names, here and in the library: Q questions, G rollouts per question, B = Q G rows, M cuts per
trace (one in this file, at the budget), T thinking tokens.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax import advantages
from bacr_jax.config import io as config_io
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.objective import Minibatch
from bacr_jax.learner.train_step import question_values, train_step
from bacr_jax.rollout import RolloutRequest, SamplingSetup, generate, sampling_params
from bacr_jax.runs.setup import make_policy
from bacr_jax.training.initialize import open_inputs, untrained_state
from bacr_jax.training.run import make_run

CONFIG = Path(__file__).parents[1] / "configs/quickstart.yaml"
VALUE_HEAD = "advantage.baseline=value"  # The quickstart uses a running mean as baseline instead.
STEPS = 10


# --- 1. sample ------------------------------------------------------------------------------------


def sample(state, policy, environment, rows, budgets, key):
    """Samples thinking under a budget for every row, and an answer after the thinking.

    A *trunk* is a prompt followed by thinking. A *branch* continues a trunk with the closing text,
    which is forced, and a sampled answer. Budgets are exact: if the policy has not closed its
    thinking after `budgets[i]` tokens, the closing text is inserted. Forced tokens are inputs of
    the model and are never trained on.

    Args:
      state: parameters and optimizer states (`TrainState`).
      policy: compiled functions and shapes of the policy.
      environment: questions, decoding rules and grader.
      rows: [B] index of each row's question in the training set.
      budgets: [B] number of thinking tokens.
      key: random key of the step. A sampled token only depends on this key, its row, its position
        and its logits.

    Returns:
      The prompts, and a `Rollout` with `trunks` and `branches` as NumPy arrays.
    """
    prompts = environment.train.at(rows, budgets)
    rollout = generate(
        policy.decode_params(state.policy),  # Copy in the dtype and sharding for decoding.
        prompts,
        RolloutRequest(
            budgets, budgets[:, None]
        ),  # The cuts [B, M]: here a single one, at the budget.
        key,
        SamplingSetup(
            policy.rollout,
            environment.rules,
            sampling_params(1.0),
            policy.phi_of(state.policy),  # Budget embedding phi(b), paper Eq. 2.
        ),
    )
    return prompts, rollout


# --- 2. grade -------------------------------------------------------------------------------------


def grade(environment, rows, rollout):
    """Grades the answers in worker processes with a timeout. Returns [B, M]: 1 if correct."""
    data = environment.train.set
    references = [data.answers[i] for i in rows]
    questions = [data.questions[i] for i in rows]
    return environment.verify(rollout.branches, references, questions=questions)


def brevity(correct, thinking, budget):
    """A custom reward: a correct answer has a higher reward if it used fewer thinking tokens."""
    return correct * (1.2 - 0.2 * thinking / budget)


# --- 3. advantages --------------------------------------------------------------------------------


def token_advantages(reward, values, budgets, width):
    """Computes the advantage of every thinking token and every answer.

    Args:
      reward: [Q, G, M] rewards.
      values: [Q, G, M] predictions V(q, b, b_j) of the value head before it is trained on this
        batch.
      budgets: [B] budgets.
      width: T, the maximum number of thinking tokens.

    Returns:
      Advantages of the thinking tokens [B, T] and of the answers [B, M].
    """
    residual = advantages.bcae_advantage(reward, values)  # R - V, paper Eq. 10
    scaled = advantages.normalize(residual, mode="batch_rms", floor=0.1)
    answers = scaled.reshape(-1, 1)
    # With one cut there is a single segment, from the first thinking token to the budget.
    return advantages.scatter_segments(answers, jnp.asarray(budgets[:, None]), width), answers


# --- 4. update ------------------------------------------------------------------------------------


def update(state, policy, environment, prompts, rollout, credit, reward, *, policy_tx, head_tx):
    """Takes one Adam step on the clipped loss (paper Eq. 15-16) of trunks and branches."""
    thinking, answers = credit
    batch = make_batch(
        prompts,
        rollout.trunks,
        rollout.branches,
        cuts=np.asarray(rollout.trunks.budgets)[:, None],
        thinking_advantages=thinking,
        answer_advantages=answers,
        returns=reward,  # Targets of the value head.
    )
    # There is one update per batch, so the importance ratio is 1 and the old log-probabilities are
    # not needed. Without a KL term, no reference policy is needed either.
    minibatch = Minibatch(batch, old=None, reference=None)
    return train_step(
        state,  # Its buffers are donated, so the old state can't be used afterwards.
        minibatch,
        environment.rules.allowed_tokens,
        spec=policy.learner,
        policy_tx=policy_tx,
        head_tx=head_tx,
    )


# --- the step -------------------------------------------------------------------------------------


def step(state, policy, environment, questions, key, *, group_size, policy_tx, head_tx):
    """Runs one training step: samples a group per question, grades it, and updates the policy.

    Returns:
      The new train state and the metrics of the step.
    """
    rows = np.repeat(questions, group_size)
    b_max = policy.learner.b_max
    budgets = np.full(len(rows), b_max, np.int32)
    prompts, rollout = sample(state, policy, environment, rows, budgets, key)

    correct = grade(environment, rows, rollout)
    reward = jnp.asarray(brevity(correct, rollout.trunks.thinking[:, None], b_max))

    values, _ = question_values(
        state.policy, state.head, prompts, budgets, budgets[:, None], spec=policy.learner
    )
    groups = (len(questions), group_size, 1)
    credit = token_advantages(reward.reshape(groups), values.reshape(groups), budgets, b_max)
    optimizers = {"policy_tx": policy_tx, "head_tx": head_tx}
    state, metrics = update(
        state, policy, environment, prompts, rollout, credit, reward, **optimizers
    )
    return state, {**metrics, "reward/mean": reward.mean()}


def main(overrides):
    """Trains an untrained policy for `STEPS` steps and prints one line per step."""
    config = config_io.load([CONFIG], [VALUE_HEAD, *overrides])
    method, environment = open_inputs(config)
    policy = make_policy(config, method, environment.vocab_size)
    run = make_run(config, environment, method, policy, STEPS)
    state, draw = untrained_state(run).train, np.random.default_rng(config.seed)
    for number in range(1, STEPS + 1):
        state, metrics = step(
            state,
            policy,
            environment,
            draw.choice(len(environment.train), config.rollout.questions),
            jax.random.fold_in(run.key, number),
            group_size=config.rollout.group_size,
            policy_tx=run.updates.policy_tx,
            head_tx=run.updates.head_tx,
        )
        reward, value = (float(metrics[name]) for name in ("reward/mean", "value/mean"))
        print(f"step {number}: reward {reward:.3f}, predicted {value:.3f}")
    environment.close()


if __name__ == "__main__":
    main(sys.argv[1:])
