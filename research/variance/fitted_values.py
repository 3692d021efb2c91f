"""Predicted values for the variance study. None is fitted to the traces for which it is used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from bacr_jax import rewards
from bacr_jax.advantages import correctness_from_value
from bacr_jax.learner import train_step
from bacr_jax.learner.scoring import in_portions
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.methods.reward_terms import progress_coefficient
from bacr_jax.model import value
from bacr_jax.model.value import ValueInput
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.runs import initial
from bacr_jax.types import Params
from research.variance.gradient_pool import Drawn, Frozen

# Settings of the regression: learning rate of Adam, maximum number of steps, and number of steps
# between evaluations on the held-out questions.
_RATE, _STEPS, _LOOK = 3e-3, 600, 25
# Number of rows for which the question states are computed per call.
_ROWS = 512


def _features(
    frozen: Frozen, questions: PromptedQuestions, drawn: Drawn, head: Params, spec: LearnerSpec
) -> Float[np.ndarray, "B M F"]:
    """Returns the input features of the head for each row.

    They are computed once per pair of question and budget.
    """
    pairs = np.stack([drawn.questions, drawn.budgets], 1)
    _, first, place = np.unique(pairs, axis=0, return_index=True, return_inverse=True)

    def of_rows(index: np.ndarray) -> Array:
        _, features = train_step.question_values(
            frozen.params,
            head,
            questions.at(drawn.questions[index], drawn.budgets[index]),
            jnp.asarray(drawn.budgets[index]),
            jnp.asarray(drawn.cuts[index]),
            spec=spec,
        )
        return features

    return in_portions(of_rows, first, _ROWS)[place.reshape(-1)]


def predicted_outcomes(
    frozen: Frozen, head: Params, spec: LearnerSpec, questions: PromptedQuestions, drawn: Drawn
) -> Float[np.ndarray, "B M"]:
    """Returns the probability of a correct answer at every cut that a head's V implies."""
    features = _features(frozen, questions, drawn, head, spec)
    values = value.values(head, jnp.asarray(features))
    coefficient = progress_coefficient(frozen.config.reward)
    return np.asarray(correctness_from_value(values, coefficient=coefficient))


def fit_value(
    frozen: Frozen, drawn: Drawn, kind: ValueInput, *, held_out: np.ndarray, seed: int
) -> tuple[Params, LearnerSpec]:
    """Fits a value head to the dense rewards (Eq. 12).

    Args:
      frozen: the frozen policy.
      drawn: rollouts to fit to.
      kind: the budgets that are inputs of the head (`value.input`).
      held_out: rows that are excluded from the fit and used for early stopping.
      seed: seed of the initialization.

    Returns:
      The parameters of the head, and the learner settings with this kind of head.
    """
    settings = frozen.policy.learner.value
    assert settings is not None
    reading = dataclasses.replace(settings, input=kind)
    spec = dataclasses.replace(frozen.policy.learner, value=reading)
    policy = dataclasses.replace(frozen.policy, learner=spec)
    head = initial.random_head(jax.random.key(seed), policy)
    assert head is not None
    features = _features(frozen, frozen.task_data.train, drawn, head, spec)
    coefficient = progress_coefficient(frozen.config.reward)
    targets = rewards.dense_reward(drawn.by_answer.mean(-1), coefficient=coefficient)
    fit = ~held_out
    head = value.with_bias(head, jnp.float32(targets[fit].mean()))
    adam = optax.adam(_RATE)
    state, best = adam.init(head), (np.inf, head)
    used, aside = ((jnp.asarray(features[x]), jnp.asarray(targets[x])) for x in (fit, held_out))

    @jax.jit
    def error(head: Params) -> Array:
        return jnp.square(value.values(head, aside[0]) - aside[1]).mean()

    for _ in range(_LOOK, _STEPS + 1, _LOOK):
        head, state = train_step.fit_value(head, state, *used, head_tx=adam, num_steps=_LOOK)
        loss = float(error(head))
        if loss < best[0]:
            best = (loss, head)
    return best[1], spec


def smoothed_means(
    extra: Drawn, questions: Int[np.ndarray, "B"], budgets: Int[np.ndarray, "B"], bandwidth: float
) -> Float[np.ndarray, "B M"]:
    """Estimates an oracle's V(q, b, b_j) as the mean outcome of additional rollouts.

    The rollouts have the same question, and are weighted by the distance of their budget from b.

    Args:
      extra: additional rollouts of the same questions, which are not in the pool.
      questions: question of each row.
      budgets: budget of each row.
      bandwidth: standard deviation of the Gaussian weights of other budgets, in tokens.
    """
    pairs, place = np.unique(np.stack([questions, budgets], 1), axis=0, return_inverse=True)
    means = np.zeros((len(pairs), extra.cuts.shape[1]))
    outcomes = extra.by_answer.mean(-1)
    for index, (question, budget) in enumerate(pairs):
        own = extra.questions == question
        away = (extra.budgets[own] - budget) / bandwidth
        weight = np.exp(-0.5 * (away**2 - (away**2).min()))
        means[index] = weight @ outcomes[own] / weight.sum()
    return means[place.reshape(-1)].astype(np.float32)
