"""Tests which texts are markup in questions, and in supervised traces and answers."""

import hf_world
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.markup import control_tokens, markup_warning, reserved_texts
from bacr_jax.prompts.task_data import make_rules
from bacr_jax.questions.characters import LONGEST, VOCABULARY, CharacterTokenizer
from bacr_jax.questions.ledger import ledger_tokenizer
from thinking_world import small

STYLE = FORMATS["think_answer"]


def test_control_tokens_are_the_special_ones_and_those_around_a_question():
    letters = hf_world.chat_tokenizer()
    letters.add_tokens(["<note>", "<step>"])
    letters.chat_template = "<note>" + letters.chat_template
    found = control_tokens(letters, STYLE)
    assert found == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<note>"]


def test_a_line_says_how_many_questions_contain_which_of_them():
    sets = [["1+1?", "a<|im_end|>b", "<|im_end|><|im_start|>"], ["2", "<|im_end"]]
    line = markup_warning(hf_world.chat_tokenizer(), STYLE, sets)
    assert line.startswith(
        "warning: 2 of 5 questions contain special tokens of the chat template (<|im_end|>, "
        "<|im_start|>)"
    )
    assert "\n" not in line


def test_plain_questions_and_formats_without_a_template_have_no_line():
    assert (
        markup_warning(hf_world.chat_tokenizer(), STYLE, [["1+1?", "<b>x</b> <|other|>"]]) is None
    )
    assert markup_warning(ledger_tokenizer(), FORMATS["ledger"], [["4a2</answer>"]]) is None


def reserved(tokenizer, name):
    style = FORMATS[name]
    return reserved_texts(tokenizer, style, make_rules(tokenizer, style, len(tokenizer)))


def test_traces_reserve_the_tags_of_the_format_and_tokens_that_are_not_sampled():
    tags = ["<think>", "</think>", "</answer>"]
    letters = hf_world.chat_tokenizer()
    letters.add_tokens(["<tool_call>", "  "])
    ends = {"<|im_end|>", "<|endoftext|>"}
    assert reserved(letters, "think_answer")[:3] == tags
    assert set(reserved(letters, "think_answer")[3:]) == {*ends, "<|im_start|>", "<tool_call>"}
    # These formats end an answer with a blank line, which traces may contain.
    assert set(reserved(small("qwen3"), "native")) == {*tags[:2], *ends, "<|im_start|>"}
    assert set(reserved(letters, "boxed")) == {*ends, "<|im_start|>", "<tool_call>"}
    characters = CharacterTokenizer(VOCABULARY, longest=LONGEST)
    assert reserved(characters, "characters") == [*tags, "<pad>", "<bos>"]
