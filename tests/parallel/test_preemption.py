"""Signals: the first is noted until it is polled, a repeated request is one request."""

import os
import signal
import subprocess
import sys

import pytest

from bacr_jax.parallel.preemption import SIGNALS, Preempted, PreemptionHandler


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_raised_where_it_is_polled(number, capfd):
    with PreemptionHandler() as handler:
        handler.poll()
        os.kill(os.getpid(), number)
        # A system may send one request twice, to the process and to its group.
        os.kill(os.getpid(), number)
        with pytest.raises(Preempted, match=signal.Signals(number).name):
            handler.poll()
    assert capfd.readouterr().err.count("stopping after the current work is saved") == 1


def test_a_signal_is_recorded_if_nobody_reads_stderr():
    script = """
import os, signal
from bacr_jax.parallel.preemption import Preempted, PreemptionHandler
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
with PreemptionHandler() as handler:
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        handler.poll()
    except Preempted:
        os._exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == 3


def test_a_second_signal_also_ends_the_first_process_of_a_container():
    # The kernel keeps signals from it that it does not handle itself.
    spared = """
import os, signal
from bacr_jax.parallel import preemption
preemption._SAME_REQUEST_SECONDS = 0
kill, os.kill = os.kill, lambda *_: None
with preemption.PreemptionHandler():
    kill(os.getpid(), signal.SIGTERM)
    kill(os.getpid(), signal.SIGTERM)
"""
    ended = subprocess.run([sys.executable, "-c", spared], stderr=subprocess.DEVNULL, check=False)
    assert ended.returncode == 128 + signal.SIGTERM


def test_outside_of_it_signals_do_what_they_did():
    before = [signal.getsignal(number) for number in SIGNALS]
    with PreemptionHandler():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_handler_that_python_did_not_set_is_no_error(monkeypatch):
    set_signals, given = signal.signal, {}

    def as_if_of_c(number, handler):
        given[number] = handler
        set_signals(number, handler)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(signal, "signal", as_if_of_c)
    try:
        with PreemptionHandler():
            pass
    finally:
        for number, handler in before.items():
            set_signals(number, handler)
    assert given == dict.fromkeys(SIGNALS, signal.SIG_DFL)
