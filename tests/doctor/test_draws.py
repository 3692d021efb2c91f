"""What the sampler draws follows its distribution, and faults of the sampler are found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bacr_doctor import draws
from bacr_doctor.__main__ import read_subject
from bacr_doctor.draws import FALSE_ALARM, SampledTokens, find_faults, probabilities_of
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
    return SampledTokens("training", PROBABILITIES, thinking, answers)


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
    assert [find_faults(by_numpy(seed=seed)) for seed in range(100)] == [[]] * 100


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
    found = find_faults(changed(path, change))
    assert any(fault.startswith(f"training, {path}: ") and words in fault for fault in found), found


@pytest.mark.parametrize(("temperature", "top_p"), [(0.8, 1.0), (1.25, 1.0), (1.0, 0.95)])
def test_another_temperature_or_nucleus_is_found(temperature, top_p):
    other = probabilities_of(LOGITS, ALLOWED, temperature, top_p)
    assert "not from their distribution" in find_faults(by_numpy(other))[0]


# Training as in quickstart, and an evaluation by the defaults.
SETTINGS = [(1.0, 1.0), (0.6, 0.95)]


def sampled_at(error, seed, temperature, top_p):
    """Draws of a sampler whose temperature is `error` times the right one."""
    right = probabilities_of(LOGITS, ALLOWED, temperature, top_p)
    drawn = by_numpy(probabilities_of(LOGITS, ALLOWED, error * temperature, top_p), seed)
    return dataclasses.replace(drawn, probabilities=right)


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("error", [0.9, 1.1])
def test_an_error_of_temperature_of_ten_percent_is_found(error, temperature, top_p):
    for seed in range(20):
        assert find_faults(sampled_at(error, seed, temperature, top_p))


def test_a_small_error_of_temperature_is_named_with_its_size():
    (fault,) = find_faults(sampled_at(1.08, 0, 1.0, 1.0))
    assert fault.startswith("training: the tokens fit 1.0") and "temperature" in fault


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_the_estimated_temperature_and_its_p_value_are_right(temperature, top_p):
    ratios, p_values = [], []
    for seed in range(200):
        drawn = sampled_at(1.0, seed, temperature, top_p)
        ratio, p_value = draws.temperature_ratio(draws.all_tokens(drawn), drawn.probabilities)
        ratios.append(ratio)
        p_values.append(p_value)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.003)
    assert 0.4 < np.mean(p_values) < 0.6
    assert 0.05 < np.mean(np.array(p_values) < 0.1) < 0.17


def test_the_size_of_an_error_of_temperature_is_estimated():
    hot = [sampled_at(1.1, seed, 1.0, 1.0) for seed in range(20)]
    ratios = [draws.temperature_ratio(draws.all_tokens(x), x.probabilities)[0] for x in hot]
    assert np.mean(ratios) == pytest.approx(1.1, abs=0.005)


def test_the_temperature_of_a_coin_is_worked_out_by_hand():
    """p = 4/5 and 1/5, drawn as 2/3 and 1/3: odds of 2 are those of 4 to the power of 1/2."""
    tokens = np.array([0] * 200 + [1] * 100)
    ratio, p_value = draws.temperature_ratio(tokens, np.array([0.8, 0.2]))
    assert ratio == pytest.approx(2.0)
    # G = 2 (200 ln((2/3) / (4/5)) + 100 ln((1/3) / (1/5))).
    statistic = 2 * (200 * np.log(5 / 6) + 100 * np.log(5 / 3))
    assert p_value == pytest.approx(stats.chi2.sf(statistic, 1))


def test_without_a_temperature_to_see_none_is_wrong():
    assert draws.temperature_ratio(np.array([0, 1]), np.array([0.5, 0.5])) == (1.0, 1.0)
    assert draws.temperature_ratio(np.array([2]), np.array([0.7, 0.3, 0.0])) == (1.0, 1.0)
    # Only the most likely token: any lower temperature fits.
    assert draws.temperature_ratio(np.array([0] * 300), np.array([0.8, 0.2]))[0] == 0.1


def test_answers_that_repeat_their_thinking_are_found():
    drawn = by_numpy()
    drawn.answers[7] = drawn.thinking[9, :32]
    (fault,) = find_faults(drawn)
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


def temperature_six_percent_high(monkeypatch):
    def change(right, shares, logits, allowed, params, part):
        hot = dataclasses.replace(params, temperature=1.06 * params.temperature)
        return right(shares, logits, allowed, hot, part)

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
    temperature = config.rollout.temperature
    sampling_of = lambda asked: (asked.temperature, asked.top_p)
    # The quickstart's own is at temperature 1 without a nucleus, as its training.
    assert sampling_of(draws.evaluation_sampling(config.eval, temperature)) == (0.6, 0.95)
    own = dataclasses.replace(config.eval, top_p=0.9)
    assert sampling_of(draws.evaluation_sampling(own, temperature)) == (1.0, 0.9)


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
        (temperature_six_percent_high, "training: the tokens fit 1."),
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
