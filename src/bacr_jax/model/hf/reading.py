"""Loads the parameters of a Hugging Face folder, one tensor at a time."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bacr_jax.errors import UserError
from bacr_jax.model.hf import archive as archives
from bacr_jax.model.hf import hf_config, names, vocabulary
from bacr_jax.model.hf.archive import Archive, Header
from bacr_jax.model.hf.names import Entry
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

ShardingOf = Callable[[str, tuple[int, ...]], Sharding | None]

_LM_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"
# Suffix of a buffer in every layer of older Llama checkpoints. transformers ignores it too.
_COMPUTED = ".rotary_emb.inv_freq"
# Number of rows of lm_head and of the embedding that are loaded at a time to compare them.
_ROWS_COMPARED = 8192


def _layer_sharding(sharding: Sharding | None) -> Sharding | None:
    """Returns the sharding of a single layer, given the sharding of a stacked leaf."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _load_tensor(
    archive: Archive, entry: Entry, dtype: Any, sharding: Sharding | None
) -> jax.Array:
    """Loads one tensor of a checkpoint onto its devices. Kernels are loaded as [in, out].

    With a sharding, each device's part is read separately from the file.
    """
    shape = entry.shape[::-1] if entry.transposed else entry.shape
    with archives.opened(archive[entry.name].file) as file:
        tensor = file.get_slice(entry.name)

        def read_part(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or ()
            values = tensor[index[::-1]].T if entry.transposed else tensor[index]
            return np.ascontiguousarray(values).astype(dtype, copy=False)

        if sharding is None:
            everything = tuple(slice(0, size) for size in shape)
            array = jnp.asarray(read_part(everything))
        else:
            array = jax.make_array_from_callback(shape, sharding, read_part)
        # A transfer keeps its host copy alive until it is done. Waiting here limits this to one
        # copy.
        return array.block_until_ready()


@functools.cache
def _layer_writer(sharding: Sharding | None) -> Callable[..., jax.Array]:
    """Returns a compiled function of (stack, layer, index) that sets stack[index] = layer.

    The buffer of the stack is donated, so it is updated in place.
    """

    def write_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)

    return jax.jit(write_layer, donate_argnums=(0,), out_shardings=sharding)


@functools.cache
def _zeros(sharding: Sharding | None) -> Callable[..., jax.Array]:
    """Returns a compiled function of (shape, dtype) that allocates zeros on the devices."""
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)


def _drop_copied_lm_head(archive: Archive, folder: Path) -> None:
    """Removes lm_head from the archive of a tied checkpoint if it equals the embedding.

    Some tied checkpoints store a second copy of the embedding as lm_head.

    Raises:
      UserError: If lm_head differs from the embedding.
    """
    lm_head = archive.pop(_LM_HEAD)
    embed = archive.get(_EMBED)
    if embed is None or lm_head.shape != embed.shape or not _has_equal_rows(lm_head, embed):
        raise UserError(
            f"{folder}: the weights contain {_LM_HEAD}, which differs from the embedding, "
            "although config.json has `tie_word_embeddings: true`; set `tie_word_embeddings` to "
            "false there"
        )


def _has_equal_rows(lm_head: Header, embed: Header) -> bool:
    """True if lm_head and the embedding have the same values, compared one block at a time."""
    num_rows = lm_head.shape[0]
    with archives.opened(lm_head.file) as head_file, archives.opened(embed.file) as embed_file:
        head_rows = head_file.get_slice(_LM_HEAD)
        embed_rows = embed_file.get_slice(_EMBED)
        for start in range(0, num_rows, _ROWS_COMPARED):
            rows = slice(start, min(start + _ROWS_COMPARED, num_rows))
            if not np.array_equal(head_rows[rows], embed_rows[rows]):
                return False
    return True


def _check_headers(folder: Path) -> tuple[Qwen2Config, Archive, list[Entry]]:
    """Validates a folder, and returns (model configuration, headers, expected tensors)."""
    config = hf_config.read_hf_config(folder)
    module = hf_config.read_budget_module(folder)
    vocabulary.check_fits(folder, config.vocab_size)
    headers = archives.open_archive(folder)
    archive = {name: header for name, header in headers.items() if not name.endswith(_COMPUTED)}
    if config.tie_embeddings and _LM_HEAD in archive:
        _drop_copied_lm_head(archive, folder)
    entries = list(names.backbone(config))
    if module is not None:
        entries += names.budget_module(config, module.conditioning)
    archives.check_tensors(archive, entries, folder)
    return config, archive, entries


def check_folder(path: str | Path) -> None:
    """Performs the checks of `load_policy` without loading the parameters."""
    _check_headers(Path(path))


def load_policy(
    path: str | Path, *, dtype: Any = jnp.float32, sharding_of: ShardingOf | None = None
) -> tuple[Qwen2Config, Params]:
    """Loads the policy in a Hugging Face folder of a supported model family.

    Headers are validated before any values are read. Values are then loaded one tensor at a time,
    so that the required host memory is bounded by the largest tensor, not by the size of the model.

    Args:
      path: folder with config.json and safetensors weights. The weights can be in one or several
        files, with tied or untied embeddings, in bfloat16, float16 or float32. Folders written by
        `save_policy` can contain a budget module.
      dtype: dtype of the parameters. A budget module is always float32.
      sharding_of: function from the path of a leaf ("embed", "layers/q_kernel", ...) and its shape
        to its sharding. None loads all parameters onto the default device.

    Returns:
      The model shape and the parameters, as described in `model.qwen2`. The parameters contain
      "budget" if the folder has a budget module, whose settings are returned by
      `read_budget_module`.

    Raises:
      UserError: If a file is missing, damaged or not supported.
    """
    archives.check_files(path)
    config, archive, entries = _check_headers(Path(path))
    params: Params = {}
    for entry in entries:
        shape = entry.leaf_shape(config.num_layers)
        sharding = sharding_of("/".join(entry.path), shape) if sharding_of else None
        # phi and its gate are computed in fp32, regardless of the model's dtype.
        leaf_dtype = jnp.float32 if entry.path[0] == "budget" else dtype
        *parents, name = entry.path
        tree = params
        for key in parents:
            tree = tree.setdefault(key, {})
        if entry.layer is None:
            tree[name] = _load_tensor(archive, entry, leaf_dtype, sharding)
            continue
        if name not in tree:
            tree[name] = _zeros(sharding)(shape, leaf_dtype)
        layer = _load_tensor(archive, entry, leaf_dtype, _layer_sharding(sharding))
        stack = _layer_writer(sharding)(tree[name], layer, entry.layer)
        tree[name] = stack.block_until_ready()
    return config, params
