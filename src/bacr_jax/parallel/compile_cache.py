"""The folder of JAX's persistent compilation cache, so that a program is compiled only once.

JAX writes and finds the programs; this module chooses the folder and cleans it. Programs for CPUs
depend on the instructions and the number of threads of the machine that compiled them, which JAX's
keys do not contain. So there is a folder per kind of machine and version of jaxlib.

JAX writes a program directly into its final file, and never replaces an existing file. A process
that is killed while writing leaves an incomplete program, which would cause a warning and a new
compilation at every start. So programs written since the last start are checked once.
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

# Value of output.compile_cache that disables the cache.
OFF = "none"
# Limit on the folders of all machines together, in bytes. The programs of the quickstart are a few
# megabytes, the programs of a large model on GPUs some hundreds.
MAX_BYTES = 4 << 30
# Names of JAX's settings.
_DIR = "jax_compilation_cache_dir"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_ENABLED = "jax_enable_compilation_cache"
# Names of machines' folders begin, and names of program files end, with these.
_PREFIX = "xla-"
_SUFFIX = "-cache"
# Written to test a folder. Larger than what a file system stores together with a file's name.
_PROBE = bytes(1 << 16)
# Marker file. Its mtime is the time up to which all programs of its folder are checked.
_MARKER = "looked"
# Seconds after which a program file is no longer being written.
_WRITE_SECONDS = 60.0
# First bytes of a zstd file.
_ZSTD = b"\x28\xb5\x2f\xfd"
# Bytes that are unpacked at once.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class CacheFolder:
    """The folder of the compilation cache.

    Attributes:
      folder: None if the cache is disabled, or is at a URL.
      line: line for the user with the folder and the key that chose it.
      refused: True if the cache is enabled, but its folder can't be written.
    """

    folder: Path | None
    line: str
    refused: bool = False


def keep_programs(setting: str | None) -> CacheFolder:
    """Sets the folder of JAX's compilation cache. Call it before the first program is compiled.

    A folder that can't be written is not an error; programs are then compiled at every start.

    Args:
      setting: `output.compile_cache`: a folder, a URL that JAX supports, or "none" to disable the
        cache. None for JAX_COMPILATION_CACHE_DIR, or else a folder in the user's cache folder.
    """
    if not jax.config.values[_ENABLED]:
        return CacheFolder(None, f"compiled programs are not kept ({_ENABLED.upper()})")
    if setting == OFF:
        _set_jax_folder(None)
        return CacheFolder(None, f"compiled programs are not kept (output.compile_cache={OFF})")
    jax_folder = jax.config.values[_DIR] or os.environ.get(_DIR.upper())
    # A folder with this machine's name was set by this module, in an earlier run of this process.
    is_ours = setting is not None or not jax_folder or Path(jax_folder).name == machine_name()
    key = "output.compile_cache" if is_ours else _DIR.upper()
    base = setting if is_ours else jax_folder
    if base and "://" in base:
        url = f"{base.rstrip('/')}/{machine_name()}" if is_ours else base
        _set_jax_folder(url)
        return CacheFolder(None, f"compiled programs are kept in {url} ({key})")
    try:
        folder = (_user_folder() if base is None else Path(base).expanduser()).absolute()
        if is_ours:
            folder /= machine_name()
        _try_to_write(folder, 0o700 if is_ours else 0o777)
    except (OSError, RuntimeError) as error:
        _set_jax_folder(None)
        reason = getattr(error, "strerror", None) or str(error)
        path = getattr(error, "filename", None) or base or "in the home folder"
        line = (
            f"WARNING, {key}: can't be written ({path}: {reason}), so that every start compiles "
            f"anew; write another folder, or output.compile_cache={OFF}"
        )
        return CacheFolder(None, line, refused=True)
    delete_incomplete(folder)
    if is_ours:
        delete_oldest(folder.parent, MAX_BYTES)
        if _MIN_SECONDS.upper() not in os.environ:
            # Hundreds of small programs take most of the time of a start.
            jax.config.update(_MIN_SECONDS, 0.0)
    _set_jax_folder(str(folder))
    return CacheFolder(folder, f"compiled programs are kept in {folder} ({key})")


def _user_folder() -> Path:
    """Returns this package's folder in the user's cache folder, by the XDG specification.

    Raises:
      RuntimeError: the home folder is unknown.
    """
    xdg_folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification requires that relative paths are ignored.
    cache = xdg_folder if xdg_folder.is_absolute() else Path.home() / ".cache"
    return cache / "bacr_jax" / "compiled"


def machine_name() -> str:
    """Returns a name of what programs depend on: jaxlib, processor instructions and threads."""
    features = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        # The names on x86 and on ARM. All cores have the same line, so the first is enough.
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    # XLA divides a program's work into this number of parts.
    threads = processes.threads(os.environ)
    digest = hashlib.sha256(features.encode()).hexdigest()[:8]
    return f"{_PREFIX}{importlib.metadata.version('jaxlib')}-{digest}-{threads}"


def delete_oldest(base: Path, max_bytes: int) -> None:
    """Deletes the programs that were unused for longest, until `max_bytes` bytes are left.

    Only program files in the machines' folders of `base` are deleted. Other processes may do the
    same or read at the same time.
    """
    # jax_compilation_cache_max_size would do this, but JAX 0.10.2 then reads the time of every
    # stored program before each write, under a lock: 35 ms a write with 1,000 stored programs
    # instead of 0.05 ms (two cores of a Xeon), and a start writes hundreds. A process that is
    # killed between writing a program and its time would also make all later writes fail.
    newest_first = sorted(_programs(base), reverse=True)
    total = 0
    for _, size, path in newest_first:
        total += size
        if total > max_bytes:
            with contextlib.suppress(OSError):
                os.unlink(path)


def delete_incomplete(folder: Path) -> list[str]:
    """Deletes incomplete programs that were written since the last call, and returns their names.

    Programs of the last minute are left for the next call, because they may still be being written.
    The folder may be missing.
    """
    marker = folder / _MARKER
    deleted: list[str] = []
    # No OSError may stop a run: a program that can't be checked here is read by JAX, or is not.
    with contextlib.suppress(OSError):
        checked_until = marker.stat().st_mtime if marker.exists() else 0.0
        marker.touch()
        # The clock of the file system, which may differ from the clock of this machine.
        finished_before = marker.stat().st_mtime - _WRITE_SECONDS
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith(_SUFFIX):
                    continue
                # Another process may delete it at the same time.
                with contextlib.suppress(FileNotFoundError):
                    is_unchecked = checked_until < entry.stat().st_mtime <= finished_before
                    if is_unchecked and not _is_complete(Path(entry.path)):
                        os.unlink(entry.path)
                        deleted.append(entry.name)
        os.utime(marker, (finished_before, finished_before))
    return deleted


def _is_complete(program: Path) -> bool:
    """True if a stored program can be unpacked to its end."""
    with program.open("rb") as file:
        try:
            unpacker = _unpacker(file.read(len(_ZSTD)))
            file.seek(0)
            while chunk := file.read(_CHUNK):
                unpacker.decompress(chunk)
        except OSError:
            raise
        except Exception:  # Each of the three libraries has its own error, or is not installed.
            return False
    return bool(unpacker.eof)


def _unpacker(first_bytes: bytes) -> Any:
    """Returns a decompressor for a program file. JAX uses zstd if it is installed, else zlib."""
    if first_bytes != _ZSTD:
        return zlib.decompressobj()
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").ZstdDecompressor()
    return importlib.import_module("zstandard").ZstdDecompressor().decompressobj()


def _programs(base: Path) -> Iterator[tuple[float, int, str]]:
    """Yields the time of the last use, the size in bytes and the path of each stored program."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith(_SUFFIX):
                    continue
                with contextlib.suppress(OSError):
                    stat = entry.stat()
                    yield max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path


def _try_to_write(folder: Path, mode: int) -> None:
    """Creates the folder if it is missing, and writes to it.

    Raises:
      OSError: the disk is full, or permissions are missing.
    """
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(_PROBE)
        file.flush()


def _set_jax_folder(folder: str | None) -> None:
    """Sets JAX's cache to a folder or URL; None disables it."""
    if jax.config.values[_DIR] != folder:
        jax.config.update(_DIR, folder)
        # JAX opens its cache with the first program, and does not look at the setting again.
        compilation_cache.reset_cache()
