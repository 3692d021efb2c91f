"""config.json: old and new spellings, released shapes, and the models that are refused."""

import json

import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.export import policy_folder
from bacr_jax.model import hf
from bacr_jax.model.sizes import PRESETS
from hf_world import TINY, edit_config, random_params, refusal


def test_old_and_new_config_files_say_the_same(folder):
    old = hf.read_hf_config(folder)
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    edit_config(folder, drop=("rope_theta", "rope_scaling", "torch_dtype"), rope_parameters=rope)
    assert hf.read_hf_config(folder) == old == TINY


def test_absent_keys_mean_what_transformers_assumes(folder):
    gone = ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim", "architectures")
    edit_config(folder, drop=gone)
    found = hf.read_hf_config(folder)
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
    assert hf.read_hf_config(tmp_path) == PRESETS["qwen2.5-7b"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "'qwen3'"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": None}, "model_type null"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' rotary scaling"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_unsupported_models(changes, part, folder):
    edit_config(folder, **changes)
    message = refusal(folder)
    assert part in message and "config.json" in message


def test_a_damaged_description_of_the_budget_module(tmp_path):
    how = ConditioningConfig()
    params = random_params(conditioning=how)
    policy_folder.save_policy(
        tmp_path / "out",
        params,
        config=TINY,
        budget=policy_folder.BudgetInput(hf.BudgetModule(how, 64)),
    )
    edit_config(tmp_path / "out", budget_module={"b_max": 64})
    assert "budget_module is {'b_max': 64}; export the folder again" in refusal(tmp_path / "out")
