"""Files written by transformers, and its answers to them, kept in golden/: parity without torch."""

from pathlib import Path

import jax
import numpy as np
import pytest

import hf_world
from bacr_jax.export import policy_folder
from bacr_jax.model.hf import hf_config, reading
from bacr_jax.model.sizes import RopeScaling

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(params=["tied", "untied", "qwen3", "llama"])
def case(request):
    config, params = reading.load_policy(GOLDEN / request.param)
    return config, params, np.load(GOLDEN / f"{request.param}.npz")


def test_golden_folders_cover_both_kinds_of_file():
    tied, _ = reading.load_policy(GOLDEN / "tied")
    untied, params = reading.load_policy(GOLDEN / "untied")
    assert tied.tie_embeddings and tied.num_kv_heads < tied.num_heads and tied.rope_theta == 1e6
    assert not untied.tie_embeddings and "lm_head" in params and untied.rope_theta == 1e4
    assert untied.head_dim * untied.num_heads != untied.hidden_size
    assert len(list((GOLDEN / "untied").glob("*.safetensors"))) > 1


def test_golden_folders_cover_what_families_differ_in():
    (normed, params), (scaled, _) = (
        reading.load_policy(GOLDEN / name) for name in ("qwen3", "llama")
    )
    assert normed.qk_norm and normed.head_dim * normed.num_heads != normed.hidden_size
    assert params["layers"]["q_norm"].shape == (normed.num_layers, normed.head_dim)
    # Frequencies that stay, that are divided, and between: positions reach beyond the first 32.
    assert scaled.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32) and not scaled.qkv_bias


def test_logits(case):
    config, params, want = case
    found = hf_world.logits(params, want["tokens"], config)
    np.testing.assert_allclose(found, want["logits"], atol=1e-4)


def test_logits_of_right_padded_rows(case):
    """Which transformers gives rows that are padded on the left too."""
    config, params, want = case
    tokens = want["tokens"] * (np.arange(12) < want["lengths"][:, None])
    found = hf_world.logits(params, tokens, config)
    for row, length in enumerate(want["lengths"]):
        np.testing.assert_allclose(found[row, :length], want["right"][row, :length], atol=1e-4)
        np.testing.assert_allclose(found[row, :length], want["left"][row, -length:], atol=1e-4)


def test_greedy_continuations_of_64_tokens(case):
    config, params, want = case
    rows = [want["tokens"][row, :length] for row, length in enumerate(want["lengths"])]
    np.testing.assert_array_equal(hf_world.greedy(params, rows, config, 64), want["greedy"])


def test_the_exported_pytorch_model_at_three_budgets():
    config, params = reading.load_policy(GOLDEN / "conditioned")
    module, want = (
        hf_config.read_budget_module(GOLDEN / "conditioned"),
        np.load(GOLDEN / "conditioned.npz"),
    )
    found = hf_world.told_logits(
        params, want["tokens"], want["budgets"], config, module.conditioning, module.b_max
    )
    np.testing.assert_allclose(found, want["logits"], atol=1e-4)
    plain = hf_world.logits(params, want["tokens"], config)
    assert np.abs(found - plain).max() > 0.1
    assert len({tuple(row) for row in np.round(want["logits"][:, 0], 3)}) == 3


def test_a_golden_round_trip_keeps_every_bit(case, tmp_path):
    config, params, _ = case
    policy_folder.save_policy(tmp_path / "out", params, config=config)
    again = reading.load_policy(tmp_path / "out")[1]
    jax.tree.map(np.testing.assert_array_equal, params, again)
