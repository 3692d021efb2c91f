"""Manages the folder of JAX's persistent compilation cache.

JAX writes and looks up the compiled programs. This module selects and cleans the folder. Programs
for CPUs depend on the instruction set and the number of threads of the machine that compiled them,
which are not part of JAX's cache keys. Therefore each type of machine and each version of jaxlib
has a separate folder.

JAX writes a program directly to its final path and never replaces an existing file. If a process is
killed while writing, it leaves an incomplete program, which would cause a warning and a
recompilation at every start. Therefore all programs written since the last start are checked once.
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

# Value of `output.compile_cache` that disables the cache.
OFF = "none"
# Maximum total size of the folders of all machines in bytes. The programs of the quickstart take a
# few megabytes, and the programs of a large model on GPUs a few hundred megabytes.
MAX_BYTES = 4 << 30
# Names of JAX's config options.
_DIR = "jax_compilation_cache_dir"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_ENABLED = "jax_enable_compilation_cache"
# Prefix of the machines' folder names, and suffix of program file names.
_PREFIX = "xla-"
_SUFFIX = "-cache"
# Content for testing whether a folder is writable. It is larger than the data that some file
# systems store inline with the file name.
_PROBE = bytes(1 << 16)
# Name of a marker file. All programs of its folder that were written before its mtime are checked.
_MARKER = "looked"
# Age in seconds after which a program file is assumed to be completely written.
_WRITE_SECONDS = 60.0
# Magic number of the zstd format.
_ZSTD = b"\x28\xb5\x2f\xfd"
# Number of bytes that are decompressed at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class CacheFolder:
    """The folder of the compilation cache.

    Attributes:
      folder: the folder, or None if the cache is disabled or stored at a URL.
      line: message for the user with the folder and the setting that selected it.
      refused: True if the cache is enabled but its folder is not writable.
    """

    folder: Path | None
    line: str
    refused: bool = False


def keep_programs(setting: str | None) -> CacheFolder:
    """Sets the folder of JAX's compilation cache, so that later runs start faster.

    Call it before the first program is compiled. If the folder is not writable, no error is raised,
    and programs are compiled at every start.

    The folder JAX_COMPILATION_CACHE_DIR has no maximum size, because other projects may share it,
    and their programs must not be deleted. JAX limits it if JAX_COMPILATION_CACHE_MAX_SIZE is set.

    Args:
      setting: value of `output.compile_cache`: a folder, a URL that JAX supports, or "none" to
        disable the cache. None selects JAX_COMPILATION_CACHE_DIR if it is set, and otherwise a
        folder in the user's cache folder.
    """
    if not jax.config.values[_ENABLED]:
        return CacheFolder(None, f"compiled programs are not cached ({_ENABLED.upper()})")
    if setting == OFF:
        _set_jax_folder(None)
        return CacheFolder(None, f"compiled programs are not cached (output.compile_cache={OFF})")
    jax_folder = jax.config.values[_DIR] or os.environ.get(_DIR.upper())
    # A folder with this machine's name was set by an earlier call of this function in this
    # process.
    is_ours = setting is not None or not jax_folder or Path(jax_folder).name == machine_name()
    key = "output.compile_cache" if is_ours else _DIR.upper()
    base = setting if is_ours else jax_folder
    if base and "://" in base:
        url = f"{base.rstrip('/')}/{machine_name()}" if is_ours else base
        _set_jax_folder(url)
        return CacheFolder(None, f"compiled programs are cached in {url} ({key})")
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
            f"WARNING, {key}: the folder of compiled programs can't be written ({path}: "
            f"{reason}), so they are compiled again at every start; use another folder, or "
            f"output.compile_cache={OFF}"
        )
        return CacheFolder(None, line, refused=True)
    delete_incomplete(folder)
    if is_ours:
        delete_oldest(folder.parent, MAX_BYTES)
        if _MIN_SECONDS.upper() not in os.environ:
            # Cache all programs, because compiling hundreds of small programs dominates
            # the startup time.
            jax.config.update(_MIN_SECONDS, 0.0)
    _set_jax_folder(str(folder))
    return CacheFolder(folder, f"compiled programs are cached in {folder} ({key})")


def _user_folder() -> Path:
    """Returns this package's folder in the user's cache folder, following the XDG specification.

    Raises:
      RuntimeError: the home folder is unknown.
    """
    xdg_folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification requires relative paths to be ignored.
    cache = xdg_folder if xdg_folder.is_absolute() else Path.home() / ".cache"
    return cache / "bacr_jax" / "compiled"


def machine_name() -> str:
    """Returns a name for everything that compiled CPU programs depend on.

    The name contains the version of jaxlib, a digest of the processor's instruction set, and the
    number of threads.
    """
    features = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        # The field is named "flags" on x86 and "Features" on ARM. It is the same for all
        # cores, so only the first line is read.
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    # XLA partitions the work of a program by the number of threads.
    threads = processes.threads(os.environ)
    digest = hashlib.sha256(features.encode()).hexdigest()[:8]
    return f"{_PREFIX}{importlib.metadata.version('jaxlib')}-{digest}-{threads}"


def delete_oldest(base: Path, max_bytes: int) -> None:
    """Deletes the least recently used programs until at most `max_bytes` bytes remain.

    Only program files in the machines' folders in `base` are deleted. Other processes may delete or
    read files at the same time.
    """
    # The JAX option jax_compilation_cache_max_size does the same. But JAX 0.10.2 then reads the
    # access times of all stored programs before each write, under a lock. With 1,000 stored
    # programs, a write takes 35 ms instead of 0.05 ms (on two Xeon cores), and a start writes
    # hundreds of programs. Furthermore, if a process is killed between writing a program and
    # its access time, all later writes fail.
    newest_first = sorted(_programs(base), reverse=True)
    total = 0
    for _, size, path in newest_first:
        total += size
        if total > max_bytes:
            with contextlib.suppress(OSError):
                os.unlink(path)


def delete_incomplete(folder: Path) -> list[str]:
    """Deletes incomplete programs that were written since the last call, and returns their names.

    Programs written in the last minute are skipped until the next call, because they may be
    incomplete only temporarily. The folder may be missing.
    """
    marker = folder / _MARKER
    deleted: list[str] = []
    # An OSError must not stop a run. A program that can't be checked here may still be readable
    # by JAX.
    with contextlib.suppress(OSError):
        checked_until = marker.stat().st_mtime if marker.exists() else 0.0
        marker.touch()
        # Use the clock of the file system, which may differ from the clock of this machine.
        finished_before = marker.stat().st_mtime - _WRITE_SECONDS
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith(_SUFFIX):
                    continue
                # Another process may delete the file at the same time.
                with contextlib.suppress(FileNotFoundError):
                    is_unchecked = checked_until < entry.stat().st_mtime <= finished_before
                    if is_unchecked and not _is_complete(Path(entry.path)):
                        os.unlink(entry.path)
                        deleted.append(entry.name)
        os.utime(marker, (finished_before, finished_before))
    return deleted


def _is_complete(program: Path) -> bool:
    """True if a stored program can be decompressed completely."""
    with program.open("rb") as file:
        try:
            unpacker = _unpacker(file.read(len(_ZSTD)))
            file.seek(0)
            while chunk := file.read(_CHUNK):
                unpacker.decompress(chunk)
        except OSError:
            raise
        except Exception:  # The libraries raise different exceptions, or are not installed.
            return False
    return bool(unpacker.eof)


def _unpacker(first_bytes: bytes) -> Any:
    """Returns a decompressor for a program file. JAX uses zstd if installed, otherwise zlib."""
    if first_bytes != _ZSTD:
        return zlib.decompressobj()
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").ZstdDecompressor()
    return importlib.import_module("zstandard").ZstdDecompressor().decompressobj()


def _programs(base: Path) -> Iterator[tuple[float, int, str]]:
    """Yields the time of last use, the size in bytes and the path of each stored program."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith(_SUFFIX):
                    continue
                with contextlib.suppress(OSError):
                    stat = entry.stat()
                    yield max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path


def _try_to_write(folder: Path, mode: int) -> None:
    """Creates a folder if it is missing, and writes a temporary file to it.

    Raises:
      OSError: the disk is full or a permission is missing.
    """
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(_PROBE)
        file.flush()


def _set_jax_folder(folder: str | None) -> None:
    """Sets JAX's cache to a folder or URL. None disables the cache."""
    if jax.config.values[_DIR] != folder:
        jax.config.update(_DIR, folder)
        # JAX opens its cache when it compiles the first program, and does not read the
        # option again.
        compilation_cache.reset_cache()
