"""Sets XLA's flags for `reproducible: true`, so that runs on GPUs are bit-identical.

docs/reproducibility.md explains why results on GPUs differ in the last bits, and what each flag
changes. XLA still chooses some kernels; it writes its choices into the run folder, and a resumed
run reads them from there.

XLA reads the flags when it creates its first client, so they must be set before any device is used.
This module does not import JAX.
"""

import importlib.metadata
import os
import re
import shlex
import sys
from collections.abc import MutableMapping
from pathlib import Path

from bacr_jax.config.schema import Config
from bacr_jax.errors import UserError

VARIABLE = "XLA_FLAGS"
# Flags for sums in a fixed order, and for kernels that are chosen without timing.
FIXED_ORDER = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
DUMP = "xla_gpu_dump_autotune_results_to"
LOAD = "xla_gpu_load_autotune_results_from"
# Values that XLA reads as true, because it parses its flags like TensorFlow.
_TRUE = ("", "true", "1")
# XLA's parser accepts "..." or '...' around a value, but no escapes inside.
_UNQUOTABLE = re.compile(r"[\"'\\\n]")


def _parse_flags(flags: str) -> dict[str, str]:
    """Returns the flags' values by name; like XLA, it takes the last value of a repeated flag."""
    values = {}
    for word in shlex.split(flags):
        name, _, value = word.lstrip("-").partition("=")
        values[name] = value
    return values


def choices_file(folder: Path, process: int = 0) -> Path:
    """Returns the file in which a run stores the kernels that XLA chose.

    Its name contains jaxlib's version, because another version has other kernels.
    """
    version = importlib.metadata.version("jaxlib")
    return folder / f"xla_choices-{version}-{process}.textproto"


def _is_complete(path: Path) -> bool:
    """True if a file of kernel choices is complete; XLA fails on a partial file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    opened = len(re.findall(r"^\w+ \{$", text, re.MULTILINE))
    closed = len(re.findall(r"^\}$", text, re.MULTILINE))
    return re.match(r"version: \d+\n", text) is not None and text[-1:] == "\n" and opened == closed


def _quoted(path: Path) -> str:
    """Returns an absolute path in the quotes that XLA's parser needs around blanks."""
    text = str(path.absolute())
    if _UNQUOTABLE.search(text):
        raise UserError(
            f"output.dir={ascii(str(path.parent))[1:-1]}: reproducible=true passes this path "
            "to XLA, which can't read quotes or backslashes; write another folder"
        )
    return f'"{text}"' if re.search(r"\s", text) else text


def _process(environment: MutableMapping[str, str]) -> int:
    """Returns the index of this process in the run, as `parallel.processes` does."""
    for name in ("JAX_PROCESS_ID", "SLURM_PROCID"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def flags_for(folder: Path, environment: MutableMapping[str, str]) -> str:
    """Returns the value of XLA_FLAGS for a reproducible run in `folder`, which need not exist yet.

    Flags of the environment stay and win.

    Raises:
      UserError: if a flag of the environment contradicts a reproducible run.
    """
    flags = environment.get(VARIABLE, "").strip()
    if flags and not flags.startswith("-"):
        raise UserError(
            f"{VARIABLE}: found the name of a file, {flags!r}, to which reproducible=true can't "
            "add flags; write the flags themselves"
        )
    try:
        current = _parse_flags(flags)
    except ValueError as error:
        raise UserError(f"{VARIABLE}: found {flags!r} ({error}); close every quote") from None
    for name in FIXED_ORDER:
        if current.get(name, "true").lower() not in _TRUE:
            raise UserError(
                f"{VARIABLE}: found --{name}={current[name]}, but reproducible=true needs true; "
                "remove the flag, or write reproducible=false"
            )
    wanted = {name: "true" for name in FIXED_ORDER if name not in current}
    if DUMP not in current and LOAD not in current:
        path = choices_file(folder, _process(environment))
        wanted[DUMP] = _quoted(path)
        if _is_complete(path):
            wanted[LOAD] = wanted[DUMP]
    added = [f"--{name}={value}" for name, value in wanted.items()]
    return " ".join([*filter(None, [flags]), *added])


def make_reproducible(config: Config, environment: MutableMapping[str, str] | None = None) -> None:
    """Sets XLA_FLAGS if the config has `reproducible: true`.

    Call this function before any device is used. The flags have no effect on CPUs.

    Args:
      environment: environment variables, changed in place; os.environ by default.
    """
    if not config.reproducible:
        return
    variables = os.environ if environment is None else environment
    flags = flags_for(Path(config.output.dir), variables)
    current = _parse_flags(variables.get(VARIABLE, ""))
    if gpus_in_use() and not set(FIXED_ORDER) <= current.keys():
        raise UserError(
            "reproducible=true: this process has used its GPUs already, and XLA reads its flags "
            f"once; start a new process, or set {VARIABLE}='{flags}' before"
        )
    variables[VARIABLE] = flags


def gpus_in_use() -> bool:
    """True if this process has started JAX on GPUs, after which XLA reads no flags."""
    # Looks the module up instead of importing it, because this must neither import JAX nor start a
    # backend.
    bridge = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", lambda: False)
    return bool(started()) and sys.modules["jax"].default_backend() == "gpu"
