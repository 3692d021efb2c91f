"""Traces that servers sample: the decoder's own numbers, and what becomes of servers that fail."""

import asyncio
import dataclasses
import errno
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_client import EngineError, Refused, Server
from bacr_jax.errors import UserError
from bacr_jax.model import qwen2
from bacr_jax.model.budget import Conditioned
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.rollout import RolloutRequest, SamplingSetup, sampling_params
from bacr_jax.rollout import fleet as module
from bacr_jax.rollout.fleet import Fleet, ServersLost
from bacr_jax.rollout.probe import BOUNDS, Context, Probe
from bacr_jax.rollout.rows import Callbacks
from bacr_jax.rollout.served import RemoteSampling, asked_rows
from bacr_jax.types import CLOSED_BY_TAG, NO_BUDGET
from rollout_world import (
    EOS,
    LEGAL,
    VOCAB,
    make_budget_rules,
    make_prompts,
    make_rules,
    quarters,
)

WIDTH = 5 + 12 + 2 + 3
CONTEXTS = 48


class Local(Server):
    """A server in this process: the most likely tokens, by whole forward passes of the model.

    Attributes:
      dies_after: completions that it answers; None: all.
      stale: it says that it read new weights, and keeps its own.
      raw: its log-probabilities are at temperature 1, whatever the request's temperature is.
    """

    def __init__(self, world, url="http://one", dies_after=None, stale=False, raw=False):
        super().__init__(url)
        self.world, self.dies_after, self.stale, self.raw = world, dies_after, stale, raw
        self.params, self.loaded, self.answered = None, [], 0

        @jax.jit
        def scores(params, tokens, length, budget):
            given = Conditioned(
                world.phi_of(budget[None]),
                params["budget"]["gate"],
                settings=world.conditioning,
            )
            hidden = qwen2.forward(params, tokens[None], config=world.shape, conditioned=given)
            logits = qwen2.logits(params, hidden)[0, length - 1]
            return jax.nn.log_softmax(jnp.where(LEGAL, logits, -jnp.inf))

        self.scores = scores

    async def find(self):
        pass

    connect = find

    async def weight_version(self):
        return self.loaded[-1]

    async def load(self, folder, version):
        if self.params is None or not self.stale:
            self.params = WRITTEN[folder]
        self.loaded.append(version)

    async def complete(self, call, sampling, part, told, patience=None):
        if self.dies_after is not None and self.answered >= self.dies_after:
            raise EngineError(f"{self.url}: no server responds at this address")
        self.answered += 1
        await asyncio.sleep(0)
        tokens, logprobs = list(call.prompt), []
        for _ in range(call.max_tokens):
            row = np.zeros(WIDTH, np.int32)
            row[: len(tokens)] = tokens
            found = self.scores(self.params, row, len(tokens), np.int32(told["budget"]))
            found = found if self.raw else at_temperature(found, sampling.temperature)
            tokens.append(int(found.argmax()))
            logprobs.append(float(found.max()))
        return tokens[len(call.prompt) :], logprobs


WRITTEN = {}


def at_temperature(logprobs, temperature):
    """Returns log-probabilities at a temperature from those at temperature 1; 0: unchanged."""
    if temperature in (0.0, 1.0):
        return logprobs
    scaled = np.asarray(logprobs, np.float64) / temperature
    return scaled - np.log(np.exp(scaled).sum())


def fleet(world, servers, tmp_path, answers=1, temperature=1.0, **changes):
    def write(params, out):
        out.mkdir(parents=True)
        WRITTEN[str(out.absolute())] = params

    def draw(version):
        numbers = np.random.default_rng(version)
        ids = np.flatnonzero(LEGAL)
        return [
            Context(tuple(numbers.choice(ids, 2).tolist()), int(numbers.integers(13)))
            for _ in range(CONTEXTS)
        ]

    local = Local(world)

    def score(params, contexts):
        found = []
        for context in contexts:
            row, written = np.zeros(WIDTH, np.int32), (*context.prompt, *context.response)
            row[: len(written)] = written
            scores = local.scores(params, row, len(written), np.int32(context.budget))
            found.append(at_temperature(scores, temperature))
        return np.array(found)

    without_tag = lambda tokens: len(tokens) - 1
    given = {
        "remote_sampling": RemoteSampling(make_budget_rules(), without_tag, answers=answers),
        "probe": Probe(draw, score, temperature),
        "write": write,
        "folder": tmp_path,
        "dtype": "float32",
        "bound": BOUNDS["float32"],
        "print_line": lambda line: None,
    }
    return Fleet(servers, **{**given, **changes})


