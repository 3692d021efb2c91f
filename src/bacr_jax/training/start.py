"""The state a run starts from: weights of a folder or of a warm-up, and a method's own stage."""

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bacr_grading import load_verifier
from bacr_jax.config import Config, derived
from bacr_jax.errors import UserError, faults_of
from bacr_jax.evaluation.decoder import Decoder, evaluate_set
from bacr_jax.methods import Method, load_method
from bacr_jax.model import adapters
from bacr_jax.oom import phase_memory
from bacr_jax.parallel import processes
from bacr_jax.prompts.environment import Environment, build_environment
from bacr_jax.prompts.formats import format_for
from bacr_jax.questions import ledger
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.source import Split
from bacr_jax.rollout import Listeners
from bacr_jax.runs import history, initial, setup
from bacr_jax.runs.agreement import refuse_others, told_of_inputs
from bacr_jax.runs.folder import RunFolder, WarmupPaths
from bacr_jax.runs.progress import Progress
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.rejection_sft import rejection_sft
from bacr_jax.training.run import Run, RunState, init_state, plain_rollout
from bacr_jax.training.trace_lessons import TraceLessons
from bacr_jax.training.warmup import ledger_batches, styled_prompts, warm_up
from bacr_jax.types import Params, Poll


@contextlib.contextmanager
def compiled_ahead(work: Callable[[Callable[[], None]], None]) -> Iterator[Callable[[], None]]:
    """Does `work` in a thread beside what is inside, and waits for it at the end.

    What is yielded begins it, at its first call: what is inside has its own programs to compile
    first, and would wait for those.

    A failure of `work` is none of the run's: what it could not do is done when it is needed, and
    fails there with its own words.

    Args:
      work: is given a function to call wherever it can be left, which raises to leave it: what is
        inside has failed, or was asked to stop.
    """
    leaving = threading.Event()

    def poll() -> None:
        if leaving.is_set():
            raise CancelledError

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work(poll)

    thread = threading.Thread(target=quietly, name="compiling ahead")

    def begin() -> None:
        if thread.ident is None:
            thread.start()

    try:
        yield begin
    except BaseException:
        leaving.set()
        raise
    finally:
        if thread.ident is not None:
            # A process that ends while XLA compiles would crash.
            thread.join()


def can_go_ahead(run: Run) -> bool:
    """Whether the first iteration is known, is one process's alone, and finds idle cores.

    With dynamic sampling untrained weights would be asked again and again, and servers would take
    them for those of step 0. A GPU is not idle while the warm-up trains, and its memory is not
    there twice.
    """
    alone = not processes.several() and jax.default_backend() == "cpu"
    once = run.method.dynamic_sampling is None and run.config.rollout.engine == "own"
    return run.total_steps > 0 and alone and once


def go_ahead(run: Run, poll: Callable[[], None]) -> None:
    """An iteration and an evaluation with untrained weights, for the sake of their programs."""
    key, config = jax.random.key(0), run.config
    params = initial.initial_params(key, run.policy, None)
    environment = run.environment.exactly_graded()
    run = dataclasses.replace(run, environment=environment, frozen=adapters.split(params)[0])
    largest = max(config.eval.budgets)
    spec, phi_of = run.policy.evaluation, run.policy.phi_of(params)
    decoder = Decoder(run.policy.decode_params(params), spec, phi_of, spec.max_thinking)
    asked = next(iter(environment.eval.values()))
    # All slots, and all of them filled again: more questions have no other programs.
    few = np.arange(min(len(asked), 2 * spec.slots))
    evaluate_set(
        decoder,
        environment,
        asked.part(few, asked.set.name),
        key,
        config=dataclasses.replace(config.eval, budgets=(largest,), samples=0, dense=None),
        seed=config.seed,
        poll=poll,
    )
    poll()
    state = init_state(run, params, initial.random_head(key, run.policy))
    # Another copy: an update takes the weights it is given.
    reference = initial.initial_params(key, run.policy, None) if config.loss.kl_coef > 0 else None
    iterate(run, state, 0, reference=reference, poll=poll)


