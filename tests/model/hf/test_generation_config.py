"""Sampling settings of a model folder's generation_config.json."""

import json

import pytest

from bacr_jax.errors import UserError
from bacr_jax.model.hf.generation_config import read_sampling


def sampling_of(folder, content):
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_sampling(folder)


@pytest.mark.parametrize(
    "sampling",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
        {"do_sample": True, "temperature": 1, "top_p": 1.0, "top_k": 20},
    ],
)
def test_the_settings_of_sampling_are_read_and_no_others(tmp_path, sampling):
    others = {"eos_token_id": [1, 2], "repetition_penalty": 1.05, "min_p": None}
    assert sampling_of(tmp_path, sampling | others) == sampling
    assert sampling_of(tmp_path, {"top_k": None} | sampling) == sampling


@pytest.mark.parametrize("content", [{}, {"temperature": 0.6}, {"do_sample": False, "top_p": 7}])
def test_a_file_that_does_not_sample_has_no_settings(tmp_path, content):
    assert read_sampling(tmp_path) == {}
    assert sampling_of(tmp_path, content) == {}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"temperature": 0}, "`temperature` is 0, which is not valid; use a number from 0.001"),
        ({"temperature": "0.6"}, "`temperature` is '0.6', which"),
        ({"temperature": True}, "`temperature` is true, which"),
        ({"top_p": 0}, "`top_p` is 0, which is not valid; use a number above 0 and at most 1"),
        ({"top_p": 1.5}, "`top_p` is 1.5, which"),
        ({"top_k": -1}, "`top_k` is -1, which is not valid; use a whole number of at least 0"),
        ({"top_k": 2.5}, "`top_k` is 2.5, which"),
    ],
)
def test_a_setting_that_is_not_valid_is_refused_with_its_file(tmp_path, setting, says):
    with pytest.raises(UserError) as refused:
        sampling_of(tmp_path, {"do_sample": True} | setting)
    assert f"generation_config.json: {says}" in str(refused.value)


def test_a_number_that_is_too_large_for_a_float_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 1e999}')
    with pytest.raises(UserError, match="generation_config.json"):
        read_sampling(tmp_path)


def test_a_file_that_is_not_an_object_is_refused(tmp_path):
    with pytest.raises(UserError, match="can't be read as a JSON object"):
        sampling_of(tmp_path, [1])
