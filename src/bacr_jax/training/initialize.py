"""Builds the initial state of a run and checks its inputs before training.

The initial policy is read from a model folder, initialized randomly, or trained by a supervised
warm-up. A method can add another supervised stage. `loop.Trainer` calls these functions. `train
--check` only calls `check_inputs`.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bacr_grading import load_verifier
from bacr_jax.config import DataConfig, ModelConfig
from bacr_jax.config.derived import mixture
from bacr_jax.config.settings import Settings, TaskSettings, WarmupSettings, resolve
from bacr_jax.errors import UserError, faults_of
from bacr_jax.evaluation.decoder import Decoder, evaluate_set
from bacr_jax.methods import Method, load_method
from bacr_jax.model import adapters
from bacr_jax.out_of_memory import phase_memory
from bacr_jax.parallel import processes
from bacr_jax.prompts.formats import format_for
from bacr_jax.prompts.task_data import TaskData, build_task_data
from bacr_jax.questions import ledger
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.source import Split
from bacr_jax.rollout import Callbacks
from bacr_jax.runs import history, initial, setup
from bacr_jax.runs.agreement import input_facts, refuse_if_processes_differ
from bacr_jax.runs.folder import RunFolder, WarmupPaths, steps_in
from bacr_jax.runs.progress import Progress
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.rejection_sft import rejection_sft
from bacr_jax.training.run import Run, RunState, init_state, plain_rollout
from bacr_jax.training.sft_batches import SftBatches
from bacr_jax.training.warmup import Batches, ledger_batches, styled_prompts, warm_up
from bacr_jax.training.warmup_folder import warmup_fingerprint
from bacr_jax.types import Params, Poll, Prompts

# Maximum number of questions used to measure the accuracy of a warm-up.
_ACCURACY_QUESTIONS = 256
# Maximum number of parameters of a model whose programs are compiled during the warm-up. A second
# policy of this size with gradients and moments has 4 GB in float32.
_MOST_COMPILED_AHEAD = 200_000_000


@contextlib.contextmanager
def compiling_in_background(
    work: Callable[[Callable[[], None]], None],
) -> Iterator[Callable[[], None]]:
    """Runs `work` in a background thread while the body of the `with` statement runs.

    The context manager yields a function that starts the thread. The body calls this function after
    the programs that it needs itself are compiled. On exit, the context manager waits for the
    thread.

    Exceptions in `work` are ignored. A program that fails to compile in the background is compiled
    again when it is needed, and then raises its exception.

    Args:
      work: function that takes a callback `poll` and calls it wherever it can be interrupted.
        `poll` raises `CancelledError` after the body has raised an exception.
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
            # Wait for the thread, because a process that exits while XLA is compiling would crash.
            thread.join()


def can_compile_ahead(run: Run) -> bool:
    """True if the training programs can be compiled in the background during the warm-up.

    Background compilation needs a single process and idle CPU cores. It is limited to the CPU
    backend, because a GPU is busy during the warm-up and has no memory for a second policy. It is
    limited to small models, because the second policy with its optimizer state needs as much memory
    as the warm-up. It is disabled with dynamic sampling, because the untrained policy would sample
    many rounds, and with servers, because they would mistake the untrained weights for the weights
    of step 0.
    """
    if run.policy.learner.model.num_parameters > _MOST_COMPILED_AHEAD:
        return False
    has_idle_cores = not processes.several() and jax.default_backend() == "cpu"
    samples_once = run.method.dynamic_sampling is None and run.config.rollout.engine == "jax"
    return run.total_steps > 0 and has_idle_cores and samples_once


def compile_ahead(run: Run, poll: Callable[[], None]) -> None:
    """Runs an evaluation and an iteration with untrained weights to compile the programs.

    Args:
      poll: callback that raises an exception to interrupt the work.
    """
    config = run.config
    key = jax.random.key(0)
    params = initial.initial_params(key, run.policy, None)
    task_data = run.task_data.exactly_graded()
    run = dataclasses.replace(run, task_data=task_data, frozen=adapters.split(params)[0])
    spec = run.policy.evaluation
    decoder = Decoder(
        run.policy.decode_params(params), spec, run.policy.phi_of(params), spec.max_thinking
    )
    questions = next(iter(task_data.eval.values()))
    # Use twice as many questions as decoding slots, so that the program that refills a slot is
    # compiled too. More questions would not compile any other programs.
    few = np.arange(min(len(questions), 2 * spec.slots))
    largest_budget = max(config.eval.budgets)
    evaluate_set(
        decoder,
        task_data,
        questions.part(few, questions.set.name),
        key,
        config=dataclasses.replace(
            config.eval, budgets=(largest_budget,), samples=0, cut_every=None
        ),
        seed=config.seed,
        poll=poll,
    )
    poll()
    state = init_state(run, params, initial.random_head(key, run.policy))
    reference = None
    if config.loss.kl_coef > 0:
        # Initialize a second copy, because the update donates the parameters of the state.
        reference = initial.initial_params(key, run.policy, None)
    iterate(run, state, 0, reference=reference, poll=poll)


