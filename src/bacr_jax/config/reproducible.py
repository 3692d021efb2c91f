"""`reproducible: true`: what XLA must be told, before it starts, for bit-identical runs on GPUs.

docs/reproducibility.md has the reasons for which GPUs give other last bits, and what each flag does
about them. Whatever XLA chose all the same is written into the run folder and read back when the
run goes on.

XLA reads the flags when its first client is made, so this must happen before any device is used. It
needs no JAX.
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
# Sums in a fixed order, and kernels chosen without a stopwatch.
FIXED_ORDER = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
DUMP, LOAD = "xla_gpu_dump_autotune_results_to", "xla_gpu_load_autotune_results_from"
# What XLA takes for true (its flags are parsed like those of TensorFlow).
_TRUE = ("", "true", "1")
# Read only: XLA's parser takes "..." or '...' around a value, and no escapes inside.
_UNQUOTABLE = re.compile(r"[\"'\\\n]")


def _given(flags: str) -> dict[str, str]:
    """Values by name, the last one where a flag is given twice: so XLA reads them."""
    found = {}
    for word in shlex.split(flags):
        name, _, value = word.lstrip("-").partition("=")
        found[name] = value
    return found


def choices_file(folder: Path, process: int = 0) -> Path:
    """Where a run keeps the kernels XLA chose; another XLA has other kernels to choose from."""
    version = importlib.metadata.version("jaxlib")
    return folder / f"xla_choices-{version}-{process}.textproto"


def _whole(path: Path) -> bool:
    """Whether a file of choices was written to its end; XLA would stop at half a one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    opened = len(re.findall(r"^\w+ \{$", text, re.MULTILINE))
    closed = len(re.findall(r"^\}$", text, re.MULTILINE))
    return re.match(r"version: \d+\n", text) is not None and text[-1:] == "\n" and opened == closed


def _quoted(path: Path) -> str:
    text = str(path.absolute())
    if _UNQUOTABLE.search(text):
        raise UserError(
            f"output.dir={ascii(str(path.parent))[1:-1]}: reproducible=true hands XLA this path, "
            "which can't read quotes or backslashes in it; write another folder"
        )
    return f'"{text}"' if re.search(r"\s", text) else text


def _process(environment: MutableMapping[str, str]) -> int:
    """Number of this process among those of the run, as `parallel.processes` finds it."""
    for name in ("JAX_PROCESS_ID", "SLURM_PROCID"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def flags_for(folder: Path, environment: MutableMapping[str, str]) -> str:
    """The value of XLA_FLAGS for a reproducible run, whose folder need not exist yet.

    Flags of the environment stay, and win where they don't contradict the request; else UserError.
    """
    flags = environment.get(VARIABLE, "").strip()
    if flags and not flags.startswith("-"):
        raise UserError(
            f"{VARIABLE}: found the name of a file, {flags!r}, to which reproducible=true can't "
            "add; write the flags themselves"
        )
    try:
        given = _given(flags)
    except ValueError as error:
        raise UserError(f"{VARIABLE}: found {flags!r} ({error}); close every quote") from None
    for name in FIXED_ORDER:
        if given.get(name, "true").lower() not in _TRUE:
            raise UserError(
                f"{VARIABLE}: found --{name}={given[name]}, but reproducible=true needs it; take "
                "it out, or write reproducible=false"
            )
    wanted = {name: "true" for name in FIXED_ORDER if name not in given}
    if DUMP not in given and LOAD not in given:
        path = choices_file(folder, _process(environment))
        wanted[DUMP] = _quoted(path)
        if _whole(path):
            wanted[LOAD] = wanted[DUMP]
    added = [f"--{name}={value}" for name, value in wanted.items()]
    return " ".join([*filter(None, [flags]), *added])


def make_reproducible(config: Config, environment: MutableMapping[str, str] | None = None) -> None:
    """Sets XLA_FLAGS if the config asks for a reproducible run; else does nothing.

    Call it before any device is used. CPUs need none of it and are not bothered by it. The
    environment is the process's own by default.
    """
    if not config.reproducible:
        return
    here = os.environ if environment is None else environment
    flags = flags_for(Path(config.output.dir), here)
    if gpus_in_use() and not set(FIXED_ORDER) <= _given(here.get(VARIABLE, "")).keys():
        raise UserError(
            "reproducible=true: this process has used its GPUs already, and XLA reads its flags "
            f"once; start a new one, or set {VARIABLE}='{flags}' before"
        )
    here[VARIABLE] = flags


def gpus_in_use() -> bool:
    """True if this process has started JAX on GPUs, after which XLA reads no flags."""
    # Looked up and not imported: importing JAX is for later, and starting a backend more so.
    bridge = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", lambda: False)
    return bool(started()) and sys.modules["jax"].default_backend() == "gpu"
