"""The same weights in transformers (PyTorch) and here: logits, greedy text, gradients, files."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hf_world
from bacr_jax.config import OptimizerConfig
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.learner.optimizer import policy_optimizer
from bacr_jax.model import qwen2
from bacr_jax.model.block import rotation
from bacr_jax.model.hf import hf_config, names, reading
from bacr_jax.model.hf.archive import stored
from bacr_jax.model.logprobs import logprob_and_entropy, map_logits

torch = pytest.importorskip(
    "torch", reason="live parity needs torch: pip install -e '.[parity]' (golden files do without)"
)
transformers = pytest.importorskip("transformers")

PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# R1-Distill-Qwen is the untied Qwen2 with a base of 10,000.
KINDS = {
    "Qwen2: tied, grouped": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen2: untied, one kv head": {
        "num_key_value_heads": 1,
        "rope_parameters": {**PLAIN, "rope_theta": 1e4},
    },
    "Qwen2: untied, no grouping": {"num_key_value_heads": 4},
    "Qwen3: untied, wide heads": {"num_key_value_heads": 2, "head_dim": 16},
    "Qwen3: tied, narrow heads": {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "Llama: tied, as SmolLM2": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    "Llama: untied, scaled frequencies": {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
}
TOKENS = np.random.default_rng(0).integers(1, 89, (3, 14))
LENGTHS = np.array([14, 9, 4])


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A transformers model, the folder it saved in several shards, and what we read there."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 89,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "rope_parameters": PLAIN,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    family = request.param.partition(":")[0]
    config = getattr(transformers, f"{family}Config")(**shape | KINDS[request.param])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        weight.data = 0.3 * torch.randn_like(weight) + (1.0 if "norm" in name else 0.0)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder, max_shard_size="40KB")
    return model, folder, *reading.load_policy(folder)


def of_torch(model, tokens, **how):
    with torch.no_grad():
        return model(torch.tensor(tokens), **how).logits.numpy()


def test_logits(pair):
    model, _, config, params = pair
    found = hf_world.logits(params, TOKENS, config)
    np.testing.assert_allclose(found, of_torch(model, TOKENS), atol=1e-4)


def test_logits_of_right_padded_rows(pair):
    """Which transformers gives rows that are padded on the left too."""
    model, _, config, params = pair
    real = np.arange(14) < LENGTHS[:, None]
    want = of_torch(model, TOKENS * real, attention_mask=torch.tensor(real.astype(np.int64)))
    found = hf_world.logits(params, TOKENS * real, config)
    np.testing.assert_allclose(found[real], want[real], atol=1e-4)
    shifted = np.stack([np.roll(row, -length) for row, length in zip(TOKENS * real, LENGTHS)])
    left = (np.arange(14) >= 14 - LENGTHS[:, None]).astype(np.int64)
    positions = torch.tensor(np.maximum(left.cumsum(1) - 1, 0))
    want = of_torch(model, shifted, attention_mask=torch.tensor(left), position_ids=positions)
    np.testing.assert_allclose(found[real], want[left > 0], atol=1e-4)


def test_greedy_continuations_of_64_tokens_are_identical(pair):
    model, _, config, params = pair
    rows = [TOKENS[row, :length] for row, length in enumerate(LENGTHS)]
    want = [
        model.generate(torch.tensor(row[None]), max_new_tokens=64, do_sample=False)[0, len(row) :]
        for row in rows
    ]
    found = hf_world.greedy(params, rows, config, 64)
    np.testing.assert_array_equal(found, torch.stack(want).numpy())


@functools.partial(jax.jit, static_argnames=("config",))
def gradient(params, config):
    """Of the mean negative log-probability of TOKENS."""

    def loss(params):
        hidden = qwen2.forward(params, jnp.asarray(TOKENS), config=config)[:, :-1]
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), TOKENS[:, 1:].reshape(-1)
        return -map_logits(
            logprob_and_entropy, flat, qwen2.output_head(params), jnp.asarray(targets)
        )[0].mean()

    return jax.grad(loss)(params)


def test_gradients_of_the_mean_log_probability(pair):
    model, _, config, params = pair
    tokens = torch.tensor(TOKENS)
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    found = gradient(params, config)
    mlp = [layer.mlp.down_proj.weight.grad.numpy().T for layer in model.model.layers]
    np.testing.assert_allclose(found["layers"]["down_kernel"], np.stack(mlp), atol=1e-4)
    np.testing.assert_allclose(
        found["embed"], model.model.embed_tokens.weight.grad.numpy(), atol=1e-4
    )


def test_an_update_of_adamw_gives_the_same_weights(pair):
    """Norm clipped to 1, matrices decay; Adam's first step is the sign of what is not near 0."""
    model, folder, config, params = pair
    ours = OptimizerConfig(
        learning_rate=1e-2, weight_decay=0.1, schedule="constant", warmup_steps=0
    )
    tx = policy_optimizer(ours, 1)
    grads = gradient(params, config)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    theirs = type(model).from_pretrained(folder)
    matrices = [weight for weight in theirs.parameters() if weight.ndim == 2]
    vectors = [weight for weight in theirs.parameters() if weight.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(ours.b1, ours.b2),
        weight_decay=0.1,
    )
    theirs(torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    adamw.step()
    wanted, updated, shares = theirs.state_dict(), optax.apply_updates(params, updates), []
    for entry in names.backbone(config):
        found = stored(updated, entry, "F32").fetch()
        # Where the gradient is rounding alone, so is its sign.
        clear = np.abs(stored(grads, entry, "F32").fetch()) > 1e-5
        np.testing.assert_allclose(found[clear], wanted[entry.name].numpy()[clear], atol=1e-5)
        shares.append(clear.mean())
    assert np.median(shares) > 0.9


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_in_and_out_again_gives_transformers_identical_tensors(pair, kind, tmp_path):
    model, folder, config, params = pair
    source = folder
    if kind == "bfloat16":
        source = tmp_path / "hf"
        model = type(model).from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(source)
        config, params = reading.load_policy(source)
    policy_folder.save_policy(tmp_path / "out", params, config=config, source=source, dtype=kind)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model)
    assert again.dtype == getattr(torch, kind)
    before, after = model.state_dict(), again.state_dict()
    assert list(before) == list(after)
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name
    kept = ("vocab_size", "rms_norm_eps", "rope_parameters", "eos_token_id")
    for key in kept:
        assert getattr(again.config, key) == getattr(model.config, key)


SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ROPES = [
    {},
    None,
    {"rope_type": "default"},
    {"type": "default", "rope_theta": 3e5, "factor": 4.0},
    {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    LLAMA3,
    {name: value for name, value in LLAMA3.items() if not name.startswith(("rope_th", "orig"))},
    {**LLAMA3, "rope_type": None, "type": "llama3"},
    {**LLAMA3, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
]
# Keys of config.json with values that change the numbers, and with neutral ones.
CHOICES = {
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "rope_theta": [1e4, 5e5],
    "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5, 1.0],
    "is_causal": [True, False],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"]],
    "use_sliding_window": [False, True],
    "sliding_window": [None, 3],
    "max_window_layers": [0, 2],
    "attention_chunk_size": [3],
    "attention_bias": [False, True],
    "mlp_bias": [False, True],
    "hidden_act": ["silu", "gelu"],
    "head_dim": [6, 8],
    "num_key_value_heads": [1, 4],
    "rms_norm_eps": [1e-5, 0.5],
    "tie_word_embeddings": [True, False],
    "per_layer_config": [None, {"0": {"num_key_value_heads": 4}}],
    # Transformers reads none of these in these families.
    "attn_logit_softcapping": [2.0],
    "final_logit_softcapping": [2.0],
    "logits_scaling": [8.0],
    "residual_multiplier": [0.2],
    "embedding_multiplier": [12.0],
    "attention_multiplier": [0.1],
    "query_pre_attn_scalar": [64],
    "rope_interleaved": [True],
    "pretraining_tp": [2],
}


def random_config(rng, kind):
    """A config.json with a few keys that somebody could have written."""
    changes = {}
    for key in rng.choice(list(CHOICES), size=rng.integers(1, 6), replace=False):
        changes[str(key)] = CHOICES[key][rng.integers(len(CHOICES[key]))]
    name = kind.capitalize()
    return SHAPE | {"model_type": kind, "architectures": [f"{name}ForCausalLM"]} | changes


def transformers_model(raw):
    """The model of a config.json with random weights, and its logits; None if it has none."""
    name = raw["architectures"][0].removesuffix("ForCausalLM")
    torch.manual_seed(0)
    try:
        config = getattr(transformers, f"{name}Config").from_dict(json.loads(json.dumps(raw)))
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for path, weight in model.named_parameters():
            weight.data = 0.5 * torch.randn_like(weight) + (1.0 if "norm" in path else 0.0)
        return model, of_torch(model, TOKENS % 23, use_cache=False)
    # Of any type: a wrong config is met wherever it is used first.
    except Exception:
        return None


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 12))]
)
def test_a_config_is_read_as_transformers_reads_it_or_refused(tmp_path, kind, seed):
    """Of 10 configs each; logits are compared for the first that is accepted."""
    rng = np.random.default_rng(seed)
    compared = False
    for _ in range(10):
        raw = random_config(rng, kind)
        theirs = transformers_model(raw)
        try:
            config = hf_config.parse_config(raw, tmp_path / "config.json")
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            continue
        assert theirs is not None, raw
        model, logits = theirs
        positions = jnp.arange(40)[None]
        with torch.no_grad():
            cosines, sines = model.model.rotary_emb(torch.zeros(1), torch.arange(40)[None])
        for found, want in zip(rotation(positions, config), (cosines, sines)):
            np.testing.assert_allclose(found, want.numpy(), atol=2e-5, err_msg=str(raw))
        if compared:
            continue
        compared = True
        folder = tmp_path / "hf"
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(raw))
        found = hf_world.logits(reading.load_policy(folder)[1], TOKENS % 23, config)
        np.testing.assert_allclose(found, logits, atol=1e-4, err_msg=str(raw))
    assert compared
