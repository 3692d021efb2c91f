"""What the sampler draws follows its distribution, and faults of the sampler are found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_doctor import draws
from bacr_doctor.__main__ import read_subject
from bacr_doctor.draws import FALSE_ALARM, Drawn, faults, probabilities_of
from bacr_jax.rollout import branches, sampling, trunks

SUBJECT = read_subject([])[0]
VOCABULARY = 600
ALLOWED = draws.allowed_tokens(VOCABULARY)
LOGITS = draws.known_logits(VOCABULARY, jnp.float32)
PROBABILITIES = probabilities_of(LOGITS, ALLOWED, 1.0, 1.0)


def by_numpy(probabilities=PROBABILITIES, seed=0):
    """Independent draws of 64 rows and their 128 answers, by NumPy."""
    generator = np.random.default_rng(seed)
    thinking = generator.choice(VOCABULARY, (64, 64), p=probabilities)
    answers = generator.choice(VOCABULARY, (128, 32), p=probabilities)
    return Drawn("training", PROBABILITIES, thinking, answers)


def test_probabilities_are_those_of_a_softmax_cut_to_its_nucleus():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    allowed = np.ones(4, bool)
    np.testing.assert_allclose(
        probabilities_of(logits, allowed, 1.0, 1.0), [4 / 8, 2 / 8, 1 / 8, 1 / 8]
    )
    # Squares of the masses: 16, 4, 1 and 1 of 22.
    np.testing.assert_allclose(
        probabilities_of(logits, allowed, 0.5, 1.0), np.array([16, 4, 1, 1]) / 22
    )
    # Of the two that tie the first is inside.
    np.testing.assert_allclose(
        probabilities_of(logits, allowed, 1.0, 0.8), np.array([4, 2, 1, 0]) / 7
    )
    allowed[0] = False
    np.testing.assert_allclose(
        probabilities_of(logits, allowed, 1.0, 1.0), [0, 2 / 4, 1 / 4, 1 / 4]
    )


def test_the_known_distribution_reaches_both_ends_of_the_vocabulary_and_forbids_two_ids():
    counted = draws.cells_of(4096 * PROBABILITIES)
    assert len(np.unique(counted)) > 60
    assert PROBABILITIES[0] > 1e-3 and PROBABILITIES[-1] > 1e-3
    assert (PROBABILITIES == 0).sum() == 2 and PROBABILITIES.max() < 0.06


def test_independent_draws_pass_a_hundred_times():
    assert FALSE_ALARM <= 1e-6
    assert [faults(by_numpy(seed=seed)) for seed in range(100)] == [[]] * 100


def test_p_values_of_independent_draws_are_uniform():
    values = [draws.chi_square(by_numpy(seed=seed).thinking, PROBABILITIES) for seed in range(200)]
    assert 0.4 < np.mean(values) < 0.6
    assert 0.05 < np.mean(np.array(values) < 0.1) < 0.17


def changed(path, change):
    """Independent draws with one path's tokens changed."""
    drawn = by_numpy()
    return dataclasses.replace(drawn, **{path: change(getattr(drawn, path).copy())})


def repeat_first_row(tokens):
    tokens[:] = tokens[0]
    return tokens


def repeat_a_far_row(tokens):
    tokens[60] = tokens[3]
    return tokens


def repeat_half_of_a_row(tokens):
    tokens[60, ::2] = tokens[3, ::2]
    return tokens


def repeat_a_step(tokens):
    tokens[:, 20] = tokens[:, 5]
    return tokens


def never_agree(tokens):
    """Neighbours never have the same token, though their frequencies are right."""
    generator = np.random.default_rng(2)
    first, second = tokens[::2], tokens[1::2]
    while (first == second).any():
        other = generator.choice(VOCABULARY, second.shape, p=PROBABILITIES)
        second[:] = np.where(first == second, other, second)
    return tokens


