"""Answers drawn by a server elsewhere: ids cross the wire, everything else is done here."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import numpy as np

from bacr_held import EngineError, Rules, Sampling, Server, read_rules
from bacr_held.http_json import request_json
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.config.engine import Engine
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import declaration, open_decoder
from bacr_jax.evaluation.samples import GREEDY, Asked, Drawing, EvalSetting, TraceSource
from bacr_jax.model.hf import read_thinking
from bacr_jax.model.hf.archive import check_files
from bacr_jax.prompts.environment import Environment, Questions
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.rollout.served import AskedRow, Asking, as_branches, as_trunks, together, without_tag
from bacr_jax.runs.open import SavedPolicy, weights_fingerprint
from bacr_jax.types import NO_BUDGET, Branches, Trunks

# Seconds between two questions to a server that starts.
_PATIENCE = 0.5
_OTHER_FORMAT = (
    "data.prompt_format: an engine samples what {} was trained to write; leave prompt format and "
    "closing text as they are"
)


class ServedDecoder:
    """A policy behind a server; stands where a `Decoder` does.

    Attributes:
      at_once: rows that are asked for together.
    """

    def __init__(self, server: Server, rules: Rules, at_once: int):
        self.server, self.rules, self.at_once = server, rules, at_once

    def traces(self, parts: Sequence[Asked], drawing: Drawing) -> list[tuple[Trunks, Branches]]:
        """As of `Decoder`; sampled answers are others than there, and the same at every call."""
        asking = Asking(self.rules, without_tag(drawing.environment))
        drawn = [
            asking.row(row, self.server.complete)
            for part in parts
            for row in self._rows(part, drawing)
        ]
        on_rows = drawing.on_rows
        count = None if on_rows is None else lambda places: on_rows(len(places))
        try:
            ended = asyncio.run(together(drawn, self.at_once, drawing.poll, count))
        except (EngineError, ValueError) as error:
            raise UserError(f"{error}; what is done is kept, the same command goes on") from None
        ends = np.cumsum([0, *[len(part.rows) for part in parts]])
        of_parts = [ended[start:stop] for start, stop in zip(ends, ends[1:])]
        return [(as_trunks(rows), as_branches(rows)) for rows in of_parts]

    def _rows(self, part: Asked, drawing: Drawing) -> list[AskedRow]:
        """A part's rows."""
        setting = part.settings[0]
        budget = None if setting.budget == NO_BUDGET else setting.budget
        limit, cuts = self.rules.limit(budget), [s.cut for s in part.settings]
        ids = [
            np.asarray(tokens)[:length].tolist()
            for tokens, length in zip(part.prompts.tokens, np.asarray(part.prompts.lengths))
        ]
        return [
            AskedRow(prompt, budget, limit, cuts, _sampling(drawing, setting, row))
            for prompt, row in zip(ids, part.rows.tolist())
        ]


def _sampling(drawing: Drawing, setting: EvalSetting, row: int) -> Sampling:
    """How a row's tokens are drawn: a function of the evaluation's key, the budget and the row."""
    if setting.mode == GREEDY:
        return Sampling()
    key = np.asarray(jax.random.key_data(drawing.key)).tolist()
    words = [*key, setting.budget % 2**32, row]
    seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    return Sampling(drawing.config.temperature, drawing.config.top_p, seed)


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
        yield ServedDecoder(server, rules, slots)


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
) -> AbstractContextManager[TraceSource]:
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