def initial_state(
    run: Run, folder: RunFolder, progress: Progress, poll: Poll = None
) -> tuple[Run, RunState]:
    """Builds the state of the initial policy.

    The policy is trained by a warm-up, read from the model folder, or initialized randomly.

    Returns:
      The run, which now contains the frozen base weights, and the initial state.
    """
    policy_key, head_key = _keys(run)
    if run.config.warmup.steps:
        params = _warm_up(run, policy_key, folder, progress, poll)
    else:
        params = initial.initial_params(policy_key, run.policy, run.config.model.path)
    run = dataclasses.replace(run, frozen=adapters.split(params)[0])
    return run, init_state(run, params, initial.random_head(head_key, run.policy))


def abstract_state(run: Run) -> RunState:
    """Returns the shapes and shardings of `initial_state`, into which a checkpoint is restored."""
    head = jax.eval_shape(lambda key: initial.random_head(key, run.policy), jax.random.key(0))
    return init_state(run, initial.abstract_params(run.policy), head, abstract=True)


def open_inputs(settings: Settings) -> tuple[Method, TaskData]:
    """Loads the method, the tokenizer and the questions, and checks the model folder.

    No device is used, so that errors in the config are reported early.
    """
    data = settings.task.data
    model = settings.policy.model
    method = load_method(settings.method)
    tokenizer, vocab_size = tokenizer_of(data, model)
    shape = setup.model_shape(model, vocab_size)
    style = format_for(data, declares_budget=method.declares_budget)
    task_data = build_task_data(settings.task, tokenizer, vocab_size, style=style)
    suffix_length = task_data.rules.suffix_length
    setup.check_model(settings.policy, shape, task_data.longest_prompt, suffix_length)
    tokens_per_answer = suffix_length + settings.limits.answer_tokens
    answer_tokens = method.num_cuts * method.answers * tokens_per_answer
    setup.check_allowance(
        settings.policy.train.micro_batch_tokens,
        settings.limits,
        task_data.train.longest,
        answer_tokens,
    )
    task_data.check_verifier()
    return method, task_data


def open_inputs_together(settings: Settings, values: Mapping[str, Any]) -> tuple[Method, TaskData]:
    """Calls `open_inputs` in every process of a run and checks that the inputs agree.

    Args:
      settings: settings of the run.
      values: values of the run's config, by dotted key.

    Raises:
      UserError: a process can't read its inputs, or reads different inputs than process 0. Raised
        in all processes.
    """
    if not processes.several():
        return open_inputs(settings)
    try:
        method, task_data = open_inputs(settings)
    except UserError as error:
        refuse_if_processes_differ({}, error)
        raise
    refuse_if_processes_differ(input_facts(values, task_data))
    return method, task_data


def check_inputs(
    settings: Settings, check_texts: Callable[[str], None] | None = None
) -> tuple[Method, TaskData, list[str]]:
    """Checks all inputs of a run before any work on a device.

    Args:
      check_texts: called with `SftBatches.texts_digest` if the warm-up trains on traces.

    Returns:
      The method, the task data with closed graders, and lines of text with the scores that each
      verifier assigns to reference answers.

    Raises:
      UserError: an input is invalid. The method, the model, the verifier and each data set are
        checked separately, so that the exception lists all errors.
    """
    try:
        method, task_data = open_inputs(settings)
        warning = task_data.markup_warning()
        if warning is not None:
            print(warning, file=sys.stderr)
        if settings.warmup.warmup.steps and settings.task.data.train != "ledger":
            batches = SftBatches(settings.warmup, _warmup_task_data(settings, task_data))
            if check_texts is not None:
                check_texts(batches.texts_digest)
        are_answers = settings.task.data.answers == "parsed"
        lines = task_data.try_verifiers(references_are_answers=are_answers)
        task_data.close()
        return method, task_data, lines
    except UserError as error:
        # Remove duplicate lines.
        raise UserError(*dict.fromkeys([*error.lines, *faults_of_inputs(settings)])) from None


def faults_of_inputs(settings: Settings, reported: frozenset[str] = frozenset()) -> list[str]:
    """Opens the method, the tokenizer, the verifier and each data set, and returns all errors.

    Args:
      settings: settings of the run.
      reported: `model.path` and names of data sets that the caller has already reported as missing.
        They are not opened, because each would cause a second error.
    """
    task = settings.task
    data = task.data
    checks: list[Callable[[], object]] = [functools.partial(load_method, settings.method)]
    if "model.path" not in reported:
        checks.append(functools.partial(tokenizer_of, data, settings.policy.model))
    if task.grader.verifier:
        checks.append(functools.partial(load_verifier, task.grader.verifier))
    sets: list[tuple[Split, Any]] = [("train", data.train)]
    sets += [("test", spec) for spec in data.eval]
    for split, spec in sets:
        if reported.isdisjoint(name for _, name in mixture(spec)):
            checks.append(functools.partial(load_questions, spec, data, task.seed, split))
    return faults_of(*checks)


