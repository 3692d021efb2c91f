"""Every tensor of a checkpoint: its name there, its place here.

Kernels are stored [out, in] there and [in, out] here; layers are stacked here. Tied checkpoints
have no lm_head.
"""

from dataclasses import dataclass
from typing import Any

from bacr_jax.model.sizes import Qwen2Config

Path = tuple[str, ...]


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
    path: Path
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
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = {
        "self_attn.q_proj.bias": ("q_bias", q),
        "self_attn.k_proj.bias": ("k_bias", kv),
        "self_attn.v_proj.bias": ("v_bias", kv),
    }
    norms = {
        "self_attn.q_norm.weight": ("q_norm", config.head_dim),
        "self_attn.k_norm.weight": ("k_norm", config.head_dim),
    }
    vectors = {
        "input_layernorm.weight": ("attention_norm", d),
        **(biases if config.qkv_bias else {}),
        **(norms if config.qk_norm else {}),
        "post_attention_layernorm.weight": ("mlp_norm", d),
    }
    matrices = {
        "self_attn.q_proj.weight": ("q_kernel", (q, d)),
        "self_attn.k_proj.weight": ("k_kernel", (kv, d)),
        "self_attn.v_proj.weight": ("v_kernel", (kv, d)),
        "self_attn.o_proj.weight": ("o_kernel", (d, q)),
        "mlp.gate_proj.weight": ("gate_kernel", (f, d)),
        "mlp.up_proj.weight": ("up_kernel", (f, d)),
        "mlp.down_proj.weight": ("down_kernel", (d, f)),
    }
    entries = [Entry("model.embed_tokens.weight", (config.vocab_size, d), ("embed",))]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (leaf, size) in vectors.items():
            entries.append(Entry(prefix + name, (size,), ("layers", leaf), layer))
        for name, (leaf, shape) in matrices.items():
            entries.append(Entry(prefix + name, shape, ("layers", leaf), layer, transposed=True))
    entries.append(Entry("model.norm.weight", (d,), ("final_norm",)))
    if not config.tie_embeddings:
        entries.append(Entry("lm_head.weight", (config.vocab_size, d), ("lm_head",)))
    return entries


def budget_module(config: Qwen2Config, *, per_layer: bool) -> list[Entry]:
    """Tensors of a budget module, stored as they stand here."""
    d, layers = config.hidden_size, config.num_layers
    square = (layers, d, d) if per_layer else (d, d)
    shapes = {"w1": square, "w2": square, "gate": (layers, d)}
    return [Entry(f"budget.{name}", shape, ("budget", name)) for name, shape in shapes.items()]
