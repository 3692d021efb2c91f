"""Computes score gradients of single traces, and compresses them to sketches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.advantages import segment_index
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.token_scores import score_tokens
from bacr_jax.types import Params, pytree

# Number of parameters from which only one gradient is kept in memory at a time.
_LARGE = 10_000_000


@pytree
class CountSketch:
    """A random linear map from gradients to `width` numbers that preserves inner products.

        y_j = sum_i sign_i x_i  over the parameters i in bucket j

    The signs are independent. The parameters are divided into blocks of `width`, and a block is
    distributed over all buckets, starting with a random bucket. The squared norm of a sketch is an
    unbiased estimate, with a relative error of about sqrt(2 / width), which is 2 % for 4096. The
    same holds for sums that are computed from sketches with the same map.

    Attributes:
      signs: for each leaf of the parameters, +1 or -1 per parameter, padded to full blocks.
      start: for each leaf, the bucket of the first parameter of each block.
    """

    signs: tuple[Int[Array, "runs width"], ...]
    start: tuple[Int[Array, " runs"], ...]

    @property
    def width(self) -> int:
        """Length of a sketch."""
        return int(self.signs[0].shape[1])

    def __call__(self, gradient: Any) -> Float[Array, " width"]:
        """Computes the sketch of a pytree of gradients."""
        leaves = jax.tree.leaves(gradient)
        return sum(
            (_sketched(*leaf) for leaf in zip(leaves, self.signs, self.start, strict=True)),
            start=jnp.zeros(self.width),
        )


def _sketched(leaf: Array, signs: Array, start: Array) -> Array:
    """Returns the contribution of one leaf to the sketch."""
    runs, width = signs.shape
    flat = leaf.astype(jnp.float32).reshape(-1)
    signed = jnp.pad(flat, (0, runs * width - flat.size)).reshape(runs, width) * signs
    # Rotating a block is the same as slicing the block concatenated with itself.
    turn = lambda run, at: jax.lax.dynamic_slice(run, (width - at,), (width,))
    return jax.vmap(turn)(jnp.concatenate([signed, signed], 1), start).sum(0)


def count_sketch(seed: int, params: Params, width: int) -> CountSketch:
    """Creates a sketch for the gradients of `params`, with random signs and buckets from `seed`."""
    rng = np.random.default_rng([seed, 7])
    runs = [-(-leaf.size // width) for leaf in jax.tree.leaves(params)]
    signs = [
        rng.integers(0, 2, (count, width), np.int8) * np.int8(2) - np.int8(1) for count in runs
    ]
    start = [rng.integers(0, width, count, np.int32) for count in runs]
    return CountSketch(tuple(map(jnp.asarray, signs)), tuple(map(jnp.asarray, start)))


def segment_weights(batch: Batch, cuts: Int[np.ndarray, "B M"]) -> Float[np.ndarray, "B M T"]:
    """Returns, for each segment, weights that sum the log-probabilities of its sampled tokens.

    A weight is 1 for the tokens of the segment and 0 elsewhere.
    """
    width = batch.thinking_advantages.shape[1]
    positions = jnp.broadcast_to(jnp.arange(1, width + 1), (len(cuts), width))
    segment = np.asarray(segment_index(positions, jnp.asarray(cuts)))
    inside = segment[:, None] == np.arange(cuts.shape[1])[:, None]
    return np.asarray(inside & np.asarray(batch.thinking_mask)[:, None], np.float32)


def answer_weights(
    batch: Batch, by_answer: Float[np.ndarray, "B M A"]
) -> Float[np.ndarray, "B V N T"]:
    """Returns weights for two vectors per cut that determine the answer gradient of any baseline.

    For the baseline c of a cut, the gradient of its A answers is

        mean_a (r_a - c) g_a = x - c y,   x = mean_a r_a g_a,   y = mean_a g_a

    The V vectors are x of every cut, then y of every cut. There are N = M A branches.
    """
    rows, cuts, answers = by_answer.shape
    of_cut = np.repeat(np.eye(cuts, dtype=np.float32), answers, axis=1) / answers
    right = of_cut * by_answer.reshape(rows, 1, -1)
    both = np.concatenate([right, np.broadcast_to(of_cut, right.shape)], 1)
    return np.asarray(both[..., None] * np.asarray(batch.answer_mask)[:, None], np.float32)


@functools.partial(jax.jit, static_argnames=("spec",))
def score_sketches(
    policy: Params,
    batch: Batch,
    thinking: Float[Array, "B V T"],
    answers: Float[Array, "B V N A"],
    allowed_tokens: Bool[Array, " vocabulary"],
    sketch: CountSketch,
    *,
    spec: LearnerSpec,
) -> Float[Array, "B V width"]:
    """Computes sketches of the gradients of weighted sums of log-probabilities, for each row.

    Each row needs one forward pass of the learner, and one backward pass for each of its V sums.

    Args:
      policy: parameters of the policy.
      batch: the rows.
      thinking: weights of the sampled thinking tokens in each sum.
      answers: weights of the sampled answer tokens in each sum.
      allowed_tokens: mask of the tokens that can be sampled.
      sketch: the sketch of the gradients.
      spec: settings of the learner.
    """

    def of_row(inputs: tuple[Batch, Array, Array]) -> Array:
        row, of_thinking, of_answers = inputs
        alone = jax.tree.map(lambda x: x[None], row)

        def logprobs(params: Params) -> tuple[Array, Array]:
            scores = score_tokens(params, alone, allowed_tokens, spec=spec)
            return scores.thinking[0], scores.answers[0]

        _, pull = jax.vjp(logprobs, policy)
        backward = lambda weights: sketch(pull(weights)[0])
        if sum(leaf.size for leaf in jax.tree.leaves(policy)) > _LARGE:
            return jax.lax.map(backward, (of_thinking, of_answers))
        return jax.vmap(backward)((of_thinking, of_answers))

    return jax.lax.map(of_row, (batch, thinking, answers))


def without_answers(batch: Batch) -> Batch:
    """Returns the same trunks with one empty branch each, which adds almost no cost."""
    first = lambda x: np.asarray(x)[:, :1]
    fields: dict[str, Any] = {
        "cuts": first(batch.cuts),
        "branches": first(batch.branches)[..., :1],
        "context": first(batch.context),
        "forced": np.ones_like(first(batch.forced)),
        "answered": np.zeros_like(first(batch.answered)),
        "answer_logprobs": first(batch.answer_logprobs)[..., :1],
    }
    return dataclasses.replace(batch, **fields)
