"""Compiled programs kept on disk, so that the next start of the same work compiles nothing.

JAX keeps and finds them (its persistent compilation cache); here it is told where. Programs for
CPUs hold the instructions and the number of threads of the machine that compiled them, which JAX's
keys don't name, so they lie in a folder per kind of machine and version of jaxlib.

JAX writes a program straight into its place, and never replaces one that is there: half a program,
left by a process that was killed while it wrote, would be warned of and compiled anew at every
start. So those that were written since the last start are looked at once.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from bacr_jax.parallel import processes

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
# Its time says up to when all programs of its folder are known to be whole.
_LOOKED = "looked"
# Seconds after which nobody is still writing a program.
_SETTLED = 60.0
_ZSTD, _PIECE = b"\x28\xb5\x2f\xfd", 1 << 20


@dataclass(frozen=True)
class Kept:
    """The folder in which compiled programs are kept, if in one, and a line that says where.

    `refused`: they should have been kept, and can't be.
    """

    folder: Path | None
    line: str
    refused: bool = False


def keep_programs(setting: str | None) -> Kept:
    """Tells JAX where compiled programs are kept; call it before the first is compiled.

    `setting` is `output.compile_cache`. None: where JAX_COMPILATION_CACHE_DIR says, or else in the
    user's cache folder; "none": nowhere. A URL is left to JAX. A folder that can't be written is
    no error: programs are compiled anew then.
    """
    if not jax.config.values[_ENABLED]:
        return Kept(None, f"compiled programs are not kept ({_ENABLED.upper()})")
    if setting == OFF:
        _use(None)
        return Kept(None, f"compiled programs are not kept (output.compile_cache={OFF})")
    given = jax.config.values[_DIR] or os.environ.get(_DIR.upper())
    # Another run of this process may have set this module's own.
    own = setting is not None or not given or Path(given).name == machine_name()
    key, base = ("output.compile_cache", setting) if own else (_DIR.upper(), given)
    if base and "://" in base:
        url = f"{base.rstrip('/')}/{machine_name()}" if own else base
        _use(url)
        return Kept(None, f"compiled programs are kept in {url} ({key})")
    try:
        folder = (_user_folder() if base is None else Path(base).expanduser()).absolute()
        folder /= machine_name() if own else ""
        _try_to_write(folder, 0o700 if own else 0o777)
    except (OSError, RuntimeError) as error:
        _use(None)
        reason = getattr(error, "strerror", None) or str(error)
        path = getattr(error, "filename", None) or base or "in the home folder"
        return Kept(
            None,
            f"WARNING, {key}: can't be written ({path}: {reason}), so that every start compiles "
            f"anew; write another folder, or output.compile_cache={OFF}",
            refused=True,
        )
    drop_torn(folder)
    if own:
        make_room(folder.parent, MOST_KEPT)
        if _LEAST_SECONDS.upper() not in os.environ:
            # Hundreds of small programs are most of a start.
            jax.config.update(_LEAST_SECONDS, 0.0)
    _use(str(folder))
    return Kept(folder, f"compiled programs are kept in {folder} ({key})")


def _user_folder() -> Path:
    """This user's and package's folder, by XDG; RuntimeError: nobody knows the home folder."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification has relative paths ignored.
    cache = named if named.is_absolute() else Path.home() / ".cache"
    return cache / "bacr_jax" / "compiled"


def machine_name() -> str:
    """Names what a compiled program fits: jaxlib, the processor's abilities, threads in use."""
    abilities = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        # x86 and ARM call them differently; all cores have the same.
        abilities += next((x for x in lines if x.startswith(("flags", "Features"))), "")
    # XLA splits a program's work over that many.
    threads = processes.threads(os.environ)
    digest = hashlib.sha256(abilities.encode()).hexdigest()[:8]
    return f"{_PREFIX}{importlib.metadata.version('jaxlib')}-{digest}-{threads}"


def make_room(base: Path, most: int) -> None:
    """Removes the programs that were not used for longest, until `most` bytes are left.

    Removes files in the machines' folders of `base` only. Several processes may do so at once, and
    others may be reading.
    """
    # Not by jax_compilation_cache_max_size, because JAX 0.10.2 then reads the time of every kept
    # program before it writes one, under a lock: 35 ms a write with 1,000 programs kept, instead of
    # 0.05 ms (a Xeon's two cores), and a start writes hundreds. A process that is killed between
    # a program and its time would also make all later writes fail.
    found = sorted(_programs(base), reverse=True)
    kept = 0
    for _, size, path in found:
        kept += size
        if kept > most:
            with contextlib.suppress(OSError):
                os.unlink(path)


def drop_torn(folder: Path) -> list[str]:
    """Removes programs written by half since this was last called, and gives their names.

    Those of the last minute are left for the next call: they may be being written. The folder need
    not be there, nor be one of files.
    """
    looked, torn = folder / _LOOKED, []
    # No OSError is worth a run: what can't be looked at is read by JAX, or not.
    with contextlib.suppress(OSError):
        since = looked.stat().st_mtime if looked.exists() else 0.0
        looked.touch()
        # The file system's own clock, which may not be this machine's.
        settled = looked.stat().st_mtime - _SETTLED
        with os.scandir(folder) as entries:
            for entry in entries:
                # Another process may do the same.
                with contextlib.suppress(FileNotFoundError):
                    written = entry.stat().st_mtime if entry.name.endswith(_SUFFIX) else since
                    if since < written <= settled and not _is_whole(Path(entry.path)):
                        os.unlink(entry.path)
                        torn.append(entry.name)
        os.utime(looked, (settled, settled))
    return torn


def _is_whole(program: Path) -> bool:
    """Whether a kept program can be unpacked to its end."""
    with program.open("rb") as file:
        try:
            packed = _unpacker(file.read(len(_ZSTD)))
            file.seek(0)
            for piece in iter(lambda: file.read(_PIECE), b""):
                packed.decompress(piece)
        except OSError:
            raise
        except Exception:  # each of the three libraries has its own, if it is there at all
            return False
    return bool(packed.eof)


def _unpacker(start: bytes) -> Any:
    """What unpacks a program that starts so; JAX packs with zstd where it is installed."""
    if start != _ZSTD:
        return zlib.decompressobj()
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").ZstdDecompressor()
    return importlib.import_module("zstandard").ZstdDecompressor().decompressobj()


def _programs(base: Path) -> Iterator[tuple[float, int, str]]:
    """When each kept program was last used, its bytes and its path."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(OSError):
                        stat = entry.stat()
                        yield max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path


def _try_to_write(folder: Path, mode: int) -> None:
    """Makes the folder, if it is not there, and writes to it; OSError: no room, or no right."""
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(_PROBE)
        file.flush()


def _use(wanted: str | None) -> None:
    """Has JAX keep programs in a folder or at a URL, or nowhere."""
    if jax.config.values[_DIR] != wanted:
        jax.config.update(_DIR, wanted)
        # JAX opens its cache with the first program, and asks once whether there is one.
        compilation_cache.reset_cache()
