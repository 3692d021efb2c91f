"""The arms of the variance study: different ways to compute advantages from the same rollouts.

The arms call the same functions as training (`methods.anytime`, `methods.bacr`, `advantages`). All
of them estimate the gradient of the same objective, sum_j w_j R_j with the dense rewards R of
Eq. 7. In terms of the outcomes r, the objective is sum_j u_j r_j (`rewards.outcome_coefficients`).
BRPO uses u as its prior.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, rewards
from bacr_jax.config import Config
from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.methods import GroupBatch, anytime, bacr
from bacr_jax.methods.baselines import baseline_of
from bacr_jax.methods.reward_terms import cut_weights, progress_coefficient
from research.variance import control_variates as variates
from research.variance.gradient_pool import Drawn, Rollouts

# How the outcome at a cut is computed from the sampled answers ("reading"):
# one: from one answer per cut, which cuts after the natural end of the thinking share, as in bacr.
# several: the mean over A answers per cut, as in AnytimeReasoner.
# pooled: as several, but cuts after the natural end of the thinking share all their answers.
Reading = Literal["one", "several", "pooled"]
# Number of updates of the running moments, after which they have converged to the moments of the
# batch, and the decay per update.
_SETTLED, _DECAY = 60, 0.9


@dataclasses.dataclass(frozen=True)
class Groups(Rollouts):
    """R groups of G traces, with predictions that do not depend on these traces.

    Attributes:
      values: predicted outcomes, keyed by the name of the predictor. No predictor has been fitted
        to these traces.
      weighted: error of the oracle's return for each segment. It is the mean over the question's
        traces outside the group, weighted by the squared norms of their scores.
    """

    values: Mapping[str, Float[np.ndarray, "R G M"]]
    weighted: Float[np.ndarray, "R M"] | None = None

    def outcomes(self, reading: Reading) -> Float[np.ndarray, "R G M"]:
        """Returns the outcome at every cut. `reading` defines how it depends on the answers."""
        if reading == "several":
            return self.by_answer.mean(-1)
        source = rewards.distinct_cuts(self.cuts, self.thinking)
        if reading == "one":
            return np.take_along_axis(self.by_answer[..., 0], source, -1)
        same = source[..., :, None] == source[..., None, :]
        mean = self.by_answer.mean(-1)
        return np.asarray((same * mean[..., None, :]).sum(-1) / same.sum(-1), np.float32)

    def batch(self, reading: Reading) -> GroupBatch:
        """Returns the groups in the form that the methods receive in training."""
        outcomes, closed = self.outcomes(reading), self.thinking < self.budgets
        fields: dict[str, Any] = {
            "questions": np.zeros(len(outcomes), np.int32),
            "budgets": self.budgets,
            "cuts": self.cuts,
            "outcomes": outcomes,
            "by_answer": self.by_answer if reading == "several" else outcomes[..., None],
            "thinking": self.thinking,
            "lengths": self.thinking,
            "closed": closed,
            "closed_by_tag": closed,
            "score_norm_proxy": self.surprise,
            "fraction": np.float32(0.5),
            "extra": {},
        }
        return GroupBatch(**jax.tree.map(jnp.asarray, fields))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Inputs that all arms share.

    Attributes:
      config: config of the run, which defines the objective by the cuts' weights and dense reward.
      earlier: state that each arm has learned from earlier batches (`Arm.learned`), keyed by
        `Arm.reads`.
    """

    config: Config
    earlier: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def weights(self) -> Float[np.ndarray, "M"]:
        """Returns the total weight u_j of each outcome in the objective."""
        shares = rewards.cut_shares(self.config.cuts.weights, self.config.cuts.count)
        coefficient = progress_coefficient(self.config.reward)
        return np.asarray(rewards.outcome_coefficients(shares, coefficient=coefficient))


class Credit(NamedTuple):
    """Result of an arm: the advantages of the segments, and the baselines of the answers."""

    thinking: Float[Array, "R G M"]
    answers: Float[Array, "R G M"]


