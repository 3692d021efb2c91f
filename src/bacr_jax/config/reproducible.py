"""Sets the XLA flags for `reproducible: true`, which makes runs on GPUs bit-identical.

docs/reproducibility.md explains why results on GPUs otherwise differ in the last bits, and what
each flag changes. XLA still autotunes some kernels. It writes the autotuning results to a file in
the run folder, and a resumed run loads them from this file.

XLA reads its flags when it creates its first client, so they must be set before any device is used.
For the same reason this module does not import JAX.
"""

import importlib.metadata
import os
import re
import shlex
import sys
from collections.abc import MutableMapping
from pathlib import Path

from bacr_jax.errors import UserError

VARIABLE = "XLA_FLAGS"
# Flags that make reductions run in a fixed order, and that exclude nondeterministic kernels,
# whose selection would depend on measured times.
FIXED_ORDER = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
DUMP = "xla_gpu_dump_autotune_results_to"
LOAD = "xla_gpu_load_autotune_results_from"
# Values of a boolean flag that XLA's flag parser, which it shares with TensorFlow, reads as true.
_TRUE = ("", "true", "1")
# Characters that a path in XLA_FLAGS must not contain. XLA's flag parser accepts quotes around a
# value, but no escape sequences inside them.
_UNQUOTABLE = re.compile(r"[\"'\\\n]")


def _parse_flags(flags: str) -> dict[str, str]:
    """Parses XLA_FLAGS into a dict from flag name to value. As in XLA, the last value wins."""
    values = {}
    for word in shlex.split(flags):
        name, _, value = word.lstrip("-").partition("=")
        values[name] = value
    return values


def autotune_file(folder: Path, process: int = 0) -> Path:
    """Returns the path of the file in which a run stores XLA's autotuning results.

    The file name contains the jaxlib version, because the results are only valid for this version.

    Args:
      folder: the run folder.
      process: index of the process in a multi-process run.
    """
    version = importlib.metadata.version("jaxlib")
    return folder / f"xla_choices-{version}-{process}.textproto"


def _is_complete(path: Path) -> bool:
    """True if a file of autotuning results is complete. XLA fails if it loads a partial file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    opened = len(re.findall(r"^\w+ \{$", text, re.MULTILINE))
    closed = len(re.findall(r"^\}$", text, re.MULTILINE))
    return re.match(r"version: \d+\n", text) is not None and text[-1:] == "\n" and opened == closed


def _quoted(path: Path) -> str:
    """Returns the absolute path, quoted for XLA's flag parser if it contains whitespace.

    Raises:
      UserError: if the path contains a quote, a backslash or a line break.
    """
    text = str(path.absolute())
    if _UNQUOTABLE.search(text):
        raise UserError(
            f"output.dir={ascii(str(path.parent))[1:-1]}: with reproducible=true, this path is "
            "passed to XLA, which does not support quotes or backslashes in it; use another "
            "folder"
        )
    return f'"{text}"' if re.search(r"\s", text) else text


def _process(environment: MutableMapping[str, str]) -> int:
    """Returns the index of this process, from the same variables as `parallel.processes`."""
    for name in ("JAX_PROCESS_ID", "SLURM_PROCID"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def flags_for(folder: Path, environment: MutableMapping[str, str]) -> str:
    """Returns the value of XLA_FLAGS for a reproducible run.

    Flags that are already set in the environment are kept and take precedence.

    Args:
      folder: the run folder, which does not have to exist yet.
      environment: environment variables, which are not modified.

    Raises:
      UserError: if XLA_FLAGS is the name of a file with flags, can't be parsed, or disables a
        required flag.
    """
    flags = environment.get(VARIABLE, "").strip()
    if flags and not flags.startswith("-"):
        raise UserError(
            f"{VARIABLE}: {flags!r} is the name of a file with flags, to which reproducible=true "
            "can't add flags; set the variable to the flags themselves"
        )
    try:
        current = _parse_flags(flags)
    except ValueError as error:
        raise UserError(
            f"{VARIABLE}: the flags {flags!r} can't be parsed ({error}); close every quote"
        ) from None
    for name in FIXED_ORDER:
        if current.get(name, "true").lower() not in _TRUE:
            raise UserError(
                f"{VARIABLE} contains --{name}={current[name]}, but reproducible=true needs the "
                "value true; remove the flag, or set reproducible=false"
            )
    wanted = {name: "true" for name in FIXED_ORDER if name not in current}
    if DUMP not in current and LOAD not in current:
        path = autotune_file(folder, _process(environment))
        wanted[DUMP] = _quoted(path)
        if _is_complete(path):
            wanted[LOAD] = wanted[DUMP]
    added = [f"--{name}={value}" for name, value in wanted.items()]
    return " ".join([*filter(None, [flags]), *added])


def make_reproducible(
    reproducible: bool, folder: str, environment: MutableMapping[str, str] | None = None
) -> None:
    """Sets XLA_FLAGS if the config has `reproducible: true`.

    Must be called before any device is used. The flags have no effect on CPUs.

    Args:
      reproducible: `reproducible` of the config. False to do nothing.
      folder: the run folder, which does not have to exist yet.
      environment: environment variables, modified in place. Defaults to `os.environ`.

    Raises:
      UserError: if XLA_FLAGS contains conflicting flags, or if JAX has already initialized its GPUs
        without the required flags.
    """
    if not reproducible:
        return
    variables = os.environ if environment is None else environment
    flags = flags_for(Path(folder), variables)
    current = _parse_flags(variables.get(VARIABLE, ""))
    if gpus_in_use() and not set(FIXED_ORDER) <= current.keys():
        raise UserError(
            "reproducible=true: this process has already used its GPUs, and XLA reads its flags "
            f"only once; start a new process, or set {VARIABLE}='{flags}' before the start"
        )
    variables[VARIABLE] = flags


def gpus_in_use() -> bool:
    """True if JAX has already initialized its GPUs. XLA then ignores changes to XLA_FLAGS."""
    # Uses sys.modules instead of an import, because this function must neither import JAX nor
    # initialize a backend.
    bridge = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", lambda: False)
    return bool(started()) and sys.modules["jax"].default_backend() == "gpu"
