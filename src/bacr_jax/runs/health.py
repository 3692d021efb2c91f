"""Detects unhealthy training runs and warns once per symptom, with the likely cause.

The training loop passes the metrics of every iteration to `RunHealth`. The thresholds were chosen
so that healthy runs do not exceed them. Warnings do not change the run.
"""

import collections
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Metrics = Mapping[str, float]

# Number of consecutive iterations that must show a symptom before a warning.
PATIENCE = 10
# The same number for symptoms of a degrading policy, which degrades within a few iterations.
SHORT_PATIENCE = 3
# The same number for a policy that had rewards before, and has none now.
LOST_REWARD_PATIENCE = 4
# Minimum number of steps with a right answer before the first step without one. If the policy does
# not change, this many steps are followed by `LOST_REWARD_PATIENCE` steps without a right answer in
# at most 0.5 % of all runs, for any number of traces: (1 - q)^5 * q^3 is at most 0.005, where q is
# the probability of a step without a right answer.
HAD_REWARD_STEPS = 5
# Accuracy has collapsed if its maximum was above `WORTH_LOSING` and it fell below this maximum
# times `COLLAPSED_TO`.
WORTH_LOSING = 0.2
COLLAPSED_TO = 0.25
# Maximum fraction of token losses that are clipped.
CLIPPED = 0.5
# Maximum fraction of answers that were not graded, because the worker process died or timed out.
LOST_VERDICTS = 0.1
# Number of consecutive steps in which a verifier fails on every answer before the run is stopped.
FAILING_STEPS = 3
# Maximum ratio of the slowest process's time to the time of the other processes.
SLOW_HOST = 3.0
# Maximum difference between the log-probabilities of sampler and learner, in nats per token. 16-bit
# rounding errors are smaller. Different weights or a different temperature cause larger
# differences.
MISMATCH = 0.1
# Maximum absolute mean of the advantages, relative to their standard deviation.
OFF_CENTRE = 0.5
# A step counts as too large if `optimizer.max_update_kl` scaled it by this factor or less. The KL
# grows with the square of the step size, so 0.1 corresponds to a hundred times the allowed KL. In
# 18 healthy runs of SmolLM2 with a bound of 0.005, most of the first eight steps were scaled by 0.1
# to 0.5, and one run had three steps in a row below 0.1.
SHORTENED = 0.1
# Minimum fraction of closed answers for a healthy policy.
CLOSED = 0.95
# Maximum change of a fraction since the first iteration. With 64 traces, 0.1 is almost four
# standard errors of a fraction of 0.95.
SHARE_CHANGE = 0.1
# Metrics that are compared with the first iteration.
COMPARED = ("rollout/closed_answers", "rollout/repetition")
# The fraction of closed answers at one budget, and its number of traces. The names end with the
# budget. They exist with `budget.prior=choices`, and are compared with the first iteration too.
CLOSED_AT = "rollout/closed_answers_"
TRACES_AT = "budget/traces_"
# Number of standard errors by which the fraction at one budget may fall, because its number of
# traces is small. With 64 traces, this is about `SHARE_CHANGE`.
STANDARD_ERRORS = 4.0
# Maximum difference attributed to float32 rounding. It applies to the difference of the importance
# ratio from 1, to `mismatch/k3` in nats per token, and to the mean of advantages that are all 0.
SAME_POLICY = 1e-6


@dataclass(frozen=True)
class Reference:
    """Values with which the metrics of an iteration are compared.

    Attributes:
      first: metrics of the first iteration of the run that are compared with later iterations. Its
        traces were sampled by the initial policy.
      best_accuracy: highest smoothed accuracy so far, in [0, 1].
      rewarded_steps: number of iterations with a right answer so far.
      unrewarded_steps: number of iterations without a right answer so far, with the current one.
      largest_mismatch: maximum `mismatch/absolute` that is attributed to rounding, in nats per
        token.
    """

    first: Metrics
    best_accuracy: float
    rewarded_steps: int
    unrewarded_steps: int
    largest_mismatch: float