# --- kinds of arms --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arm(abc.ABC):
    """Base class for a way to compute advantages.

    The defaults are for an unbiased arm that does not learn from earlier batches.
    """

    name: str
    label: str

    def reads(self, reading: Reading) -> str:
        """Returns the name of the arm combined with a reading of the answers."""
        return f"{self.name}/{reading}"

    @abc.abstractmethod
    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """Computes the advantages of the groups."""

    def learned(self, setting: Setting, groups: Groups, reading: Reading) -> Any:
        """Returns the state that the arm learns from earlier batches, or None if it needs none."""
        return None

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "M"]:
        """Returns the factor by which the baseline scales the expected gradient of each segment.

            E estimate = sum_s factors_s g_s

        A factor is less than 1 if the baseline contains the trace's reward itself. It is NaN if the
        scaling has no exact value, in which case it is measured on the pool.
        """
        return np.ones(cuts)

    def answer_factor(self, group: int, answers: int) -> float:
        """Returns the factor for the answers' gradient. Defaults to the factor for thinking."""
        return float(self.factors(group, 1)[0])


@dataclasses.dataclass(frozen=True)
class GroupArm(Arm):
    """Advantages of `anytime.brpo_advantage`.

    The baseline of an answer is the mean of the answers at the same cut.
    """

    mode: Literal["brpo", "v1", "v2", "none"]
    loo: bool = False

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """See `Arm`."""
        batch, prior = groups.batch(reading), jnp.asarray(setting.weights, jnp.float32)
        thinking = anytime.brpo_advantage(batch.outcomes, prior, mode=self.mode, loo=self.loo)
        if self.mode == "none":
            return Credit(thinking, jnp.zeros_like(batch.outcomes))
        credit = anytime.answer_advantage(batch.by_answer)
        return Credit(thinking, (batch.by_answer - credit).mean(-1))

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "M"]:
        """See `Arm`. V2 contains the trace itself, and is the whole baseline or a share of it."""
        if self.loo or self.mode not in ("brpo", "v2"):
            return super().factors(group, cuts)
        share = (cuts - np.arange(cuts)) / cuts if self.mode == "brpo" else np.ones(cuts)
        return 1.0 - share / group

    def answer_factor(self, group: int, answers: int) -> float:
        """See `Arm`. The baseline of an answer is a mean that contains the answer itself."""
        return 1.0 if self.mode == "none" else 1.0 - 1.0 / (answers if answers > 1 else group)


