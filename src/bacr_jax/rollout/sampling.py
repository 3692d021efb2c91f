"""Samples the next token and computes its log-probability under the sampling distribution.

Decoding of thinking (`trunks`) and of answers (`branches`) calls `sample_tokens` once per step. A
row is one sequence that is being decoded. The vocabulary may be sharded over devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Num

from bacr_jax import parallel
from bacr_jax.prompts.decode_rules import DecodeRules
from bacr_jax.types import pytree

# Number of vocabulary entries per block, about the square root of common vocabulary sizes.
BLOCK = 256
# Logit of tokens that can't be sampled.
_DISALLOWED = -1e30

# A number for each row and each vocabulary entry on this device.
Columns = Num[Array, "R n"]
# Scaled logits or probability masses of the vocabulary, in fp32.
Scores = Float[Array, "R V"]
# A number per row.
RowNumbers = Num[Array, "R"]
RowFloats = Float[Array, "R"]
# A token id, a block index or a count per row.
TokenIds = Int[Array, "R"]
# Two random numbers in [0, 1) per row.
UniformPairs = Float[Array, "R 2"]

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class VocabPart:
    """Reductions over the vocabulary, which may be sharded over devices.

    Each device calls the methods with its part of the vocabulary and gets the result for all of it.

    Attributes:
      axis: mesh axis over which the vocabulary is sharded, inside `jax.shard_map`. None if every
        device has the whole vocabulary.
    """

    axis: str | None = None

    def _combine(self, combine: Callable[..., Array], x: Array) -> Array:
        """Combines the results of all devices with a collective such as `jax.lax.psum`."""
        if self.axis is None:
            return x
        return combine(x, self.axis)

    def sum(self, x: Columns) -> RowNumbers:
        """Returns the sum of each row over the whole vocabulary."""
        return self._combine(jax.lax.psum, x.sum(-1))

    def max(self, x: Columns) -> RowNumbers:
        """Returns the maximum of each row over the whole vocabulary."""
        return self._combine(jax.lax.pmax, x.max(-1))

    def min(self, x: Columns) -> RowNumbers:
        """Returns the minimum of each row over the whole vocabulary."""
        return self._combine(jax.lax.pmin, x.min(-1))

    def ids(self, x: Columns) -> Int[Array, "n"]:
        """Returns the token ids of this device's vocabulary entries."""
        columns = jnp.arange(x.shape[-1], dtype=jnp.int32)
        return columns + self._start(x)

    def _start(self, x: Columns) -> Int[Array, ""] | int:
        """Returns the token id of this device's first vocabulary entry."""
        if self.axis is None:
            return 0
        return jax.lax.axis_index(self.axis) * x.shape[-1]

    def _blocks(self, x: Columns) -> tuple[Num[Array, "R m b"], Int[Array, ""] | int]:
        """Splits this device's vocabulary entries into blocks of `BLOCK` token ids.

        Returns:
          (entries by block, index of the first block). Entries of other devices are 0.
        """
        rows, n = x.shape
        start = self._start(x)
        if self.axis is None or n % BLOCK == 0:
            missing = -n % BLOCK
            x = jnp.pad(x, ((0, 0), (0, missing)))
        else:
            # The first block may begin with entries of another device.
            num_blocks = -(-(n + BLOCK - 1) // BLOCK)
            blocks = jnp.zeros((rows, num_blocks * BLOCK), x.dtype)
            x = jax.lax.dynamic_update_slice_in_dim(blocks, x, start % BLOCK, axis=1)
        return x.reshape(rows, -1, BLOCK), start // BLOCK

    def find(
        self,
        x: Columns,
        block: Callable[[Columns], tuple[TokenIds, _Result]],
        entry: Callable[[Columns, _Result], TokenIds],
    ) -> tuple[TokenIds, _Result]:
        """Selects a token per sequence (row): first a block of token ids, then an id in the block.

        The blocks are the same regardless of how the vocabulary is sharded.

        Args:
          x: a nonnegative number per vocabulary entry.
          block: function that maps the sum of `x` over each block to (index of the selected block,
            result for `entry`).
          entry: function that maps the entries of `x` in the selected block, and the result of
            `block`, to an index within the block.

        Returns:
          Token ids, and the second result of `block`.
        """
        blocks, first = self._blocks(x)
        count = blocks.shape[1]
        sums = blocks.sum(-1)
        if self.axis is not None:
            num_columns = x.shape[-1] * jax.lax.axis_size(self.axis)
            num_blocks = -(-num_columns // BLOCK)
            rows = len(sums)
            all_sums = jnp.zeros((rows, num_blocks + count), sums.dtype)
            all_sums = jax.lax.dynamic_update_slice_in_dim(all_sums, sums, first, axis=1)
            sums = all_sums[:, :num_blocks]
        sums = self._combine(jax.lax.psum, sums)
        chosen, result = block(sums)
        local = chosen - first
        inside = jnp.clip(local, 0, count - 1)
        within = jnp.take_along_axis(blocks, inside[:, None, None], axis=1)[:, 0]
        if self.axis is not None:
            is_local = (inside == local)[:, None]
            within = jnp.where(is_local, within, jnp.zeros_like(within))
            within = jax.lax.psum(within, self.axis)
        return chosen * BLOCK + entry(within, result), result

    def value(self, x: Columns, ids: TokenIds) -> RowNumbers:
        """Returns the entry of `x` for one token id per sequence (row)."""
        local = ids - self._start(x)
        if self.axis is None:
            values = jnp.take_along_axis(x, local[:, None], axis=-1)
            return values[:, 0]
        last = x.shape[-1] - 1
        inside = jnp.clip(local, 0, last)
        values = jnp.take_along_axis(x, inside[:, None], axis=-1)[:, 0]
        # Only the device that has this vocabulary entry contributes to the sum.
        values = jnp.where(inside == local, values, jnp.zeros_like(values))
        return jax.lax.psum(values, self.axis)

    def nth(self, flags: Bool[Array, "R n"], count: TokenIds) -> TokenIds:
        """Returns, for each sequence (row), the id of the `count`-th flagged vocabulary entry.

        Args:
          flags: flags of the vocabulary entries that are stored on this device.
          count: which flagged entry to return for each row, counted from 1 over all devices.
        """

        def block(sums: Array) -> tuple[Array, Array]:
            total = jnp.cumsum(sums, axis=-1)
            chosen = jnp.argmax(total >= count[:, None], axis=-1)
            index = chosen[:, None]
            total_of_chosen = jnp.take_along_axis(total, index, 1)
            before = total_of_chosen - jnp.take_along_axis(sums, index, 1)
            return chosen, before[:, 0]

        def entry(within: Array, before: Array) -> Array:
            total = jnp.cumsum(within, axis=-1)
            return jnp.argmax(total >= (count - before)[:, None], axis=-1)

        return self.find(flags.astype(jnp.int32), block, entry)[0]


WHOLE = VocabPart()


@pytree
class SamplingParams:
    """The temperature and the truncation (top-p) of the sampling distribution.

    Use `sampling_params` to build an instance from Python numbers.

    Attributes:
      temperature: divisor of the logits. 0 selects the most likely token. Either a single number,
        or one number for each of C streams, which are groups of rows with different settings that
        are sampled together (`for_rows` expands the numbers to one per row).
      top_p: cumulative probability of nucleus sampling. 1 keeps all tokens. Either a single number
        or one number per stream, like `temperature`.
      truncated: True if top-p is applied. The field is static, so that programs without top-p do
        not compute the nucleus, which takes time with large vocabularies.
    """

    temperature: Float[Array, "*rows"]
    top_p: Float[Array, "*masses"]
    truncated: bool = struct.field(pytree_node=False)

    def for_rows(self, streams: Int[Array, "R"]) -> "SamplingParams":
        """Expands temperature and top-p from one number per stream to one number per trace (row).

        A stream is a group of traces with the same settings. Single numbers are unchanged.

        Args:
          streams: index of each row's temperature and top-p.
        """

        def expand(numbers: Array) -> Array:
            return numbers[streams] if numbers.ndim else numbers

        return dataclasses.replace(
            self, temperature=expand(self.temperature), top_p=expand(self.top_p)
        )


def sampling_params(
    temperature: float | Sequence[float], top_p: float | Sequence[float] = 1.0
) -> SamplingParams:
    """Builds `SamplingParams` from Python numbers. Truncation is enabled if any `top_p` < 1."""
    lowest = min(top_p) if isinstance(top_p, Sequence) else top_p
    return SamplingParams(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_p=jnp.asarray(top_p, jnp.float32),
        truncated=lowest < 1,
    )


def _order(x: Num[Array, "..."]) -> Int[Array, "..."]:
    """Maps finite fp32 numbers to int32 numbers that are in the same order.

    The function also computes the inverse: an int32 argument is mapped back to the bits of the fp32
    number, as int32.
    """
    bits = x
    if x.dtype != jnp.int32:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def lowest_kept(
    scores: Scores,
    mass: Scores,
    sampling: SamplingParams,
    part: VocabPart,
) -> RowFloats:
    """Returns the lowest score within the nucleus.

    A score s is within the nucleus if tokens with higher scores have a total probability of less
    than top_p. This total increases as s decreases, so a bisection over the fp32 numbers finds the
    lowest score with 32 sums over the vocabulary. Sorting takes about three times as long on a GPU.

    Args:
      scores: scaled logits.
      mass: probability of each token.
    """

    def to_float(order: Array) -> Array:
        return jax.lax.bitcast_convert_type(_order(order), jnp.float32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        outside, inside = bounds
        middle = (outside & inside) + ((outside ^ inside) >> 1)
        is_above = scores > to_float(middle)[:, None]
        mass_above = part.sum(jnp.where(is_above, mass, 0.0))
        fits = mass_above < sampling.top_p
        return jnp.where(fits, outside, middle), jnp.where(fits, middle, inside)

    top = _order(part.max(scores))
    below_disallowed = _order(jnp.float32(_DISALLOWED)) - 1
    bottom = jnp.minimum(top, below_disallowed)
    _, lowest = jax.lax.fori_loop(0, 32, halve, (bottom, top))
    return to_float(lowest)


def truncate(scores: Scores, sampling: SamplingParams, part: VocabPart = WHOLE) -> Scores:
    """Masks the scores of all tokens outside the nucleus with `_DISALLOWED`.

    The nucleus is the smallest set of most likely tokens whose total probability reaches top_p. It
    always contains the most likely token. Among tokens that are tied at the lowest score in the
    nucleus, the lowest ids are kept.
    """
    top = part.max(scores)
    mass = jnp.exp(scores - top[:, None])
    mass = mass / part.sum(mass)[:, None]
    lowest = lowest_kept(scores, mass, sampling, part)
    is_above = scores > lowest[:, None]
    is_tied = scores == lowest[:, None]
    mass_above = part.sum(jnp.where(is_above, mass, 0.0))
    mass_of_tie = part.max(jnp.where(is_tied, mass, 0.0))
    num_ties = part.sum(is_tied.astype(jnp.int32))
    missing_mass = sampling.top_p - mass_above
    num_inside = jnp.clip(jnp.ceil(missing_mass / mass_of_tie), 1, num_ties)
    last = part.nth(is_tied, num_inside.astype(jnp.int32))
    is_first = part.ids(scores) <= last[:, None]
    in_nucleus = is_above | (is_tied & is_first)
    return jnp.where(in_nucleus, scores, _DISALLOWED)


def first_reaching(mass: Float[Array, "R n"], share: RowFloats) -> tuple[TokenIds, RowFloats]:
    """Samples an index per row by inverting the cumulative distribution.

    The result is the first index at which the cumulative mass exceeds share times the total mass.
    An index without mass is never returned, regardless of rounding errors.

    Args:
      mass: unnormalized probability of each entry.
      share: random number in [0, 1) per row.

    Returns:
      (sampled index, total mass) of each row.
    """
    total = jnp.cumsum(mass, axis=-1)
    positive = mass > 0
    threshold = share[:, None] * total[:, -1:]
    reached = positive & (total > threshold)
    # If share * total is rounded up to the total, no entry exceeds it. In this case, use the last
    # entry with a positive mass.
    from_end = jnp.argmax(positive[:, ::-1], axis=-1)
    last = mass.shape[-1] - 1 - from_end
    is_reached = reached.any(-1)
    index = jnp.where(is_reached, jnp.argmax(reached, axis=-1), last)
    return index.astype(jnp.int32), total[:, -1]


def categorical(
    shares: UniformPairs, scores: Scores, part: VocabPart = WHOLE
) -> tuple[TokenIds, RowFloats]:
    """Samples from softmax(scores) with two random numbers per row.

    The Gumbel-max trick needs a random number per vocabulary entry, which costs more than the
    output head. This function splits the vocabulary into blocks instead. The first random number
    selects a block by its mass, and the second selects an entry within the block. Both cumulative
    sums are short, so fp32 is precise enough for rare tokens.

    Args:
      shares: random numbers, uniform in [0, 1).
      scores: fp32 logits. Entries that are about 100 or more below the maximum have no mass.

    Returns:
      Token ids and their log-probabilities.
    """
    top = part.max(scores)
    mass = jnp.exp(scores - top[:, None])
    token, total = part.find(
        mass,
        lambda sums: first_reaching(sums, shares[:, 0]),
        lambda within, _: first_reaching(within, shares[:, 1])[0],
    )
    score = part.value(scores, token)
    logprob = (score - top) - jnp.log(total)
    return token, logprob


def _sample(
    shares: UniformPairs,
    logits: Scores,
    allowed_tokens: Bool[Array, "V"],
    sampling: SamplingParams,
    part: VocabPart,
) -> tuple[TokenIds, RowFloats]:
    """Samples tokens like `sample_tokens`, on a device that may store a part of the vocabulary.

    Args:
      shares: random numbers, uniform in [0, 1).
      part: the part of the vocabulary to which `logits` and `allowed_tokens` belong.

    Returns:
      Token ids and log-probabilities (see `sample_tokens`).
    """
    greedy = sampling.temperature == 0
    divisor = jnp.where(greedy, 1.0, sampling.temperature)
    if divisor.ndim:
        divisor = divisor[:, None]
    scaled = logits / divisor
    scaled = jnp.where(allowed_tokens, scaled, _DISALLOWED)
    # Use a sum, because a maximum can lose a NaN on CPUs and across devices.
    is_finite = jnp.isfinite(part.sum(scaled))
    if sampling.truncated:
        scaled = truncate(scaled, sampling, part)
    random, logprob = categorical(shares, scaled, part)
    # Index of the first maximum. Two reductions are several times faster than argmax on CPUs.
    no_token = jnp.iinfo(jnp.int32).max
    at_top = scaled == part.max(scaled)[:, None]
    candidates = jnp.where(at_top, part.ids(scaled), no_token)
    best = part.min(candidates)
    # A row of NaN has no maximum. Use token 0, which the caller ignores because of the NaN
    # log-probability.
    best = jnp.where(best == no_token, 0, best)
    token = jnp.where(greedy, best, random)
    logprob = jnp.where(greedy, 0.0, logprob)
    return token, jnp.where(is_finite, logprob, jnp.nan)


def sample_tokens(
    keys: Array,
    logits: Float[Array, "R V"],
    *,
    sampling: SamplingParams,
    allowed_tokens: Bool[Array, "V"],
    mesh: parallel.AnyMesh | None = None,
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """Samples the next token of each row, a sequence that is being decoded.

    Args:
      keys: one PRNG key per row. The token of a row depends only on its key and its logits.
      logits: logits of the next token.
      sampling: temperature and top-p.
      allowed_tokens: True for ids that can be sampled.
      mesh: devices over which the logits are sharded. If the vocabulary is sharded over `tensor`
        (`parallel.splits_vocab`), each device only reads its part of the logits.

    Returns:
      Token ids and their log-probabilities (nats) under the sampling distribution. With temperature
      0 the log-probability is 0. If logits are non-finite, the log-probability is NaN.
    """
    chex.assert_rank([logits, allowed_tokens], [2, 1])
    shares = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    if mesh is None or not parallel.splits_vocab(mesh, logits.shape[-1]):
        return _sample(shares, logits, allowed_tokens, sampling, WHOLE)
    rows, tensor = parallel.logits_sharding(mesh, logits.shape[-1]).spec
    sample = functools.partial(_sample, part=VocabPart(tensor))
    split = jax.sharding.PartitionSpec
    sampling_specs = jax.tree.map(lambda x: split(rows) if x.ndim else split(), sampling)
    return jax.shard_map(
        sample,
        mesh=mesh,
        in_specs=(split(rows), split(rows, tensor), split(tensor), sampling_specs),
        out_specs=(split(rows), split(rows)),
    )(shares, logits, allowed_tokens, sampling)


@pytree
class RowIds:
    """The ids of each row (a trace with its answers), which determine its random numbers.

    Attributes:
      row: global row ids. -1 for a decoding slot without a row.
      stream: index of the row's PRNG key and temperature, if there are several. Otherwise 0.
    """

    row: Int[Array, "R"]
    stream: Int[Array, "R"]


@pytree
class SamplingInputs:
    """The PRNG key, the decoding rules and the sampling settings of a rollout.

    Attributes:
      key: PRNG key of the rollout, already folded with run and step. It may be one key for each of
        C streams, which are groups of rows that are sampled together.
      rules: decoding rules, such as closing tags and allowed tokens.
      sampling: temperature and top-p.
    """

    key: Array
    rules: DecodeRules
    sampling: SamplingParams


def row_keys(key: Array, ids: RowIds, position: Int[Array, "R"], origin: Array | int) -> Array:
    """Returns a PRNG key for the next token of each row (trace).

    The key does not depend on other rows, on the decoding slot or on the device. The sampled text
    of a row therefore does not depend on them either.

    Args:
      key: one key for all rows, or one key for each of C streams.
      ids: id and stream of each row.
      position: index of the sampled token within the thinking or the answer.
      origin: 0 for thinking. 1 + the index of the truncation point for answers.
    """

    def fold(key: Array, row: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, row), position)

    if key.ndim == 0:
        shared_key = jax.random.fold_in(key, origin)
        return jax.vmap(fold, (None, 0, 0))(shared_key, ids.row, position)
    by_stream = jax.vmap(jax.random.fold_in, (0, None))(key, origin)
    return jax.vmap(fold)(by_stream[ids.stream], ids.row, position)
