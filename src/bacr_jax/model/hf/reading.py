"""A Hugging Face folder becomes parameters, one tensor at a time."""

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
from bacr_jax.model.hf.archive import Archive
from bacr_jax.model.hf.names import Entry
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

ShardingOf = Callable[[str, tuple[int, ...]], Sharding | None]

_LM_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
# A buffer that older folders of Llama hold in every layer; transformers passes it over too.
_COMPUTED = ".rotary_emb.inv_freq"
_ROWS_COMPARED = 8192


def _of_slice(sharding: Sharding | None) -> Sharding | None:
    """Where one layer of a stacked leaf goes: the leaf's sharding without its leading axis."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _place(archive: Archive, entry: Entry, dtype: Any, sharding: Sharding | None) -> jax.Array:
    """The tensor of an entry, in our orientation and type, on its devices.

    With a sharding every device's part is read from the file by itself.
    """
    shape = entry.shape[::-1] if entry.transposed else entry.shape
    with archives.opened(archive[entry.name].file) as file:
        piece = file.get_slice(entry.name)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or ()
            stored = piece[index[::-1] if entry.transposed else index]
            stored = stored.T if entry.transposed else stored
            return np.ascontiguousarray(stored).astype(dtype, copy=False)

        if sharding is None:
            placed = jnp.asarray(part(tuple(slice(0, n) for n in shape)))
        else:
            placed = jax.make_array_from_callback(shape, sharding, part)
        # Transfers hold their host copy until they are done: wait, so that only one is alive.
        return placed.block_until_ready()


@functools.cache
def _writer(sharding: Sharding | None) -> Callable[..., jax.Array]:
    """Puts a layer into its donated stack."""
    update = lambda stack, layer, at: jax.lax.dynamic_update_index_in_dim(stack, layer, at, 0)
    return jax.jit(update, donate_argnums=(0,), out_shardings=sharding)


@functools.cache
def _zeros(sharding: Sharding | None) -> Callable[..., jax.Array]:
    """An empty stack, made where it stays."""
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)


def _drop_copied_lm_head(archive: Archive, folder: Path) -> None:
    """Some tied checkpoints store the embedding a second time as lm_head: accepted if it is one."""
    copy, own = archive.pop(_LM_HEAD), archive.get(_EMBED)
    same = own is not None and copy.shape == own.shape
    if own is not None and same:
        with archives.opened(copy.file) as one, archives.opened(own.file) as two:
            lm_head, embed = one.get_slice(_LM_HEAD), two.get_slice(_EMBED)
            for start in range(0, copy.shape[0], _ROWS_COMPARED):
                rows = slice(start, min(start + _ROWS_COMPARED, copy.shape[0]))
                same = same and np.array_equal(lm_head[rows], embed[rows])
    if not same:
        raise UserError(
            f"{folder}: extra tensor {_LM_HEAD}, which differs from the embedding although "
            "config.json says tie_word_embeddings true; write tie_word_embeddings false"
        )


def _checked(folder: Path) -> tuple[Qwen2Config, Archive, list[Entry]]:
    """Shape, files and expected tensors of a folder, checked on the headers."""
    config = hf_config.read_hf_config(folder)
    module = hf_config.read_budget_module(folder)
    vocabulary.check_fits(folder, config.vocab_size)
    found = archives.open_archive(folder)
    archive = {name: header for name, header in found.items() if not name.endswith(_COMPUTED)}
    if config.tie_embeddings and _LM_HEAD in archive:
        _drop_copied_lm_head(archive, folder)
    entries = list(names.backbone(config))
    if module is not None:
        entries += names.budget_module(config, module.conditioning)
    archives.check_tensors(archive, entries, folder)
    return config, archive, entries


def check_folder(path: str | Path) -> None:
    """What `load_policy` would refuse, in a moment and without reading a value."""
    _checked(Path(path))


def load_policy(
    path: str | Path, *, dtype: Any = jnp.float32, sharding_of: ShardingOf | None = None
) -> tuple[Qwen2Config, Params]:
    """Reads a Hugging Face folder of one of the families.

    Everything is checked on the headers before a value is read. Values then stream one tensor at a
    time into their place, so that host memory beyond the largest tensor does not grow with the
    model.

    Args:
      path: folder with config.json and safetensors weights, single or sharded, tied or untied,
        bfloat16, float16 or float32; one written by `save_policy` may hold a budget module.
      dtype: type of the parameters (a budget module stays float32).
      sharding_of: maps a leaf ("embed", "layers/q_kernel", ...) and its shape to its sharding;
        None puts everything on the default device.

    Returns:
      Shape and parameters, as `model.qwen2` describes them; "budget" is there if the folder has it
      (`read_budget_module` says how it is used).
    """
    archives.check_files(path)
    config, archive, entries = _checked(Path(path))
    params: Params = {}
    for entry in entries:
        shape = entry.leaf_shape(config.num_layers)
        sharding = sharding_of("/".join(entry.path), shape) if sharding_of else None
        # phi and its gate are computed in fp32 whatever the model's type is.
        kept = jnp.float32 if entry.path[0] == "budget" else dtype
        home = params
        for key in entry.path[:-1]:
            home = home.setdefault(key, {})
        leaf = entry.path[-1]
        if entry.layer is None:
            home[leaf] = _place(archive, entry, kept, sharding)
            continue
        if leaf not in home:
            home[leaf] = _zeros(sharding)(shape, kept)
        layer = _place(archive, entry, kept, _of_slice(sharding))
        home[leaf] = _writer(sharding)(home[leaf], layer, entry.layer).block_until_ready()
    return config, params
