"""Digests see every change, and are the same wherever an array lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax.parallel import processes
from bacr_jax.runs import digest
from bacr_jax.runs.digest import (
    DigestMismatch,
    check_replicas,
    digests,
    host_words_digest,
    verify,
)
from devices_world import run_on_devices


def by_hand(words):
    """The definition, in Python's whole numbers."""
    lanes = [0, 0]
    for i, word in enumerate(words):
        f = (int(word) + 0x9E3779B1 * (i + 1)) % 2**32
        f = (f ^ (f >> 16)) * 0x85EBCA6B % 2**32
        f ^= f >> 13
        g = f * 0xC2B2AE35 % 2**32
        lanes = [lanes[0] + f, lanes[1] + (g ^ (g >> 16))]
    return [lane % 2**32 for lane in lanes]


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5), (2, 3, 4)])
def test_host_and_device_follow_the_definition(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected = by_hand(x.view(np.uint32).reshape(-1))
    assert host_words_digest(x.view(np.uint32).reshape(-1)).tolist() == expected
    assert np.asarray(digest._device_digest(jnp.asarray(x))).tolist() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_every_type_has_one_digest_on_host_and_device(dtype):
    x = jnp.asarray(np.random.default_rng(1).integers(0, 2, (5, 9))).astype(dtype)
    on_host = digest._host_digest(np.asarray(x))
    np.testing.assert_array_equal(digest._device_digest(x), on_host)


def test_pieces_on_the_host_add_up_to_the_whole(monkeypatch):
    words = np.random.default_rng(2).integers(0, 2**32, 1000, dtype=np.uint32)
    whole = host_words_digest(words)
    monkeypatch.setattr(digest, "_CHUNK", 64)
    np.testing.assert_array_equal(host_words_digest(words), whole)


@given(hnp.arrays(np.uint32, st.integers(1, 50)), st.data())
def test_one_changed_word_changes_both_sums(words, data):
    place = data.draw(st.integers(0, len(words) - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda w: w != words[place]))
    changed = words.copy()
    changed[place] = other
    assert (host_words_digest(words) != host_words_digest(changed)).all()


def test_words_that_change_places_are_seen():
    words = np.array([5, 6, 0, 0], np.uint32)
    for order in ([1, 0, 2, 3], [2, 1, 0, 3], [0, 2, 1, 3], [3, 0, 1, 2]):
        assert (host_words_digest(words) != host_words_digest(words[order])).any()


def test_leaves_that_differ_are_named():
    tree = {
        "w": {"a": jnp.ones((2, 3)), "b": jnp.zeros(4, jnp.bfloat16)},
        "key": jax.random.key(3),
        "tokens": 2**40,
    }
    expected = digests(tree)
    assert set(expected) == {"w/a", "w/b", "key", "tokens"}
    verify(tree, expected)
    with pytest.raises(DigestMismatch, match=r"^w/b differs from what was saved"):
        verify(tree | {"w": tree["w"] | {"b": -tree["w"]["b"]}}, expected)
    spoilt = tree | {"tokens": 2**40 + 1, "key": jax.random.key(4)}
    with pytest.raises(DigestMismatch, match=r"^key and 1 more differs from what was saved"):
        verify(spoilt, expected)
    del expected["w/a"]
    with pytest.raises(DigestMismatch, match="w/a"):
        verify(tree, expected)


DRIFTED = """
import jax, jax.numpy as jnp, numpy as np
from bacr_jax import parallel
from bacr_jax.parallel import MeshShape
from bacr_jax.runs.digest import DigestMismatch, check_replicas

def with_bit(leaf, device):
    copies = [np.array(shard.data) for shard in leaf.addressable_shards]
    copies[device].reshape(-1).view(np.uint32)[5] ^= 1
    arrays = [jax.device_put(x, s.device) for x, s in zip(copies, leaf.addressable_shards)]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

for shape in (MeshShape(2, 1, 1, 1), MeshShape(2, 2, 1, 1), MeshShape(1, 4, 1, 1)):
    mesh = parallel.make_mesh(shape)
    params = {
        "layers": {"q_kernel": jnp.arange(64.0).reshape(2, 8, 4)},
        "final_norm": jnp.ones(8),
    }
    placed = parallel.place(params, parallel.shardings(params, mesh)) | {"step": 3, "none": None}
    check_replicas({"train": placed})
    for name in ("layers/q_kernel", "final_norm"):
        for device in range(shape.num_devices):
            if name == "final_norm":
                drifted = placed | {name: with_bit(placed[name], device)}
            else:
                wrong = with_bit(placed["layers"]["q_kernel"], device)
                drifted = placed | {"layers": {"q_kernel": wrong}}
            try:
                check_replicas({"train": drifted})
                print(shape.data, shape.fsdp, name, "passes")
            except DigestMismatch as error:
                print(error)
"""


def test_a_flipped_bit_of_one_copy_is_told_with_its_array_and_devices():
    found = run_on_devices(DRIFTED, devices=4).splitlines()
    copies = lambda name, *pairs: [
        f"train/{name}: the copies of this array on device {a} and device {b} differ"
        for a, b in pairs
    ]
    assert found == [
        *copies("layers/q_kernel", (0, 1), (0, 1)),
        *copies("final_norm", (0, 1), (0, 1)),
        *copies("layers/q_kernel", (0, 2), (1, 3), (0, 2), (1, 3)),
        *copies("final_norm", (0, 1), (0, 1), (0, 2), (0, 3)),
        # Nobody has another copy of a shard.
        *["1 4 layers/q_kernel passes"] * 4,
        *copies("final_norm", (0, 1), (0, 1), (0, 2), (0, 3)),
    ]


def test_numbers_of_two_hosts_are_held_against_each_other(monkeypatch):
    told = []
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "rank_among_all", lambda: (len(told), 2))
    monkeypatch.setattr(processes, "texts_of_all", lambda text: told.append(text) or told)
    check_replicas({"mu": np.float32(1), "tokens": 7})
    with pytest.raises(
        DigestMismatch, match=r"^tokens: the copies of this array on process 0 and process 1"
    ):
        check_replicas({"mu": np.float32(1), "tokens": 8})
