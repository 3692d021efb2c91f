"""The KL of a step by hand, and steps that are shortened until they are within the bound."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.config import TrainConfig
from bacr_jax.learner import trust_region, updates
from bacr_jax.learner.batch import only_rows
from bacr_jax.learner.train_step import init_state, score_batch
from bacr_jax.learner.trust_region import (
    SLACK,
    interpolated,
    kl_sum,
    measured_micro_batches,
    num_measured,
    shortened,
    step_scale,
)
from bacr_jax.learner.updates import Updates
from devices_world import run_on_devices
from learner_world import RULES, SPEC, WORLD, make_batch_by_hand, state_of

BY_TOKENS = {"micro_batch_tokens": 50, "length_buckets": 2}
PADDING_FREE = {"micro_batch_tokens": 28, "padding_free": True}
BOUND = 1e-3


def test_the_kl_of_three_tokens_by_hand():
    # exp(d) - 1 - d of d = log 2 is 1 - log 2, of d = -log 2 it is log 2 - 1/2; the last token is
    # padding, and its log-probability may be anything.
    old = jnp.log(jnp.array([[0.25, 0.5, 0.0]]))
    new = jnp.log(jnp.array([[0.5, 0.25, 0.7]]))
    total, tokens = kl_sum(old, new, jnp.array([[True, True, False]]))
    assert float(tokens) == 2
    assert float(total) == pytest.approx(0.5, rel=1e-6)


def test_the_estimate_is_the_divergence_in_expectation():
    # Of 10 tokens drawn from (.2, .8) two are the first: KL to (.4, .6) is exact.
    old = np.log([0.2] * 2 + [0.8] * 8)
    new = np.log([0.4] * 2 + [0.6] * 8)
    total, tokens = kl_sum(*(jnp.asarray(x)[None] for x in (old, new)), jnp.ones((1, 10), bool))
    exact = 0.2 * math.log(0.2 / 0.4) + 0.8 * math.log(0.8 / 0.6)
    assert float(total / tokens) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("kl", "scale"),
    [(0.04, 0.5), (0.01, 1.0), (0.001, 1.0), (0.0, 1.0), (math.nan, 0.0), (math.inf, 0.0)],
)
def test_the_scale_of_a_step_by_hand(kl, scale):
    assert step_scale(kl, bound=0.01) == pytest.approx(scale)


def softmax_kl(logits):
    """KL(old || logits) of one distribution whose old logits are 0."""
    size = len(logits)
    return float(-np.log(size) - np.mean(jax.nn.log_softmax(jnp.asarray(logits))))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4),
    st.floats(1e-4, 0.1),
)
def test_a_shortened_step_is_within_the_bound_and_on_the_line_of_the_step(step, bound):
    new = jnp.asarray(step, jnp.float32)
    whole = softmax_kl(new)
    after, kl, scale = shortened(
        {"logits": jnp.zeros(4)},
        {"logits": jnp.array(new)},
        lambda policy: softmax_kl(policy["logits"]),
        bound,
    )
    assert kl == pytest.approx(whole)
    assert softmax_kl(after["logits"]) <= SLACK * bound
    np.testing.assert_allclose(after["logits"], scale * np.asarray(new), atol=1e-5)
    assert scale == 1.0 if whole <= bound else 0.0 <= scale < 1.0


def test_a_step_that_no_factor_brings_within_the_bound_is_dropped():
    old = {"w": jnp.array([1.0, 2.0])}
    after, kl, scale = shortened(old, {"w": jnp.array([5.0, 5.0])}, lambda _: 0.5, 0.1)
    assert (kl, scale) == (0.5, 0.0)
    np.testing.assert_array_equal(after["w"], old["w"])


def test_a_step_to_numbers_that_are_not_finite_is_dropped():
    old = {"w": jnp.array([1.0, 2.0])}
    after, _, scale = shortened(old, {"w": jnp.array([jnp.inf, 0.0])}, lambda _: math.nan, 0.1)
    assert scale == 0.0
    np.testing.assert_array_equal(after["w"], old["w"])


def test_a_half_step_is_half_way():
    after = interpolated({"w": jnp.array([1.0])}, {"w": jnp.array([3.0])}, jnp.float32(0.5))
    np.testing.assert_array_equal(after["w"], [2.0])


@pytest.mark.parametrize(
    ("traces", "chosen"),
    [
        ([24, 24, 16], [0, 1, 2]),  # 64 traces
        ([32] * 8, [2, 6]),  # 64 of 256
        ([8] * 16, [1, 3, 5, 7, 9, 11, 13, 15]),  # 64 of 128
        ([512], [0]),  # one micro-batch can't be split
        ([40, 30], [0, 1]),  # one of them has too few
        ([0, 0], [0, 1]),
        ([0, 32, 0, 32, 32, 32], [3, 5]),  # only those with traces
    ],
)
def test_the_micro_batches_on_which_a_step_is_measured(traces, chosen):
    assert measured_micro_batches(traces) == chosen


@pytest.mark.parametrize(
    ("traces", "chosen"),
    [
        ([8] * 8, [1, 3, 5, 7]),
        ([3] * 8, [1, 3, 5, 7]),  # fewer traces do not change the number
        ([0, 8, 0, 8, 0, 8, 0, 8], [1, 3, 5, 7]),
        ([0, 0, 8, 8, 8, 8, 8, 8], [2, 4, 5, 7]),
        ([0, 0, 0, 0, 0, 0, 0, 1], [0, 1, 2, 7]),
        ([0] * 8, [0, 1, 2, 3]),
    ],
)
def test_a_given_number_of_micro_batches_is_chosen_whatever_their_tokens(traces, chosen):
    assert measured_micro_batches(traces, 4) == chosen


def test_the_number_of_measured_micro_batches_follows_from_the_sizes():
    assert num_measured(32, 256) == 8
    assert num_measured(8, 512) == 1
    assert num_measured(8, 16) == 8  # fewer traces than are measured


@pytest.fixture(scope="module")
def batch():
    return make_batch_by_hand()


def updated(batch, bound, tx, **config):
    update = Updates(
        SPEC, TrainConfig(**{"minibatches": 1} | config), tx, tx, RULES.allowed_tokens, bound
    )
    return update(state_of(policy_tx=tx, head_tx=tx), batch)


def kl_between(batch, old, new):
    """Mean k3 of the batch's tokens, by the sampler's own log-probabilities as the old ones."""

    def score(policy):
        return [score_batch(policy, batch, RULES.allowed_tokens, spec=SPEC)]

    return trust_region.mean_kl(score(old), score(new), [batch])


@pytest.mark.parametrize(
    "split",
    [{}, pytest.param({"micro_batch_rows": 2}, marks=pytest.mark.slow), BY_TOKENS, PADDING_FREE],
    ids=["whole", "rows", "tokens", "padding free"],
)
def test_an_update_is_shortened_to_the_bound_however_it_is_split(batch, split):
    tx = optax.sgd(1.0)
    start = jax.tree.map(np.asarray, state_of().policy)
    whole, _ = updated(batch, None, tx, **split)
    limited, metrics = updated(batch, BOUND, tx, **split)
    kl, scale = float(metrics["policy/update_kl"]), float(metrics["policy/update_scale"])
    assert kl == pytest.approx(kl_between(batch, start, whole.policy), rel=1e-3)
    assert kl > 2 * BOUND and 0.0 < scale < 0.8
    assert kl_between(batch, start, limited.policy) <= SLACK * BOUND * 1.001
    for x, y, z in zip(*map(jax.tree.leaves, (start, whole.policy, limited.policy))):
        np.testing.assert_allclose(z, x + scale * (y - x), atol=1e-6)
    # The value head takes the whole step.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), limited.head, whole.head)


@pytest.mark.parametrize("split", [{"micro_batch_rows": 1}, BY_TOKENS, PADDING_FREE])
def test_a_step_is_measured_on_the_chosen_micro_batches_only(batch, split, monkeypatch):
    tx = optax.sgd(1.0)
    monkeypatch.setattr(trust_region, "MEASURED_TRACES", 1)
    scored = []
    score = trust_region.mean_kl
    monkeypatch.setattr(
        trust_region,
        "mean_kl",
        lambda old, new, parts: scored.append(parts) or score(old, new, parts),
    )
    limited, metrics = updated(batch, BOUND, tx, **split)
    for parts in scored:
        (rows,) = parts
        assert 0 < np.count_nonzero(rows.sampled) < len(batch.sampled)
    assert 0.0 < float(metrics["policy/update_scale"]) < 1.0
    start = jax.tree.map(np.asarray, state_of().policy)
    (rows,) = scored[0]
    kl = kl_between(rows, start, updated(batch, None, tx, **split)[0].policy)
    assert float(metrics["policy/update_kl"]) == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("split", [{"micro_batch_rows": 1}, BY_TOKENS, PADDING_FREE])
def test_micro_batches_without_tokens_do_not_hide_a_large_step(batch, split, monkeypatch):
    """Traces that the loss leaves out have no tokens, and their KL would be 0."""
    monkeypatch.setattr(trust_region, "MEASURED_TRACES", 1)
    size = len(batch.sampled)
    for kept in itertools.combinations(range(size), 2):
        keep = np.isin(np.arange(size), kept)
        _, metrics = updated(only_rows(batch, keep), BOUND, optax.sgd(3.0), **split)
        assert float(metrics["policy/update_kl"]) > 0.0, kept


def test_traces_without_tokens_need_no_other_program(batch, monkeypatch):
    """The measured traces are scored by a program that is compiled for their number."""
    scored = []

    def recorded(policy, rows, *args, micro_batches, **settings):
        scored.append((rows.trunk.shape, micro_batches))
        return score_batch(policy, rows, *args, micro_batches=micro_batches, **settings)

    monkeypatch.setattr(updates, "score_batch", recorded)
    monkeypatch.setattr(trust_region, "MEASURED_TRACES", 1)
    size = len(batch.sampled)
    for with_tokens in (size, 1, 0):
        keep = np.arange(size) < with_tokens
        updated(only_rows(batch, keep), 10.0, optax.sgd(1.0), micro_batch_rows=1)
    assert len(scored) == 3 and len(set(scored)) == 1


@pytest.mark.parametrize("split", [{"micro_batch_rows": 1}, BY_TOKENS, PADDING_FREE])
def test_a_step_within_the_bound_has_one_more_pass_and_a_shortened_one_two(
    batch, split, monkeypatch
):
    """The pass of the gradients gives the scores before the step."""
    passes = []

    def counted(*args, **settings):
        passes.append(args)
        return score_batch(*args, **settings)

    monkeypatch.setattr(updates, "score_batch", counted)
    monkeypatch.setattr(trust_region, "MEASURED_TRACES", 1)
    updated(batch, 10.0, optax.sgd(1.0), **split)
    assert len(passes) == 1
    _, metrics = updated(batch, BOUND, optax.sgd(1.0), **split)
    assert float(metrics["policy/update_scale"]) < 1.0 and len(passes) >= 3


def assert_equal_but_for_rounding(actual, expected):
    """Checks that two updates with and without a bound have the same result.

    The program with a bound also returns scores, so XLA can fuse its operations in another way.
    On some processors a result then differs in its last bit.
    """
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-9)
    jax.tree.map(compare, actual, expected)


def test_a_bound_that_no_step_meets_changes_nothing_but_two_metrics(batch):
    tx = optax.adam(1e-4)
    whole, metrics = updated(batch, None, tx, minibatches=2)
    limited, measured = updated(batch, 10.0, tx, minibatches=2)
    assert_equal_but_for_rounding(dataclasses.asdict(limited), dataclasses.asdict(whole))
    assert set(measured) - set(metrics) == {"policy/update_kl", "policy/update_scale"}
    assert (
        float(measured["policy/update_scale"]) == 1.0 and float(measured["policy/update_kl"]) > 0.0
    )
    assert_equal_but_for_rounding({name: measured[name] for name in metrics}, metrics)


def test_both_updates_of_a_step_are_bounded_and_moments_are_those_of_whole_steps(batch):
    tx = optax.adam(0.03)
    whole, _ = updated(batch, None, tx, minibatches=2)
    limited, metrics = updated(batch, BOUND, tx, minibatches=2)
    assert float(metrics["policy/update_scale"]) < 1.0
    assert int(limited.updates) == int(whole.updates) == 2
    first = lambda state: jax.tree.leaves(state.policy_opt)[0]
    assert_equal_but_for_rounding(first(limited), first(whole))


def test_a_step_that_leaves_the_policy_alone_is_not_measured(batch):
    tx = optax.sgd(1.0)
    update = Updates(SPEC, TrainConfig(minibatches=1), tx, tx, RULES.allowed_tokens, BOUND)
    start = jax.tree.map(np.asarray, state_of().policy)
    state, metrics = update(state_of(), batch, update_policy=False)
    jax.tree.map(np.testing.assert_array_equal, state.policy, start)
    assert (float(metrics["policy/update_kl"]), float(metrics["policy/update_scale"])) == (0.0, 1.0)


def test_of_a_policy_with_a_frozen_base_only_the_trained_part_is_shortened(batch):
    tx = optax.sgd(30.0)
    trained = {"budget": WORLD.params["budget"]}
    frozen = {name: leaf for name, leaf in WORLD.params.items() if name != "budget"}
    state = init_state(jax.tree.map(jnp.array, trained), None, tx, tx)
    update = Updates(SPEC, TrainConfig(minibatches=1), tx, tx, RULES.allowed_tokens, BOUND)
    after, metrics = update(state, batch, frozen=frozen)
    assert set(after.policy) == {"budget"} and 0.0 < float(metrics["policy/update_scale"]) < 1.0
    whole = {**frozen, **after.policy}
    assert 0.0 < kl_between(batch, WORLD.params, whole) <= SLACK * BOUND * 1.001


SHARDED = """
import dataclasses, itertools
import jax, numpy as np, optax
from bacr_jax import parallel
from bacr_jax.config import TrainConfig
from bacr_jax.learner import trust_region
from bacr_jax.learner.updates import Updates
from learner_world import RULES, SPEC, make_batch_by_hand, state_of