def initial_state(
    run: Run, folder: RunFolder, progress: Progress, poll: Poll = None
) -> tuple[Run, RunState]:
    """The run with its frozen base, if it has one, and a fresh state around the starting policy.

    The policy is that of a folder, random, or warmed up.
    """
    keys = _keys(run)
    if run.config.warmup.steps:
        params = _warmed_up(run, keys[0], folder, progress, poll)
    else:
        params = initial.initial_params(keys[0], run.policy, run.config.model.path)
    run = dataclasses.replace(run, frozen=adapters.split(params)[0])
    return run, init_state(run, params, initial.random_head(keys[1], run.policy))


def untrained_state(run: Run) -> RunState:
    """A state of the same shape and place as `initial_state`'s, to restore a checkpoint into."""
    keys = _keys(run)
    params = initial.untrained_params(keys[0], run.policy)
    return init_state(run, params, initial.random_head(keys[1], run.policy))


def open_inputs(config: Config) -> tuple[Method, Environment]:
    """What a run reads before it uses a device; its model's folder is looked at."""
    method = load_method(config)
    tokenizer, vocab_size = tokenizer_of(config)
    shape = setup.model_shape(config, vocab_size)
    style = format_for(config, declares_budget=method.declares_budget)
    environment = build_environment(config, tokenizer, vocab_size, style=style)
    setup.check_model(config, shape, environment.longest_prompt)
    answer = environment.rules.suffix_length + config.rollout.answer_tokens
    answers = method.num_cuts * method.answers * answer
    setup.check_allowance(config, environment.train.longest, answers)
    environment.check_verifier()
    return method, environment


def open_inputs_together(config: Config) -> tuple[Method, Environment]:
    """`open_inputs` in every process of a run; UserError in all: of one, or they read others."""
    if not processes.several():
        return open_inputs(config)
    try:
        method, environment = open_inputs(config)
    except UserError as error:
        refuse_others({}, error)
        raise
    refuse_others(told_of_inputs(config, environment))
    return method, environment


def check_inputs(config: Config) -> list[str]:
    """Reads what a run would before it uses a device, and refuses what it would refuse.

    Returns:
      Lines with the scores that verifiers give to reference answers.

    UserError: with what is wrong with method, model, verifier and sets, each looked at by itself.
    """
    try:
        _, environment = open_inputs(config)
        if (warning := environment.markup_warning()) is not None:
            print(warning, file=sys.stderr)
        if config.warmup.steps and config.data.train != "ledger":
            own = derived.warmup_config(config)
            TraceLessons(own, _warmup_environment(config, environment))
        lines = environment.try_verifiers()
        environment.close()
        return lines
    except UserError as error:
        data, seed = config.data, config.seed
        sets: list[tuple[Split, Any]] = [("train", data.train)]
        sets += [("test", spec) for spec in data.eval]
        grader = [functools.partial(load_verifier, config.grader)] if config.grader else []
        by_itself = faults_of(
            functools.partial(load_method, config),
            functools.partial(tokenizer_of, config),
            *grader,
            *(functools.partial(load_questions, s, data, seed, split) for split, s in sets),
        )
        raise UserError(*dict.fromkeys([*error.lines, *by_itself])) from None


def tokenizer_of(config: Config) -> tuple[Any, int]:
    """The tokenizer of a run and the number of embedding rows its model needs."""
    tokenizer = setup.run_tokenizer(config)
    return tokenizer, setup.vocabulary_rows(config, len(tokenizer))


def restore_files(
    folder: RunFolder, written: dict[str, Any], step: int, progress: Progress
) -> None:
    """Brings the files of a resumed run to where they were at its checkpoint, in one process."""
    refused = ""
    if processes.is_first():
        try:
            for line in history.restore_files(folder, written, step):
                progress.say(line)
            folder.truncate_after(step)
        except UserError as error:
            refused = str(error)
    refused = processes.text_from_first(refused)
    if refused:
        raise UserError(refused)


def _keys(run: Run) -> list[jax.Array]:
    """Of what is random in a policy and in a value head."""
    return [jax.random.fold_in(jax.random.key(run.config.seed), i) for i in (2, 3)]


