"""Computes digests of arrays. How an array is sharded does not change its digest.

A checkpoint can therefore be verified on any device mesh. Checkpoints store the digests, and
`check_replicas` uses them to compare replicas of the same array.
"""

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

# Number of 32-bit words that are processed at a time on the host. A chunk fits into a core's cache.
_CHUNK = 1 << 16
# Odd multipliers for mixing bits: one for the positions of words, then the two multipliers of
# MurmurHash3's finalizer.
_POSITION_FACTOR = 0x9E3779B1
_FIRST_FACTOR = 0x85EBCA6B
_SECOND_FACTOR = 0xC2B2AE35


class DigestMismatch(ValueError):
    """Raised if arrays of a tree do not match their recorded digests."""


def words_digest(words: UInt32[Array, "*shape"]) -> UInt32[Array, "2"]:
    """Computes the digest of an array of 32-bit words, which consists of two sums of hashed words.

        sum_i f(x_i + a (i + 1))   and   sum_i g(f(x_i + a (i + 1))),   modulo 2^32

    x_i are the words in row-major order, and a is an odd constant. An integer sum does not depend
    on the order of its terms, so every sharding of an array has the same digest. f and g are
    bit-mixing permutations of 32-bit words. Changing a single word always changes both sums.
    Changes to several words are missed with a probability of 2^-64. The digest detects accidental
    changes, but not deliberate ones.
    """
    position = jnp.uint32(0)
    stride = 1
    for axis in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position += index * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    f = words + jnp.uint32(_POSITION_FACTOR) * (position + jnp.uint32(1))
    f = (f ^ (f >> 16)) * jnp.uint32(_FIRST_FACTOR)
    f ^= f >> 13
    g = f * jnp.uint32(_SECOND_FACTOR)
    g ^= g >> 16
    f_sum = f.sum(dtype=jnp.uint32)
    g_sum = g.sum(dtype=jnp.uint32)
    return jnp.stack([f_sum, g_sum])


def host_words_digest(words: UInt32[np.ndarray, "n"]) -> UInt32[np.ndarray, "2"]:
    """Computes `words_digest` in NumPy, which is five times as fast as JAX on a CPU core.

    All operations are in place, on chunks that fit into the cache of a core.
    """
    positions = np.arange(1, _CHUNK + 1, dtype=np.uint32) * np.uint32(_POSITION_FACTOR)
    f_buffer = np.empty(_CHUNK, np.uint32)
    shift_buffer = np.empty(_CHUNK, np.uint32)
    f_sum = 0
    g_sum = 0
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        size = len(chunk)
        f = f_buffer[:size]
        shifted = shift_buffer[:size]
        np.add(chunk, positions[:size], out=f)
        np.add(f, np.uint32(start * _POSITION_FACTOR % 2**32), out=f)
        _xor_shifted(f, 16, shifted)
        np.multiply(f, np.uint32(_FIRST_FACTOR), out=f)
        _xor_shifted(f, 13, shifted)
        f_sum += int(f.sum(dtype=np.uint64))
        # Compute g in the buffer of f.
        np.multiply(f, np.uint32(_SECOND_FACTOR), out=f)
        _xor_shifted(f, 16, shifted)
        g_sum += int(f.sum(dtype=np.uint64))
    return np.array([f_sum % 2**32, g_sum % 2**32], np.uint32)


def _xor_shifted(words: np.ndarray, bits: int, buffer: np.ndarray) -> None:
    """Replaces each word x with x ^ (x >> bits), in place."""
    np.right_shift(words, bits, out=buffer)
    np.bitwise_xor(words, buffer, out=words)


