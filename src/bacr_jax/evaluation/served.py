"""Answers that a server of vLLM samples for an evaluation; token ids are exchanged over HTTP."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import jax

from bacr_client import EngineError, Server, read_rules
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import Decoder, declaration, open_decoder, policy_of
from bacr_jax.model.hf.archive import check_files
from bacr_jax.model.hf.hf_config import read_thinking
from bacr_jax.prompts.environment import Environment
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout import Rollout
from bacr_jax.rollout.served import AnsweredRow, AskedRow, Asking, ask, without_tag
from bacr_jax.runs.open import SavedPolicy, weights_fingerprint

_OTHER_FORMAT = (
    "data.prompt_format: an engine samples what {} was trained to write; leave prompt format and "
    "closing text as they are"
)


def _sampled_by(server: Server, asking: Asking) -> Callable[..., Rollout]:
    """What samples behind a server; its answers are others than those here, always the same."""

    async def answered(asked: AskedRow) -> AnsweredRow:
        return await asking.row(asked, server.complete)

    def sample(params: None, *asked: Any) -> Rollout:
        try:
            return functools.partial(ask, answered=answered)(*asked)
        except (EngineError, ValueError) as error:
            raise UserError(f"{error}; what is done is kept, the same command goes on") from None

    return sample


def check_served(saved: SavedPolicy) -> None:
    """The folder says itself how it is asked, which is what its server goes by."""
    check_files(saved.folder)
    if saved.step is not None or read_thinking(saved.folder) is None:
        raise UserError(
            f"--engine vllm: {saved.folder} does not say how its thinking is held; write a folder "
            "of bacr export"
        )
    if saved.style is None:
        raise UserError(_OTHER_FORMAT.format(saved.folder))


@contextlib.contextmanager
def open_served(
    url: str, saved: SavedPolicy, environment: Environment, *, slots: int
) -> Iterator[Decoder]:
    """Opens a decoder whose rows the server at `url` samples.

    UserError: the server can't be used, or serves another folder.
    """
    config = saved.config
    largest = largest_evaluated(config)
    section = describe(config, environment.tokenizer, environment.style, environment.vocab_size)
    folders_own = read_thinking(saved.folder) or {}
    if section["never_sampled"] != folders_own.get("never_sampled"):
        raise UserError(_OTHER_FORMAT.format(saved.folder))
    key = weights_fingerprint(saved.folder)
    rules = read_rules(section, environment.vocab_size)
    server = Server(url, folder=key)
    try:
        asyncio.run(server.connect())
    except EngineError as error:
        raise UserError(f"--url {error}") from None
    budget_tag = declaration(environment.tokenizer, environment.style, config.eval, largest)
    needed = environment.longest_prompt + len(budget_tag) + rules.longest(largest)
    if needed > server.length:
        raise UserError(
            f"--engine vllm: the server's rows have {server.length} tokens and {needed} are "
            f"needed; start it with --max-model-len {needed}, or write smaller --budgets"
        )
    policy = policy_of(config, environment.vocab_size, 1)
    no_params = cast(Any, None)
    spec = dataclasses.replace(policy.evaluation, max_thinking=largest, slots=slots)
    asking = Asking(rules, without_tag(environment))
    yield Decoder(no_params, spec, None, rules.cap, _sampled_by(server, asking))


def open_source(
    url: str | None,
    saved: SavedPolicy,
    environment: Environment,
    *,
    slots: int,
    say: Callable[[str], None],
) -> AbstractContextManager[Decoder]:
    """Opens the server at `url` as a decoder, or this package's decoder if `url` is None."""
    if url is not None:
        return open_served(url, saved, environment, slots=slots)
    devices = jax.device_count()
    opened = open_decoder(
        saved,
        environment.vocab_size,
        max_thinking=largest_evaluated(saved.config),
        slots=slots,
        num_devices=devices,
    )
    if devices > 1:
        shared = devices // opened.spec.row_shards
        copy = f", {shared} of which share a copy of the policy" if shared > 1 else ""
        say(f"{opened.spec.slots} rows at a time on {devices} devices{copy}")
    return contextlib.nullcontext(opened)
