"""On-policy distillation: its expected gradient is that of the divergence from the teacher."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import enumerable_world
from bacr_jax.config import LossConfig
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.objective import Minibatch, loss_normalizers, objective
from bacr_jax.learner.teacher import Teacher
from bacr_jax.learner.train_step import score_batch
from enumerable_world import ALLOWED, BUDGET, draws, list_traces, rollouts
from learner_world import RULES, SPEC, WORLD, close, make_batch_by_hand

LARGEST = 9
DISTILL = dataclasses.replace(
    SPEC, loss=LossConfig(entropy_coef=0.0), value=None, b_max=BUDGET, distill=0.5
)


def expected_gradient(params, teacher):
    """The library's gradient over all traces of the policy, each by its chance, without rewards."""
    traces = list_traces((BUDGET,))
    prompts, trunks, branches = rollouts(traces)
    count = len(traces)
    batch = make_batch(
        prompts,
        trunks,
        branches,
        cuts=np.full((count, 1), BUDGET),
        thinking_advantages=np.zeros((count, BUDGET), np.float32),
        answer_advantages=np.zeros((count, 1), np.float32),
        value_targets=np.zeros((count, 1), np.float32),
    )
    scored = teacher.scores(params, batch, ALLOWED, 1)
    logprobs, _, mask = draws(params, traces, DISTILL.conditioning)
    chance = np.exp(np.where(mask, logprobs, 0.0).sum(1))
    rows = jax.tree.map(lambda x: jnp.asarray(x)[:, None], Minibatch(batch, teacher=scored))

    def total(params):
        def of_row(row):
            normalizers = loss_normalizers(row.batch, spec=DISTILL)
            return objective(params, None, row, normalizers, ALLOWED, spec=DISTILL)[0]

        return (chance * jax.vmap(of_row)(rows)).sum()

    return jax.jit(jax.grad(total))(params)


def divergence_gradient(params, teacher_logprobs):
    """Gradient of the divergence of every token's distribution, given the policy's own prefixes.

    The traces list both tokens at every place, so that the sum over traces is the exact mean.
    """
    traces = list_traces((BUDGET,))
    fixed, _, mask = draws(params, traces, DISTILL.conditioning)
    chance = np.exp(np.where(mask, fixed, 0.0).sum(1))

    def total(params):
        logprobs, _, _ = draws(params, traces, DISTILL.conditioning)
        terms = jnp.exp(logprobs - fixed) * (logprobs - teacher_logprobs)
        return 0.5 * (chance * jnp.where(mask, terms, 0.0).sum(1)).sum() / BUDGET

    return jax.jit(jax.grad(total))(params)


@pytest.mark.slow
def test_the_policy_with_its_largest_budget_is_its_own_teacher(monkeypatch):
    want_of = lambda: draws(WORLD.params, list_traces((BUDGET,)), DISTILL.conditioning)[0]
    with monkeypatch.context() as patch:
        patch.setattr(enumerable_world, "BUDGET", LARGEST)
        teacher_logprobs = want_of()
    assert np.abs(teacher_logprobs - want_of()).max() > 1e-3
    found = expected_gradient(WORLD.params, Teacher(DISTILL, LARGEST))
    want = divergence_gradient(WORLD.params, teacher_logprobs)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want)) > 1e-4
    close(found, want, 2e-6)


@pytest.mark.slow
def test_another_policy_is_the_teacher():
    """It has no budget as its input."""
    other = jax.tree.map(lambda x: x * 1.1, WORLD.params)
    other = {name: leaf for name, leaf in other.items() if name != "budget"}
    spec = dataclasses.replace(DISTILL, conditioning=None)
    found = expected_gradient(WORLD.params, Teacher(spec, LARGEST, other))
    teacher_logprobs = draws(other, list_traces((BUDGET,)), None)[0]
    want = divergence_gradient(WORLD.params, teacher_logprobs)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want)) > 1e-4
    close(found, want, 2e-6)


def test_a_teacher_scores_under_its_own_budget():
    batch = make_batch_by_hand()

    def score(rows):
        return score_batch(WORLD.params, rows, RULES.allowed_tokens, spec=SPEC)

    teacher_scores = Teacher(SPEC, 12).scores(WORLD.params, batch, RULES.allowed_tokens, 1)
    want = score(dataclasses.replace(batch, budgets=np.full(len(batch.budgets), 12, np.int32)))
    close(teacher_scores, want, atol=1e-5)
    gap = np.abs(teacher_scores.thinking - score(batch).thinking)
    assert gap[batch.thinking_mask].max() > 1e-3
