"""Defines the static settings that determine the compiled programs of a rollout.

`runs/setup.py` builds the settings from a config. They are hashable, because jitted functions
receive them as static arguments.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from bacr_jax import parallel
from bacr_jax.config import ConditioningConfig
from bacr_jax.errors import UserError
from bacr_jax.model.attention import Implementation
from bacr_jax.model.budget import Conditioned
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.rollout.scheduler import doubling_sizes

# Budget embedding of each row, optionally per layer. None without conditioning.
Phi = Float[Array, "*L B D"] | None


@dataclass(frozen=True)
class DecodeSpec:
    """Static settings of the prefill and of a decoding step, without array sizes.

    Attributes:
      config: sizes of the model.
      conditioning: how the budget embedding phi is added to the residual stream. None for a model
        without budget conditioning.
      dtype: dtype of the caches.
      product_dtype: dtype of the weight matrices in the copy of the parameters for decoding, if it
        differs from `dtype` (`Compute`).
      implementation: attention implementation of the prefill.
      attention: attention implementation with which decoded tokens attend to prompt and thinking.
        "cudnn" only reads the valid keys of each trace (`cudnn_decoding`).
      mesh: devices over which traces are sharded. None for a single device.
      grace: size of the grace window in tokens. After its budget is used up, a trace may continue
        to the next line break within this window. 0 disables the window.
    """

    config: Qwen2Config
    conditioning: ConditioningConfig | None = None
    dtype: Any = jnp.float32
    product_dtype: Any = None
    implementation: Implementation = "xla"
    attention: Implementation = "xla"
    mesh: parallel.AnyMesh | None = None
    grace: int = 0

    @property
    def transposes_keys(self) -> bool:
        """True if positions are the last axis of cached keys. cuDNN can't read such keys."""
        return self.attention == "xla"

    def condition(
        self, params: DecodeParams, phi: Phi, mask: Bool[Array, "B T"] | None = None
    ) -> Conditioned | None:
        """Builds the budget conditioning of a forward pass, or None without conditioning.

        Args:
          params: parameters of the policy, as a copy in the layout for decoding.
          phi: budget embedding of each trace. None without budget conditioning.
          mask: True for positions to which phi is added. None for all positions.
        """
        if phi is None or params.gates is None or self.conditioning is None:
            return None
        gates: Any = params.gates
        return Conditioned(phi, gates, mask, settings=self.conditioning)


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(DecodeSpec):
    """A `DecodeSpec` with the sizes of a rollout, which together determine all compiled shapes.

    A cut is a truncation point of the thinking, at which an answer is sampled.

    Attributes:
      max_thinking: largest budget, in tokens.
      answer_tokens: maximum number of sampled tokens per answer.
      slots: number of traces that are decoded at the same time, one per decoding slot.
      chunk: number of tokens decoded per call of the compiled loop.
      windows: number of possible cache lengths. With more lengths, steps read less memory, but
        compilation takes longer.
      refill: share of the slots whose thinking must have ended before their answers are decoded and
        the slots are refilled. A small share keeps slots busy, and a large share answers more
        traces at once.
      answers: number of independent answers at each cut. With one answer, cuts at the same position
        share it. With several answers, all of them are sampled at every cut, as in AnytimeReasoner.
      group_size: number of traces that are likely to have the same prompt. If all traces start at
        once and prompts are not conditioned on the budget, each distinct prompt is prefilled only
        once.
      max_parallel_cuts: maximum number of cuts of a trace that are answered at once. This limits
        memory, because each answer in progress has separate keys and values. None answers all cuts
        at once. Requires answers=1.
      cuts_relative_to_length: if True, cuts are scaled to the length of each trace's thinking
        (`rewards.cuts_of_trace`).
    """

    max_thinking: int
    answer_tokens: int
    slots: int
    chunk: int = 16
    windows: int = 4
    refill: float = 0.25
    answers: int = 1
    group_size: int = 1
    max_parallel_cuts: int | None = None
    cuts_relative_to_length: bool = False

    @property
    def max_sampled(self) -> int:
        """Returns the maximum number of thinking tokens per trace, including the grace window."""
        return self.max_thinking + self.grace

    @property
    def decode(self) -> DecodeSpec:
        """Returns the settings of a decoding step, without the sizes of the rollout.

        With these settings, rollouts of different sizes can share the compiled programs of a step.
        """
        names = [field.name for field in dataclasses.fields(DecodeSpec)]
        return DecodeSpec(**{name: getattr(self, name) for name in names})

    def cache_lengths(self, prompt_width: int) -> list[int]:
        """Returns the possible cache lengths, ascending. Every trace fits into the last length."""
        total = prompt_width + self.max_sampled
        lengths = set()
        for part in range(1, self.windows + 1):
            # Round up.
            lengths.add(-(-total * part // self.windows))
        return sorted(lengths)

    @property
    def shares_prompts(self) -> bool:
        """True if traces with the same prompt can share a prefill.

        The keys of the prompt must not depend on the budget, and all traces must be on the same
        device.
        """
        conditioned = self.conditioning is not None and self.conditioning.positions == "all"
        return self.group_size > 1 and not conditioned and self.row_shards == 1

    @property
    def row_shards(self) -> int:
        """Returns the number of parts into which the mesh divides the decoding slots (traces)."""
        return parallel.row_shards(self.mesh)

    def batch_sizes(self) -> list[int]:
        """Returns the possible numbers of traces prefilled or answered at once, ascending.

        Raises:
          UserError: the number of slots is not divisible by the number of row shards.
        """
        shards = self.row_shards
        if self.slots % shards:
            nearest = max(round(self.slots / shards), 1) * shards
            raise UserError(
                f"rollout.slots={self.slots}: the sequences that are decoded at the same time "
                f"can't be split evenly over {shards} devices; set rollout.slots={nearest}"
            )
        return doubling_sizes(self.slots, self.refill, shards)