@dataclasses.dataclass(frozen=True)
class ValueArm(Arm):
    """Budget-conditioned advantages of Eq. 10 with any baseline (`methods.bacr`).

    Attributes:
      value: name of the predicted outcomes to use.
      options: settings of `advantage` that differ from Eq. 10 with reward-to-go.
      previous: True if the baseline also depends on the trace's previous outcome.
      by_norms: True if the baseline is shifted to the optimum for the true score norms,
        b_s = E|g_s|^2 G_s / E|g_s|^2.
    """

    value: str = "trace_and_cut"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    previous: bool = False
    by_norms: bool = False

    def _settings(self, config: Config) -> MethodSettings:
        """Returns the run's method settings with the arm's `advantage`, without normalization."""
        keys = {"baseline": "value", "credit": "to_go", "score_weighted": False, **self.options}
        advantage = dataclasses.replace(config.advantage, **keys, normalise="none")
        return dataclasses.replace(resolve(config).method, advantage=advantage, method="bacr")

    def _inputs(
        self, setting: Setting, groups: Groups, reading: Reading
    ) -> tuple[GroupBatch, Array, Array]:
        """Returns the batch, the dense rewards R of Eq. 7, and the predicted values of R."""
        batch = groups.batch(reading)
        reward = bacr.dense_rewards(resolve(setting.config).method, None, batch)
        predicted = jnp.asarray(groups.values[self.value], jnp.float32)
        coefficient = progress_coefficient(setting.config.reward)
        return batch, reward, rewards.dense_reward(predicted, coefficient=coefficient)

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """See `Arm`."""
        settings = self._settings(setting.config)
        batch, reward, values = self._inputs(setting, groups, reading)
        left: tuple[Any, Any] = setting.earlier.get(self.reads(reading)) or (None, None)
        state, slope = left
        baseline = baseline_of(settings)
        credit = bacr.budget_conditioned_advantages(
            settings, baseline, state, batch, reward, values
        )
        thinking = credit.thinking
        expected = baseline.estimate(state or {}, batch, reward, values).correctness
        if self.previous:
            surprise = jnp.asarray(variates.before(batch.outcomes - expected))
            thinking = variates.history_advantage(thinking, surprise, slope)
        if self.by_norms:
            assert groups.weighted is not None
            thinking -= jnp.asarray(groups.weighted)[:, None]
        return Credit(thinking, expected)

    def learned(self, setting: Setting, groups: Groups, reading: Reading) -> Any:
        """Returns the state of the method after many such batches, and the slope of `previous`.

        The slope is the regression coefficient of the previous outcome, or None for arms that do
        not use it. Returns None if neither is needed.
        """
        settings = self._settings(setting.config)
        baseline = baseline_of(settings)
        state = bacr.init_state(baseline, 0)
        if state is None and not self.previous:
            return None
        batch, reward, values = self._inputs(setting, groups, reading)
        both = square = jnp.zeros(settings.cuts.count, jnp.float32)
        blended = lambda old, new: _DECAY * old + (1.0 - _DECAY) * new
        for _ in range(_SETTLED):
            if self.previous:
                estimate = baseline.estimate(state or {}, batch, reward, values)
                residual = advantages.bcae_advantage(reward, estimate.reward)
                thinking = advantages.thinking_credit(
                    residual, cut_weights(settings.cuts), mode=settings.advantage.credit
                )
                surprise = jnp.asarray(variates.before(batch.outcomes - estimate.correctness))
                moments = variates.history_moments(thinking, surprise)
                both, square = map(blended, (both, square), moments)
            state = bacr.update(baseline, state, batch, reward, values)
        return state, both / jnp.maximum(square, 1e-6) if self.previous else None


@dataclasses.dataclass(frozen=True)
class WeightedArm(Arm):
    """Baseline that is a weighted mean of the group.

    The weights are the lengths of the traces (OPO), or cumulative score norms (`path_weights`).
    """

    weights: Literal["length", "path"]
    loo: bool = False

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """See `Arm`."""
        if self.weights == "length":
            weights = reached = variates.length_weights(groups.tokens)
        else:
            weights = variates.path_weights(groups.energy, groups.tokens)
            # A trace that ended before a cut still has an answer there. The weight of this answer
            # is the norm accumulated over the whole trace.
            reached = np.cumsum(groups.energy, -1)
        outcomes = groups.outcomes(reading)
        returns = returns_to_go(outcomes, setting.weights)
        mean = functools.partial(variates.weighted_mean, loo=self.loo)
        thinking, answers = returns - mean(returns, weights), mean(outcomes, reached)
        return Credit(jnp.asarray(thinking, jnp.float32), jnp.asarray(answers, jnp.float32))

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "M"]:
        """See `Arm`."""
        return np.full(cuts, 1.0 if self.loo else np.nan)


