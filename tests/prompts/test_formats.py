"""The format of a run, and what a config may say instead of its texts."""

import dataclasses

import pytest

from bacr_jax.config import Config, DataConfig
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.prompts.formats import FORMATS, format_for, with_closing_text


class TestFormatOfARun:
    @pytest.mark.parametrize(
        ("train", "name"),
        [("ledger", "ledger"), ("gsm8k:/data/x.jsonl", "think_answer"), ("math", "think_answer")],
    )
    def test_follows_the_training_set(self, train, name):
        config = Config(data=dataclasses.replace(DataConfig(), train=train))
        assert format_for(config.data).name == name

    def test_unless_the_config_names_one(self):
        data = dataclasses.replace(DataConfig(), train="math:x", prompt_format="boxed")
        assert format_for(data) is FORMATS["boxed"]


ANYTIME = "...\n\n...\n\n</think>\n\n**Final Answer**\n<answer>\n"


def test_another_closing_text_also_gives_what_follows_a_natural_close():
    data = dataclasses.replace(Config().data, train="math:x", closing_text=ANYTIME)
    style = format_for(data)
    assert style.forced_suffix == ANYTIME
    assert style.natural_suffix == "\n\n**Final Answer**\n<answer>\n"
    for same in FORMATS.values():
        if same.chat:
            again = with_closing_text(same, same.forced_suffix)
            assert again == same


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("think_answer", "\n<answer>\n", "must contain '</think>', which ends the thinking"),
        ("think_answer", "</think></think><answer>", "once"),
        ("think_answer", "\n</think>\n", "must end with '<answer>'"),
        ("think_answer", "<answer>\n</think>\n", "must end with '<answer>'"),
        ("think_answer", "\n</think>\n<answer> so", "must end with '<answer>'"),
        ("boxed", "\n\nAnswer: ", "which begins the answer"),
        ("ledger", "</think><answer>", "set it to null"),
    ],
)
def test_a_closing_text_without_its_parts_is_one_line(name, text, says):
    with pytest.raises(UserError) as refusal:
        with_closing_text(FORMATS[name], text)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{day: [1]}", "day: found \\[1\\]; use true or false, a whole number, text or a number"),
        ("{day: null}", "day: found null; use true or false, a whole number, text or a number"),
        ("{1: a}", "found the name 1; use text, in quotes"),
        ("May", "to true or false, whole numbers, texts or numbers"),
    ],
)
def test_variables_of_other_types_are_refused(value, says):
    with pytest.raises(UserError, match=says):
        config_io.override(Config(), [f"data.template_variables={value}"])
