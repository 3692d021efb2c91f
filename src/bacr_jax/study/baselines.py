"""The arms of the variance study: ways to make advantages of the same rollouts.

They call the functions that methods train with (`methods.anytime`, `methods.bacr`, `advantages`).
All of them estimate the gradient of one objective, sum_j w_j R_j with the dense rewards R of Eq. 7,
which is sum_j u_j r_j (`rewards.outcome_coefficients`): BRPO is given u as its prior.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, rewards
from bacr_jax.config import Config
from bacr_jax.methods import GroupBatch, anytime, bacr
from bacr_jax.study.control_variates import Regression, regressors

# one: an answer at each cut, shared by cuts past the natural end, as bacr draws them.
# several: the mean over A answers at each cut, as AnytimeReasoner draws them.
# pooled: these, and cuts past the natural end share all of theirs.
Reading = Literal["one", "several", "pooled"]
READINGS: tuple[Reading, ...] = ("one", "several", "pooled")
# Steps after which the running moments of `shrink` and `history` are those of the batch.
_SETTLED = 60


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of traces, with what was known of them before; R groups of G.

    Attributes:
      by_answer: outcome of every answer.
      cuts: in tokens.
      thinking: thinking tokens.
      budgets: in tokens.
      tokens: sampled tokens of each segment.
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
      states: of the method, by arm: moments of earlier batches (`settled_state`).
      regressions: slopes by arm, of earlier batches.
    """

    config: Config
    states: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    regressions: Mapping[str, Regression] = dataclasses.field(default_factory=dict)

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
    """What an arm gives.

    Attributes:
      thinking: advantage of each segment.
      answers: baseline of the outcome of each answer.
    """

    thinking: Float[Array, "R G M"]
    answers: Float[Array, "R G M"]


Rule = Callable[["Arm", Setting, Groups, Reading], Credit]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to make advantages.

    Attributes:
      name: in results.
      label: in tables.
      rule: makes them.
      value: the value that it uses; None: none.
      options: of the rule.
      shrinks: the trace's own reward is part of what is subtracted from it.
      search: it was tried as a better baseline, and is no published method.
    """

    name: str
    label: str
    rule: Rule
    value: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shrinks: Literal["no", "group", "brpo"] = "no"
    search: bool = False

    def credit(self, setting: Setting, groups: Groups, reading: Reading) -> Credit:
        """Advantages of the groups."""
        return self.rule(self, setting, groups, reading)

    def factors(self, group: int, cuts: int) -> Float[np.ndarray, "M"]:
        """E estimate = sum_s factors_s g_s: what is left of each segment's gradient."""
        later = (cuts - np.arange(cuts)) / cuts
        own = {"no": 0.0 * later, "group": np.ones(cuts), "brpo": later}[self.shrinks]
        return np.asarray(1.0 - own / group)


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
    own = {"credit": "to_go", "history": False, "score_weighted": False}
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
    """`bacr.credit`, budget-conditioned advantages of Eq. 10 and their extensions."""
    config = method_config(arm, setting.config)
    batch, reward, values = _inputs(arm, setting, groups, reading)
    state = setting.states.get(f"{arm.name}/{reading}")
    credit = bacr.credit(config, state, batch, reward, values)
    _, expected = bacr.baselines(config, state, batch, reward, values)
    return Credit(credit.thinking, expected)


