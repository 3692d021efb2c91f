"""Tokenizers and templates are read in the worker as this process would read them."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import hf_world
from bacr_jax.prompts.limited import Failed, shared_process
from template_world import rendered

READ = {"seconds": 20.0, "memory": 2 << 30}


def bpe(folder, **changes):
    """Writes a byte-level tokenizer with a merge of its most frequent letters; returns its JSON."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*letters, "he", "er"])}
    backend = Tokenizer(models.BPE(words, [("h", "e"), ("e", "r")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    raw = json.loads(backend.to_str())
    raw["model"] |= changes
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return raw


def fault(folder):
    return shared_process().ask("read_tokenizer", folder=str(folder), **READ)


def test_a_template_is_rendered_as_transformers_does_on_the_date_that_is_given():
    tokenizer = hf_world.chat_tokenizer()
    messages = [{"role": "user", "content": "1+1"}]
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, chat_template="{{ messages[0] }}x"
    )
    assert rendered("{{ messages[0] }}x", messages=messages) == expected
    dated = "{{ strftime_now('%d %b %Y, %H:%M:%S') }} {{ strftime_now(format='%j') }}"
    assert rendered(dated) == "29 Feb 2024, 00:00:00 060"
    assert rendered(dated, date="2026-11-28") == "28 Nov 2026, 00:00:00 332"


def test_names_that_a_template_reads():
    ask = lambda text: shared_process().ask("read_variables", template=text, **READ)
    assert ask("{% set a = b %}{{ a ~ c }}{% break %}") in (["b", "c"], None)
    assert ask("{% set a = b %}{{ a ~ c }}") == ["b", "c"]
    assert ask("{% generation %}{{ a }}{% endgeneration %}") is None
    with pytest.raises(Failed, match="needs more than 1 s of CPU time"):
        shared_process().ask(
            "read_variables", template="{{ 7 ** (10 ** 9) }}", seconds=1.0, memory=1 << 30
        )


def test_a_whole_tokenizer_has_no_fault(tmp_path):
    bpe(tmp_path)
    assert fault(tmp_path) == ""
    # Neither has a folder in whose files nothing can go wrong.
    (tmp_path / "empty").mkdir()
    assert fault(tmp_path / "empty") == ""


def test_ids_that_are_drawn_are_a_fault(tmp_path):
    bpe(tmp_path, dropout=0.5)
    assert fault(tmp_path) == "it gives the same text other ids each time"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw | {"model": {**raw["model"], "vocab": {"a": 2**40}}},
        lambda raw: raw | {"padding": {"strategy": {"Fixed": 2**40}, "direction": "Right",
                                       "pad_to_multiple_of": None, "pad_id": 0,
                                       "pad_type_id": 0, "pad_token": "a"}},
        lambda raw: raw | {"pre_tokenizer": {"type": "Unheard"}},
    ],
    ids=["id", "padding", "type"],
)  # fmt: skip
def test_a_tokenizer_that_its_reader_fails_on_is_a_failure(tmp_path, damage):
    (tmp_path / "tokenizer.json").write_text(json.dumps(damage(bpe(tmp_path))))
    with pytest.raises(Failed):
        fault(tmp_path)
