"""Requests become token ids within the policy's lengths."""

import pytest

from bacr_serve.errors import RequestError
from bacr_serve.fields import Defaults, read_chat, read_completion
from serve_world import LEVELS, ids, letter_policy

DEFAULTS = Defaults("policy", LEVELS, None, 64)


def chat(policy, question="1+1", **fields):
    body = {"messages": [{"role": "user", "content": question}], **fields}
    return policy.generation(read_chat(body, DEFAULTS))


def completion(policy, prompt, **fields):
    return policy.generation(read_completion({"prompt": prompt, **fields}, DEFAULTS))


def test_the_budget_limits_the_thinking_and_is_in_the_prompt():
    request = chat(letter_policy(), budget=8, temperature=0.5, top_p=0.9, seed=3)
    assert (request.prompt, request.budget, request.limit) == (ids("1+1~8"), 8, 8)
    assert (request.temperature, request.top_p, request.seed) == (0.5, 0.9, 3)


def test_without_a_budget_the_cap_limits_the_thinking():
    request = chat(letter_policy())
    assert (request.prompt, request.budget, request.limit) == (ids("1+1"), None, 32)


def test_max_tokens_limits_the_thinking_too_and_is_not_told_to_the_policy():
    request = chat(letter_policy(), budget=8, max_tokens=5)
    assert (request.budget, request.limit, request.max_tokens) == (8, 5, 5)


def test_a_completion_is_continued_as_it_is():
    assert completion(letter_policy(), "ab", budget=8).prompt == ids("ab")
    assert completion(letter_policy(), [5, 0]).prompt == (5, 0)


@pytest.mark.parametrize(
    "prompt, message",
    [
        (
            "a" * 101,
            "prompt: the prompt has 101 tokens, but this policy accepts at most 100 tokens; ",
        ),
        # So many characters that no tokenization could fit: not even tokenized.
        (
            "\n" * 1001,
            "prompt: the prompt has 1001 characters, but this policy accepts at most 100 "
            "tokens; send",
        ),
        ([5] * 101, "prompt: the prompt has 101 tokens, "),
        (
            [99],
            "prompt: the token id 99 is not in the vocabulary of this policy; use ids from 0 to 98",
        ),
        ([-1], "prompt: the token id -1 is not in the vocabulary"),
        ("a\nb", "prompt: the tokenizer can't encode this text; use another"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(prompt, message):
    with pytest.raises(RequestError) as refused:
        completion(letter_policy(), prompt)
    assert refused.value.status == 400 and refused.value.message.startswith(message)


def test_only_an_opening_that_is_no_tag_belongs_to_the_answer():
    assert letter_policy().answer_prefix == ""
    assert letter_policy(answer_open="\\boxed{").answer_prefix == "\\boxed{"
