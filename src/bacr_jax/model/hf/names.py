"""Every tensor of a checkpoint: its name there, its place here.

Kernels are stored [out, in] there and [in, out] here; layers are stacked here. Tied checkpoints
have no lm_head.
"""

from dataclasses import dataclass
from typing import Any

from bacr_jax.config import ConditioningConfig
from bacr_jax.model.sizes import Qwen2Config

# Where a layer of a checkpoint holds its matrices.
PLACES = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
      path: of our leaf in the parameters.
      layer: which slice of the leaf's leading axis it is; None: the whole leaf.
      transposed: our matrix is its transpose.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int | None = None
    transposed: bool = False

    def leaf_shape(self, num_layers: int) -> tuple[int, ...]:
        """Shape of the whole leaf."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return shape if self.layer is None else (num_layers, *shape)

    def values_in(self, params: dict[str, Any]) -> Any:
        """Its values, in our orientation."""
        leaf: Any = params
        for key in self.path:
            leaf = leaf[key]
        return leaf if self.layer is None else leaf[self.layer]


def backbone(config: Qwen2Config) -> list[Entry]:
    """Tensors of the plain model with this shape, in the order of the computation."""
    d, matrices = config.hidden_size, config.matrices
    vectors = {"input_layernorm.weight": ("attention_norm", d)}
    if config.qkv_bias:
        vectors |= {f"{PLACES[x]}.bias": (f"{x}_bias", matrices[x][1]) for x in "qkv"}
    if config.qk_norm:
        vectors |= {f"self_attn.{x}_norm.weight": (f"{x}_norm", config.head_dim) for x in "qk"}
    vectors["post_attention_layernorm.weight"] = ("mlp_norm", d)
    entries = [Entry("model.embed_tokens.weight", (config.vocab_size, d), ("embed",))]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (leaf, size) in vectors.items():
            entries.append(Entry(prefix + name, (size,), ("layers", leaf), layer))
        for name, (fan_in, fan_out) in matrices.items():
            full, path = f"{prefix}{PLACES[name]}.weight", ("layers", f"{name}_kernel")
            entries.append(Entry(full, (fan_out, fan_in), path, layer, transposed=True))
    entries.append(Entry("model.norm.weight", (d,), ("final_norm",)))
    if not config.tie_embeddings:
        entries.append(Entry("lm_head.weight", (config.vocab_size, d), ("lm_head",)))
    return entries


def budget_module(config: Qwen2Config, conditioning: ConditioningConfig) -> list[Entry]:
    """Tensors of a budget module, stored as they stand here."""
    d, layers = config.hidden_size, config.num_layers
    square = (layers, d, d) if conditioning.sharing == "per_layer" else (d, d)
    shapes = {"w1": square, "w2": square, "gate": (layers, d)}
    return [Entry(f"budget.{name}", shape, ("budget", name)) for name, shape in shapes.items()]
