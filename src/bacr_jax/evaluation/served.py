"""Answers drawn by a server elsewhere: ids cross the wire, everything else is done here."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import jax

from bacr_client import EngineError, Server, read_rules
from bacr_client.http_json import request_json
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.config.engine import Engine
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import Decoder, declaration, open_decoder, policy_of
from bacr_jax.model.hf.archive import check_files
from bacr_jax.model.hf.hf_config import read_thinking
from bacr_jax.prompts.environment import Environment
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout import Rollout
from bacr_jax.rollout.served import AnsweredRow, AskedRow, Asking, ask, without_tag
from bacr_jax.runs.open import SavedPolicy, weights_fingerprint

# Seconds between two questions to a server that starts.
_PATIENCE = 0.5
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
            "of python -m bacr_jax.export"
        )
    if saved.style is None:
        raise UserError(_OTHER_FORMAT.format(saved.folder))


@contextlib.contextmanager
def open_served(
    engine: Engine,
    saved: SavedPolicy,
    environment: Environment,
    *,
    slots: int,
    say: Callable[[str], None],
) -> Iterator[Decoder]:
    """The policy behind its server, which is started if nobody has; stopped at the end then."""
    config, largest = saved.config, largest_evaluated(saved.config)
    section = describe(config, environment.tokenizer, environment.style, environment.vocab_size)
    folders_own = read_thinking(saved.folder) or {}
    if section["never_sampled"] != folders_own.get("never_sampled"):
        raise UserError(_OTHER_FORMAT.format(saved.folder))
    key = weights_fingerprint(saved.folder)
    rules = read_rules(section, environment.vocab_size)
    serving: AbstractContextManager[str] = contextlib.nullcontext(engine.url)
    if engine.python:
        say("starting vLLM")
        dtype = config.model.compute_dtype
        serving = started(engine, Path(saved.folder), dtype=dtype, slots=slots)
    with serving as url:
        server = Server(url, folder=key)
        try:
            asyncio.run(server.connect())
        except EngineError as error:
            raise UserError(f"--url {error}" if engine.url else str(error)) from None
        told = declaration(environment.tokenizer, environment.style, config.eval, largest)
        needed = environment.longest_prompt + len(told) + rules.longest(largest)
        if needed > server.length:
            raise UserError(
                f"--engine vllm: the server's rows have {server.length} tokens and {needed} are "
                f"needed; start it with --max-model-len {needed}, or write smaller --budgets"
            )
        policy, no_params = policy_of(config, environment.vocab_size, 1), cast(Any, None)
        spec = dataclasses.replace(policy.evaluation, max_thinking=largest, slots=slots)
        asking = Asking(rules, without_tag(environment))
        yield Decoder(no_params, spec, None, rules.cap, _sampled_by(server, asking))


# A large model is read from a slow disk and compiled first.
_START_SECONDS, _STOP_SECONDS = 3600.0, 30.0


@contextlib.contextmanager
def started(engine: Engine, folder: Path, *, dtype: str, slots: int) -> Iterator[str]:
    """Starts a server of a folder on this machine; gives its address, and stops it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [engine.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder.absolute()), "--served-model-name", "policy"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-num-seqs", str(slots), *engine.arguments]
    with tempfile.NamedTemporaryFile(prefix="bacr-engine-", suffix=".log", delete=False) as file:
        # A group of its own: it is stopped with its workers, and Ctrl-C reaches this process first.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    url, log = f"http://127.0.0.1:{port}", Path(file.name)
    try:
        _wait(process, url, log)
        yield url
    finally:
        _stop(process)
    log.unlink(missing_ok=True)


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Until the server answers."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UserError(f"--engine-python: vLLM did not start ({_last_error(log)}); see {log}")
        try:
            asyncio.run(request_json(f"{url}/v1/models"))
        except EngineError:
            time.sleep(_PATIENCE)
        else:
            return
    raise UserError(f"--engine-python: vLLM did not answer in {_START_SECONDS:g} s; see {log}")


def _last_error(log: Path) -> str:
    """The last line that names an error, shortened; or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w*(Error|error)\b.*: ", line)]
    return (errors or lines or ["it said nothing"])[-1][-300:]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)


def open_source(
    engine: Engine | None,
    saved: SavedPolicy,
    environment: Environment,
    *,
    slots: int,
    say: Callable[[str], None],
) -> AbstractContextManager[Decoder]:
    """What draws the answers, for as long as they are drawn."""
    if engine is not None:
        return open_served(engine, saved, environment, slots=slots, say=say)
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
