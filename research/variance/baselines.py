"""The arms of the variance study: ways to make advantages of the same rollouts.

They call the functions that methods train with (`methods.anytime`, `methods.bacr`, `advantages`).
All of them estimate the gradient of one objective, sum_j w_j R_j with the dense rewards R of Eq. 7,
which is sum_j u_j r_j (`rewards.outcome_coefficients`): BRPO is given u as its prior.
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
from bacr_jax.methods import GroupBatch, anytime, bacr
from bacr_jax.methods.baselines import baseline_of
from bacr_jax.methods.reward_terms import cut_weights, progress_coefficient
from research.variance import control_variates as variates
from research.variance.gradient_pool import Drawn, Rollouts

# one: an answer at each cut, shared by cuts past the natural end, as bacr draws them.
# several: the mean over A answers at each cut, as AnytimeReasoner draws them.
# pooled: these, and cuts past the natural end share all of theirs.
Reading = Literal["one", "several", "pooled"]
# Steps after which running moments are those of the batch, and their decay at each of them.
_SETTLED, _DECAY = 60, 0.9


@dataclasses.dataclass(frozen=True)
class Groups(Rollouts):
    """Groups of traces, with what was known of them before; R groups of G.

    Attributes:
      values: predicted outcomes by the name of a value; none has seen these traces.
      weighted: error of the oracle's return, weighted by score norms over the question's traces
        outside the group, for each segment.
    """

    values: Mapping[str, Float[np.ndarray, "R G M"]]
    weighted: Float[np.ndarray, "R M"] | None = None

    def outcomes(self, reading: Reading) -> Float[np.ndarray, "R G M"]:
        """Outcome at every cut under a reading of its answers."""
        if reading == "several":
            return self.by_answer.mean(-1)
        source = rewards.distinct_cuts(self.cuts, self.thinking)
        if reading == "one":
            return np.take_along_axis(self.by_answer[..., 0], source, -1)
        same = source[..., :, None] == source[..., None, :]
        mean = self.by_answer.mean(-1)
        return np.asarray((same * mean[..., None, :]).sum(-1) / same.sum(-1), np.float32)

    def batch(self, reading: Reading) -> GroupBatch:
        """The groups as a method sees them."""
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
            "surprise": self.surprise,
            "fraction": np.float32(0.5),
            "extra": {},
        }
        return GroupBatch(**jax.tree.map(jnp.asarray, fields))


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all arms share.

    Attributes:
      config: of the run; its cuts' weights and its dense reward are the objective.
      earlier: by arm and reading: what batches before these have left (`Arm.learned`).
    """

    config: Config
    earlier: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def weights(self) -> Float[np.ndarray, "M"]:
        """Total weight u_j of each outcome."""
        shares = rewards.cut_shares(self.config.cuts.weights, self.config.cuts.count)
        coefficient = progress_coefficient(self.config)
        return np.asarray(rewards.outcome_coefficients(shares, coefficient=coefficient))


class Credit(NamedTuple):
    """What an arm gives: the advantage of each segment, the baseline of each cut's answers."""

    thinking: Float[Array, "R G M"]
    answers: Float[Array, "R G M"]


# --- kinds of arms --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arm(abc.ABC):
    """A way to make advantages; as it stands here one that leaves every gradient whole."""

    name: str
    label: str

    def reads(self, reading: Reading) -> str:
        """What it is called with a reading of the answers."""
        return f"{self.name}/{reading}"

    @abc.abstractmethod
    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """Advantages of the groups."""

    def learned(self, setting: Setting, groups: Groups, reading: Reading) -> Any:
        """What it takes from earlier batches; None: nothing."""
        return None

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "M"]:
        """E estimate = sum_s factors_s g_s: what is left of each segment's gradient.

        Less than 1 where the trace's own reward is part of what is subtracted from it; not a number
        where that has no exact factor, and the pool measures what is left.
        """
        return np.ones(cuts)

    def answer_factor(self, group: int, answers: int) -> float:
        """The same for the gradient of the answers; as of thinking, if an arm says nothing else."""
        return float(self.factors(group, 1)[0])


@dataclasses.dataclass(frozen=True)
class GroupArm(Arm):
    """`anytime.brpo_advantage`; answers are compared with the others at their cut."""

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
        """See `Arm`: V2 holds the trace, and is all that is subtracted, or a share of it."""
        if self.loo or self.mode not in ("brpo", "v2"):
            return super().factors(group, cuts)
        share = (cuts - np.arange(cuts)) / cuts if self.mode == "brpo" else np.ones(cuts)
        return 1.0 - share / group

    def answer_factor(self, group: int, answers: int) -> float:
        """See `Arm`: the mean of all answers at a cut, or of a group's single ones, holds it."""
        return 1.0 if self.mode == "none" else 1.0 - 1.0 / (answers if answers > 1 else group)