batch = jax.tree.map(lambda x: np.concatenate([np.asarray(x)] * 4), make_batch_by_hand())
tx = optax.sgd(1.0)
start = jax.tree.map(np.asarray, state_of())
found = []
# A part of the micro-batches is measured in the second case.
cases = (({}, trust_region.MEASURED_TRACES), ({"micro_batch_rows": 8}, 1))
for (split, trust_region.MEASURED_TRACES), sizes in itertools.product(
    cases, ((1, 1, 1), (1, 8, 1), (2, 4, 1))
):
    mesh = parallel.make_mesh(
        parallel.MeshShape(*sizes, 1), jax.devices()[: int(np.prod(sizes))]
    )
    state = parallel.place(start, parallel.shardings(start, mesh))
    allowed = parallel.place(np.asarray(RULES.allowed_tokens), parallel.replicated(mesh))
    update = Updates(
        dataclasses.replace(SPEC, mesh=mesh), TrainConfig(minibatches=1, **split), tx, tx,
        allowed, 1e-3,
    )
    after, metrics = update(state, batch)
    where = jax.tree.map(lambda x: x.sharding, after.policy)
    assert where == parallel.shardings(after.policy, mesh), where
    found.append((jax.tree.map(np.asarray, after.policy), jax.tree.map(float, metrics)))
for index, (policy, metrics) in enumerate(found):
    one_device = found[index // 3 * 3]
    assert metrics["policy/update_scale"] < 1.0
    for name in ("policy/update_kl", "policy/update_scale"):
        np.testing.assert_allclose(metrics[name], one_device[1][name], rtol=1e-3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), policy, one_device[0])
print("fine")
"""


@pytest.mark.slow
def test_eight_devices_shorten_a_step_as_one_does():
    """Slow: updates compiled for up to eight devices."""
    assert run_on_devices(SHARDED) == "fine"
