"""The arms of the variance study: ways to make advantages of the same rollouts.

They call the functions that methods train with (`methods.anytime`, `methods.bacr`, `advantages`).
All of them estimate the gradient of one objective, sum_j w_j R_j with the dense rewards R of Eq. 7,
which is sum_j u_j r_j (`rewards.outcome_coefficients`): BRPO is given u as its prior.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, rewards
from bacr_jax.config import Config
from bacr_jax.methods import GroupBatch, anytime, bacr
from bacr_study.variance.control_variates import (
    fitted_slopes,
    history_advantage,
    history_moments,
    history_surprise,
    length_weights,
    others_mean,
    path_weights,
    regressors,
    weighted_mean,
)

# one: an answer at each cut, shared by cuts past the natural end, as bacr draws them.
# several: the mean over A answers at each cut, as AnytimeReasoner draws them.
# pooled: these, and cuts past the natural end share all of theirs.
Reading = Literal["one", "several", "pooled"]
READINGS: tuple[Reading, ...] = ("one", "several", "pooled")
# Steps after which running moments are those of the batch, and their decay at each of them.
_SETTLED, _DECAY = 60, 0.9


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of traces, with what was known of them before; R groups of G.

    Attributes:
      tokens: sampled, of each segment.
      surprise: how improbable they were (`gradient_pool.Drawn`).
      values: predicted outcomes by the name of a value; none has seen these traces.
      weighted: error of the oracle's return, weighted by score norms over the question's traces
        outside the group, for each segment.
    """

    by_answer: Float[np.ndarray, "R G M A"]
    cuts: Int[np.ndarray, "R G M"]
    thinking: Int[np.ndarray, "R G"]
    budgets: Int[np.ndarray, "R G"]
    tokens: Int[np.ndarray, "R G M"]
    surprise: Float[np.ndarray, "R G M"]
    energy: Float[np.ndarray, "R G M"]
    values: Mapping[str, Float[np.ndarray, "R G M"]]
    weighted: Float[np.ndarray, "R M"] | None = None

    def outcomes(self, reading: Reading) -> Float[np.ndarray, "R G M"]:
        """Outcome at every cut under a reading of its answers."""
        if reading == "several":
            return self.by_answer.mean(-1)
        source = np.asarray(
            rewards.distinct_cuts(jnp.asarray(self.cuts), jnp.asarray(self.thinking))
        )
        if reading == "one":
            return np.take_along_axis(self.by_answer[..., 0], source, -1)
        same = source[..., :, None] == source[..., None, :]
        mean = self.by_answer.mean(-1)
        return np.asarray((same * mean[..., None, :]).sum(-1) / same.sum(-1), np.float32)

    def batch(self, reading: Reading) -> GroupBatch:
        """The groups as a method sees them."""
        shape = self.thinking.shape
        outcomes = self.outcomes(reading)
        several = self.by_answer if reading == "several" else outcomes[..., None]
        fields: dict[str, Any] = {
            "questions": np.zeros(shape[0], np.int32),
            "budgets": self.budgets,
            "cuts": self.cuts,
            "outcomes": outcomes,
            "by_answer": several,
            "thinking": self.thinking,
            "lengths": self.thinking,
            "closed": self.thinking < self.budgets,
            "closed_by_tag": self.thinking < self.budgets,
            "surprise": self.surprise,
            "fraction": np.float32(0.5),
            "extra": {},
        }
        batch: GroupBatch = jax.tree.map(jnp.asarray, GroupBatch(**fields))
        return batch


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all arms share.

    Attributes:
      config: of the run; its cuts' weights and its dense reward are the objective.
      earlier: by arm and reading: what batches before these have left (`learned`).
    """

    config: Config
    earlier: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def coefficient(self) -> float:
        """Lambda of Eq. 7."""
        return self.config.reward.coefficient if self.config.reward.dense else 0.0

    @property
    def weights(self) -> Float[np.ndarray, "M"]:
        """Total weight u_j of each outcome."""
        shares = rewards.cut_shares(self.config.cuts.weights, self.config.cuts.count)
        return np.asarray(rewards.outcome_coefficients(shares, coefficient=self.coefficient))


@dataclasses.dataclass(frozen=True)
class Credit:
    """What an arm gives: the advantage of each segment, the baseline of each cut's answers."""

    thinking: Float[Array, "R G M"]
    answers: Float[Array, "R G M"]


