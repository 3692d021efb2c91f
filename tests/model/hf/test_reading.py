"""Folders in: values bit for bit, stored types, tied heads, little staging memory."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hf_world
from bacr_jax.errors import UserError
from bacr_jax.model.hf import reading
from hf_world import TINY, WEIGHTS, make_folder, refusal, same

UNTIED = dataclasses.replace(TINY, tie_embeddings=False)


@pytest.mark.parametrize("config", [TINY, UNTIED])
@pytest.mark.parametrize("shard", [10**9, 3000])
def test_what_was_written_is_read_bit_for_bit(config, shard, tmp_path):
    params = make_folder(tmp_path / "hf", config, max_shard_bytes=shard)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1 or shard == 3000
    found_config, found = reading.load_policy(tmp_path / "hf")
    assert found_config == config
    same(found, params)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_stored_types_are_read_into_the_asked_type(kind, tmp_path):
    params = make_folder(tmp_path / "hf", dtype=kind)
    found = reading.load_policy(tmp_path / "hf")[1]
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(kind)), params)
    same(found, jax.tree.map(lambda x: x.astype(np.float32), rounded))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    small = reading.load_policy(tmp_path / "hf", dtype=jnp.bfloat16)[1]
    assert {x.dtype for x in jax.tree.leaves(small)} == {jnp.dtype("bfloat16")}


def test_a_second_copy_of_a_tied_head_is_accepted_and_another_head_is_not(folder):
    stored = load_file(folder / WEIGHTS)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()
    save_file(stored, folder / WEIGHTS)
    assert "lm_head" not in reading.load_policy(folder)[1]
    stored["lm_head.weight"][3, 3] += 1
    save_file(stored, folder / WEIGHTS)
    with pytest.raises(UserError, match="lm_head.weight, which differs from the embedding"):
        reading.load_policy(folder)


@pytest.mark.slow  # many layers
def test_staging_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    """NumPy's allocations are traced, device buffers are not: what is left is the staging."""
    wide = dataclasses.replace(TINY, hidden_size=256, intermediate_size=1024, vocab_size=64)
    peaks = []
    for layers in (2, 8):
        make_folder(tmp_path / str(layers), dataclasses.replace(wide, num_layers=layers))
        reading.load_policy(tmp_path / str(layers))  # compiles
        tracemalloc.start()
        reading.load_policy(tmp_path / str(layers))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    largest = 256 * 1024 * 4
    # its bytes as read and as transposed, and a little Python
    assert peaks[1] < 3.5 * largest
    assert peaks[1] - peaks[0] < largest / 4


def test_folders_that_are_none(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "config.json: the file can't be read" in refusal(tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text("{not json")
    assert "can't be read as a JSON object" in refusal(tmp_path / "empty")
    make_folder(tmp_path / "hf")
    (tmp_path / "hf" / WEIGHTS).rename(tmp_path / "hf/pytorch_model.bin")
    assert "contains neither model.safetensors nor" in refusal(tmp_path / "hf")


def test_logits_survive_the_trip(tmp_path):
    params = make_folder(tmp_path / "hf", UNTIED)
    tokens = np.arange(10).reshape(2, 5)
    config, found = reading.load_policy(tmp_path / "hf")
    np.testing.assert_array_equal(
        hf_world.logits(found, tokens, config), hf_world.logits(params, tokens, UNTIED)
    )
