"""What fixes the compiled programs of a rollout: hashable, and without any array."""

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

# Embeddings of the budgets of rows.
Phi = Float[Array, "*L B D"] | None


@dataclass(frozen=True)
class DecodeSpec:
    """What a prefill and a decoding step are compiled for, the shapes of their arrays aside.

    Attributes:
      conditioning: how phi joins the stream; None for the plain model.
      product_dtype: type of the decode copy's matrices, if it is another one (`Compute`).
      implementation: attention of the prefill.
      attention: of decoded tokens over trunks; "cudnn" reads each row's own keys
        (`cudnn_decoding`).
      mesh: devices over which rows are spread; None for one device.
      grace: tokens after its budget within which a row may end at a line break; 0: none.
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
        """Whether caches hold keys with positions last (`kv_cache`), as cuDNN's kernel can't."""
        return self.attention == "xla"

    def condition(
        self, params: DecodeParams, phi: Phi, mask: Bool[Array, "B T"] | None = None
    ) -> Conditioned | None:
        """What rows with these embeddings are conditioned on; None for the plain model."""
        if phi is None or params.gates is None or self.conditioning is None:
            return None
        gates: Any = params.gates
        return Conditioned(phi, gates, mask, settings=self.conditioning)


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(DecodeSpec):
    """The same with the sizes of a rollout: everything that fixes a compiled shape.

    Attributes:
      max_thinking: largest budget.
      answer_tokens: most sampled tokens per answer.
      slots: rows decoded together.
      chunk: tokens per call of the inner loop.
      windows: lengths that caches may have; more of them read less and compile longer.
      refill: share of the slots that must have ended before they are answered and refilled; a small
        share keeps slots busy, a large one answers more rows at once.
      answers: independent answers at each cut. With one, cuts at the same place share it; several
        are drawn for every cut, as AnytimeReasoner does.
      group_size: rows that are likely to share a prompt. If all rows enter at once, and nothing
        conditions the prompt, each prompt is prefilled once.
      cuts_at_once: cuts of a row that are answered together, if there are more (one answer at each
        only); None: all. An answer in flight has keys and values of its own.
      own_cuts: cuts are moved onto each row's own thinking (`rewards.cuts_of_trace`).
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
        """Most tokens a row can sample: the width of the thinking buffers."""
        return self.max_thinking + self.grace

    @property
    def decode(self) -> DecodeSpec:
        """The part that a step depends on: rollouts of other sizes share its programs."""
        names = [field.name for field in dataclasses.fields(DecodeSpec)]
        return DecodeSpec(**{name: getattr(self, name) for name in names})

    def cache_lengths(self, prompt_width: int) -> list[int]:
        """Lengths that caches may have, ascending; the last one holds every row."""
        total = prompt_width + self.max_sampled
        return sorted({-(-total * part // self.windows) for part in range(1, self.windows + 1)})

    @property
    def shares_prompts(self) -> bool:
        """Whether rows of one prompt have the same keys up to its end, and one device holds all."""
        conditioned = self.conditioning is not None and self.conditioning.positions == "all"
        return self.group_size > 1 and not conditioned and self.row_shards == 1

    @property
    def row_shards(self) -> int:
        """Devices over which slots are spread; copies of the model, where several share one."""
        return parallel.row_shards(self.mesh)

    def batch_sizes(self) -> list[int]:
        """Numbers of rows that are prefilled or answered at once, ascending."""
        shards = self.row_shards
        if self.slots % shards:
            nearest = max(round(self.slots / shards), 1) * shards
            raise UserError(
                f"rollout.slots={self.slots}: can't be split evenly over {shards} devices; write "
                f"rollout.slots={nearest}"
            )
        return doubling_sizes(self.slots, self.refill, shards)
