"""Traces show their cuts, answers and rewards, and nothing in them is markup."""

import pytest

from bacr_jax.config import Config, RewardConfig
from bacr_jax.errors import UserError
from bacr_jax.report.traces import traces_section
from report_world import HOSTILE, TRACE, lines


def shown(folder, trace, config=Config()):  # noqa: B008
    lines(folder / "000003.jsonl", [trace])
    return traces_section(folder, config)


def test_traces_show_cuts_answers_and_the_rewards_of_the_dense_formula(tmp_path):
    found = shown(tmp_path, TRACE)
    assert "one <span class=cut>cut 1</span>two <span class=cut>cut 2</span>rest" in found
    # Eq. 7 with lambda 0.3: 0, then 1 + 0.3 (1 - 0).
    assert "outcome 0, reward +0.00" in found and "outcome 1, reward +1.30" in found
    assert "budget 8" in found and "closed by tag" in found


@pytest.mark.parametrize(
    "config", [Config(method="grpo"), Config(reward=RewardConfig(dense=False))]
)
def test_rewards_are_shown_only_where_the_run_trained_on_them(tmp_path, config):
    found = shown(tmp_path, TRACE, config)
    assert "outcome 1<" in found and "reward" not in found


def test_thinking_that_was_not_split_is_shown_whole(tmp_path):
    whole = {key: value for key, value in TRACE.items() if key != "segments"}
    found = shown(tmp_path, whole)
    assert "a&lt;script&gt;" in found and "class=cut" not in found


def test_no_text_of_a_model_is_markup(tmp_path):
    texts = {"prompt": HOSTILE, "closed_by": HOSTILE, "answers": [HOSTILE] * 2}
    found = shown(tmp_path, {**TRACE, **texts})
    assert "<script" not in found
    # the prompt, what closed the thinking, two answers and the last segment
    assert found.count("&lt;script&gt;") == 5


def test_the_first_a_middle_and_the_last_step_are_shown(tmp_path):
    for step in (2, 4, 6, 8, 1000):
        lines(tmp_path / f"{step:06}.jsonl", [{**TRACE, "step": step}])
    found = traces_section(tmp_path, Config())
    headings = [part.split("<")[0] for part in found.split("<h3>")[1:]]
    assert headings == ["step 2", "step 6", "step 1,000"]


def test_without_traces_there_is_no_section(tmp_path):
    assert traces_section(tmp_path, Config()) == ""
    assert traces_section(tmp_path / "none", Config()) == ""


@pytest.mark.parametrize(
    "damage",
    [
        {"budget": None},
        {"outcomes": ["x", "y"]},
        {"context": None},
        {"context": [2]},
        {"segments": []},
    ],
)
def test_what_is_no_trace_is_refused_by_its_file(tmp_path, damage):
    with pytest.raises(UserError, match=r"000003\.jsonl: holds something else than traces"):
        shown(tmp_path, {**TRACE, **damage})
