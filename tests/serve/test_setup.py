"""Lengths that fit into a model's positions, and what of a folder is served."""

import pytest

import hf_world
import thinking_world
from bacr_jax.errors import UserError
from bacr_jax.generate import open_session
from bacr_serve.fields import Defaults, read_chat
from bacr_serve.setup import Lengths, choose_lengths, proxy_backend, serve_policy
from serve_world import LEVELS, OVERRIDES, make_folder


def lengths(positions=100, reserved=10, prompt_tokens=20, wanted=50, largest=None):
    return choose_lengths(
        positions,
        reserved=reserved,
        prompt_tokens=prompt_tokens,
        wanted=wanted,
        largest=largest,
    )


@pytest.mark.parametrize(
    "given, expected",
    [
        # 90 positions: 50 for thinking, and the prompts of the policy.
        ({}, Lengths(50, 20)),
        # Thinking gets what full prompts leave, ...
        ({"wanted": 80}, Lengths(70, 20)),
        # ... but at least half.
        ({"wanted": 80, "prompt_tokens": 60}, Lengths(45, 45)),
        ({"largest": 80}, Lengths(80, 10)),
        ({"largest": 89}, Lengths(89, 1)),
    ],
)
def test_positions_are_divided(given, expected):
    assert lengths(**given) == expected


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"largest": 90},
            "--max-budget 90: next .* 100 positions leave room for only 89 thinking",
        ),
        ({"reserved": 99}, "rollout.answer_tokens: the answer and its tags need 99 positions"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        lengths(**given)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("models") / "tiny")
    return open_session(None, folder, None, OVERRIDES)


def test_a_folder_is_served_with_its_levels_and_lengths(session):
    policy = serve_policy(session, name=None, largest=None)
    assert (policy.name, policy.levels) == ("tiny", LEVELS)
    # The module's largest budget is 16; of 64 positions 2 + 3 are for the tags and the answer.
    assert (policy.largest_budget, policy.cap, policy.prompt_tokens) == (16, 16, 24)
    assert policy.think_close == "</think>" and policy.answer_prefix == ""
    assert serve_policy(session, name="mine", largest=40).largest_budget == 40


def test_a_model_that_thinks_by_itself_is_sampled_by_default(session, tmp_path):
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8}
    base = thinking_world.thinking_folder(
        tmp_path / "base", "r1", hf_world.FAMILIES["qwen2"], **sampling
    )
    native = open_session(None, base, None, ["data.prompt_format=native"])
    for opened, expected in ((native, (0.7, 0.8)), (session, (0.0, 1.0))):
        policy = serve_policy(opened, name=None, largest=1)
        assert (policy.temperature, policy.top_p) == expected


def test_a_question_has_the_tokens_of_bacr_generate(session):
    policy = serve_policy(session, name=None, largest=None)
    body = {"messages": [{"role": "user", "content": "1a2"}], "budget": "low"}
    request = policy.generation(read_chat(body, Defaults("tiny", LEVELS, None, 16)))
    prompts = session.prompts(["1a2"], [4])
    assert request.prompt == tuple(prompts.tokens[0][: prompts.lengths[0]].tolist())
    assert (request.budget, request.limit) == (4, 4)


@pytest.mark.parametrize("question", ["Größe", "1a2" * 40])
def test_a_question_without_tokens_or_with_too_many_is_refused(session, question):
    encoder = serve_policy(session, name=None, largest=None).encoder
    with pytest.raises(UserError):
        encoder.question(question, None)


def test_only_an_exported_folder_is_served_by_vllm(session):
    policy = serve_policy(session, name=None, largest=None)
    with pytest.raises(UserError, match="is not a folder that bacr export wrote"):
        proxy_backend(session, policy, "http://127.0.0.1:1")
