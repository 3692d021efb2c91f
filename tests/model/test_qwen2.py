"""The model against itself: trees and sequences, padding, phi = 0 and none."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_world
from bacr_jax.config import ConditioningConfig
from bacr_jax.model import budget, qwen2
from bacr_jax.model.compute import Compute
from bacr_jax.model.qwen2 import Tree
from bacr_jax.model.sizes import Qwen2Config, RopeScaling
from rollout_world import init

SHAPE = Qwen2Config(31, 32, 48, 2, 4, 2, 8, rope_theta=1e4, tie_embeddings=True)
NORMED = dataclasses.replace(SHAPE, qkv_bias=False, qk_norm=True)
OPTIONS = [
    ConditioningConfig(),
    ConditioningConfig(sharing="per_layer"),
    ConditioningConfig(gate="sigmoid_normed", gate_bias=-4.0),
    ConditioningConfig(gate="tanh", input="log"),
    ConditioningConfig(input="normalised"),
]
STATIC = ("config", "compute")
forward = jax.jit(qwen2.forward, static_argnames=STATIC)
forward_tree = jax.jit(qwen2.forward_tree, static_argnames=STATIC)
embed = jax.jit(budget.embed, static_argnames=("conditioning", "b_max"))
BUDGETS = jnp.array([8, 64])


def make(conditioning, shape=SHAPE):
    """Random parameters, with a budget module that does something."""
    return hf_world.random_params(shape, conditioning=conditioning)


def conditioned_on(params, conditioning):
    """The rows' budgets."""
    if conditioning is None:
        return None
    phi = embed(params["budget"], BUDGETS, conditioning=conditioning, b_max=64)
    return budget.Conditioned(phi, params["budget"]["gate"], settings=conditioning)


def tokens(b, t, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 31, (b, t)))


@pytest.mark.parametrize(
    ("conditioning", "shape"),
    [
        *((option, SHAPE) for option in OPTIONS[:2]),
        *(pytest.param(option, SHAPE, marks=pytest.mark.slow) for option in OPTIONS[2:]),
        pytest.param(OPTIONS[0], NORMED, marks=pytest.mark.slow),
    ],
)
def test_phi_leaves_the_plain_model_bit_identical_at_the_start_and_matters_once_awake(
    conditioning, shape
):
    params = init(jax.random.key(0), shape, conditioning=conditioning)
    x = jnp.tile(tokens(1, 7), (2, 1))
    plain = {name: leaf for name, leaf in params.items() if name != "budget"}

    def told(params):
        conditioned = conditioned_on(params, conditioning)
        return forward(params, x, config=shape, conditioned=conditioned)

    np.testing.assert_array_equal(told(params), forward(plain, x, config=shape))
    # The rows differ in their budgets alone.
    small, large = told(make(conditioning, shape))
    assert np.abs(small - large).max() > 1e-3


def test_without_an_embedding_no_budget_code_is_traced():
    plain, told = make(None), make(ConditioningConfig())
    x = tokens(1, 4)
    text = lambda p: str(jax.make_jaxpr(lambda p: qwen2.forward(p, x, config=SHAPE))(p))
    assert text(plain).count("logistic") == text(told).count("logistic")
    assert "budget" in told and "budget" not in plain


