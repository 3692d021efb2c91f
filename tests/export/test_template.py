"""The template of an exported folder writes our prompt."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import hf_world
from bacr_jax.config.values import FrozenMap
from bacr_jax.export.template import chat_template
from bacr_jax.prompts.budget_prompt import make_budget_prompts
from bacr_jax.prompts.encoding import encode_prompts, frame
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.questions.ledger import ledger_tokenizer

WHERE = Path("config.json")


@pytest.fixture(scope="module")
def letters():
    return hf_world.chat_tokenizer()


def rendered(tokenizer, template, question, **how):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        **how,
    )


QUOTED = "  What is \"x\" \\ 'y' {{z}} ü\U0001f600?\n"


# Prompts of a config of one's own: what it says is in the folder, and its reader need not.
DATED = "{{ day if day is defined else raise_exception('no day') }}"
BRIEF = dataclasses.replace(FORMATS["boxed"], system='Be "brief".', variables=FrozenMap(day="May"))
BARE = dataclasses.replace(FORMATS["think_answer"], system="", bare=True)


@pytest.mark.parametrize(
    "style",
    [*(FORMATS[name] for name in ("think_answer", "boxed", "budget_solution")), BRIEF, BARE],
    ids=["think_answer", "boxed", "budget_solution", "brief", "bare"],
)
def test_the_template_writes_the_prompt_of_a_format(style):
    letters = hf_world.chat_tokenizer()
    letters.chat_template = (DATED if style is BRIEF else "") + letters.chat_template
    template = chat_template(letters, style)
    head, tail = frame(letters, style)
    assert rendered(letters, template, QUOTED) == head + QUOTED.strip() + tail
    assert head.count(style.system) == 1 if style.system else head == "<|im_start|>"
    assert ("May" in head) == (style is BRIEF)
    told = rendered(letters, template, QUOTED, budget=512)
    assert told == head + QUOTED.strip() + tail + ("512" if style.budget_close else "") + (
        style.budget_close
    )


def test_the_template_tells_the_budget_in_words(letters):
    style, words = FORMATS["think_answer"], "Use {budget} tokens."
    template = chat_template(letters, style, words, {"low": 16})
    waiting, _ = make_budget_prompts(letters, ["1+1"], style, words, largest=99, max_tokens=900)
    without_budget, _ = encode_prompts(letters, ["1+1"], style, max_tokens=900)
    for budget, number in ((16, 16), ("low", 16), (None, -1), ("none", -1), (0, 0)):
        made = waiting.at(np.zeros(1, int), np.array([number]), without_budget)
        text = rendered(letters, template, "1+1", budget=budget)
        ids = letters(text, add_special_tokens=False)["input_ids"]
        assert ids == made.tokens[0, : made.lengths[0]].tolist()
    for bad in (-1, 1.5, "high"):
        with pytest.raises(Exception, match="budget: expected a whole number"):
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


TOLD_IN_WORDS = ("Use {budget} tokens.", {"low": 16})


@pytest.mark.parametrize("words", [("", None), TOLD_IN_WORDS], ids=["plain", "told"])
def test_parts_of_a_message_are_their_texts_or_an_error(letters, words):
    template = chat_template(letters, FORMATS["think_answer"], *words)
    part = lambda text: {"type": "text", "text": text}
    how = {"budget": 16} if words[0] else {}
    for parts in ([part(" 1+1? ")], [part(" 1+"), part("1? ")], (part("1+1?"),)):
        text = rendered(letters, template, parts, **how)
        assert text == rendered(letters, template, "1+1?", **how)
    image = {"type": "image", "image": "x.png"}
    for wrong in ([image], [part("1+1?"), image], [1], ["1+1?"], [{"type": "text"}], None, {}, 7):
        with pytest.raises(Exception, match="content: "):
            rendered(letters, template, wrong)


def test_parts_of_the_beginning_of_an_answer_are_their_texts(letters):
    template = chat_template(letters, FORMATS["think_answer"])
    begun = [{"type": "text", "text": "One "}, {"type": "text", "text": "and"}]
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": begun}]
    text = letters.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert text.endswith("<think>\nOne and")
