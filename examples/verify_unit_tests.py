"""A verifier that runs unit tests against generated code: the share of tests that pass.

    bacr train --config mine.yaml grader=examples/verify_unit_tests.py:grade \
        data.answers=verbatim grading.deadline=20

A gold answer is a JSON list of tests, each some lines of Python that raise if the code is wrong
("assert add(1, 2) == 3"), or one such test as it is. The answer is Python, in a fence or not.

Each test runs in a process of its own, forked from one that holds neither this program's memory nor
its environment: two seconds of the processor, four of the clock, 512 MiB, no writing into files,
and no network where the kernel gives unprivileged users a network namespace
(VERIFY_REQUIRE_NO_NETWORK=1 refuses to run anything where it doesn't).

This is no jail. The code runs as you: it can read every file that you can, and delete, rename or
make empty ones; as root it can fork without end. It shares its process with its test, so that code
written to cheat can: find the test in memory, or make `==` say yes. Policies that are paid by tests
do learn such things: look into rollouts/. For code that you don't trust at all, run the whole
training in a container without secrets, or send the code to one by a verifier like
examples/verify_with_judge.py.
"""

import json
import os
import re
import subprocess
import sys

CPU_SECONDS, SECONDS, MEMORY_BYTES = 2, 4.0, 512 << 20
# For all tests of an answer; grading.deadline should be longer.
ALL_SECONDS = 15.0
REQUIRE_NO_NETWORK = os.environ.get("VERIFY_REQUIRE_NO_NETWORK") == "1"

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# The process that forks one for each test. It writes a letter per test: P(assed) or F(ailed), and
# first whether it is cut off from the network: N or O.
_SUPERVISOR = r"""
import ctypes, json, os, resource, select, signal, sys

NEWUSER, NEWNET, PDEATHSIG, NO_NEW_PRIVS = 0x10000000, 0x40000000, 1, 38

def call(name, *arguments):
    try:
        return getattr(ctypes.CDLL(None), name)(*arguments) == 0
    except (AttributeError, OSError):
        return False

def limit(kind, value):
    try:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):
        pass

def run(code, test, token, pipe):
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    limit(resource.RLIMIT_CPU, request["cpu"])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.dup2(pipe, 3)
    os.closerange(4, 256)
    try:
        space = {"__name__": "answer"}
        exec(compile(code, "<answer>", "exec"), space)
        exec(compile(test, "<test>", "exec"), space)
    except BaseException:
        os._exit(1)
    # Only who gets here has the token to write: os._exit(0) in the code does not pass a test.
    os.write(3, token)
    os._exit(0)

def passes(code, test):
    token = os.urandom(16)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        run(code, test, token, write)
    os.close(write)
    ready = select.select([read], [], [], request["seconds"])[0]
    found = os.read(read, 64) if ready else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    return found == token

request = json.loads(sys.stdin.readline())
call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
cut_off = call("unshare", NEWUSER | NEWNET) or call("unshare", NEWNET)
os.write(1, b"N" if cut_off else b"O")
if not cut_off and request["require"]:
    sys.exit(1)
limit(resource.RLIMIT_AS, request["memory"])
limit(resource.RLIMIT_FSIZE, 0)
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_NOFILE, 64)
for test in request["tests"]:
    os.write(1, b"P" if passes(request["code"], test) else b"F")
"""


def grade(question: str, answer: str, gold: str) -> float:
    """The share of a question's tests that an answer's code passes.

    Args:
      question: not looked at.
      answer: Python, in a fence or not.
      gold: tests.

    Raises:
      ValueError: there is no test.
      RuntimeError: the tests could not be run, or not without a network.
    """
    tests = tests_of(gold)
    request = {"code": code_of(answer), "tests": tests, "require": REQUIRE_NO_NETWORK}
    request |= {"cpu": CPU_SECONDS, "seconds": SECONDS, "memory": MEMORY_BYTES}
    try:
        ran = subprocess.run(
            # Isolated: no packages and settings of the user's, no environment, an empty namespace.
            [sys.executable, "-I", "-S", "-c", _SUPERVISOR],
            input=json.dumps(request).encode() + b"\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            timeout=ALL_SECONDS,
            check=False,
        )
        said = ran.stdout
    except subprocess.TimeoutExpired as late:
        # The tests that were not reached count as failed.
        said = late.stdout or b""
    if not said:
        raise RuntimeError("the process that runs the tests did not start")
    if said == b"O" and REQUIRE_NO_NETWORK:
        raise RuntimeError("the kernel gives no network namespace, and one is required")
    return said.count(b"P") / len(tests)


def tests_of(gold: str) -> list[str]:
    """The tests of a gold answer."""
    try:
        found = json.loads(gold)
    except ValueError:
        found = [gold]
    if not isinstance(found, list) or not all(isinstance(test, str) for test in found):
        found = [gold]
    tests = [test for test in found if test.strip()]
    if not tests:
        raise ValueError("the gold answer holds no test")
    return tests


def code_of(answer: str) -> str:
    """The code in the last fence of an answer, or all of it."""
    fenced = _FENCE.findall(answer)
    return fenced[-1] if fenced else answer
