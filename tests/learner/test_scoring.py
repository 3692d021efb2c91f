"""Scores outside of updates: each is at its token, and several devices compute those of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.learner.scoring import response_logprobs, thinking_energies
from bacr_jax.model import budget, qwen2
from bacr_jax.types import Trunks
from devices_world import run_on_devices
from learner_world import RULES, SPEC, WORLD


@pytest.fixture(scope="module")
def trunks():
    """Two traces with prompts of 2 and 3 tokens, and with 3 and 1 sampled tokens."""
    of_rows = lambda *values: np.array(values, np.int32)
    return Trunks(
        tokens=np.random.default_rng(0).integers(6, 16, (2, 6)).astype(np.int32),
        prompt_lengths=of_rows(2, 3),
        sampled=of_rows(3, 1),
        thinking=of_rows(3, 1),
        close=of_rows(0, 0),
        budgets=of_rows(8, 4),
        logprobs=np.zeros((2, 3), np.float32),
    )


@pytest.fixture(scope="module")
def distributions(trunks):
    """The distribution of the token after each position, from the model itself."""

    @jax.jit
    def probabilities(params):
        budgets = jnp.asarray(trunks.budgets)
        phi = budget.embed(
            params["budget"], budgets, conditioning=WORLD.conditioning, b_max=SPEC.b_max
        )
        conditioned = budget.Conditioned(phi, params["budget"]["gate"], settings=WORLD.conditioning)
        hidden = qwen2.forward(
            params, jnp.asarray(trunks.tokens), config=WORLD.shape, conditioned=conditioned
        )
        logits = jnp.where(RULES.allowed_tokens, qwen2.logits(params, hidden), -1e30)
        return jax.nn.softmax(logits)

    return np.asarray(probabilities(WORLD.params), np.float64)


def sampled_positions(trunks):
    """Yields (row, index among the sampled tokens, position) of every sampled token."""
    for row, count in enumerate(trunks.sampled):
        for index in range(count):
            yield row, index, trunks.prompt_lengths[row] + index


def test_energies_are_those_of_the_thinking_tokens(trunks, distributions):
    """The squared norm of softmax minus one-hot: 1 - 2 p(token) + the sum of p^2."""
    want = np.zeros((2, 3))
    for row, index, position in sampled_positions(trunks):
        p = distributions[row, position - 1]
        want[row, index] = 1 - 2 * p[trunks.tokens[row, position]] + (p**2).sum()
    energies = thinking_energies(WORLD.params, trunks, RULES.allowed_tokens, spec=SPEC)
    np.testing.assert_allclose(energies, want, atol=1e-5)


def test_logprobs_of_a_response_are_at_its_tokens(trunks, distributions):
    want = np.zeros((2, 6))
    for row, _, position in sampled_positions(trunks):
        token = trunks.tokens[row, position]
        want[row, position] = np.log(distributions[row, position - 1, token])
    lengths = trunks.prompt_lengths + trunks.sampled
    inputs = (trunks.tokens, trunks.prompt_lengths, lengths, trunks.budgets)
    logprobs = response_logprobs(
        WORLD.params, *map(jnp.asarray, inputs), RULES.allowed_tokens, spec=SPEC
    )
    np.testing.assert_allclose(logprobs, want, atol=1e-4)


PROGRAM = """
import dataclasses, re
import jax, numpy as np
from bacr_jax import parallel
from bacr_jax.learner.scoring import next_token_logprobs, response_logprobs, thinking_energies
from bacr_jax.types import Trunks
from learner_world import RULES, SPEC
from rollout_world import World

world = World(num_kv_heads=2)
rng = np.random.default_rng(0)
rows, prompt, width = 36, 4, 13
starts = rng.integers(1, prompt + 1, rows).astype(np.int32)
sampled = rng.integers(0, width - prompt + 1, rows).astype(np.int32)
trunks = dataclasses.replace(
    Trunks.empty(rows, width=width, sampled=width - prompt),
    tokens=rng.integers(0, world.shape.vocab_size, (rows, width)).astype(np.int32),
    prompt_lengths=starts, sampled=sampled, budgets=np.full(rows, 8, np.int32),
)
few = slice(0, 8)
inputs = (trunks.tokens[few], starts[few], (starts + sampled)[few], trunks.budgets[few])


def scores(mesh):
    # Chunks of five tokens per device, the last of which is not full.
    spec = dataclasses.replace(SPEC, model=world.shape, mesh=mesh, chunk=5)
    params = world.params
    if mesh is not None:
        params = parallel.place(params, parallel.shardings(params, mesh))
    arguments = (params, *inputs, RULES.allowed_tokens)
    found, texts = [], []
    for function in (response_logprobs, next_token_logprobs):
        program = function.lower(*arguments, spec=spec).compile()
        found.append(np.asarray(program(*arguments)))
        texts.append(program.as_text())
    # The last of the calls repeats some of its rows.
    found.append(thinking_energies(params, trunks, RULES.allowed_tokens, spec=spec))
    return found, texts


want, _ = scores(None)
assert all(np.abs(x).max() > 0.1 for x in want)
for sizes in ((1, 4, 1), (2, 2, 1), (1, 2, 2)):
    mesh = parallel.make_mesh(parallel.MeshShape(*sizes, 1), jax.devices())
    found, texts = scores(mesh)
    for one, other in zip(found, want):
        np.testing.assert_allclose(one, other, atol=2e-5)
    if sizes[2] == 1:
        # A sum over devices would be a sum of activations or logits.
        for text in texts:
            assert "all-gather" in text
            assert not re.findall(r"= (\\S+) (?:all-reduce|reduce-scatter)", text)
print("equal")
"""


@pytest.mark.slow
def test_several_devices_compute_the_scores_of_one_from_gathered_weights():
    """Slow: nine programs are compiled for four devices."""
    assert run_on_devices(PROGRAM, devices=4) == "equal"
