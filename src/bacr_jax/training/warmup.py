"""The supervised warm-up: from random weights to a policy that can do the task, at length.

The finished weights lie in a folder of their own, with the settings that made
them, so that several methods can start from the same policy. An unfinished warm-up lies there too:
its steps up to the last save are skipped when it is gone through again.

The rate rises, stays, and falls over the last 35 % of the steps. Once it falls no new skill is
learned, and when it may fall differs between seeds (docs/quickstart.md). So it stays until greedy
accuracy at the largest budget is `warmup.hold_accuracy` (measured every 100 steps,
`warmup.max_hold` times). If the fall ends below `warmup.target_accuracy`, the rate goes back up for
100 steps and falls again, each time counted as one of the `warmup.max_hold`. The same is done where
the policy can't write the short style, which reinforcement learning is to find, on
`warmup.short_accuracy` of the problems of some level; the 100 steps then hold more of that style
(`ledger.PRACTICE`).

With `warmup.style` the warm-up ends as soon as that style is right on a share of the problems
of one level that lies in `warmup.style_accuracy`: the size of the trade-off between styles
depends on it. `warmup.target_accuracy` is then that of the style *steps* on the highest level,
and the rate falls over 40 steps.
"""

import contextlib
import dataclasses
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
    alone,
    keep_warmup,
    read_warmup,
    told_budgets,
    warmup_fingerprint,
)
from bacr_jax.types import Params, Poll, Prompts

# Tokens and loss mask of a step, counted from 0; true: with more of the short style.
Batches = Callable[[int, bool], tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]]
# Called with the step, steps in all and the loss.
OnProgress = Callable[[int, int, float], None]

# Shape of the rate, found by trial: 50 steps up, constant, linear over the last 35 % down to 3 %.
RISE, FALL_SHARE, FINAL_FRACTION = 50, 0.35, 0.03
HOLD_STEPS = 100
# Where a style decides the end: it is measured from the last phase on, every 25 steps, on a copy
# whose rate falls over 40 more.
MEASURE_EVERY, STYLE_FALL = 25, 40
# Problems on which a style is measured: an error of 3 points.
STYLE_PROBLEMS = 256
# Problems of each level on which the short style is measured: an error of 3 points at .9.
SHORT_PROBLEMS = 128
# Steps between saves: what a crash can cost, some ten seconds on a CPU.
SAVE_EVERY = 100
# Seconds after which a step is shown, whichever it is.
SHOW_SECONDS = 15.0


@dataclasses.dataclass
class WarmUp:
    """A warm-up in progress, or a method's own supervised stage.

    One that was stopped goes through the same motions again: the steps it had done are counted but
    not taken, and what it had measured is read from its journal.
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
    under_way: jax.Array | None = None
    shown: float = dataclasses.field(default_factory=time.monotonic)

    def resume(self) -> None:
        """Takes over what a stopped warm-up had saved."""
        assert self.saved is not None
        if self.saved.latest is not None:
            like = {"params": self.params, "opt_state": self.opt_state}
            self.done, state, meta = self.saved.restore(like)
            self.params, self.opt_state = state["params"], state["opt_state"]
            self.journal = meta["journal"]

    def save(self) -> None:
        """Keeps parameters and journal as they are now."""
        if self.saved is not None and self.step > max(self.saved.latest or 0, self.done):
            state = {"params": self.params, "opt_state": self.opt_state}
            self.saved.save(self.step, state, {"journal": self.journal})

    def copy(self) -> "WarmUp":
        """One that goes on by itself, and is neither saved nor shown."""
        copied = lambda tree: jax.tree.map(lambda x: x.copy(), tree)
        return dataclasses.replace(
            self,
            params=copied(self.params),
            opt_state=copied(self.opt_state),
            on_progress=None,
            saved=None,
            done=0,
        )

    def measured(self, measure: Callable[[], Any]) -> Any:
        """What `measure` says now, or said when this point was reached before."""
        self.measurements += 1
        if self.measurements > len(self.journal):
            self.journal.append(measure())
        return self.journal[self.measurements - 1]

    def advance(self, steps: int, rate: Callable[[int], float], *, practice: bool = False) -> None:
        """`steps` steps at rate(0), rate(1), ..., with more of the short style if told to."""
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
            # One step is under way while the next is made ready: a queue of them would hold the
            # memory of all, and hear of a signal only at its end.
            jax.block_until_ready(self.under_way)
            self.under_way = loss
            shown = self.step % 20 == 0 or self.step == self.planned
            slow = time.monotonic() - self.shown > SHOW_SECONDS
            if (shown or slow) and self.on_progress is not None:
                self.on_progress(self.step, self.planned, float(loss))
                self.shown = time.monotonic()
            if self.step % SAVE_EVERY == 0:
                self.save()
            if self.poll is not None:
                self.poll()


def ledger_batches(config: Config) -> Batches:
    """The batches of the ledger's own curriculum."""
    settings, task, told = config.warmup, config.data.ledger, told_budgets(config)
    return lambda step, practice: ledger.warmup_batch(
        config.seed,
        step,
        settings.steps,
        variant=task.variant,
        batch_tokens=settings.batch_tokens,
        max_operand=task.max_operand,
        told=told,
        practice=practice,
    )


