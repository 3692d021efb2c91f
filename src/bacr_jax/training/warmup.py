"""The supervised warm-up, which trains random or pretrained weights until the task is learned.

The finished weights are stored in a folder together with a fingerprint of their settings
(`warmup_folder`). Several methods can therefore start from the same policy. The folder also
contains checkpoints of an unfinished warm-up, from which it can be resumed.

The learning rate rises, stays constant, and decays over the last 35 % of the steps. The policy
learns no new skills during the decay, and the right time to start the decay differs between seeds
(docs/quickstart.md). The rate therefore stays constant until the greedy accuracy at the largest
budget reaches `warmup.hold_accuracy`. The accuracy is measured every 100 steps, at most
`warmup.max_hold` times.

The accuracy is measured again after the decay. If it is below `warmup.target_accuracy`, the rate
returns to its maximum for 100 steps and decays again. The same happens if the policy writes less
than `warmup.short_accuracy` of the short traces correctly on some difficulty level. (A trace style
is a way of writing down the reasoning. Short traces contain no repeated lines.) Reinforcement
learning must later discover the short style, so the additional 100 steps contain more of it
(`ledger.PRACTICE`). Each repetition counts towards `warmup.max_hold`. An accuracy whose target is 0
is measured only at the end, and only if the training set has traces in several styles.

With `warmup.style`, the warm-up instead ends when the accuracy of that trace style on one
difficulty level lies within the range `warmup.style_accuracy`. This accuracy determines how much
the accuracies of the styles differ. `warmup.target_accuracy` is then the target of the long style
*steps* on the highest level, and the rate decays over 40 steps.
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

from bacr_jax.config.settings import WarmupSettings
from bacr_jax.errors import UserError
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.supervised import rows_right, supervised_optimizer, supervised_step
from bacr_jax.model import qwen2
from bacr_jax.parallel import processes
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.prompts.encoding import with_ids
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.questions import ledger
from bacr_jax.runs.checkpoint import Checkpoints, restore_target
from bacr_jax.runs.folder import WarmupPaths
from bacr_jax.runs.initial import plain_params
from bacr_jax.runs.setup import Policy
from bacr_jax.training.warmup_folder import (
    base_record,
    check_base,
    check_texts,
    locked,
    read_warmup,
    save_warmup,
    texts_record,
)
from bacr_jax.types import Params, Poll, Prompts

# Maps a step, counted from 0, and the flag `practice` (True for more traces in the short style) to
# the tokens and the loss mask of that step.
Batches = Callable[[int, bool], tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]]
# Called with the current step, the total number of steps, and the loss.
OnProgress = Callable[[int, int, float], None]

# Learning rate schedule, tuned by hand: 50 steps of linear warm-up, then constant, then linear
# decay to 3 % over the last 35 % of the steps.
RISE = 50
FALL_SHARE = 0.35
FINAL_FRACTION = 0.03
# Number of steps at the constant rate between two measurements.
HOLD_STEPS = 100
# With `warmup.style`, the accuracy is measured every 25 steps, starting with the last phase of the
# warm-up's curriculum. It is measured on a copy that is trained for 40 more steps with a decaying
# learning rate.
MEASURE_EVERY = 25
STYLE_FALL = 40
# Maximum number of problems on which the accuracy of a trace style is measured. The standard error
# is 3 percentage points.
STYLE_PROBLEMS = 256
# Number of problems per difficulty level on which the short style is measured. The standard error
# is 3 percentage points at an accuracy of 0.9.
SHORT_PROBLEMS = 128
# Number of steps between checkpoints. A crash loses about ten seconds of work on a CPU.
SAVE_EVERY = 100
# Number of steps between two progress reports.
SHOW_EVERY = 20
# Progress is also reported after a step if the last report is older than this number of seconds.
SHOW_SECONDS = 15.0


@dataclasses.dataclass
class WarmUp:
    """State of a running warm-up, or of the supervised stage of a method.

    A resumed warm-up repeats its schedule from the beginning, but skips the steps that were already
    done and reads earlier accuracy measurements from its journal.

    Attributes:
      batches: function that returns the tokens and the loss mask of a step.
      tx: optimizer.
      opt_state: state of the optimizer.
      saved: checkpoints of the unfinished warm-up. None if the warm-up is never saved.
      texts_digest: `SftBatches.texts_digest`, which is saved in the checkpoints. None for batches
        of the ledger task.
      frozen: weights that are not trained.
      planned: number of steps currently planned. The schedule may be extended.
      step: number of steps of the schedule that are done.
      done: number of steps that were done before the warm-up was resumed.
      journal: results of all measurements, in order.
      measurements: number of measurements so far, including those read from the journal.
      pending_loss: loss of the step that the device is computing.
      last_shown: time of the last progress report (`time.monotonic`).
    """

    settings: WarmupSettings
    batches: Batches
    spec: LearnerSpec
    tx: Any
    params: Params
    opt_state: Any
    on_progress: OnProgress | None
    poll: Poll
    saved: Checkpoints | None
    texts_digest: str | None = None
    frozen: Params | None = None
    planned: int = 0
    step: int = 0
    done: int = 0
    journal: list[Any] = dataclasses.field(default_factory=list)
    measurements: int = 0
    pending_loss: jax.Array | None = None
    last_shown: float = dataclasses.field(default_factory=time.monotonic)

    def resume(self) -> None:
        """Restores parameters, optimizer state and journal from the newest checkpoint, if any."""
        assert self.saved is not None
        if self.saved.latest is None:
            return
        like = restore_target({"params": self.params, "opt_state": self.opt_state})
        # Free the initial state, because memory may not suffice for two states.
        self.params = {}
        self.opt_state = None
        self.done, state, meta = self.saved.restore(like)
        self.params = state["params"]
        self.opt_state = state["opt_state"]
        self.journal = meta["journal"]

    def save(self) -> None:
        """Saves parameters, optimizer state and journal, unless this step is already saved."""
        if self.saved is not None and self.step > max(self.saved.latest or 0, self.done):
            state = {"params": self.params, "opt_state": self.opt_state}
            inputs = {
                **texts_record(self.texts_digest),
                **base_record(self.settings, self.spec.model),
            }
            meta = {"journal": self.journal, **inputs}
            self.saved.save(self.step, state, meta)
            self.saved.release_large_state()

    def copy(self) -> "WarmUp":
        """Returns an independent copy that is never saved and reports no progress."""
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
        """Measures an accuracy, or reads it from the journal if it was measured before a resume."""
        self.measurements += 1
        if self.measurements > len(self.journal):
            self.journal.append(measure())
        return self.journal[self.measurements - 1]

    def advance(self, steps: int, rate: Callable[[int], float], *, practice: bool = False) -> None:
        """Trains for a number of steps.

        Args:
          rate: maps the index of each of these steps, counted from 0, to its learning rate.
          practice: True for batches that contain more of the short style.
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
            # Prepare the next batch while the device computes the current step. A longer queue of
            # steps would need the memory of all of them, and delay the response to a signal.
            jax.block_until_ready(self.pending_loss)
            self.pending_loss = loss
            self._report(loss)
            if self.step % SAVE_EVERY == 0:
                self.save()
            if self.poll is not None:
                self.poll()

    def _report(self, loss: Any) -> None:
        """Reports progress every 20 steps, at the planned end, and more often if steps are slow.

        Args:
          loss: scalar loss of the last step. Reporting waits until the device has computed it.
        """
        is_regular = self.step % SHOW_EVERY == 0 or self.step == self.planned
        is_late = time.monotonic() - self.last_shown > SHOW_SECONDS
        if (is_regular or is_late) and self.on_progress is not None:
            self.on_progress(self.step, self.planned, float(loss))
            self.last_shown = time.monotonic()


