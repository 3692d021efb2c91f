"""Builds the state that a run starts from, and checks the inputs of a run.

The starting policy is a model folder, random weights, or the result of a warm-up. A method may add
its own supervised stage. `loop.Trainer` calls these functions, and `train --check` calls
`check_inputs`.
"""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
from bacr_jax.runs.restarts import give_up_reason
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.failures import TrainingFailed
from bacr_jax.training.rejection_sft import rejection_sft
from bacr_jax.training.run import Run, RunState, init_state, plain_rollout
from bacr_jax.training.trace_lessons import SftBatches
from bacr_jax.training.warmup import Batches, ledger_batches, styled_prompts, warm_up
from bacr_jax.types import Params, Poll, Prompts

# Questions on which the accuracy of a warm-up is measured.
_ACCURACY_QUESTIONS = 256


@contextlib.contextmanager
def compiling_in_background(
    work: Callable[[Callable[[], None]], None],
) -> Iterator[Callable[[], None]]:
    """Runs `work` in a thread while the code inside runs, and waits for the thread at the end.

    The thread starts when the code inside first calls the yielded function, because the programs of
    the code inside should be compiled first. An error of `work` is ignored: what `work` did not
    compile is compiled when it is needed, and raises its own error then.

    Args:
      work: function of a `poll` that it calls wherever it can be interrupted. `poll` raises
        `CancelledError` once the code inside has raised.
    """
    cancelled = threading.Event()

    def poll() -> None:
        if cancelled.is_set():
            raise CancelledError

    def work_without_errors() -> None:
        with contextlib.suppress(Exception):
            work(poll)

    thread = threading.Thread(target=work_without_errors, name="compiling ahead")

    def begin() -> None:
        if thread.ident is None:
            thread.start()

    try:
        yield begin
    except BaseException:
        cancelled.set()
        raise
    finally:
        if thread.ident is not None:
            # A process that ends while XLA compiles would crash.
            thread.join()


def can_compile_ahead(run: Run) -> bool:
    """True if the programs of the loop can be compiled during the warm-up.

    That needs one process and idle CPU cores, because a GPU is busy during the warm-up and its
    memory can't hold a second policy. With dynamic sampling the untrained policy would sample many
    rounds, and servers would use the untrained weights for the weights of step 0.
    """
    has_idle_cores = not processes.several() and jax.default_backend() == "cpu"
    samples_once = run.method.dynamic_sampling is None and run.config.rollout.engine == "own"
    return run.total_steps > 0 and has_idle_cores and samples_once


def compile_ahead(run: Run, poll: Callable[[], None]) -> None:
    """Runs an evaluation and an iteration with untrained weights, to compile their programs.

    Args:
      poll: raises to interrupt.
    """
    config = run.config
    key = jax.random.key(0)
    params = initial.initial_params(key, run.policy, None)
    environment = run.environment.exactly_graded()
    run = dataclasses.replace(run, environment=environment, frozen=adapters.split(params)[0])
    spec = run.policy.evaluation
    decoder = Decoder(
        run.policy.decode_params(params), spec, run.policy.phi_of(params), spec.max_thinking
    )
    questions = next(iter(environment.eval.values()))
    # Twice the slots, so that slots are also refilled. More questions have no other programs.
    few = np.arange(min(len(questions), 2 * spec.slots))
    largest_budget = max(config.eval.budgets)
    evaluate_set(
        decoder,
        environment,
        questions.part(few, questions.set.name),
        key,
        config=dataclasses.replace(config.eval, budgets=(largest_budget,), samples=0, dense=None),
        seed=config.seed,
        poll=poll,
    )
    poll()
    state = init_state(run, params, initial.random_head(key, run.policy))
    reference = None
    if config.loss.kl_coef > 0:
        # A second copy, because the update donates the parameters of the state.
        reference = initial.initial_params(key, run.policy, None)
    iterate(run, state, 0, reference=reference, poll=poll)


def check_restarts(config: Config, folder: RunFolder) -> None:
    """Stops a job that Slurm restarts again and again without saving anything between the starts.

    Raises:
      TrainingFailed: in all processes.
    """
    reason = ""
    if processes.is_first():
        warmup = Path(config.warmup.dir or folder.warmup)
        reason = give_up_reason(folder, warmup, os.environ)
    reason = processes.text_from_first(reason)
    if reason:
        raise TrainingFailed(reason)


def initial_state(
    run: Run, folder: RunFolder, progress: Progress, poll: Poll = None
) -> tuple[Run, RunState]:
    """Returns the run with its frozen base, and the state of the starting policy.

    The policy is the result of the warm-up, or else is read from the model folder, or is random.
    """
    policy_key, head_key = _keys(run)
    if run.config.warmup.steps:
        params = _warm_up(run, policy_key, folder, progress, poll)
    else:
        params = initial.initial_params(policy_key, run.policy, run.config.model.path)
    run = dataclasses.replace(run, frozen=adapters.split(params)[0])
    return run, init_state(run, params, initial.random_head(head_key, run.policy))


