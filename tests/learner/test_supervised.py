"""Supervised training: the loss by hand, masked tokens, and that a step learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import LossConfig
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.supervised import (
    rows_right,
    supervised_loss,
    supervised_optimizer,
    supervised_step,
)
from bacr_jax.model import qwen2
from bacr_jax.model.sizes import Qwen2Config
from devices_world import run_on_devices
from rollout_world import init

SHAPE = Qwen2Config(13, 8, 16, 1, 2, 1, 4, tie_embeddings=True)
SPEC = LearnerSpec(SHAPE, None, LossConfig(), None, b_max=4, chunk=8)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 13, (3, 7)))
MASK = jnp.asarray(np.arange(7) >= [[2], [5], [7]])  # the last row has no target


@functools.cache
def params():
    return init(jax.random.key(0), SHAPE)


@jax.jit
def logits_of(params, tokens):
    return qwen2.logits(params, qwen2.forward(params, tokens, config=SHAPE))


def test_the_loss_is_the_mean_over_targets_alone():
    logits = logits_of(params(), TOKENS)
    logp = np.asarray(jax.nn.log_softmax(logits))
    rows = [-logp[i, t - 1, TOKENS[i, t]] for i in range(3) for t in range(7) if MASK[i, t]]
    loss = jax.jit(supervised_loss, static_argnames="spec")(params(), TOKENS, MASK, spec=SPEC)
    np.testing.assert_allclose(loss, np.mean(rows), rtol=1e-5)


def test_steps_learn_a_batch_by_heart_and_a_zero_rate_learns_nothing():
    tx = supervised_optimizer()
    state, losses = (jax.tree.map(jnp.copy, params()), tx.init(params())), []
    for rate in (0.0, *[0.03] * 30):
        *state, loss = supervised_step(*state, TOKENS, MASK, rate, spec=SPEC, tx=tx)
        losses.append(float(loss))
    assert losses[1] == losses[0] and losses[-1] < 0.3 * losses[0]


def test_a_row_is_right_if_all_that_is_judged_in_it_is_the_likeliest():
    logits = logits_of(params(), TOKENS)
    likeliest = np.asarray(logits.argmax(-1))[:, :-1]
    tokens = np.asarray(TOKENS).copy()
    # One token of each row is made the likeliest after those before it, as it is.
    tokens[:, 4] = likeliest[:, 3]
    one = np.zeros((3, 7), bool)
    one[:, 4] = True
    assert np.asarray(rows_right(params(), tokens, one, spec=SPEC)).all()
    wrong = one.copy()
    wrong[1, 2] = True
    tokens[1, 2] = (likeliest[1, 1] + 1) % 13
    tokens[1, 4] = logits_of(params(), tokens)[1, 3].argmax()
    found = np.asarray(rows_right(params(), tokens, wrong, spec=SPEC))
    assert found.tolist() == [True, False, True]


# With several processes, the host can read only arrays of which each device has a copy.
READ = """
import dataclasses
import jax, numpy as np
from bacr_jax import parallel
from bacr_jax.config import LossConfig
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.supervised import rows_right, supervised_optimizer, supervised_step
from bacr_jax.model import qwen2
from bacr_jax.model.sizes import Qwen2Config

shape = Qwen2Config(13, 8, 16, 1, 2, 2, 4, tie_embeddings=True)
one = LearnerSpec(shape, None, LossConfig(), None, b_max=4, chunk=8)
start = jax.tree.map(np.asarray, qwen2.init(jax.random.key(0), shape))
tokens = np.random.default_rng(2).integers(0, 13, (10, 7)).astype(np.int32)
mask = np.arange(7) >= 6
tx = supervised_optimizer()
for sizes in ((1, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2)):
    mesh = parallel.make_mesh(parallel.MeshShape(*sizes, 1), jax.devices()[: np.prod(sizes)])
    spec = dataclasses.replace(one, mesh=mesh)
    state = parallel.place(start, parallel.shardings(start, mesh))
    # 8 rows are divided evenly, and 10 rows are padded.
    for rows in (8, 10):
        judged = np.broadcast_to(mask, (rows, 7))
        right = rows_right(state, tokens[:rows], judged, spec=spec)
        assert right.is_fully_replicated, (sizes, rows, right.sharding)
        expected = rows_right(start, tokens[:rows], judged, spec=one)
        np.testing.assert_array_equal(right, expected)
    loss = supervised_step(state, tx.init(state), tokens, mask | judged, 0.1, spec=spec, tx=tx)[2]
    assert loss.is_fully_replicated, (sizes, loss.sharding)
print("fine")
"""


def test_what_the_host_reads_is_on_every_device():
    assert run_on_devices(READ, devices=4) == "fine"