Rule = Callable[["Arm", Setting, Groups, Reading], Credit]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to make advantages.

    Attributes:
      shrinks: the trace's own reward is part of what is subtracted from it; "unknown": in a way
        that has no exact factor, and the pool measures what is left of the gradient.
    """

    name: str
    label: str
    rule: Rule
    value: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shrinks: Literal["no", "group", "brpo", "unknown"] = "no"

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """Advantages of the groups."""
        return self.rule(self, setting, groups, reading)

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "M"]:
        """E estimate = sum_s factors_s g_s: what is left of each segment's gradient.

        Not a number where no factor is exact.
        """
        later = (cuts - np.arange(cuts)) / cuts
        own = {
            "no": 0.0 * later,
            "group": np.ones(cuts),
            "brpo": later,
            "unknown": np.full(cuts, np.nan),
        }[self.shrinks]
        return np.asarray(1.0 - own / group)

    def answer_factor(self, group: int, answers: int) -> float:
        """The same for the gradient of the answers."""
        if self.shrinks == "unknown":
            return np.nan
        if self.rule is not grid_rule or self.options["mode"] == "none":
            return 1.0
        # An answer is compared with the mean of all at its cut, its own included; of single
        # answers these are the group's.
        return 1.0 - 1.0 / (answers if answers > 1 else group)


# --- rules ----------------------------------------------------------------------------------------


def grid_rule(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """`anytime.brpo_advantage`; answers are compared with the others at their cut."""
    outcomes = jnp.asarray(groups.outcomes(reading))
    prior = jnp.asarray(setting.weights, jnp.float32)
    thinking = anytime.brpo_advantage(outcomes, prior, **arm.options)
    if arm.options["mode"] == "none":
        return Credit(thinking, jnp.zeros_like(outcomes))
    batch = groups.batch(reading)
    credit = anytime.answer_advantage(batch.by_answer)
    return Credit(thinking, (batch.by_answer - credit).mean(-1))


def method_config(arm: Arm, config: Config) -> Config:
    """The run's config with the arm's advantages, not divided by anything."""
    own = {"credit": "to_go", "score_weighted": False}
    settings = {**own, **arm.options, "normalise": "none"}
    return dataclasses.replace(
        config, advantage=dataclasses.replace(config.advantage, **settings), method="bacr"
    )


def _inputs(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> tuple[Any, Any, Any]:
    """Batch, rewards and values of Eq. 7's R as the method is given them."""
    assert arm.value is not None
    batch = groups.batch(reading)
    reward = bacr.dense_rewards(setting.config, None, batch)
    predicted = jnp.asarray(groups.values[arm.value], jnp.float32)
    values = rewards.dense_reward(predicted, coefficient=setting.coefficient)
    return batch, reward, values