def prompt_budgets(settings: WarmupSettings) -> Int[np.ndarray, "n"] | None:
    """Returns the budgets to write into prompts, or None if prompts contain no budget."""
    return None if settings.prompt_budgets is None else np.array(settings.prompt_budgets)


def ledger_batches(warmup: WarmupSettings) -> Batches:
    """Returns a function that generates the batches of the synthetic ledger task."""
    settings = warmup.warmup
    task = warmup.data.ledger
    budgets = prompt_budgets(warmup)

    def batch(step: int, practice: bool) -> tuple[np.ndarray, np.ndarray]:
        return ledger.warmup_batch(
            warmup.seed,
            step,
            settings.steps,
            variant=task.variant,
            batch_tokens=settings.batch_tokens,
            max_operand=task.max_operand,
            prompt_budgets=budgets,
            practice=practice,
        )

    return batch


def styled_prompts(
    questions: PromptedQuestions, style: ledger.Style, level: int, budget: int
) -> tuple[Prompts, list[str]]:
    """Returns ledger prompts that end with the first token of a trace, and their answers.

    The first token makes the policy continue in the given trace style. At most `STYLE_PROBLEMS`
    problems of the given difficulty level are used (see `opened_prompts`).

    Returns:
      The prompts, and the reference answers of their problems.
    """
    index = np.flatnonzero(questions.set.levels == level)[:STYLE_PROBLEMS]
    # A trace in the style *steps* starts with the label of a line. Traces in other styles start
    # with the start digit, which follows <bos> in the prompt.
    start_digits = np.asarray(questions.prompts.take(index).tokens)[:, 1]
    first = np.full_like(start_digits, ledger.ID["a"]) if style == "steps" else start_digits
    return opened_prompts(questions, index, first, budget)


