"""Folders in and out: what is read, what is written, and what is refused in one line."""

import dataclasses
import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hf_world
from bacr_jax.config import ConditioningConfig
from bacr_jax.errors import UserError
from bacr_jax.model import hf
from bacr_jax.model.sizes import PRESETS
from hf_world import TINY, edit_config, make_folder, random_params, tokenizer_json

UNTIED = dataclasses.replace(TINY, tie_embeddings=False)
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "hf")
    return tmp_path / "hf"


def same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


# What is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, UNTIED])
@pytest.mark.parametrize("shard", [10**9, 3000])
def test_what_was_written_is_read_bit_for_bit(config, shard, tmp_path):
    params = make_folder(tmp_path / "hf", config, max_shard_bytes=shard)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1 or shard == 3000
    found_config, found = hf.load_policy(tmp_path / "hf")
    assert found_config == config
    same(found, params)


def test_tensor_names_and_orientation_are_those_of_qwen2(folder):
    stored, params = load_file(folder / WEIGHTS), random_params()
    assert "lm_head.weight" not in stored
    name = "model.layers.2.mlp.down_proj.weight"
    np.testing.assert_array_equal(stored[name], params["layers"]["down_kernel"][2].T)
    name = "model.layers.1.self_attn.k_proj.bias"
    np.testing.assert_array_equal(stored[name], params["layers"]["k_bias"][1])


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_stored_types_are_read_into_the_asked_type(kind, tmp_path):
    params = make_folder(tmp_path / "hf", dtype=kind)
    found = hf.load_policy(tmp_path / "hf")[1]
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(kind)), params)
    same(found, jax.tree.map(lambda x: x.astype(np.float32), rounded))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    small = hf.load_policy(tmp_path / "hf", dtype=jnp.bfloat16)[1]
    assert {x.dtype for x in jax.tree.leaves(small)} == {jnp.dtype("bfloat16")}


def test_old_and_new_config_files_say_the_same(folder):
    old = hf.read_config(folder)
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    edit_config(folder, drop=("rope_theta", "rope_scaling", "torch_dtype"), rope_parameters=rope)
    assert hf.read_config(folder) == old == TINY


def test_absent_keys_mean_what_transformers_assumes(folder):
    gone = ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim", "architectures")
    edit_config(folder, drop=gone)
    found = hf.read_config(folder)
    assert (found.rope_theta, found.rms_norm_eps) == (10000.0, 1e-6)
    assert not found.tie_embeddings and found.head_dim == 4


def test_released_shapes_are_read_as_the_presets(tmp_path, monkeypatch):
    """The keys of a released config.json, typed in from the 7B model."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_act": "silu",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "max_position_embeddings": 32768,
                "max_window_layers": 28,
                "model_type": "qwen2",
                "num_attention_heads": 28,
                "num_hidden_layers": 28,
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06,
                "rope_theta": 1000000.0,
                "sliding_window": 131072,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
                "use_sliding_window": False,
                "vocab_size": 152064,
            }
        )
    )
    assert hf.read_config(tmp_path) == PRESETS["qwen2.5-7b"]


def test_a_second_copy_of_a_tied_head_is_accepted_and_another_head_is_not(folder):
    stored = load_file(folder / WEIGHTS)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()
    save_file(stored, folder / WEIGHTS)
    assert "lm_head" not in hf.load_policy(folder)[1]
    stored["lm_head.weight"][3, 3] += 1
    save_file(stored, folder / WEIGHTS)
    with pytest.raises(UserError, match="lm_head.weight, which differs from the embedding"):
        hf.load_policy(folder)


def test_staging_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    """NumPy's allocations are traced, device buffers are not: what is left is the staging."""
    wide = dataclasses.replace(TINY, hidden_size=256, intermediate_size=1024, vocab_size=64)
    peaks = []
    for layers in (2, 8):
        make_folder(tmp_path / str(layers), dataclasses.replace(wide, num_layers=layers))
        hf.load_policy(tmp_path / str(layers))  # compiles
        tracemalloc.start()
        hf.load_policy(tmp_path / str(layers))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    largest = 256 * 1024 * 4
    # its bytes as read and as transposed, and a little Python
    assert peaks[1] < 3.5 * largest
    assert peaks[1] - peaks[0] < largest / 4


# What is written ------------------------------------------------------------------------------


def test_a_bfloat16_folder_stays_one_until_values_need_more(tmp_path):
    params = make_folder(tmp_path / "hf", dtype="bfloat16")
    config, loaded = hf.load_policy(tmp_path / "hf")
    hf.save_policy(tmp_path / "out", loaded, config=config, source=tmp_path / "hf")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "hf" / WEIGHTS).read_bytes()
    hf.save_policy(tmp_path / "trained", params, config=config, source=tmp_path / "hf")
    assert json.loads((tmp_path / "trained/config.json").read_text())["torch_dtype"] == "float32"
    same(hf.load_policy(tmp_path / "trained")[1], params)
    hf.save_policy(
        tmp_path / "small", params, config=config, source=tmp_path / "hf", dtype="bfloat16"
    )
    stored = load_file(tmp_path / "small" / WEIGHTS)
    assert {x.dtype for x in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}


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
    config, params = hf.load_policy(folder)
    written = hf.save_policy(tmp_path / "out", params, config=config, source=folder)
    assert set(written) == {*files, "config.json", WEIGHTS}
    for name, text in files.items():
        assert (tmp_path / "out" / name).read_text() == text
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (11, 12)


