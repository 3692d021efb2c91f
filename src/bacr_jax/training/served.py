"""Training whose traces servers of vLLM sample: the run's facts, handed to `rollout.fleet`."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bacr_held import Server, read_rules
from bacr_jax.errors import UserError
from bacr_jax.export.from_run import layout, write_params
from bacr_jax.export.model_card import Exported
from bacr_jax.export.policy_folder import TORCH_NAME
from bacr_jax.learner.scoring import response_logprobs
from bacr_jax.model import adapters
from bacr_jax.model.hf.names import Entry
from bacr_jax.parallel import processes, replicated
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout.fleet import BOUNDS, Fleet, Probe
from bacr_jax.rollout.nccl import Sender, Tensor, find_libraries
from bacr_jax.rollout.served import Asking, without_tag
from bacr_jax.runs.folder import lock_folder, usable
from bacr_jax.training.run import Run
from bacr_jax.types import NO_BUDGET, Params


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
            "rollout.engine=vllm: found an event loop, as in a notebook; write python -m "
            "bacr_jax.train"
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
    if config.rollout.transfer == "nccl":
        device = jax.local_devices()[0]
        fleet.sender = Sender(find_libraries(), device, functools.partial(_tensors, about, device))
    return dataclasses.replace(run, sample=fleet)


def _tensors(about: Exported, device: jax.Device, params: Params) -> list[Tensor]:
    """What lies in such a folder, to be sent from a device."""
    merged, dtype = adapters.merge(params), about.config.model.compute_dtype
    found = []
    for entry, stored in layout(params, about, dtype):
        fetch = functools.partial(_on_device, merged, entry, TORCH_NAME[stored], device)
        found.append(Tensor(entry.name, entry.shape, TORCH_NAME[stored], fetch))
    return found


def _on_device(params: Params, entry: Entry, dtype: str, device: jax.Device) -> jax.Array:
    """`hf.archive.stored` without the host."""
    values = entry.values_in(params)
    values = (values.T if entry.transposed else values).astype(dtype)
    if isinstance(values.sharding, jax.sharding.NamedSharding):
        values = jax.device_put(values, replicated(values.sharding.mesh))
    return jax.device_put(values.addressable_shards[0].data, device)


def _probe(run: Run) -> Probe:
    """The first training question at the largest budget, and what the learner makes of it."""
    config, spec = run.config, run.policy.learner
    told = config.budget.max if run.method.conditioned else NO_BUDGET
    budgets = np.array([config.budget.max])
    prompts = run.environment.train.at(np.zeros(1, int), budgets)
    length = int(np.asarray(prompts.lengths)[0])
    prompt = np.asarray(prompts.tokens)[0, :length].tolist()

    def score(params: Params, tokens: Sequence[int]) -> np.ndarray:
        row = jnp.array([[*prompt, *tokens]], jnp.int32)
        found = response_logprobs(
            params,
            row,
            jnp.array([length]),
            jnp.array([row.shape[1]]),
            jnp.array([told]),
            run.environment.rules.allowed_tokens,
            spec=dataclasses.replace(spec, temperature=1.0),
        )
        return np.asarray(jax.device_get(found))[0, length:]

    return Probe(prompt, None if told == NO_BUDGET else told, score)
