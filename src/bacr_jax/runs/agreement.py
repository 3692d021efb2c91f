"""Verifies that all processes of a run use the same settings, software and inputs.

The check runs before any process trains. Without it, processes could train with different learning
rates or different questions.
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
from typing import Any

import bacr_jax
from bacr_client.fingerprint import file_digests
from bacr_jax.config.reproducible import DUMP, LOAD
from bacr_jax.errors import UserError, first_of
from bacr_jax.parallel import processes
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.runs.provenance import VERSIONED, backend, data_fingerprint, driver, switches

# Config keys with local paths, which may differ between processes. For paths of inputs, the
# contents of the files are compared instead. The other paths belong to caches.
FREE = ("model.path", "model.tokenizer", "adapter.path", "data.dir", "output.compile_cache")
# XLA flags that contain per-process file names.
_FILE_FLAGS = re.compile(rf"--(?:{DUMP}|{LOAD}|xla_dump_to)=(?:\"[^\"]*\"|\S*)")
# Maximum number of differences listed in an error.
_MAX_LISTED = 4
# Maximum length in characters of a value in an error.
_MAX_LENGTH = 60

# Maps the name of each value that must be equal in all processes to the value.
Facts = dict[str, str]


def start_facts(values: Mapping[str, Any], options: Mapping[str, object]) -> Facts:
    """Collects the values that must be equal in all processes and that need no input files.

    The values are the config, the command-line options, digests of the source code, package
    versions, the backend and the driver of the accelerator, options of JAX, and environment
    variables.

    Args:
      values: values of this process's config, keyed by dotted name.
      options: values of the command-line options, keyed by name.
    """
    facts = {}
    shared = {key: value for key, value in values.items() if key not in FREE}
    for name, value in {**shared, **options}.items():
        facts[name] = json.dumps(value, default=str)
    method = Path(values["method"])
    if method.is_file():
        facts[f"the file {method}"] = _digest(method.read_bytes())
    for name in VERSIONED:
        facts[name] = version(name)
    facts["the code of bacr_jax"] = _code_digest()
    facts["the backend"] = backend()
    if driver():
        facts["the driver"] = driver()
    facts |= switches()
    flags = _FILE_FLAGS.sub("", os.environ.get("XLA_FLAGS", ""))
    facts["XLA_FLAGS"] = " ".join(flags.split())
    for name, value in os.environ.items():
        if name.startswith("BACR_"):
            facts[name] = value
    return facts


def input_facts(values: Mapping[str, Any], task_data: TaskData) -> Facts:
    """Returns digests of the inputs, which must be equal in all processes.

    The inputs are the questions, prompts, verifier sources, tokenizer and weights.

    Args:
      values: values of this process's config, keyed by dotted name.
      task_data: questions and prompts.
    """
    facts = {}
    sets = {"data.train": task_data.train, **task_data.eval}
    for name, questions in sets.items():
        facts[f"the questions of {name}"] = data_fingerprint(questions.set)
    for name, digest in task_data.prompt_fingerprints.items():
        facts[f"the digest of {name} (prompts)"] = digest
    for name, digest in task_data.verifier_digests.items():
        facts[f"the source of {name}"] = digest
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
    """Returns the first 12 hexadecimal digits of the content's SHA-256 hash."""
    return hashlib.sha256(content).hexdigest()[:12]


def disagreement(facts_by_process: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    """Compares the facts of all processes with process 0 and describes the first difference.

    Facts are the settings, software versions and input digests that all processes must share.

    Args:
      facts_by_process: facts of each process, by name.
      hosts: host name of each process.

    Returns:
      The error message for the first process that differs, or None if all facts are equal.
    """
    first = facts_by_process[0]
    for process, other in enumerate(facts_by_process):
        differences = [
            f"{name} ({_short(first.get(name))} in process 0, {_short(other.get(name))} in "
            f"process {process})"
            for name in dict.fromkeys((*first, *other))
            if first.get(name) != other.get(name)
        ]
        if differences:
            return (
                f"process {process} on {hosts[process]} can't train together with process 0 on "
                f"{hosts[0]}, because these differ: {first_of(differences, _MAX_LISTED)}; start "
                "all processes with the same command, files, versions and environment"
            )
    return None


def _short(value: str | None) -> str:
    """Returns the value, or its beginning and a digest if it is too long for an error message."""
    if not value:
        return "none"
    if len(value) <= _MAX_LENGTH:
        return value
    return f"{value[: _MAX_LENGTH - 12]}...{_digest(value.encode())}"


def refuse_if_processes_differ(facts: Facts, refused: UserError | None = None) -> None:
    """Compares the facts of all processes, and raises any error in all processes.

    Facts are the settings, software versions and input digests that all processes must share.

    This is a collective operation: every process must call it, in the same order.

    Args:
      facts: facts of this process, by name.
      refused: error that prevents this process from continuing, or None.

    Raises:
      UserError: raised in all processes if one process has an error or if facts differ.
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