def tokenizer_of(data: DataConfig, model: ModelConfig) -> tuple[Any, int]:
    """Returns the tokenizer of a run, and the number of embedding rows that its model needs."""
    tokenizer = setup.run_tokenizer(data, model)
    return tokenizer, setup.vocabulary_rows(model, len(tokenizer))


def restore_files(
    folder: RunFolder, recorded: dict[str, Any], step: int, progress: Progress
) -> None:
    """Restores the files of a resumed run to their content at the time of its checkpoint.

    Only process 0 accesses the files.

    Args:
      recorded: description of the files, from the metadata of the checkpoint.

    Raises:
      UserError: a file can't be restored. Raised in all processes.
    """

    def restore() -> None:
        for line in history.restore_files(folder, recorded, step):
            progress.print_line(line)
        folder.truncate_after(step)

    processes.on_first(restore)


def _keys(run: Run) -> list[jax.Array]:
    """Returns the PRNG keys for initializing the policy and the value head."""
    return [jax.random.fold_in(jax.random.key(run.config.seed), stream) for stream in (2, 3)]


def after_rejection_sft(
    run: Run, fresh: RunState, progress: Progress, poll: Poll = None
) -> RunState:
    """Runs the method's supervised stage (`rejection_sft`), and returns the resulting state.

    A run that is stopped in this stage repeats it, because its progress is not saved. Tokens
    sampled in this stage count as generated tokens. If the method has no such stage, the state is
    returned unchanged. Otherwise, the arrays of `fresh.train` can't be used afterwards.
    """
    settings = run.method.rejection_sft
    if settings is None:
        return fresh
    # Free the moments, which need twice the memory of the trained parameters. The supervised steps
    # have moments of their own, and `init_state` creates new ones afterwards.
    jax.tree.map(lambda moment: moment.delete(), fresh.train.policy_opt)
    with progress.phase("cold start", settings.steps) as phase, phase_memory("cold start"):
        params, method_state, tokens = rejection_sft(
            run,
            fresh,
            shared_format_task_data(resolve(run.config).task, run.task_data),
            on_progress=lambda step, total, loss: phase.update(step, loss=loss),
            poll=poll,
        )
    state = init_state(run, params, fresh.train.head)
    return dataclasses.replace(state, method_state=method_state, generated_tokens=tokens)


def shared_format_task_data(task: TaskSettings, current: TaskData) -> TaskData:
    """Returns the task data with the prompt format that all methods share."""
    shared_format = format_for(task.data)
    if shared_format == current.style:
        return current
    return build_task_data(task, current.tokenizer, current.vocab_size, style=shared_format)


def _warmup_task_data(settings: Settings, current: TaskData) -> TaskData:
    """Returns the task data of the warm-up, in the prompt format that all methods share.

    The questions are drawn with the seed of the warm-up, which may differ from the run's seed.
    """
    if settings.warmup.seed == settings.task.seed:
        return shared_format_task_data(settings.task, current)
    task = dataclasses.replace(settings.task, seed=settings.warmup.seed)
    return build_task_data(task, current.tokenizer, current.vocab_size, style=format_for(task.data))


@dataclasses.dataclass(frozen=True)
class _WarmupData:
    """The training data of a warm-up, and the prompts on which its accuracy is measured.

    Attributes:
      batches: function that returns the supervised batch of a step.
      styles: trace styles (ways of writing down the reasoning, short or long) whose accuracy is
        measured at the end of the warm-up.
      prompts_of: function that maps a style to prompts and their reference answers. Each prompt
        ends with the first token of a trace in that style.
      texts_digest: `SftBatches.texts_digest`, or None for the ledger task.
    """

    batches: Batches
    styles: Sequence[str]
    prompts_of: Callable[[Any], tuple[Prompts, list[str]]]
    texts_digest: str | None = None


def _no_data(*_: Any) -> Any:
    """Raises AssertionError, because a finished warm-up reads no data."""
    raise AssertionError("a finished warm-up reads no data")


# Data of a finished warm-up whose weights are read.
_UNUSED_DATA = _WarmupData(_no_data, (), _no_data)