@pytest.mark.parametrize("path", ["thinking", "answers"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: tokens % (VOCABULARY // 2), "not from their distribution"),
        (lambda tokens: (tokens + 1) % VOCABULARY, "that may not be drawn"),
        (lambda tokens: np.minimum(tokens, 560), "not from their distribution"),
        (repeat_first_row, "rows 0 and 1 share"),
        (repeat_a_far_row, "rows 3 and 60 share"),
        (repeat_half_of_a_row, "rows 3 and 60 share"),
        (repeat_a_step, "steps 5 and 20 share"),
        (never_agree, "rows next to each other share 0 of"),
    ],
)
def test_wrong_tokens_are_found_and_their_path_is_named(path, change, words):
    found = faults(changed(path, change))
    assert any(fault.startswith(f"training, {path}: ") and words in fault for fault in found), found


@pytest.mark.parametrize(("temperature", "top_p"), [(0.8, 1.0), (1.25, 1.0), (1.0, 0.95)])
def test_another_temperature_or_nucleus_is_found(temperature, top_p):
    other = probabilities_of(LOGITS, ALLOWED, temperature, top_p)
    assert "not from their distribution" in faults(by_numpy(other))[0]


def test_answers_that_repeat_their_thinking_are_found():
    drawn = by_numpy()
    drawn.answers[7] = drawn.thinking[9, :32]
    (fault,) = faults(drawn)
    assert fault.startswith("training: thinking and answers: rows 9 and 71 share 32 of 32")


# Faults of the sampler itself, each put into the compiled programs of a rollout.


def patch_sample(monkeypatch, change):
    right = sampling._sample

    def wrong(shares, logits, allowed, params, part):
        return change(right, shares, logits, allowed, params, part)

    monkeypatch.setattr(sampling, "_sample", wrong)


def never_the_upper_half(monkeypatch):
    def change(right, shares, logits, *rest):
        token, logprob = right(shares, logits, *rest)
        return token % (logits.shape[-1] // 2), logprob

    patch_sample(monkeypatch, change)


def one_number_for_all_rows(monkeypatch):
    patch_sample(monkeypatch, lambda right, shares, *rest: right(shares[:1] + 0 * shares, *rest))


def next_id(monkeypatch):
    def change(right, shares, logits, *rest):
        token, logprob = right(shares, logits, *rest)
        return (token + 1) % logits.shape[-1], logprob

    patch_sample(monkeypatch, change)


def temperature_ignored(monkeypatch):
    def change(right, shares, logits, allowed, params, part):
        one = jnp.where(params.temperature > 0, 1.0, 0.0)
        return right(shares, logits, allowed, dataclasses.replace(params, temperature=one), part)

    patch_sample(monkeypatch, change)


def nucleus_ignored(monkeypatch):
    def change(right, shares, logits, allowed, params, part):
        whole = dataclasses.replace(params, truncated=False)
        return right(shares, logits, allowed, whole, part)

    patch_sample(monkeypatch, change)


def greedy_ignored(monkeypatch):
    def change(right, shares, logits, allowed, params, part):
        warm = jnp.where(params.temperature > 0, params.temperature, 1.0)
        return right(shares, logits, allowed, dataclasses.replace(params, temperature=warm), part)

    patch_sample(monkeypatch, change)


def patch_keys(monkeypatch, module, change):
    right = module.row_keys

    def wrong(key, ids, position, origin):
        return right(*change(key, ids, position, origin))

    monkeypatch.setattr(module, "row_keys", wrong)


def one_key_for_all_steps(monkeypatch):
    patch_keys(monkeypatch, trunks, lambda key, ids, at, origin: (key, ids, 0 * at, origin))


def rows_share_their_id(monkeypatch):
    def change(key, ids, position, origin):
        return key, dataclasses.replace(ids, row=ids.row // 2), position, origin

    patch_keys(monkeypatch, trunks, change)


def cuts_share_their_key(monkeypatch):
    patch_keys(monkeypatch, branches, lambda key, ids, at, origin: (key, ids, at, 1))


def answers_repeat_the_thinking(monkeypatch):
    def change(key, ids, position, origin):
        return key, ids, position, 0 * origin

    patch_keys(monkeypatch, branches, change)


def steps_of_the_run_share_their_key(monkeypatch):
    right = draws.round_keys
    monkeypatch.setattr(draws, "round_keys", lambda key, step, index: right(key, 1, index))


def test_an_evaluation_is_sampled_otherwise_than_training():
    config = SUBJECT.config
    sampling_of = lambda asked: (asked.temperature, asked.top_p)
    # The quickstart's own is at temperature 1 without a nucleus, as its training.
    assert sampling_of(draws.evaluation_sampling(config)) == (0.6, 0.95)
    own = dataclasses.replace(config, eval=dataclasses.replace(config.eval, top_p=0.9))
    assert sampling_of(draws.evaluation_sampling(own)) == (1.0, 0.9)


@pytest.fixture
def fresh_programs():
    """Programs are compiled with the fault in them, and not used again."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def faults_under(fault, monkeypatch):
    fault(monkeypatch)
    return draws.draws(SUBJECT)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (never_the_upper_half, "training, thinking: 4,096 tokens are not from their distribution"),
        (one_number_for_all_rows, "training, thinking: rows 0 and 1 share 64 of 64 tokens"),
    ],
)
def test_a_sampler_that_repeats_itself_or_leaves_ids_out_is_broken(
    fault, words, monkeypatch, fresh_programs
):
    record = faults_under(fault, monkeypatch)
    assert record.status == "broken" and words in record.measured


@pytest.mark.slow
def test_a_sound_sampler_passes_at_the_settings_of_several_runs(fresh_programs):
    for words in ([], ["--config", "quickstart"], ["--config", "qwen2.5-1.5b-80gb"]):
        record = draws.draws(read_subject(words)[0])
        assert record.status == "ok", record.measured
    keys = ["rollout.temperature=0.7", "eval.top_p=1", "eval.temperature=1.3", "seed=5"]
    assert draws.draws(read_subject(["--config", "quickstart", *keys])[0]).status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (next_id, "training, thinking: 4,096 tokens are not from their distribution"),
        (temperature_ignored, "evaluation, thinking: 4,096 tokens are not from"),
        (nucleus_ignored, "evaluation, thinking: 4,096 tokens are not from"),
        (greedy_ignored, "greedy evaluation: not the most likely token"),
        (one_key_for_all_steps, "training, thinking: steps 0 and 1 share 64 of 64 tokens"),
        (rows_share_their_id, "training, thinking: rows 0 and 1 share 64 of 64 tokens"),
        (cuts_share_their_key, "training, answers: rows 0 and 1 share 32 of 32 tokens"),
        (answers_repeat_the_thinking, "training, answers: rows 0 and 1 share 32 of 32"),
        (steps_of_the_run_share_their_key, "training, thinking: rows 0 and 32 share 64 of 64"),
    ],
)
def test_a_fault_of_the_sampler_is_named_by_its_path(fault, words, monkeypatch, fresh_programs):
    record = faults_under(fault, monkeypatch)
    assert record.status == "broken" and words in record.measured