@dataclasses.dataclass(frozen=True)
class SearchedArm(Arm):
    """A value plus a correction, which a regression on earlier batches predicts from features.

    Attributes:
      features: names of the regression's features (`control_variates.regressors`).
      value: name of the predicted outcomes to use.
      by_norm: True to weight the entries of the regression by their surprise instead of their
        number of tokens.
      loo: True to subtract the mean residual of the other traces of the group first.
    """

    features: tuple[str, ...]
    value: str = "trace_and_cut"
    by_norm: bool = False
    loo: bool = False

    def _to_explain(
        self, setting: Setting, groups: Groups, reading: Reading
    ) -> tuple[Float[np.ndarray, "R G M"], Float[np.ndarray, "R G M F"]]:
        """Returns the target and the features of the regression."""
        outcomes, predicted = groups.outcomes(reading), groups.values[self.value]
        residual, given = variates.regressors(outcomes, predicted, setting.weights, self.features)
        return (residual - variates.others_mean(residual) if self.loo else residual), given

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """See `Arm`."""
        residual, given = self._to_explain(setting, groups, reading)
        explained = np.einsum("rgmf,mf->rgm", given, setting.earlier[self.reads(reading)])
        answers = groups.values[self.value]
        if self.loo:
            answers = answers + variates.others_mean(groups.outcomes(reading) - answers)
        return Credit(jnp.asarray(residual - explained), jnp.asarray(answers))

    def learned(self, setting: Setting, groups: Groups, reading: Reading) -> Any:
        """Returns the slopes of the regression."""
        residual, given = self._to_explain(setting, groups, reading)
        weights = groups.surprise if self.by_norm else groups.tokens
        return variates.fitted_slopes(given, residual, weights)


# --- the arms -------------------------------------------------------------------------------------

_SHRUNK, _WEIGHTED = {"baseline": "shrink"}, {"score_weighted": True}
_PAST, _DOUBT = ("previous", "earlier", "first"), ("previous_doubt", "doubt")
_OTHERS = ("others", "others_previous")

ARMS: tuple[Arm, ...] = (
    GroupArm("none", "no baseline", "none"),
    GroupArm("group_mean", "group mean (GRPO without std)", "v2"),
    GroupArm("loo", "leave-one-out mean (RLOO)", "v2", loo=True),
    GroupArm("brpo", "BRPO as published", "brpo"),
    GroupArm("brpo_loo", "BRPO, leave-one-out", "brpo", loo=True),
    GroupArm("v1", "BRPO's V1 alone", "v1"),
    WeightedArm("opo", "OPO as published: by length", "length"),
    WeightedArm("opo_loo", "OPO, leave-one-out", "length", loo=True),
    WeightedArm("token", "optimal token baseline as published", "path"),
    WeightedArm("token_loo", "optimal token baseline, leave-one-out", "path", loo=True),
    ValueArm("value_saved", "BCAE, V as it was in training", "saved"),
    ValueArm("value_cut", "BCAE, trained V(q, b_j)", "cut"),
    ValueArm("value", "BCAE, trained V(q, b, b_j)"),
    ValueArm("value_trajectory", "BCAE, one advantage a trace", options={"credit": "trajectory"}),
    ValueArm("residual_loo", "V + leave-one-out residual", options={"baseline": "residual_loo"}),
    ValueArm("shrink", "V + shrunk residual", options=_SHRUNK),
    ValueArm("history", "V + previous outcome", previous=True),
    ValueArm("shrink_history", "V + shrunk residual + previous outcome", options=_SHRUNK,
             previous=True),
    ValueArm("score_weighted", "V, score-weighted", options=_WEIGHTED),
    ValueArm("score_weighted_saved", "V as it was in training, score-weighted", "saved", _WEIGHTED),
    ValueArm("score_weighted_shrink", "V + shrunk residual, score-weighted",
             options=_SHRUNK | _WEIGHTED),
    ValueArm("oracle", "oracle V(q, b, b_j)", "oracle"),
    ValueArm("oracle_history", "oracle + previous outcome", "oracle", previous=True),
    ValueArm("oracle_weighted", "oracle, weighted by score norms", "oracle", by_norms=True),
    SearchedArm("previous", "regression: previous outcome", ("previous",)),
    SearchedArm("past", "regression: all earlier outcomes", _PAST),
    SearchedArm("past_doubt", "regression: earlier outcomes, by how open they were",
                (*_PAST, *_DOUBT)),
    SearchedArm("others", "regression: the others' returns", ("others",)),
    SearchedArm("others_past", "regression: others' returns and all earlier outcomes",
                (*_OTHERS, *_PAST)),
    SearchedArm("everything", "regression: everything",
                (*_OTHERS, *_PAST, *_DOUBT, "previous_others")),
    SearchedArm("rescaled", "score-weighted regression: V", ("level", "value"), by_norm=True),
    SearchedArm("rescaled_interior", "score-weighted regression: V(1 - V), V(1 - V)(1 - 2V)",
                ("interior", "interior_tilt"), by_norm=True),
    SearchedArm("rescaled_constant", "score-weighted regression: one number, no V", ("level",),
                "constant", by_norm=True),
    SearchedArm("rescaled_group", "leave-one-out mean, score-weighted: one number", ("level",),
                "constant", by_norm=True, loo=True),
    SearchedArm("rescaled_past", "score-weighted regression: V and earlier outcomes",
                ("level", "value", "previous", "earlier"), by_norm=True),
    SearchedArm("rescaled_everything", "score-weighted regression: everything",
                ("level", "value", *_OTHERS, "previous", "earlier", *_DOUBT, "previous_others"),
                by_norm=True),
)  # fmt: skip
BY_NAME = {arm.name: arm for arm in ARMS}
# The published method with which the other arms are compared, and the arm whose expectation defines
# the gradient g.
PUBLISHED, REFERENCE = "brpo", "residual_loo"


