"""Many cuts of a trace, answered a few at a time: each answer in flight holds keys of its own."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.types import Branches

# Of a dense trace, in an evaluation.
CUTS_AT_ONCE = 8


@dataclass(frozen=True)
class Chunk:
    """Cuts that are answered together.

    Attributes:
      first: number of the first of them.
      cuts: thinking tokens kept; the last one is repeated where there are fewer.
      wanted: cuts with an answer of their own: no earlier one is at the same place.
    """

    first: int
    cuts: Int[np.ndarray, "n m"]
    wanted: Bool[np.ndarray, "n m"]


def split(
    cuts: Int[np.ndarray, "n M"], source: Int[np.ndarray, "n M"], at_once: int
) -> list[Chunk]:
    """Chunks of the same width, those left out in which no cut wants an answer.

    Args:
      cuts: thinking tokens kept.
      source: index of the cut whose answer serves each cut.
      at_once: cuts of a chunk.
    """
    pad = ((0, 0), (0, -cuts.shape[1] % at_once))
    own = np.pad(source == np.arange(cuts.shape[1]), pad)
    wide = np.pad(cuts, pad, mode="edge")
    chunks = [
        Chunk(first, wide[:, first : first + at_once], own[:, first : first + at_once])
        for first in range(0, wide.shape[1], at_once)
    ]
    return [chunk for chunk in chunks if chunk.wanted.any()]


def answer(
    cuts: Int[np.ndarray, "n M"],
    thinking: Int[np.ndarray, "n"],
    at_once: int,
    share: bool,
    decode: Callable[[Chunk], Branches],
) -> Branches:
    """Answers at all cuts, as if they had been decoded together.

    Args:
      cuts: thinking tokens kept at each cut.
      thinking: thinking tokens of each row.
      at_once: cuts that are answered together.
      share: cuts at the same place share an answer.
      decode: answers the wanted cuts of a chunk, on the host.

    Returns:
      Branches at every cut; cuts that share have one source.
    """
    source = np.broadcast_to(np.arange(cuts.shape[1], dtype=np.int32), cuts.shape)
    if share:
        kept = np.minimum(cuts, thinking[:, None])
        source = (kept[:, :, None] == kept[:, None, :]).argmax(-1).astype(np.int32)
    chunks = split(cuts, source, at_once)
    parts = [decode(chunk) for chunk in chunks]
    # Where the answer at each source stands among the parts.
    place = np.zeros(cuts.shape[1], np.int64)
    for number, chunk in enumerate(chunks):
        inside = np.arange(chunk.first, min(chunk.first + at_once, cuts.shape[1]))
        place[inside] = number * at_once + inside - chunk.first
    joined: Branches = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
    index = place[source]
    pick = lambda x: np.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), 1)
    shared: Branches = jax.tree.map(pick, joined)
    served: Any = source
    return dataclasses.replace(shared, source=served)
