"""Every way to write a budget means the same, and two different ones are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_serve.budget_fields import read_budget_fields
from bacr_serve.errors import RequestError

LEVELS = {"low": 256, "high": 2048}


def read(default=None, most=4096, **body):
    return read_budget_fields(body, levels=LEVELS, default=default, most=most)


@pytest.mark.parametrize(
    "body, budget",
    [
        ({"budget": 512}, 512),
        ({"budget": 0}, 0),
        ({"budget": 512.0}, 512),
        ({"budget": "low"}, 256),
        ({"budget": "none"}, None),
        ({"thinking_budget": 512}, 512),
        ({"thinking_token_budget": 512}, 512),
        ({"reasoning": {"max_tokens": 512}}, 512),
        ({"reasoning": {"effort": "high"}}, 2048),
        ({"reasoning": {"effort": None, "max_tokens": 4096}}, 4096),
        ({"reasoning_effort": "low"}, 256),
        # In OpenAI's field "none" is an answer without thinking.
        ({"reasoning_effort": "none"}, 0),
        ({"budget": 256, "thinking_budget": 256, "reasoning_effort": "low"}, 256),
    ],
)
def test_a_budget_in_any_of_its_forms(body, budget):
    assert read(**body) == budget


def test_without_a_field_the_default_counts():
    assert read(default=7) == 7
    assert read(default=7, budget=None, reasoning_effort=None) == 7
    assert read(default=7, reasoning={}) == 7


@pytest.mark.parametrize(
    "body, field",
    [
        ({"budget": -1}, "budget"),
        ({"budget": 4097}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": "medium"}, "budget"),
        ({"budget": [512]}, "budget"),
        ({"thinking_budget": "512"}, "thinking_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning": 512}, "reasoning"),
        ({"reasoning": {"max_tokens": "low"}}, "reasoning.max_tokens"),
        ({"reasoning": {"tokens": 512}}, "reasoning.tokens"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"reasoning_effort": 512}, "reasoning_effort"),
    ],
)
def test_an_invalid_budget_is_refused_by_its_name(body, field):
    with pytest.raises(RequestError) as refused:
        read(**body)
    assert refused.value.status == 400 and refused.value.param == field
    assert refused.value.message.startswith(f"{field}: ") and "\n" not in refused.value.message


@pytest.mark.parametrize(
    "body, message",
    [
        (
            {"budget": 512, "thinking_budget": 256},
            "budget is 512, but thinking_budget is 256",
        ),
        (
            {"thinking_token_budget": 256, "reasoning_effort": "high"},
            "thinking_token_budget is 256, but reasoning_effort is 2048",
        ),
        (
            {"budget": "none", "reasoning": {"max_tokens": 0}},
            "budget is none, but reasoning.max_tokens is 0",
        ),
        (
            {"reasoning": {"max_tokens": 512, "effort": "low"}},
            "reasoning.max_tokens is 512, but reasoning.effort is 256",
        ),
    ],
)
def test_two_different_budgets_are_refused(body, message):
    with pytest.raises(RequestError) as refused:
        read(**body)
    assert refused.value.message == f"{message}; send only one of the two fields"
    assert refused.value.code == "contradictory_budgets"


def test_an_effort_without_levels_is_refused_with_what_to_write():
    with pytest.raises(
        RequestError, match=r"no levels; use none, or set a number of tokens in the field 'budget'"
    ):
        read_budget_fields({"reasoning_effort": "low"}, levels={}, default=None, most=9)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=4,
)
FIELDS = ["budget", "thinking_budget", "thinking_token_budget", "reasoning_effort", "reasoning"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_value_gives_a_budget_in_range_or_one_clear_line(body):
    try:
        budget = read(**body)
    except RequestError as error:
        assert error.status == 400 and error.message.isprintable()
    else:
        assert budget is None or 0 <= budget <= 4096
