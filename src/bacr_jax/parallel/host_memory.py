"""Memory of the host that compiled programs use over and over.

XLA's CPU backend takes the temporaries of a program anew at every execution. glibc maps pieces of
more than 32 MiB for each of them and gives them back at its end, so the kernel clears every page of
them every time: a quarter of the processor time of a small run.
"""

import ctypes
import os
import sys

import jax

# From glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
# What a user can set in glibc's place of these.
_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# Freed bytes at the end of the heap that stay with the process.
KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Has glibc hand out freed memory again rather than return it, where programs run on a CPU.

    Up to `KEPT` bytes that are free stay with the process. No number changes. False, and nothing
    done, with a GPU, with another C library, and where the environment has settings of its own.
    """
    own = any(name in os.environ for name in _SETTINGS) or "GLIBC_TUNABLES" in os.environ
    if own or not sys.platform.startswith("linux") or jax.default_backend() != "cpu":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_MMAP_MAX, 0)) and bool(set_option(_TRIM_THRESHOLD, KEPT))
