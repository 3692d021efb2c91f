"""Compiled programs kept on disk, so that the next start of the same work compiles nothing.

JAX keeps and finds them (its persistent compilation cache); here it is told where. Programs for
CPUs hold the instructions and the number of threads of the machine that compiled them, which JAX's
keys don't name, so they lie in a folder per kind of machine and version of jaxlib.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

# The value of output.compile_cache that turns it off.
OFF = "none"
# What the folders of all machines may hold together, in bytes; the quickstart's programs are a few
# megabytes, those of a large model on GPUs some hundreds.
MOST_KEPT = 4 << 30
_DIR, _LEAST_SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_ENABLED = "jax_enable_compilation_cache"
_PREFIX, _SUFFIX = "xla-", "-cache"
# More than a file system keeps beside a file's name.
_PROBE = bytes(1 << 16)


@dataclass(frozen=True)
class Kept:
    """What becomes of compiled programs.

    Attributes:
      folder: where they are kept; None: nowhere.
      line: says so.
      refused: they should have been kept, and can't be.
    """

    folder: Path | None
    line: str
    refused: bool = False


def keep_programs(setting: str | None) -> Kept:
    """Tells JAX where compiled programs are kept; call it before the first is compiled.

    Args:
      setting: `output.compile_cache`. None: where JAX_COMPILATION_CACHE_DIR says, or else in the
        user's cache folder; "none": nowhere.

    Returns:
      Where. A folder that can't be written is no error: programs are compiled anew then.
    """
    if not jax.config.values[_ENABLED]:
        return Kept(None, f"compiled programs are not kept ({_ENABLED.upper()})")
    if setting == OFF:
        _use(None)
        return Kept(None, f"compiled programs are not kept (output.compile_cache={OFF})")
    given = jax.config.values[_DIR] or os.environ.get(_DIR.upper())
    if setting is None and given and not _is_own(Path(given)):
        _use(Path(given))
        return Kept(Path(given), f"compiled programs are kept in {given} ({_DIR.upper()})")
    try:
        base = user_folder(os.environ) if setting is None else Path(setting).expanduser()
        folder = base.absolute() / machine_name()
        _try_to_write(folder)
    except (OSError, RuntimeError) as error:
        _use(None)
        reason = getattr(error, "strerror", None) or str(error)
        path = getattr(error, "filename", None) or setting
        return Kept(
            None,
            f"WARNING, output.compile_cache: can't be written ({path}: {reason}), so that every "
            f"start compiles anew; write another folder, or {OFF}",
            refused=True,
        )
    make_room(base.absolute(), MOST_KEPT)
    if _LEAST_SECONDS.upper() not in os.environ:
        # Hundreds of small programs are most of a start.
        jax.config.update(_LEAST_SECONDS, 0.0)
    _use(folder)
    return Kept(folder, f"compiled programs are kept in {folder} (output.compile_cache)")


def user_folder(environment: Mapping[str, str]) -> Path:
    """The folder of this user and this package, by the XDG base directories.

    Raises:
      RuntimeError: nobody knows the home folder.
    """
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    # The specification has relative paths ignored.
    cache = named if named.is_absolute() else Path.home() / ".cache"
    return cache / "bacr_jax" / "compiled"


def machine_name() -> str:
    """Names what a compiled program fits: jaxlib, the processor's abilities, cores in use."""
    abilities = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        # x86 and ARM call them differently; all cores have the same.
        abilities += next((x for x in lines if x.startswith(("flags", "Features"))), "")
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count()
    digest = hashlib.sha256(abilities.encode()).hexdigest()[:8]
    return f"{_PREFIX}{importlib.metadata.version('jaxlib')}-{digest}-{cores}"


def make_room(base: Path, most: int) -> None:
    """Removes the programs that were not used for longest, until `most` bytes are left.

    Several processes may do so at once, and others may be reading.

    Args:
      base: folder of the machines' folders; nothing else in it is touched.
      most: bytes.
    """
    found = sorted(_programs(base), reverse=True)
    kept = 0
    for _, size, path in found:
        kept += size
        if kept > most:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _programs(base: Path) -> Iterator[tuple[float, int, str]]:
    """When each kept program was last used, its bytes and its path."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(OSError):
                        stat = entry.stat()
                        yield max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path


def _is_own(folder: Path) -> bool:
    """Whether a folder is one that this module chose, perhaps for another run of this process."""
    return folder.name == machine_name()


def _try_to_write(folder: Path) -> None:
    """Makes the folder, for this user alone, and writes to it.

    Raises:
      OSError: no room, or no right.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(_PROBE)
        file.flush()


def _use(folder: Path | None) -> None:
    """Has JAX keep programs in a folder, or nowhere."""
    wanted = None if folder is None else str(folder)
    if jax.config.values[_DIR] != wanted:
        jax.config.update(_DIR, wanted)
        # JAX opens its cache with the first program, and asks once whether there is one.
        compilation_cache.reset_cache()
