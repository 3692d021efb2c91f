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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from bacr_held import Answering, EngineError, Rules, Sampling, Server, Thinking, read_rules
from bacr_held.http_json import request_json
from bacr_held.server import extras
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.config.engine import Engine
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import declaration, open_decoder
from bacr_jax.evaluation.samples import (
    CLOSE_NAMES,
    GREEDY,
    Asked,
    Drawing,
    EvalSetting,
    TraceSource,
)
from bacr_jax.model.hf import read_thinking
from bacr_jax.prompts.environment import Environment, Questions
from bacr_jax.prompts.stop_strings import compile_stop_strings, match
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.runs.open import SavedPolicy, weights_fingerprint
from bacr_jax.types import NO_BUDGET, Branches, Poll, Trunks

_CODES = {name: code for code, name in CLOSE_NAMES.items()}
# Seconds between two calls of `poll`, and between two questions to a server that starts.
_PATIENCE = 0.5
_OTHER_FORMAT = (
    "data.prompt_format: an engine samples what {} was trained to write; leave prompt format and "
    "closing text as they are"
)


@dataclass(frozen=True)
class Row:
    """A row that has ended: its thinking, and an answer per cut."""

    thinking: Thinking
    answers: list[Answering]


class ServedDecoder:
    """A policy behind a server; stands where a `Decoder` does.

    Attributes:
      at_once: rows that are asked for together.
    """

    def __init__(self, server: Server, rules: Rules, at_once: int):
        self.server, self.rules, self.at_once = server, rules, at_once

    def traces(self, parts: Sequence[Asked], drawing: Drawing) -> list[tuple[Trunks, Branches]]:
        """As of `Decoder`; sampled answers are others than there, and the same at every call."""
        environment = drawing.environment
        drawn = [row for part in parts for row in self._rows(part, drawing)]
        try:
            ended = asyncio.run(_together(drawn, self.at_once, drawing.poll, drawing.on_rows))
        except (EngineError, ValueError) as error:
            raise UserError(f"{error}; what is done is kept, the same command goes on") from None
        ends = np.cumsum([0, *[len(part.rows) for part in parts]])
        of_parts = [ended[start:stop] for start, stop in zip(ends, ends[1:])]
        return [(_as_trunks(environment, rows), _as_branches(rows)) for rows in of_parts]

    def _rows(self, part: Asked, drawing: Drawing) -> list[Coroutine[Any, Any, Row]]:
        """A part's rows, not begun."""
        setting = part.settings[0]
        budget = None if setting.budget == NO_BUDGET else setting.budget
        cuts = [s.cut for s in part.settings]
        ids = [
            np.asarray(tokens)[:length].tolist()
            for tokens, length in zip(part.prompts.tokens, np.asarray(part.prompts.lengths))
        ]
        return [
            self._row(drawing.environment, prompt, budget, cuts, _sampling(drawing, setting, row))
            for prompt, row in zip(ids, part.rows.tolist())
        ]

    async def _row(
        self,
        environment: Environment,
        prompt: list[int],
        budget: int | None,
        cuts: Sequence[int | None],
        draw: Sampling,
    ) -> Row:
        """Thinks, and answers at each cut; cuts behind the thinking share their answer."""
        xargs = extras(budget, len(prompt))
        thinking = Thinking(self.rules, prompt, self.rules.limit(budget))
        await self._finish(thinking, draw, 0, xargs)
        length = _without_tag(environment, thinking)
        places = [length if cut is None else min(cut, length) for cut in cuts]
        answers: dict[int, Answering] = {}
        for place in dict.fromkeys(places):
            whole = place == length
            answers[place] = thinking.answering() if whole else thinking.answering_at(place)
            await self._finish(answers[place], draw, len(answers), xargs)
        return Row(thinking, [answers[place] for place in places])

    async def _finish(
        self, part: Thinking | Answering, draw: Sampling, number: int, xargs: dict[str, Any]
    ) -> None:
        while (call := part.call()) is not None:
            part.take(await self.server.complete(call, draw, number, xargs))


def _sampling(drawing: Drawing, setting: EvalSetting, row: int) -> Sampling:
    """How a row's tokens are drawn: a function of the evaluation's key, the budget and the row."""
    if setting.mode == GREEDY:
        return Sampling()
    key = np.asarray(jax.random.key_data(drawing.key)).tolist()
    words = [*key, setting.budget % 2**32, row]
    seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    return Sampling(drawing.config.temperature, drawing.config.top_p, seed)


async def _together(
    rows: Sequence[Coroutine[Any, Any, Row]],
    at_once: int,
    poll: Poll,
    on_rows: Callable[[int], None] | None,
) -> list[Row]:
    """Rows in their order, at most `at_once` in flight; whatever is raised ends all of them."""
    gate = asyncio.Semaphore(at_once)

    async def admitted(row: Coroutine[Any, Any, Row]) -> Row:
        async with gate:
            return await row

    tasks = [asyncio.ensure_future(admitted(row)) for row in rows]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_PATIENCE, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
            if on_rows is not None and done:
                on_rows(len(done))
            if poll is not None:
                poll()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for row in rows:
            row.close()


def _padded(rows: Sequence[Sequence[int]]) -> Int[np.ndarray, "B S"]:
    width = max(map(len, rows), default=0)
    found = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        found[row, : len(ids)] = ids
    return found


def _as_trunks(environment: Environment, rows: Sequence[Row]) -> Trunks:
    """Thinking as rollouts give it."""
    thoughts = [row.thinking for row in rows]
    whole: Any = _padded([(*thought.prompt, *thought.tokens) for thought in thoughts])
    numbers = lambda values: np.array(values, np.int32)
    arrays: dict[str, Any] = {
        "prompt_lengths": numbers([len(thought.prompt) for thought in thoughts]),
        "sampled": numbers([len(thought.tokens) for thought in thoughts]),
        "thinking": numbers([_without_tag(environment, thought) for thought in thoughts]),
        "close": numbers([_CODES[thought.closed_by] for thought in thoughts]),
        "budgets": numbers([thought.limit for thought in thoughts]),
        "logprobs": np.zeros((len(rows), 0), np.float32),
    }
    return Trunks(tokens=whole, **arrays)


def _without_tag(environment: Environment, thought: Thinking) -> int:
    """Thinking tokens without those of the tag that closed it."""
    if not thought.by_tag:
        return len(thought.kept)
    table = compile_stop_strings(
        environment.tokenizer, [environment.style.think_close], vocab_size=environment.vocab_size
    )
    return match(table, thought.tokens)[1]


def _as_branches(rows: Sequence[Row]) -> Branches:
    """Answers as rollouts give them: [rows, cuts]."""
    cuts = len(rows[0].answers)
    flat = [answer for row in rows for answer in row.answers]
    table = lambda values, kind: np.array(values, kind).reshape(len(rows), cuts)
    whole = _padded([(*answer.forced, *answer.tokens) for answer in flat])
    arrays: dict[str, Any] = {
        "tokens": whole.reshape(len(rows), cuts, -1),
        "context": table([len(answer.prompt) - len(answer.forced) for answer in flat], np.int32),
        "forced": table([len(answer.forced) for answer in flat], np.int32),
        "sampled": table([len(answer.tokens) for answer in flat], np.int32),
        "finished": table([answer.finished for answer in flat], bool),
        "source": np.tile(np.arange(cuts, dtype=np.int32), (len(rows), 1)),
        "logprobs": np.zeros((len(rows), cuts, 0), np.float32),
    }
    return Branches(**arrays)


def check_served(saved: SavedPolicy) -> None:
    """The folder says itself how it is asked, which is what its server goes by."""
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
