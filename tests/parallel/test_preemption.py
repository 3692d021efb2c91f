"""Signals: the first is noted until it is polled, a repeated request is one request."""

import os
import signal

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
    assert capfd.readouterr().err.count("stopping in good order") == 1


def test_outside_of_it_signals_do_what_they_did():
    before = [signal.getsignal(number) for number in SIGNALS]
    with PreemptionHandler():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
