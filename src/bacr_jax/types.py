"""Defines the pytrees that subpackages exchange, and the axis names in their shape annotations.

Axis names:

* B: rows of a batch, one per trace; Q: questions; G: rollouts per question (the group size).
* M: truncation points (cuts) per trunk.
* P: tokens of a prompt; S: tokens of a trunk; A: tokens of a branch; T: tokens of any other
  sequence, such as the sampled tokens of `logprobs`.
* V: vocabulary; D: model width; N: query heads; H: head width; L: layers.
* K: key/value heads, or difficulty groups in the curriculum.

A *trunk* is a prompt followed by sampled thinking tokens. A *cut* is a point at which the thinking
is truncated. A *branch* is an answer that continues the trunk from a cut: a forced suffix, such as
the closing tag, followed by sampled answer tokens. Arrays are right-padded. Masks must be computed
from the lengths, because padding can't be recognized by the token ids.
"""

if __name__ == "types":
    # This module was imported under the name of the standard library's `types`, because a file in
    # this folder was run as a script or Python was started here. Python imports `types` at startup,
    # so this is the earliest point at which the mistake can be reported.
    import sys

    _script = sys.argv[0]
    _name = _script.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    _module = "bacr_jax" if _name == "__main__" else f"bacr_jax.{_name}"
    if _script.endswith(".py"):
        _found = (
            f"{_script} is a module of the package bacr_jax and can't be run as a file; run "
            f"python -m {_module}"
        )
    else:
        _found = (
            f"{__file__} hides the module `types` of the standard library; start Python in "
            "another folder"
        )
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

# A Python number or a scalar array.
Scalar = int | float | Array
# Nested dict with the parameters of a model or of one of its layers.
Params = dict[str, Any]
# Callback that a long operation calls periodically. The callback can stop the operation by raising
# an exception. With None, no callback is called.
Poll = Callable[[], None] | None


@typing.dataclass_transform(frozen_default=True)
def pytree(cls: type[_T]) -> type[_T]:
    """Class decorator that makes a class a frozen dataclass and registers it as a JAX pytree.

    The shape annotations of the fields are documentation and are not checked when an instance is
    created, because JAX transformations also fill pytrees with shapes, shardings, and tracers of
    other ranks.
    """
    return typing.no_type_check(struct.dataclass(cls))


# Reasons why thinking ended (the field `close` of `Trunks`).
CLOSED_BY_BUDGET = 0  # Truncated at the budget.
CLOSED_BY_TAG = 1  # The model generated the closing tag.
CLOSED_BY_EOS = 2  # The model generated an end token without closing its thinking.

# Value of a budget if the model receives no budget and may think until the token buffer is full.
NO_BUDGET = -1


@pytree
class Prompts:
    """A batch of right-padded, tokenised prompts.

    Attributes:
      tokens: token ids [B, P] (batch, prompt tokens), padded with zeros.
      lengths: number of tokens of each prompt [B], at least 1.
      question_start: index [B] of the first token of the question, after the chat template's
        prefix.
      question_end: index [B] after the last token of the question.
    """

    tokens: Int[Array, "B P"]
    lengths: Int[Array, "B"]
    question_start: Int[Array, "B"]
    question_end: Int[Array, "B"]

    def take(self, index: Int[np.ndarray, "n"]) -> "Prompts":
        """Returns the prompts at the given batch indices as NumPy arrays."""
        return jax.tree.map(lambda x: np.asarray(x)[index], self)

    def padded(self, width: int) -> "Prompts":
        """Returns the prompts padded to `width` tokens as NumPy arrays."""
        more = width - self.tokens.shape[1]
        tokens: Any = np.pad(np.asarray(self.tokens), ((0, 0), (0, more)))
        return dataclasses.replace(self, tokens=tokens)