@pytest.mark.parametrize("sharing", ["shared", "per_layer"])
def test_a_budget_module_goes_out_and_comes_back(sharing, tmp_path):
    how = ConditioningConfig(sharing=sharing, gate="tanh", input="log", site="before_block")
    params, module = random_params(conditioning=how), hf.BudgetModule(how, 64)
    written = hf.save_policy(tmp_path / "out", params, config=TINY, module=module)
    assert {"budget.safetensors", "modeling_bacr_qwen2.py"} <= set(written)
    assert set(load_file(tmp_path / "out/budget.safetensors")) == {
        "budget.w1",
        "budget.w2",
        "budget.gate",
    }
    same(hf.load_policy(tmp_path / "out")[1], params)
    assert hf.read_budget_module(tmp_path / "out") == module
    # taken off again, it is a plain Qwen2 folder
    plain = {key: value for key, value in params.items() if key != "budget"}
    written = hf.save_policy(tmp_path / "plain", plain, config=TINY, source=tmp_path / "out")
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
        hf.save_policy(tmp_path / "out", told, config=TINY, module=hf.BudgetModule(how, 64))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="already exists; write the name of a new folder"):
        hf.save_policy(folder, random_params(seed=5), config=TINY)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]


# What is refused ------------------------------------------------------------------------------


def refusal(folder):
    with pytest.raises(UserError) as caught:
        hf.load_policy(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_weights(folder, change):
    stored = load_file(folder / WEIGHTS)
    change(stored)
    save_file(stored, folder / WEIGHTS)


def test_missing_tensors(folder):
    change_weights(folder, lambda s: s.pop("model.layers.1.mlp.up_proj.weight"))
    assert "missing tensor model.layers.1.mlp.up_proj.weight;" in refusal(folder)
    edit_config(folder, num_hidden_layers=4)
    assert "missing tensor model.layers.1.mlp.up_proj.weight and 12 more" in refusal(folder)


def test_an_untied_model_needs_a_head(folder):
    edit_config(folder, tie_word_embeddings=False)
    assert "missing tensor lm_head.weight" in refusal(folder)


def test_extra_tensors(folder):
    change_weights(folder, lambda s: s.update({"model.layers.0.self_attn.q_norm": np.ones(4)}))
    assert "extra tensor model.layers.0.self_attn.q_norm" in refusal(folder)
    change_weights(folder, lambda s: s.pop("model.layers.0.self_attn.q_norm"))
    edit_config(folder, num_hidden_layers=2)
    assert "extra tensor model.layers.2." in refusal(folder)


def test_a_wrong_shape_names_tensor_expected_and_found(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    change_weights(folder, lambda s: s.update({name: np.ones((8, 15), np.float32)}))
    assert f"{name} has the wrong shape: expected [8, 16], found [8, 15]" in refusal(folder)


def test_an_integer_tensor(folder):
    change_weights(folder, lambda s: s.update({"model.norm.weight": np.ones(16, np.int8)}))
    assert "model.norm.weight is stored as I8" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "'qwen3'"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": None}, "model_type None"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' rotary scaling"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_unsupported_models(changes, part, folder):
    edit_config(folder, **changes)
    message = refusal(folder)
    assert part in message and "config.json" in message


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
    assert f"{name} is not in {second}" in refusal(tmp_path / "hf")


def test_a_vocabulary_larger_than_the_embedding(folder):
    (folder / "tokenizer.json").write_text(tokenizer_json(37))
    hf.load_policy(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(38))
    assert "its tokenizer has 38 ids but the embedding only 37 rows" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 36}')
    hf.load_policy(folder)
    (folder / "added_tokens.json").write_text('{"c": 40}')
    assert "has 41 ids" in refusal(folder)


def test_folders_that_are_none(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "config.json: can't read it" in refusal(tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text("{not json")
    assert "not JSON" in refusal(tmp_path / "empty")
    make_folder(tmp_path / "hf")
    (tmp_path / "hf" / WEIGHTS).rename(tmp_path / "hf/pytorch_model.bin")
    assert "holds neither model.safetensors nor" in refusal(tmp_path / "hf")


def test_a_damaged_description_of_the_budget_module(tmp_path):
    how = ConditioningConfig()
    params = random_params(conditioning=how)
    hf.save_policy(tmp_path / "out", params, config=TINY, module=hf.BudgetModule(how, 64))
    edit_config(tmp_path / "out", budget_module={"b_max": 64})
    assert "budget_module is {'b_max': 64}; export the folder again" in refusal(tmp_path / "out")


def test_logits_survive_the_trip(tmp_path):
    params = make_folder(tmp_path / "hf", UNTIED)
    tokens = np.arange(10).reshape(2, 5)
    config, found = hf.load_policy(tmp_path / "hf")
    np.testing.assert_array_equal(
        hf_world.logits(found, tokens, config), hf_world.logits(params, tokens, UNTIED)
    )
