"""Maps the tensors of a Hugging Face checkpoint to the parameters of `model.qwen2`.

Checkpoints store kernels as [out, in] and each layer separately. The kernels of `model.qwen2` are
[in, out] and its layers are stacked. Tied checkpoints do not contain lm_head.
"""

from dataclasses import dataclass
from typing import Any

from bacr_jax.config import ConditioningConfig
from bacr_jax.model.sizes import Qwen2Config

# Module path of each matrix within a layer of a checkpoint.
PLACES = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint, and its place in the parameters of `model.qwen2`.

    Attributes:
      name: name in the checkpoint.
      shape: shape in the checkpoint.
      path: keys of the parameter.
      layer: index on the parameter's leading axis, or None if it is not stacked by layer.
      transposed: True if the parameter is the transpose of the checkpoint's matrix.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int | None = None
    transposed: bool = False

    def leaf_shape(self, num_layers: int) -> tuple[int, ...]:
        """Returns the shape of the parameter, including its layer axis if it has one."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return shape if self.layer is None else (num_layers, *shape)

    def values_in(self, params: dict[str, Any]) -> Any:
        """Returns the tensor's values from the parameters of a model, without transposing them."""
        leaf: Any = params
        for key in self.path:
            leaf = leaf[key]
        return leaf if self.layer is None else leaf[self.layer]


def backbone(config: Qwen2Config) -> list[Entry]:
    """Lists the tensors of a model without its budget module, in the order of their use."""
    width = config.hidden_size
    entries = [Entry("model.embed_tokens.weight", (config.vocab_size, width), ("embed",))]
    for layer in range(config.num_layers):
        entries += _layer_entries(config, layer)
    entries.append(Entry("model.norm.weight", (width,), ("final_norm",)))
    if not config.tie_embeddings:
        entries.append(Entry("lm_head.weight", (config.vocab_size, width), ("lm_head",)))
    return entries


def _layer_entries(config: Qwen2Config, layer: int) -> list[Entry]:
    """Lists the tensors of one layer: first the vectors, then the matrices."""
    # Leaf name and length of each vector, keyed by its name within the layer.
    vectors = {"input_layernorm.weight": ("attention_norm", config.hidden_size)}
    if config.qkv_bias:
        for name in ("q", "k", "v"):
            _, fan_out = config.matrices[name]
            vectors[f"{PLACES[name]}.bias"] = (f"{name}_bias", fan_out)
    if config.qk_norm:
        for name in ("q", "k"):
            vectors[f"self_attn.{name}_norm.weight"] = (f"{name}_norm", config.head_dim)
    vectors["post_attention_layernorm.weight"] = ("mlp_norm", config.hidden_size)

    prefix = f"model.layers.{layer}."
    entries = []
    for name, (leaf, length) in vectors.items():
        entries.append(Entry(prefix + name, (length,), ("layers", leaf), layer))
    for name, (fan_in, fan_out) in config.matrices.items():
        entries.append(
            Entry(
                name=f"{prefix}{PLACES[name]}.weight",
                shape=(fan_out, fan_in),
                path=("layers", f"{name}_kernel"),
                layer=layer,
                transposed=True,
            )
        )
    return entries


def budget_module(config: Qwen2Config, conditioning: ConditioningConfig) -> list[Entry]:
    """Lists the tensors of a budget module. Names and shapes are the same as in the parameters."""
    width = config.hidden_size
    square: tuple[int, ...] = (width, width)
    if conditioning.sharing == "per_layer":
        square = (config.num_layers, width, width)
    shapes = {"w1": square, "w2": square, "gate": (config.num_layers, width)}
    return [Entry(f"budget.{name}", shape, ("budget", name)) for name, shape in shapes.items()]
