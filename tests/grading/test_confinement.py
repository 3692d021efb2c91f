"""A confined process computes and reads; it writes, connects, starts and signals nothing."""

import os
import subprocess
import sys

import pytest

from bacr_grading import confinement

pytestmark = pytest.mark.skipif(not confinement.is_available(), reason="no seccomp on this machine")
# Runs a piece of code confined. Exit codes: 0 it ran, 1 it was not allowed to, 2 anything else.
PROGRAM = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
from bacr_grading import confinement

path = sys.argv[1]

def call(number, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "system call")

def in_a_thread(action):
    results = []
    def work():
        try:
            results.append(action())
        except PermissionError:
            results.append("refused")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]

confinement.confine()
try:
    exec(sys.argv[2])
except PermissionError:
    sys.exit(1)
except BaseException as error:
    print(repr(error), file=sys.stderr)
    sys.exit(2)
"""


def confined(code, path=""):
    """The exit code of a process that runs code confined."""
    command = [sys.executable, "-c", PROGRAM, str(path), code]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode in (0, 1), run.stderr
    return run.returncode


ALLOWED = {
    "computing": "assert sum(range(10**5)) > 0",
    "reading": "assert open(os.__file__).read()",
    "listing": "assert os.listdir('/')",
    "importing": "import colorsys",
    "a thread": "assert in_a_thread(lambda: 5) == 5",
    "an event loop": "import asyncio; assert asyncio.run(asyncio.sleep(0.001, 5)) == 5",
    "limits of its own": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "a timer": "signal.setitimer(signal.ITIMER_REAL, 5)",
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_computes_and_reads_goes_on(name):
    assert confined(ALLOWED[name]) == 0


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("as it was")
    return path


DENIED = {
    "writing": "open(path, 'w')",
    "appending": "open(path, 'a')",
    "making a file": "open(path + '.new', 'x')",
    "a file by its number alone": "call(2, path.encode(), os.O_RDWR, 0)",
    "truncating": "os.truncate(path, 0)",
    "removing": "os.unlink(path)",
    "renaming": "os.rename(path, path + '.old')",
    "linking": "os.link(path, path + '.link')",
    "a symbolic link": "os.symlink(path, path + '.link')",
    "a folder": "os.mkdir(path + '.d')",
    "rights": "os.chmod(path, 0o777)",
    "times": "os.utime(path, (0, 0))",
    "memory of the parent": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "its own memory as a file": "open('/proc/self/mem', 'r+b')",
    "a socket": "socket.socket()",
    "datagrams": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "a process": "os.fork()",
    "a program": "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "a subprocess": "subprocess.run([sys.executable, '-c', ''])",
    "a signal": "os.kill(os.getppid(), signal.SIGTERM)",
    "limits of the parent": "import resource; resource.prlimit(os.getppid(), 0, (1, 1))",
    "signals by a descriptor": "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "io_uring": "call(425, 8, 0)",
    "namespaces": "call(272, 0x10000000)",
    "tracing": "call(101, 16, os.getppid(), 0, 0)",
    "calls of another kind of program": "call(0x40000000 + 39)",
    "another filter": "confinement.confine()",
}


@pytest.mark.parametrize("name", DENIED)
def test_what_changes_anything_is_refused(name, file):
    assert confined(DENIED[name], file) == 1
    assert file.read_text() == "as it was"
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_a_shell_command_is_not_run(file):
    assert confined("os.system(f'touch {path}.new')", file) == 0
    assert not file.with_name("file.new").exists()


def test_rights_do_not_come_back_in_another_thread(file):
    assert confined("assert in_a_thread(lambda: open(path, 'w')) == 'refused'", file) == 0
    assert file.read_text() == "as it was"


def test_a_process_that_asks_for_it_ends_with_its_parent():
    program = """
import os, time
from bacr_grading import confinement
ready, writing = os.pipe()
if os.fork() == 0:
    confinement.end_with_parent()
    confinement.confine()
    os.write(writing, b"1")
    time.sleep(60)
os.read(ready, 1)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Its output is closed once the fork, which shares it, has ended.
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=30, check=True)
