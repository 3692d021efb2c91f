import json
import re
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import hf_world
from bacr_jax.errors import UserError
from bacr_jax.prompts.tokenizers import answer_text, decode_ids, load_tokenizer

relaxed = settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_a_tokenizer_with_an_id_that_is_a_slip_is_refused(tmp_path):
    literal = models.WordLevel({"a": 0, "b": 1 << 24}, unk_token="a")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(literal)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^model.tokenizer: .*a token id is not below 16777216"):
        load_tokenizer(tmp_path, where="model.tokenizer")


@pytest.mark.parametrize(
    ("first", "second"),
    [("a", "b"), ("<|im_end|>", "b")],
    ids=["two pieces", "a special token and a piece"],
)
def test_two_tokens_with_the_same_id_are_refused(tmp_path, first, second):
    hf_world.chat_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    pieces = raw["model"]["vocab"]
    pieces[first] = pieces[second]
    path.write_text(json.dumps(raw))
    message = rf"^model.path: .*tokens '{re.escape(first)}' and '{second}' have the same id 65"
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path, where="model.path")
    assert len(caught.value.lines) == 1


@pytest.fixture(scope="module")
def ends_of(tmp_path_factory):
    """What ends a turn under a generation_config.json of that text, beside a config.json with 1."""
    folder = tmp_path_factory.mktemp("ends")
    literal = models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(literal)).save_pretrained(folder)
    (folder / "config.json").write_text('{"eos_token_id": 1}')

    def read(text):
        (folder / "generation_config.json").write_text(text)
        return load_tokenizer(folder, where="model.path").turn_ends

    return read


def test_a_generation_config_that_names_no_ends_leaves_those_of_the_config(ends_of):
    assert ends_of("{}") == ends_of('{"eos_token_id": null}') == (1,)
    assert ends_of('{"eos_token_id": [2, 0]}') == (2, 0)


@pytest.mark.parametrize(
    "text, found",
    [
        (
            '{"eos_token_id": [2',
            "can't be read as a JSON object .*; replace it by an undamaged copy",
        ),
        ("[2]", "can't be read as a JSON object .*; replace it by an undamaged copy"),
        *(
            (
                f'{{"eos_token_id": {ends}}}',
                "`eos_token_id` is .*; use a token id of .*, from 0 to 2, or",
            )
            for ends in ('[2, "6"]', "2.0", "true", "3", "-1", "[[2]]")
        ),
    ],
)
def test_ends_that_a_folder_names_wrongly_are_refused(ends_of, text, found):
    with pytest.raises(UserError, match=rf"^\S*/generation_config.json:? {found}"):
        ends_of(text)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@relaxed
@given(text=st.text(max_size=40))
def test_decoding_gives_the_text_back(qwen, text):
    # this tokenizer composes accents before it reads a text
    assert decode_ids(qwen, ids_of(qwen, text)) == unicodedata.normalize("NFC", text)


def test_a_row_cut_inside_a_character_still_decodes(qwen):
    ids = ids_of(qwen, "𐎀")
    assert len(ids) > 1
    assert "\ufffd" in decode_ids(qwen, ids[:1])


def test_the_answer_has_both_tags(qwen, ledger_tokens):
    assert answer_text(ledger_tokens, ids_of(ledger_tokens, "7</answer>")) == "<answer>7</answer>"
    text = answer_text(qwen, ids_of(qwen, "\\boxed{\\frac{1}{2}}\n</answer>"))
    assert text == "<answer>\\boxed{\\frac{1}{2}}\n</answer>"


def test_what_the_last_token_holds_after_the_tag_is_dropped(qwen):
    ids = ids_of(qwen, "42</answer>\n\n")
    assert qwen.decode(ids[-1:]) == ">\n\n"
    assert answer_text(qwen, ids) == "<answer>42</answer>"


def test_only_the_first_answer_counts(ledger_tokens):
    text = answer_text(ledger_tokens, ids_of(ledger_tokens, "1</answer><answer>2</answer>"))
    assert text == "<answer>1</answer>"


def test_an_unclosed_answer_stays_open(qwen):
    text = answer_text(qwen, ids_of(qwen, "42 or maybe </answer"))
    assert text == "<answer>42 or maybe </answer"


def test_the_opening_tag_inside_an_answer_is_kept(ledger_tokens):
    text = answer_text(ledger_tokens, ids_of(ledger_tokens, "<answer>3</answer>"))
    assert text == "<answer><answer>3</answer>"


def test_boxes_end_with_a_blank_line(qwen):
    ids = ids_of(qwen, "\\frac{1}{2}}$.\n\nSo")
    text = answer_text(qwen, ids, opened="\\boxed{", closed="\n\n")
    assert text == "\\boxed{\\frac{1}{2}}$.\n\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["model"].update(dropout=0.5), "gives the same text other ids each time"),
        (
            lambda raw: raw.update(
                padding={
                    "strategy": {"Fixed": 2**40},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "a",
                }
            ),
            "(terminates its process|needs more)",
        ),
    ],
    ids=["dropout", "padding"],
)
def test_a_tokenizer_that_draws_ids_or_ends_its_reader_is_one_line(tmp_path, change, says):
    hf_world.chat_tokenizer().save_pretrained(tmp_path)
    load_tokenizer(tmp_path, where="model.path")
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    words = raw["model"]["vocab"]
    words["he"] = max(words.values()) + 10
    raw["model"]["merges"] = [["h", "e"]]
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(
        UserError, match=rf"^model.path: .* is missing or can't be read .*{says}"
    ) as caught:
        load_tokenizer(tmp_path, where="model.path")
    assert len(caught.value.lines) == 1
