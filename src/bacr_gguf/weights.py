"""Translates config and tensors of a GGUF file: llama.cpp's names and row order to transformers'.

`folder` calls `hf_config` and `tensors`. The package `gguf` dequantises one tensor at a time, while
the folder is written.
"""

import functools
import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.quants import dequantize

from bacr_gguf.container import GgufError, GgufFile, TensorEntry
from bacr_jax.config.values import shown
from bacr_jax.model.hf import names
from bacr_jax.model.hf.archive import Stored
from bacr_jax.model.hf.hf_config import FAMILIES, parse_config
from bacr_jax.model.hf.names import Entry

CLASSES = {kind: FAMILIES[kind].plain for kind in ("llama", "qwen2", "qwen3")}
# Types of the written weights: the name in safetensors, and NumPy's type.
DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16)}
# Keys of config.json, and the file's keys without the architecture's name.
_SHAPE = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
# Keys of the width of a head, which must all have the same value.
_HEAD_WIDTH = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_THETA = "rope.freq_base"
_EPSILON = "attention.layer_norm_rms_epsilon"
_CAUSAL = "attention.causal"
_VOCAB_SIZE = "vocab_size"
_SUPPORTED = {*_SHAPE.values(), *_HEAD_WIDTH, _THETA, _EPSILON, _CAUSAL, _VOCAB_SIZE}
# Values of other keys with which llama.cpp computes the same as without the key.
_NEUTRAL = (0, "", "none")
# Keys that multiply or divide, for which 1 is neutral too.
_FACTORS = ("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear")
_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
# Largest number in a shape.
_LARGEST = 1 << 28
# Bytes that are dequantised at once.
_CHUNK = 16 << 20
# Progress lines of a conversion, at most.
_PROGRESS_LINES = 10
# llama.cpp's names of transformers' modules.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _source_name(entry: Entry) -> str:
    """Returns the name in the GGUF file of a tensor of transformers."""
    name = entry.name.removeprefix(f"model.layers.{entry.layer}.")
    module, _, part = name.rpartition(".")
    source = f"{_NAMES[module]}.{part}"
    return source if entry.layer is None else f"blk.{entry.layer}.{source}"


def _check_settings(file: GgufFile, kind: str) -> None:
    """Checks that no setting changes the computation of the plain model of an architecture.

    Raises:
      GgufError: a setting does, for example a scaled RoPE or a sliding window.
    """
    prefix = f"{kind}."
    for key, value in file.settings.items():
        name = key.removeprefix(prefix)
        if name == key or name in _SUPPORTED:
            continue
        neutral = (*_NEUTRAL, 1) if name in _FACTORS else _NEUTRAL
        if value not in neutral:
            raise GgufError(f"{shown(key)} is {shown(value)}, which is not supported")
    if not file.setting(prefix + _CAUSAL, bool, True):
        raise GgufError(f"{prefix + _CAUSAL} is false, which is not supported; only true is")


def _positive(
    file: GgufFile,
    key: str,
    kind: type,
    default: float | None = None,
) -> Any:
    """Returns a number of the file in (0, 2^28].

    Raises:
      GgufError: it is missing without a default, has another type, or is out of range.
    """
    value = file.setting(key, kind, default)
    if not 0 < value <= _LARGEST:
        raise GgufError(f"{key} is {shown(value)}, not a number up to 2^28")
    return value


