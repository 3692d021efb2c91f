"""Padded rows as one list of their tokens, on which everything runs, or everything but attention.

    rows   [B, T]   right-padded, as attention reads them
    list   [1, U]   a token once, whichever rows share it

Rows that begin alike (a prompt's rollouts, where nothing tells the prompt a budget) share these
tokens. Both directions are gathers, and so are both gradients: scatters are slow on every backend.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from bacr_jax.types import pytree


@pytree
class RealTokens:
    """Where the tokens of padded rows are held in a list.

    Attributes:
      source: row times T plus position of each token; any place for entries that hold none.
      slot: entry of the token at each position of a row; any entry at padding.
      is_source: positions that `source` names: tokens, but for those that another row holds.
      owner: row whose first tokens a row shares; itself where it shares none.
      shared: positions whose entries other rows read too, or are read of another row.
    """

    source: Int[Array, " U"]
    slot: Int[Array, "B T"]
    is_source: Bool[Array, "B T"]
    owner: Int[Array, "B"]
    shared: Bool[Array, "B T"]

    def listed(self, rows: Array) -> Array:
        """[B, T, ...] as [1, U, ...]; the gradient of an entry goes to the place it was read at."""
        return _listed(rows, self)

    def spread(self, listed: Array) -> Array:
        """[1, U, ...] as [B, T, ...]; the gradients of shared tokens are summed over their rows."""
        return _spread(listed, self)

    @property
    def has_fewer_pairs(self) -> bool:
        """Whether attention over the list has fewer pairs of tokens than over the padded rows."""
        rows, width = self.slot.shape
        return self.source.shape[0] ** 2 <= rows * width**2

    def visible(self, context: Int[Array, "B M"], trunk_length: int) -> Bool[Array, "U U"]:
        """Which entries [U, U] an entry sees, as far as they stand before it in the list.

        Rows are trunks and their branches (`attention.tree_attention`): entries see their row's
        trunk, or its owner's where it is shared, branches up to their context; and their branch.
        """
        width = self.slot.shape[1]
        row, place = jnp.divmod(self.source, width)
        length = (width - trunk_length) // max(context.shape[1], 1)
        in_trunk = place < trunk_length
        branch = jnp.where(in_trunk, -1, (place - trunk_length) // max(length, 1))
        seen = jnp.full_like(place, trunk_length)
        if context.size:
            seen = jnp.where(in_trunk, seen, context[row, jnp.maximum(branch, 0)])
        same = row[:, None] == row
        owned = self.shared[row, place] & (self.owner[row][:, None] == row)
        of_trunk = in_trunk & (place < seen[:, None]) & (same | owned)
        return of_trunk | (~in_trunk & same & (branch[:, None] == branch))

    @property
    def row(self) -> Int[Array, " U"]:
        """Row of each entry."""
        return self.source // self.slot.shape[1]


def _pick(rows: Array, real: RealTokens) -> Array:
    return rows.reshape(-1, *rows.shape[2:])[real.source][None]


def _put(listed: Array, real: RealTokens) -> Array:
    return listed[0][real.slot]


def _over_rows(mask: Bool[Array, "B T"], like: Array) -> Array:
    """A mask of positions beside arrays with further axes."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - 2))


@jax.custom_vjp
def _listed(rows: Array, real: RealTokens) -> Array:
    return _pick(rows, real)


def _listed_gradient(real: RealTokens, g: Array) -> tuple[Array, None]:
    rows = _put(g, real)
    return jnp.where(_over_rows(real.is_source, rows), rows, 0), None


_listed.defvjp(lambda rows, real: (_pick(rows, real), real), _listed_gradient)


@jax.custom_vjp
def _spread(listed: Array, real: RealTokens) -> Array:
    return _put(listed, real)


def _spread_gradient(real: RealTokens, g: Array) -> tuple[Array, None]:
    is_shared = _over_rows(real.shared, g)
    owned = jax.nn.one_hot(real.owner, g.shape[0], dtype=g.dtype)
    of_owner = jnp.where(is_shared, g, 0).reshape(g.shape[0], -1)
    summed = jnp.einsum("bo,bx->ox", owned, of_owner, precision="highest").reshape(g.shape)
    found = _pick(jnp.where(is_shared, summed, g), real)
    holds = jnp.arange(found.shape[1]) < real.is_source.sum()
    return jnp.where(_over_rows(holds[None], found), found, 0), None


_spread.defvjp(lambda listed, real: (_put(listed, real), real), _spread_gradient)
