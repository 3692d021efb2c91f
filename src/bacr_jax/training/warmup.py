"""The supervised warm-up: trains random or pretrained weights until the policy can do the task.

The finished weights are stored in a folder with a fingerprint of their settings
(`warmup_folder`), so that several methods can start from the same policy. The folder also stores an
unfinished warm-up, which is resumed at its last save.

The learning rate rises, is constant, and falls over the last 35 % of the steps. While it falls no
new skill is learned, and the right time for the fall differs between seeds (docs/quickstart.md). So
the rate stays constant until greedy accuracy at the largest budget is `warmup.hold_accuracy`
(measured every 100 steps, `warmup.max_hold` times). If accuracy after the fall is below
`warmup.target_accuracy`, the rate returns to its maximum for 100 steps and falls again; each time
counts as one of the `warmup.max_hold`. The same happens if the policy can't write the short style,
which reinforcement learning is to find, on `warmup.short_accuracy` of the problems of some level;
the 100 steps then contain more of that style (`ledger.PRACTICE`).

With `warmup.style` the warm-up ends as soon as that style is right on a share of the problems
of one level that lies in `warmup.style_accuracy`, because the size of the trade-off between styles
depends on this share. `warmup.target_accuracy` is then the accuracy of the style *steps* on the
highest level, and the rate falls over 40 steps.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.learner.objective import LearnerSpec
from bacr_jax.learner.supervised import rows_right, supervised_optimizer, supervised_step
from bacr_jax.model import qwen2
from bacr_jax.parallel import processes
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.prompts.encoding import with_ids
from bacr_jax.prompts.environment import Questions
from bacr_jax.questions import ledger
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.folder import WarmupPaths
from bacr_jax.runs.initial import plain_params
from bacr_jax.runs.setup import Policy
from bacr_jax.training.warmup_folder import (
    locked,
    read_warmup,
    save_warmup,
    told_budgets,
    warmup_fingerprint,
)
from bacr_jax.types import Params, Poll, Prompts

# Function of a step, counted from 0, and of `practice` (True for more of the short style), which
# returns the tokens and the loss mask of the step.
Batches = Callable[[int, bool], tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]]
# Called with the step, all steps and the loss.
OnProgress = Callable[[int, int, float], None]

# Shape of the learning rate, chosen by trial: 50 steps of rise, then constant, then a linear fall
# to 3 % over the last 35 % of the steps.
RISE = 50
FALL_SHARE = 0.35
FINAL_FRACTION = 0.03
# Steps at the constant rate between two measurements.
HOLD_STEPS = 100
# With `warmup.style`: the style is measured every 25 steps, from the curriculum's last phase on, on
# a copy that trains for 40 more steps with a falling rate.
MEASURE_EVERY = 25
STYLE_FALL = 40
# Problems on which a style is measured: a standard error of 3 points.
STYLE_PROBLEMS = 256
# Problems of each level on which the short style is measured: a standard error of 3 points at 0.9.
SHORT_PROBLEMS = 128
# Steps between saves, so that a crash loses some ten seconds on a CPU.
SAVE_EVERY = 100
# Steps between two reports of progress.
SHOW_EVERY = 20
# Seconds after which the next step is reported, whatever its number.
SHOW_SECONDS = 15.0


@dataclasses.dataclass
class WarmUp:
    """A warm-up in progress, or a method's own supervised stage.

    A resumed warm-up runs the same schedule from its beginning. It counts the steps that were done
    before without taking them, and reads earlier measurements from its journal.

    Attributes:
      tx: optimizer.
      opt_state: state of the optimizer.
      saved: checkpoints of the unfinished warm-up; None if it is never saved.
      frozen: weights that are not trained.
      planned: steps of the schedule so far, which may be extended.
      step: steps of the schedule that are done.
      done: steps that were done before a resumed warm-up was stopped.
      journal: results of all measurements, in order.
      measurements: number of measurements in the schedule so far.
      pending_loss: loss of the step that the device is computing.
      last_shown: time of the last report of progress (`time.monotonic`).
    """

    config: Config
    batches: Batches
    spec: LearnerSpec
    tx: Any
    params: Params
    opt_state: Any
    on_progress: OnProgress | None
    poll: Poll
    saved: Checkpoints | None
    frozen: Params | None = None
    planned: int = 0
    step: int = 0
    done: int = 0
    journal: list[Any] = dataclasses.field(default_factory=list)
    measurements: int = 0
    pending_loss: jax.Array | None = None
    last_shown: float = dataclasses.field(default_factory=time.monotonic)

    def resume(self) -> None:
        """Restores parameters, optimizer state and journal of a stopped warm-up, if saved."""
        assert self.saved is not None
        if self.saved.latest is None:
            return
        like = {"params": self.params, "opt_state": self.opt_state}
        self.done, state, meta = self.saved.restore(like)
        self.params = state["params"]
        self.opt_state = state["opt_state"]
        self.journal = meta["journal"]

    def save(self) -> None:
        """Saves parameters, optimizer state and journal, unless this step was saved."""
        if self.saved is not None and self.step > max(self.saved.latest or 0, self.done):
            state = {"params": self.params, "opt_state": self.opt_state}
            self.saved.save(self.step, state, {"journal": self.journal})

    def copy(self) -> "WarmUp":
        """Returns an independent copy, which is not saved and reports no progress."""
        params, opt_state = jax.tree.map(lambda x: x.copy(), (self.params, self.opt_state))
        return dataclasses.replace(
            self,
            params=params,
            opt_state=opt_state,
            on_progress=None,
            saved=None,
            done=0,
        )

    def measured(self, measure: Callable[[], Any]) -> Any:
        """Returns the result of a measurement: from the journal if it was made before a stop."""
        self.measurements += 1
        if self.measurements > len(self.journal):
            self.journal.append(measure())
        return self.journal[self.measurements - 1]

    def advance(self, steps: int, rate: Callable[[int], float], *, practice: bool = False) -> None:
        """Trains for a number of steps.

        Args:
          rate: learning rate of each of these steps, counted from 0.
          practice: True for batches with more of the short style.
        """
        for i in range(steps):
            if self.step < self.done:
                self.step += 1
                continue
            tokens, loss_mask = self.batches(self.step, practice)
            self.params, self.opt_state, loss = supervised_step(
                self.params,
                self.opt_state,
                tokens,
                loss_mask,
                rate(i),
                self.frozen,
                spec=self.spec,
                tx=self.tx,
            )
            self.step += 1
            # The device computes one step while the next batch is made. A longer queue of steps
            # would hold the memory of all of them, and delay the response to a signal.
            jax.block_until_ready(self.pending_loss)
            self.pending_loss = loss
            self._report(loss)
            if self.step % SAVE_EVERY == 0:
                self.save()
            if self.poll is not None:
                self.poll()

    def _report(self, loss: Any) -> None:
        """Reports progress every 20 steps, at the planned end, and if steps are slow.

        Args:
          loss: scalar of the last step, for which a report waits.
        """
        is_regular = self.step % SHOW_EVERY == 0 or self.step == self.planned
        is_late = time.monotonic() - self.last_shown > SHOW_SECONDS
        if (is_regular or is_late) and self.on_progress is not None:
            self.on_progress(self.step, self.planned, float(loss))
            self.last_shown = time.monotonic()


def ledger_batches(config: Config) -> Batches:
    """Returns the batches of the ledger's own curriculum."""
    settings = config.warmup
    task = config.data.ledger
    budgets = told_budgets(config)

    def batch(step: int, practice: bool) -> tuple[np.ndarray, np.ndarray]:
        return ledger.warmup_batch(
            config.seed,
            step,
            settings.steps,
            variant=task.variant,
            batch_tokens=settings.batch_tokens,
            max_operand=task.max_operand,
            told=budgets,
            practice=practice,
        )

    return batch