@pytest.mark.parametrize(
    ("conditioning", "scan", "shape"),
    [
        (None, True, SHAPE),
        (OPTIONS[0], True, SHAPE),
        (OPTIONS[1], True, SHAPE),
        (OPTIONS[1], False, SHAPE),
        (
            OPTIONS[0],
            True,
            dataclasses.replace(NORMED, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
        ),
    ],
)
def test_a_tree_equals_its_branches_as_sequences(conditioning, scan, shape):
    params = make(conditioning, shape)
    conditioned = conditioned_on(params, conditioning)
    trunk, branch = tokens(2, 9, 2), tokens(4, 3, 3).reshape(2, 2, 3)
    context = np.array([[4, 9], [1, 7]])
    run = {"config": shape, "compute": Compute(scan=scan)}
    trunk_states, branch_states = forward_tree(
        params, Tree(trunk, branch, jnp.asarray(context)), conditioned=conditioned, **run
    )
    # Each trunk, then each of its branches, as a right-padded row of its own.
    alone, rows = np.zeros((6, 12), int), [0, 1, 0, 0, 1, 1]
    alone[:2, :9] = trunk
    for index, (row, cut) in enumerate(np.ndindex(2, 2), start=2):
        c = context[row, cut]
        alone[index, : c + 3] = [*trunk[row, :c].tolist(), *branch[row, cut].tolist()]
    if conditioned is not None:
        of_rows = conditioned.phi[..., np.array(rows), :]
        conditioned = dataclasses.replace(conditioned, phi=of_rows)
    states = forward(params, jnp.asarray(alone), conditioned=conditioned, **run)
    np.testing.assert_allclose(trunk_states, states[:2, :9], atol=1e-5)
    for index, (row, cut) in enumerate(np.ndindex(2, 2), start=2):
        c = context[row, cut]
        np.testing.assert_allclose(branch_states[row, cut], states[index, c : c + 3], atol=1e-5)


@pytest.mark.parametrize("conditioning", [None, *OPTIONS[:2]])
def test_packed_branches_are_the_branches(conditioning):
    params = make(conditioning)
    trunk, branches = tokens(2, 9, 2), tokens(4, 3, 3).reshape(2, 2, 3)
    conditioned = conditioned_on(params, conditioning)
    context, run = jnp.array([[4, 9], [1, 7]]), {"config": SHAPE, "conditioned": conditioned}
    want_trunk, want = forward_tree(params, Tree(trunk, branches, context), **run)
    # Branches of 2 and 3 tokens; of 0 and 1.
    packing = jnp.array([[0, 1, 3, 4, 5, -1], [3, -1, -1, -1, -1, -1]])
    found_trunk, found = forward_tree(params, Tree(trunk, branches, context, packing), **run)
    np.testing.assert_allclose(found_trunk, want_trunk, atol=1e-5)
    want = want.reshape(2, 6, -1)
    for row in range(2):
        kept = np.asarray(packing[row][packing[row] >= 0])
        np.testing.assert_allclose(found[row, : len(kept)], want[row, kept], atol=1e-5)


def test_padding_does_not_touch_real_tokens():
    params, x = make(None), tokens(2, 8)
    short = forward(params, x[:, :5], config=SHAPE)
    padded = forward(params, jnp.where(np.arange(8) < 5, x, 0), config=SHAPE)
    np.testing.assert_allclose(padded[:, :5], short, atol=1e-5)


def test_untied_head_is_its_own_matrix():
    shape = dataclasses.replace(SHAPE, tie_embeddings=False)
    params = make(None, shape)
    assert params["lm_head"].shape == (31, 32)
    hidden = jax.random.normal(jax.random.key(1), (1, 3, 32))
    np.testing.assert_allclose(
        qwen2.logits(params, hidden), hidden @ params["lm_head"].T, atol=1e-5
    )


@pytest.mark.slow
def test_remat_and_scan_change_no_gradient():
    params, x = make(None), tokens(2, 6)

    def gradient(scan, remat):
        compute = Compute(scan=scan, remat=remat)
        total = lambda p: qwen2.forward(p, x, config=SHAPE, compute=compute).std()
        return jax.jit(jax.grad(total))(params)

    want = gradient(scan=False, remat="none")
    for scan, remat in itertools.product((True, False), ("full", "selective")):
        found = gradient(scan, remat)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, want)


def product_shapes(jaxpr):
    """Shapes of all matrix products of a program, those of the programs inside of it too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation.outvars[0].aval.shape)
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            found += product_shapes(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("config", [SHAPE, NORMED])
def test_selective_remat_makes_no_product_again(config):
    """Of a told tree; the scores of attention are no named products, and are made again."""
    conditioning = OPTIONS[0]
    params, shape = make(conditioning, config), (2, 2, 3)

    def products(remat):
        def total(params):
            states, _ = qwen2.forward_tree(
                params,
                Tree(tokens(2, 9), jnp.ones(shape, int), jnp.full((2, 2), 4)),
                config=config,
                conditioned=conditioned_on(params, conditioning),
                compute=Compute(scan=False, remat=remat),
            )
            return states.std()

        # Products over the 30 positions, by their width: q, o and the stream; k and v; gate and up.
        shapes = product_shapes(jax.make_jaxpr(jax.grad(total))(params).jaxpr)
        return {width: shapes.count((30, width)) for width in (32, 16, 48)}

    none, selective, full = (products(remat) for remat in ("none", "selective", "full"))
    assert selective == none
    assert all(full[width] > none[width] for width in none)
