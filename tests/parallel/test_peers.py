"""A process that loses another one says which; it waits for nobody who is gone."""

import socket
import threading

import pytest

from bacr_jax.parallel import peers
from bacr_jax.parallel.peers import SILENCE, STUCK_SECONDS, STUCK_TIMES, Peers, relay


class Store(dict):
    """The coordination service's, with the two calls that are used."""

    def key_value_set(self, key, value, allow_overwrite):
        self[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.items() if key.startswith(prefix)]


@pytest.fixture
def three(monkeypatch):
    """Three processes that share a store and a clock, and what lets time pass for some of them."""
    monkeypatch.setattr(peers, "_first_missing", threading.Event())
    now, store = [0.0], Store()
    every = [Peers(store, i, 3, lambda: now[0]) for i in range(3)]

    def run(seconds, alive=(0, 1, 2)):
        said = []
        for _ in range(int(seconds)):
            now[0] += 1.0
            for index in alive:
                every[index].exchange()
            said += [line for index in alive if (line := every[index].lost())]
        return said

    return every, run


def test_those_that_speak_are_not_lost_however_long_nothing_else_happens(three):
    every, run = three
    assert run(500) == []


def test_a_silent_process_is_named_with_its_step_and_phase_by_all_others(three):
    every, run = three
    every[2].enter("update", 7)
    run(3)
    said = run(SILENCE + 2, alive=(0, 1))
    problem = "was lost at step 7 (update): it sent no heartbeat for"
    assert said and all(line.startswith("process 2 on ") and problem in line for line in said)
    assert "run the same command to continue" in said[0] and "\n" not in said[0]


def test_what_the_first_process_has_said_the_others_repeat(three):
    every, run = three
    run(2)
    every[0].announce("process 2 was lost")
    assert run(1, alive=(1,)) == ["process 2 was lost"]


def test_one_that_was_stopped_itself_gives_the_others_time(three):
    every, run = three
    run(2)
    assert run(100, alive=(1, 2)) != []
    every[0].exchange()
    assert every[0].lost() is None


def test_one_that_is_done_is_missed_by_nobody(three):
    every, run = three
    every[0].enter(peers._DONE)
    run(1)
    peers._first_missing.set()
    assert run(3 * SILENCE, alive=(1, 2)) == []


def test_a_phase_that_lasts_far_longer_than_it_ever_did_ends_the_run(three):
    every, run = three
    for step in range(3):
        every[1].enter("grade", step)
        run(200)
        every[1].enter("update", step)
        run(1)
    every[1].enter("compile", 3)
    # Nothing is known of how long it may take.
    assert run(3 * STUCK_SECONDS) == []
    every[1].enter("grade", 3)
    assert run(STUCK_TIMES * 200 - 1) == []
    (line,) = set(run(2))
    assert (
        "process 1 on" in line
        and "(grade): it has been in this phase for 2001 s, more than" in line
    )


def test_the_relay_hands_on_both_ways_and_stays_open(three):
    far = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(relay(f"127.0.0.1:{far.getsockname()[1]}").split(":"))
    other, _ = far.accept()
    near.sendall(b"asked")
    assert other.recv(9) == b"asked"
    other.sendall(b"said")
    assert near.recv(9) == b"said"
    other.close()
    far.close()
    assert peers._first_missing.wait(10)
    near.settimeout(0.3)
    # Also for one who goes on asking, such as a process that was stopped when the other end closed.
    for _ in range(3):
        near.sendall(b"asked again")
        with pytest.raises(TimeoutError):
            near.recv(1)
    own = Peers(Store(), 1, 2)
    assert "process 0 on ? was lost at step ? (?): it closed its connection" in own.lost()
    near.close()


def test_a_connection_that_this_process_closes_is_no_loss(three):
    far = socket.create_server(("127.0.0.1", 0))
    place = relay(f"127.0.0.1:{far.getsockname()[1]}").split(":")
    near = socket.create_connection(place)
    other, _ = far.accept()
    near.close()
    assert other.recv(1) == b""
    other.close()
    assert not peers._first_missing.wait(0.2)


def test_a_relay_to_where_nobody_listens_closes_so_that_one_tries_again():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    near = socket.create_connection(relay(f"127.0.0.1:{port}").split(":"))
    assert near.recv(1) == b""


def test_one_process_is_watched_by_nobody():
    with peers.watched() as on_phase:
        on_phase("update", 3)
    assert not [one for one in threading.enumerate() if one.name == "peers"]
