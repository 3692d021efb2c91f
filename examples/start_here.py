"""Start here: one training step of budgeted reasoning, from public functions alone.

A policy thinks under a budget, is cut there, answers, is graded, and learns. This page does that in
four functions, `sample`, `grade`, `token_advantages` and `update`, with no method, no trainer and
no hidden state. As a program it makes ten steps on the quickstart's task, from random weights:
rewards stay near 0 (the trainer warms a model up first).

    python examples/start_here.py [key=value ...]

The library's own iteration is `bacr_jax.training.algorithm.iterate`: the same four, with a
curriculum of budgets in front, several cuts of every trace, and bookkeeping around them. Read next:
`advantages` and `rewards` (the paper's maths), `rollout` (budgets held to the token), `learner`
(the loss).

Axis letters, here and everywhere: Q questions, G rollouts of each, B = Q G rows, M cuts of a trace
(here one, at the budget), T thinking tokens.
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
from bacr_jax.rollout import Rows, Sampler, generate, sampling_params
from bacr_jax.runs.setup import make_policy
from bacr_jax.training.run import make_run
from bacr_jax.training.start import open_inputs, untrained_state

CONFIG = Path(__file__).parents[1] / "configs/quickstart.yaml"
VALUE_HEAD = "advantage.baseline=value"  # the quickstart itself has one running number instead
STEPS = 10


# --- 1. sample ------------------------------------------------------------------------------------


def sample(state, policy, environment, rows, budgets, key):
    """Thinking under a budget for every row, and an answer where it was cut or ended.

    A *trunk* is a prompt and its thinking. A *branch* hangs off it: the closing text, which is
    forced, and a sampled answer. A budget holds to the token: after `budgets[i]` thinking tokens
    without a close, the closing text is put there. Forced tokens are inputs, never targets.

    Args:
      state: parameters and optimizers (`TrainState`).
      policy: compiled forms and shapes.
      environment: questions, decoding rules, grader.
      rows: [B] place of each row's question in the training set.
      budgets: [B] thinking tokens.
      key: all randomness of the step; a token depends on it, its row and its position alone.

    Returns:
      Prompts, and a `Rollout` with `trunks` and `branches`, on the host.
    """
    prompts = environment.train.at(rows, budgets)
    rollout = generate(
        policy.decode_params(state.policy),  # cast and laid out for decoding
        prompts,
        Rows(budgets, budgets[:, None]),  # cuts [B, M]: where each trace is cut
        key,
        Sampler(
            policy.rollout,
            environment.rules,
            sampling_params(1.0),
            policy.phi_of(state.policy),  # phi(b), paper Eq. 2: an explicit input of the model
        ),
    )
    return prompts, rollout


# --- 2. grade -------------------------------------------------------------------------------------


def grade(environment, rows, rollout):
    """[B, M]: 1 where the answer is right. Worker processes do it; no answer can hang them."""
    data = environment.train.set
    references = [data.answers[i] for i in rows]
    questions = [data.questions[i] for i in rows]
    return environment.verify(rollout.branches, references, questions=questions)


def brevity(correct, thinking, budget):
    """A reward of my own: a right answer, worth a little more the less it thought."""
    return correct * (1.2 - 0.2 * thinking / budget)


# --- 3. advantages --------------------------------------------------------------------------------


def token_advantages(reward, values, budgets, width):
    """An advantage for every thinking token and every answer.

    Args:
      reward: [Q, G, M].
      values: [Q, G, M] V(q, b, b_j) of the value head, from before it learns of this batch.
      budgets: [B].
      width: T.

    Returns:
      [B, T] of the thinking tokens, [B, M] of the answers.
    """
    residual = advantages.bcae_advantage(reward, values)  # R - V, paper Eq. 10
    scaled = advantages.normalize(residual, mode="batch_rms", floor=0.1)
    answers = scaled.reshape(-1, 1)
    # One cut: a single segment from the first thinking token to the budget.
    return advantages.scatter_segments(answers, jnp.asarray(budgets[:, None]), width), answers


# --- 4. update ------------------------------------------------------------------------------------


def update(state, policy, environment, prompts, rollout, credit, reward, *, policy_tx, head_tx):
    """One Adam step of the clipped loss (paper Eq. 15, 16), on trunks and branches in one pass."""
    thinking, answers = credit
    batch = make_batch(
        prompts,
        rollout.trunks,
        rollout.branches,
        cuts=np.asarray(rollout.trunks.budgets)[:, None],
        thinking_advantages=thinking,
        answer_advantages=answers,
        returns=reward,  # what the value head learns
    )
    # One update a batch: the policy is still the one that sampled, and the ratio is 1. No KL term.
    minibatch = Minibatch(batch, old=None, reference=None)
    return train_step(
        state,  # donated: the old one is gone
        minibatch,
        environment.rules.allowed_tokens,
        spec=policy.learner,
        policy_tx=policy_tx,
        head_tx=head_tx,
    )


# --- the step -------------------------------------------------------------------------------------


def step(state, policy, environment, questions, key, *, group_size, policy_tx, head_tx):
    """Samples a group for each question, grades it, and learns from it.

    Returns:
      The new state, and metrics.
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
    """Ten steps from an untrained policy; a line each."""
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
