"""What the processes of one run must have in common, compared before any of them trains.

Each would go on with its own learning rate or its own questions, and the numbers be of no run.
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

# Places on a machine's own disk. What lies there is compared in their stead, or is a cache.
FREE = ("model.path", "model.tokenizer", "adapter.path", "data.dir", "output.compile_cache")
# Flags of XLA that name files of each process.
_OWN_FLAGS = re.compile(rf"--(?:{DUMP}|{LOAD}|xla_dump_to)=(?:\"[^\"]*\"|\S*)")
# Differences named in a refusal, and characters of a value in it.
_MOST_NAMED, _LONGEST = 4, 60

Told = dict[str, str]


def told_at_start(config: Config, options: Mapping[str, object]) -> Told:
    """What decides a run and is known before anything is read; `options` are the command's."""
    keys = {key: value for key, value in config_io.flatten(config).items() if key not in FREE}
    told = {name: json.dumps(value, default=str) for name, value in {**keys, **options}.items()}
    if Path(config.method).is_file():
        told[f"the file {config.method}"] = _digest(Path(config.method).read_bytes())
    told |= {name: version(name) for name in VERSIONED} | {"the code of bacr_jax": _code_digest()}
    told["the backend"] = jax.devices()[0].client.platform_version.split("\n")[0]
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        told["the driver"] = driver.read_text().split("\n")[0]
    told["XLA_FLAGS"] = " ".join(_OWN_FLAGS.sub("", os.environ.get("XLA_FLAGS", "")).split())
    return told | {name: os.environ[name] for name in os.environ if name.startswith("BACR_")}


def told_of_inputs(config: Config, environment: Environment) -> Told:
    """Digests of what was read: questions, prompts, verifiers' sources, tokenizer, weights."""
    sets = {"data.train": environment.train, **environment.eval}
    told = {f"the questions of {name}": data_fingerprint(one.set) for name, one in sets.items()}
    prompts = environment.prompt_fingerprints.items()
    told |= {f"the digest of {name} (prompts)": digest for name, digest in prompts}
    verifiers = environment.verifier_digests.items()
    told |= {f"the source of {name}": digest for name, digest in verifiers}
    values = config_io.flatten(config)
    for key in ("model.path", "model.tokenizer", "adapter.path"):
        found = file_digests(Path(values[key])) if values[key] else {}
        told |= {f"{key}/{name}": digest for name, digest in found.items()}
    return told


@functools.cache
def _code_digest() -> str:
    src = Path(bacr_jax.__file__).parents[1]
    files = sorted(src.glob("bacr_*/**/*.py"))
    return _digest(b"".join(bytes(path.relative_to(src)) + path.read_bytes() for path in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def disagreement(told: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    """The refusal of processes that were told different things; None: all agree with the first."""
    for place, other in enumerate(told):
        names = dict.fromkeys((*told[0], *other))
        differing = [
            f"{name} ({_short(told[0].get(name))} there, {_short(other.get(name))} here)"
            for name in names
            if told[0].get(name) != other.get(name)
        ]
        if differing:
            return (
                f"process {place} on {hosts[place]}: is not of the run of process 0 on {hosts[0]}, "
                f"and differs in {first_of(differing, _MOST_NAMED)}; start all processes with the "
                "same command, files, versions and environment"
            )
    return None


def _short(value: str | None) -> str:
    if value is None or len(value) <= _LONGEST:
        return value or "none"
    return f"{value[: _LONGEST - 12]}...{_digest(value.encode())}"


def refuse_others(told: Told, refused: UserError | None = None) -> None:
    """Compares what the processes were told, or has all hear why this one was `refused`.

    All must call it at the same places.
    """
    own = {"host": socket.gethostname(), "told": told, "refused": refused and str(refused)}
    every = [json.loads(text) for text in processes.texts_of_all(json.dumps(own))]
    for place, one in enumerate(every):
        if one["refused"]:
            raise UserError(f"process {place} on {one['host']}: {one['refused']}")
    line = disagreement([one["told"] for one in every], [one["host"] for one in every])
    if line is not None:
        raise UserError(line)
