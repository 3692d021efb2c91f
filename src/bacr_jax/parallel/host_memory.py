"""Memory of the host that compiled programs use over and over.

XLA's CPU backend takes the temporaries of a program anew at every execution. glibc maps pieces of
more than 32 MiB for each of them and gives them back at its end, so the kernel clears every page of
them every time: a quarter of the processor time of a small run. What is taken by a thread of XLA's
own, as the temporaries of a large program are, can't be kept: there only larger pages help.
"""

import ctypes
import os
import platform
import sys
from pathlib import Path

import jax

# From glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
# What a user can set in glibc's place of these.
_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# Freed bytes at the end of the heap that stay with the process.
KEPT = 1 << 30
# A variable of the environment and a value: memory in pages of 2 MiB where the kernel has them on
# request. glibc reads it when a process starts.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The glibc that knows HUGE_PAGES. Models of 130 thousand parameters train as fast without, and one
# of 135 million takes a third longer.
_SINCE, _LARGE = (2, 35), 50_000_000


def keep_freed_memory() -> bool:
    """Has glibc hand out freed memory again rather than return it, where programs run on a CPU.

    Up to `KEPT` bytes that are free stay with the process. No number changes. False, and nothing
    done, with a GPU, with another C library, and where the environment has settings of its own.
    """
    own = any(name in os.environ for name in _SETTINGS)
    own |= os.environ.get(TUNABLES, HUGE_PAGES) != HUGE_PAGES
    if own or not sys.platform.startswith("linux") or jax.default_backend() != "cpu":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_MMAP_MAX, 0)) and bool(set_option(_TRIM_THRESHOLD, KEPT))


def lacks_huge_pages(num_parameters: int) -> bool:
    """Whether a model of this size would train faster on this CPU with `HUGE_PAGES` set.

    False where it is or can't be: with a GPU, another C library, a kernel that gives large pages
    always or never, and tunables that the user chose.
    """
    name, version = platform.libc_ver()
    if num_parameters < _LARGE or name != "glibc" or TUNABLES in os.environ:
        return False
    if tuple(map(int, version.split(".")[:2])) < _SINCE or not _KERNEL.is_file():
        return False
    return "[madvise]" in _KERNEL.read_text() and jax.default_backend() == "cpu"