@dataclass(frozen=True)
class Symptom:
    """A sign of an unhealthy run, and the warning about it.

    Attributes:
      is_wrong: returns True if the metrics of an iteration show the symptom.
      message: warning with the symptom, its likely causes, and the config keys to change.
      patience: number of consecutive iterations that must show the symptom before the warning.
    """

    is_wrong: Callable[[Metrics, Reference], bool]
    message: str
    patience: int = PATIENCE


def _lost(metrics: Metrics) -> bool:
    """True if more than a tenth of the answers could not be graded."""
    # A user's verifier fails if it returns no score. The built-in rules fail if a worker process
    # dies or times out.
    names = ["worker_deaths", "timeouts"]
    if "process/grader_failed" in metrics:
        names = ["failed"]
    names.append("rewards_failed")
    lost = sum(metrics.get(f"process/grader_{name}", 0.0) for name in names)
    graded = max(metrics.get("grader/graded", 0.0), 1.0)
    return lost > LOST_VERDICTS * graded


def _off_centre(metrics: Metrics) -> bool:
    """True if the mean advantage is far from 0 and the policy changed since sampling.

    The mean advantage is not checked if the policy is unchanged, because a baseline that differs
    from the mean reward does not bias the gradient in this case.
    """
    if "advantage/score_offset" not in metrics:
        return False
    difference = max(abs(metrics["policy/ratio"] - 1), metrics["mismatch/k3"])
    shift = abs(metrics["advantage/mean"])
    return shift > OFF_CENTRE * metrics["advantage/std"] and difference > SAME_POLICY


def _one_sided(metrics: Metrics, _: Reference) -> bool:
    """True if the mean advantage is more than half a standard deviation below 0."""
    mean = metrics.get("advantage/mean", 0.0)
    deviation = metrics.get("advantage/std", 1.0)
    # If all advantages are equal, their deviation is 0, and their mean may be a rounding error.
    return mean < -max(OFF_CENTRE * deviation, SAME_POLICY)


def _is_shortened(metrics: Metrics, _: Reference) -> bool:
    """True if the KL of the update was more than about a hundred times `max_update_kl`."""
    # Both metrics are 0 if the loss contains no tokens. The KL of a dropped update may be NaN.
    was_measured = metrics.get("policy/update_kl", 0.0) != 0.0
    return was_measured and metrics["policy/update_scale"] <= SHORTENED


def _closes_less(metrics: Metrics, reference: Reference) -> bool:
    """True if the fraction of closed answers is low, and lower than in the first iteration.

    A closed answer ended with a closing tag or an end token, before the maximum length.
    """
    name = "rollout/closed_answers"
    if name not in metrics or name not in reference.first:
        return False
    return metrics[name] < min(CLOSED, reference.first[name] - SHARE_CHANGE)


def _closes_less_at(budget: str, metrics: Metrics, first: Metrics) -> bool:
    """True if the fraction of closed answers at one budget is low, and lower than at first.

    Args:
      budget: thinking budget in tokens, as the text that ends the names of its metrics.
      metrics: metrics of the current iteration, which has traces with this budget.
      first: metrics of the first iteration, which has traces with this budget.
    """
    share_before = first[CLOSED_AT + budget]
    traces = min(first[TRACES_AT + budget], metrics[TRACES_AT + budget])
    # The variance of a fraction of 1 is unknown, and estimated as that of the bound.
    share = min(share_before, CLOSED)
    standard_error = math.sqrt(share * (1.0 - share) / traces)
    change = max(SHARE_CHANGE, STANDARD_ERRORS * standard_error)
    return metrics[CLOSED_AT + budget] < min(CLOSED, share_before - change)


def _repeats_more(metrics: Metrics, reference: Reference) -> bool:
    """True if more traces end in repetitions than in the first iteration."""
    name = "rollout/repetition"
    if name not in metrics or name not in reference.first:
        return False
    return metrics[name] > reference.first[name] + SHARE_CHANGE


