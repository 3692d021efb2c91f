"""Model configurations of decoders. Qwen2.5, Qwen3 and Llama only differ in these values."""

from dataclasses import dataclass
from typing import Any

from bacr_jax.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies for sequences beyond the original context length.

    The number of turns of a frequency is its number of full rotations over `positions` tokens.

    Attributes:
      factor: divisor of low frequencies.
      low: frequencies with fewer turns than this are divided by `factor`.
      high: frequencies with more turns than this are unchanged. Frequencies between `low` and
        `high` are interpolated.
      positions: original context length, in tokens.
    """

    factor: float
    low: float
    high: float
    positions: int


@dataclass(frozen=True)
class Qwen2Config:
    """Configuration of a decoder. The defaults are Qwen2's.

    Attributes:
      vocab_size: number of rows V of the embedding matrix. Released models pad it beyond the number
        of token ids.
      hidden_size: width D of the residual stream.
      intermediate_size: width F of the MLP.
      num_layers: number of decoder layers L.
      num_heads: number of query heads N.
      num_kv_heads: number of key/value heads K, a divisor of N.
      head_dim: dimension H of each head.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: epsilon added to the mean square in norms.
      tie_embeddings: True if the embedding matrix is also the output head.
      max_positions: maximum sequence length supported by the model, in tokens.
      qkv_bias: True if queries, keys and values have a bias.
      qk_norm: True if queries and keys are normalized per head before the rotary embedding.
      rope_scaling: scaling of the rotary frequencies, or None for no scaling.
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
    qkv_bias: bool = True
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns (input width, output width) of each matrix in a layer, keyed by its name."""
        d = self.hidden_size
        f = self.intermediate_size
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return {
            "q": (d, q),
            "k": (d, kv),
            "v": (d, kv),
            "o": (q, d),
            "gate": (d, f),
            "up": (d, f),
            "down": (f, d),
        }

    @property
    def layer_matrices(self) -> int:
        """Returns the number of parameters in the matrices of one layer."""
        return sum(fan_in * fan_out for fan_in, fan_out in self.matrices.values())

    @property
    def num_parameters(self) -> int:
        """Returns the number of parameters of the model, without a budget module or adapters."""
        per_layer = self.layer_matrices
        if self.qkv_bias:
            per_layer += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.qk_norm:
            per_layer += 2 * self.head_dim
        # Norms before attention and before the MLP. The final norm is counted below.
        per_layer += 2 * self.hidden_size
        final_norm = self.hidden_size
        # Tied models use one matrix for the input embeddings and the output head.
        num_matrices = 1 if self.tie_embeddings else 2
        embeddings = num_matrices * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * per_layer + final_norm


def _size(
    vocab: int, d: int, f: int, layers: int, heads: int, kv_heads: int, tied: bool, **more: Any
) -> Qwen2Config:
    """Builds a configuration. The head dimension is d / heads unless specified in `more`.

    Args:
      more: additional fields of Qwen2Config.
    """
    numbers: dict[str, Any] = {"head_dim": d // heads, **more}
    return Qwen2Config(vocab, d, f, layers, heads, kv_heads, tie_embeddings=tied, **numbers)


_R1: dict[str, Any] = {"rope_theta": 1e4, "max_positions": 131072}
_QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "max_positions": 40960,
    "qkv_bias": False,
    "qk_norm": True,
}


def _llama(factor: float) -> dict[str, Any]:
    """Returns the fields of Llama 3 that differ from the defaults of Qwen2."""
    return {
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "max_positions": 131072,
        "qkv_bias": False,
        "rope_scaling": RopeScaling(factor, low=1.0, high=4.0, positions=8192),
    }


# Values from the models' published config.json. For Qwen2.5 and Llama, the Instruct models are
# used.
PRESETS: dict[str, Qwen2Config] = {
    "qwen2.5-0.5b": _size(151936, 896, 4864, 24, 14, 2, True),
    "qwen2.5-1.5b": _size(151936, 1536, 8960, 28, 12, 2, True),
    "qwen2.5-3b": _size(151936, 2048, 11008, 36, 16, 2, True),
    "qwen2.5-7b": _size(152064, 3584, 18944, 28, 28, 4, False),
    "qwen2.5-14b": _size(152064, 5120, 13824, 48, 40, 8, False),
    "qwen2.5-32b": _size(152064, 5120, 27648, 64, 40, 8, False),
    "qwen2.5-72b": _size(152064, 8192, 29568, 80, 64, 8, False),
    "qwen3-0.6b": _size(151936, 1024, 3072, 28, 16, 8, True, **_QWEN3),
    "qwen3-1.7b": _size(151936, 2048, 6144, 28, 16, 8, True, **_QWEN3),
    "qwen3-4b": _size(151936, 2560, 9728, 36, 32, 8, True, **_QWEN3),
    "qwen3-8b": _size(151936, 4096, 12288, 36, 32, 8, False, **_QWEN3),
    "qwen3-14b": _size(151936, 5120, 17408, 40, 40, 8, False, **_QWEN3),
    "qwen3-32b": _size(151936, 5120, 25600, 64, 64, 8, False, **_QWEN3),
    "deepseek-r1-distill-qwen-1.5b": _size(151936, 1536, 8960, 28, 12, 2, False, **_R1),
    "deepseek-r1-distill-qwen-7b": _size(152064, 3584, 18944, 28, 28, 4, False, **_R1),
    "llama-3.2-1b": _size(128256, 2048, 8192, 16, 32, 8, True, **_llama(32.0)),
    "llama-3.2-3b": _size(128256, 3072, 8192, 28, 24, 8, True, **_llama(32.0)),
    "llama-3.1-8b": _size(128256, 4096, 14336, 32, 32, 8, False, **_llama(8.0)),
    "smollm2-135m": _size(
        *(49152, 576, 1536, 30, 9, 3, True),
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        max_positions=8192,
        qkv_bias=False,
    ),
}


def preset(name: str) -> Qwen2Config:
    """Returns the published configuration called `name`.

    Raises:
      UserError: If the name is unknown.
    """
    if name not in PRESETS:
        raise UserError(
            f"model.preset: {name!r} is not the name of a preset; use one of {', '.join(PRESETS)}"
        )
    return PRESETS[name]
