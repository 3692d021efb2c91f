"""Example of a verifier that runs unit tests on generated code and returns the pass rate.

    bacr train --config mine.yaml grader=examples/verify_unit_tests.py:grade \
        data.answers=verbatim grading.deadline=20

The gold answer is a JSON list of tests, or the text of a single test. A test is Python code that
raises an exception if the generated code is wrong, such as "assert add(1, 2) == 3". The answer is
Python code, with or without a Markdown code fence.

Each test runs in a separate process. It is forked from a supervisor process that has neither the
memory nor the environment variables of this program. The limits are 2 s of CPU time, 4 s of
wall-clock time, 512 MiB of memory, and no writes to files. There is no network access if the kernel
allows unprivileged users to create a network namespace. If it does not, tests run with network
access, or raise an error with VERIFY_REQUIRE_NO_NETWORK=1.

This is not a security sandbox. The code runs with your user's permissions. It can read all your
files, delete or rename them, and create empty ones; as root it can fork without limit. The code
also shares its process with the test, so a policy can learn to cheat, for example by reading the
test from memory or by overriding `==`. Policies that are rewarded by tests do learn such things, so
inspect the samples in rollouts/. If you do not trust the code at all, run the whole training in a
container without secrets, or send the code to such a container with a verifier like
examples/verify_with_judge.py.
"""

import json
import os
import re
import subprocess
import sys

CPU_SECONDS, SECONDS, MEMORY_BYTES = 2, 4.0, 512 << 20
# Timeout for all tests of an answer, in seconds. grading.deadline should be longer.
ALL_SECONDS = 15.0
REQUIRE_NO_NETWORK = os.environ.get("VERIFY_REQUIRE_NO_NETWORK") == "1"

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# Program of the supervisor process, which forks a process for each test. It first writes N if it
# has no network access, or O if it has. Then it writes P (passed) or F (failed) for each test.
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
    """Returns the fraction of tests that the code of an answer passes.

    Args:
      question: not used.
      answer: Python code, with or without a code fence.
      gold: a JSON list of tests, or a single test.

    Raises:
      ValueError: if `gold` contains no test.
      RuntimeError: if the tests could not be run, or if network access could not be disabled
        although VERIFY_REQUIRE_NO_NETWORK requires it.
    """
    tests = tests_of(gold)
    request = {"code": code_of(answer), "tests": tests, "require": REQUIRE_NO_NETWORK}
    request |= {"cpu": CPU_SECONDS, "seconds": SECONDS, "memory": MEMORY_BYTES}
    try:
        ran = subprocess.run(
            # -I and -S run Python without the user's environment variables and installed packages.
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
        # Tests that did not run before the timeout count as failed.
        said = late.stdout or b""
    if not said:
        raise RuntimeError("the process that runs the tests did not start")
    if said == b"O" and REQUIRE_NO_NETWORK:
        raise RuntimeError("the kernel gives no network namespace, and one is required")
    return said.count(b"P") / len(tests)


def tests_of(gold: str) -> list[str]:
    """Parses the tests of a gold answer. Raises ValueError if it contains no test.

    Other JSON than a list of texts is not a test, although most of it is a valid Python program.
    Such a program never raises an exception, so every answer would pass.
    """
    try:
        content = json.loads(gold)
    except ValueError:
        content = [gold]
    is_list_of_texts = isinstance(content, list) and all(isinstance(test, str) for test in content)
    tests = [test for test in content if test.strip()] if is_list_of_texts else []
    if not tests:
        raise ValueError(
            "the gold answer contains no test; use a JSON list of tests, or the text of one test"
        )
    return tests


def code_of(answer: str) -> str:
    """Returns the code in the last code fence of an answer, or the whole answer without a fence."""
    fenced = _FENCE.findall(answer)
    return fenced[-1] if fenced else answer
