"""Drawing the next token, with the log-probability of the distribution it was drawn from."""

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

# Columns of a block; about the root of real vocabularies.
BLOCK = 256
# Score of a token that can't be drawn.
_DISALLOWED = -1e30

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class VocabPart:
    """Columns of the vocabulary; arrays [R, n] hold those that are here.

    Attributes:
      axis: mesh axis that the columns are split over, inside `jax.shard_map`; None: all are here.
    """

    axis: str | None = None

    def _over(self, combine: Callable[..., Array], x: Array) -> Array:
        return x if self.axis is None else combine(x, self.axis)

    def sum(self, x: Num[Array, "R n"]) -> Num[Array, "R"]:
        """Sum over the whole vocabulary."""
        return self._over(jax.lax.psum, x.sum(-1))

    def max(self, x: Num[Array, "R n"]) -> Num[Array, "R"]:
        """Largest of the whole vocabulary."""
        return self._over(jax.lax.pmax, x.max(-1))

    def min(self, x: Num[Array, "R n"]) -> Num[Array, "R"]:
        """Smallest of the whole vocabulary."""
        return self._over(jax.lax.pmin, x.min(-1))

    def ids(self, x: Num[Array, "R n"]) -> Int[Array, "n"]:
        """Token ids of the columns here."""
        return jnp.arange(x.shape[-1], dtype=jnp.int32) + self._start(x)

    def _start(self, x: Num[Array, "R n"]) -> Int[Array, ""] | int:
        """Token id of the first column here."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * x.shape[-1]

    def _blocks(self, x: Num[Array, "R n"]) -> tuple[Num[Array, "R m b"], Int[Array, ""] | int]:
        """Columns in blocks of the whole vocabulary's ids, and the number of the first block."""
        rows, n = x.shape
        start = self._start(x)
        if self.axis is None or n % BLOCK == 0:
            x = jnp.pad(x, ((0, 0), (0, -n % BLOCK)))
        else:
            # The first block may begin among another device's columns.
            room = jnp.zeros((rows, -(-(n + BLOCK - 1) // BLOCK) * BLOCK), x.dtype)
            x = jax.lax.dynamic_update_slice_in_dim(room, x, start % BLOCK, axis=1)
        return x.reshape(rows, -1, BLOCK), start // BLOCK

    def find(
        self,
        x: Num[Array, "R n"],
        block: Callable[[Num[Array, "R N"]], tuple[Int[Array, "R"], _Result]],
        entry: Callable[[Num[Array, "R b"], _Result], Int[Array, "R"]],
    ) -> tuple[Int[Array, "R"], _Result]:
        """A token, by its block of ids and then within it.

        Blocks are the same however the vocabulary is split.

        Args:
          x: numbers per column, not negative.
          block: from the sum of every block of the vocabulary to one of them, and what else its
            caller keeps.
          entry: from the numbers of that block, and what was kept, to one of them.

        Returns:
          Token ids, and what was kept.
        """
        blocks, first = self._blocks(x)
        count = blocks.shape[1]
        sums = blocks.sum(-1)
        if self.axis is not None:
            whole = -(-x.shape[-1] * jax.lax.axis_size(self.axis) // BLOCK)
            room = jnp.zeros((len(sums), whole + count), sums.dtype)
            sums = jax.lax.dynamic_update_slice_in_dim(room, sums, first, axis=1)[:, :whole]
        chosen, kept = block(self._over(jax.lax.psum, sums))
        local = chosen - first
        inside = jnp.clip(local, 0, count - 1)
        within = jnp.take_along_axis(blocks, inside[:, None, None], axis=1)[:, 0]
        if self.axis is not None:
            here = (inside == local)[:, None]
            within = jax.lax.psum(jnp.where(here, within, jnp.zeros_like(within)), self.axis)
        return chosen * BLOCK + entry(within, kept), kept

    def value(self, x: Num[Array, "R n"], ids: Int[Array, "R"]) -> Num[Array, "R"]:
        """The numbers of some tokens, one a row."""
        local = ids - self._start(x)
        inside = jnp.clip(local, 0, x.shape[-1] - 1) if self.axis else local
        found = jnp.take_along_axis(x, inside[:, None], axis=-1)[:, 0]
        if self.axis is None:
            return found
        return jax.lax.psum(jnp.where(inside == local, found, jnp.zeros_like(found)), self.axis)

    def nth(self, flags: Bool[Array, "R n"], count: Int[Array, "R"]) -> Int[Array, "R"]:
        """Token id of the `count`-th column that is marked, from 1."""

        def block(sums: Array) -> tuple[Array, Array]:
            total = jnp.cumsum(sums, axis=-1)
            chosen = jnp.argmax(total >= count[:, None], axis=-1)
            at = chosen[:, None]
            before = jnp.take_along_axis(total, at, 1) - jnp.take_along_axis(sums, at, 1)
            return chosen, before[:, 0]

        def entry(within: Array, before: Array) -> Array:
            return jnp.argmax(jnp.cumsum(within, axis=-1) >= (count - before)[:, None], axis=-1)

        return self.find(flags.astype(jnp.int32), block, entry)[0]


WHOLE = VocabPart()


@pytree
class SamplingParams:
    """How tokens are drawn; `sampling_params` makes it from numbers.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token. One number, or one for each
        of C streams that are drawn together (`for_rows` gives every row its own).
      top_p: nucleus mass, 1 keeps everything.
      truncated: top-p is applied; static, since finding its border costs time on large
        vocabularies.
    """

    temperature: Float[Array, "*rows"]
    top_p: Float[Array, ""]
    truncated: bool = struct.field(pytree_node=False)

    def for_rows(self, streams: Int[Array, "R"]) -> "SamplingParams":
        """The same with the temperature of each row's stream; itself where there is one for all."""
        if self.temperature.ndim == 0:
            return self
        return dataclasses.replace(self, temperature=self.temperature[streams])


def sampling_params(temperature: float | Sequence[float], top_p: float = 1.0) -> SamplingParams:
    """A `SamplingParams` from Python numbers, truncated where they cut anything off."""
    return SamplingParams(
        jnp.asarray(temperature, jnp.float32), jnp.float32(top_p), truncated=top_p < 1
    )


def _order(x: Num[Array, "..."]) -> Int[Array, "..."]:
    """Integers in the order of finite fp32 numbers; its own inverse but for the types."""
    bits = x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def lowest_kept(
    scores: Float[Array, "R V"],
    mass: Float[Array, "R V"],
    sampling: SamplingParams,
    part: VocabPart,
) -> Float[Array, "R"]:
    """The lowest score inside the nucleus.

    A score s is inside when the tokens above it have less than top_p of the mass. That grows as s
    falls, so that the border is found by halving the range of fp32 numbers: 32 sums over the
    vocabulary, where sorting it takes about three times as long on a GPU.
    """
    float_of = lambda order: jax.lax.bitcast_convert_type(_order(order), jnp.float32)

    def halve(_: Array, border: tuple[Array, Array]) -> tuple[Array, Array]:
        outside, inside = border
        middle = (outside & inside) + ((outside ^ inside) >> 1)
        above = scores > float_of(middle)[:, None]
        fits = part.sum(jnp.where(above, mass, 0.0)) < sampling.top_p
        return jnp.where(fits, outside, middle), jnp.where(fits, middle, inside)

    top = _order(part.max(scores))
    bottom = jnp.minimum(top, _order(jnp.float32(_DISALLOWED)) - 1)
    return float_of(jax.lax.fori_loop(0, 32, halve, (bottom, top))[1])


def truncate(
    scores: Float[Array, "R V"], sampling: SamplingParams, part: VocabPart = WHOLE
) -> Float[Array, "R V"]:
    """Pushes tokens outside the nucleus to the bottom.

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p; it always holds
    the most likely one. Ties at the border are broken by token id.
    """
    top = part.max(scores)
    mass = jnp.exp(scores - top[:, None])
    mass = mass / part.sum(mass)[:, None]
    lowest = lowest_kept(scores, mass, sampling, part)
    above, tied = scores > lowest[:, None], scores == lowest[:, None]
    before = part.sum(jnp.where(above, mass, 0.0))
    each = part.max(jnp.where(tied, mass, 0.0))
    ties = part.sum(tied.astype(jnp.int32))
    room = jnp.clip(jnp.ceil((sampling.top_p - before) / each), 1, ties)
    last = part.nth(tied, room.astype(jnp.int32))
    kept = above | (tied & (part.ids(scores) <= last[:, None]))
    return jnp.where(kept, scores, _DISALLOWED)


def first_reaching(
    mass: Float[Array, "R n"], share: Float[Array, "R"]
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """Inverse of the cumulative mass: the first index where it exceeds share x total.

    An index without mass is never returned, whatever the rounding of the sums.

    Returns:
      Indices, and the total mass.
    """
    total = jnp.cumsum(mass, axis=-1)
    positive = mass > 0
    reached = positive & (total > share[:, None] * total[:, -1:])
    # The product can round up to the total: then the last index with mass is meant.
    last = mass.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    index = jnp.where(reached.any(-1), jnp.argmax(reached, axis=-1), last)
    return index.astype(jnp.int32), total[:, -1]


def categorical(
    shares: Float[Array, "R 2"], scores: Float[Array, "R V"], part: VocabPart = WHOLE
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """A draw from softmax(scores) and its log-probability, with two random numbers per row.

    Gumbel noise needs a random number per vocabulary entry, which costs more than the head itself.
    Here the vocabulary is cut into blocks: the first number chooses the block by its mass, the
    second the entry within it. Each sees a short sum only, so that fp32 resolves rare entries too.

    Args:
      scores: fp32; entries at least some 100 below the largest have no mass.
    """
    top = part.max(scores)
    mass = jnp.exp(scores - top[:, None])
    token, total = part.find(
        mass,
        lambda sums: first_reaching(sums, shares[:, 0]),
        lambda within, _: first_reaching(within, shares[:, 1])[0],
    )
    return token, (part.value(scores, token) - top) - jnp.log(total)


def _sample(
    shares: Float[Array, "R 2"],
    logits: Float[Array, "R V"],
    allowed_tokens: Bool[Array, "V"],
    sampling: SamplingParams,
    part: VocabPart,
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """See `sample_tokens`; logits and allowed tokens are those of a part of the vocabulary."""
    greedy = sampling.temperature == 0
    divisor = jnp.where(greedy, 1.0, sampling.temperature)
    if divisor.ndim:
        divisor = divisor[:, None]
    scaled = jnp.where(allowed_tokens, logits / divisor, _DISALLOWED)
    # A maximum may lose a NaN, on CPUs and over several devices; a sum does not.
    healthy = jnp.isfinite(part.sum(scaled))
    if sampling.truncated:
        scaled = truncate(scaled, sampling, part)
    random, logprob = categorical(shares, scaled, part)
    # The first of the largest; two plain reductions are several times faster than argmax on CPUs.
    last = jnp.iinfo(jnp.int32).max
    at_top = scaled == part.max(scaled)[:, None]
    best = part.min(jnp.where(at_top, part.ids(scaled), last))
    # A row of NaN has no largest: any token does, it will not count.
    best = jnp.where(best == last, 0, best)
    token = jnp.where(greedy, best, random)
    return token, jnp.where(healthy, jnp.where(greedy, 0.0, logprob), jnp.nan)


def sample_tokens(
    keys: Array,
    logits: Float[Array, "R V"],
    *,
    sampling: SamplingParams,
    allowed_tokens: Bool[Array, "V"],
    mesh: parallel.AnyMesh | None = None,
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """One token per row.

    Args:
      keys: one PRNG key per row; a row's draw depends on nothing else of the batch.
      mesh: devices that the logits are spread over; where the vocabulary is split over `tensor`
        (`parallel.splits_vocab`), every device looks at its own part.

    Returns:
      Token ids and their log-probability (nats) under the distribution drawn from, which for
      temperature 0 is certain (0). Logits that are not finite give a log-probability of NaN.
    """
    chex.assert_rank([logits, allowed_tokens], [2, 1])
    shares = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    if mesh is None or not parallel.splits_vocab(mesh, logits.shape[-1]):
        return _sample(shares, logits, allowed_tokens, sampling, WHOLE)
    rows, tensor = parallel.logits_sharding(mesh, logits.shape[-1]).spec
    sample = functools.partial(_sample, part=VocabPart(tensor))
    over = jax.sharding.PartitionSpec
    of_sampling = jax.tree.map(lambda x: over(rows) if x.ndim else over(), sampling)
    return jax.shard_map(
        sample,
        mesh=mesh,
        in_specs=(over(rows), over(rows, tensor), over(tensor), of_sampling),
        out_specs=(over(rows), over(rows)),
    )(shares, logits, allowed_tokens, sampling)


@pytree
class RowIds:
    """What a row's random numbers depend on, apart from the key and the position.

    Attributes:
      row: global row ids; -1 in a free slot.
      stream: which of several keys and temperatures a row is drawn with.
    """

    row: Int[Array, "R"]
    stream: Int[Array, "R"]


@pytree
class Draws:
    """What the tokens of a rollout are drawn with.

    Attributes:
      key: of the rollout (already folded with run and step), or of each of C streams.
    """

    key: Array
    rules: DecodeRules
    sampling: SamplingParams


def row_keys(key: Array, ids: RowIds, position: Int[Array, "R"], origin: Array | int) -> Array:
    """A key for each (row id, position): a row's text depends on no other row, slot or device.

    Args:
      key: of all rows, or of each of C streams.
      origin: 0 for trunks, 1 + cut for branches.
    """
    one = lambda key, row, at: jax.random.fold_in(jax.random.fold_in(key, row), at)
    if key.ndim == 0:
        return jax.vmap(one, (None, 0, 0))(jax.random.fold_in(key, origin), ids.row, position)
    by_stream = jax.vmap(jax.random.fold_in, (0, None))(key, origin)
    return jax.vmap(one)(by_stream[ids.stream], ids.row, position)