def styled_prompts(
    questions: Questions, style: ledger.Style, level: int, budget: int
) -> tuple[Prompts, list[str]]:
    """Returns `opened_prompts` of ledger problems of a level, with the first token of a style.

    At most `STYLE_PROBLEMS` problems are used.
    """
    index = np.flatnonzero(questions.set.levels == level)[:STYLE_PROBLEMS]
    # A trace of the style *steps* starts with a line's label, other traces with the start digit,
    # which follows <bos> in the prompt.
    start_digits = np.asarray(questions.prompts.take(index).tokens)[:, 1]
    first = np.full_like(start_digits, ledger.ID["a"]) if style == "steps" else start_digits
    return opened_prompts(questions, index, first, budget)


def opened_prompts(
    questions: Questions, index: Int[np.ndarray, "n"], first: Int[np.ndarray, "n"], budget: int
) -> tuple[Prompts, list[str]]:
    """Returns prompts that end with the first token of a trace, and the reference answers.

    Args:
      index: questions to use.
      first: id of each trace's first token.
      budget: budget in the prompts, if prompts contain budgets.
    """
    prompts = questions.at(index, np.full_like(index, budget))
    return with_ids(prompts, first[:, None]), [questions.set.answers[i] for i in index]


def short_accuracy(run: WarmUp) -> float:
    """Returns the share of problems whose short trace the policy writes, on its weakest level.

    Each token is predicted given the correct tokens before it. Labels are not judged, because a
    label may also start a redundant line.
    """
    config = run.config
    budget = None if told_budgets(config) is None else config.budget.max
    tokens, judged, levels = ledger.short_traces(
        SHORT_PROBLEMS, max_operand=config.data.ledger.max_operand, told=budget
    )
    right = np.asarray(rows_right(run.params, tokens, judged, spec=run.spec))
    return min(float(right[levels == level].mean()) for level in np.unique(levels))