def opened_prompts(
    questions: PromptedQuestions,
    index: Int[np.ndarray, "n"],
    first: Int[np.ndarray, "n"],
    budget: int,
) -> tuple[Prompts, list[str]]:
    """Returns prompts that end with the first token of a trace, and their reference answers.

    Args:
      questions: set of questions.
      index: indices of the questions to use.
      first: id of the first token of each trace.
      budget: budget to write into the prompts, if the prompt format contains budgets.
    """
    prompts = questions.at(index, np.full_like(index, budget))
    return with_ids(prompts, first[:, None]), [questions.set.answers[i] for i in index]


def short_accuracy(run: WarmUp) -> float:
    """Returns the share of short traces that the policy reproduces on its weakest level.

    A short trace solves a ledger problem without repeated lines. The share is measured on each
    difficulty level, and the lowest share is returned. Each token is predicted from the correct
    tokens before it. The labels of lines are not counted, because a label may also be the start of
    a repeated line.
    """
    settings = run.settings
    budget = None if settings.prompt_budgets is None else settings.largest_budget
    tokens, judged, levels = ledger.short_traces(
        SHORT_PROBLEMS, max_operand=settings.data.ledger.max_operand, prompt_budget=budget
    )
    right = np.asarray(rows_right(run.params, tokens, judged, spec=run.spec))
    return min(float(right[levels == level].mean()) for level in np.unique(levels))


def _rising(learning_rate: float) -> Callable[[int], float]:
    """Returns a schedule that rises linearly over `RISE` steps and then stays constant."""
    return lambda i: learning_rate * min((i + 1) / RISE, 1.0)


def until_accurate(
    run: WarmUp, accuracy_of: Callable[[Params], float], *, is_reported: bool = False
) -> dict[str, float]:
    """Trains until the greedy accuracy and `short_accuracy` reach the targets of the config.

    An accuracy whose target is 0 is not measured, because this takes minutes with a large model on
    a CPU, and the evaluation before reinforcement learning measures it too.

    Args:
      run: the warm-up to continue.
      accuracy_of: maps parameters to their greedy accuracy at the largest budget.
      is_reported: measure the greedy accuracy even if its target is 0.

    Returns:
      The final accuracies, by name.

    Raises:
      UserError: a target is not reached after `warmup.max_hold` extensions.
    """
    settings = run.settings.warmup
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
    max_first_holds = settings.max_hold if settings.hold_accuracy > 0 else 0
    while holds < max_first_holds and measure() < settings.hold_accuracy:
        holds += 1
        run.planned += HOLD_STEPS
        run.advance(HOLD_STEPS, constant)
    run.advance(fall_steps, falling)
    data = run.settings.data
    # Only the variant of the ledger with redundant lines has a short style, which omits these
    # lines.
    has_short_style = data.train == "ledger" and data.ledger.variant == "redundant"
    short_target = settings.short_accuracy if has_short_style else 0.0
    is_measured = is_reported or settings.target_accuracy > 0
    while True:
        accuracies = {"accuracy": measure()} if is_measured else {}
        is_accurate = accuracies.get("accuracy", 1.0) >= settings.target_accuracy
        if is_accurate and short_target:
            accuracies["short_accuracy"] = run.measured(lambda: short_accuracy(run))
        if is_accurate and accuracies.get("short_accuracy", 1.0) >= short_target:
            return accuracies
        if holds == settings.max_hold:
            raise UserError(_not_reached(run, accuracies))
        # Either the decay started too early, or the policy still depends on the redundant lines.
        # Train longer, then decay again.
        holds += 1
        run.planned += HOLD_STEPS + fall_steps
        run.advance(HOLD_STEPS, constant, practice=is_accurate)
        run.advance(fall_steps, falling)


def _not_reached(run: WarmUp, accuracies: dict[str, float]) -> str:
    """Returns the error message for a warm-up that does not reach a target."""
    settings = run.settings.warmup
    if "short_accuracy" in accuracies:
        share = accuracies["short_accuracy"]
        result = f"the share of correct short traces at the weakest level is {share:.2f}"
        target = f"warmup.short_accuracy={settings.short_accuracy}"
    else:
        result = f"the greedy accuracy at the largest budget is {accuracies['accuracy']:.2f}"
        target = f"warmup.target_accuracy={settings.target_accuracy}"
    return (
        f"warm-up: after {run.step} steps, {result}, which is below {target}; set a larger "
        "warmup.steps or another seed"
    )


