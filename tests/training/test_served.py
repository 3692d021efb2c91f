"""Tests training with a fleet of servers, which load the policy from a folder that a run writes."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_client import Server
from bacr_jax.config.checks import check
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.learner.scoring import response_logprobs
from bacr_jax.methods.registry import make_method
from bacr_jax.model import budget, qwen2
from bacr_jax.model.budget import Conditioned
from bacr_jax.model.hf import hf_config, reading
from bacr_jax.questions import ledger
from bacr_jax.training import initialize, served
from bacr_jax.training.algorithm import iterate
from bacr_jax.types import NO_BUDGET
from methods_world import Odd, load, run_of

# Maximum number of tokens of a prompt and its response.
WIDTH = 64


class FromFolder(Server):
    """Samples nothing: the most likely tokens of the policy in the folder that it was sent.

    Attributes:
      loaded: versions that it was sent.
    """

    def __init__(self, url):
        super().__init__(url)
        self.loaded = []

    async def find(self):
        pass

    connect = find

    async def load(self, folder, version):
        shape, self.params = reading.load_policy(folder)
        module = hf_config.read_budget_module(folder)
        self.loaded.append(version)

        @jax.jit
        def scores(params, row, length, told):
            conditioned = None
            if module is not None:
                phi = budget.embed(
                    params["budget"],
                    told,
                    conditioning=module.conditioning,
                    b_max=module.b_max,
                )
                conditioned = Conditioned(
                    phi, params["budget"]["gate"], settings=module.conditioning
                )
            hidden = qwen2.forward(params, row, config=shape, conditioned=conditioned)
            return qwen2.logits(params, hidden)[0, length - 1]

        self.scores = scores

    async def complete(self, call, sampling, part, told, patience=None):
        row, logprobs = np.zeros((1, WIDTH), np.int32), []
        first = length = len(call.prompt)
        row[0, :length] = call.prompt
        for _ in range(call.max_tokens):
            logits = self.scores(self.params, row, length, np.array([told["budget"]]))
            allowed = np.ones(len(logits), bool)
            allowed[sorted(FromFolder.never)] = False
            found = jax.nn.log_softmax(jnp.where(allowed, logits, -jnp.inf))
            row[0, length] = found.argmax()
            logprobs.append(float(found.max()))
            length += 1
        return row[0, first:length].tolist(), logprobs


def run_served_by(kind, tmp_path, monkeypatch, *overrides):
    """A run whose only server is of a kind, and its state."""
    own = ledger.ledger_tokenizer()
    config = load(
        tmp_path, "bacr-robust", "rollout.engine=vllm", "rollout.urls=[http://one:1]",
        f"rollout.weights_dir={tmp_path / 'weights'}", "rollout.questions=2",
        "rollout.group_size=2", *overrides,
    )  # fmt: skip
    monkeypatch.setattr(served, "Server", kind)
    run, state = run_of(config, (own, len(own)), Odd())
    run = served.with_servers(run, tmp_path / "run", print)
    FromFolder.never = run.sample.remote_sampling.rules.never
    return run, state


@pytest.fixture
def served_run(tmp_path, monkeypatch):
    return run_served_by(FromFolder, tmp_path, monkeypatch)


class Keeping(FromFolder):
    """Says that it takes each policy, and keeps the first one."""

    async def load(self, folder, version):
        if self.loaded:
            self.loaded.append(version)
        else:
            await super().load(folder, version)


@pytest.mark.slow
def test_a_server_that_misses_one_update_at_a_usual_rate_ends_the_run(tmp_path, monkeypatch):
    rates = ("optimizer.learning_rate=1e-5", "optimizer.conditioning_learning_rate=1e-5")
    run, state = run_served_by(Keeping, tmp_path, monkeypatch, *rates, "optimizer.warmup_steps=0")
    state, done = iterate(run, state, 0)
    assert done.metrics["policy/grad_norm"] > 0
    with pytest.raises(UserError, match="are closer to those of the previous weights"):
        iterate(run, state, 1)


@pytest.mark.slow
def test_two_iterations_by_a_server_that_gets_each_update(served_run):
    """Its log-probabilities are the learner's own: the folder holds the policy that learns."""
    run, state = served_run
    for step in range(2):
        state, done = iterate(run, state, step)
        assert abs(done.metrics["mismatch/k1"]) < 1e-5
        assert done.metrics["rollout/thinking_max"] <= 12
    fleet = run.sample
    (server,) = fleet.servers
    # The name of the fleet differs in each run, so that another run's weights are noticed.
    assert server.loaded == [f"{fleet.name}-0", f"{fleet.name}-1"]


@pytest.mark.parametrize(("rounded", "bound"), [("null", 1e-3), ("bfloat16", 0.1)])
def test_servers_may_differ_by_as_much_as_the_learner_rounds(tmp_path, rounded, bound):
    own = ledger.ledger_tokenizer()
    config = load(
        tmp_path, "bacr-robust", "rollout.engine=vllm", "rollout.urls=[http://one:1]",
        f"rollout.weights_dir={tmp_path / 'weights'}", f"model.product_dtype={rounded}",
    )  # fmt: skip
    run, _ = run_of(config, (own, len(own)), Odd())
    fleet = served.with_servers(run, tmp_path / "run", print).sample
    assert (fleet.dtype, fleet.bound) == ("float32", bound)


def largest_mismatch(config):
    sections = (config.model, config.rollout, config.loss)
    return served.largest_mismatch(*sections, config.train.minibatches)


