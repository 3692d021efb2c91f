"""What an exported folder says of itself: ids, tables, and a template that writes our prompt."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import hf_world
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.stop_strings import compile_stop_string
from bacr_jax.prompts.thinking_section import describe, jumps, ranges, read_settings, read_style
from bacr_jax.questions.ledger import ledger_tokenizer

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
    from bacr_jax.export.budget_generation import next_state

    assert torch is not None
    for text in ("</think>", "</answer>", "\n\n"):
        table = compile_stop_string(letters, text, vocab_size=len(letters) + 5).next_state
        written = json.loads(json.dumps({"states": len(table), "jumps": jumps(table)}))
        np.testing.assert_array_equal(next_state(written, table.shape[1]).numpy(), table)


def test_the_section_of_the_ledger():
    config = config_io.override(Config(), ["budget.max=64", "rollout.answer_tokens=3"])
    found = describe(resolve(config).limits, ledger_tokenizer(), FORMATS["ledger"], 27)
    assert (found["closing_ids"], found["answer_ids"], found["end_ids"]) == ([3, 4], [4], [5])
    # <pad>, <bos> and <think>, then what the format never writes: - and f to h.
    assert found["never_sampled"] == "0-2 17 24-26"
    assert found["think_close"]["string"] == "</think>" and "line_breaks" not in found
    written = json.loads(json.dumps(found))
    assert read_style(written, WHERE) == FORMATS["ledger"]
    assert read_settings(written, WHERE)[0] == "rollout.answer_tokens=3"
    assert "budget.cap=64" in read_settings(written, WHERE)


OF_A_CONFIG = dataclasses.replace(
    FORMATS["native"], system="Be brief.", variables=FrozenMap(day="1 May", n=3, r=0.5, so=True)
)


@pytest.mark.parametrize("style", [*FORMATS.values(), OF_A_CONFIG], ids=lambda style: style.name)
def test_every_format_comes_back(style):
    raw = json.loads(json.dumps({"prompt_format": dataclasses.asdict(style)}))
    assert read_style(raw, WHERE) == style
    for name in raw["prompt_format"]:
        fields = {key: value for key, value in raw["prompt_format"].items() if key != name}
        if name == "date":
            # Folders whose template contains no date do not have it.
            assert read_style({"prompt_format": fields}, WHERE) == style
            continue
        with pytest.raises(UserError, match="thinking.prompt_format` is .*run bacr export again"):
            read_style({"prompt_format": fields}, WHERE)


FIELDS = dataclasses.asdict(FORMATS["native"])


@pytest.mark.parametrize(
    "damage",
    [{"prompt_format": None}, {"prompt_format": FIELDS | {"new": 1}}, {}]
    + [{"prompt_format": FIELDS | {"chat": 1}}, {"prompt_format": FIELDS | {"name": 3}}]
    + [{"prompt_format": FIELDS | {"unused": [1]}}]
    + [{"prompt_format": FIELDS | {"variables": {"a": [1]}}}],
)
def test_a_damaged_section_is_one_line(damage):
    with pytest.raises(UserError, match="thinking.prompt_format.*run bacr export again"):
        read_style(damage, WHERE)
    with pytest.raises(UserError, match="thinking.answer_tokens` is null"):
        read_settings({}, WHERE)
    with pytest.raises(UserError, match="thinking.answer_tokens` is -1"):
        read_settings({"answer_tokens": -1}, WHERE)