def untrained_state(run: Run) -> RunState:
    """Returns a state with the shapes and shardings of `initial_state`, to restore into."""
    policy_key, head_key = _keys(run)
    params = initial.untrained_params(policy_key, run.policy)
    return init_state(run, params, initial.random_head(head_key, run.policy))


def open_inputs(config: Config) -> tuple[Method, Environment]:
    """Reads method, tokenizer and questions, and checks the model folder, before device work."""
    method = load_method(config)
    tokenizer, vocab_size = tokenizer_of(config)
    shape = setup.model_shape(config, vocab_size)
    style = format_for(config, declares_budget=method.declares_budget)
    environment = build_environment(config, tokenizer, vocab_size, style=style)
    setup.check_model(config, shape, environment.longest_prompt)
    tokens_per_answer = environment.rules.suffix_length + config.rollout.answer_tokens
    answer_tokens = method.num_cuts * method.answers * tokens_per_answer
    setup.check_allowance(config, environment.train.longest, answer_tokens)
    environment.check_verifier()
    return method, environment


def open_inputs_together(config: Config) -> tuple[Method, Environment]:
    """Calls `open_inputs` in every process of a run.

    Raises:
      UserError: in all processes, if one of them raises or reads other inputs than process 0.
    """
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
    """Checks all inputs that a run reads before device work.

    Returns:
      Lines with the scores that verifiers give to reference answers.

    Raises:
      UserError: with all errors of method, model, verifier and sets, each of which is checked
        separately.
    """
    try:
        _, environment = open_inputs(config)
        warning = environment.markup_warning()
        if warning is not None:
            print(warning, file=sys.stderr)
        if config.warmup.steps and config.data.train != "ledger":
            SftBatches(derived.warmup_config(config), _warmup_environment(config, environment))
        lines = environment.try_verifiers()
        environment.close()
        return lines
    except UserError as error:
        checks: list[Callable[[], object]] = [
            functools.partial(load_method, config),
            functools.partial(tokenizer_of, config),
        ]
        if config.grader:
            checks.append(functools.partial(load_verifier, config.grader))
        sets: list[tuple[Split, Any]] = [("train", config.data.train)]
        sets += [("test", spec) for spec in config.data.eval]
        for split, spec in sets:
            checks.append(functools.partial(load_questions, spec, config.data, config.seed, split))
        # Without the lines that appear twice.
        raise UserError(*dict.fromkeys([*error.lines, *faults_of(*checks)])) from None


def tokenizer_of(config: Config) -> tuple[Any, int]:
    """Returns the tokenizer of a run, and the number of embedding rows that its model needs."""
    tokenizer = setup.run_tokenizer(config)
    return tokenizer, setup.vocabulary_rows(config, len(tokenizer))


def restore_files(
    folder: RunFolder, recorded: dict[str, Any], step: int, progress: Progress
) -> None:
    """Process 0 restores the files of a resumed run to their content at its checkpoint.

    Args:
      recorded: description of the files, from the checkpoint.

    Raises:
      UserError: in all processes, if a file can't be restored.
    """
    error_text = ""
    if processes.is_first():
        try:
            for line in history.restore_files(folder, recorded, step):
                progress.say(line)
            folder.truncate_after(step)
        except UserError as error:
            error_text = str(error)
    error_text = processes.text_from_first(error_text)
    if error_text:
        raise UserError(error_text)


def _keys(run: Run) -> list[jax.Array]:
    """Returns the keys of a random policy and of a random value head."""
    return [jax.random.fold_in(jax.random.key(run.config.seed), stream) for stream in (2, 3)]


def after_rejection_sft(
    run: Run, fresh: RunState, progress: Progress, poll: Poll = None
) -> RunState:
    """Runs the method's own supervised stage, and returns the state after it.

    Tokens that the stage samples count as generated. Without such a stage it returns the state
    unchanged.
    """
    settings = run.method.rejection_sft
    if settings is None:
        return fresh
    with progress.phase("cold start", settings.steps) as phase, phase_memory("cold start"):
        params, method_state, tokens = rejection_sft(
            run,
            fresh,
            shared_format_environment(run.config, run.environment),
            on_progress=lambda step, total, loss: phase.update(step, loss=loss),
            poll=poll,
        )
    state = init_state(run, params, fresh.train.head)
    return dataclasses.replace(state, method_state=method_state, generated_tokens=tokens)


def shared_format_environment(config: Config, current: Environment) -> Environment:
    """Returns the environment in the prompt format that all methods share."""
    shared_format = format_for(config)
    if shared_format == current.style:
        return current
    return build_environment(config, current.tokenizer, current.vocab_size, style=shared_format)


