"""Requests that join and leave get the same tokens as `Session.ask` gives one question alone."""

import dataclasses

import pytest

from bacr_jax.evaluation.decoder import open_decoder
from bacr_jax.generate import open_session
from bacr_serve.generation import ANSWER, FORCED, THINKING, BackendError, Generation
from bacr_serve.slots import Slots
from serve_world import OVERRIDES, make_folder

SLOTS, CHUNK = 3, 4


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("models") / "tiny")
    return open_session(None, folder, None, OVERRIDES)


@pytest.fixture(scope="module")
def decoder(session):
    decoder = open_decoder(session.saved, session.vocab_size, max_thinking=16, slots=SLOTS)
    return dataclasses.replace(decoder, spec=dataclasses.replace(decoder.spec, chunk=CHUNK))


@pytest.fixture(scope="module")
def made(session, decoder):
    return Slots(decoder, session.rules, prompt_tokens=24)


@pytest.fixture
def slots(made):
    """The same for all tests, and empty."""
    assert made.free == SLOTS
    yield made
    assert made.free == SLOTS


def request(session, question, budget, **sampling):
    prompts = session.prompts([question], [budget])
    prompt = tuple(prompts.tokens[0][: prompts.lengths[0]].tolist())
    return Generation(prompt, budget, 16 if budget is None else budget, **sampling)


def run(slots, requests):
    """The events of every request; they join as slots become free."""
    waiting = list(enumerate(requests))
    events = {number: [] for number, _ in waiting}
    while waiting or slots.free < SLOTS:
        entering, waiting = waiting[: slots.free], waiting[slots.free :]
        if entering:
            slots.add(entering)
        for event in slots.step():
            events[event.handle].append(event)
    return list(events.values())


def tokens(events, *kinds):
    return tuple(t for event in events if event.result.kind in kinds for t in event.result.tokens)


def expected(session, question, budget, **sampling):
    """Tokens as a server sends them, without a token that ended the turn during the thinking."""
    (answer,) = session.ask([question], [budget], **sampling)
    found = list(answer.tokens)
    if answer.closed_by == "end of turn":
        del found[answer.thinking_tokens]
    return answer, tuple(found)


CASES = [
    ("1a2", 4, {}),
    ("3b4a5", 16, {}),
    ("1a2", 0, {}),
    ("7a2b3", None, {}),
    ("1a2", 7, {"temperature": 1.5, "seed": 5}),
    ("3b4a5", 9, {"temperature": 1.5, "seed": 6, "top_p": 0.9}),
    ("1a2", 16, {"temperature": 2.0, "seed": 7}),
]


def test_each_is_answered_as_if_it_were_alone(session, slots):
    found = run(slots, [request(session, q, b, **how) for q, b, how in CASES])
    closings = set()
    for events, (question, budget, how) in zip(found, CASES):
        answer, everything = expected(session, question, budget, **how)
        assert tokens(events, THINKING, FORCED, ANSWER) == everything
        assert len(tokens(events, FORCED)) == answer.forced_tokens
        assert events[-1].result.finished == answer.finished
        (closed_by,) = {e.result.closed_by for e in events if e.result.kind == FORCED}
        assert closed_by == answer.closed_by
        assert [event.is_last for event in events] == [False] * (len(events) - 1) + [True]
        closings.add(closed_by)
    assert len(closings) > 1


def test_thinking_comes_chunk_by_chunk(session, slots):
    (events,) = run(slots, [request(session, "1a2", 16)])
    sizes = [len(e.result.tokens) for e in events if e.result.kind == THINKING]
    assert sizes[:-1] == [CHUNK] * (len(sizes) - 1) and len(sizes) > 1


def test_one_thinks_on_while_another_is_answered(session, slots):
    """The short one begins its answer before the long one has thought to its end."""
    slots.add([("long", request(session, "1a2", 16)), ("short", request(session, "1a2", 2))])
    order = []
    while slots.free < SLOTS:
        order += [(event.handle, event.result.kind) for event in slots.step()]
    assert order.index(("short", ANSWER)) < len(order) - 1 - order[::-1].index(("long", THINKING))


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_slot_that_was_left_is_used_again(session, slots, steps):
    """Left before, within and after the thinking of 4."""
    handles = [object() for _ in range(SLOTS)]
    slots.add([(handle, request(session, "1a2", 16)) for handle in handles[:2]])
    slots.add([(handles[2], request(session, "1a2", 4))])
    for _ in range(steps):
        slots.step()
    for handle in handles:
        slots.remove(handle)
    assert slots.free == SLOTS and slots.step() == []
    (events,) = run(slots, [request(session, "3b4a5", 7)])
    assert tokens(events, THINKING, FORCED, ANSWER) == expected(session, "3b4a5", 7)[1]


def test_weights_that_are_not_finite_end_the_request(session, decoder):
    params = dataclasses.replace(
        decoder.params, final_norm=decoder.params.final_norm * float("nan")
    )
    slots = Slots(dataclasses.replace(decoder, params=params), session.rules, prompt_tokens=24)
    for budget in (4, 0):
        (events,) = run(slots, [request(session, "1a2", budget)])
        assert isinstance(events[-1].result, BackendError) and events[-1].is_last
