"""config.json: old and new spellings, released shapes, and the models that are refused."""

import json

import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.export import policy_folder
from bacr_jax.model.hf import hf_config, reading
from bacr_jax.model.sizes import PRESETS
from hf_world import FAMILIES, TINY, edit_config, make_folder, random_params, refusal, same


def test_old_and_new_config_files_say_the_same(folder):
    old = hf_config.read_hf_config(folder)
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    edit_config(folder, drop=("rope_theta", "rope_scaling", "torch_dtype"), rope_parameters=rope)
    assert hf_config.read_hf_config(folder) == old == TINY


def test_absent_keys_mean_what_transformers_assumes(folder):
    gone = ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim", "architectures")
    edit_config(folder, drop=gone)
    found = hf_config.read_hf_config(folder)
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
    assert hf_config.read_hf_config(tmp_path) == PRESETS["qwen2.5-7b"]


GROUPED = {"hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16"}
RELEASED = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "deepseek-r1-distill-qwen-1.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": 151643,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_of_other_families(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(GROUPED | RELEASED[name]))
    assert hf_config.read_hf_config(tmp_path) == PRESETS[name]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_goes_out_in_its_own_family(tmp_path, kind, told):
    how = ConditioningConfig() if told else None
    told_by = policy_folder.BudgetInput(hf_config.BudgetModule(how, 64) if told else None)
    params, config = random_params(FAMILIES[kind], conditioning=how), FAMILIES[kind]
    policy_folder.save_policy(tmp_path / "one", params, config=config, budget=told_by)
    # With a source that says what it came from, and without one.
    policy_folder.save_policy(
        tmp_path / "two", params, config=config, budget=told_by, source=tmp_path / "one"
    )
    name = ("Bacr" if told else "") + f"{kind.capitalize()}ForCausalLM"
    for folder in (tmp_path / "one", tmp_path / "two"):
        raw = json.loads((folder / "config.json").read_text())
        assert (raw["model_type"], raw["architectures"]) == (kind, [name])
        assert hf_config.read_hf_config(folder) == config
        assert hf_config.read_budget_module(folder) == told_by.module
        same(reading.load_policy(folder)[1], params)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "'mistral'"),
        (
            {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
            "qwen2 (Qwen2ForCausalLM), qwen3 (Qwen3ForCausalLM), llama (LlamaForCausalLM)",
        ),
        ({"model_type": "llama"}, "`architectures` ['Qwen2ForCausalLM']"),
        ({**LLAMA, "attention_bias": True}, "`attention_bias` is true"),
        ({**LLAMA, "mlp_bias": True}, "`mlp_bias` is true"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "`low_freq_factor` must be a positive number, but is null",
        ),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            "must be below `high_freq_factor`, which is 1; use the unmodified config.json",
        ),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": None}, "`model_type` null"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "'yarn' scaling of the rotary embeddings",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"rope_scaling": "linear"}, "`rope_scaling` must be an object or null, but is 'linear'"),
        ({"use_sliding_window": True}, "`use_sliding_window` is true"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "`layer_types` contains linear_attention, but only full_attention is",
        ),
        (
            {"layer_types": ["full_attention"] * 2},
            "`layer_types` lists 2 layers, but `num_hidden_layers` is 3; use the",
        ),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 3}, "`head_dim` is 3, but must be even"),
        ({"hidden_size": None}, "but is null"),
        ({"vocab_size": -1}, "but is -1"),
        ({"rope_theta": "big"}, "`rope_theta` must be a positive number, but is 'big'"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be"),
    ],
)
def test_unsupported_models(changes, part, folder):
    edit_config(folder, **changes)
    message = refusal(folder)
    assert part in message and "config.json" in message


def test_what_says_nothing_changes_nothing(folder):
    plain = hf_config.read_hf_config(folder)
    edit_config(folder, quantization_config=None, layer_types=["full_attention"] * 3)
    assert hf_config.read_hf_config(folder) == plain


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rotary_base_is_read_where_it_stands(folder, key):
    edit_config(folder, rope_theta=1e6, **{key: {"rope_type": "default", "rope_theta": 5e5}})
    assert hf_config.read_hf_config(folder).rope_theta == 5e5


def test_a_damaged_description_of_the_budget_module(tmp_path):
    how = ConditioningConfig()
    params = random_params(conditioning=how)
    policy_folder.save_policy(
        tmp_path / "out",
        params,
        config=TINY,
        budget=policy_folder.BudgetInput(hf_config.BudgetModule(how, 64)),
    )
    edit_config(tmp_path / "out", budget_module={"b_max": 64})
    assert "is incomplete or invalid (found {'b_max': 64}); run bacr export again" in refusal(
        tmp_path / "out"
    )


