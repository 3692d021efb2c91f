"""Compares the settings, software and inputs of a run's processes before any of them trains.

Otherwise each process could train with another learning rate or other questions.
"""

import functools
import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import jax

import bacr_jax
from bacr_client.fingerprint import file_digests
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.reproducible import DUMP, LOAD
from bacr_jax.errors import UserError, first_of
from bacr_jax.parallel import processes
from bacr_jax.prompts.environment import Environment
from bacr_jax.runs.provenance import VERSIONED, data_fingerprint

# Keys of paths on a machine's disk, which may differ. Instead, the contents of inputs are compared;
# the other paths are caches.
FREE = ("model.path", "model.tokenizer", "adapter.path", "data.dir", "output.compile_cache")
# XLA flags that name files of each process.
_FILE_FLAGS = re.compile(rf"--(?:{DUMP}|{LOAD}|xla_dump_to)=(?:\"[^\"]*\"|\S*)")
# Largest number of differences that an error lists.
_MAX_LISTED = 4
# Longest value in an error, in characters.
_MAX_LENGTH = 60

# Values by name that must be equal in all processes.
Facts = dict[str, str]


def told_at_start(config: Config, options: Mapping[str, object]) -> Facts:
    """Returns the facts that are available before any input is read.

    Config, options, code, versions, the accelerator's driver, and variables of the environment.

    Args:
      options: options of the command by name.
    """
    facts = {}
    values = {key: value for key, value in config_io.flatten(config).items() if key not in FREE}
    for name, value in {**values, **options}.items():
        facts[name] = json.dumps(value, default=str)
    method = Path(config.method)
    if method.is_file():
        facts[f"the file {config.method}"] = _digest(method.read_bytes())
    for name in VERSIONED:
        facts[name] = version(name)
    facts["the code of bacr_jax"] = _code_digest()
    facts["the backend"] = jax.devices()[0].client.platform_version.split("\n")[0]
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        facts["the driver"] = driver.read_text().split("\n")[0]
    flags = _FILE_FLAGS.sub("", os.environ.get("XLA_FLAGS", ""))
    facts["XLA_FLAGS"] = " ".join(flags.split())
    for name, value in os.environ.items():
        if name.startswith("BACR_"):
            facts[name] = value
    return facts


def told_of_inputs(config: Config, environment: Environment) -> Facts:
    """Returns digests of questions, prompts, verifiers' sources, tokenizer and weights."""
    facts = {}
    sets = {"data.train": environment.train, **environment.eval}
    for name, questions in sets.items():
        facts[f"the questions of {name}"] = data_fingerprint(questions.set)
    for name, digest in environment.prompt_fingerprints.items():
        facts[f"the digest of {name} (prompts)"] = digest
    for name, digest in environment.verifier_digests.items():
        facts[f"the source of {name}"] = digest
    values = config_io.flatten(config)
    for key in ("model.path", "model.tokenizer", "adapter.path"):
        if not values[key]:
            continue
        for name, digest in file_digests(Path(values[key])).items():
            facts[f"{key}/{name}"] = digest
    return facts


@functools.cache
def _code_digest() -> str:
    """Returns a digest of the paths and contents of all modules of this distribution."""
    src = Path(bacr_jax.__file__).parents[1]
    files = sorted(src.glob("bacr_*/**/*.py"))
    contents = [bytes(path.relative_to(src)) + path.read_bytes() for path in files]
    return _digest(b"".join(contents))


def _digest(content: bytes) -> str:
    """Returns 12 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def disagreement(facts_by_process: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    """Returns the error for the first process whose facts differ from process 0; None if equal.

    Args:
      hosts: host name of each process.
    """
    first = facts_by_process[0]
    for process, other in enumerate(facts_by_process):
        differences = [
            f"{name} ({_short(first.get(name))} there, {_short(other.get(name))} here)"
            for name in dict.fromkeys((*first, *other))
            if first.get(name) != other.get(name)
        ]
        if differences:
            return (
                f"process {process} on {hosts[process]}: is not of the run of process 0 on "
                f"{hosts[0]}, and differs in {first_of(differences, _MAX_LISTED)}; start all "
                "processes with the same command, files, versions and environment"
            )
    return None


def _short(value: str | None) -> str:
    """Returns a value, shortened to its beginning and a digest if it is long."""
    if not value:
        return "none"
    if len(value) <= _MAX_LENGTH:
        return value
    return f"{value[: _MAX_LENGTH - 12]}...{_digest(value.encode())}"


def refuse_others(facts: Facts, refused: UserError | None = None) -> None:
    """Compares the facts of all processes, or reports a process's error to all of them.

    All processes must call it at the same points of the program.

    Args:
      refused: error that stops this process; None if there is none.

    Raises:
      UserError: in all processes, if one has an error or other facts.
    """
    report = {
        "host": socket.gethostname(),
        "facts": facts,
        "error": None if refused is None else str(refused),
    }
    reports = [json.loads(text) for text in processes.texts_of_all(json.dumps(report))]
    for process, other in enumerate(reports):
        if other["error"]:
            raise UserError(f"process {process} on {other['host']}: {other['error']}")
    line = disagreement([other["facts"] for other in reports], [other["host"] for other in reports])
    if line is not None:
        raise UserError(line)
