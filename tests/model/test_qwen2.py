"""The model against itself: trees and sequences, caches and full passes, phi = 0 and none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import budget, qwen2
from bacr_jax.model.sizes import PRESETS, Qwen2Config

SHAPE = Qwen2Config(31, 32, 48, 2, 4, 2, 8, rope_theta=1e4, tie_embeddings=True)
OPTIONS = [
    ConditioningConfig(),
    ConditioningConfig(sharing="per_layer"),
    ConditioningConfig(gate="sigmoid_normed", gate_bias=-4.0),
    ConditioningConfig(gate="tanh", input="log"),
    ConditioningConfig(site="before_block", input="normalised"),
    ConditioningConfig(site="after_attention"),
]


def awake(params):
    """Parameters whose budget module does something."""
    params["budget"]["w2"] = jax.random.normal(jax.random.key(8), params["budget"]["w2"].shape)
    params["budget"]["gate"] = jax.random.normal(jax.random.key(9), params["budget"]["gate"].shape)
    return params


def make(conditioning, shape=SHAPE):
    return qwen2.init(jax.random.key(0), shape, conditioning=conditioning, b_max=64)


def tokens(b, t, seed=1):
    return jax.random.randint(jax.random.key(seed), (b, t), 0, 31)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_counts_its_parameters(name):
    params = jax.eval_shape(lambda: qwen2.init(jax.random.key(0), PRESETS[name]))
    assert sum(x.size for x in jax.tree.leaves(params)) == PRESETS[name].num_parameters


def test_published_parameter_counts():
    # 7.62 and 0.49 billion in the model cards
    assert PRESETS["qwen2.5-7b"].num_parameters == 7_615_616_512
    assert PRESETS["qwen2.5-0.5b"].num_parameters == 494_032_768


@pytest.mark.parametrize("conditioning", OPTIONS)
def test_logits_are_bit_identical_to_plain_qwen_at_the_start(conditioning):
    params = make(conditioning)
    phi = budget.embed(params["budget"], jnp.array([8, 64]), conditioning=conditioning, b_max=64)
    x = tokens(2, 7)
    plain = qwen2.logits(params, qwen2.forward(params, x, config=SHAPE))
    told = qwen2.logits(
        params,
        qwen2.forward(params, x, config=SHAPE, budget_embedding=phi, conditioning=conditioning),
    )
    np.testing.assert_array_equal(plain, told)


@pytest.mark.parametrize("conditioning", OPTIONS)
def test_the_budget_matters_once_phi_is_awake(conditioning):
    params = awake(make(conditioning))
    embed = lambda b: budget.embed(
        params["budget"], jnp.array(b), conditioning=conditioning, b_max=64
    )
    run = lambda phi: qwen2.forward(
        params, tokens(1, 5), config=SHAPE, budget_embedding=phi, conditioning=conditioning
    )
    assert np.abs(run(embed([8])) - run(embed([64]))).max() > 1e-3


def test_without_an_embedding_no_budget_code_is_traced():
    plain, told = make(None), make(ConditioningConfig())
    x = tokens(1, 4)
    text = lambda p: str(jax.make_jaxpr(lambda p: qwen2.forward(p, x, config=SHAPE))(p))
    assert text(plain).count("logistic") == text(told).count("logistic")
    assert "budget" in told and "budget" not in plain


def test_phi_equation_by_hand():
    """Width 2: one frequency, 1. W1 = identity, W2 = 2: phi = 2 SiLU([sin b, cos b])."""
    params = {"w1": jnp.eye(2), "w2": 2 * jnp.eye(2), "gate": jnp.zeros((1, 2))}
    phi = budget.embed(params, jnp.array([3]), conditioning=ConditioningConfig(), b_max=64)
    s = np.array([np.sin(3.0), np.cos(3.0)])
    np.testing.assert_allclose(phi[0], 2 * s / (1 + np.exp(-s)), rtol=1e-5)


def test_sinusoids_have_the_norm_of_half_the_width():
    s = budget.sinusoids(jnp.array([1, 300, 4096]), width=64)
    np.testing.assert_allclose((s**2).sum(-1), 32.0, rtol=1e-5)


def test_gate_equation_by_hand():
    x = jnp.array([[[1.0, 2.0]]])
    gate, phi = jnp.array([0.5, -0.25]), jnp.array([[10.0, 20.0]])
    # w.h = 0, sigmoid 1/2
    found = budget.add_gated(x, gate, phi, conditioning=ConditioningConfig())
    np.testing.assert_allclose(found[0, 0], [6.0, 12.0])
    masked = budget.add_gated(
        x, gate, phi, conditioning=ConditioningConfig(), mask=jnp.array([[False]])
    )
    np.testing.assert_array_equal(masked, x)


@pytest.mark.parametrize("conditioning", [None, OPTIONS[0], OPTIONS[1]])
@pytest.mark.parametrize("scan", [True, False])
def test_a_tree_equals_its_branches_as_sequences(conditioning, scan):
    params, phi = make(conditioning), None
    if conditioning is not None:
        params = awake(params)
        phi = budget.embed(
            params["budget"], jnp.array([8, 64]), conditioning=conditioning, b_max=64
        )
    trunk, branch = tokens(2, 9, 2), tokens(2, 6, 3).reshape(2, 2, 3)
    context = jnp.array([[4, 9], [1, 7]])
    run = {"config": SHAPE, "budget_embedding": phi, "conditioning": conditioning, "scan": scan}
    trunk_states, branch_states = qwen2.forward_tree(params, trunk, branch, context, **run)
    np.testing.assert_allclose(trunk_states, qwen2.forward(params, trunk, **run), atol=1e-5)
    for row in range(2):
        for cut in range(2):
            length = int(context[row, cut])
            alone = jnp.concatenate([trunk[row, :length], branch[row, cut]])[None]
            of_row = None if phi is None else phi[..., row : row + 1, :]
            whole = qwen2.forward(params, alone, **{**run, "budget_embedding": of_row})
            np.testing.assert_allclose(branch_states[row, cut], whole[0, length:], atol=1e-5)


def test_padding_does_not_touch_real_tokens():
    params = make(None)
    x = tokens(2, 8)
    short = qwen2.forward(params, x[:, :5], config=SHAPE)
    padded = qwen2.forward(params, x.at[:, 5:].set(0), config=SHAPE)
    np.testing.assert_allclose(padded[:, :5], short, atol=1e-6)


def test_untied_head_is_its_own_matrix():
    shape = dataclasses.replace(SHAPE, tie_embeddings=False)
    params = make(None, shape)
    assert params["lm_head"].shape == (31, 32)
    hidden = qwen2.forward(params, tokens(1, 3), config=shape)
    np.testing.assert_allclose(
        qwen2.logits(params, hidden), hidden @ params["lm_head"].T, atol=1e-5
    )


def test_remat_and_scan_change_no_gradient():
    params, x = make(None), tokens(2, 6)
    total = lambda p, **how: qwen2.forward(p, x, config=SHAPE, **how).std()
    want = jax.grad(lambda p: total(p, scan=False, remat=False))(params)
    for scan in (True, False):
        found = jax.grad(lambda p: total(p, scan=scan, remat=True))(params)  # noqa: B023
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, want)
