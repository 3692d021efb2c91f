"""The value head as the learner trains it: what it reads, V, and its loss (paper Eq. 11 and 12)."""

import jax
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, losses, rewards
from bacr_jax.learner.spec import LearnerSpec, phi_of
from bacr_jax.model import value
from bacr_jax.types import Params


def head_features(
    policy: Params,
    question: Float[Array, "B D"],
    budgets: Int[Array, "B"],
    cuts: Int[Array, "B M"],
    *,
    spec: LearnerSpec,
) -> Float[Array, "B M F"]:
    """What the value head reads of the policy, without gradient if `value.stop_gradient`."""
    assert spec.value is not None
    kind, phi = spec.value.input, None
    if spec.conditioning is not None:
        read = value.phi_budgets(budgets, cuts, kind=kind)
        of_read = phi_of(policy, read.reshape(-1), spec)
        assert of_read is not None
        phi = value.shared_phi(of_read).reshape(*read.shape, -1)
    if spec.value.stop_gradient:
        question, phi = jax.lax.stop_gradient((question, phi))
    return value.value_features(question, phi, budgets, cuts, b_max=spec.b_max, kind=kind)


def read_values(
    value_head: Params, features: Float[Array, "B M F"], *, spec: LearnerSpec
) -> Float[Array, "B M"]:
    """V in units of reward: the head's output, or Eq. 7 of the probabilities it stands for."""
    assert spec.value is not None
    output = value.values(value_head, features)
    if spec.value.loss == "cross_entropy":
        return rewards.dense_reward(jax.nn.sigmoid(output), coefficient=spec.reward_coefficient)
    return output


def value_errors(
    value_head: Params,
    features: Float[Array, "B M F"],
    returns: Float[Array, "B M"],
    *,
    spec: LearnerSpec,
) -> Float[Array, "B M"]:
    """Loss of the head at every cut: Eq. 12, or cross-entropy with the outcomes behind R.

    Eq. 7 is linear in the outcomes r and can be solved for them, so both losses learn from R.
    """
    assert spec.value is not None
    output = value.values(value_head, features)
    if spec.value.loss == "cross_entropy":
        outcomes = advantages.correctness_from_value(returns, coefficient=spec.reward_coefficient)
        return losses.correctness_loss(output, outcomes)
    return losses.value_loss(output, returns)