def rows_of():
    budgets = np.array([12, 3, 0, 7, 12, 5])
    return make_prompts([5, 3, 4, 1, 2, 5], 5), RolloutRequest(budgets, quarters(budgets))


def rolled(world, made, version=0, params=None, answers=1, callbacks=Callbacks(), cuts=None):
    prompts, rows = rows_of()
    rows = rows if cuts is None else dataclasses.replace(rows, cuts=cuts)
    spec = world.spec(answers=answers)
    sampler = SamplingSetup(spec, make_rules(), sampling_params(0.0), world.phi_of)
    given = world.params if params is None else params
    made.load(given, version)
    return made.generate(prompts, rows, jax.random.key(3), sampler, callbacks)


def same(found, want):
    """The decoder calls what it takes greedily certain: log-probabilities are not looked at."""
    for one, other in ((found.trunks, want.trunks), (found.branches, want.branches)):
        for field in dataclasses.fields(one):
            a, b = (np.asarray(getattr(x, field.name)) for x in (one, other))
            assert a.shape == b.shape and a.dtype == b.dtype, field.name
            if field.name != "logprobs":
                np.testing.assert_array_equal(a, b, err_msg=field.name)


@pytest.mark.parametrize("answers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fleet_gives_what_the_decoder_gives(world, tmp_path, answers):
    prompts, rows = rows_of()
    want = world.roll(
        prompts, rows.budgets, cuts=rows.cuts, temperature=0.0, spec=world.spec(answers=answers)
    )
    assert (want.trunks.close == CLOSED_BY_TAG).any() and (want.trunks.close == 0).any()
    found = rolled(world, fleet(world, [Local(world)], tmp_path, answers), answers=answers)
    same(found, want)
    for name in ("tokens", "forced_share", "thinking_mean", "thinking_max", "excess_mean"):
        assert found.counters[name] == pytest.approx(want.counters[name])


def test_a_fleet_samples_thinking_alone(world, tmp_path):
    found = rolled(world, fleet(world, [Local(world)], tmp_path), cuts=np.zeros((6, 0), int))
    assert found.branches.tokens.shape[:2] == (6, 0) and found.trunks.thinking.max() > 0


def test_rows_are_heard_of_as_they_end(world, tmp_path):
    heard = []
    callbacks = Callbacks(on_rows=lambda places, trunks, branches: heard.append((places, trunks)))
    found = rolled(world, fleet(world, [Local(world)], tmp_path), callbacks=callbacks)
    places = np.concatenate([places for places, _ in heard])
    assert sorted(places) == list(range(6))
    tokens = np.concatenate([trunks.tokens for _, trunks in heard])
    np.testing.assert_array_equal(tokens[np.argsort(places)], found.trunks.tokens)


def test_rows_of_a_lost_server_are_sampled_by_another_under_the_same_seeds(world, tmp_path):
    said = []
    want = rolled(world, fleet(world, [Local(world)], tmp_path))
    servers = [Local(world), Local(world, "http://two", dies_after=3)]
    made = fleet(world, servers, tmp_path, print_line=said.append, name="run")
    same(rolled(world, made), want)
    assert said == [
        "WARNING, rollout.urls: http://two: no server responds at this address; 1 of 2 servers "
        "continue"
    ]
    # It is asked again with the next weights.
    servers[1].dies_after = None
    same(rolled(world, made, version=1), want)
    assert servers[1].loaded == ["run-0", "run-1"] and len(made.alive) == 2


def test_without_a_server_the_run_is_to_be_saved(world, tmp_path):
    with pytest.raises(ServersLost, match="all servers have stopped responding"):
        rolled(world, fleet(world, [Local(world, dies_after=4)], tmp_path))


def test_weights_go_out_once_a_version_and_old_ones_are_removed(world, tmp_path):
    server = Local(world)
    made = fleet(world, [server], tmp_path, name="run")
    # Of a process that was killed while it wrote.
    (tmp_path / ".version-7.a1b2c3").mkdir()
    for version in (0, 0, 1):
        rolled(world, made, version)
    assert server.loaded == ["run-0", "run-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]


def test_a_server_that_keeps_its_old_weights_is_an_error(world, tmp_path):
    made = fleet(world, [Local(world, stale=True)], tmp_path)
    rolled(world, made)
    other = {**world.params, "embed": world.params["embed"] * 1.1}
    with pytest.raises(UserError, match="does not sample with the weights that it received"):
        rolled(world, made, 1, params=other)


def test_two_runs_on_one_server_are_an_error_of_the_run_that_lost_its_weights(world, tmp_path):
    server = Local(world)
    first = fleet(world, [server], tmp_path / "first", name="first")
    second = fleet(world, [server], tmp_path / "second", name="second")
    message = (
        "rollout.urls: http://one reports weights of version 'second-0', but this run has loaded "
        "version 'first-0', so another run uses the same server; use different servers for each run"
    )
    rolled(world, first)
    rolled(world, second)
    # Before the next rollout.
    with pytest.raises(UserError) as refused:
        first.load(world.params, 0)
    assert str(refused.value) == message
    # During a rollout.
    prompts, rows = rows_of()
    setup = SamplingSetup(world.spec(), make_rules(), sampling_params(0.0), world.phi_of)
    with pytest.raises(UserError) as refused:
        first.generate(prompts, rows, jax.random.key(3), setup, Callbacks())
    assert str(refused.value) == message


def test_a_server_that_was_restarted_is_left_out_until_the_next_weights(world, tmp_path):
    printed = []
    servers = [Local(world), Local(world, "http://two")]
    made = fleet(world, servers, tmp_path, print_line=printed.append)
    rolled(world, made)
    servers[1].loaded.append("default")
    made.load(world.params, 0)
    assert made.alive == servers[:1]
    assert printed == [
        "WARNING, rollout.urls: http://two was restarted and has other weights; 1 of 2 servers "
        "continue"
    ]
    rolled(world, made, 1)
    assert len(made.alive) == 2


def test_runs_have_different_names_on_servers(world, tmp_path):
    assert len({fleet(world, [], tmp_path).name for _ in range(3)}) == 3


def nudged(params, by):
    """Parameters after an update that moves each by about so much, as Adam at that rate does."""
    leaves, tree = jax.tree.flatten(params)
    numbers = np.random.default_rng(0)
    moved = [leaf + by * numbers.choice([-1.0, 1.0], leaf.shape).astype("f4") for leaf in leaves]
    return jax.tree.unflatten(tree, moved)


def test_weights_of_before_one_usual_update_are_found_at_once(world, tmp_path):
    """They pass the bound by far: an update at a rate of 1e-5."""
    made = fleet(world, [Local(world, stale=True)], tmp_path)
    rolled(world, made)
    says = (
        "does not sample with the weights that it received: its log-probabilities of fixed prompts"
    )
    with pytest.raises(UserError, match=f"^rollout.urls: http://one {says} are closer to"):
        rolled(world, made, 1, params=nudged(world.params, 1e-5))


def test_right_servers_pass_for_updates_of_any_size(world, tmp_path):
    made = fleet(world, [Local(world), Local(world, "http://two")], tmp_path)
    for version, by in enumerate([0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2, 0.0]):
        made.load(nudged(world.params, by), version)
        # A further round of questions under the same weights.
        made.load(nudged(world.params, by), version)
    assert len(made.alive) == 2


def test_what_is_asked_after_a_push_is_never_asked_again(world, tmp_path):
    class Noting(Local):
        async def complete(self, call, sampling, part, told, patience=None):
            asked[-1].append((call.prompt, told["budget"]))
            return await super().complete(call, sampling, part, told)

    asked = []
    made = fleet(world, [Noting(world)], tmp_path)
    for version in range(4):
        asked.append([])
        made.load(world.params, version)
    single = [set(some[-2 * CONTEXTS :][:CONTEXTS]) for some in asked]
    budgets = {budget for some in single for _, budget in some}
    assert len(budgets) > 6
    for one, other in zip(single, single[1:]):
        assert len(one & other) < CONTEXTS / 4


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_log_probabilities_at_another_temperature_are_an_error(world, tmp_path, temperature):
    """vLLM returns raw_logprobs, at temperature 1, unless it is started with another mode."""
    for raw in (False, True):
        server = Local(world, raw=raw)
        made = fleet(world, [server], tmp_path / str(raw), temperature=temperature)
        if raw:
            with pytest.raises(UserError, match="again, with --logprobs-mode processed_logprobs"):
                made.load(world.params, 0)
        else:
            made.load(world.params, 0)


def test_weights_that_are_others_under_the_same_version_are_an_error(world, tmp_path):
    made = fleet(world, [Local(world)], tmp_path)
    rolled(world, made)
    other = {**world.params, "embed": world.params["embed"] * 1.1}
    with pytest.raises(UserError, match="does not sample with the weights that it received"):
        rolled(world, made, 0, params=other)


def test_a_full_folder_is_one_line_and_leaves_nothing(world, tmp_path):
    def write(params, out):
        out.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    made = fleet(world, [Local(world)], tmp_path, write=write)
    with pytest.raises(
        UserError, match="the weights can't be written to this folder .No space left on device."
    ):
        rolled(world, made)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "answer",
    [[], ["a"], [None], [-1], [VOCAB], [10**30], [1.0], [True], [float("nan")], [[1]],
     [int(EOS)] * 100_000],
)  # fmt: skip
def test_a_fixed_prompt_that_is_answered_with_no_tokens_is_one_line(world, tmp_path, answer):
    class Odd(Local):
        async def complete(self, call, sampling, part, told, patience=None):
            return answer, [0.0] * len(answer)

    says = "^rollout.urls: http://one returns the invalid tokens"
    with pytest.raises(UserError, match=says) as refused:
        rolled(world, fleet(world, [Odd(world)], tmp_path))
    assert len(str(refused.value)) < 300


class Broken(Local):
    """Thinks as it should, also when it is checked, and answers by a fault."""

    def __init__(self, world, fault, url="http://two"):
        super().__init__(world, url)
        self.fault = fault

    async def complete(self, call, sampling, part, told, patience=None):
        if part == 0:
            return await super().complete(call, sampling, part, told)
        if isinstance(self.fault, Exception):
            raise self.fault
        tokens, _ = await super().complete(call, sampling, part, told)
        return tokens, self.fault(len(tokens))


@pytest.mark.parametrize(
    "fault",
    [
        *[Refused(status, f"http://two: status {status}") for status in (401, 404, 429, 500, 503)],
        EngineError("http://two: the server did not finish a completion (finish reason 'abort')"),
        lambda count: [],
        lambda count: [-0.5] * (count - 1),
        lambda count: [0.5] * count,
        lambda count: [-9999.0] * count,
        lambda count: [True] * count,
        lambda count: [None] * count,
        lambda count: [float("nan")] * count,
    ],
)
def test_a_server_at_fault_is_lost_and_the_other_goes_on(world, tmp_path, fault):
    said = []
    want = rolled(world, fleet(world, [Local(world)], tmp_path / "a"))
    servers = [Local(world), Broken(world, fault)]
    same(rolled(world, fleet(world, servers, tmp_path / "b", print_line=said.append)), want)
    (line,) = said
    assert line.startswith("WARNING, rollout.urls: http://two") and line.endswith(
        "1 of 2 servers continue"
    )
    with pytest.raises(ServersLost, match="all servers have stopped responding"):
        rolled(world, fleet(world, [Broken(world, fault)], tmp_path / "c"))


@pytest.mark.parametrize("status", [400, 422])
def test_a_request_that_is_refused_for_what_it_is_ends_the_run(world, tmp_path, status):
    refused = Refused(status, "http://two: budget: found -1")
    servers = [Local(world), Broken(world, refused)]
    with pytest.raises(UserError, match="^rollout.urls: http://two: budget: found -1$"):
        rolled(world, fleet(world, servers, tmp_path))


class Stuck(Local):
    """A server that never ends what it is told to do.

    Attributes:
      at: name of the method that hangs.
    """

    def __init__(self, world, at):
        super().__init__(world)
        self.at = at

    async def find(self):
        if self.at == "find":
            await asyncio.sleep(600)

    async def load(self, folder, version):
        if self.at == "load":
            await asyncio.sleep(600)
        await super().load(folder, version)

    async def complete(self, call, sampling, part, told, patience=None):
        if self.at == "complete":
            await asyncio.sleep(600)
        return await super().complete(call, sampling, part, told)


@pytest.mark.parametrize("at", ["find", "load", "complete"])
def test_a_signal_is_heard_while_weights_are_pushed(world, tmp_path, at):
    polls = []

    def poll():
        polls.append(time.monotonic())
        if len(polls) == 3:
            raise Preempted("SIGTERM")

    began = time.monotonic()
    with pytest.raises(Preempted, match="SIGTERM"):
        fleet(world, [Stuck(world, at)], tmp_path).load(world.params, 0, poll)
    assert time.monotonic() - began < 10


def test_a_server_that_refuses_to_be_asked_is_not_waited_for(world, tmp_path):
    class Locked(Local):
        async def find(self):
            raise Refused(401, "http://two: the server refuses requests (Unauthorized)")

        async def load(self, folder, version):
            await self.find()

    said = []
    made = fleet(
        world, [Local(world), Locked(world, "http://two")], tmp_path, print_line=said.append
    )
    made.load(world.params, 0)
    assert [server.url for server in made.alive] == ["http://one"]
    assert said == [
        "WARNING, rollout.urls: http://two: the server refuses requests (Unauthorized); "
        "1 of 2 servers continue"
    ]


def test_servers_that_never_come_are_left_out_in_the_end(world, tmp_path, monkeypatch):
    class Absent(Local):
        async def find(self):
            raise EngineError(f"{self.url}: no server responds at this address")

        async def load(self, folder, version):
            await self.find()

    monkeypatch.setattr(module, "_START_INTERVAL", 0.01)
    monkeypatch.setattr(module, "_START_TIMEOUT", 0.05)
    made = fleet(world, [Local(world), Absent(world, "http://two")], tmp_path / "a")
    made.load(world.params, 0)
    assert [server.url for server in made.alive] == ["http://one"]
    with pytest.raises(ServersLost, match="none of the servers responded within 0.05 s"):
        fleet(world, [Absent(world)], tmp_path / "b").load(world.params, 0)


def test_what_a_server_can_not_have_sampled_is_an_error(world, tmp_path):
    class Lying(Local):
        async def complete(self, call, sampling, part, told, patience=None):
            tokens, logprobs = await super().complete(call, sampling, part, told)
            return ([0, *tokens[1:]] if part else tokens), logprobs

    with pytest.raises(
        UserError, match="^rollout.urls: .*the token id 0, which must not be sampled"
    ):
        rolled(world, fleet(world, [Lying(world)], tmp_path))


def test_what_is_no_answer_of_a_server_is_not_laid_on_it(world, tmp_path):
    def on_rows(places, trunks, branches):
        raise UserError("rewards.verifier: is not there")

    made = fleet(world, [Local(world)], tmp_path)
    with pytest.raises(UserError, match="^rewards.verifier: is not there$"):
        rolled(world, made, callbacks=Callbacks(on_rows=on_rows))
    with pytest.raises(
        UserError, match="^rollout: trace 0: a cut .* is at -1 tokens; use 0 or more tokens$"
    ):
        rolled(world, made, cuts=np.full((6, 4), -1))


def test_a_row_without_a_budget_is_asked_for_so(world, tmp_path):
    sampler = SamplingSetup(world.spec(), make_rules(), sampling_params(0.7), world.phi_of)
    prompts = make_prompts([2, 3], 5)
    rows = RolloutRequest(np.array([NO_BUDGET, 4]), np.zeros((2, 0), int), ids=np.array([7, 9]))
    asked = lambda key: asked_rows(prompts, rows.complete(sampler.spec), key, sampler)
    one, two = asked(jax.random.key(0))
    assert (one.budget, one.limit, two.budget, two.limit) == (None, 12, 4, 4)
    assert one.sampling.temperature == pytest.approx(0.7) and one.sampling.seed != two.sampling.seed
    again = asked(jax.random.key(1))[0]
    assert again.sampling.seed != one.sampling.seed and again.prompt == one.prompt
