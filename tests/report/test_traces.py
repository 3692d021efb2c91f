"""Traces show their cuts, verdicts, rewards and advantages, and nothing in them is markup."""

import re

import pytest

from bacr_jax.errors import UserError
from bacr_jax.report.traces import (
    budget_names,
    is_right,
    read_traces,
    shown_traces,
    traces_section,
)
from report_world import HOSTILE, TRACE, lines


def shown(folder, trace):
    lines(folder / "000003.jsonl", [trace])
    return traces_section([("run", shown_traces(read_traces(folder)))])


def cells(found):
    """Cells of the answers' rows by their heads."""
    table = found.partition("<table>")[2]
    heads = re.findall(r"<th.*?>(.*?)</th>", table)
    rows = re.findall(r"<tr>(<td>.*?)</tr>", table, re.DOTALL)
    plain = lambda row: [re.sub("<.*?>", "", c) for c in re.findall(r"<td.*?>(.*?)</td>", row)]
    return [dict(zip(heads, plain(row))) for row in rows]


def test_traces_show_cuts_and_answers(tmp_path):
    found = shown(tmp_path, {**TRACE, "segment_advantages": [None, None]})
    assert 'one <span class="cut">cut 1</span>two <span class="cut">cut 2</span>rest' in found
    first, last = cells(found)
    assert first["outcome"] == "0" and last["outcome"] == "1"
    assert "budget 8" in found and "closed by tag" in found


def test_a_trace_tells_the_whole_story(tmp_path):
    found = shown(tmp_path, TRACE)
    assert "<dt>policy&#39;s budget</dt><dd>8 tokens, by embedding</dd>" in found
    assert "5 prompt, 6 thinking, 1 closing tag" in found and "level 2" in found
    assert "difficulty group 1" in found and "<dt>gold</dt><dd>7&lt;script" in found
    first, last = cells(found)
    assert first["decided by"] == "none" and last["decided by"].startswith("symbolic: &lt;script")
    assert (first["reward"], last["reward"]) == ("+0.00", "+1.30")
    assert (first["value"], first["advantage of the segment"]) == ("+0.25", "+0.75")
    assert (first["of the answer"], last["of the answer"]) == ("-0.25", "+nan")
    assert (last["forced"], last["answered"], last["total"]) == ("1", "2", "9")
    assert '<span class="up2" title="advantage +0.750">one </span>' in found
    assert '<span class="down1" title="advantage -0.125">two </span>' in found
    assert "learned from" not in found
    assert "left it out of the loss" in shown(tmp_path, {**TRACE, "in_loss": False})


def test_the_first_right_and_the_first_wrong_trace_stand_open_and_tints_are_explained():
    wrong = {**TRACE, "outcomes": [1.0, 0.0]}
    found = traces_section([("run", [wrong, wrong, TRACE, TRACE])])
    traces = re.findall(r'<details class="trace"( open)?', found)
    assert traces == [" open", "", " open", ""]
    assert '<span class="up1">green</span> had a positive advantage' in found


def test_several_answers_of_a_cut_share_its_value(tmp_path):
    # Two cuts with two answers each; the segments of a cut's further answers are empty.
    twice = {
        "answers": ["1", "2", "3", "4"], "outcomes": [0, 0, 1, 1], "context": [2, 2, 4, 4],
        "segments": ["one ", "", "two ", "", "rest"], "answer_advantages": [0.1, 0.2, 0.3, 0.4],
        "extracted": list("1234"), "decided_by": ["number"] * 4,
    }  # fmt: skip
    rows = cells(shown(tmp_path, {**TRACE, **twice}))
    assert [row["cut"] for row in rows] == ["1", "1", "2", "2"]
    assert [row["value"] for row in rows] == ["+0.25", "+0.25", "+0.50", "+0.50"]
    assert [row["of the answer"] for row in rows] == ["+0.10", "+0.20", "+0.30", "+0.40"]


def test_no_text_of_a_model_is_markup(tmp_path):
    texts = {"prompt": HOSTILE, "closed_by": HOSTILE, "answers": [HOSTILE] * 2}
    found = shown(tmp_path, {**TRACE, **texts, "budget_input": HOSTILE, "read": {HOSTILE: 1}})
    assert "<script" not in found and found.count("&lt;script&gt;") > 8


def test_long_texts_are_shown_from_both_ends(tmp_path):
    found = shown(tmp_path, {**TRACE, "segments": ["a" * 50_000 + "END", "", ""]})
    assert "characters ...]" in found and "END" in found and len(found) < 20_000


def test_steps_are_spread_evenly_from_the_first_to_the_last():
    traces = [{**TRACE, "step": step, "row": row} for step in range(1, 101) for row in range(4)]
    chosen = shown_traces(traces)
    steps = sorted({trace["step"] for trace in chosen})
    assert 60 < len(chosen) <= 120 and steps[0] == 1 and steps[-1] == 100
    assert max(b - a for a, b in zip(steps, steps[1:])) <= 5
    # Long traces are fewer.
    long = [{**trace, "prompt": "x" * 12_000, "thinking": "y" * 12_000} for trace in traces]
    assert 4 <= len(shown_traces(long)) <= 50
    assert shown_traces(traces[:3]) == traces[:3]
    # Runs that share a page share the place on it, and keep whole steps.
    half = shown_traces(traces, runs=2)
    assert 30 < len(half) <= 60 and {trace["row"] for trace in half} == {0, 1, 2, 3}


def test_budgets_are_chosen_one_by_one_or_by_doublings():
    few = [{"budget": b} for b in (64, 100)]
    assert [budget_names(few)(trace) for trace in few] == ["64", "100"]
    many = [{"budget": b} for b in (0, 1, 2, 3, 63, 64, 127, 128, 2000)]
    assert [budget_names(many)(trace) for trace in many] == [
        "0", "1 to 1", "2 to 3", "2 to 3", "32 to 63", "64 to 127", "64 to 127", "128 to 255",
        "1,024 to 2,047",
    ]  # fmt: skip


def test_the_verdict_is_that_of_the_last_answer():
    assert is_right(TRACE) and not is_right({"outcomes": [1.0, 0.0]})


def test_without_traces_there_is_nothing(tmp_path):
    assert read_traces(tmp_path) == read_traces(tmp_path / "none") == []
    assert traces_section([("run", [])]) == ""


@pytest.mark.parametrize(
    "damage",
    [
        {"budget": None},
        {"outcomes": ["x", "y"]},
        {"context": None},
        {"context": [2]},
        {"segments": []},
        {"values": 3},
    ],
)
def test_what_is_no_trace_is_refused_by_its_file(tmp_path, damage):
    with pytest.raises(
        UserError, match=r"000003\.jsonl: this file contains records that are not traces"
    ):
        shown(tmp_path, {**TRACE, **damage})
