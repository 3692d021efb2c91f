"""Converts right-padded rows to a list of their real tokens, to avoid computing padding.

    rows   [B, T]   right-padded, the layout required by attention
    list   [1, U]   contains each token once, even if several rows share it

All layers are computed on the list, except that attention may still need the padded rows. Rows with
a common prefix share the tokens of the prefix, for example the rollouts of a prompt that does not
contain the budget. Both conversions between rows and list are gathers, and so are their gradients,
because scatters are slow on every backend.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from bacr_jax.types import pytree


@pytree
class RealTokens:
    """A mapping between positions of padded rows and entries of a list of real tokens.

    Attributes:
      source: flat position of each entry's token, row * T + position. Arbitrary for unused entries.
      slot: index of the list entry for each position of a row. Arbitrary at padding positions.
      is_source: True at the positions in `source`. False at padding positions, and for tokens that
        are listed at the position of another row.
      owner: index of the row whose prefix each row shares, or of the row itself if it shares none.
      shared: True at positions whose list entry is used by several rows.
    """

    source: Int[Array, " U"]
    slot: Int[Array, "B T"]
    is_source: Bool[Array, "B T"]
    owner: Int[Array, "B"]
    shared: Bool[Array, "B T"]

    def listed(self, rows: Array) -> Array:
        """Gathers padded rows [B, T, ...] into the list of real tokens [1, U, ...].

        In the backward pass, the gradient of a list entry is written to the position in `source`,
        even if several rows share the token.
        """
        return _listed(rows, self)

    def spread(self, listed: Array) -> Array:
        """Gathers the list of real tokens [1, U, ...] into padded rows [B, T, ...].

        In the backward pass, the gradients of a token that several rows share are summed.
        """
        return _spread(listed, self)

    @property
    def has_fewer_pairs(self) -> bool:
        """True if attention over the list has at most as many token pairs as over padded rows."""
        rows, width = self.slot.shape
        entries = self.source.shape[0]
        return entries**2 <= rows * width**2

    def visible(self, context: Int[Array, "B M"], trunk_length: int) -> Bool[Array, "U U"]:
        """Returns the mask [queries, keys] of the list entries that each entry can attend to.

        A row consists of a prompt with its thinking (the trunk) and of answers (branches) that
        continue the thinking (see `attention.tree_attention`). An entry attends to the trunk of its
        row, including a prefix that is stored in the entries of the owner. An entry of a branch
        attends to the trunk only up to the branch's context, and to its branch.

        The mask is not causal. `attention.masked_attention` adds the causal mask.

        Args:
          context: number of trunk tokens visible to each branch.
          trunk_length: number of trunk positions S.
        """
        width = self.slot.shape[1]
        row, position = jnp.divmod(self.source, width)
        branch_length = (width - trunk_length) // max(context.shape[1], 1)
        in_trunk = position < trunk_length
        branch = (position - trunk_length) // max(branch_length, 1)
        branch = jnp.where(in_trunk, -1, branch)
        seen_length = jnp.full_like(position, trunk_length)
        if context.size:
            branch_context = context[row, jnp.maximum(branch, 0)]
            seen_length = jnp.where(in_trunk, seen_length, branch_context)
        same_row = row[:, None] == row
        row_of_owner = self.shared[row, position] & (self.owner[row][:, None] == row)
        sees_trunk = in_trunk & (position < seen_length[:, None]) & (same_row | row_of_owner)
        sees_branch = ~in_trunk & same_row & (branch[:, None] == branch)
        return sees_trunk | sees_branch

    @property
    def row(self) -> Int[Array, " U"]:
        """Returns the index of each list entry's original row."""
        return self.source // self.slot.shape[1]


def _gather_entries(rows: Array, real: RealTokens) -> Array:
    """Gathers padded rows [B, T, ...] into a list of real tokens [1, U, ...]."""
    flat = rows.reshape(-1, *rows.shape[2:])
    return flat[real.source][None]


def _gather_rows(listed: Array, real: RealTokens) -> Array:
    """Gathers a list of real tokens [1, U, ...] into padded rows [B, T, ...]."""
    return listed[0][real.slot]


def _expand(mask: Bool[Array, "B T"], like: Array) -> Array:
    """Appends axes of length 1 to a mask to match the rank of `like`."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - 2))


@jax.custom_vjp
def _listed(rows: Array, real: RealTokens) -> Array:
    return _gather_entries(rows, real)


def _listed_forward(rows: Array, real: RealTokens) -> tuple[Array, RealTokens]:
    return _gather_entries(rows, real), real


def _listed_gradient(real: RealTokens, upstream: Array) -> tuple[Array, None]:
    rows = _gather_rows(upstream, real)
    return jnp.where(_expand(real.is_source, rows), rows, 0), None


_listed.defvjp(_listed_forward, _listed_gradient)


@jax.custom_vjp
def _spread(listed: Array, real: RealTokens) -> Array:
    return _gather_rows(listed, real)


def _spread_forward(listed: Array, real: RealTokens) -> tuple[Array, RealTokens]:
    return _gather_rows(listed, real), real


def _spread_gradient(real: RealTokens, upstream: Array) -> tuple[Array, None]:
    """Sums gradients of shared tokens over padded rows, then gathers them into the token list."""
    num_rows = upstream.shape[0]
    is_shared = _expand(real.shared, upstream)
    owner = jax.nn.one_hot(real.owner, num_rows, dtype=upstream.dtype)
    shared = jnp.where(is_shared, upstream, 0).reshape(num_rows, -1)
    summed = jnp.einsum("bo,bx->ox", owner, shared, precision="highest")
    summed = summed.reshape(upstream.shape)
    gradient = _gather_entries(jnp.where(is_shared, summed, upstream), real)
    # Unused entries are at the end of the list and have gradient 0.
    is_used = jnp.arange(gradient.shape[1]) < real.is_source.sum()
    return jnp.where(_expand(is_used[None], gradient), gradient, 0), None


_spread.defvjp(_spread_forward, _spread_gradient)
