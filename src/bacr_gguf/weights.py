"""Converts the config and the tensors of a GGUF file to the format of transformers.

The conversion renames keys and tensors, and restores the row order that llama.cpp changes. `folder`
calls `hf_config` and `tensors`. Tensors are dequantised one at a time by the package `gguf`, while
the folder is written.
"""

import dataclasses
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
from bacr_jax.errors import UserError
from bacr_jax.model.hf import names
from bacr_jax.model.hf.archive import Stored
from bacr_jax.model.hf.hf_config import FAMILIES, parse_config
from bacr_jax.model.hf.names import Entry

# Name of the transformers model class for each supported architecture.
CLASSES = {kind: FAMILIES[kind].plain for kind in ("llama", "qwen2", "qwen3")}
# Supported dtypes of the written weights, with their name in safetensors and their NumPy dtype.
DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16)}
# Keys of config.json, mapped to GGUF keys without the architecture prefix.
_SHAPE = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
# GGUF keys for the width of a head. All of them must have the same value.
_KEY_WIDTH = "attention.key_length"
_VALUE_WIDTH = "attention.value_length"
_ROTATED_WIDTH = "rope.dimension_count"
_HEAD_WIDTH = (_KEY_WIDTH, _VALUE_WIDTH, _ROTATED_WIDTH)
_THETA = "rope.freq_base"
_EPSILON = "attention.layer_norm_rms_epsilon"
_CAUSAL = "attention.causal"
_VOCAB_SIZE = "vocab_size"
_SUPPORTED = {*_SHAPE.values(), *_HEAD_WIDTH, _THETA, _EPSILON, _CAUSAL, _VOCAB_SIZE}
# Other settings with one of these values are ignored, because llama.cpp computes the same results
# without the setting.
_NEUTRAL = (0, "", "none")
# Settings that are used as a factor. They are also ignored if their value is 1.
_FACTORS = ("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear")
_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
# Maximum value of a number in the config.
_LARGEST = 1 << 28
# Maximum difference of two matrices, relative to their norm, that quantisation can explain. The
# coarsest supported types have four bits, which change normally distributed values by less than 10
# %.
_MOST_BY_QUANTISATION = 0.15
# Number of bytes that are dequantised at a time.
_CHUNK = 16 << 20
# Maximum number of progress lines during a conversion.
_PROGRESS_LINES = 10
# Names of modules in transformers, mapped to their names in llama.cpp.
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
    """Returns the GGUF name of a transformers tensor."""
    name = entry.name.removeprefix(f"model.layers.{entry.layer}.")
    module, _, part = name.rpartition(".")
    source = f"{_NAMES[module]}.{part}"
    return source if entry.layer is None else f"blk.{entry.layer}.{source}"


def _check_settings(file: GgufFile, kind: str) -> None:
    """Rejects a file with settings that change the model's computation in an unsupported way.

    Raises:
      GgufError: if a setting is not supported, for example scaled RoPE or a sliding window.
    """
    prefix = f"{kind}."
    for key, value in file.settings.items():
        name = key.removeprefix(prefix)
        if name == key or name in _SUPPORTED:
            continue
        neutral = (*_NEUTRAL, 1) if name in _FACTORS else _NEUTRAL
        if value not in neutral:
            raise GgufError(f"the setting {shown(key)} is {shown(value)}, which is not supported")
    if not file.setting(prefix + _CAUSAL, bool, True):
        raise GgufError(
            f"the setting {prefix + _CAUSAL!r} is false, but only models with causal attention "
            "(true) are supported"
        )


def _positive(
    file: GgufFile,
    key: str,
    kind: type,
    default: float | None = None,
) -> Any:
    """Returns a numeric setting, which must be in the range (0, 2^28].

    Raises:
      GgufError: if the setting is missing and has no default, has the wrong type, or is out of
        range.
    """
    value = file.setting(key, kind, default)
    if not 0 < value <= _LARGEST:
        raise GgufError(
            f"the setting {key!r} is {shown(value)}, but must be above 0 and at most 2^28"
        )
    return value