@dataclasses.dataclass(frozen=True)
class Variants:
    """All combinations of arms and readings, in the order of every `variants` axis.

    The combinations are compared with the published method under the reading `full`, which uses all
    answers.
    """

    pairs: tuple[tuple[Arm, Reading], ...]
    full: Reading

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the combinations, in the form "arm/reading"."""
        return tuple(arm.reads(reading) for arm, reading in self.pairs)

    @property
    def trained(self) -> tuple[int, ...]:
        """Indices of the combinations for which the gradient of the answers is measured too.

        These are the combinations with the reading `full`, which trains on all answers of a cut.
        """
        return tuple(i for i, (_, reading) in enumerate(self.pairs) if reading == self.full)

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "_ M"]:
        """Returns `Arm.factors` of each combination."""
        return np.stack([arm.factors(group, cuts) for arm, _ in self.pairs])

    def place(self, arm: str) -> int:
        """Returns the index of an arm with the reading `full`."""
        return self.names.index(self.name(arm))

    def name(self, arm: str) -> str:
        """Returns the name of an arm with the reading `full`."""
        return BY_NAME[arm].reads(self.full)


@functools.cache
def variants(answers: int) -> Variants:
    """Returns the variants that are measured on a pool with `answers` answers per cut.

    With one answer per cut, there is only one reading.
    """
    if answers == 1:
        return Variants(tuple((arm, "one") for arm in ARMS), "one")
    readings: tuple[Reading, ...] = ("one", "several", "pooled")
    return Variants(tuple((arm, reading) for arm in ARMS for reading in readings), "several")


def drawn_answers(drawn: Drawn, reading: Reading) -> Int[np.ndarray, "*rows"]:
    """Returns the number of sampled answer tokens per trace that a reading needs."""
    # "pooled" needs the same answers as "several".
    if reading != "one":
        return drawn.sampled.sum((-1, -2))
    own = rewards.distinct_cuts(drawn.cuts, drawn.thinking) == np.arange(drawn.cuts.shape[-1])
    return np.where(own, drawn.sampled[..., 0], 0).sum(-1)


def returns_to_go(
    outcomes: Float[np.ndarray, "*batch M"], weights: Float[np.ndarray, "M"]
) -> Float[np.ndarray, "*batch M"]:
    """Returns sum_{k >= s} u_k r_k as a NumPy array."""
    return np.asarray(advantages.to_go(jnp.asarray(outcomes), jnp.asarray(weights, jnp.float32)))