@jax.jit
def _device_digest(x: Array) -> UInt32[Array, "2"]:
    """Computes the digest of an array on its devices. Elements must have at most 32 bits."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return words_digest(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32))


def _host_digest(x: np.ndarray) -> UInt32[np.ndarray, "2"]:
    """Computes the digest of a host array. Elements over 32 bits are hashed as several words."""
    x = np.ascontiguousarray(x).reshape(-1)
    size = x.dtype.itemsize
    words = x.view(np.uint32 if size >= 4 else f"uint{8 * size}")
    return host_words_digest(words)


def _on_host(leaf: Any) -> np.ndarray | None:
    """Returns a leaf as a NumPy array without a copy, or None if it is on an accelerator."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    platforms = [device.platform for device in leaf.devices()]
    return np.asarray(leaf) if platforms == ["cpu"] else None


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, such as `train/policy/embed`, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def digests(tree: Any) -> dict[str, str]:
    """Computes the digest of every leaf of a tree.

    On a GPU, each leaf is read once, without a copy, so the time is limited by memory bandwidth.

    Args:
      tree: arrays, PRNG keys and numbers. Arrays may be sharded over any mesh of all processes.

    Returns:
      The digests by path, as hexadecimal strings.
    """
    leaves = leaves_by_path(tree)
    on_host = {}
    words: dict[str, Any] = {}
    # Device programs run one after another, because programs that run on several devices must
    # be launched in the same order on all devices.
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = _on_host(leaf)
        if array is None:
            words[path] = _device_digest(leaf)
        else:
            on_host[path] = array
    # Threads run in parallel here because NumPy releases the GIL.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        words |= zip(on_host, pool.map(_host_digest, on_host.values()))
    return {path: "".join(f"{word:08x}" for word in np.asarray(words[path])) for path in leaves}


def fingerprint(tree: Any) -> str:
    """Returns a fingerprint of all arrays of a tree, as 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(digests(tree)).encode()).hexdigest()[:12]


def verify(tree: Any, expected: Mapping[str, str]) -> None:
    """Checks that the arrays of a tree match their recorded digests.

    Args:
      tree: tree to verify.
      expected: digests by path. It may contain more paths than the tree.

    Raises:
      DigestMismatch: if arrays differ. The message lists the paths of these arrays.
    """
    actual = digests(tree)
    wrong = [path for path, digest in actual.items() if digest != expected.get(path)]
    if wrong:
        raise DigestMismatch(f"{first_of(wrong)} differs from what was saved")


def check_replicas(tree: Any) -> None:
    """Verifies that the replicas of each array are equal on all devices and processes.

    This is a collective operation: all processes must call it, each with its copy of the tree. A
    replica is a copy of an array, or of a shard, on another device or process.

    Raises:
      DigestMismatch: if replicas differ. The error is raised in all processes. The message names
        the first such array, and the devices or processes of two different replicas.
    """
    # A tuple for each replica: path of the array, index of the shard, and device or process.
    copies: list[tuple[str, str, str]] = []
    arrays = []
    for path, leaf in leaves_by_path(tree).items():
        if isinstance(leaf, jax.Array) and leaf.sharding.num_devices > 1:
            if not _has_copies(leaf):
                continue
            for shard in leaf.addressable_shards:
                copies.append((path, str(shard.index), f"device {shard.device.id}"))
                arrays.append(shard.data)
        elif processes.several():
            copies.append((path, "", f"process {processes.rank_among_all()[0]}"))
            arrays.append(leaf)
    records = [(*copy, digest) for copy, digest in zip(copies, digests(arrays).values())]
    first_copies: dict[tuple[str, str], tuple[str, str]] = {}
    for text in processes.texts_of_all(json.dumps(records)):
        for path, index, location, digest in json.loads(text):
            first, expected = first_copies.setdefault((path, index), (location, digest))
            if digest != expected:
                raise DigestMismatch(
                    f"{path}: the copies of this array on {first} and {location} differ"
                )


def _has_copies(array: jax.Array) -> bool:
    """True if several devices store the same part of an array."""
    indices = array.sharding.devices_indices_map(array.shape).values()
    return len(set(map(str, indices))) < array.sharding.num_devices