@pytree
class Trunks:
    """A batch of trunks: prompts, each followed by its sampled thinking tokens.

    Each row of the batch is one trace. The thinking starts directly after the prompt and rows are
    right-padded, so the position id of a token equals its index. Fields without a shape have shape
    [B].

    Attributes:
      tokens: token ids [B, S] of the prompt and the thinking.
      prompt_lengths: number of prompt tokens per row.
      sampled: number of sampled tokens per row, including the tokens with which the model itself
        ended its thinking.
      thinking: number of thinking tokens per row, without the closing tag. If the thinking was
        truncated, this number can exceed the budget by the grace window, a few extra tokens that
        are sampled up to the next line break (`budget.grace`).
      close: reason why the thinking ended: CLOSED_BY_BUDGET, CLOSED_BY_TAG or CLOSED_BY_EOS.
      budgets: number of thinking tokens at which each row is truncated, without the grace window.
        If the model was conditioned on another budget, the other budget is a separate argument of
        `make_batch`.
      logprobs: log-probabilities [B, T] of the sampled tokens under the sampling distribution, in
        nats. Padding has the value 0.
    """

    tokens: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    sampled: Int[Array, "B"]
    thinking: Int[Array, "B"]
    close: Int[Array, "B"]
    budgets: Int[Array, "B"]
    logprobs: Float[Array, "B T"]

    def thinking_ids(self, row: int) -> list[int]:
        """Returns all sampled token ids of a row: the thinking, and the tokens that ended it."""
        start = np.asarray(self.prompt_lengths)[row]
        end = start + np.asarray(self.sampled)[row]
        ids: list[int] = np.asarray(self.tokens)[row, start:end].tolist()
        return ids

    @classmethod
    def empty(cls, rows: int, *, width: int, sampled: int) -> "Trunks":
        """Returns zero-initialized NumPy arrays.

        Args:
          rows: number of rows.
          width: maximum number of tokens per row, including the prompt.
          sampled: maximum number of sampled tokens per row.
        """
        none: Any = np.zeros(rows, np.int32)
        tokens: Any = np.zeros((rows, width), np.int32)
        logprobs: Any = np.zeros((rows, sampled), np.float32)
        return cls(tokens, none, none, none, none, none, logprobs)


@pytree
class Branches:
    """A batch of right-padded answers (branches), sampled at M truncation points of each trace.

    A branch continues the prompt and its thinking (the trunk) from a truncation point (cut). It
    contains the forced suffix that ends the thinking, followed by sampled answer tokens. Fields
    without a shape have shape [B, M].

    Attributes:
      tokens: token ids [B, M, A] of the suffix and the answer.
      context: number of trunk tokens that the branch attends to (the prompt, and the thinking up to
        the cut).
      forced: number of forced tokens at the start of the branch, at least 1.
      sampled: number of sampled answer tokens after the forced suffix.
      finished: True if the answer ended with its closing tag or an end token, False if it was
        truncated at the maximum length.
      source: for each cut, the index along M of the branch that contains its answer. Cuts after
        the natural end of the thinking share one branch.
      logprobs: log-probabilities [B, M, T] of the sampled answer tokens under the sampling
        distribution, in nats. Padding has the value 0.
    """

    tokens: Int[Array, "B M A"]
    context: Int[Array, "B M"]
    forced: Int[Array, "B M"]
    sampled: Int[Array, "B M"]
    finished: Bool[Array, "B M"]
    source: Int[Array, "B M"]
    logprobs: Float[Array, "B M T"]

    def forced_ids(self, row: int, cut: int) -> list[int]:
        """Returns the forced token ids of one branch, with which it begins."""
        forced = np.asarray(self.forced)[row, cut]
        ids: list[int] = np.asarray(self.tokens)[row, cut, :forced].tolist()
        return ids

    def answer_ids(self, row: int, cut: int) -> list[int]:
        """Returns the sampled token ids of one branch, without the forced tokens."""
        start = np.asarray(self.forced)[row, cut]
        end = start + np.asarray(self.sampled)[row, cut]
        ids: list[int] = np.asarray(self.tokens)[row, cut, start:end].tolist()
        return ids

    @classmethod
    def empty(cls, rows: int, cuts: int, *, width: int, sampled: int) -> "Branches":
        """Returns zero-initialized NumPy arrays.

        Args:
          rows: number of traces B.
          cuts: number of truncation points M per trace. It may be 0.
          width: maximum number of tokens per branch, including the forced suffix.
          sampled: maximum number of sampled tokens per branch.
        """
        none: Any = np.zeros((rows, cuts), np.int32)
        tokens: Any = np.zeros((rows, cuts, width), np.int32)
        logprobs: Any = np.zeros((rows, cuts, sampled), np.float32)
        return cls(tokens, none, none, none, none.astype(bool), none, logprobs)
