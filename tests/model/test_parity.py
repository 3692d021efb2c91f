"""The same weights in transformers (PyTorch) and here: logits, greedy text, gradients, files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_world
from bacr_jax.export import policy_folder
from bacr_jax.model import hf, qwen2
from bacr_jax.model.logprobs import token_logprobs

torch = pytest.importorskip(
    "torch", reason="live parity needs torch: pip install -e '.[parity]' (golden files do without)"
)
transformers = pytest.importorskip("transformers")

KINDS = {
    "tied, grouped": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "untied, one kv head": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "untied, no grouping": {"num_key_value_heads": 4, "tie_word_embeddings": False},
}
TOKENS = np.random.default_rng(0).integers(1, 89, (3, 14))
LENGTHS = np.array([14, 9, 4])


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A transformers model, the folder it saved in several shards, and what we read there."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=89,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **KINDS[request.param],
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        weight.data = 0.3 * torch.randn_like(weight) + (1.0 if "norm" in name else 0.0)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder, max_shard_size="40KB")
    return model, folder, *hf.load_policy(folder)


def of_torch(model, tokens, **how):
    with torch.no_grad():
        return model(torch.tensor(tokens), **how).logits.numpy()


def test_logits(pair):
    model, _, config, params = pair
    found = hf_world.logits(params, TOKENS, config)
    np.testing.assert_allclose(found, of_torch(model, TOKENS), atol=1e-4)


def test_logits_of_right_padded_rows(pair):
    model, _, config, params = pair
    real = np.arange(14) < LENGTHS[:, None]
    want = of_torch(model, TOKENS * real, attention_mask=torch.tensor(real.astype(np.int64)))
    found = hf_world.logits(params, TOKENS * real, config)
    np.testing.assert_allclose(found[real], want[real], atol=1e-4)


def test_logits_of_left_padded_rows(pair):
    model, _, config, params = pair
    real = np.arange(14) >= 14 - LENGTHS[:, None]
    positions = qwen2.padded_positions(jnp.asarray(real))
    want = of_torch(
        model,
        TOKENS * real,
        attention_mask=torch.tensor(real.astype(np.int64)),
        position_ids=torch.tensor(np.array(positions)),
    )
    found = hf_world.logits(
        params, TOKENS * real, config, positions=positions, real=jnp.asarray(real)
    )
    np.testing.assert_allclose(found[real], want[real], atol=1e-4)


def test_greedy_continuations_of_64_tokens_are_identical(pair):
    model, _, config, params = pair
    rows = [TOKENS[row, :length] for row, length in enumerate(LENGTHS)]
    want = [
        model.generate(torch.tensor(row[None]), max_new_tokens=64, do_sample=False)[0, len(row) :]
        for row in rows
    ]
    found = hf_world.greedy(params, rows, config, 64)
    np.testing.assert_array_equal(found, torch.stack(want).numpy())


def test_gradients_of_the_mean_log_probability(pair):
    model, _, config, params = pair
    tokens = torch.tensor(TOKENS)
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()

    def loss(params):
        hidden = qwen2.forward(params, jnp.asarray(TOKENS), config=config)[:, :-1]
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), TOKENS[:, 1:].reshape(-1)
        return -token_logprobs(flat, qwen2.output_head(params), jnp.asarray(targets))[0].mean()

    found = jax.grad(loss)(params)
    mlp = [layer.mlp.down_proj.weight.grad.numpy().T for layer in model.model.layers]
    np.testing.assert_allclose(found["layers"]["down_kernel"], np.stack(mlp), atol=1e-4)
    np.testing.assert_allclose(
        found["embed"], model.model.embed_tokens.weight.grad.numpy(), atol=1e-4
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_in_and_out_again_gives_transformers_identical_tensors(pair, kind, tmp_path):
    model, folder, config, params = pair
    source = folder
    if kind == "bfloat16":
        source = tmp_path / "hf"
        model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(source)
        config, params = hf.load_policy(source)
    policy_folder.save_policy(tmp_path / "out", params, config=config, source=source)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is transformers.Qwen2ForCausalLM
    assert again.dtype == getattr(torch, kind)
    before, after = model.state_dict(), again.state_dict()
    assert list(before) == list(after)
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name
    kept = ("vocab_size", "rms_norm_eps", "rope_parameters", "eos_token_id")
    for key in kept:
        assert getattr(again.config, key) == getattr(model.config, key)
