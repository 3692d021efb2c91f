"""One update on eight devices is the update of one, in a process of its own with eight of them."""

import pytest

from devices_world import run_on_devices

PROGRAM = """
import dataclasses, re, sys
import jax, jax.numpy as jnp, numpy as np, optax
from bacr_jax import parallel
from bacr_jax.config import LossConfig, ValueConfig
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.objective import Minibatch, loss_normalizers
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.train_step import (
    accumulate, apply_gradients, init_state, no_gradients, train_step
)
from bacr_jax.model import qwen2, value
from bacr_jax.model.sizes import Qwen2Config
from devices_world import sums_between_copies
from rollout_world import World

shape = Qwen2Config(16, 16, 32, 2, 4, 2, 4, tie_embeddings=False)
conditioning = World().conditioning
params = qwen2.init(jax.random.key(0), shape, conditioning=conditioning)
params["budget"]["w2"] = jax.random.normal(jax.random.key(1), (16, 16))
head = value.init(
    jax.random.key(4),
    num_features=value.num_features(16, conditioned=True, kind="trace_and_cut"), hidden_size=8,
)
b, p, t, m, rng = 16, 4, 12, 2, np.random.default_rng(0)
ids = lambda high, *s: rng.integers(0, high, s).astype(np.int32)
full = lambda x, *s: np.full(s, x, np.int32)
batch = Batch(
    trunk=ids(16, b, p + t), prompt_lengths=full(p, b), question_start=full(0, b),
    question_end=full(p, b), sampled=ids(t + 1, b), budgets=full(t, b),
    cuts=np.tile(np.array([6, 12], np.int32), (b, 1)), branches=ids(16, b, m, 5),
    context=ids(12, b, m) + 4, forced=full(2, b, m), answered=ids(4, b, m),
    thinking_advantages=rng.normal(size=(b, t)).astype(np.float32),
    answer_advantages=rng.normal(size=(b, m)).astype(np.float32),
    value_targets=rng.random((b, m)).astype(np.float32),
    thinking_logprobs=np.full((b, t), -2.5, np.float32),
    answer_logprobs=np.full((b, m, 3), -2.5, np.float32),
)
# The difference of the parameters is then the gradient itself.
tx = optax.sgd(1.0)
spec = LearnerSpec(shape, conditioning, LossConfig(), ValueConfig(hidden_size=8), 12, chunk=16)
start = jax.tree.map(np.asarray, init_state(params, head, tx, tx))


def update(sizes, parts):
    n = int(np.prod(sizes))
    mesh = parallel.make_mesh(parallel.MeshShape(*sizes, 1), jax.devices()[:n])
    state = parallel.place(start, parallel.shardings(start, mesh))
    held = max(
        sum(s.data.nbytes for x in jax.tree.leaves(state.policy) for s in x.addressable_shards
            if s.device == device)
        for device in mesh.devices.flat
    )
    arguments = (
        state, Minibatch(parallel.place(batch, parallel.row_sharding(mesh))),
        parallel.place(np.ones(16, bool), parallel.replicated(mesh)),
    )
    how = dict(spec=dataclasses.replace(spec, mesh=mesh), policy_tx=tx, head_tx=tx)
    program = train_step.lower(*arguments, **how, micro_batches=parts).compile()
    old = state.policy["layers"]["q_kernel"]
    after, metrics, _ = program(*arguments)
    assert old.is_deleted()
    gradient = jax.tree.map(lambda x, y: x - np.asarray(y), start.policy, after.policy)
    where = jax.tree.map(lambda x: x.sharding, after)
    assert where == parallel.shardings(after, mesh), where
    return gradient, jax.tree.map(float, metrics), program.as_text(), held


want, metrics, _, whole = update((1, 1, 1), 1)
assert abs(metrics["policy/grad_norm"]) > 0.1
for sizes, parts in (((1, 8, 1), 1), ((1, 4, 2), 2), ((2, 4, 1), 2)):
    gradient, found, text, held = update(sizes, parts)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), gradient, want)
    for name in metrics:
        np.testing.assert_allclose(found[name], metrics[name], atol=1e-5, rtol=1e-5)
    # Weights are gathered where they are used, a layer at a time, activations are not;
    # gradients are summed.
    gathered = re.findall(r"= f32\\[([\\d,]+)\\]\\S* all-gather", text)
    assert f"16,{32 // sizes[2]}" in gathered, gathered
    assert not {shape for shape in gathered if shape.startswith(("16,16,16", "16,26,16"))}
    assert "all-reduce" in text or "reduce-scatter" in text
    if sizes[0] > 1:
        in_loops, after = sums_between_copies(text, 8)
        assert max(in_loops, default=0) < 16 * 16 < sum(after), (in_loops, after)
    assert held < 1.3 * whole / (sizes[1] * sizes[2]), (held, whole)

# One micro-batch at a time: every copy adds up gradients of its own, in fp32.
mesh = parallel.make_mesh(parallel.MeshShape(2, 4, 1, 1), jax.devices())
split = dict(spec=dataclasses.replace(spec, mesh=mesh))
state = parallel.place(start, parallel.shardings(start, mesh))
total = loss_normalizers(batch, **split)
halves = [parallel.place(jax.tree.map(lambda x: x[part], batch), parallel.row_sharding(mesh))
          for part in (slice(0, 8), slice(8, 16))]
given = [(state, Minibatch(rows), total, np.ones(16, bool)) for rows in halves]
grads = no_gradients(*given[0], **split)
for one in given:
    grads, _ = accumulate(grads, *one, **split)
kernel = grads.policy["layers"]["q_kernel"]
assert kernel.shape == (2, 2, 16, 16) and kernel.dtype == jnp.float32
assert kernel.addressable_shards[0].data.shape == (1, 2, 4, 16)
after, _ = apply_gradients(state, grads, **split, policy_tx=tx, head_tx=tx)
gradient = jax.tree.map(lambda x, y: x - np.asarray(y), start.policy, after.policy)
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), gradient, want)
print("fine")
"""


@pytest.mark.slow
def test_eight_devices_give_the_gradient_of_one():
    """Slow: four updates compiled for up to eight devices."""
    assert run_on_devices(PROGRAM) == "fine"
