"""Configures the host allocator to reuse memory, which speeds up small runs on CPUs.

XLA's CPU backend allocates temporary buffers at every execution of a program. For each block of
more than 32 MiB, glibc maps new memory and unmaps it afterwards, so the kernel has to clear all
pages every time. This takes a quarter of the CPU time of a small run. Memory that is allocated by
XLA's own threads, such as the temporary buffers of a large program, can't be retained. For such
memory, only larger pages help.
"""

import ctypes
import os
import platform
import sys
from pathlib import Path

import jax

# Parameters of mallopt, from glibc's <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
# Environment variables with which users set the same parameters.
_MALLOC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# Maximum number of free bytes at the end of the heap that are retained by the process.
RETAINED_BYTES = 1 << 30
# Number of free bytes above which `return_freed_memory` returns them. Small models always have
# fewer free bytes, so their memory is always reused.
RETURNED_BYTES = 1 << 31
# Environment variable and value that request pages of 2 MiB, if the kernel provides them on
# request. glibc reads the variable when a process starts.
TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
_KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# First version of glibc that supports `HUGE_PAGES`.
_MIN_GLIBC = (2, 35)
# Minimum number of parameters for which large pages help. Without large pages, a model with 130
# thousand parameters trains equally fast, but a model with 135 million parameters takes a third
# longer.
_LARGE_MODEL = 50_000_000


class _Mallinfo(ctypes.Structure):
    """Statistics of glibc's allocator: struct mallinfo2 of <malloc.h>.

    Attributes:
      fordblks: number of free bytes in all heaps.
    """

    _fields_ = [
        ("first_fields", ctypes.c_size_t * 8),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def keep_freed_memory() -> bool:
    """Configures glibc to reuse freed memory instead of returning it, if programs run on a CPU.

    Up to `RETAINED_BYTES` free bytes stay with the process. The results of programs do not change.

    Returns:
      True if the allocator was configured. False with a GPU, with another C library, or if the
      environment already configures the allocator.
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


def return_freed_memory() -> None:
    """Returns freed memory to the kernel if a CPU run has more than `RETURNED_BYTES` of it.

    Blocks of several GB are freed after rollouts and after updates. If a small block inside the
    freed memory is still used, the next large block does not fit there, and the heap grows. Without
    this call, the process would keep the memory of both.
    """
    if not sys.platform.startswith("linux") or jax.default_backend() != "cpu":
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return
    library.mallinfo2.restype = _Mallinfo
    if library.mallinfo2().fordblks > RETURNED_BYTES:
        library.malloc_trim(0)


def lacks_huge_pages(num_parameters: int) -> bool:
    """True if a model of this size would train faster on this CPU with `HUGE_PAGES` set.

    Returns False for small models, with a GPU, with another C library than glibc, with a kernel
    that provides large pages always or never, and if the user has set GLIBC_TUNABLES.
    """
    library, version = platform.libc_ver()
    if num_parameters < _LARGE_MODEL or library != "glibc" or TUNABLES in os.environ:
        return False
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if major_minor < _MIN_GLIBC or not _KERNEL_SETTING.is_file():
        return False
    provides_on_request = "[madvise]" in _KERNEL_SETTING.read_text()
    return provides_on_request and jax.default_backend() == "cpu"