def settled_state(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Any:
    """What the method would remember after many batches like these."""
    if arm.rule is not _bacr:
        return None
    config = method_config(arm, setting.config)
    state = bacr.init_state(config, 0)
    if state is None:
        return None
    batch, reward, values = _inputs(arm, setting, groups, reading)
    for _ in range(_SETTLED):
        state = bacr.update(config, state, batch, reward, values)
    return state


def _weighted(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """The oracle moved to where score norms want it: b_s = E|g_s|^2 G_s / E|g_s|^2."""
    assert groups.weighted is not None
    plain = _bacr(arm, setting, groups, reading)
    return Credit(plain.thinking - jnp.asarray(groups.weighted)[:, None], plain.answers)


def _regressed(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Credit:
    """A value corrected by what a regression on earlier batches makes of the rest."""
    assert arm.value is not None
    regression = setting.regressions[f"{arm.name}/{reading}"]
    predicted = groups.values[arm.value]
    outcomes = groups.outcomes(reading)
    residual, given = regressors(outcomes, predicted, setting.weights, arm.options["features"])
    return Credit(jnp.asarray(residual - regression(given)), jnp.asarray(predicted))


def fitted_regression(arm: Arm, setting: Setting, groups: Groups, reading: Reading) -> Regression:
    """Slopes of a regression arm from groups of earlier batches."""
    assert arm.value is not None
    outcomes, predicted = groups.outcomes(reading), groups.values[arm.value]
    residual, given = regressors(outcomes, predicted, setting.weights, arm.options["features"])
    weights = groups.surprise if arm.options["by_norm"] else groups.tokens
    return Regression.fitted(given, residual, weights)


# --- the arms -------------------------------------------------------------------------------------

_V = "trained V(q, b, b_j)"


def _group(name: str, label: str, mode: str, loo: bool, shrinks: Any = "no") -> Arm:
    return Arm(name, label, grid_rule, options={"mode": mode, "loo": loo}, shrinks=shrinks)


def _valued(name: str, label: str, value: str = "trace_and_cut", **options: Any) -> Arm:
    return Arm(name, label, _bacr, value, {"baseline": "value", **options})


def _searched(name: str, label: str, *features: str, by_norm: bool = False) -> Arm:
    options = {"features": features, "by_norm": by_norm}
    return Arm(name, label, _regressed, "trace_and_cut", options, search=True)


ARMS = (
    _group("none", "no baseline", "none", False),
    _group("group_mean", "group mean (GRPO without std)", "v2", False, "group"),
    _group("loo", "leave-one-out mean (RLOO)", "v2", True),
    _group("brpo", "BRPO as published", "brpo", False, "brpo"),
    _group("brpo_loo", "BRPO, leave-one-out", "brpo", True),
    _group("v1", "BRPO's V1 alone", "v1", False),
    _valued("value_saved", "BCAE, V as it was in training", "saved"),
    _valued("value_cut", "BCAE, trained V(q, b_j)", "cut"),
    _valued("value", "BCAE, " + _V),
    _valued("value_trajectory", "BCAE, one advantage a trace", credit="trajectory"),
    _valued("residual_loo", "V + leave-one-out residual", baseline="residual_loo"),
    _valued("shrink", "V + shrunk residual", baseline="shrink"),
    _valued("history", "V + previous outcome", history=True),
    _valued(
        "shrink_history", "V + shrunk residual + previous outcome", baseline="shrink", history=True
    ),
    _valued("score_weighted", "V, score-weighted", score_weighted=True),
    _valued("score_weighted_saved", "V as it was in training, score-weighted", "saved",
            score_weighted=True),
    _valued("score_weighted_shrink", "V + shrunk residual, score-weighted", baseline="shrink",
            score_weighted=True),
    _valued("oracle", "oracle V(q, b, b_j)", "oracle"),
    _valued("oracle_history", "oracle + previous outcome", "oracle", history=True),
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
    _searched("rescaled_past", "score-weighted regression: V and earlier outcomes", "level",
              "value", "previous", "earlier", by_norm=True),
    _searched("rescaled_everything", "score-weighted regression: everything", "level", "value",
              "others", "others_previous", "previous", "earlier", "previous_doubt", "doubt",
              "previous_others", by_norm=True),
)  # fmt: skip
BY_NAME = {arm.name: arm for arm in ARMS}
# The published method that reductions are measured against, and the arm that g is measured with.
PUBLISHED, REFERENCE = "brpo", "residual_loo"


def drawn_answers(
    groups: Groups, sampled: Int[np.ndarray, "R G M A"], reading: Reading
) -> Int[np.ndarray, "R G"]:
    """Answer tokens that a trace costs under a reading; branches are counted, trunks are not.

    Args:
      groups: the traces.
      sampled: tokens of every answer.
      reading: of the answers. "pooled" reads what "several" draws.
    """
    if reading != "one":
        return sampled.sum((-1, -2))
    source = rewards.distinct_cuts(jnp.asarray(groups.cuts), jnp.asarray(groups.thinking))
    own = np.asarray(source) == np.arange(groups.cuts.shape[-1])
    return np.where(own, sampled[..., 0], 0).sum(-1)


def returns_to_go(
    outcomes: Float[np.ndarray, "*batch M"], weights: Float[np.ndarray, "M"]
) -> Float[np.ndarray, "*batch M"]:
    """sum_{k >= s} u_k r_k on the host."""
    return np.asarray(advantages.to_go(jnp.asarray(outcomes), jnp.asarray(weights, jnp.float32)))
