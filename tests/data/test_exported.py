"""What an exported folder says of itself: ids, tables, and a template that writes our prompt."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import hf_world
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.data.exported import describe, jumps, ranges, read_settings, read_style
from bacr_jax.data.exported_template import chat_template
from bacr_jax.data.ledger import ledger_tokenizer
from bacr_jax.data.prompts import FORMATS, encode_prompts, frame
from bacr_jax.data.stop_strings import compile_stop_strings
from bacr_jax.data.told import told_prompts
from bacr_jax.errors import UserError

WHERE = Path("config.json")


@pytest.fixture(scope="module")
def letters():
    return hf_world.chat_tokenizer()


def test_ids_are_written_as_ranges():
    assert ranges([3, 7, 8, 9]) == "3 7-9"
    assert ranges([]) == ""
    assert ranges([0, 1]) == "0-1"


def test_a_table_comes_back_from_its_jumps(letters):
    torch = pytest.importorskip("torch")
    from bacr_jax.model.hf.budget_generation import next_state

    assert torch is not None
    for text in ("</think>", "</answer>", "\n\n"):
        table = compile_stop_strings(letters, [text], vocab_size=len(letters) + 5).next_state
        written = json.loads(json.dumps({"states": len(table), "jumps": jumps(table)}))
        np.testing.assert_array_equal(next_state(written, table.shape[1]).numpy(), table)


def test_the_section_of_the_ledger():
    config = config_io.override(Config(), ["budget.max=64", "rollout.answer_tokens=3"])
    found = describe(config, ledger_tokenizer(), FORMATS["ledger"], 27)
    assert (found["closing_ids"], found["answer_ids"], found["end_ids"]) == ([3, 4], [4], [5])
    # <pad>, <bos> and <think>, then what the format never writes: - and f to h.
    assert found["never_sampled"] == "0-2 17 24-26"
    assert found["think_close"]["string"] == "</think>" and "line_breaks" not in found
    written = json.loads(json.dumps(found))
    assert read_style(written, WHERE) == FORMATS["ledger"]
    assert read_settings(written, WHERE)[0] == "rollout.answer_tokens=3"
    assert "budget.cap=64" in read_settings(written, WHERE)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_comes_back(name):
    raw = json.loads(json.dumps({"prompt_format": dataclasses.asdict(FORMATS[name])}))
    assert read_style(raw, WHERE) == FORMATS[name]


@pytest.mark.parametrize(
    "damage",
    [{"prompt_format": None}, {"prompt_format": {"name": "x", "new": 1}}, {}]
    + [{"prompt_format": {"name": "x", "chat": 1}}, {"prompt_format": {"name": 3}}]
    + [{"prompt_format": {"name": "x", "unused": [1]}}],
)
def test_a_damaged_section_is_one_line(damage):
    with pytest.raises(UserError, match="thinking.prompt_format.*export the folder again"):
        read_style(damage, WHERE)
    with pytest.raises(UserError, match="thinking.answer_tokens is null"):
        read_settings({}, WHERE)
    with pytest.raises(UserError, match="thinking.answer_tokens is -1"):
        read_settings({"answer_tokens": -1}, WHERE)


def rendered(tokenizer, template, question, **how):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        **how,
    )


QUOTED = "  What is \"x\" \\ 'y' {{z}} ü\U0001f600?\n"


@pytest.mark.parametrize("name", ["think_answer", "boxed", "budget_solution"])
def test_the_template_writes_the_prompt_of_a_format(letters, name):
    style = FORMATS[name]
    template = chat_template(letters, style)
    head, tail = frame(letters, style)
    assert rendered(letters, template, QUOTED) == head + QUOTED.strip() + tail
    told = rendered(letters, template, QUOTED, budget=512)
    assert told == head + QUOTED.strip() + tail + ("512" if style.budget_close else "") + (
        style.budget_close
    )


def test_the_template_tells_the_budget_in_words(letters):
    style, words = FORMATS["think_answer"], "Use {budget} tokens."
    template = chat_template(letters, style, words, {"low": 16})
    waiting, _ = told_prompts(letters, ["1+1"], style, words, largest=99, max_tokens=900)
    untold, _ = encode_prompts(letters, ["1+1"], style, max_tokens=900)
    for budget, number in ((16, 16), ("low", 16), (None, -1), ("none", -1), (0, 0)):
        made = waiting.at(np.zeros(1, int), np.array([number]), untold)
        text = rendered(letters, template, "1+1", budget=budget)
        ids = letters(text, add_special_tokens=False)["input_ids"]
        assert ids == made.tokens[0, : made.lengths[0]].tolist()
    for bad in (-1, 1.5, "high"):
        with pytest.raises(Exception, match="budget: write a whole number"):
            rendered(letters, template, "1+1", budget=bad)


def test_the_template_of_the_ledger():
    tokenizer = ledger_tokenizer()
    template = chat_template(tokenizer, FORMATS["ledger"], "f{budget}")
    assert rendered(tokenizer, template, "4a2b") == "<bos>4a2b<think>"
    assert rendered(tokenizer, template, "4a2b", budget=24) == "<bos>4a2bf24<think>"


def test_the_template_takes_one_question_and_the_beginning_of_an_answer(letters):
    template = chat_template(letters, FORMATS["think_answer"])
    user, begun = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "One and"}
    render = lambda *messages, **how: letters.apply_chat_template(
        list(messages), chat_template=template, tokenize=False, **how
    )
    assert render(user, begun, continue_final_message=True).endswith("<think>\nOne and")
    for wrong in ([begun], [user, user], [user, begun, user], [{**user, "role": "system"}, user]):
        with pytest.raises(Exception, match="trained on a question alone"):
            render(*wrong)


def test_a_folder_with_our_template_is_read_as_its_base(letters):
    """Whoever trains on from an exported folder has the base's template back."""
    template, style = chat_template(letters, FORMATS["think_answer"]), FORMATS["boxed"]
    ours = hf_world.chat_tokenizer()
    ours.chat_template = template
    assert frame(ours, style) == frame(letters, style)
    assert chat_template(ours, FORMATS["think_answer"]) == template