def _warmup_data(settings: WarmupSettings, task_data: TaskData) -> _WarmupData:
    """Returns the warm-up data, from the synthetic ledger task or the training set's traces."""
    largest_budget = settings.largest_budget
    if settings.data.train != "ledger":
        traces = SftBatches(settings, task_data)
        return _WarmupData(
            traces.batch,
            traces.styles,
            lambda style: traces.opened(style, largest_budget),
            traces.texts_digest,
        )

    def prompts_of(style: ledger.Style) -> tuple[Prompts, list[str]]:
        # Measure the long style on the hardest questions, which only this style can solve.
        level = ledger.MAX_LEVEL if style == "steps" else settings.warmup.style_level
        return styled_prompts(task_data.train, style, level, largest_budget)

    return _WarmupData(ledger_batches(settings), (), prompts_of)


def _warm_up(run: Run, key: jax.Array, folder: RunFolder, progress: Progress, poll: Poll) -> Params:
    """Runs the supervised warm-up and returns its weights, plus an untrained budget module.

    If CPU cores are idle, the programs of the training loop are compiled in the background.
    """
    settings = resolve(run.config)
    warmup = settings.warmup.warmup
    warmup_run = dataclasses.replace(
        run, config=dataclasses.replace(run.config, seed=settings.warmup.seed)
    )
    warmup_folder = Path(warmup.dir) if warmup.dir else folder.warmup
    # Grade with the exact grader, because several runs with different graders may share a warm-up.
    task_data = _warmup_task_data(settings, run.task_data).exactly_graded()
    is_finished = WarmupPaths(warmup_folder).identity.exists()
    compiles_ahead = can_compile_ahead(run) and not is_finished
    if is_finished and steps_in(folder.checkpoints):
        # A resumed run only reads the weights, and its traces may have been edited since.
        data = _UNUSED_DATA
    else:
        data = _warmup_data(settings.warmup, task_data)

    def accuracy_of(params: Params, style: str | None = None) -> float:
        if style is None:
            return _accuracy(warmup_run, task_data, params, key, poll)
        prompts, references = data.prompts_of(style)
        return _style_accuracy(
            warmup_run, task_data, params, key, style, prompts, references, progress, poll
        )

    first_work = "reading finished weights" if is_finished else "compiling its first step"
    with (
        progress.phase("warm-up", warmup.steps, first_work) as phase,
        phase_memory("warm-up", batch_tokens=warmup.batch_tokens),
        compiling_in_background(lambda poll_work: compile_ahead(run, poll_work)) as begin,
    ):

        def poll_and_begin() -> None:
            # This is called after the first step, so the program of the warm-up is already
            # compiled.
            if compiles_ahead:
                begin()
            if poll is not None:
                poll()

        params = warm_up(
            settings.warmup,
            warmup_fingerprint(run.config),
            run.policy,
            warmup_folder,
            batches=data.batches,
            styles=data.styles,
            accuracy_of=accuracy_of,
            on_progress=lambda step, total, loss: phase.update(step, total=total, loss=loss),
            poll=poll_and_begin,
            texts_digest=data.texts_digest,
        )
    params = initial.with_budget_module(key, run.policy, params)
    return initial.with_adapters(key, run.policy, params)


def _style_accuracy(
    run: Run,
    task_data: TaskData,
    params: Params,
    key: jax.Array,
    style: str,
    prompts: Prompts,
    references: list[str],
    progress: Progress,
    poll: Poll,
) -> float:
    """Returns the greedy accuracy on prompts that end with the first token of a trace style.

    A trace style is a way of writing down the reasoning, short or long. The first token makes the
    policy continue in this style.

    A progress bar is shown, because the measurement takes minutes with a large model.
    """
    with progress.phase(f"warm-up, {style}", len(references)) as phase:
        num_done = 0

        def on_rows(rows: np.ndarray, *_: Any) -> None:
            nonlocal num_done
            num_done += len(rows)
            phase.update(num_done)

        callbacks = Callbacks(poll, on_rows)
        rollout = plain_rollout(run, task_data, params, prompts, key, callbacks, temperature=0.0)
        outcomes = task_data.verify(rollout.trunks, rollout.branches, references, poll)
        return float(outcomes.mean())


def _accuracy(run: Run, task_data: TaskData, params: Params, key: jax.Array, poll: Poll) -> float:
    """Returns the greedy accuracy at the largest evaluated budget, without the budget module."""
    config = run.config
    largest_budget = max(config.eval.budgets)
    spec = dataclasses.replace(run.policy.evaluation, conditioning=None)
    decode_params = run.policy.decode_params(params, plain=True)
    results = evaluate_set(
        Decoder(decode_params, spec, None, spec.max_thinking),
        task_data,
        next(iter(task_data.eval.values())),
        key,
        config=dataclasses.replace(
            config.eval, budgets=(largest_budget,), samples=0, size=_ACCURACY_QUESTIONS
        ),
        seed=config.seed,
        poll=poll,
    )
    return float(results["by_budget"]["greedy"][str(largest_budget)]["accuracy"])