def _accuracy(metrics: Metrics) -> float:
    """Returns the accuracy averaged over all truncation points (cuts), in [0, 1].

    The rewards are not used because they may have a different scale.
    """
    cuts = [float(value) for name, value in metrics.items() if name.startswith("reward/cut_")]
    return sum(cuts) / max(len(cuts), 1)


def _has_lost_reward(metrics: Metrics, reference: Reference) -> bool:
    """True if no answer is right, for the first time in a run that had right answers before.

    A policy that is rarely right has such steps by chance. Only the first `LOST_REWARD_PATIENCE`
    steps without a right answer therefore show the symptom, so the warning is given if they are
    consecutive.
    """
    return (
        _accuracy(metrics) == 0.0
        and reference.rewarded_steps >= HAD_REWARD_STEPS
        and reference.unrewarded_steps <= LOST_REWARD_PATIENCE
        # Above this accuracy, the alarm `collapse` is earlier.
        and reference.best_accuracy <= WORTH_LOSING
    )


SYMPTOMS = {
    "no_reward": Symptom(
        lambda m, _: _accuracy(m) == 0.0,
        f"no answer was right for {PATIENCE} iterations, so the policy learns nothing. Often the "
        "grader can't read the answers, or they are truncated: look at the answers in rollouts/, "
        "set a larger rollout.answer_tokens or budget.min, or start from a model that can solve "
        "some of the questions",
    ),
    "lost_reward": Symptom(
        _has_lost_reward,
        f"no answer was right for {LOST_REWARD_PATIENCE} steps, although some were right in every "
        "step before. Look at rollouts/: if the answers are no longer closed or repeat themselves, "
        "go back to an earlier checkpoint and set a lower optimizer.learning_rate; otherwise set a "
        "larger rollout.questions",
        LOST_REWARD_PATIENCE,
    ),
    "always_right": Symptom(
        lambda m, _: _accuracy(m) == 1.0,
        f"every answer was right for {PATIENCE} iterations, so nothing is left to learn. Choose "
        "harder questions (data.train) or smaller budgets (budget.max)",
    ),
    "collapse": Symptom(
        lambda m, reference: (
            reference.best_accuracy > WORTH_LOSING
            and _accuracy(m) < COLLAPSED_TO * reference.best_accuracy
        ),
        "the share of right answers has collapsed: it was below a quarter of its best value in "
        "two consecutive steps. Often the updates are too large: set a lower "
        "optimizer.learning_rate, or keep the policy near its start with loss.kl_coef. The best "
        "checkpoint so far is kept (best.json)",
        # A single step can be this low by chance if a batch has few questions. Of 950 committed
        # runs, only the run that collapsed has two such steps in a row (docs/alarms.md).
        2,
    ),
    "closed_answers": Symptom(
        _closes_less,
        f"for {SHORT_PATIENCE} steps, fewer answers than at the first step end with the closing "
        "tag (rollout/closed_answers, or at one budget rollout/closed_answers_BUDGET): the policy "
        "is degrading at one or more budgets. Look at rollouts/, go back to an earlier checkpoint, "
        "and set a lower optimizer.learning_rate and optimizer.conditioning_learning_rate",
        SHORT_PATIENCE,
    ),
    "repetition": Symptom(
        _repeats_more,
        f"for {SHORT_PATIENCE} steps, more traces than at the first step end in repetitions "
        "(rollout/repetition): the policy is degrading at one or more budgets. Look at "
        "rollouts/, go back to an earlier checkpoint, and set a lower optimizer.learning_rate "
        "and optimizer.conditioning_learning_rate",
        SHORT_PATIENCE,
    ),
    "one_sided": Symptom(
        _one_sided,
        "the mean advantage was below 0 by more than half a standard deviation in two "
        "consecutive steps: the updates mostly lower the probability of the sampled tokens, "
        "which can destroy the abilities of the policy. Set a lower optimizer.learning_rate, or "
        "a larger rollout.questions, so that the mean reward varies less between batches",
        2,
    ),
    "update_kl": Symptom(
        _is_shortened,
        f"for {SHORT_PATIENCE} steps, the KL of the updates (policy/update_kl) was more than a "
        "hundred times optimizer.max_update_kl, so each of them was shortened or "
        "dropped. Set a lower optimizer.learning_rate and optimizer.conditioning_learning_rate, "
        "or more optimizer.warmup_steps",
        SHORT_PATIENCE,
    ),
    "clipped": Symptom(
        lambda m, _: m.get("policy/clipped_share", 0.0) > CLIPPED,
        "the loss of more than half of the tokens is clipped, so most of the batch has no "
        "gradient. Set a lower optimizer.learning_rate or fewer train.minibatches",
    ),
    "verdicts": Symptom(
        lambda m, _: _lost(m),
        "more than a tenth of the answers got no score and count as 0, because the grader's "
        "worker processes crashed or timed out, or because your own verifier or reward failed. "
        "Look at the metrics process/grader_*, at the memory of the machine, and at the answers "
        "in rollouts/",
    ),
    "slow_host": Symptom(
        lambda m, _: m.get("process/slowest_host_times", 0.0) >= SLOW_HOST,
        "one process needs three times as long as the others for its part of a step, and all "
        "others wait for it. Check the CPU load of its host (process/slowest_host)",
    ),
    "off_centre": Symptom(
        lambda m, _: _off_centre(m),
        "the mean advantage differs from 0 by more than half a standard deviation, and the "
        "policy that sampled the traces differs slightly from the one that is trained, which "
        "together bias the gradient. Set loss.importance_cap=2, advantage.score_by_budget=true "
        "if the budgets differ by more than a factor of two, or advantage.score_weighted=false",
    ),
    "mismatch": Symptom(
        lambda m, reference: m.get("mismatch/absolute", 0.0) > reference.largest_mismatch,
        "the log-probabilities of sampler and learner for the same tokens differ by more than "
        "rounding errors (mismatch/absolute). With rollout.engine=vllm, a server probably has "
        "old weights, or samples with its own temperature or top-p (--logprobs-mode "
        "processed_logprobs) or in another --dtype. With rollout.async_steps=1, the updates may "
        "be too large (optimizer.learning_rate). Otherwise set loss.importance_cap=2.0, or "
        "model.compute_dtype=float32 to see whether the cause is rounding",
        patience=1,
    ),
}