def _head_width(file: GgufFile, kind: str, shape: dict[str, int]) -> int:
    """Returns the width of a head from the file, or hidden size / number of heads if it is missing.

    As in llama.cpp, the number of rotated dimensions is the width of a key if it is missing.

    Raises:
      GgufError: if the file contains different widths or an odd width, or if the number of heads is
        not a multiple of the number of key-value heads.
    """
    heads = shape["num_attention_heads"]
    key_heads = shape["num_key_value_heads"]
    default = shape["hidden_size"] // heads
    width = _positive(file, f"{kind}.{_KEY_WIDTH}", int, default)
    others = [
        _positive(file, f"{kind}.{_VALUE_WIDTH}", int, default),
        _positive(file, f"{kind}.{_ROTATED_WIDTH}", int, width),
    ]
    same_width = all(other == width for other in others)
    if not same_width or width % 2 or heads % key_heads:
        raise GgufError(
            f"the sizes of the attention heads are inconsistent ({heads} query heads, {key_heads} "
            f"key heads, widths {width} and {others}). The widths must be equal and even, and the "
            "number of query heads must be a multiple of the number of key heads"
        )
    return width


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Builds the content of config.json for the model in a GGUF file.

    Raises:
      GgufError: if the model is not a plain Llama, Qwen2 or Qwen3 model, or if its sizes are
        inconsistent.
    """
    kind = file.setting("general.architecture", str)
    if kind not in CLASSES:
        raise GgufError(
            f"the setting 'general.architecture' is {shown(kind)}, but must be one of "
            f"{', '.join(CLASSES)}"
        )
    _check_settings(file, kind)
    heads = _positive(file, f"{kind}.attention.head_count", int)
    shape = {}
    for name, key in _SHAPE.items():
        # If the setting is missing, the number of key-value heads equals the number of query heads.
        default = heads if name == "num_key_value_heads" else None
        shape[name] = _positive(file, f"{kind}.{key}", int, default)
    head_width = _head_width(file, kind, shape)
    if shape["num_hidden_layers"] > len(file.tensors) or _EMBEDDING not in file.tensors:
        raise GgufError(
            "the file has fewer tensors than the model's number of layers requires, or no embedding"
        )
    rows = file.tensors[_EMBEDDING].shape[0]
    vocab_size = file.setting(f"{kind}.{_VOCAB_SIZE}", int, rows)
    if vocab_size != rows:
        raise GgufError(
            f"the setting '{kind}.{_VOCAB_SIZE}' is {vocab_size}, but the embedding has {rows:,} "
            "rows"
        )
    epsilon = np.float32(_positive(file, f"{kind}.{_EPSILON}", float))
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **shape,
        "head_dim": head_width,
        "vocab_size": rows,
        "rope_theta": _positive(file, f"{kind}.{_THETA}", float, 10000.0),
        # Use the shortest decimal representation of the float32 value, for example 1e-05 instead of
        # 9.999999747378752e-06.
        "rms_norm_eps": float(str(epsilon)),
        "tie_word_embeddings": _HEAD not in file.tensors,
        # The version of transformers whose config layout is used. If the entry is missing,
        # transformers warns about Mistral tokenizers.
        "transformers_version": "4.57.0",
    }


def tied(file: GgufFile) -> GgufFile:
    """Returns the header without the output matrix, for a model that ties it to the embedding.

    llama.cpp can quantise the embedding of a tied model twice, with different types, and store one
    result as the output matrix. Both matrices then differ by quantisation alone. The one with more
    bytes is used as the embedding, because it is closer to the values before quantisation.

    Raises:
      UserError: if the file has no output matrix, or if it differs by more than quantisation.
    """
    head = file.tensors.get(_HEAD)
    if head is None:
        raise UserError(
            f"--tie: {file.path} has no output matrix, so the model already uses its embedding as "
            "the output matrix; leave out the option"
        )
    embedding = file.tensors[_EMBEDDING]
    if head.shape != embedding.shape:
        raise UserError(
            f"--tie: the output matrix of {file.path} has the shape {head.shape} and the "
            f"embedding {embedding.shape}, so one can't replace the other; leave out the option"
        )
    difference = relative_difference(file.path, head, embedding)
    if not difference <= _MOST_BY_QUANTISATION:
        raise UserError(
            f"--tie: the output matrix and the embedding of {file.path} differ by "
            f"{difference:.0%} of their norm. Quantization explains at most "
            f"{_MOST_BY_QUANTISATION:.0%}, so they are different matrices; leave out the option"
        )
    finer = head if head.num_bytes > embedding.num_bytes else embedding
    kept = {name: tensor for name, tensor in file.tensors.items() if name != _HEAD}
    kept[_EMBEDDING] = finer._replace(name=_EMBEDDING)
    return dataclasses.replace(file, tensors=kept)


def relative_difference(path: Path, one: TensorEntry, other: TensorEntry) -> float:
    """Returns the norm of the difference of two matrices, divided by the norm of the second one.

    The matrices are dequantised in chunks of rows.

    Args:
      path: path of the GGUF file.
      one, other: descriptions of matrices with equal shapes.
    """
    rows, _ = other.shape
    chunk_rows = max(1, _CHUNK * rows // max(one.num_bytes, other.num_bytes))
    squares = 0.0
    norm = 0.0
    # Values in damaged blocks may overflow. They are rejected when they are written.
    with np.errstate(all="ignore"):
        for start in range(0, rows, chunk_rows):
            chunks = [
                _dequantised_rows(path, entry, start, start + chunk_rows) for entry in (one, other)
            ]
            squares += float(np.square(chunks[0] - chunks[1], dtype=np.float64).sum())
            norm += float(np.square(chunks[1], dtype=np.float64).sum())
    return math.sqrt(squares / norm) if norm else math.inf


def _dequantised_rows(path: Path, tensor: TensorEntry, start: int, stop: int) -> np.ndarray:
    """Returns the dequantised rows of a matrix from `start` to `stop`."""
    rows = tensor.shape[0]
    raw = np.memmap(path, np.uint8, "r", tensor.start, (rows, tensor.num_bytes // rows))
    return dequantize(np.array(raw[start:stop]), tensor.kind)


def tensors(file: GgufFile, config: dict[str, Any], dtype: str) -> list[Stored]:
    """Returns all tensors to write. Each one is dequantised only when it is fetched.

    Args:
      file: header of the GGUF file.
      config: result of `hf_config`.
      dtype: dtype of the written weights, a key of DTYPES.

    Raises:
      GgufError: if the names or shapes of the tensors in the file differ from a plain model with
        this config.
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
                f"the tensor {shown(source)} has the shape {shape}, but in a plain {kind} model "
                f"it has {expected} (None if it does not exist)"
            )
    stored_name, numpy_type = DTYPES[dtype]
    lines_apart = len(entries) // _PROGRESS_LINES + 1
    stored = []
    for index, (source, entry) in enumerate(entries.items()):
        tensor = file.tensors[source]
        # llama.cpp reorders the rows of query and key projections only for Llama models.
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
    """Returns the dequantised values of a tensor.

    Args:
      path: path of the GGUF file.
      tensor: description of the tensor in the header.
      dtype: NumPy dtype of the result.
      heads: number of heads whose rows are restored to the order of transformers. If 0, the rows
        are not reordered.
      progress: message to print to stderr before dequantising. If empty, nothing is printed.

    Raises:
      GgufError: if a value is NaN or infinite.
    """
    if progress:
        print(progress, file=sys.stderr)
    *outer_axes, width = tensor.shape
    rows = math.prod(outer_axes)
    row_bytes = tensor.num_bytes // rows
    raw = np.memmap(path, np.uint8, "r", tensor.start, (rows, row_bytes))
    values = np.empty((rows, width), dtype)
    chunk_rows = max(1, _CHUNK // row_bytes)
    # Values in damaged blocks may overflow. They are rejected below.
    with np.errstate(all="ignore"):
        for start in range(0, rows, chunk_rows):
            chunk = np.array(raw[start : start + chunk_rows])
            values[start : start + chunk_rows] = dequantize(chunk, tensor.kind)
    if not np.isfinite(values).all():
        raise GgufError(
            f"the tensor {tensor.name!r} contains NaN or infinite values after conversion to "
            f"{np.dtype(dtype)}"
        )
    if heads:
        # llama.cpp rotates adjacent rows. It therefore stores rows i and i + H/2 of each head next
        # to each other.
        values = values.reshape(heads, -1, 2, width).swapaxes(1, 2)
    return values.reshape(tensor.shape)
