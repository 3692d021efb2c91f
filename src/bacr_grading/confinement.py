"""Takes away a process's rights for good, so that it can run code which reads untrusted text.

A seccomp filter of the Linux kernel lets a list of system calls through and refuses every other one
(EPERM): the process computes, reads files and answers through descriptors that are already open.
It opens no file for writing, no socket, starts no process and signals none. Needs no privileges
and no user namespace, so that it works as root and in most containers. Standard library only.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator

# Numbers of a system call for x86_64 and aarch64 (asm/unistd_64.h, asm-generic/unistd.h); None: it
# has none.
_Numbers = tuple[int | None, int | None]
_ALLOWED: dict[str, _Numbers] = {
    # Open descriptors, and files for reading.
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "close": (3, 57),
    "close_range": (436, 436),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "stat": (4, None),
    "lstat": (6, None),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    # Memory.
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "brk": (12, 214),
    "membarrier": (324, 283),
    # Threads and what a process may know and do about itself.
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "gettid": (186, 178),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "setitimer": (38, 103),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getrandom": (318, 278),
    # Time.
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    # An event loop's (asyncio).
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
}
_NOT_FOR_READING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ANY_BIT = 0xFFFFFFFF
_CLONE_THREAD, _FIONBIO, _FIOCLEX = 0x10000, 0x5421, 0x5451
# Allowed if the argument of this index has none of these bits.
_WITHOUT: dict[str, tuple[_Numbers, int, int]] = {
    "open": ((2, None), 1, _NOT_FOR_READING),
    "openat": ((257, 56), 2, _NOT_FOR_READING),
    # Of its own limits: another process would be ended by new ones.
    "prlimit64": ((302, 261), 0, _ANY_BIT),
    # Copies and flags of descriptors; F_SETOWN would have a signal sent to another process.
    "fcntl": ((72, 25), 1, _ANY_BIT ^ 0x7),
    # Streams: a datagram could be sent to any socket of the machine.
    "socketpair": ((53, 199), 1, 0xE),
}
# Allowed if the argument of this index has this bit.
_WITH: dict[str, tuple[_Numbers, int, int]] = {"clone": ((56, 220), 0, _CLONE_THREAD)}
# Allowed if the argument of this index is one of these.
_AMONG: dict[str, tuple[_Numbers, int, tuple[int, ...]]] = {
    "ioctl": ((16, 29), 1, (_FIONBIO, _FIOCLEX))
}
# The C library tries this first, whose arguments no filter can see, and then clone.
_ABSENT: dict[str, _Numbers] = {"clone3": (435, 435)}

# Index into the numbers above, and the kernel's AUDIT_ARCH_*, by platform.machine().
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# linux/filter.h, linux/seccomp.h, linux/prctl.h.
_LOAD, _JUMP_EQUAL, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_PASS, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_FILTER_MODE = 2
_SIGKILL = 9
_EFAULT = 14


class _Program(ctypes.Structure):
    """sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_available() -> bool:
    """True if `confine` works on this machine. Changes nothing."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES or sys.maxsize < 1 << 32:
        return False
    # A kernel with filters looks for the program at address 0.
    return _prctl(_SET_SECCOMP, _FILTER_MODE) == _EFAULT


def end_with_parent() -> None:
    """Has the kernel end this process when the thread that started it ends."""
    _prctl(_SET_PDEATHSIG, _SIGKILL)


def confine() -> None:
    """Confines the calling process, which must have one thread.

    OSError: the kernel refuses; the process has the rights that it had.
    """
    code = b"".join(_instructions(*_MACHINES[platform.machine()]))
    program = _Program(len(code) // 8, code)
    for option, argument, more in (
        (_SET_NO_NEW_PRIVS, 1, None),
        (_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program)),
    ):
        number = _prctl(option, argument, more)
        if number:
            raise OSError(number, f"{os.strerror(number)} (prctl {option})")


def _prctl(option: int, argument: int, more: object = None) -> int:
    """The error number of a call of prctl; 0 if it succeeded."""
    call = ctypes.CDLL(None, use_errno=True).prctl
    nothing = ctypes.c_ulong(0)
    failed = call(option, ctypes.c_ulong(argument), more or nothing, nothing, nothing)
    return ctypes.get_errno() if failed else 0


def _instructions(place: int, machine: int) -> Iterator[bytes]:
    """The filter's program (classic BPF) for one kind of machine."""
    passes = _instruction(_RETURN, _PASS)
    refuses = _instruction(_RETURN, _REFUSE | _EPERM)
    # Numbers mean other calls for programs of another kind of machine.
    yield _instruction(_LOAD, _MACHINE_AT)
    yield _instruction(_JUMP_EQUAL, machine, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER_AT)
    for numbers in _ALLOWED.values():
        yield from _if_called(numbers[place], passes)
    for numbers, index, bits in _WITHOUT.values():
        test = _instruction(_JUMP_BITS, bits, 1, 0)
        yield from _if_called(numbers[place], _argument(index), test, passes, refuses)
    for numbers, index, bits in _WITH.values():
        test = _instruction(_JUMP_BITS, bits, 0, 1)
        yield from _if_called(numbers[place], _argument(index), test, passes, refuses)
    for numbers, index, values in _AMONG.values():
        tests = [part for v in values for part in (_instruction(_JUMP_EQUAL, v, 0, 1), passes)]
        yield from _if_called(numbers[place], _argument(index), *tests, refuses)
    for numbers in _ABSENT.values():
        yield from _if_called(numbers[place], _instruction(_RETURN, _REFUSE | _ENOSYS))
    yield refuses


def _if_called(number: int | None, *body: bytes) -> Iterator[bytes]:
    """Runs `body`, which returns, for one system call; None: this machine doesn't have it."""
    if number is not None:
        yield _instruction(_JUMP_EQUAL, number, 0, len(body))
        yield from body


def _argument(index: int) -> bytes:
    """Loads the lower half of an argument, where both machines have it first."""
    return _instruction(_LOAD, _ARGUMENTS_AT + 8 * index)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """sock_filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