def _head_width(file: GgufFile, kind: str, shape: dict[str, int]) -> int:
    """Returns the width of a head, from the file or as hidden size / heads.

    Raises:
      GgufError: widths differ or are odd, or key heads do not divide the heads.
    """
    heads = shape["num_attention_heads"]
    key_heads = shape["num_key_value_heads"]
    default = shape["hidden_size"] // heads
    width, *others = (_positive(file, f"{kind}.{key}", int, default) for key in _HEAD_WIDTH)
    same_width = all(other == width for other in others)
    if not same_width or width % 2 or heads % key_heads:
        raise GgufError(
            f"heads of width {width}, {others} don't fit together, or {heads} heads and "
            f"{key_heads} of keys don't"
        )
    return width


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the content of config.json for the model of a file.

    Raises:
      GgufError: it is not a plain Llama, Qwen2 or Qwen3 model, or its numbers do not fit together.
    """
    kind = file.setting("general.architecture", str)
    if kind not in CLASSES:
        raise GgufError(f"general.architecture is {shown(kind)}, not one of {', '.join(CLASSES)}")
    _check_settings(file, kind)
    heads = _positive(file, f"{kind}.attention.head_count", int)
    shape = {}
    for name, key in _SHAPE.items():
        # Without a number of key heads there are as many as query heads.
        default = heads if name == "num_key_value_heads" else None
        shape[name] = _positive(file, f"{kind}.{key}", int, default)
    head_width = _head_width(file, kind, shape)
    if shape["num_hidden_layers"] > len(file.tensors) or _EMBEDDING not in file.tensors:
        raise GgufError("it has fewer tensors than its layers need")
    rows = file.tensors[_EMBEDDING].shape[0]
    vocab_size = file.setting(f"{kind}.{_VOCAB_SIZE}", int, rows)
    if vocab_size != rows:
        raise GgufError(
            f"{kind}.{_VOCAB_SIZE} is {vocab_size}, but its embedding has {rows:,} rows"
        )
    epsilon = np.float32(_positive(file, f"{kind}.{_EPSILON}", float))
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **shape,
        "head_dim": head_width,
        "vocab_size": rows,
        "rope_theta": _positive(file, f"{kind}.{_THETA}", float, 10000.0),
        # The shortest decimal number of this float32: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(str(epsilon)),
        "tie_word_embeddings": _HEAD not in file.tensors,
        # The version of this layout. Without it transformers warns about Mistral's tokenizers.
        "transformers_version": "4.57.0",
    }


def tensors(file: GgufFile, config: dict[str, Any], dtype: str) -> list[Stored]:
    """Returns all tensors to write; each is dequantised when it is fetched.

    Args:
      config: result of `hf_config`.
      dtype: type of the written weights, a key of DTYPES.

    Raises:
      GgufError: the file does not have exactly the tensors of such a model, in their shapes.
    """
    kind = config["model_type"]
    entries = {}
    for entry in names.backbone(parse_config(config, file.path)):
        entries[_source_name(entry)] = entry
    for source in sorted(entries.keys() | file.tensors.keys()):
        shape = file.tensors[source].shape if source in file.tensors else None
        expected = entries[source].shape if source in entries else None
        if shape != expected:
            raise GgufError(
                f"{shown(source)} has axes {shape}, and in a plain {kind} model {expected}"
            )
    stored_name, numpy_type = DTYPES[dtype]
    lines_apart = len(entries) // _PROGRESS_LINES + 1
    stored = []
    for index, (source, entry) in enumerate(entries.items()):
        tensor = file.tensors[source]
        # llama.cpp reorders queries and keys of the Llama family only.
        heads = 0
        if kind == "llama" and source.endswith(("attn_q.weight", "attn_k.weight")):
            heads = tensor.shape[0] // config["head_dim"]
        progress = ""
        if index % lines_apart == 0:
            progress = f"dequantised {index} of {len(entries)} tensors"
        fetch = functools.partial(
            dequantised,
            file.path,
            tensor,
            numpy_type,
            heads=heads,
            progress=progress,
        )
        stored.append(Stored(entry.name, tensor.shape, stored_name, fetch))
    return stored


def dequantised(
    path: Path,
    tensor: TensorEntry,
    dtype: Any,
    heads: int = 0,
    progress: str = "",
) -> np.ndarray:
    """Returns the dequantised values of a tensor, in its shape.

    Args:
      heads: heads of the tensor's rows, to undo llama.cpp's order of rows; 0 to keep the order.
      progress: a line for stderr before the work; "" prints nothing.

    Raises:
      GgufError: a value is NaN or infinite.
    """
    if progress:
        print(progress, file=sys.stderr)
    *outer_axes, width = tensor.shape
    rows = math.prod(outer_axes)
    row_bytes = tensor.num_bytes // rows
    raw = np.memmap(path, np.uint8, "r", tensor.start, (rows, row_bytes))
    values = np.empty((rows, width), dtype)
    chunk_rows = max(1, _CHUNK // row_bytes)
    # Damaged blocks overflow; they are refused below.
    with np.errstate(all="ignore"):
        for start in range(0, rows, chunk_rows):
            chunk = np.array(raw[start : start + chunk_rows])
            values[start : start + chunk_rows] = dequantize(chunk, tensor.kind)
    if not np.isfinite(values).all():
        raise GgufError(f"{tensor.name} has values that are not finite in {np.dtype(dtype)}")
    if heads:
        # llama.cpp rotates neighbouring rows, and so stores rows i and i + H/2 of each head next
        # to each other.
        values = values.reshape(heads, -1, 2, width).swapaxes(1, 2)
    return values.reshape(tensor.shape)
