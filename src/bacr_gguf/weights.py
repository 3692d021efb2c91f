"""Shape and weights: llama.cpp's names and order become those of transformers."""

import functools
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.quants import dequantize

from bacr_gguf.container import GgufFile, Tensor, Unusable
from bacr_jax.config.values import shown
from bacr_jax.model.hf.archive import Stored

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16)}
# Keys of config.json, and of the file after the architecture's name.
_SHAPE = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_THETA, _EPS = "rope.freq_base", "attention.layer_norm_rms_epsilon"
# A layer's tensors: names in both, and axes: width d, MLP f, queries q, keys k, a head h.
_LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", "d"),
    "attn_q.weight": ("self_attn.q_proj.weight", "qd"),
    "attn_k.weight": ("self_attn.k_proj.weight", "kd"),
    "attn_v.weight": ("self_attn.v_proj.weight", "kd"),
    "attn_output.weight": ("self_attn.o_proj.weight", "dq"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "d"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "fd"),
    "ffn_up.weight": ("mlp.up_proj.weight", "fd"),
    "ffn_down.weight": ("mlp.down_proj.weight", "df"),
}
_OWN = {
    "qwen2": {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", y) for x, y in ("qq", "kk", "vk")},
    "qwen3": {f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", "h") for x in "qk"},
}


def hf_config(file: GgufFile) -> dict[str, Any]:
    """What config.json says of the shape; Unusable: it is not that of a plain model."""
    kind = file.setting("general.architecture", str)
    if kind not in CLASSES:
        raise Unusable(f"general.architecture is {shown(kind)}, not one of {', '.join(CLASSES)}")
    for key, value in file.settings.items():
        own = key.removeprefix(f"{kind}.")
        known = (*_SHAPE.values(), *_HEAD, _THETA, _EPS, "vocab_size")
        if own not in (key, *known) and value not in (0, "", "none"):
            raise Unusable(f"{shown(key)} is {shown(value)}, which is not supported")

    def number(key: str, default: float | None = None, of: type = int) -> Any:
        value = file.setting(f"{kind}.{key}", of, default)
        if not 0 < value <= 1 << 28:
            raise Unusable(f"{kind}.{key} is {shown(value)}, not a number up to 2^28")
        return value

    heads = number("attention.head_count")
    shape = {name: number(key, heads if "_kv" in key else None) for name, key in _SHAPE.items()}
    size, *others = (number(key, shape["hidden_size"] // heads) for key in _HEAD)
    if {size} != {*others} or size % 2 or heads % shape["num_key_value_heads"]:
        raise Unusable(f"heads of width {size}, {others} don't fit together, or into {shape}")
    if shape["num_hidden_layers"] > len(file.tensors) or "token_embd.weight" not in file.tensors:
        raise Unusable("it has fewer tensors than its layers need")
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **shape,
        "head_dim": size,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rope_theta": number(_THETA, 10000.0, float),
        # The shortest number that is this float32: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(number(_EPS, of=float)))),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # The layout's, not the writer's: without it transformers warns of Mistral's tokenizers.
        "transformers_version": "4.57.0",
    }


def tensors(file: GgufFile, config: dict[str, Any], dtype: str) -> list[Stored]:
    """All weights, dequantised when their turn comes; Unusable: not those that the shape needs."""
    kind, size = config["model_type"], config["head_dim"]
    q, k = (size * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    d, f, v = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    axes = {"d": d, "f": f, "q": q, "k": k, "h": size, "v": v}
    wanted = {"token_embd.weight": ("model.embed_tokens.weight", "vd")}
    for layer in range(config["num_hidden_layers"]):
        for source, (name, letters) in (_LAYER | _OWN.get(kind, {})).items():
            wanted[f"blk.{layer}.{source}"] = f"model.layers.{layer}.{name}", letters
    wanted["output_norm.weight"] = "model.norm.weight", "d"
    if not config["tie_word_embeddings"]:
        wanted["output.weight"] = "lm_head.weight", "vd"
    needs = {source: tuple(axes[x] for x in letters) for source, (_, letters) in wanted.items()}
    has = {source: tensor.shape for source, tensor in file.tensors.items()}
    for source in sorted(needs.keys() | has.keys()):
        if (theirs := has.get(source)) != (ours := needs.get(source)):
            raise Unusable(f"{shown(source)} has axes {theirs}, and in a plain {kind} model {ours}")
    found: list[Stored] = []
    for source, (name, _) in wanted.items():
        turned = kind == "llama" and source.endswith(("attn_q.weight", "attn_k.weight"))
        heads, tenth = has[source][0] // size * turned, len(wanted) // 10 + 1
        said = "" if len(found) % tenth else f"dequantised {len(found)} of {len(wanted)} tensors"
        how = (DTYPES[dtype][1], heads, said)
        fetch = functools.partial(values, file.path, file.tensors[source], *how)
        found.append(Stored(name, has[source], DTYPES[dtype][0], fetch))
    return found


def values(path: Path, tensor: Tensor, dtype: Any, heads: int = 0, said: str = "") -> np.ndarray:
    """Dequantised values of a tensor, after a word on stderr; Unusable: some are not finite."""
    if said:
        print(said, file=sys.stderr)
    rows = int(np.prod(tensor.shape[:-1]))
    raw = np.memmap(path, np.uint8, "r", tensor.start, (rows, tensor.num_bytes // rows))
    found = np.empty((rows, tensor.shape[-1]), dtype)
    step = max(1, (16 << 20) // raw.shape[1])
    with np.errstate(all="ignore"):
        for at in range(0, rows, step):
            found[at : at + step] = dequantize(np.array(raw[at : at + step]), tensor.kind)
    if not np.isfinite(found).all():
        raise Unusable(f"{tensor.name} holds values that are no finite {np.dtype(dtype)}")
    # llama.cpp rotates neighbours, and so stores rows i and i + H/2 of each head side by side.
    if heads:
        found = found.reshape(heads, -1, 2, tensor.shape[-1]).swapaxes(1, 2)
    return found.reshape(tensor.shape)
