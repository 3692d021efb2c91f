"""Defines the pytrees that rooms exchange, and the axis letters of all annotations.

B rows, Q questions, G group (rollouts per question), M cuts, A answer tokens, P prompt tokens,
T thinking tokens, S positions of a trunk (prompt and thinking), V vocabulary, D model width,
N query heads, K key/value heads (difficulty groups in the curriculum), H head width, L layers.

A *trunk* is a prompt followed by sampled thinking tokens. A *branch* hangs off a trunk at a cut:
the forced suffix, then sampled answer tokens. Lengths, never token values, say what is real.
"""

if __name__ == "types":
    # A file of this folder was run as a script. Python then looks here first for its own `types`,
    # which every command needs: this is the first place that can report it.
    import sys

    _script = sys.argv[0]
    _name = _script.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    _module = "bacr_jax" if _name == "__main__" else f"bacr_jax.{_name}"
    if _script.endswith(".py"):
        _found = f"{_script}: is a part of the package bacr_jax; write python -m {_module}"
    else:
        _found = f"{__file__}: hides Python's own types; start Python in another folder"
    print(f"error: {_found}", file=sys.stderr)
    raise SystemExit(2)

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

_T = typing.TypeVar("_T")

# A number, on the host or on a device.
Scalar = int | float | Array
# Parameters of a model or of a part of it, by name.
Params = dict[str, Any]
# Function that long operations call regularly and that can stop them by raising, or None.
Poll = Callable[[], None] | None


@typing.dataclass_transform(frozen_default=True)
def pytree(cls: type[_T]) -> type[_T]:
    """Makes a class a frozen dataclass that is a JAX pytree.

    Fields are annotated with the shapes of their arrays, but not checked when an instance is made:
    JAX itself fills pytrees with shapes, shardings and tracers of other ranks.
    """
    return typing.no_type_check(struct.dataclass(cls))


# How thinking ended (the `close` field of a trunk).
CLOSED_BY_BUDGET = 0  # forced at the budget
CLOSED_BY_TAG = 1  # the model wrote the closing tag
CLOSED_BY_EOS = 2  # the model ended its turn without closing its thinking

# In place of a budget: the model receives no budget and may think until the buffers are full.
NO_BUDGET = -1


@pytree
class Prompts:
    """Tokenised questions, right-padded.

    Attributes:
      tokens: ids, zeros after each length.
      lengths: prompt tokens per row, at least 1.
      question_start: first token of the question itself (templates come before it).
      question_end: one past the last token of the question itself.
    """

    tokens: Int[Array, "B P"]
    lengths: Int[Array, "B"]
    question_start: Int[Array, "B"]
    question_end: Int[Array, "B"]

    def take(self, index: Int[np.ndarray, "n"]) -> "Prompts":
        """Returns the rows at these indices, as arrays on the host."""
        return jax.tree.map(lambda x: np.asarray(x)[index], self)

    def padded(self, width: int) -> "Prompts":
        """Returns the prompts padded to `width` tokens, as arrays on the host."""
        more = width - self.tokens.shape[1]
        tokens: Any = np.pad(np.asarray(self.tokens), ((0, 0), (0, more)))
        return dataclasses.replace(self, tokens=tokens)


@pytree
class Trunks:
    """Prompts followed directly by sampled thinking tokens, right-padded: position == index.

    Attributes:
      tokens: prompt then thinking, as one row.
      prompt_lengths: prompt tokens per row.
      sampled: sampled tokens per row, those that spell a natural close included.
      thinking: thinking tokens per row, without the closing tag; when forced the budget, or
        up to a grace window more.
      close: CLOSED_BY_BUDGET, CLOSED_BY_TAG or CLOSED_BY_EOS.
      budgets: tokens after which the row is cut, without the grace window; the budget the model
        received may differ and is then a separate argument of `make_batch`.
      logprobs: log-probability of each sampled token under the sampling distribution, 0 elsewhere;
        entry t belongs to the t-th sampled token.
    """

    tokens: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    sampled: Int[Array, "B"]
    thinking: Int[Array, "B"]
    close: Int[Array, "B"]
    budgets: Int[Array, "B"]
    logprobs: Float[Array, "B T"]

    @classmethod
    def empty(cls, rows: int, *, width: int, sampled: int) -> "Trunks":
        """Returns empty rows on the host for `width` tokens, of which `sampled` are sampled."""
        none: Any = np.zeros(rows, np.int32)
        tokens: Any = np.zeros((rows, width), np.int32)
        logprobs: Any = np.zeros((rows, sampled), np.float32)
        return cls(tokens, none, none, none, none, none, logprobs)


@pytree
class Branches:
    """Answers at M cuts of each trunk, right-padded: forced suffix, then sampled answer tokens.

    Attributes:
      tokens: suffix then answer.
      context: trunk positions the branch sees (prompt and thinking up to its cut).
      forced: forced tokens at the start of each branch, at least 1.
      sampled: sampled answer tokens after the suffix.
      finished: the answer was closed by its tag or an end token (false: it ran into the cap).
      source: index of the branch whose text serves this cut (cuts past the natural end share one).
      logprobs: log-probability of each sampled answer token, entry t is the t-th sampled one.
    """

    tokens: Int[Array, "B M A"]
    context: Int[Array, "B M"]
    forced: Int[Array, "B M"]
    sampled: Int[Array, "B M"]
    finished: Bool[Array, "B M"]
    source: Int[Array, "B M"]
    logprobs: Float[Array, "B M T"]

    @classmethod
    def empty(cls, rows: int, cuts: int, *, width: int, sampled: int) -> "Branches":
        """Returns empty branches on the host, with room for `width` tokens.

        `sampled` of these tokens are sampled. `cuts` may be 0 for trunks without cuts.
        """
        none: Any = np.zeros((rows, cuts), np.int32)
        tokens: Any = np.zeros((rows, cuts, width), np.int32)
        logprobs: Any = np.zeros((rows, cuts, sampled), np.float32)
        return cls(tokens, none, none, none, none.astype(bool), none, logprobs)