def _warmup_environment(config: Config, current: Environment) -> Environment:
    """Returns the environment of a run's warm-up: its seed's questions in the shared format."""
    warmup_config = derived.warmup_config(config)
    if warmup_config.seed == config.seed:
        return shared_format_environment(config, current)
    return build_environment(
        warmup_config, current.tokenizer, current.vocab_size, style=format_for(warmup_config)
    )


@dataclasses.dataclass(frozen=True)
class _WarmupData:
    """Data of a warm-up.

    Attributes:
      batches: supervised batch of each step.
      styles: styles that are measured at the end.
      prompts_of: prompts that contain the first token of a style, and their reference answers.
    """

    batches: Batches
    styles: Sequence[str]
    prompts_of: Callable[[Any], tuple[Prompts, list[str]]]


def _warmup_data(config: Config, environment: Environment) -> _WarmupData:
    """Returns the warm-up's data from the ledger, or from the traces of the training set."""
    largest_budget = config.budget.max
    if config.data.train != "ledger":
        traces = SftBatches(config, environment)
        return _WarmupData(
            traces.batch, traces.styles, lambda style: traces.opened(style, largest_budget)
        )

    def prompts_of(style: ledger.Style) -> tuple[Prompts, list[str]]:
        # The long style is measured on the hardest questions, which only it can solve.
        level = ledger.MAX_LEVEL if style == "steps" else config.warmup.style_level
        return styled_prompts(environment.train, style, level, largest_budget)

    return _WarmupData(ledger_batches(config), (), prompts_of)


def _warm_up(run: Run, key: jax.Array, folder: RunFolder, progress: Progress, poll: Poll) -> Params:
    """Returns the weights after the supervised warm-up, with an untrained budget module.

    Programs of the loop are compiled in the background of the warm-up, if cores are idle.
    """
    config = derived.warmup_config(run.config)
    warmup_run = dataclasses.replace(run, config=config)
    warmup_folder = Path(config.warmup.dir) if config.warmup.dir else folder.warmup
    # Graded exactly, because several runs with different graders may share a warm-up.
    environment = _warmup_environment(run.config, run.environment).exactly_graded()
    compiles_ahead = can_compile_ahead(run) and not WarmupPaths(warmup_folder).identity.exists()
    data = _warmup_data(config, environment)

    def accuracy_of(params: Params, style: str | None = None) -> float:
        if style is None:
            return _accuracy(warmup_run, environment, params, key, poll)
        prompts, references = data.prompts_of(style)
        return _style_accuracy(
            warmup_run, environment, params, key, style, prompts, references, progress, poll
        )

    with (
        progress.phase("warm-up", config.warmup.steps, "compiling its first step") as phase,
        phase_memory("warm-up", batch_tokens=config.warmup.batch_tokens),
        compiling_in_background(lambda poll_work: compile_ahead(run, poll_work)) as begin,
    ):

        def poll_and_begin() -> None:
            # Called after the first step, so its program is already compiled.
            if compiles_ahead:
                begin()
            if poll is not None:
                poll()

        params = warm_up(
            config,
            run.policy,
            warmup_folder,
            batches=data.batches,
            styles=data.styles,
            accuracy_of=accuracy_of,
            on_progress=lambda step, total, loss: phase.update(step, total=total, loss=loss),
            poll=poll_and_begin,
        )
    params = initial.with_budget_module(key, run.policy, params)
    return initial.with_adapters(key, run.policy, params)


def _style_accuracy(
    run: Run,
    environment: Environment,
    params: Params,
    key: jax.Array,
    style: str,
    prompts: Prompts,
    references: list[str],
    progress: Progress,
    poll: Poll,
) -> float:
    """Returns the greedy accuracy on prompts that contain the first token of a style.

    It shows its progress, because it takes minutes with a large model.
    """
    with progress.phase(f"warm-up, {style}", len(references)) as phase:
        num_done = 0

        def on_rows(rows: np.ndarray, *_: Any) -> None:
            nonlocal num_done
            num_done += len(rows)
            phase.update(num_done)

        listeners = Listeners(poll, on_rows)
        rollout = plain_rollout(run, environment, params, prompts, key, listeners, temperature=0.0)
        return float(environment.verify(rollout.branches, references, poll).mean())


def _accuracy(
    run: Run, environment: Environment, params: Params, key: jax.Array, poll: Poll
) -> float:
    """Returns greedy accuracy at the largest evaluated budget, without a budget module."""
    config = run.config
    largest_budget = max(config.eval.budgets)
    spec = dataclasses.replace(run.policy.evaluation, conditioning=None)
    decode_params = run.policy.decode_params(params, plain=True)
    results = evaluate_set(
        Decoder(decode_params, spec, None, spec.max_thinking),
        environment,
        next(iter(environment.eval.values())),
        key,
        config=dataclasses.replace(
            config.eval, budgets=(largest_budget,), samples=0, size=_ACCURACY_QUESTIONS
        ),
        seed=config.seed,
        poll=poll,
    )
    return float(results["by_budget"]["greedy"][str(largest_budget)]["accuracy"])
