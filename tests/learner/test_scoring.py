"""Scores outside of updates: several devices compute those of one, and exchange weights only."""

import pytest

from devices_world import run_on_devices

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
