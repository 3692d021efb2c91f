"""Replaces the sampler of a run by vLLM servers (rollout.engine=vllm).

This module passes the settings of the run to `rollout.fleet`: the decoding rules, a folder for
weights, and a probe. The probe is a test of the servers that compares their log-probabilities with
the log-probabilities that the learner computes.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from bacr_client import Server, read_rules
from bacr_jax.config import LossConfig, ModelConfig, RolloutConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.export.from_run import write_params
from bacr_jax.export.model_card import Exported
from bacr_jax.learner.scoring import in_portions, next_token_logprobs
from bacr_jax.parallel import processes, row_shards
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout.fleet import Fleet
from bacr_jax.rollout.probe import CONTEXTS, DEPTH, Context, Probe, largest_difference
from bacr_jax.rollout.served import RemoteSampling, without_tag
from bacr_jax.runs.folder import lock_folder, usable
from bacr_jax.runs.health import MISMATCH
from bacr_jax.training.run import Run
from bacr_jax.types import NO_BUDGET, Params

# Number of contexts per device that are scored in one forward pass, to limit memory.
_ROWS_PER_PASS = 8


def largest_mismatch(
    model: ModelConfig, rollout: RolloutConfig, loss: LossConfig, minibatches: int
) -> float:
    """Returns the largest mismatch between sampler and learner that is attributed to rounding.

    The mismatch is the difference between their log-probabilities, in nats per token. With servers,
    the result is the bound of the probe, the test that compares both log-probabilities. The result
    is larger if the policy is updated between sampling and learning. This happens for a batch that
    was sampled a step ahead, and with `loss.old_logprobs=sampler` and several minibatches.
    """
    differs_by_update = rollout.async_steps or (loss.old_logprobs == "sampler" and minibatches > 1)
    if rollout.engine == "jax" or differs_by_update:
        return MISMATCH
    return _largest_difference(model, rollout)


def _largest_difference(model: ModelConfig, rollout: RolloutConfig) -> float:
    """Returns the bound of the probe, the test of the servers' log-probabilities, in nats."""
    # product_dtype only affects the bound, because servers do not round operands separately.
    dtype = model.product_dtype or model.compute_dtype
    return largest_difference(dtype, rollout.temperature)


def with_servers(run: Run, folder: Path, report: Callable[[str], None]) -> Run:
    """Returns the run with the servers of `rollout.urls` as its sampler.

    Unless rollout.engine=vllm, the run is returned unchanged.

    Args:
      folder: folder of the run. A subfolder of `rollout.weights_dir` is given the same name.
      report: callback that prints a message to the user.

    Raises:
      UserError: training uses several processes, an event loop is running, or a URL or the folder
        for weights is unusable.
    """
    config = run.config
    if config.rollout.engine == "jax":
        return run
    _check_process()
    try:
        servers = [Server(url) for url in config.rollout.urls]
    except ValueError as error:
        raise UserError(f"rollout.urls: {error}") from None
    task_data = run.task_data
    spec = run.policy.rollout
    section = describe(
        resolve(config).limits,
        task_data.tokenizer,
        task_data.style,
        task_data.vocab_size,
    )
    remote_sampling = RemoteSampling(
        read_rules(section, task_data.vocab_size),
        without_tag(task_data),
        answers=spec.answers,
        cuts_relative_to_length=spec.cuts_relative_to_length,
    )
    weights_folder = Path(config.rollout.weights_dir) / folder.absolute().name
    setting = f"rollout.weights_dir={config.rollout.weights_dir}: {weights_folder}"
    with usable(setting):
        weights_folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(weights_folder, setting)
    dtype = config.model.compute_dtype
    base = None if config.model.path is None else Path(config.model.path)
    exported = Exported(folder, 0, config, task_data.style, base, False)

    def write(params: Params, out: Path) -> None:
        # The servers load an export of the policy in the dtype of the sampler.
        write_params(out, params, exported, dtype=dtype)

    fleet = Fleet(
        servers,
        remote_sampling,
        _make_probe(run),
        write,
        weights_folder,
        dtype,
        _largest_difference(config.model, config.rollout),
        report,
        lock=lock,
    )
    return dataclasses.replace(run, sample=fleet)


def _check_process() -> None:
    """Raises UserError if this process can't send weights to servers."""
    if processes.several():
        raise UserError(
            "rollout.engine=vllm: this run has several training processes, but only a single "
            "process can send weights to the servers; train in one process with all devices of a "
            "machine, or set rollout.engine=jax"
        )
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UserError(
            "rollout.engine=vllm can't be used where an event loop is already running, such as "
            "in a notebook; use the command bacr train"
        )


def _make_probe(run: Run) -> Probe:
    """Returns a probe that draws questions and budgets for each version of the weights.

    The probe compares the log-probabilities of a server with the log-probabilities of the learner.
    Both are at the sampling temperature of the run, so the probe also detects servers that return
    log-probabilities at temperature 1 instead (vLLM's default `--logprobs-mode`).
    """
    config = run.config
    train = run.task_data.train
    spec = run.policy.learner

    def draw(version: int) -> list[Context]:
        rng = np.random.default_rng([config.seed, version])
        questions = rng.integers(len(train), size=CONTEXTS)
        budgets = rng.integers(config.budget.min, config.budget.max + 1, size=CONTEXTS)
        if not run.method.conditioned:
            budgets = np.full(CONTEXTS, NO_BUDGET)
        prompts = train.at(questions, budgets)
        contexts = []
        for row, length, budget in zip(
            np.asarray(prompts.tokens), np.asarray(prompts.lengths), budgets
        ):
            prompt = tuple(row[:length].tolist())
            contexts.append(Context(prompt, None if budget == NO_BUDGET else int(budget)))
        return contexts

    def score(params: Params, contexts: Sequence[Context]) -> np.ndarray:
        # Pad to the same width in all versions, so that only one program is compiled.
        tokens = np.zeros((len(contexts), train.longest + DEPTH), np.int32)
        for row, context in zip(tokens, contexts):
            ids = (*context.prompt, *context.response)
            row[: len(ids)] = ids
        starts = np.array([len(context.prompt) for context in contexts])
        lengths = starts + [len(context.response) for context in contexts]
        budgets = np.array(
            [NO_BUDGET if context.budget is None else context.budget for context in contexts]
        )

        def score_rows(rows: np.ndarray) -> jax.Array:
            return next_token_logprobs(
                params,
                tokens[rows],
                starts[rows],
                lengths[rows],
                budgets[rows],
                run.task_data.rules.allowed_tokens,
                spec=spec,
            )

        rows_per_pass = _ROWS_PER_PASS * row_shards(spec.mesh)
        return in_portions(score_rows, np.arange(len(contexts)), rows_per_pass)

    return Probe(draw, score, spec.temperature)
