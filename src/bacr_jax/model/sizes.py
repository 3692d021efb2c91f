"""Shapes of the Qwen2.5 family."""

import dataclasses
from dataclasses import dataclass

from bacr_jax.errors import UserError


@dataclass(frozen=True)
class Qwen2Config:
    """Shape of a Qwen2 decoder.

    Attributes:
      vocab_size: rows of the embedding (padded past the tokenizer's ids in released models).
      hidden_size: width D of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: decoder blocks L.
      num_heads: query heads N.
      num_kv_heads: key/value heads K; divides N.
      head_dim: width H of a head.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to the mean square before its root.
      tie_embeddings: the output head is the embedding itself.
      max_positions: longest sequence the model was made for.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_positions: int = 32768

    @property
    def num_parameters(self) -> int:
        """Parameters of the plain model, without a budget module."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        attention = (self.num_heads + 2 * self.num_kv_heads) * h * (d + 1) + self.num_heads * h * d
        per_layer = attention + 3 * d * f + 2 * d
        heads = 1 if self.tie_embeddings else 2
        return heads * self.vocab_size * d + self.num_layers * per_layer + d


def _size(
    vocab: int, d: int, f: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> Qwen2Config:
    return Qwen2Config(vocab, d, f, layers, heads, kv_heads, d // heads, tie_embeddings=tied)


# Shapes published in the config.json of the Qwen2.5-Instruct models.
PRESETS: dict[str, Qwen2Config] = {
    "qwen2.5-0.5b": _size(151936, 896, 4864, 24, 14, 2, True),
    "qwen2.5-1.5b": _size(151936, 1536, 8960, 28, 12, 2, True),
    "qwen2.5-3b": _size(151936, 2048, 11008, 36, 16, 2, True),
    "qwen2.5-7b": _size(152064, 3584, 18944, 28, 28, 4, False),
    "qwen2.5-14b": _size(152064, 5120, 13824, 48, 40, 8, False),
    "qwen2.5-32b": _size(152064, 5120, 27648, 64, 40, 8, False),
    "qwen2.5-72b": _size(152064, 8192, 29568, 80, 64, 8, False),
}


def preset(name: str, **changes: object) -> Qwen2Config:
    """The published shape called `name`, with fields replaced by `changes`."""
    if name not in PRESETS:
        raise UserError(f"model.preset: no shape {name!r}; write one of {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)  # type: ignore[arg-type]
