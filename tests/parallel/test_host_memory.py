"""Freed memory is used again, unless the environment says otherwise."""

import os
import platform
import subprocess
import sys

import jax
import pytest

from bacr_jax.parallel import host_memory

# Writes to 40 MiB and frees them, thirty times; prints what the setting said and the pages that
# the kernel had to give.
PROGRAM = """
import resource
from bacr_jax.parallel.host_memory import keep_freed_memory
pages = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
kept = keep_freed_memory()
bytearray(b"x") * (40 << 20)
before = pages()
for _ in range(30):
    bytearray(b"x") * (40 << 20)
print(kept, pages() - before)
"""


def run(**environment):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, pages = found.stdout.split()
    return kept == "True", int(pages)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's own settings")
@pytest.mark.slow  # two processes that import JAX
def test_pages_are_given_once():
    pages_each = (40 << 20) // os.sysconf("SC_PAGESIZE")
    kept, pages = run()
    assert kept
    assert pages < pages_each
    kept, pages = run(GLIBC_TUNABLES=host_memory.HUGE_PAGES)
    assert kept
    assert pages < pages_each
    assert not run(GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0]
    # The default of glibc, said aloud: everything goes back.
    kept, pages = run(MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept
    assert pages > 20 * pages_each


# Frees 320 MiB in blocks with small blocks between them; prints how many MiB the process had before
# and after the freed memory was returned.
HOLES = """
import sys
from bacr_jax.parallel import host_memory
host_memory.keep_freed_memory()
host_memory.RETURNED_BYTES = int(sys.argv[1])
status = lambda: next(x for x in open("/proc/self/status") if x.startswith("VmRSS"))
resident = lambda: int(status().split()[1]) >> 10
blocks = [bytes(100_000) if i % 2 else bytearray(b"x") * (40 << 20) for i in range(16)]
blocks = blocks[1::2]
before = resident()
host_memory.return_freed_memory()
print(before, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's own settings")
@pytest.mark.slow  # two processes that import JAX
def test_much_freed_memory_is_returned_although_small_blocks_lie_between():
    for limit, least_returned in ((100 << 20, 250), (1 << 31, None)):
        found = subprocess.run(
            [sys.executable, "-c", HOLES, str(limit)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        before, after = map(int, found.stdout.split())
        returned = before - after
        assert returned > least_returned if least_returned else abs(returned) < 5


def test_nothing_is_set_with_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: pytest.fail("asked"))
    assert not host_memory.keep_freed_memory()


@pytest.mark.parametrize(
    "kernel, libc, tunables, backend, parameters, lacks",
    [
        ("always [madvise] never", "2.36", None, "cpu", 135_000_000, True),
        ("always [madvise] never", "2.36", None, "cpu", 130_000, False),
        ("always [madvise] never", "2.36", None, "gpu", 135_000_000, False),
        ("always [madvise] never", "2.36", host_memory.HUGE_PAGES, "cpu", 135_000_000, False),
        ("always [madvise] never", "2.31", None, "cpu", 135_000_000, False),
        ("[always] madvise never", "2.36", None, "cpu", 135_000_000, False),
        (None, "2.36", None, "cpu", 135_000_000, False),
    ],
)
def test_who_is_told_of_huge_pages(
    monkeypatch, tmp_path, kernel, libc, tunables, backend, parameters, lacks
):
    file = tmp_path / "enabled"
    if kernel is not None:
        file.write_text(kernel)
    monkeypatch.setattr(host_memory, "_KERNEL_SETTING", file)
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("glibc", libc))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if tunables is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    assert host_memory.lacks_huge_pages(parameters) is lacks
