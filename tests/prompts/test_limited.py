"""What a stranger's template or tokenizer costs is limited, and ends in one reason."""

import os
import signal
import time

import pytest

from bacr_jax.prompts.limited import Failed, LimitedProcess
from template_world import rendered


def nested(opened, closed, times=20_000):
    return opened * times + closed * times


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 7 ** (10 ** 9) }}", "needs more than 1 s of CPU time"),
        ("{% set x = 10 ** 8 %}{{ (7 ** x) // (3 ** x) }}", "needs more than 1 s of CPU time"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "needs more than 1 s of CPU time",
        ),
        ("{{ 'a' * 10 ** 10 }}", "needs more than 1,024 MiB of memory"),
        ("{{ ([0] * 10 ** 9) | length }}", "needs more than 1,024 MiB of memory"),
        ("{{ '{:>9999999999}'.format(1) }}", "needs more than 1,024 MiB of memory"),
        ("{{ " + nested("(", ")") + " }}", "is nested too deeply"),
        (nested("{% if 1 %}", "{% endif %}", 3000), "is nested too deeply"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "is nested too deeply"),
        ("{{ 'ab' * 600 }}", "writes 1,200 characters"),
        ("{{ lipsum(1, false, 9, 12) }}", "writes another text each time"),
        ("{{ raise_exception('no\nmore') }}", "no"),
    ],
)
def test_a_template_that_asks_for_too_much_fails_in_one_reason(template, reason):
    with pytest.raises(Failed, match=f"^{reason}$"):
        rendered(template, seconds=1.0)


def test_it_works_on_after_a_failure():
    with pytest.raises(Failed):
        rendered("{{ 7 ** (10 ** 9) }}", seconds=0.5)
    assert rendered("{{ messages[0].content }}!") == "x!"


@pytest.fixture
def ctrl_c():
    """Raises KeyboardInterrupt in this process after the given seconds, as Ctrl-C does."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_the_reply_to_an_interrupted_request_is_not_the_reply_to_the_next_one(ctrl_c):
    process = LimitedProcess()
    try:
        # The process imports its libraries first, which takes longer.
        ctrl_c(0.3)
        with pytest.raises(KeyboardInterrupt):
            rendered("one", process)
        assert rendered("two", process) == "two"
        assert rendered("three", process) == "three"
    finally:
        process.close()


def test_a_process_that_ended_for_lack_of_work_is_started_again():
    process = LimitedProcess()
    try:
        assert rendered("one", process) == "one"
        first = process._process
        os.kill(first.pid, signal.SIGALRM)
        first.wait()
        assert rendered("two", process) == "two"
        assert process._process.pid != first.pid
    finally:
        process.close()


def test_a_process_that_is_killed_is_a_failure():
    process = LimitedProcess()
    try:
        assert rendered("one", process) == "one"
        os.kill(process._process.pid, signal.SIGSTOP)
        os.kill(process._process.pid, signal.SIGSEGV)
        os.kill(process._process.pid, signal.SIGCONT)
        time.sleep(0.2)
        # Dead before it was asked: a new one answers.
        assert rendered("two", process) == "two"
    finally:
        process.close()