def _is_compared(name: str) -> bool:
    """True if a metric is compared with the first iteration."""
    return name in COMPARED or name.startswith((CLOSED_AT, TRACES_AT))


class _Sign(NamedTuple):
    """The result of checking the metrics of one iteration for one symptom.

    Attributes:
      name: name of the symptom in `SYMPTOMS`.
      counter: name of the counter of consecutive iterations with the symptom. The symptom
        "closed_answers" has a counter for the mean over budgets, and one for each budget.
      is_wrong: True if the metrics show the symptom.
    """

    name: str
    counter: str
    is_wrong: bool


def _check(metrics: Metrics, reference: Reference) -> Iterator[_Sign]:
    """Yields the result of each symptom, for the metrics of one iteration."""
    for name, symptom in SYMPTOMS.items():
        yield _Sign(name, name, symptom.is_wrong(metrics, reference))
    for metric in reference.first:
        # Without traces with this budget, nothing is known about the budget in this iteration.
        if metric.startswith(CLOSED_AT) and metric in metrics:
            budget = metric.removeprefix(CLOSED_AT)
            is_wrong = _closes_less_at(budget, metrics, reference.first)
            yield _Sign("closed_answers", metric, is_wrong)


# For each verifier: the number of answers it received, and the number of answers without a score.
Totals = Mapping[str, tuple[int, int]]


def all_failed(before: Totals, now: Totals) -> dict[str, bool]:
    """Returns True for each verifier that failed on all answers of an interval, by name.

    Verifiers that received no answers are omitted.

    Args:
      before: number of answers and of failures of each verifier, at the start of the interval.
      now: the same numbers at the end of the interval.
    """
    failures = {}
    for name, (received_now, failed_now) in now.items():
        received_before, failed_before = before[name]
        received = received_now - received_before
        if received:
            failures[name] = failed_now - failed_before == received
    return failures