def until_style(
    run: WarmUp, style_accuracy_of: Callable[[Params, ledger.Style], float]
) -> dict[str, float]:
    """Trains until the accuracy of `warmup.style` lies within the range `warmup.style_accuracy`.

    A style is a way of writing down the reasoning of a ledger problem, such as the long style
    *steps*.

    Args:
      run: the warm-up to continue.
      style_accuracy_of: maps parameters and a style to the greedy accuracy on prompts that end with
        the first token of that style.

    Returns:
      The final accuracies of both styles, by name.

    Raises:
      UserError: the accuracy never lies within the range while the style *steps* also reaches
        `warmup.target_accuracy`.
    """
    settings = run.settings.warmup
    assert settings.style is not None
    low, high = settings.style_accuracy
    styles: tuple[ledger.Style, ...] = ("steps", settings.style)
    last_phase_start = ledger.WARMUP[run.settings.data.ledger.variant][-2].until
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
        """Returns a copy of the warm-up that is trained further with a decaying learning rate."""
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
        f"warm-up: after {run.step} steps, the accuracy of the style {settings.style} at level "
        f"{settings.style_level} is {accuracies[settings.style]:.2f} (target: {low:g} to "
        f"{high:g}), and the accuracy of the style steps at level {ledger.MAX_LEVEL} is "
        f"{accuracies['steps']:.2f} (target: {settings.target_accuracy:g} or more); set another "
        "seed, warmup.steps or warmup.style_accuracy"
    )


def warm_up(
    settings: WarmupSettings,
    fingerprint: str,
    policy: Policy,
    folder: Path,
    *,
    batches: Batches,
    styles: Sequence[str],
    accuracy_of: Callable[[Params, Any], float],
    on_progress: OnProgress,
    poll: Poll,
    texts_digest: str | None = None,
) -> Params:
    """Trains the warm-up, or reads a finished one from `folder`, and returns its fp32 weights.

    Args:
      settings: settings of the warm-up.
      fingerprint: `warmup_fingerprint` of the run's config.
      policy: settings of the policy. Its budget module and value head are not part of the warm-up.
      folder: folder of the warm-up, which several runs may share.
      styles: trace styles (ways of writing down the reasoning) whose accuracy is measured at the
        end. The accuracy of the last style is the accuracy of the warm-up.
      accuracy_of: maps parameters and a style to the greedy accuracy at the largest budget, on
        prompts that end with the first token of that style. If the style is None, the evaluation
        questions are used.
      texts_digest: `SftBatches.texts_digest`, or None for batches of the ledger task.
    """
    # Supervised training maximizes the likelihood itself, at any rollout.temperature.
    spec = dataclasses.replace(policy.learner, conditioning=None, value=None, temperature=1.0)
    key = jax.random.fold_in(jax.random.key(settings.seed), 0)
    model = base_record(settings, spec.model)
    paths = WarmupPaths(folder)
    with contextlib.ExitStack() as stack:
        if not processes.largest(paths.identity.exists()):
            stack.enter_context(locked(folder, poll))
        # Another run may have finished the warm-up while this run was waiting for the lock.
        if processes.largest(paths.identity.exists()):
            blank = policy.abstract(lambda: qwen2.init(key, spec.model))
            return read_warmup(settings.warmup, fingerprint, paths, blank, texts_digest, model)
        saved = Checkpoints(paths.unfinished / fingerprint, keep=1)
        if saved.latest is not None:
            meta = saved.meta(saved.latest)
            check_texts(settings.warmup, meta, texts_digest, paths)
            check_base(settings.warmup, meta, model, paths)
        params = plain_params(key, policy, settings.model_path)
        optimizer = supervised_optimizer()
        run = WarmUp(
            settings=settings,
            batches=batches,
            spec=spec,
            tx=optimizer,
            params=params,
            opt_state=policy.make(optimizer.init, params),
            on_progress=on_progress,
            poll=poll,
            saved=saved,
            texts_digest=texts_digest,
        )
        # Drop this reference, because `run` owns the parameters: a resume replaces them, and a step
        # donates their buffers.
        del params
        run.resume()
        try:
            accuracies = _train(run, styles, accuracy_of)
        except Preempted:
            run.save()
            raise
        finally:
            saved.close()
        save_warmup(fingerprint, paths, run.step, run.params, accuracies, texts_digest, model)
    return run.params


def _train(
    run: WarmUp, styles: Sequence[str], accuracy_of: Callable[[Params, Any], float]
) -> dict[str, float]:
    """Runs the schedule of the config and returns the final accuracies by name.

    Args:
      styles, accuracy_of: as in `warm_up`.
    """
    if run.settings.warmup.style is not None:
        accuracies = until_style(run, accuracy_of)
    else:
        last_style = styles[-1] if styles else None
        accuracies = until_accurate(
            run, lambda params: accuracy_of(params, last_style), is_reported=len(styles) > 1
        )
    for style in styles[:-1]:
        measure = functools.partial(accuracy_of, run.params, style)
        accuracies[f"{style}_accuracy"] = run.measured(measure)
    if styles and "accuracy" in accuracies:
        accuracies[f"{styles[-1]}_accuracy"] = accuracies["accuracy"]
    return accuracies