def _rising(learning_rate: float) -> Callable[[int], float]:
    """Returns a rate that rises linearly over `RISE` steps and is then constant."""
    return lambda i: learning_rate * min((i + 1) / RISE, 1.0)


def until_accurate(run: WarmUp, accuracy_of: Callable[[Params], float]) -> dict[str, float]:
    """Trains until greedy accuracy and short accuracy reach the targets of the config.

    Args:
      accuracy_of: greedy accuracy of parameters at the largest budget.

    Returns:
      The accuracies at the end, by name.

    Raises:
      UserError: a target is not reached within `warmup.max_hold` holds.
    """
    settings = run.config.warmup
    fall_steps = int(FALL_SHARE * settings.steps)
    rate_drop = 1.0 - FINAL_FRACTION

    def constant(i: int) -> float:
        return settings.learning_rate

    def falling(i: int) -> float:
        return settings.learning_rate * (1.0 - rate_drop * (i + 1) / fall_steps)

    def measure() -> float:
        return float(run.measured(lambda: accuracy_of(run.params)))

    run.planned = settings.steps
    run.advance(settings.steps - fall_steps, _rising(settings.learning_rate))
    holds = 0
    # A target of 0 needs no measurement.
    max_first_holds = settings.max_hold if settings.hold_accuracy > 0 else 0
    while holds < max_first_holds and measure() < settings.hold_accuracy:
        holds += 1
        run.planned += HOLD_STEPS
        run.advance(HOLD_STEPS, constant)
    run.advance(fall_steps, falling)
    data = run.config.data
    # Only the ledger with redundant lines has a short style: the traces without these lines.
    has_short_style = data.train == "ledger" and data.ledger.variant == "redundant"
    short_target = settings.short_accuracy if has_short_style else 0.0
    while True:
        accuracies = {"accuracy": measure()}
        is_accurate = accuracies["accuracy"] >= settings.target_accuracy
        if is_accurate and short_target:
            accuracies["short_accuracy"] = run.measured(lambda: short_accuracy(run))
        if is_accurate and accuracies.get("short_accuracy", 1.0) >= short_target:
            return accuracies
        if holds == settings.max_hold:
            raise UserError(_not_reached(run, accuracies))
        # The rate fell too early, or the policy needs the redundant lines: train on, and let the
        # rate fall again.
        holds += 1
        run.planned += HOLD_STEPS + fall_steps
        run.advance(HOLD_STEPS, constant, practice=is_accurate)
        run.advance(fall_steps, falling)


def _not_reached(run: WarmUp, accuracies: dict[str, float]) -> str:
    """Returns the error message of a warm-up that does not reach a target."""
    settings = run.config.warmup
    result = f"greedy accuracy {accuracies['accuracy']:.2f} at the largest budget"
    target = f"warmup.target_accuracy={settings.target_accuracy}"
    if "short_accuracy" in accuracies:
        share = accuracies["short_accuracy"]
        result = f"{share:.2f} of the short traces of the weakest level right"
        target = f"warmup.short_accuracy={settings.short_accuracy}"
    return (
        f"warm-up: {result} after {run.step} steps is below {target}; write a larger warmup.steps "
        "or another seed"
    )