@dataclasses.dataclass(frozen=True)
class ValueArm(Arm):
    """Budget-conditioned advantages of Eq. 10 with any baseline (`methods.bacr`).

    Attributes:
      value: the predicted outcomes that it reads.
      options: keys of `advantage` besides those of Eq. 10 under reward-to-go.
      previous: the value has also seen the trace's previous outcome.
      by_norms: it is moved to where score norms want it: b_s = E|g_s|^2 G_s / E|g_s|^2.
    """

    value: str = "trace_and_cut"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    previous: bool = False
    by_norms: bool = False

    def _config(self, config: Config) -> Config:
        """The run's config with the arm's advantages, not divided by anything."""
        keys = {"baseline": "value", "credit": "to_go", "score_weighted": False, **self.options}
        advantage = dataclasses.replace(config.advantage, **keys, normalise="none")
        return dataclasses.replace(config, advantage=advantage, method="bacr")

    def _inputs(
        self, setting: Setting, groups: Groups, reading: Reading
    ) -> tuple[GroupBatch, Array, Array]:
        """Batch, rewards and values of Eq. 7's R as the method is given them."""
        batch = groups.batch(reading)
        reward = bacr.dense_rewards(setting.config, None, batch)
        predicted = jnp.asarray(groups.values[self.value], jnp.float32)
        coefficient = progress_coefficient(setting.config)
        return batch, reward, rewards.dense_reward(predicted, coefficient=coefficient)

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """See `Arm`."""
        config = self._config(setting.config)
        batch, reward, values = self._inputs(setting, groups, reading)
        left: tuple[Any, Any] = setting.earlier.get(self.reads(reading)) or (None, None)
        state, slope = left
        baseline = baseline_of(config)
        credit = bacr.budget_conditioned_advantages(config, baseline, state, batch, reward, values)
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
        """The method's state after many batches like these, and the slope of the previous outcome.

        None where neither is needed; the slope is None for arms that don't look at that outcome.
        """
        config = self._config(setting.config)
        baseline = baseline_of(config)
        state = bacr.init_state(baseline, 0)
        if state is None and not self.previous:
            return None
        batch, reward, values = self._inputs(setting, groups, reading)
        both = square = jnp.zeros(config.cuts.count, jnp.float32)
        blended = lambda old, new: _DECAY * old + (1.0 - _DECAY) * new
        for _ in range(_SETTLED):
            if self.previous:
                estimate = baseline.estimate(state or {}, batch, reward, values)
                residual = advantages.bcae_advantage(reward, estimate.reward)
                thinking = advantages.thinking_credit(
                    residual, cut_weights(config), mode=config.advantage.credit
                )
                surprise = jnp.asarray(variates.before(batch.outcomes - estimate.correctness))
                moments = variates.history_moments(thinking, surprise)
                both, square = map(blended, (both, square), moments)
            state = bacr.update(baseline, state, batch, reward, values)
        return state, both / jnp.maximum(square, 1e-6) if self.previous else None


@dataclasses.dataclass(frozen=True)
class WeightedArm(Arm):
    """The group's mean weighted by lengths (OPO), or by paths of scores."""

    weights: Literal["length", "path"]
    loo: bool = False

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """See `Arm`."""
        if self.weights == "length":
            weights = reached = variates.length_weights(groups.tokens)
        else:
            weights = variates.path_weights(groups.energy, groups.tokens)
            # A trace that ended before a cut still has an answer there: its path as far as it goes.
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
    """A value corrected by what a regression on earlier batches makes of the rest.

    Attributes:
      features: what explains the rest (`control_variates.regressors`).
      by_norm: entries count by their surprise, and not by their tokens.
      loo: the rest is compared with that of the others first.
    """

    features: tuple[str, ...]
    value: str = "trace_and_cut"
    by_norm: bool = False
    loo: bool = False

    def _to_explain(
        self, setting: Setting, groups: Groups, reading: Reading
    ) -> tuple[Float[np.ndarray, "R G M"], Float[np.ndarray, "R G M F"]]:
        """What the regression explains, and by what."""
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
        """Slopes of the regression."""
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
# The published method that reductions are measured against, and the arm that g is measured with.
PUBLISHED, REFERENCE = "brpo", "residual_loo"


@dataclasses.dataclass(frozen=True)
class Variants:
    """Arms and readings, in the order of every axis of variants.

    The others are measured against the published method with the `full` reading, of all answers.
    """

    pairs: tuple[tuple[Arm, Reading], ...]
    full: Reading

    @property
    def names(self) -> tuple[str, ...]:
        """As "arm/reading"."""
        return tuple(arm.reads(reading) for arm, reading in self.pairs)

    @property
    def trained(self) -> tuple[int, ...]:
        """Those with the gradient of the answers too: where all answers of a cut are trained on."""
        return tuple(i for i, (_, reading) in enumerate(self.pairs) if reading == self.full)

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "_ M"]:
        """`Arm.factors` of each."""
        return np.stack([arm.factors(group, cuts) for arm, _ in self.pairs])

    def place(self, arm: str) -> int:
        """Where an arm stands that reads all answers."""
        return self.names.index(self.name(arm))

    def name(self, arm: str) -> str:
        """Its name with that reading."""
        return BY_NAME[arm].reads(self.full)


@functools.cache
def variants(answers: int) -> Variants:
    """All that is measured on a pool with so many answers at a cut; of one there is one reading."""
    if answers == 1:
        return Variants(tuple((arm, "one") for arm in ARMS), "one")
    readings: tuple[Reading, ...] = ("one", "several", "pooled")
    return Variants(tuple((arm, reading) for arm in ARMS for reading in readings), "several")


def drawn_answers(drawn: Drawn, reading: Reading) -> Int[np.ndarray, "*rows"]:
    """Answer tokens that a trace costs under a reading; branches are counted, trunks are not."""
    # "pooled" reads what "several" draws.
    if reading != "one":
        return drawn.sampled.sum((-1, -2))
    own = rewards.distinct_cuts(drawn.cuts, drawn.thinking) == np.arange(drawn.cuts.shape[-1])
    return np.where(own, drawn.sampled[..., 0], 0).sum(-1)


def returns_to_go(
    outcomes: Float[np.ndarray, "*batch M"], weights: Float[np.ndarray, "M"]
) -> Float[np.ndarray, "*batch M"]:
    """sum_{k >= s} u_k r_k on the host."""
    return np.asarray(advantages.to_go(jnp.asarray(outcomes), jnp.asarray(weights, jnp.float32)))
