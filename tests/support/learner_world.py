"""Creates a batch of four traces by hand, and a train state with which it can be learned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bacr_jax.config import LossConfig, ValueConfig
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.train_step import init_state, score_batch
from bacr_jax.model import value
from rollout_world import ANSWER, CLOSE, make_rules, plain_world

WORLD, RULES = plain_world(), make_rules()
SPEC = LearnerSpec(
    WORLD.shape, WORLD.conditioning, LossConfig(), ValueConfig(hidden_size=8), b_max=12
)
VALUE_HEAD = jax.jit(value.init, static_argnames=("num_features", "hidden_size"))(
    jax.random.key(4),
    num_features=value.num_features(16, conditioned=True, kind="trace_and_cut"),
    hidden_size=8,
)
# With learning rate 1, the old minus the new parameters are equal to the gradient.
SGD = optax.sgd(1.0)

ROWS, PROMPT, THINKING, CUTS, SUFFIX, ANSWERS = 4, 5, 8, 2, 2, 3
# Number of prompt tokens and of sampled thinking tokens of each trace.
PROMPTS, SAMPLED = np.array([3, 5, 2, 4]), np.array([8, 3, 6, 1])
# Number of sampled answer tokens at each cut. Both cuts of the last trace are at the end of its
# thinking, so one answer is used for both.
ANSWERED = np.array([[3, 2], [1, 3], [2, 2], [0, 3]])


def make_batch_by_hand():
    """Returns a batch of four traces with random advantages.

    Padding consists of random tokens, so that a wrong mask changes the result. The sampler's
    log-probabilities are equal to the policy's.
    """
    rng = np.random.default_rng(0)
    ids = lambda *shape: rng.integers(6, WORLD.shape.vocab_size, shape).astype(np.int32)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    cuts = np.array([[4, 8], [2, 3], [3, 6], [1, 1]], np.int32)
    branches = ids(ROWS, CUTS, SUFFIX + ANSWERS)
    branches[:, :, :SUFFIX] = CLOSE, ANSWER
    batch = Batch(
        trunk=ids(ROWS, PROMPT + THINKING),
        prompt_lengths=PROMPTS.astype(np.int32),
        question_start=np.zeros(ROWS, np.int32),
        question_end=PROMPTS.astype(np.int32),
        sampled=SAMPLED.astype(np.int32),
        budgets=np.array([8, 4, 7, 1], np.int32),
        cuts=cuts,
        branches=branches,
        context=(PROMPTS[:, None] + cuts).astype(np.int32),
        forced=np.full((ROWS, CUTS), SUFFIX, np.int32),
        answered=ANSWERED.astype(np.int32),
        thinking_advantages=normal(ROWS, THINKING),
        answer_advantages=normal(ROWS, CUTS),
        value_targets=rng.random((ROWS, CUTS)).astype(np.float32),
        thinking_logprobs=np.zeros((ROWS, THINKING), np.float32),
        answer_logprobs=np.zeros((ROWS, CUTS, ANSWERS), np.float32),
    )
    scores = score_batch(WORLD.params, batch, RULES.allowed_tokens, spec=SPEC)
    return dataclasses.replace(
        batch,
        thinking_logprobs=np.where(batch.thinking_mask, scores.thinking, 0),
        answer_logprobs=np.where(batch.answer_mask, scores.answers, 0),
    )


def state_of(value_head=VALUE_HEAD, policy_tx=SGD, head_tx=SGD):
    """Returns a new train state, whose buffers may be donated because they are copies."""
    copy = lambda tree: jax.tree.map(jnp.array, tree)
    return init_state(copy(WORLD.params), copy(value_head), policy_tx, head_tx)


def joined(thinking, answers):
    """Concatenates thinking [B, T] and answers [B, M, A] to one float64 row per trace."""
    return np.concatenate(
        [np.asarray(thinking), np.asarray(answers).reshape(len(thinking), -1)], 1
    ).astype(np.float64)


def close(one, other, atol, rtol=1e-4):
    """Asserts that all leaves of two pytrees are equal within the tolerances."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=rtol), one, other)
