"""A process that loses another one says which; it waits for nobody who is gone."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest
from jax._src import distributed

from bacr_jax.errors import UserError
from bacr_jax.out_of_memory import OutOfMemory
from bacr_jax.parallel import peers
from bacr_jax.parallel.peers import (
    SILENCE,
    STUCK_SECONDS,
    STUCK_TIMES,
    Peers,
    exit_if_failed,
    relay,
)
from bacr_jax.parallel.preemption import Preempted
from devices_world import ROOT, environment


class Store(dict):
    """The coordination service's, with the two calls that are used."""

    def key_value_set(self, key, value, allow_overwrite):
        self[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.items() if key.startswith(prefix)]

    def wait_at_barrier(self, name, milliseconds):
        """The others are there at once."""


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
    exit_if_failed(2)


class Ended(BaseException):
    """What os._exit raises here, with the code."""


@pytest.fixture
def one_of_two(monkeypatch):
    """Makes this process one of two, by its index; returns the store that both share."""
    store = Store()

    def end(code):
        raise Ended(code)

    def join(index):
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(distributed.global_state, "client", store)
        store[f"{peers._KEYS}{1 - index}"] = beat("done")
        return store

    for name, value in (("_failed", None), ("BEAT", 0.01), ("SILENCE", 0.1)):
        monkeypatch.setattr(peers, name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("os._exit", end)
    return join


def beat(phase):
    return json.dumps({"host": "b", "phase": phase, "step": 1, "beat": 1})


MEMORY = OutOfMemory(("learner",), {}, None)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "error", [UserError("bad input"), OSError(28, "disk full"), MEMORY, ValueError("x")]
)
def test_one_that_fails_alone_ends_with_its_own_code(one_of_two, monkeypatch, index, error):
    # How long one waits for news of the other, unless the fault is its own.
    monkeypatch.setattr(peers, "SILENCE_AFTER_FAILURE", 0.1 if type(error) is ValueError else 1e4)
    store = one_of_two(index)
    with pytest.raises(type(error)), peers.watched((Preempted,)) as on_phase:
        on_phase("update", 3)
        raise error
    assert json.loads(store[f"{peers._KEYS}{index}"])["phase"] == "ended"
    with pytest.raises(Ended, match="7"):
        exit_if_failed(7)


def test_an_error_that_nothing_handles_is_printed_and_ends_with_1(one_of_two, monkeypatch, capsys):
    monkeypatch.setattr(peers, "SILENCE_AFTER_FAILURE", 0.1)
    one_of_two(1)
    with pytest.raises(ValueError, match="too long"), peers.watched():
        raise ValueError("too long")
    with pytest.raises(Ended, match="1"):
        sys.excepthook(ValueError, ValueError("too long"), None)
    assert capsys.readouterr().err.endswith("ValueError: too long\n")


@pytest.mark.parametrize("error", [None, Preempted("SIGTERM")])
def test_those_that_end_together_leave_as_jax_does(one_of_two, error):
    store = one_of_two(0)
    caught = pytest.raises(Preempted) if error else contextlib.nullcontext()
    with caught, peers.watched((Preempted,)):
        if error:
            raise error
    exit_if_failed(0)
    assert json.loads(store[f"{peers._KEYS}0"])["phase"] == "done"


@pytest.mark.parametrize(("phase", "waits"), [("ended", False), ("done", False), ("update", True)])
def test_the_first_leaves_once_the_others_have_ended_or_in_time(monkeypatch, phase, waits):
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    store = Store({f"{peers._KEYS}1": beat(phase)})
    first = Peers(store, 0, 2, lambda: now[0])
    first.enter("ended")
    first.wait_until_ended(SILENCE)
    # Another one that has written its end still reads the store.
    assert sum(slept) == (SILENCE if waits else peers.BEAT)


# The command up to the trainer, in one of two processes: what it does on the devices fails.
FAILING = """
import sys
import jax
from bacr_jax.errors import UserError
from bacr_jax.out_of_memory import phase_memory
from bacr_jax.parallel import peers, processes
from bacr_jax.train import main
from bacr_jax.training import session

failing, kind, *command = sys.argv[1:]
peers.SILENCE = 5.0
errors = {
    "memory": RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."),
    "bad input": UserError("metrics.jsonl can't be written (No space left on device)"),
    "fault": KeyError("unexpected"),
}

def fill_disk():
    raise OSError(28, "No space left on device", "exports/1")

class Trainer:
    def __init__(self, config, folder, poll, on_phase):
        on_phase("update", 1)
        if kind == "full disk":
            processes.on_first(fill_disk)
        with phase_memory("learner", rows=8):
            if failing in ("all", str(jax.process_index())):
                raise errors[kind]
            processes.largest(1)

session.Trainer = Trainer
sys.exit(main(command))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "kind", "codes"),
    [
        ("1", "memory", [75, 1]),
        ("1", "bad input", [75, 2]),
        ("0", "fault", [1, 75]),
        ("all", "bad input", [2, 2]),
        ("0", "full disk", [2, 2]),
    ],
)
def test_a_process_ends_with_its_own_code_and_the_others_with_75(tmp_path, failing, kind, codes):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    joined = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-c", FAILING, failing, kind]
    command += [
        "--config",
        str(ROOT / "tests/support/small.yaml"),
        f"output.dir={tmp_path / 'run'}",
    ]
    both = [
        subprocess.Popen(
            command,
            env=environment(1) | joined | {"JAX_PROCESS_ID": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    # JAX would wait 300 s.
    errors = [process.communicate(timeout=100)[1] for process in both]
    assert [process.returncode for process in both] == codes, errors
    for code, error in zip(codes, errors):
        if code == 75:
            assert re.search(rf"process {failing} on .* was lost at step 1 \(ended\)", error)
        else:
            own = {
                "memory": "error: learner: ",
                "fault": "KeyError: 'unexpected'",
                "full disk": "error: exports/1: No space left on device; free disk space",
            }
            assert own.get(kind, "error: metrics.jsonl can't be written") in error
