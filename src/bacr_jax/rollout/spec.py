"""Hashable settings that determine the compiled programs of a rollout.

`runs/setup.py` builds them from a config; jitted functions take them as static arguments.
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

# Budget embedding of each row; None without conditioning.
Phi = Float[Array, "*L B D"] | None


@dataclass(frozen=True)
class DecodeSpec:
    """Static settings of the prefill and of a decoding step, without the shapes of arrays.

    Attributes:
      conditioning: how phi is added to the residual stream; None for the plain model.
      dtype: type of the caches.
      product_dtype: type of the decode copy's matrices, if it differs from `dtype` (`Compute`).
      implementation: attention of the prefill.
      attention: attention of decoded tokens over trunks; "cudnn" only reads the valid keys of each
        row (`cudnn_decoding`).
      mesh: devices over which rows are spread; None for one device.
      grace: tokens after its budget within which a row may end at a line break; 0 disables the
        grace window.
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
        """True if caches hold keys with positions last (`kv_cache`), unsupported by cuDNN."""
        return self.attention == "xla"

    def condition(
        self, params: DecodeParams, phi: Phi, mask: Bool[Array, "B T"] | None = None
    ) -> Conditioned | None:
        """Builds the conditioning of rows from their budget embeddings; None for the plain model.

        Args:
          mask: positions to which phi is added; None for all positions.
        """
        if phi is None or params.gates is None or self.conditioning is None:
            return None
        gates: Any = params.gates
        return Conditioned(phi, gates, mask, settings=self.conditioning)


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(DecodeSpec):
    """`DecodeSpec` with the sizes of a rollout, which together determine all compiled shapes.

    Attributes:
      max_thinking: largest budget, in tokens.
      answer_tokens: maximum sampled tokens per answer.
      slots: rows decoded together.
      chunk: tokens per call of the inner loop.
      windows: number of possible cache lengths. With more lengths, steps read less and compilation
        takes longer.
      refill: share of the slots that must have ended before they are answered and refilled. A small
        share keeps slots busy; a large share answers more rows at once.
      answers: independent answers at each cut. With one answer, cuts at the same position share it.
        Several answers are sampled for every cut, as in AnytimeReasoner.
      group_size: rows that are likely to share a prompt. If all rows enter at once and prompts are
        not conditioned, each prompt is prefilled once.
      cuts_at_once: maximum cuts of a row that are answered together, which limits memory because
        each answer in flight has separate keys and values. None answers all cuts together. Requires
        answers=1.
      own_cuts: if True, cuts are moved onto each row's thinking (`rewards.cuts_of_trace`).
    """

    max_thinking: int
    answer_tokens: int
    slots: int
    chunk: int = 16
    windows: int = 4
    refill: float = 0.25
    answers: int = 1
    group_size: int = 1
    cuts_at_once: int | None = None
    own_cuts: bool = False

    @property
    def max_sampled(self) -> int:
        """Returns the maximum sampled tokens of a row, the width of the thinking buffers."""
        return self.max_thinking + self.grace

    @property
    def decode(self) -> DecodeSpec:
        """Returns the settings of a step; rollouts that differ in sizes share its programs."""
        names = [field.name for field in dataclasses.fields(DecodeSpec)]
        return DecodeSpec(**{name: getattr(self, name) for name in names})

    def cache_lengths(self, prompt_width: int) -> list[int]:
        """Returns the possible cache lengths, ascending; every row fits in the last length."""
        total = prompt_width + self.max_sampled
        lengths = set()
        for part in range(1, self.windows + 1):
            # Rounded up.
            lengths.add(-(-total * part // self.windows))
        return sorted(lengths)

    @property
    def shares_prompts(self) -> bool:
        """True if rows with equal prompts have equal keys of the prompt, all on one device."""
        conditioned = self.conditioning is not None and self.conditioning.positions == "all"
        return self.group_size > 1 and not conditioned and self.row_shards == 1

    @property
    def row_shards(self) -> int:
        """Returns the number of row shards over which slots are spread (`parallel.row_shards`)."""
        return parallel.row_shards(self.mesh)

    def batch_sizes(self) -> list[int]:
        """Returns the possible numbers of rows that are prefilled or answered at once, ascending.

        Raises:
          UserError: the slots can't be split evenly over the devices.
        """
        shards = self.row_shards
        if self.slots % shards:
            nearest = max(round(self.slots / shards), 1) * shards
            raise UserError(
                f"rollout.slots={self.slots}: can't be split evenly over {shards} devices; write "
                f"rollout.slots={nearest}"
            )
        return doubling_sizes(self.slots, self.refill, shards)