def after_rejection_sft(
    run: Run, fresh: RunState, progress: Progress, poll: Poll = None
) -> RunState:
    """The state after the method's own supervised stage, if it has one; its tokens are counted."""
    start = run.method.rejection_sft
    if start is None:
        return fresh
    with progress.phase("cold start", start.steps) as phase, phase_memory("cold start"):
        params, method_state, tokens = rejection_sft(
            run,
            fresh,
            shared_format_environment(run.config, run.environment),
            on_progress=lambda step, total, loss: phase.update(step, loss=loss),
            poll=poll,
        )
    state = init_state(run, params, fresh.train.head)
    return dataclasses.replace(state, method_state=method_state, generated_tokens=tokens)


def shared_format_environment(config: Config, here: Environment) -> Environment:
    """The environment in the format that all methods share."""
    shared = format_for(config)
    if shared == here.style:
        return here
    return build_environment(config, here.tokenizer, here.vocab_size, style=shared)


def _warmup_environment(config: Config, here: Environment) -> Environment:
    """Returns the environment of a run's warm-up: its seed's questions in the shared format."""
    own = derived.warmup_config(config)
    if own.seed == config.seed:
        return shared_format_environment(config, here)
    return build_environment(own, here.tokenizer, here.vocab_size, style=format_for(own))


def _warmed_up(
    run: Run, key: jax.Array, folder: RunFolder, progress: Progress, poll: Poll
) -> Params:
    """Weights after the supervised warm-up, with a fresh budget module."""
    config = derived.warmup_config(run.config)
    measured_run = dataclasses.replace(run, config=config)
    place = Path(config.warmup.dir) if config.warmup.dir else folder.warmup
    # Several runs may share a warm-up, whatever they are graded by.
    environment = _warmup_environment(run.config, run.environment).exactly_graded()
    goes_ahead = can_go_ahead(run) and not WarmupPaths(place).identity.exists()

    def poll_and_begin() -> None:
        # The first step is done.
        if goes_ahead:
            begin()
        if poll is not None:
            poll()

    largest = config.budget.max
    batches, styles = ledger_batches(config), tuple[str, ...]()
    opened = lambda style: styled_prompts(
        # The long style must be right where it matters most.
        environment.train,
        style,
        ledger.MAX_LEVEL if style == "steps" else config.warmup.style_level,
        largest,
    )
    if config.data.train != "ledger":
        lessons = TraceLessons(config, environment)
        batches, styles = lessons.batch, lessons.styles
        opened = lambda style: lessons.opened(style, largest)

    def accuracy_of(params: Params, style: str | None = None) -> float:
        if style is None:
            return _accuracy(measured_run, environment, params, key, poll)
        prompts, references = opened(style)
        # Minutes, with a large model.
        with progress.phase(f"warm-up, {style}", len(references)) as phase:
            done: list[int] = []

            def on_rows(places: np.ndarray, *_: Any) -> None:
                done.extend(places)
                phase.update(len(done))

            listeners = Listeners(poll, on_rows)
            rollout = plain_rollout(
                measured_run, environment, params, prompts, key, listeners, temperature=0.0
            )
            return float(environment.verify(rollout.branches, references, poll).mean())

    with (
        progress.phase("warm-up", config.warmup.steps, "compiling its first step") as phase,
        phase_memory("warm-up", batch_tokens=config.warmup.batch_tokens),
        compiled_ahead(lambda left: go_ahead(run, left)) as begin,
    ):
        params = warm_up(
            config,
            run.policy,
            place,
            batches=batches,
            styles=styles,
            accuracy_of=accuracy_of,
            on_progress=lambda step, total, loss: phase.update(step, total=total, loss=loss),
            poll=poll_and_begin,
        )
    params = initial.with_budget_module(key, run.policy, params)
    return initial.with_adapters(key, run.policy, params)


def _accuracy(
    run: Run, environment: Environment, params: Params, key: jax.Array, poll: Poll
) -> float:
    """Greedy accuracy of the plain model at the largest evaluated budget."""
    config = run.config
    largest = max(config.eval.budgets)
    spec = dataclasses.replace(run.policy.evaluation, conditioning=None)
    plain = run.policy.decode_params(params, plain=True)
    found = evaluate_set(
        Decoder(plain, spec, None, spec.max_thinking),
        environment,
        next(iter(environment.eval.values())),
        key,
        config=dataclasses.replace(config.eval, budgets=(largest,), samples=0, size=256),
        seed=config.seed,
        poll=poll,
    )
    return float(found["by_budget"]["greedy"][str(largest)]["accuracy"])