@pytest.mark.parametrize(
    ("overrides", "largest"),
    [
        ([], 1e-3),
        (["model.compute_dtype=bfloat16"], 0.1),
        (["model.product_dtype=bfloat16"], 0.1),
        # In the next two cases, the policy is updated between sampling and learning.
        (["rollout.async_steps=1", "loss.importance_cap=2"], 0.1),
        (["loss.old_logprobs=sampler", "loss.importance_cap=2", "train.minibatches=2"], 0.1),
        (["loss.old_logprobs=sampler", "loss.importance_cap=2", "train.minibatches=1"], 1e-3),
    ],
)
def test_a_step_may_differ_by_as_much_as_the_probe(tmp_path, overrides, largest):
    servers = ["rollout.engine=vllm", "rollout.urls=[http://one:1]"]
    config = load(tmp_path, "bacr-robust", *servers, "model.product_dtype=null", *overrides)
    assert largest_mismatch(config) == largest
    assert largest_mismatch(load(tmp_path, "bacr-robust")) == 0.1


def test_every_push_is_checked_by_other_questions_and_budgets(served_run):
    run, state = served_run
    probe = run.sample.probe
    first, again, second = (probe.draw(version) for version in (0, 0, 1))
    assert first == again != second
    assert len({one.budget for one in first}) > 4
    assert len({one.prompt for one in first}) > 4
    scores = probe.score(run.params(state.train), first)
    # The scores of each context are a distribution in which only allowed tokens are likely.
    np.testing.assert_allclose(np.exp(scores).sum(-1), 1.0, rtol=1e-5)
    allowed = np.asarray(run.task_data.rules.allowed_tokens)
    assert (scores[:, ~allowed] < -1e3).all() and scores.shape == (len(first), len(allowed))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_those_of_the_learner_token_by_token(tmp_path, monkeypatch, temperature):
    override = f"rollout.temperature={temperature}"
    run, state = run_served_by(FromFolder, tmp_path, monkeypatch, override)
    params = run.params(state.train)
    ids = np.flatnonzero(np.asarray(run.task_data.rules.allowed_tokens))[:3].tolist()
    context = run.sample.probe.draw(3)[0]
    length = len(context.prompt)
    parts = [dataclasses.replace(context, response=tuple(ids[:count])) for count in range(3)]
    found = run.sample.probe.score(params, parts)[np.arange(3), ids]
    wanted = response_logprobs(
        params,
        jnp.array([[*context.prompt, *ids]]),
        jnp.array([length]),
        jnp.array([length + 3]),
        jnp.array([NO_BUDGET if context.budget is None else context.budget]),
        run.task_data.rules.allowed_tokens,
        spec=dataclasses.replace(run.policy.learner, temperature=temperature),
    )
    np.testing.assert_allclose(found, np.asarray(wanted)[0, length:], atol=1e-5)
    # The servers sample the fixed prompts at this temperature too.
    assert run.sample.probe.temperature == temperature


def test_two_runs_of_one_name_do_not_share_a_folder_of_weights(served_run, tmp_path):
    run, _ = served_run
    with pytest.raises(UserError, match="weights/run is in use by process"):
        served.with_servers(run, tmp_path / "elsewhere" / "run", print)


def test_servers_never_see_the_untrained_weights_of_a_warm_up(served_run):
    run, _ = served_run
    own = dataclasses.replace(run.config.rollout, engine="jax")
    assert initialize.can_compile_ahead(
        dataclasses.replace(run, config=dataclasses.replace(run.config, rollout=own))
    )
    assert not initialize.can_compile_ahead(run)


def test_a_large_model_has_no_second_policy_during_its_warm_up(served_run, monkeypatch):
    run, _ = served_run
    own = dataclasses.replace(run.config.rollout, engine="jax")
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, rollout=own))
    parameters = run.policy.learner.model.num_parameters
    for limit, compiles in ((parameters, True), (parameters - 1, False)):
        monkeypatch.setattr(initialize, "_MOST_COMPILED_AHEAD", limit)
        assert initialize.can_compile_ahead(run) is compiles


def test_in_a_running_event_loop_a_run_with_servers_is_refused(served_run, tmp_path):
    run, _ = served_run

    async def in_a_notebook():
        served.with_servers(run, tmp_path / "run", print)

    with pytest.raises(UserError, match="rollout.engine=vllm .* use the command bacr train"):
        asyncio.run(in_a_notebook())


def test_a_method_that_samples_on_can_not_be_a_batch_ahead(tmp_path):
    """Known before anything starts, of a method of one's own too."""
    ahead = ["rollout.engine=vllm", "rollout.urls=[http://one:1]", "rollout.async_steps=1",
             "loss.importance_cap=2"]  # fmt: skip
    with pytest.raises(UserError, match="rollout.async_steps=1: DAPO decides only after grading"):
        load(tmp_path, "dapo", *ahead)
    own = tmp_path / "own.py"
    own.write_text("from bacr_jax.methods.dapo import make\n")
    config = load(tmp_path, None, *ahead, f"method={own}", "dapo.dynamic_sampling=true")
    with pytest.raises(UserError, match="rollout.async_steps=1: DAPO decides only after grading"):
        make_method(resolve(config).method)


def test_settings_that_contradict_each_other(tmp_path):
    for overrides, says in (
        (["rollout.engine=vllm"], r"rollout.engine=vllm needs the addresses of vLLM servers"),
        (["rollout.urls=[http://one:1]"], "has no effect without rollout.engine=vllm"),
        (
            ["rollout.async_steps=1", "loss.sequence_mask=0.1"],
            "the built-in decoder and the learner share the same devices",
        ),
        (
            ["rollout.engine=vllm", "rollout.urls=[http://one:1]", "rollout.async_steps=1"],
            "the traces are sampled by the previous policy, but no correction",
        ),
    ):
        with pytest.raises(UserError, match=says):
            check(load(tmp_path, "bacr-robust", *overrides))
