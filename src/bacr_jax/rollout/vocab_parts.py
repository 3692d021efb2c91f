"""The vocabulary as a device holds it: whole, or the part of it that tensor decoding leaves there.

Sampling is written once for both. What it asks of a row of scores is a sum, a maximum, or the
place where a running sum reaches something. With the vocabulary split over the axis `tensor` each
device answers for its own columns, and the devices exchange a few numbers a row instead of all
scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

# Columns of a block; about the root of real vocabularies.
BLOCK = 256

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