def _bacr(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """`bacr.make_advantages`: budget-conditioned advantages of Eq. 10 and their extensions."""
    config = method_config(arm, setting.config)
    batch, reward, values = _inputs(arm, setting, groups, reading)
    state, _ = setting.earlier.get(f"{arm.name}/{reading}") or (None, None)
    credit = bacr.make_advantages(config, state, batch, reward, values)
    _, expected = bacr.baselines(config, state, batch, reward, values)
    return Credit(credit.thinking, expected)


def _with_previous(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """`_bacr` against a value that has also seen the trace's previous outcome."""
    credit = _bacr(arm, setting, groups, reading)
    _, slope = setting.earlier[f"{arm.name}/{reading}"]
    surprise = history_surprise(jnp.asarray(groups.outcomes(reading)), credit.answers)
    return Credit(history_advantage(credit.thinking, surprise, slope), credit.answers)


def settled_state(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Any:
    """The method's state after many batches like these, and the slope of the previous outcome.

    None where neither is needed; the slope is None for arms that don't look at that outcome.
    """
    if arm.rule not in (_bacr, _with_previous):
        return None
    config, previous = method_config(arm, setting.config), arm.rule is _with_previous
    state = bacr.init_state(config, 0)
    if state is None and not previous:
        return None
    batch, reward, values = _inputs(arm, setting, groups, reading)
    both = square = jnp.zeros(config.cuts.count, jnp.float32)
    blended = lambda old, new: _DECAY * old + (1.0 - _DECAY) * new
    for _ in range(_SETTLED):
        if previous:
            baseline, expected = bacr.baselines(config, state, batch, reward, values)
            thinking = bacr.returns_to_go(config, advantages.bcae_advantage(reward, baseline))
            moments = history_moments(thinking, history_surprise(batch.outcomes, expected))
            both, square = map(blended, (both, square), moments)
        state = bacr.update(config, state, batch, reward, values)
    return state, both / jnp.maximum(square, 1e-6) if previous else None


def _weighted(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """The oracle moved to where score norms want it: b_s = E|g_s|^2 G_s / E|g_s|^2."""
    assert groups.weighted is not None
    plain = _bacr(arm, setting, groups, reading)
    return Credit(plain.thinking - jnp.asarray(groups.weighted)[:, None], plain.answers)


def _weighted_group(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """The group's mean weighted by lengths (OPO), or by paths of scores."""
    if arm.options["weights"] == "length":
        weights = reached = length_weights(groups.tokens)
    else:
        weights = path_weights(groups.energy, groups.tokens)
        # A trace that ended before a cut still has an answer there: its path as far as it goes.
        reached = np.cumsum(groups.energy, -1)
    outcomes = groups.outcomes(reading)
    mean = lambda x, w: weighted_mean(x, w, loo=arm.options["loo"])
    returns = returns_to_go(outcomes, setting.weights)
    return Credit(
        jnp.asarray(returns - mean(returns, weights), jnp.float32),
        jnp.asarray(mean(outcomes, reached), jnp.float32),
    )


def _to_explain(
    arm: Arm, setting: Setting, groups: Groups, reading: Reading
) -> tuple[Float[np.ndarray, "R G M"], Float[np.ndarray, "R G M F"]]:
    """What a regression arm explains, and by what."""
    assert arm.value is not None
    outcomes, predicted = groups.outcomes(reading), groups.values[arm.value]
    residual, given = regressors(outcomes, predicted, setting.weights, arm.options["features"])
    return (residual - others_mean(residual) if arm.options["loo"] else residual), given


def _regressed(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """A value corrected by what a regression on earlier batches makes of the rest."""
    assert arm.value is not None
    residual, given = _to_explain(arm, setting, groups, reading)
    explained = np.einsum("rgmf,mf->rgm", given, setting.earlier[f"{arm.name}/{reading}"])
    answers = groups.values[arm.value]
    if arm.options["loo"]:
        answers = answers + others_mean(groups.outcomes(reading) - answers)
    return Credit(jnp.asarray(residual - explained), jnp.asarray(answers))


def learned(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Any:
    """What an arm learns from earlier batches: slopes of a regression, or `settled_state`."""
    if "features" not in arm.options:
        return settled_state(arm, setting, groups, reading)
    residual, given = _to_explain(arm, setting, groups, reading)
    weights = groups.surprise if arm.options["by_norm"] else groups.tokens
    return fitted_slopes(given, residual, weights)


# --- the arms -------------------------------------------------------------------------------------

_V = "trained V(q, b, b_j)"


def _group(name: str, label: str, mode: str, loo: bool, shrinks: Any = "no") -> Arm:
    return Arm(name, label, grid_rule, options={"mode": mode, "loo": loo}, shrinks=shrinks)


def _valued(
    name: str, label: str, value: str = "trace_and_cut", *, rule: Rule = _bacr, **options: Any
) -> Arm:
    return Arm(name, label, rule, value, {"baseline": "value", **options})


def _weighing(name: str, label: str, weights: str, loo: bool) -> Arm:
    options = {"weights": weights, "loo": loo}
    return Arm(name, label, _weighted_group, None, options, "no" if loo else "unknown")


def _searched(
    name: str,
    label: str,
    *features: str,
    value: str = "trace_and_cut",
    by_norm: bool = False,
    loo: bool = False,
) -> Arm:
    options = {"features": features, "by_norm": by_norm, "loo": loo}
    return Arm(name, label, _regressed, value, options)


ARMS = (
    _group("none", "no baseline", "none", False),
    _group("group_mean", "group mean (GRPO without std)", "v2", False, "group"),
    _group("loo", "leave-one-out mean (RLOO)", "v2", True),
    _group("brpo", "BRPO as published", "brpo", False, "brpo"),
    _group("brpo_loo", "BRPO, leave-one-out", "brpo", True),
    _group("v1", "BRPO's V1 alone", "v1", False),
    _weighing("opo", "OPO as published: by length", "length", False),
    _weighing("opo_loo", "OPO, leave-one-out", "length", True),
    _weighing("token", "optimal token baseline as published", "path", False),
    _weighing("token_loo", "optimal token baseline, leave-one-out", "path", True),
    _valued("value_saved", "BCAE, V as it was in training", "saved"),
    _valued("value_cut", "BCAE, trained V(q, b_j)", "cut"),
    _valued("value", "BCAE, " + _V),
    _valued("value_trajectory", "BCAE, one advantage a trace", credit="trajectory"),
    _valued("residual_loo", "V + leave-one-out residual", baseline="residual_loo"),
    _valued("shrink", "V + shrunk residual", baseline="shrink"),
    _valued("history", "V + previous outcome", rule=_with_previous),
    _valued("shrink_history", "V + shrunk residual + previous outcome", rule=_with_previous,
            baseline="shrink"),
    _valued("score_weighted", "V, score-weighted", score_weighted=True),
    _valued("score_weighted_saved", "V as it was in training, score-weighted", "saved",
            score_weighted=True),
    _valued("score_weighted_shrink", "V + shrunk residual, score-weighted", baseline="shrink",
            score_weighted=True),
    _valued("oracle", "oracle V(q, b, b_j)", "oracle"),
    _valued("oracle_history", "oracle + previous outcome", "oracle", rule=_with_previous),
    Arm("oracle_weighted", "oracle, weighted by score norms", _weighted, "oracle",
        {"baseline": "value"}),
    _searched("previous", "regression: previous outcome", "previous"),
    _searched("past", "regression: all earlier outcomes", "previous", "earlier", "first"),
    _searched("past_doubt", "regression: earlier outcomes, by how open they were", "previous",
              "earlier", "first", "previous_doubt", "doubt"),
    _searched("others", "regression: the others' returns", "others"),
    _searched("others_past", "regression: others' returns and all earlier outcomes", "others",
              "others_previous", "previous", "earlier", "first"),
    _searched("everything", "regression: everything", "others", "others_previous", "previous",
              "earlier", "first", "previous_doubt", "doubt", "previous_others"),
    _searched("rescaled", "score-weighted regression: V", "level", "value", by_norm=True),
    _searched("rescaled_interior", "score-weighted regression: V(1 - V), V(1 - V)(1 - 2V)",
              "interior", "interior_tilt", by_norm=True),
    _searched("rescaled_constant", "score-weighted regression: one number, no V", "level",
              value="constant", by_norm=True),
    _searched("rescaled_group", "leave-one-out mean, score-weighted: one number", "level",
              value="constant", by_norm=True, loo=True),
    _searched("rescaled_past", "score-weighted regression: V and earlier outcomes", "level",
              "value", "previous", "earlier", by_norm=True),
    _searched("rescaled_everything", "score-weighted regression: everything", "level", "value",
              "others", "others_previous", "previous", "earlier", "previous_doubt", "doubt",
              "previous_others", by_norm=True),
)  # fmt: skip
BY_NAME = {arm.name: arm for arm in ARMS}
# The published method that reductions are measured against, and the arm that g is measured with.
PUBLISHED, REFERENCE = "brpo", "residual_loo"


@dataclasses.dataclass(frozen=True)
class Variants:
    """Arms and readings, in the order of every axis of variants.

    Attributes:
      pairs: each an arm and how it reads the answers.
      full: the reading of all answers, with which the published method is the one that others are
        measured against.
    """

    pairs: tuple[tuple[Arm, Reading], ...]
    full: Reading

    @property
    def names(self) -> tuple[str, ...]:
        """As "arm/reading"."""
        return tuple(f"{arm.name}/{reading}" for arm, reading in self.pairs)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Those that occur."""
        return tuple(dict.fromkeys(reading for _, reading in self.pairs))

    @property
    def against(self) -> int:
        """The published method."""
        return self.place(PUBLISHED)

    @property
    def reference(self) -> int:
        """The arm that g is measured with."""
        return self.place(REFERENCE)

    @property
    def trained(self) -> tuple[int, ...]:
        """Those with the gradient of the answers too: where all answers of a cut are trained on."""
        return tuple(i for i, (_, reading) in enumerate(self.pairs) if reading == self.full)

    def factors(self, chosen: Iterable[int], group: int, cuts: int) -> Float[np.ndarray, "_ M"]:
        """`Arm.factors` of some of them."""
        return np.stack([self.pairs[place][0].factors(group, cuts) for place in chosen])

    def place(self, arm: str) -> int:
        """Where an arm stands that reads all answers."""
        return self.names.index(self.name(arm))

    def name(self, arm: str) -> str:
        """Its name with that reading."""
        assert arm in BY_NAME, arm
        return f"{arm}/{self.full}"


@functools.cache
def variants(answers: int) -> Variants:
    """All that is measured on a pool with so many answers at a cut; of one there is one reading."""
    readings: tuple[Reading, ...] = READINGS if answers > 1 else ("one",)
    full: Reading = "several" if answers > 1 else "one"
    return Variants(tuple((arm, reading) for arm in ARMS for reading in readings), full)


def drawn_answers(
    cuts: Int[np.ndarray, "*rows M"],
    thinking: Int[np.ndarray, "*rows"],
    sampled: Int[np.ndarray, "*rows M A"],
    reading: Reading,
) -> Int[np.ndarray, "*rows"]:
    """Answer tokens that a trace costs under a reading; branches are counted, trunks are not.

    `sampled` are tokens of every answer; "pooled" reads what "several" draws.
    """
    if reading != "one":
        return sampled.sum((-1, -2))
    source = rewards.distinct_cuts(jnp.asarray(cuts), jnp.asarray(thinking))
    own = np.asarray(source) == np.arange(cuts.shape[-1])
    return np.where(own, sampled[..., 0], 0).sum(-1)


def returns_to_go(
    outcomes: Float[np.ndarray, "*batch M"], weights: Float[np.ndarray, "M"]
) -> Float[np.ndarray, "*batch M"]:
    """sum_{k >= s} u_k r_k on the host."""
    return np.asarray(advantages.to_go(jnp.asarray(outcomes), jnp.asarray(weights, jnp.float32)))
