"""Digests of arrays that don't depend on where an array lies, so that any mesh can verify them."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from bacr_jax.errors import first_of
from bacr_jax.parallel import processes

# Words digested at a time on the host: what fits a core's cache.
_CHUNK = 1 << 16
# Odd numbers that spread bits: of positions, then those of MurmurHash3's last step.
_OF_PLACE, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


class DigestMismatch(ValueError):
    """Leaves that are not what they were when their digests were taken."""


def words_digest(words: UInt32[Array, "*shape"]) -> UInt32[Array, "2"]:
    """The sums over i of f(x_i + a (i + 1)) and of g(f(x_i + a (i + 1))), mod 2^32.

    x are the words, i in row-major order. A sum of whole numbers has no order, so that shards give
    it wherever they lie. f and g are permutations of 32 bits that mix them: a change of one word
    always changes both sums, changes of several go unseen with probability 2^-64. It is no defence
    against someone who wants it so.
    """
    place = jnp.uint32(0)
    stride = 1
    for axis in reversed(range(words.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place += along * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    f = words + jnp.uint32(_OF_PLACE) * (place + jnp.uint32(1))
    f = (f ^ (f >> 16)) * jnp.uint32(_FIRST)
    f ^= f >> 13
    g = f * jnp.uint32(_SECOND)
    g ^= g >> 16
    return jnp.stack([f.sum(dtype=jnp.uint32), g.sum(dtype=jnp.uint32)])


def host_words_digest(words: UInt32[np.ndarray, "n"]) -> UInt32[np.ndarray, "2"]:
    """`words_digest` in NumPy, five times as fast on a CPU's core, in the memory of its cache."""
    places = np.arange(1, _CHUNK + 1, dtype=np.uint32) * np.uint32(_OF_PLACE)
    buffers = np.empty((2, _CHUNK), np.uint32)
    total = [0, 0]
    for first in range(0, len(words), _CHUNK):
        piece = words[first : first + _CHUNK]
        f, shifted = buffers[:, : len(piece)]
        np.add(piece, places[: len(piece)], out=f)
        np.add(f, np.uint32(first * _OF_PLACE % 2**32), out=f)
        for lane, (shift, factor, last) in enumerate(((16, _FIRST, 13), (None, _SECOND, 16))):
            if shift is not None:
                np.bitwise_xor(f, np.right_shift(f, shift, out=shifted), out=f)
            np.multiply(f, np.uint32(factor), out=f)
            np.bitwise_xor(f, np.right_shift(f, last, out=shifted), out=f)
            total[lane] += int(f.sum(dtype=np.uint64))
    return np.array([lane % 2**32 for lane in total], np.uint32)


@jax.jit
def _device_digest(x: Array) -> UInt32[Array, "2"]:
    """Digest of an array where it lies; elements of at most 32 bits."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return words_digest(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32))


def _host_digest(x: np.ndarray) -> UInt32[np.ndarray, "2"]:
    """Digest of an array on the host: one word per element of at most 32 bits, else several."""
    x = np.ascontiguousarray(x).reshape(-1)
    size = x.dtype.itemsize
    words = x.view(np.uint32 if size >= 4 else f"uint{8 * size}")
    return host_words_digest(words)


def _on_host(leaf: Any) -> np.ndarray | None:
    """The leaf as the host sees it without a copy; None: it lies on devices."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    platforms = [device.platform for device in leaf.devices()]
    return np.asarray(leaf) if platforms == ["cpu"] else None


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `train/policy/embed`, in its order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def digests(tree: Any) -> dict[str, str]:
    """The digest of every leaf, by its path.

    Leaves are arrays, keys and numbers; sharded arrays may lie on any mesh of all processes. On
    GPUs a digest reads its leaf once at the speed of memory; nothing is gathered or copied.
    """
    arrays = leaves_by_path(tree)
    for path, leaf in arrays.items():
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            arrays[path] = jax.random.key_data(leaf)
    hosts = {path: x for path, leaf in arrays.items() if (x := _on_host(leaf)) is not None}
    # One after the other: programs that meet on several devices must start in one order on all.
    found = {path: _device_digest(leaf) for path, leaf in arrays.items() if path not in hosts}
    # NumPy works outside of Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found |= zip(hosts, pool.map(_host_digest, hosts.values()))
    return {path: "".join(f"{lane:08x}" for lane in np.asarray(found[path])) for path in arrays}


def fingerprint(tree: Any) -> str:
    """One short text for all leaves of a tree."""
    return hashlib.sha256(json.dumps(digests(tree)).encode()).hexdigest()[:12]


def verify(tree: Any, expected: Mapping[str, str]) -> None:
    """Holds a tree that was read back against `digests` of what was written.

    They may be of more leaves, too. DigestMismatch names the leaves that differ.
    """
    found = digests(tree)
    wrong = [name for name in found if found[name] != expected.get(name)]
    if wrong:
        raise DigestMismatch(f"{first_of(wrong)}: not what was saved")


def check_replicas(tree: Any) -> None:
    """Holds copies of the same values, on several devices or hosts, against each other.

    With several processes all must call it, with what belongs to each. DigestMismatch, in all of
    them, names the first array whose copies differ, and where two of them lie.
    """
    where, parts = [], []
    for path, leaf in leaves_by_path(tree).items():
        if isinstance(leaf, jax.Array) and leaf.sharding.num_devices > 1:
            indices = leaf.sharding.devices_indices_map(leaf.shape).values()
            if len(set(map(str, indices))) < leaf.sharding.num_devices:
                for shard in leaf.addressable_shards:
                    where.append((path, str(shard.index), f"device {shard.device.id}"))
                    parts.append(shard.data)
        elif processes.several():
            where.append((path, "", f"process {processes.place_among_all()[0]}"))
            parts.append(leaf)
    own = [(*place, digest) for place, digest in zip(where, digests(parts).values())]
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for text in processes.texts_of_all(json.dumps(own)):
        for path, index, place, digest in json.loads(text):
            other, expected = first.setdefault((path, index), (place, digest))
            if digest != expected:
                raise DigestMismatch(f"{path}: its copies on {other} and {place} differ")
