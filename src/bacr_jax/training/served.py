"""Training whose traces servers of vLLM sample: the run's facts, handed to `rollout.fleet`."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from bacr_client import Server, read_rules
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.export.from_run import write_params
from bacr_jax.export.model_card import Exported
from bacr_jax.learner.scoring import in_portions, next_token_logprobs
from bacr_jax.parallel import processes
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout.fleet import Fleet
from bacr_jax.rollout.probe import BOUNDS, CONTEXTS, DEPTH, Context, Probe
from bacr_jax.rollout.served import Asking, without_tag
from bacr_jax.runs.folder import lock_folder, usable
from bacr_jax.runs.health import MISMATCH
from bacr_jax.training.run import Run
from bacr_jax.types import NO_BUDGET, Params

# Contexts that are scored in one pass, which needs the memory of that many rows.
_SCORED_AT_ONCE = 8


def largest_mismatch(config: Config) -> float:
    """Returns the mismatch of a step that is still rounding, in nats a token.

    With servers it is the bound of the probe. A batch that was sampled a step ahead, or one whose
    scores are those of the policy after an update, differs by that update as well.
    """
    is_of_another_update = config.rollout.ahead or (
        config.loss.old_logprobs == "sampler" and config.train.minibatches > 1
    )
    if config.rollout.engine == "own" or is_of_another_update:
        return MISMATCH
    return BOUNDS[config.model.product_dtype or config.model.compute_dtype]


def with_servers(run: Run, folder: Path, say: Callable[[str], None]) -> Run:
    """The run, sampled by the servers of `rollout.urls` if `rollout.engine` says so."""
    config = run.config
    if config.rollout.engine == "own":
        return run
    if processes.several():
        raise UserError(
            "rollout.engine=vllm: several processes train, and one alone can send weights; train "
            "in one process with all devices of a machine, or write rollout.engine=own"
        )
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UserError(
            "rollout.engine=vllm: found an event loop, as in a notebook; write bacr train"
        )
    try:
        servers = [Server(url) for url in config.rollout.urls]
    except ValueError as error:
        raise UserError(f"rollout.urls: {error}") from None
    environment, spec = run.environment, run.policy.rollout
    section = describe(config, environment.tokenizer, environment.style, environment.vocab_size)
    asking = Asking(
        read_rules(section, environment.vocab_size),
        without_tag(environment),
        answers=spec.answers,
        own_cuts=spec.own_cuts,
    )
    where = Path(config.rollout.weights_dir) / folder.absolute().name
    named = f"rollout.weights_dir={config.rollout.weights_dir}: {where}"
    with usable(named):
        where.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(where, named)
    dtype, style = config.model.compute_dtype, environment.style
    base = None if config.model.path is None else Path(config.model.path)
    # Servers get the run's export, in the type that is sampled in.
    about = Exported(folder, 0, config, style, base, False)
    write = lambda params, out: write_params(out, params, about, dtype=dtype)
    # Servers round no operand of their own.
    bound = BOUNDS[config.model.product_dtype or dtype]
    fleet = Fleet(servers, asking, _probe(run), write, where, dtype, bound, say, lock=lock)
    return dataclasses.replace(run, sample=fleet)


def _probe(run: Run) -> Probe:
    """Training questions under budgets of the run, drawn anew for every push of weights."""
    config, train = run.config, run.environment.train
    spec = dataclasses.replace(run.policy.learner, temperature=1.0)

    def draw(version: int) -> list[Context]:
        numbers = np.random.default_rng([config.seed, version])
        questions = numbers.integers(len(train), size=CONTEXTS)
        budgets = numbers.integers(config.budget.min, config.budget.max + 1, size=CONTEXTS)
        if not run.method.conditioned:
            budgets = np.full(CONTEXTS, NO_BUDGET)
        prompts = train.at(questions, budgets)
        tokens = np.asarray(prompts.tokens)
        return [
            Context(tuple(row[:length].tolist()), None if budget == NO_BUDGET else int(budget))
            for row, length, budget in zip(tokens, np.asarray(prompts.lengths), budgets)
        ]

    def score(params: Params, contexts: Sequence[Context]) -> np.ndarray:
        # One width for all pushes, so that one program scores them all.
        tokens = np.zeros((len(contexts), train.longest + DEPTH), np.int32)
        for row, context in zip(tokens, contexts):
            written = (*context.prompt, *context.response)
            row[: len(written)] = written
        starts = np.array([len(one.prompt) for one in contexts])
        lengths = starts + [len(one.response) for one in contexts]
        budgets = np.array([NO_BUDGET if one.budget is None else one.budget for one in contexts])

        def of_rows(rows: np.ndarray) -> jax.Array:
            return next_token_logprobs(
                params,
                tokens[rows],
                starts[rows],
                lengths[rows],
                budgets[rows],
                run.environment.rules.allowed_tokens,
                spec=spec,
            )

        return in_portions(of_rows, np.arange(len(contexts)), _SCORED_AT_ONCE)

    return Probe(draw, score)
