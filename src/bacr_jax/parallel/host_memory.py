"""Lets compiled programs reuse host memory, which makes small runs on CPUs faster.

XLA's CPU backend allocates the temporaries of a program at every execution. glibc maps blocks of
more than 32 MiB for each of them and returns them at its end, so the kernel clears all their pages
every time: a quarter of the processor time of a small run. Memory that XLA's own threads allocate,
as for the temporaries of a large program, can't be retained; for them only larger pages help.
"""

import ctypes
import os
import platform
import sys
from pathlib import Path

import jax

# Options of mallopt, from glibc's <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
# Environment variables with which a user sets the same options.
_MALLOC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# Freed bytes at the end of the heap that remain with the process.
RETAINED_BYTES = 1 << 30
# Environment variable and its value for pages of 2 MiB, if the kernel provides them on request.
# glibc reads the variable when a process starts.
TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
_KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# First glibc with HUGE_PAGES.
_MIN_GLIBC = (2, 35)
# Parameters from which large pages help. A model of 130 thousand parameters trains as fast without
# them; a model of 135 million parameters takes a third longer without them.
_LARGE_MODEL = 50_000_000


def keep_freed_memory() -> bool:
    """Configures glibc to reuse freed memory instead of returning it, if programs run on a CPU.

    Up to `RETAINED_BYTES` free bytes remain with the process. No result of a program changes.

    Returns:
      False if nothing was configured: with a GPU, with another C library, and if the environment
      has its own settings.
    """
    is_configured = any(name in os.environ for name in _MALLOC_VARIABLES)
    has_tunables = os.environ.get(TUNABLES, HUGE_PAGES) != HUGE_PAGES
    if is_configured or has_tunables or not sys.platform.startswith("linux"):
        return False
    if jax.default_backend() != "cpu":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_MMAP_MAX, 0)) and bool(set_option(_TRIM_THRESHOLD, RETAINED_BYTES))


def lacks_huge_pages(num_parameters: int) -> bool:
    """True if a model of this size would train faster on this CPU with `HUGE_PAGES` set.

    False with a GPU, with another C library, with a kernel that provides large pages always or
    never, and if the user has chosen tunables.
    """
    library, version = platform.libc_ver()
    if num_parameters < _LARGE_MODEL or library != "glibc" or TUNABLES in os.environ:
        return False
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if major_minor < _MIN_GLIBC or not _KERNEL_SETTING.is_file():
        return False
    provides_on_request = "[madvise]" in _KERNEL_SETTING.read_text()
    return provides_on_request and jax.default_backend() == "cpu"
