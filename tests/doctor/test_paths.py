"""The tiny model's paths agree with NumPy, and faults under them are found."""

import os

import numpy as np
import optax
import pytest

import faulty_doctor
from bacr_doctor import paths, reference, trial
from bacr_doctor.__main__ import read_subject
from bacr_doctor.checks import CHECKS
from bacr_doctor.children import run_checks
from bacr_doctor.records import Subject
from bacr_jax.config import Config

SUBJECT = read_subject([])[0]
# What faults break or slow down, each by the check that finds it.
FAULTS = {
    "files": "Operation not supported",
    "grader": "worker processes do not start",
    "decode": "not those of float64",
    "update": "not finite",
    "collectives": "SIGABRT: what it said last",
    "rates": "H100",
}


def test_the_reference_is_a_distribution_that_its_budget_moves():
    tried = trial.make_trial(SUBJECT, "float32")
    params, model = reference.to_float64(tried.params), tried.policy.learner.model
    ids = range(model.vocab_size)

    def said(budget):
        two = [reference.logprobs(params, np.array([1, i]), budget, 1, model)[0] for i in ids]
        return np.exp(two)

    assert said(3).sum() == pytest.approx(1.0)
    assert np.abs(said(3) - said(60)).max() > 1e-3


def test_the_last_tokens_are_scored_as_all_are():
    tried = trial.make_trial(SUBJECT, "float32")
    params, model = reference.to_float64(tried.params), tried.policy.learner.model
    tokens = np.array([5, 1, 7, 2, 9])
    whole = reference.logprobs(params, tokens, 3, 4, model)
    np.testing.assert_allclose(reference.logprobs(params, tokens, 3, 2, model), whole[-2:])


def test_adapters_are_added_to_their_matrices():
    params = trial.make_trial(SUBJECT, "float32", **{"adapter.rank": 4}).params
    merged = reference.to_float64(params)["layers"]["q_kernel"] - params["layers"]["q_kernel"]
    low = params["adapter"]["q_a"].astype(float) @ params["adapter"]["q_b"]
    np.testing.assert_allclose(merged, low * params["adapter_scale"], rtol=1e-6)


def test_a_long_row_is_the_longest_of_the_run_or_what_a_cpu_can_do():
    def tokens(**keys):
        tried = trial.make_long_trial(Subject(Config(), named=bool(keys)).with_keys(keys))
        return tried.config.data.max_prompt_tokens

    own = {"data.max_prompt_tokens": 300, "budget.max": 500, "eval.budgets": (600,)}
    assert tokens(**own, **{"rollout.answer_tokens": 20}) == 300 + 600 + 20 - 80
    assert tokens() == 4096 - 80
    # Thirty-two heads of so many tokens would be gigabytes of scores.
    assert tokens(**own, **{"model.num_heads": 512}) == 362 - 80


@pytest.mark.slow
def test_a_sound_machine_agrees_with_float64_and_a_wrong_step_of_adam_is_found(monkeypatch):
    record = paths.update(SUBJECT, "float32")
    assert record.status == "ok", record
    # An optimizer that moves twice as far, by gradients and moments that are right.
    right = trial.policy_optimizer
    twice = lambda *given: optax.chain(right(*given), optax.scale(2.0))
    monkeypatch.setattr(trial, "policy_optimizer", twice)
    trial.make_trial.cache_clear()
    assert "another step than Adam's" in paths.update(SUBJECT, "float32").measured
    trial.make_trial.cache_clear()


@pytest.mark.slow
def test_six_faults_are_found_by_the_checks_that_are_theirs():
    faults = ("wrong_kernel", "nan_update", "no_rename", "dead_grader", "slow_device")
    put_in = [getattr(faulty_doctor, name) for name in faults]
    wanted = {"versions", *FAULTS}
    checks = [
        faulty_doctor.crashing(check)
        if check.name == "collectives"
        else faulty_doctor.with_faults(check, *put_in)
        for check in CHECKS
        if check.name in wanted
    ]
    found = {one.name: one for one in run_checks(checks, SUBJECT, 6000.0)}
    assert {name for name in found if found[name].status != "ok"} == FAULTS.keys()
    assert found["rates"].status == "warn"
    for name, said in FAULTS.items():
        assert said in found[name].measured


@pytest.mark.parametrize(
    ("visible", "seen"), [("4,5", ["4", "5"]), ("7, GPU-1a2b", ["7", "GPU-1a2b"]), ("", ["0", "1"])]
)
def test_two_processes_use_the_gpus_of_this_job(monkeypatch, visible, seen):
    used = []

    class Joined(Exception):
        """Ends the process before it starts JAX."""

    def join():
        used.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise Joined

    monkeypatch.setattr(paths.processes, "join", join)
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.setenv(name, "")
    for index in range(2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(Joined):
            paths.half(SUBJECT, None, "localhost:1", index, True)
    assert used == seen