def styled_prompts(
    questions: Questions, style: ledger.Style, level: int, budget: int
) -> tuple[Prompts, list[str]]:
    """`opened_prompts` of at most `STYLE_PROBLEMS` problems of a level, begun in a style."""
    index = np.flatnonzero(questions.set.levels == level)[:STYLE_PROBLEMS]
    # A line of steps starts with its label, the other style with the start digit, which stands
    # after <bos> in the prompt.
    digits = np.asarray(questions.prompts.take(index).tokens)[:, 1]
    first = np.full_like(digits, ledger.ID["a"]) if style == "steps" else digits
    return opened_prompts(questions, index, first, budget)


def opened_prompts(
    questions: Questions, index: Int[np.ndarray, "n"], first: Int[np.ndarray, "n"], budget: int
) -> tuple[Prompts, list[str]]:
    """Prompts that already hold the first token of a trace, told a budget; and their answers."""
    prompts = questions.at(index, np.full_like(index, budget))
    return with_ids(prompts, first[:, None]), [questions.set.answers[i] for i in index]


def short_accuracy(run: WarmUp) -> float:
    """Share of the problems whose short trace the policy writes right, of its weakest level.

    Each token is judged given the right ones before it; labels, with which a line is not redone,
    are given.
    """
    config = run.config
    told = None if told_budgets(config) is None else config.budget.max
    tokens, judged, levels = ledger.short_traces(
        SHORT_PROBLEMS, max_operand=config.data.ledger.max_operand, told=told
    )
    right = np.asarray(rows_right(run.params, tokens, judged, spec=run.spec))
    return min(float(right[levels == level].mean()) for level in np.unique(levels))


def until_accurate(run: WarmUp, accuracy_of: Callable[[Params], float]) -> dict[str, float]:
    """The schedule of a warm-up that ends with one accuracy."""
    settings = run.config.warmup
    fall = int(FALL_SHARE * settings.steps)
    run.planned = settings.steps
    run.advance(settings.steps - fall, lambda i: settings.learning_rate * min((i + 1) / RISE, 1.0))
    holds = 0
    measure = lambda: run.measured(lambda: accuracy_of(run.params))
    # An accuracy of 0 is reached without being measured.
    most = settings.max_hold if settings.hold_accuracy > 0 else 0
    while holds < most and measure() < settings.hold_accuracy:
        holds += 1
        run.planned += HOLD_STEPS
        run.advance(HOLD_STEPS, lambda i: settings.learning_rate)
    last = 1.0 - FINAL_FRACTION
    falling = lambda i: settings.learning_rate * (1.0 - last * (i + 1) / fall)
    run.advance(fall, falling)
    data = run.config.data
    # Its useless lines leave it a shorter style, without them.
    redundant = data.train == "ledger" and data.ledger.variant == "redundant"
    wanted = settings.short_accuracy if redundant else 0.0
    while True:
        found = {"accuracy": measure()}
        at_length = found["accuracy"] >= settings.target_accuracy
        if at_length and wanted:
            found["short_accuracy"] = run.measured(lambda: short_accuracy(run))
        if at_length and found.get("short_accuracy", 1.0) >= wanted:
            return found
        if holds == settings.max_hold:
            raise UserError(_not_reached(run, found))
        # It fell too early, or can't do without what is useless: back up, and down again.
        holds += 1
        run.planned += HOLD_STEPS + fall
        run.advance(HOLD_STEPS, lambda i: settings.learning_rate, practice=at_length)
        run.advance(fall, falling)


