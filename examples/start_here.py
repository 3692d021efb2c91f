"""Start here: ten training steps of budgeted reasoning, written with the public functions.

The task is to repeat one of four letters. A small model with random weights reads the letter,
thinks up to a budget and answers, so at first one answer in six is correct. After ten steps, more
than two in three are. The script needs no other file:

    python start_here.py

`step` is one training step: sample, grade, assign advantages, update. `rollout.generate` compiles
its own programs and must not be jitted. docs/equations.md shows what to replace for a pretrained
model. The library's own step is `bacr_jax.training.algorithm.iterate`, which adds a
method, a value head and a curriculum.

A *trunk* is a prompt with its thinking. A *cut* is a point at which the thinking is truncated, and
a *branch* is an answer that continues the trunk from a cut. Axis names: Q questions, G rollouts per
question, B = Q G traces, M cuts per trace, T thinking tokens, A answer tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bacr_jax import advantages, curriculum, learner, losses, qwen2, rewards, rollout
from bacr_jax.config import ConditioningConfig, LossConfig
from bacr_jax.model.kv_cache import decode_params

PAD, THINK_CLOSE, ANSWER_OPEN, END, FIRST_LETTER, VOCAB = 0, 1, 2, 3, 4, 8
Q, G, M = 64, 16, 2
B_MIN, B_MAX = 2, 8  # Smallest and largest budget in thinking tokens.
PROGRESS = 0.3  # Weight lambda of the progress reward, paper Eq. 7.
STEPS = 10

MODEL = qwen2.Qwen2Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=True,
)
CONDITIONING = ConditioningConfig()  # The budget is an input of the model: phi(b), paper Eq. 2.
LEARNER = learner.LearnerSpec(MODEL, CONDITIONING, LossConfig(), value=None, b_max=B_MAX)
ROLLOUT = rollout.RolloutSpec(
    MODEL, CONDITIONING, max_thinking=B_MAX, answer_tokens=1, slots=Q * G, chunk=B_MAX, windows=1
)
RULES = rollout.decode_rules(
    allowed_tokens=np.isin(range(VOCAB), [PAD, ANSWER_OPEN], invert=True),
    eos_ids=[END],
    think_close=rollout.stop_token(THINK_CLOSE, vocab_size=VOCAB),
    answer_close=rollout.stop_token(END, vocab_size=VOCAB),
    # A trace that has not closed its thinking at its budget is continued with these tokens. Forced
    # tokens are inputs of the model and are never trained on.
    forced_suffix=[THINK_CLOSE, ANSWER_OPEN],
    natural_suffix=[ANSWER_OPEN],
)
OPTIMIZER = optax.adam(1e-2)

# Copies the parameters to the layout for decoding.
for_decoding = jax.jit(functools.partial(decode_params, dtype=jnp.float32, conditioned=True))
phi_of = jax.jit(functools.partial(learner.phi_of, spec=LEARNER))


def sample(params, letters, key):
    """Samples thinking under a budget, and an answer at each cut, for G traces per question.

    Returns:
      The prompts, a `Rollout` with trunks and branches, and the cuts [B, M].
    """
    budget_key, rollout_key = jax.random.split(key)
    budgets = curriculum.uniform_budgets(budget_key, b_min=B_MIN, b_max=B_MAX, shape=(Q, G))
    cuts = np.asarray(rewards.cut_points(budgets.reshape(-1), num_cuts=M))
    tokens = jnp.asarray(np.repeat(letters, G)[:, None], jnp.int32)
    lengths = jnp.ones(Q * G, jnp.int32)
    prompts = rollout.Prompts(tokens, lengths, question_start=0 * lengths, question_end=lengths)
    result = rollout.generate(
        for_decoding(params),
        prompts,
        rollout.RolloutRequest(np.asarray(budgets).reshape(-1), cuts),
        rollout_key,
        rollout.SamplingSetup(
            ROLLOUT, RULES, rollout.sampling_params(1.0), functools.partial(phi_of, params)
        ),
    )
    return prompts, result, cuts


def grade(letters, branches):
    """Returns the outcomes [Q, G, M]: 1 where the answer is the letter of the question."""
    answers = np.take_along_axis(branches.tokens, branches.forced[..., None], axis=2)[..., 0]
    # Cuts after the natural end of the thinking share one branch.
    answers = np.take_along_axis(answers, branches.source, axis=1)
    return jnp.asarray(answers.reshape(Q, G, M) == letters[:, None, None], jnp.float32)


def assign_advantages(outcomes, source):
    """Computes the advantages of thinking segments and of answers, both [B, M]."""
    weights = rewards.cut_weights("uniform", M)
    reward = rewards.dense_reward(outcomes, coefficient=PROGRESS)
    # The baseline of a trace is the mean of the other traces of its question.
    baseline = advantages.others_mean(reward)
    residual = advantages.bcae_advantage(reward, baseline)
    thinking = advantages.thinking_credit(residual, weights, mode="to_go")
    answers = advantages.answer_credit(
        outcomes,
        reward,
        baseline,
        advantages.others_mean(outcomes),
        weights,
        coefficient=PROGRESS,
        mode="to_go",
    )
    scale = advantages.advantage_scale(residual, mode="batch_rms", floor=0.1)
    answers = advantages.sum_reused((answers / scale).reshape(-1, M), jnp.asarray(source))
    return (thinking / scale).reshape(-1, M), answers


def policy_loss(params, batch):
    """Computes the clipped loss (paper Eq. 15), divided by the number of traces times b_max."""
    scores = learner.score_tokens(params, batch, RULES.allowed_tokens, spec=LEARNER)
    answer_advantages = jnp.broadcast_to(
        batch.answer_advantages[..., None], batch.answer_logprobs.shape
    )
    total = jnp.zeros(())
    for logprobs, advantage, mask in (
        (scores.thinking, batch.thinking_advantages, batch.thinking_mask),
        (scores.answers, answer_advantages, batch.answer_mask),
    ):
        # There is one update per batch, so the policy is still the one that sampled it.
        ratio = losses.token_ratio(logprobs, old_logprobs=logprobs, mask=mask)
        loss = losses.policy_loss(ratio, advantage, clip_low=0.2, clip_high=0.2)
        total += jnp.where(mask, loss, 0.0).sum()
    return total / (batch.trunk.shape[0] * B_MAX)


@jax.jit
def update(params, optimizer_state, batch):
    """Takes one optimizer step on the loss."""
    gradients = jax.grad(policy_loss)(params, batch)
    updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state


def step(params, optimizer_state, letters, key):
    """Runs one training step on Q questions.

    Returns:
      The new parameters and optimizer state, the outcomes, and the mean number of thinking tokens.
    """
    prompts, result, cuts = sample(params, letters, key)
    outcomes = grade(letters, result.branches)
    segments, answers = assign_advantages(outcomes, result.branches.source)
    batch = learner.make_batch(
        prompts,
        result.trunks,
        result.branches,
        cuts=cuts,
        thinking_advantages=advantages.scatter_segments(segments, jnp.asarray(cuts), B_MAX),
        answer_advantages=answers,
        value_targets=np.zeros(cuts.shape, np.float32),  # Only a value head needs them.
    )
    params, optimizer_state = update(params, optimizer_state, batch)
    return params, optimizer_state, outcomes, result.trunks.thinking.mean()


def main():
    """Trains a model with random weights for `STEPS` steps, and prints one line per step."""
    key = jax.random.key(0)
    params = qwen2.init(key, MODEL, conditioning=CONDITIONING)
    optimizer_state = OPTIMIZER.init(params)
    rng = np.random.default_rng(0)
    for number in range(1, STEPS + 1):
        letters = rng.integers(FIRST_LETTER, VOCAB, Q)
        params, optimizer_state, outcomes, thinking = step(
            params, optimizer_state, letters, jax.random.fold_in(key, number)
        )
        accuracy = float(outcomes[..., -1].mean())
        print(f"step {number}: {accuracy:.0%} correct, {thinking:.1f} thinking tokens", flush=True)


if __name__ == "__main__":
    main()
