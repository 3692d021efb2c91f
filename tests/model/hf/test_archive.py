"""Weights checked on their headers: every refusal is one line that names the tensor or file."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bacr_jax.model.hf.reading import check_folder
from hf_world import WEIGHTS, edit_config, make_folder, refusal


def change_weights(folder, change):
    stored = load_file(folder / WEIGHTS)
    change(stored)
    save_file(stored, folder / WEIGHTS)


def test_missing_tensors(folder):
    change_weights(folder, lambda s: s.pop("model.layers.1.mlp.up_proj.weight"))
    assert "the weights lack the tensor model.layers.1.mlp.up_proj.weight; use" in refusal(folder)
    edit_config(folder, num_hidden_layers=4)
    assert "weights lack the tensor model.layers.1.mlp.up_proj.weight and 12 more" in refusal(
        folder
    )


def test_an_untied_model_needs_a_head(folder):
    edit_config(folder, tie_word_embeddings=False)
    assert "the weights lack the tensor lm_head.weight" in refusal(folder)


def test_extra_tensors(folder):
    change_weights(folder, lambda s: s.update({"model.layers.0.self_attn.q_norm": np.ones(4)}))
    assert "contain the tensor model.layers.0.self_attn.q_norm" in refusal(folder)
    change_weights(folder, lambda s: s.pop("model.layers.0.self_attn.q_norm"))
    edit_config(folder, num_hidden_layers=2)
    assert "contain the tensor model.layers.2." in refusal(folder)


def test_rotary_frequencies_that_older_folders_hold_are_passed_over(folder):
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda s: s.update({name.format(i): np.ones(2) for i in range(3)}))
    check_folder(folder)
    change_weights(folder, lambda s: s.update({f"{name.format(0)}s": np.ones(2)}))
    assert "contain the tensor model.layers.0.self_attn.rotary_emb.inv_freqs" in refusal(folder)


def test_a_wrong_shape_names_tensor_expected_and_found(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    change_weights(folder, lambda s: s.update({name: np.ones((8, 15), np.float32)}))
    assert f"{name} has the shape [8, 15], but config.json requires [8, 16]" in refusal(folder)


def test_an_integer_tensor(folder):
    change_weights(folder, lambda s: s.update({"model.norm.weight": np.ones(16, np.int8)}))
    assert "model.norm.weight is stored as I8" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 9, 200, -1])
def test_a_truncated_file(keep, folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:keep])
    message = refusal(folder)
    assert str(folder / WEIGHTS) in message and "truncated" in message


def test_a_missing_shard(tmp_path):
    make_folder(tmp_path / "hf", max_shard_bytes=3000)
    (tmp_path / "hf/model-00002-of-00010.safetensors").unlink(missing_ok=True)
    gone = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(tmp_path / "hf") or "00002" in refusal(tmp_path / "hf")


def test_an_index_that_disagrees_with_its_files(tmp_path):
    make_folder(tmp_path / "hf", max_shard_bytes=3000)
    path = tmp_path / "hf/model.safetensors.index.json"
    raw = json.loads(path.read_text())
    first, second = sorted(set(raw["weight_map"].values()))[:2]
    name = next(name for name, file in raw["weight_map"].items() if file == first)
    raw["weight_map"][name] = second
    path.write_text(json.dumps(raw))
    assert f"the tensor {name} in {second}, but this file does not contain it" in refusal(
        tmp_path / "hf"
    )
