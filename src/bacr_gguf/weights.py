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
from bacr_jax.model.hf import names
from bacr_jax.model.hf.archive import Stored
from bacr_jax.model.hf.hf_config import FAMILIES, parse_config
from bacr_jax.model.hf.names import Entry

CLASSES = {kind: FAMILIES[kind].plain for kind in ("llama", "qwen2", "qwen3")}
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
_CAUSAL, _VOCAB = "attention.causal", "vocab_size"
_READ = {*_SHAPE.values(), *_HEAD, _THETA, _EPS, _CAUSAL, _VOCAB}
# Values of other keys with which llama.cpp computes as without the key.
_NEUTRAL = (0, "", "none")
# Keys whose neutral value is 1: what they multiply or divide.
_FACTORS = ("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear")
# What llama.cpp calls the places of tensors.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def _source(entry: Entry) -> str:
    """A tensor's name in the file."""
    place, part = entry.name.removeprefix(f"model.layers.{entry.layer}.").rsplit(".", 1)
    return f"{'' if entry.layer is None else f'blk.{entry.layer}.'}{_NAMES[place]}.{part}"


def _check_settings(file: GgufFile, kind: str) -> None:
    """Refuses a file whose settings ask for another computation than the plain model's."""
    prefix = f"{kind}."
    for key, value in file.settings.items():
        name = key.removeprefix(prefix)
        if name == key or name in _READ:
            continue
        neutral = (*_NEUTRAL, 1) if name in _FACTORS else _NEUTRAL
        if value not in neutral:
            raise Unusable(f"{shown(key)} is {shown(value)}, which is not supported")
    if not file.setting(prefix + _CAUSAL, bool, True):
        raise Unusable(f"{prefix + _CAUSAL} is false, which is not supported; only true is")


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the shape of a plain model, as config.json has it; Unusable: it is another model."""
    kind = file.setting("general.architecture", str)
    if kind not in CLASSES:
        raise Unusable(f"general.architecture is {shown(kind)}, not one of {', '.join(CLASSES)}")
    _check_settings(file, kind)

    def number(key: str, default: float | None = None, of: type = int) -> Any:
        value = file.setting(f"{kind}.{key}", of, default)
        if not 0 < value <= 1 << 28:
            raise Unusable(f"{kind}.{key} is {shown(value)}, not a number up to 2^28")
        return value

    heads = number("attention.head_count")
    shape = {name: number(key, heads if "_kv" in key else None) for name, key in _SHAPE.items()}
    size, *others = (number(key, shape["hidden_size"] // heads) for key in _HEAD)
    if {size} != {*others} or size % 2 or heads % shape["num_key_value_heads"]:
        groups = f"{heads} heads and {shape['num_key_value_heads']} of keys"
        raise Unusable(f"heads of width {size}, {others} don't fit together, or {groups} don't")
    if shape["num_hidden_layers"] > len(file.tensors) or "token_embd.weight" not in file.tensors:
        raise Unusable("it has fewer tensors than its layers need")
    rows = file.tensors["token_embd.weight"].shape[0]
    if (vocabulary := file.setting(f"{kind}.{_VOCAB}", int, rows)) != rows:
        raise Unusable(f"{kind}.{_VOCAB} is {vocabulary}, but its embedding has {rows:,} rows")
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **shape,
        "head_dim": size,
        "vocab_size": rows,
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
    entries = names.backbone(parse_config(config, file.path))
    wanted = {_source(entry): entry.name for entry in entries}
    needs = {_source(entry): entry.shape for entry in entries}
    has = {source: tensor.shape for source, tensor in file.tensors.items()}
    for source in sorted(needs.keys() | has.keys()):
        if (theirs := has.get(source)) != (ours := needs.get(source)):
            raise Unusable(f"{shown(source)} has axes {theirs}, and in a plain {kind} model {ours}")
    found: list[Stored] = []
    for source, name in wanted.items():
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
