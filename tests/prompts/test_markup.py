"""Questions with tokens of the chat template are counted."""

import hf_world
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.markup import control_tokens, markup_warning
from bacr_jax.questions.ledger import ledger_tokenizer

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