def _not_reached(run: WarmUp, found: dict[str, float]) -> str:
    """What a warm-up lacks, in one line."""
    settings = run.config.warmup
    said = f"greedy accuracy {found['accuracy']:.2f} at the largest budget"
    below = f"warmup.target_accuracy={settings.target_accuracy}"
    if "short_accuracy" in found:
        said = f"{found['short_accuracy']:.2f} of the short traces of the weakest level right"
        below = f"warmup.short_accuracy={settings.short_accuracy}"
    return (
        f"warm-up: {said} after {run.step} steps is below {below}; write a larger warmup.steps or "
        "another seed"
    )


def until_style(
    run: WarmUp, style_accuracy_of: Callable[[Params, ledger.Style], float]
) -> dict[str, float]:
    """Trains until a style is as accurate as asked, and no more."""
    settings = run.config.warmup
    assert settings.style is not None
    low, high = settings.style_accuracy
    styles: tuple[ledger.Style, ...] = ("steps", settings.style)

    def measure(params: Any) -> dict[str, float]:
        return {style: style_accuracy_of(params, style) for style in styles}

    last_phase = ledger.WARMUP[run.config.data.ledger.variant][-2].until
    first = int(last_phase * settings.steps)
    most = settings.steps + settings.max_hold * HOLD_STEPS
    slope = (1.0 - FINAL_FRACTION) / STYLE_FALL
    falling = lambda i: settings.learning_rate * (1.0 - slope * (i + 1))

    def ended() -> WarmUp:
        """A copy that ends its training here.

        Accuracy jumps while the rate falls, so that only a copy tells what ending here gives.
        """
        end = run.copy()
        end.advance(STYLE_FALL, falling)
        return end

    run.planned = settings.steps
    run.advance(first, lambda i: settings.learning_rate * min((i + 1) / RISE, 1.0))
    found = run.measured(lambda: measure(run.params))
    while run.step < most and found[settings.style] <= high:
        if found[settings.style] >= low / 2:
            found = run.measured(lambda: measure(ended().params))
            in_band = low <= found[settings.style] <= high
            if in_band and found["steps"] >= settings.target_accuracy:
                end = ended()
                run.params, run.step = end.params, end.step
                return {f"{name}_accuracy": value for name, value in found.items()}
        run.planned = max(run.planned, run.step + MEASURE_EVERY)
        run.advance(MEASURE_EVERY, lambda i: settings.learning_rate)
        if found[settings.style] < low / 2:
            found = run.measured(lambda: measure(run.params))
    raise UserError(
        f"warm-up: after {run.step} steps the style {settings.style} is right on "
        f"{found[settings.style]:.2f} of level {settings.style_level} and steps on "
        f"{found['steps']:.2f} of level {ledger.MAX_LEVEL}, wanted {low:g} to {high:g} and "
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
    """Weights of the plain model after the warm-up, fp32, trained now or read from `folder`.

    Args:
      styles: measured at the end; the last one's accuracy is that of the whole.
      accuracy_of: greedy accuracy of given weights at the largest budget: on evaluated questions
        (None), or on prompts that already hold the first token of a style.
    """
    spec = dataclasses.replace(policy.learner, conditioning=None, value=None)
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    random = lambda: qwen2.init(key, spec.model)
    paths = WarmupPaths(folder)
    with contextlib.ExitStack() as stack:
        if not processes.largest(paths.identity.exists()):
            stack.enter_context(alone(folder, poll))
        # Perhaps made by another run meanwhile.
        if processes.largest(paths.identity.exists()):
            return read_warmup(config, paths, policy.blank(random))
        params = plain_params(key, policy, config.model.path)
        saved = Checkpoints(paths.unfinished / warmup_fingerprint(config), keep=1)
        tx = supervised_optimizer()
        opt_state = policy.make(tx.init, params)
        run = WarmUp(config, batches, spec, tx, params, opt_state, on_progress, poll, saved)
        run.resume()
        try:
            if config.warmup.style is not None:
                measured = until_style(run, accuracy_of)
            else:
                whole = styles[-1] if styles else None
                measured = until_accurate(run, lambda params: accuracy_of(params, whole))
            for style in styles[:-1]:
                accuracy = run.measured(lambda: accuracy_of(run.params, style))  # noqa: B023
                measured[f"{style}_accuracy"] = accuracy
            if styles:
                measured[f"{styles[-1]}_accuracy"] = measured["accuracy"]
        except Preempted:
            run.save()
            raise
        finally:
            saved.close()
        keep_warmup(config, paths, run.step, run.params, measured)
    return run.params