def until_style(
    run: WarmUp, style_accuracy_of: Callable[[Params, ledger.Style], float]
) -> dict[str, float]:
    """Trains until the accuracy of `warmup.style` lies in `warmup.style_accuracy`.

    Args:
      style_accuracy_of: greedy accuracy of parameters on prompts with the first token of a style.

    Returns:
      The accuracies of both styles at the end, by name.

    Raises:
      UserError: the accuracy is never in the band, or the style *steps* is not accurate then.
    """
    settings = run.config.warmup
    assert settings.style is not None
    low, high = settings.style_accuracy
    styles: tuple[ledger.Style, ...] = ("steps", settings.style)
    last_phase_start = ledger.WARMUP[run.config.data.ledger.variant][-2].until
    first_steps = int(last_phase_start * settings.steps)
    max_steps = settings.steps + settings.max_hold * HOLD_STEPS
    slope = (1.0 - FINAL_FRACTION) / STYLE_FALL

    def constant(i: int) -> float:
        return settings.learning_rate

    def falling(i: int) -> float:
        return settings.learning_rate * (1.0 - slope * (i + 1))

    def measure(params: Any) -> dict[str, float]:
        return {style: style_accuracy_of(params, style) for style in styles}

    def finished_copy() -> WarmUp:
        """Returns a copy whose rate fell from here, since accuracy jumps while the rate falls."""
        end = run.copy()
        end.advance(STYLE_FALL, falling)
        return end

    run.planned = settings.steps
    run.advance(first_steps, _rising(settings.learning_rate))
    accuracies = run.measured(lambda: measure(run.params))
    while run.step < max_steps and accuracies[settings.style] <= high:
        if accuracies[settings.style] >= low / 2:
            accuracies = run.measured(lambda: measure(finished_copy().params))
            is_in_band = low <= accuracies[settings.style] <= high
            if is_in_band and accuracies["steps"] >= settings.target_accuracy:
                end = finished_copy()
                run.params = end.params
                run.step = end.step
                return {f"{style}_accuracy": share for style, share in accuracies.items()}
        run.planned = max(run.planned, run.step + MEASURE_EVERY)
        run.advance(MEASURE_EVERY, constant)
        if accuracies[settings.style] < low / 2:
            accuracies = run.measured(lambda: measure(run.params))
    raise UserError(
        f"warm-up: after {run.step} steps the style {settings.style} is right on "
        f"{accuracies[settings.style]:.2f} of level {settings.style_level} and steps on "
        f"{accuracies['steps']:.2f} of level {ledger.MAX_LEVEL}, wanted {low:g} to {high:g} and "
        f"{settings.target_accuracy:g} or more; write another seed, warmup.steps or "
        "warmup.style_accuracy"
    )


def warm_up(
    config: Config,
    policy: Policy,
    folder: Path,
    *,
    batches: Batches,
    styles: Sequence[str],
    accuracy_of: Callable[[Params, Any], float],
    on_progress: OnProgress,
    poll: Poll,
) -> Params:
    """Trains the warm-up, or reads the finished one of `folder`, and returns its fp32 weights.

    Args:
      policy: its budget module and value head are not part of the warm-up.
      styles: styles that are measured at the end. The last one's accuracy is the accuracy of the
        warm-up.
      accuracy_of: greedy accuracy of parameters at the largest budget: of evaluated questions for
        None, or of prompts that contain the first token of a style.
    """
    spec = dataclasses.replace(policy.learner, conditioning=None, value=None)
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    paths = WarmupPaths(folder)
    with contextlib.ExitStack() as stack:
        if not processes.largest(paths.identity.exists()):
            stack.enter_context(locked(folder, poll))
        # Another run may have finished it before this run got the lock.
        if processes.largest(paths.identity.exists()):
            blank = policy.blank(lambda: qwen2.init(key, spec.model))
            return read_warmup(config, paths, blank)
        params = plain_params(key, policy, config.model.path)
        saved = Checkpoints(paths.unfinished / warmup_fingerprint(config), keep=1)
        optimizer = supervised_optimizer()
        run = WarmUp(
            config=config,
            batches=batches,
            spec=spec,
            tx=optimizer,
            params=params,
            opt_state=policy.make(optimizer.init, params),
            on_progress=on_progress,
            poll=poll,
            saved=saved,
        )
        run.resume()
        try:
            accuracies = _train(run, styles, accuracy_of)
        except Preempted:
            run.save()
            raise
        finally:
            saved.close()
        save_warmup(config, paths, run.step, run.params, accuracies)
    return run.params


def _train(
    run: WarmUp, styles: Sequence[str], accuracy_of: Callable[[Params, Any], float]
) -> dict[str, float]:
    """Runs the schedule of the config, and returns the accuracies at its end by name.

    Args:
      styles, accuracy_of: as in `warm_up`.
    """
    if run.config.warmup.style is not None:
        accuracies = until_style(run, accuracy_of)
    else:
        last_style = styles[-1] if styles else None
        accuracies = until_accurate(run, lambda params: accuracy_of(params, last_style))
    for style in styles[:-1]:
        measure = functools.partial(accuracy_of, run.params, style)
        accuracies[f"{style}_accuracy"] = run.measured(measure)
    if styles:
        accuracies[f"{styles[-1]}_accuracy"] = accuracies["accuracy"]
    return accuracies
