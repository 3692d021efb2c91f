"""Sandboxes the current process with seccomp, so that it can process untrusted text.

A seccomp filter makes the Linux kernel allow only listed system calls and reject all others with
EPERM. The filter cannot be removed. The process can still compute, read files and use file
descriptors that are already open. It cannot open a file for writing, open a socket, start a process
or send a signal.

The sandbox needs neither privileges nor a user namespace, so it works as root and in most
containers. This module uses only the standard library. Called by `worker` and `forked`.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterator

# The number of a system call on x86_64 (asm/unistd_64.h) and on aarch64 (asm-generic/unistd.h).
# None if the architecture does not have the system call.
_Numbers = tuple[int | None, int | None]
_ALLOWED: dict[str, _Numbers] = {
    # Reading files, and using open file descriptors.
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
    # Threads, and querying and configuring this process.
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
    # The event loop of asyncio.
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
_CLONE_THREAD = 0x10000
_FIONBIO = 0x5421
_FIOCLEX = 0x5451
# System calls that are refused if one of their arguments has certain bits set. Each entry contains
# the numbers of the system call, the index of the argument, and the mask of the forbidden bits.
_WITHOUT: dict[str, tuple[_Numbers, int, int]] = {
    "open": ((2, None), 1, _NOT_FOR_READING),
    "openat": ((257, 56), 2, _NOT_FOR_READING),
    # The pid must be 0 (this process), because lowering the limits of another process can kill it.
    "prlimit64": ((302, 261), 0, _ANY_BIT),
    # This allows duplicating descriptors and changing their flags, but not F_SETOWN, which can send
    # signals to other processes.
    "fcntl": ((72, 25), 1, _ANY_BIT ^ 0x7),
    # Only stream sockets are allowed, because a datagram socket can send to any socket on the
    # machine.
    "socketpair": ((53, 199), 1, 0xE),
}
# System calls that are allowed only if an argument has a certain bit set. Each entry has the same
# fields as above.
_WITH: dict[str, tuple[_Numbers, int, int]] = {"clone": ((56, 220), 0, _CLONE_THREAD)}
# System calls that are allowed only if an argument has one of the listed values.
_AMONG: dict[str, tuple[_Numbers, int, tuple[int, ...]]] = {
    "ioctl": ((16, 29), 1, (_FIONBIO, _FIOCLEX))
}
# System calls that fail with ENOSYS. A filter cannot inspect the arguments of clone3, which are in
# memory. If clone3 does not exist, the C library falls back to clone.
_ABSENT: dict[str, _Numbers] = {"clone3": (435, 435)}

# For each value of platform.machine(): the index into `_Numbers`, and the AUDIT_ARCH_* constant of
# the kernel.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Opcodes of a BPF filter (linux/filter.h).
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_BITS = 0x45
_RETURN = 0x06
# Offsets in bytes into struct seccomp_data (linux/seccomp.h).
_NUMBER_AT = 0
_MACHINE_AT = 4
_ARGUMENTS_AT = 16
# Return values of a filter (linux/seccomp.h).
_PASS = 0x7FFF0000
_KILL = 0x80000000
_REFUSE = 0x00050000
# Options of prctl (linux/prctl.h).
_SET_PDEATHSIG = 1
_SET_SECCOMP = 22
_SET_NO_NEW_PRIVS = 38
_FILTER_MODE = 2
_SIGKILL = 9


class _Program(ctypes.Structure):
    """The C struct sock_fprog, which contains the instructions of a filter and their number."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_available() -> bool:
    """True if `confine` works on this machine. Does not change the current process."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES or sys.maxsize < 1 << 32:
        return False
    # A kernel that supports filters tries to read the filter at address 0 and fails with EFAULT.
    return _prctl(_SET_SECCOMP, _FILTER_MODE) == errno.EFAULT


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it exits."""
    _prctl(_SET_PDEATHSIG, _SIGKILL)


def confine() -> None:
    """Sandboxes the calling process permanently. The process must have only one thread.

    Raises:
      OSError: if the kernel rejects the filter. The process is then not sandboxed.
    """
    index, machine = _MACHINES[platform.machine()]
    code = b"".join(_instructions(index, machine))
    program = _Program(len(code) // 8, code)
    for option, argument, more in (
        (_SET_NO_NEW_PRIVS, 1, None),
        (_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program)),
    ):
        number = _prctl(option, argument, more)
        if number:
            raise OSError(number, f"{os.strerror(number)} (prctl {option})")


def _prctl(option: int, argument: int, more: object = None) -> int:
    """Calls the Linux function prctl. Returns 0 on success and the errno on failure."""
    call = ctypes.CDLL(None, use_errno=True).prctl
    nothing = ctypes.c_ulong(0)
    failed = call(option, ctypes.c_ulong(argument), more or nothing, nothing, nothing)
    return ctypes.get_errno() if failed else 0


def _instructions(index_of_machine: int, machine: int) -> Iterator[bytes]:
    """Yields the instructions of the filter (classic BPF).

    Args:
      index_of_machine: index of the architecture in `_Numbers`.
      machine: the AUDIT_ARCH_* constant of the architecture.
    """
    passes = _instruction(_RETURN, _PASS)
    refuses = _instruction(_RETURN, _REFUSE | errno.EPERM)
    # Kill programs of any other architecture, because their system call numbers are different.
    yield _instruction(_LOAD, _MACHINE_AT)
    yield _instruction(_JUMP_EQUAL, machine, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER_AT)
    for numbers in _ALLOWED.values():
        yield from _if_called(numbers[index_of_machine], passes)
    for numbers, index, bits in _WITHOUT.values():
        test = _instruction(_JUMP_BITS, bits, 1, 0)
        yield from _if_called(numbers[index_of_machine], _argument(index), test, passes, refuses)
    for numbers, index, bits in _WITH.values():
        test = _instruction(_JUMP_BITS, bits, 0, 1)
        yield from _if_called(numbers[index_of_machine], _argument(index), test, passes, refuses)
    for numbers, index, values in _AMONG.values():
        tests: list[bytes] = []
        for value in values:
            tests += [_instruction(_JUMP_EQUAL, value, 0, 1), passes]
        yield from _if_called(numbers[index_of_machine], _argument(index), *tests, refuses)
    for numbers in _ABSENT.values():
        yield from _if_called(
            numbers[index_of_machine], _instruction(_RETURN, _REFUSE | errno.ENOSYS)
        )
    yield refuses


def _if_called(number: int | None, *body: bytes) -> Iterator[bytes]:
    """Yields instructions that run `body` if the system call has the given number.

    Args:
      number: number of the system call, or None if this architecture does not have it.
      body: instructions, of which the last one must be a return.
    """
    if number is not None:
        yield _instruction(_JUMP_EQUAL, number, 0, len(body))
        yield from body


def _argument(index: int) -> bytes:
    """Returns the instruction that loads the lower 32 bits of a system call's argument."""
    return _instruction(_LOAD, _ARGUMENTS_AT + 8 * index)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns a single BPF instruction as the bytes of the C struct sock_filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
