"""Folders out: names and orientation, types, companions, all or nothing."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from bacr_jax.config import ConditioningConfig
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.export.policy_folder import BudgetInput
from bacr_jax.model.hf import hf_config, reading
from hf_world import TINY, WEIGHTS, edit_config, make_folder, random_params, same, tokenizer_json


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "hf")
    return tmp_path / "hf"


def test_tensor_names_and_orientation_are_those_of_qwen2(folder):
    stored, params = load_file(folder / WEIGHTS), random_params()
    assert "lm_head.weight" not in stored
    name = "model.layers.2.mlp.down_proj.weight"
    np.testing.assert_array_equal(stored[name], params["layers"]["down_kernel"][2].T)
    name = "model.layers.1.self_attn.k_proj.bias"
    np.testing.assert_array_equal(stored[name], params["layers"]["k_bias"][1])


def test_weights_are_float32_or_of_the_type_that_is_asked_for(tmp_path):
    params, source = make_folder(tmp_path / "hf", dtype="bfloat16"), tmp_path / "hf"
    config, _ = reading.load_policy(source)
    policy_folder.save_policy(tmp_path / "trained", params, config=config, source=source)
    assert json.loads((tmp_path / "trained/config.json").read_text())["torch_dtype"] == "float32"
    same(reading.load_policy(tmp_path / "trained")[1], params)
    policy_folder.save_policy(
        tmp_path / "small", params, config=config, source=source, dtype="bfloat16"
    )
    stored = load_file(tmp_path / "small" / WEIGHTS)
    assert {x.dtype for x in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert (tmp_path / "small" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_tokenizer_and_generation_files_travel_along(folder, tmp_path):
    files = {
        "tokenizer.json": tokenizer_json(30),
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"top_p": 0.8}',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    edit_config(folder, bos_token_id=11, eos_token_id=12)
    config, params = reading.load_policy(folder)
    written = policy_folder.save_policy(tmp_path / "out", params, config=config, source=folder)
    assert set(written) == {*files, "config.json", WEIGHTS}
    for name, text in files.items():
        assert (tmp_path / "out" / name).read_text() == text
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (11, 12)


@pytest.mark.parametrize("sharing", ["shared", "per_layer"])
def test_a_budget_module_goes_out_and_comes_back(sharing, tmp_path):
    how = ConditioningConfig(sharing=sharing, gate="tanh", input="log")
    params, module = random_params(conditioning=how), hf_config.BudgetModule(how, 64)
    written = policy_folder.save_policy(
        tmp_path / "out", params, config=TINY, budget=BudgetInput(module)
    )
    assert {"budget.safetensors", "modeling_bacr.py"} <= set(written)
    assert set(load_file(tmp_path / "out/budget.safetensors")) == {
        "budget.w1",
        "budget.w2",
        "budget.gate",
    }
    same(reading.load_policy(tmp_path / "out")[1], params)
    assert hf_config.read_budget_module(tmp_path / "out") == module
    # Folders of earlier versions also say where it joins the stream: after the layer.
    path = tmp_path / "out/config.json"
    raw = json.loads(path.read_text())
    said = lambda site: {**raw, "budget_module": {**raw["budget_module"], "site": site}}
    path.write_text(json.dumps(said("after_block")))
    assert hf_config.read_budget_module(tmp_path / "out") == module
    path.write_text(json.dumps(said("before_block")))
    with pytest.raises(UserError, match="run bacr export again"):
        hf_config.read_budget_module(tmp_path / "out")
    path.write_text(json.dumps(raw))
    # taken off again, it is a plain Qwen2 folder
    plain = {key: value for key, value in params.items() if key != "budget"}
    written = policy_folder.save_policy(
        tmp_path / "plain", plain, config=TINY, source=tmp_path / "out"
    )
    assert set(written) == {"config.json", WEIGHTS}
    raw = json.loads((tmp_path / "plain/config.json").read_text())
    assert raw["model_type"] == "qwen2" and not {"auto_map", "budget_module"} & set(raw)


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    params = random_params()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    how = ConditioningConfig()
    told = {**params, "budget": random_params(conditioning=how)["budget"]}
    with pytest.raises(UserError, match="No space left"):
        policy_folder.save_policy(
            tmp_path / "out", told, config=TINY, budget=BudgetInput(hf_config.BudgetModule(how, 64))
        )
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="already exists; use the name of a new folder"):
        policy_folder.save_policy(folder, random_params(seed=5), config=TINY)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_link_to_outside_of_the_source_is_refused_and_nothing_is_written(folder, tmp_path, name):
    config, params = reading.load_policy(folder)
    secret = tmp_path / "secret"
    original = folder / name
    secret.write_text(original.read_text() if original.exists() else "{}")
    original.unlink(missing_ok=True)
    original.symlink_to(secret)
    with pytest.raises(
        UserError, match=rf"{name} is a symbolic link to .*secret, a file outside of the folder"
    ):
        policy_folder.save_policy(tmp_path / "out", params, config=config, source=folder)
    assert not (tmp_path / "out").exists()
