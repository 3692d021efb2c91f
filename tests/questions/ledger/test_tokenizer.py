"""One token per character or tag, in Hugging Face form and without it."""

import json
import re
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.prompts.stop_strings import token_bytes
from bacr_jax.questions import ledger

TEXT = "<bos>4a2b3c1<think>a4+2=6b6+3=9c9+1=0</think><answer>0</answer><pad>-fgh"


def test_every_token_is_one_of_the_vocabulary():
    tokenizer = ledger.ledger_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert len(tokenizer) == len(ledger.VOCABULARY) == 27
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.convert_ids_to_tokens(ids) == re.findall(r"<[^>]+>|.", TEXT)
    assert tokenizer.convert_ids_to_tokens(list(range(27))) == list(ledger.VOCABULARY)


def test_decoding_without_special_tokens_keeps_the_thinking_tags():
    tokenizer = ledger.ledger_tokenizer()
    ids = tokenizer("<bos>4a2<think>42=6</think>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "4a2<think>42=6</think>"


def test_saves_and_loads_in_hugging_face_form(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = ledger.ledger_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert (loaded.pad_token_id, loaded.bos_token, loaded.eos_token) == (
        0,
        "<bos>",
        "</answer>",
    )
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocab == ledger.ID


@settings(max_examples=60)
@given(st.lists(st.sampled_from((*ledger.VOCABULARY, "x", " ", "<thi")), max_size=20).map("".join))
def test_without_transformers_ids_and_offsets_are_its_own(ledger_tokens, text):
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}

    def said(tokenizer, what):
        try:
            return dict(tokenizer(what, **options))
        except Exception as error:
            return str(error)

    for what in (text, [text, "1"]):
        own, theirs = said(ledger_tokens, what), said(ledger_tokens.hf_tokenizer, what)
        if isinstance(theirs, dict):
            theirs = {name: theirs[name] for name in ("input_ids", "offset_mapping")}
        assert own == theirs


def test_what_it_says_itself_is_what_transformers_says(ledger_tokens):
    whole = ledger_tokens.hf_tokenizer
    for name in ("bos", "eos", "pad"):
        for end in ("_token", "_token_id"):
            assert getattr(ledger_tokens, name + end) == getattr(whole, name + end)
    kinds = lambda tokenizer: {
        index: (token.content, token.special)
        for index, token in tokenizer.added_tokens_decoder.items()
    }
    assert kinds(ledger_tokens) == kinds(whole) and len(ledger_tokens) == len(whole)
    assert ledger_tokens.chat_template == whole.chat_template
    assert token_bytes(ledger_tokens) == token_bytes(whole)


def test_importing_the_task_imports_neither_transformers_nor_grain():
    code = (
        "import sys, bacr_jax.questions.ledger, bacr_jax.questions.loaders; "
        "sys.exit(bool({'transformers', 'grain'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
