"""A confined process computes and reads; it writes, connects, starts and signals nothing."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bacr_grading import confinement

pytestmark = pytest.mark.skipif(not confinement.is_available(), reason="no seccomp on this machine")


def confined(action):
    """What a confined fork of this process makes of a call: its end's status."""
    child = os.fork()
    if child == 0:
        try:
            confinement.confine()
            action()
            os._exit(0)
        except PermissionError:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def system_call(number, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, *arguments) < 0:
        raise PermissionError(ctypes.get_errno()) if ctypes.get_errno() == 1 else OSError


def in_a_thread():
    thread = threading.Thread(target=sum, args=([1, 2],))
    thread.start()
    thread.join()


def in_an_event_loop():
    import asyncio

    assert asyncio.run(asyncio.sleep(0.001, 5)) == 5


ALLOWED = {
    "computing": lambda: sum(range(10**5)),
    "reading": lambda: Path(os.__file__).read_bytes(),
    "listing": lambda: os.listdir("/"),
    "importing": lambda: __import__("colorsys"),
    "a thread": in_a_thread,
    "an event loop": in_an_event_loop,
    "the time": time.time,
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
    "writing": lambda path: path.write_text("other"),
    "appending": lambda path: os.open(path, os.O_WRONLY | os.O_APPEND),
    "making a file": lambda path: os.open(f"{path}.new", os.O_CREAT),
    "truncating": lambda path: os.truncate(path, 0),
    "removing": lambda path: os.unlink(path),
    "renaming": lambda path: os.rename(path, f"{path}.old"),
    "linking": lambda path: os.link(path, f"{path}.link"),
    "a symbolic link": lambda path: os.symlink(path, f"{path}.link"),
    "a folder": lambda path: os.mkdir(f"{path}.d"),
    "rights": lambda path: os.chmod(path, 0o777),
    "times": lambda path: os.utime(path, (0, 0)),
    "memory of the parent": lambda path: os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR),
    "a socket": lambda path: socket.socket(),
    "datagrams": lambda path: socket.socketpair(type=socket.SOCK_DGRAM),
    "a process": lambda path: os.fork(),
    "a program": lambda path: os.execv(sys.executable, [sys.executable, "-c", ""]),
    "a subprocess": lambda path: subprocess.run([sys.executable, "-c", ""]),
    "a signal": lambda path: os.kill(os.getppid(), signal.SIGTERM),
    "limits of the parent": lambda path: __import__("resource").prlimit(os.getppid(), 0, (1, 1)),
    "signals by a descriptor": lambda path: __import__("fcntl").fcntl(0, 8, os.getppid()),
    "io_uring": lambda path: system_call(425, 8, 0),
    "namespaces": lambda path: system_call(272, 0x10000000),
    "tracing": lambda path: system_call(101, 16, os.getppid(), 0, 0),
}


@pytest.mark.parametrize("name", DENIED)
def test_what_changes_anything_is_refused(name, file):
    assert confined(lambda: DENIED[name](file)) == 1
    assert file.read_text() == "as it was"
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_a_shell_command_is_not_run(file):
    assert confined(lambda: os.system(f"touch {file}.new")) == 0
    assert not file.with_name("file.new").exists()


def test_rights_do_not_come_back_in_another_thread_or_by_another_filter(file):
    def again():
        confinement.confine()

    assert confined(again) == 1
    outcome = []

    def write():
        try:
            file.write_text("other")
        except PermissionError:
            outcome.append("refused")

    def in_another_thread():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert outcome == ["refused"]

    assert confined(in_another_thread) == 0


def test_a_confined_process_ends_with_its_parent():
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            confinement.end_with_parent()
            confinement.confine()
            os.write(writing, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(reading, 1)
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(writing)
    # The end of the pipe comes with the end of the process.
    assert os.read(reading, 1) == b""
    os.close(reading)