class VerifierWatch:
    """Counts the consecutive steps in which a verifier scores none of its answers."""

    def __init__(self) -> None:
        self._in_a_row: collections.Counter[str] = collections.Counter()

    def after_step(self, before: Totals, now: Totals) -> list[str]:
        """Returns the verifiers that failed on all answers of the last `FAILING_STEPS` steps."""
        for name, failed in all_failed(before, now).items():
            self._in_a_row[name] = self._in_a_row[name] + 1 if failed else 0
        return [name for name in now if self._in_a_row[name] >= FAILING_STEPS]


class RunHealth:
    """Monitors the metrics of a run and yields warnings.

    The history of the monitor is part of a run's checkpoints, so a resumed run prints the same
    warnings as an uninterrupted run.
    """

    def __init__(self, largest_mismatch: float = MISMATCH) -> None:
        """Initializes the monitor with an empty history.

        Args:
          largest_mismatch: maximum mean absolute difference between the log-probabilities of
            sampler and learner (metric `mismatch/absolute`) that is attributed to rounding, in nats
            per token.
        """
        self._largest_mismatch = largest_mismatch
        self._first: Metrics | None = None
        self._in_a_row: collections.Counter[str] = collections.Counter()
        self._warned: set[str] = set()
        self._smoothed_accuracy: float | None = None
        self._best_accuracy = 0.0
        self._rewarded_steps = 0
        self._unrewarded_steps = 0

    def warnings(self, metrics: Metrics) -> Iterator[str]:
        """Yields the warnings about symptoms, each of them once per run.

        A warning is given after `Symptom.patience` consecutive iterations with the symptom.

        Args:
          metrics: metrics of the current iteration.
        """
        if self._first is None:
            self._first = {name: float(metrics[name]) for name in metrics if _is_compared(name)}
        accuracy = _accuracy(metrics)
        if accuracy > 0.0:
            self._rewarded_steps += 1
        else:
            self._unrewarded_steps += 1
        smoothed = accuracy
        if self._smoothed_accuracy is not None:
            smoothed = 0.9 * self._smoothed_accuracy + 0.1 * accuracy
        self._smoothed_accuracy = smoothed
        self._best_accuracy = max(self._best_accuracy, smoothed)
        reference = Reference(
            first=self._first,
            best_accuracy=self._best_accuracy,
            rewarded_steps=self._rewarded_steps,
            unrewarded_steps=self._unrewarded_steps,
            largest_mismatch=self._largest_mismatch,
        )
        for sign in _check(metrics, reference):
            if sign.is_wrong:
                self._in_a_row[sign.counter] += 1
            else:
                self._in_a_row[sign.counter] = 0
            symptom = SYMPTOMS[sign.name]
            lasts = self._in_a_row[sign.counter] == symptom.patience
            if lasts and sign.name not in self._warned:
                self._warned.add(sign.name)
                yield symptom.message

    def to_record(self) -> dict[str, Any]:
        """Returns the history of the monitor, which is serializable as JSON."""
        return {
            "first": self._first,
            "in_a_row": dict(self._in_a_row),
            "warned": sorted(self._warned),
            "smoothed_accuracy": self._smoothed_accuracy,
            "best_accuracy": self._best_accuracy,
            "rewarded_steps": self._rewarded_steps,
            "unrewarded_steps": self._unrewarded_steps,
        }

    def resume(self, record: Mapping[str, Any]) -> None:
        """Restores the history of a resumed run, which `to_record` returned."""
        self._first = record["first"]
        self._in_a_row = collections.Counter(record["in_a_row"])
        self._warned = set(record["warned"])
        self._smoothed_accuracy = record["smoothed_accuracy"]
        self._best_accuracy = record["best_accuracy"]
        self._rewarded_steps = record["rewarded_steps"]
        self._unrewarded_steps = record["unrewarded_steps"]