DEFAULT = {"rope_type": "default"}
SCALED = {**LLAMA3, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        # A rope_scaling that is not empty replaces rope_parameters, its base included.
        ({"rope_scaling": DEFAULT, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}}, 10000.0),
        (
            {
                "rope_theta": 5e4,
                "rope_scaling": DEFAULT,
                "rope_parameters": {**SCALED, "rope_theta": 1e6},
            },
            5e4,
        ),
        ({"rope_scaling": {}, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": None, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}}, 1e6),
    ],
)
def test_rope_scaling_replaces_rope_parameters(folder, changes, theta):
    edit_config(folder, drop=("rope_theta", "rope_scaling"), **changes)
    found = hf_config.read_hf_config(folder)
    assert (found.rope_theta, found.rope_scaling) == (theta, None)


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"rope_scaling": SCALED}, 8192),
        ({"rope_scaling": SCALED, "original_max_position_embeddings": 64}, 64),
        ({"rope_scaling": {**SCALED, "original_max_position_embeddings": None}}, None),
        (
            {
                "rope_scaling": {k: v for k, v in SCALED.items() if k[0] != "o"},
                "max_position_embeddings": 128,
            },
            128,
        ),
    ],
)
def test_llama3_takes_its_positions_where_transformers_does(folder, changes, positions):
    edit_config(folder, **changes)
    if positions is None:
        assert "`original_max_position_embeddings` must be" in refusal(folder)
    else:
        assert hf_config.read_hf_config(folder).rope_scaling.positions == positions


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "nested",
    [
        {"full_attention": {**DEFAULT, "rope_theta": 1e6}},
        {"full_attention": None},
        {"sliding_attention": {**DEFAULT, "rope_theta": 1e6}, "full_attention": DEFAULT},
        {**DEFAULT, "rope_theta": 1e6, "anything": {"rope_theta": 1e4}},
    ],
)
def test_rotary_parameters_by_layer_type_are_refused(folder, key, nested):
    edit_config(folder, drop=("rope_theta",), **{key: nested})
    assert f"`{key}` has separate rotary parameters" in refusal(folder)


@pytest.mark.parametrize(
    ("kind", "changes", "part"),
    [
        ("qwen2", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
        ("llama", {"rope_scaling": {**SCALED, "partial_rotary_factor": 0.5}}, "factor` is 0.5"),
        ("qwen3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0}}, "factor` is 0,"),
        ("qwen2", {"is_causal": False}, "`is_causal` is false, but only true is"),
        ("llama", {"is_causal": None}, "`is_causal` is null"),
        ("llama", {"sliding_window": 4}, "`sliding_window` is 4, but only null"),
        ("qwen3", {"attention_chunk_size": 4}, "`attention_chunk_size` is 4"),
        ("qwen3", {"attention_bias": True}, "`attention_bias` is true"),
        (
            "qwen2",
            {"per_layer_config": {"0": {"hidden_act": "gelu"}}},
            "`per_layer_config` is {'0'",
        ),
        ("llama", {"text_config": {"hidden_size": 8}}, "`text_config` is {'hidden_size': 8}"),
    ],
)
def test_keys_that_change_the_numbers_are_refused(tmp_path, kind, changes, part):
    make_folder(tmp_path / "hf", FAMILIES[kind])
    edit_config(tmp_path / "hf", **changes)
    message = refusal(tmp_path / "hf")
    assert part in message and "config.json" in message


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"is_causal": True, "partial_rotary_factor": 1.0, "sliding_window": 4}),
        ("llama", {"partial_rotary_factor": None, "sliding_window": None, "per_layer_config": {}}),
        ("qwen3", {"text_config": None, "attention_chunk_size": None}),
    ],
)
def test_neutral_values_of_these_keys_change_nothing(tmp_path, kind, changes):
    make_folder(tmp_path / "hf", FAMILIES[kind])
    edit_config(tmp_path / "hf", **changes)
    assert hf_config.read_hf_config(tmp_path / "hf") == FAMILIES[kind]


def test_a_missing_number_of_key_heads_is_the_familys(tmp_path):
    """Qwen2 and Qwen3 have 32 in transformers, Llama has as many as query heads."""
    for kind, part in (
        ("qwen2", "`num_key_value_heads`, 32"),
        ("qwen3", "`num_key_value_heads`, 32"),
    ):
        make_folder(tmp_path / kind, FAMILIES[kind])
        edit_config(tmp_path / kind, drop=("num_key_value_heads",))
        assert part in refusal(tmp_path / kind)
    make_folder(tmp_path / "llama", FAMILIES["llama"])
    edit_config(tmp_path / "llama", drop=("num_key_value_heads",))
    assert hf_config.read_hf_config(tmp_path / "llama").num_kv_heads == 4
