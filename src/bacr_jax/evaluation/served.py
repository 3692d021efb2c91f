"""Answers drawn by a server elsewhere: ids cross the wire, everything else is done here."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax

from bacr_held import EngineError, Server, read_rules
from bacr_held.http_json import request_json
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.config.engine import Engine
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import Decoder, declaration, open_decoder, policy_of
from bacr_jax.model.hf import read_thinking
from bacr_jax.model.hf.archive import check_files
from bacr_jax.prompts.environment import Environment, Questions
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout import Listeners, Rollout, Rows, Sampler
from bacr_jax.rollout.served import AnsweredRow, AskedRow, Asking, ask, without_tag
from bacr_jax.runs.open import SavedPolicy, weights_fingerprint
from bacr_jax.types import Prompts

# Seconds between two questions to a server that starts.
_PATIENCE = 0.5
_OTHER_FORMAT = (
    "data.prompt_format: an engine samples what {} was trained to write; leave prompt format and "
    "closing text as they are"
)


@dataclass(frozen=True)
class ServedDecoder(Decoder):
    """A policy behind a server; sampled answers are others than a decoder's, always the same."""

    server: Server
    asking: Asking

    def generate(
        self,
        prompts: Prompts,
        rows: Rows,
        key: jax.Array,
        sampler: Sampler,
        listeners: Listeners,
    ) -> Rollout:
        """As of `Decoder`."""

        async def answered(asked: AskedRow) -> AnsweredRow:
            return await self.asking.row(asked, self.server.complete)

        try:
            return ask(prompts, rows, key, sampler, listeners, answered)
        except (EngineError, ValueError) as error:
            raise UserError(f"{error}; what is done is kept, the same command goes on") from None


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
    longest_prompt: int,
    slots: int,
    say: Callable[[str], None],
) -> Iterator[ServedDecoder]:
    """The policy behind its server, which is started if nobody has; stopped at the end then."""
    config = saved.config
    section = describe(config, environment.tokenizer, environment.style, environment.vocab_size)
    folders_own = read_thinking(saved.folder) or {}
    if section["never_sampled"] != folders_own.get("never_sampled"):
        raise UserError(_OTHER_FORMAT.format(saved.folder))
    key = weights_fingerprint(saved.folder)
    rules = read_rules(section, environment.vocab_size)
    with contextlib.ExitStack() as stack:
        url = engine.url
        if engine.python:
            say("starting vLLM")
            dtype = config.model.compute_dtype
            url = stack.enter_context(started(engine, Path(saved.folder), dtype=dtype, slots=slots))
        server = Server(url, folder=key)
        try:
            asyncio.run(server.connect())
        except EngineError as error:
            raise UserError(f"--url {error}" if engine.url else str(error)) from None
        needed = longest_prompt + rules.longest(largest_evaluated(config))
        if needed > server.length:
            raise UserError(
                f"--engine vllm: the server's rows have {server.length} tokens and {needed} are "
                f"needed; start it with --max-model-len {needed}, or write smaller --budgets"
            )
        policy, no_params = policy_of(config, environment.vocab_size, 1), cast(Any, None)
        spec = dataclasses.replace(
            policy.evaluation, max_thinking=largest_evaluated(config), slots=slots
        )
        asking = Asking(rules, without_tag(environment))
        yield ServedDecoder(no_params, spec, None, rules.cap, server, asking)


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
    handle, name = tempfile.mkstemp(prefix="bacr-engine-", suffix=".log")
    log = Path(name)
    with os.fdopen(handle, "wb") as file:
        # A group of its own: it is stopped with its workers, and Ctrl-C reaches this process first.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
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
            asyncio.run(request_json("GET", f"{url}/v1/models"))
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
    """Ends a server and its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)


def open_source(
    engine: Engine | None,
    saved: SavedPolicy,
    environment: Environment,
    sets: dict[str, Questions],
    *,
    slots: int,
    say: Callable[[str], None],
) -> AbstractContextManager[Decoder]:
    """What draws the answers, for as long as they are drawn."""
    config, largest = saved.config, largest_evaluated(saved.config)
    if engine is None:
        devices = jax.device_count()
        opened = open_decoder(
            saved,
            environment.vocab_size,
            max_thinking=largest,
            slots=slots,
            num_devices=devices,
        )
        if devices > 1:
            shared = devices // opened.spec.row_shards
            copy = f", {shared} of which share a copy of the policy" if shared > 1 else ""
            say(f"{opened.spec.slots} rows at a time on {devices} devices{copy}")
        return contextlib.nullcontext(opened)
    told = declaration(environment.tokenizer, environment.style, config.eval, largest)
    return open_served(
        engine,
        saved,
        environment,
        longest_prompt=max(questions.longest for questions in sets.values()) + len(told),
        slots=slots,
        say=say,
    )
