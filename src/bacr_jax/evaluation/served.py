"""Samples the answers of an evaluation on a vLLM server. Token ids are exchanged over HTTP.

The module `job` calls `open_source`, which opens the server if --url is set, and otherwise the
decoder of this package.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import jax

from bacr_client import BudgetRules, EngineError, Server, read_rules
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import Decoder, declaration, open_decoder, policy_of
from bacr_jax.model.hf.archive import check_files
from bacr_jax.model.hf.hf_config import read_thinking
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout import Rollout
from bacr_jax.rollout.served import AnsweredRow, AskedRow, RemoteSampling, ask, without_tag
from bacr_jax.runs.saved_policy import SavedPolicy, weights_fingerprint

_OTHER_FORMAT = (
    "data.prompt_format: a vLLM server can only use the prompt format and the closing text that "
    "{} was trained with; leave out data.prompt_format and data.closing_text"
)


def _sample_with(server: Server, remote_sampling: RemoteSampling) -> Callable[..., Rollout]:
    """Returns a replacement for `rollout.generate` that samples on a server.

    The answers of the server are reproducible, but differ from the answers of this package's
    decoder.
    """

    async def answer_row(row: AskedRow, requests: asyncio.Semaphore) -> AnsweredRow:
        return await remote_sampling.row(row, server.complete, requests)

    def sample(
        params: None, prompts: Any, rows: Any, key: Any, sampler: Any, callbacks: Any
    ) -> Rollout:
        try:
            return ask(prompts, rows, key, sampler, callbacks, answered=answer_row)
        except (EngineError, ValueError) as error:
            raise UserError(
                f"{error}. All answers that were finished are stored; run the same command again "
                "to continue"
            ) from None

    return sample


def check_served(saved: SavedPolicy, option: str = "--engine vllm") -> None:
    """Checks that an exported folder specifies its thinking format, which the server needs.

    Args:
      saved: the policy.
      option: command-line option that selects the server, for error messages.

    Raises:
      UserError: if the policy is a run, was not exported by this package, or was modified after the
        export.
    """
    check_files(saved.folder)
    if saved.step is not None or read_thinking(saved.folder) is None:
        raise UserError(
            f"{option}: {saved.folder} is not a folder that bacr export wrote. The server needs "
            "such a folder, because it reads from it how thinking ends; run bacr export first"
        )
    if saved.style is None:
        raise UserError(_OTHER_FORMAT.format(saved.folder))


def engine_rules(
    saved: SavedPolicy, tokenizer: Any, style: PromptFormat, vocab_size: int
) -> BudgetRules:
    """Returns the rules by which the server truncates the thinking of an exported policy.

    Raises:
      UserError: if the prompt format differs from the format in the exported folder.
    """
    limits = resolve(saved.config).limits
    section = describe(limits, tokenizer, style, vocab_size)
    section_of_folder = read_thinking(saved.folder) or {}
    if section["never_sampled"] != section_of_folder.get("never_sampled"):
        raise UserError(_OTHER_FORMAT.format(saved.folder))
    return read_rules(section, vocab_size)


@contextlib.contextmanager
def open_served(
    url: str, saved: SavedPolicy, task_data: TaskData, *, slots: int
) -> Iterator[Decoder]:
    """Context manager that yields a decoder that samples on the server at `url`.

    Args:
      saved: policy to evaluate.
      task_data: tokenizer, prompt format and graders.
      slots: number of traces that are requested at the same time.

    Raises:
      UserError: if the server can't be used, serves a different folder, or its maximum sequence
        length is too short.
    """
    config = saved.config
    largest = largest_evaluated(config.budget, config.eval)
    rules = engine_rules(saved, task_data.tokenizer, task_data.style, task_data.vocab_size)
    server = Server(url, folder=weights_fingerprint(saved.folder))
    try:
        asyncio.run(server.connect())
    except EngineError as error:
        raise UserError(f"--url {error}") from None
    budget_tag = declaration(task_data.tokenizer, task_data.style, config.eval, largest)
    needed = task_data.longest_prompt + len(budget_tag) + rules.longest(largest)
    if needed > server.length:
        raise UserError(
            f"--engine vllm: prompt, thinking and answer can have {needed} tokens together, but "
            f"the server allows only {server.length} per sequence; start the server with "
            f"--max-model-len {needed}, or use smaller --budgets"
        )
    policy = policy_of(resolve(config), task_data.vocab_size, 1)
    no_params = cast(Any, None)
    spec = dataclasses.replace(policy.evaluation, max_thinking=largest, slots=slots)
    remote_sampling = RemoteSampling(rules, without_tag(task_data))
    yield Decoder(no_params, spec, None, rules.cap, _sample_with(server, remote_sampling))


def open_source(
    url: str | None,
    saved: SavedPolicy,
    task_data: TaskData,
    *,
    slots: int,
    print_line: Callable[[str], None],
) -> AbstractContextManager[Decoder]:
    """Opens the server at `url` as a decoder, or this package's decoder if `url` is None.

    Args:
      url: address of the server, or None.
      saved: policy to evaluate.
      task_data: tokenizer, prompt format and graders.
      slots: number of traces decoded at the same time on all devices.
      print_line: prints a line about the devices if there are several.
    """
    if url is not None:
        return open_served(url, saved, task_data, slots=slots)
    devices = jax.device_count()
    decoder = open_decoder(
        saved,
        task_data.vocab_size,
        max_thinking=largest_evaluated(saved.config.budget, saved.config.eval),
        slots=slots,
        num_devices=devices,
    )
    if devices > 1:
        sharing = devices // decoder.spec.row_shards
        copies = f", {sharing} of which share a copy of the policy" if sharing > 1 else ""
        print_line(f"{decoder.spec.slots} rows at a time on {devices} devices{copies}")
    return contextlib.nullcontext(decoder)
