"""R1-Distill and Qwen3: who opens thinking, in whose tokens, and what ends a turn."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

import thinking_world
from bacr_jax.config import Config
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.budget_prompt import make_budget_prompts
from bacr_jax.prompts.encoding import (
    allowed_tokens,
    encode_prompts,
    encode_text,
    eos_ids,
    frame,
    opener,
)
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.show_prompts import shown_prompts
from bacr_jax.prompts.stop_strings import compile_stop_string, match
from bacr_jax.prompts.tokenizers import load_tokenizer
from bacr_jax.questions.question_set import QuestionSet

NATIVE, TAGS, BOXED = FORMATS["native"], FORMATS["think_answer"], FORMATS["boxed"]
ASKED = "2+2?\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = 151_936
# "2+2?", a line end and the request, in the words that Qwen2.5, Qwen3 and R1-Distill share.
ASKED_IDS = [17, 10, 17, 5267, 5501, 2874, 3019, 553, 3019, 11, 323, 2182, 697, 1590, 4226]
ASKED_IDS += [2878, 1124, 79075, 46391]
CLOSE = {"r1": 151_649, "qwen3": 151_668}
BEGUN = {
    # <｜begin▁of▁sentence｜><｜User｜> ... <｜Assistant｜><think>\n
    "r1": ([151_646, 151_644], [151_645, 151_648, 198]),
    # <|im_start|>user\n ... <|im_end|>\n<|im_start|>assistant\n<think>\n
    "qwen3": (
        [151_644, 872, 198],
        [151_645, 198, 151_644, 77091, 198, 151_667, 198],
    ),
}


@pytest.fixture(scope="module", params=["r1", "qwen3"])
def released(request, shared_data, tmp_path_factory):
    """A tokenizer with the ids of the released one, read from its folder."""
    out = tmp_path_factory.mktemp("released") / request.param
    thinking_world.released(request.param, shared_data / "qwen_tokenizer", out)
    return request.param, load_tokenizer(out, where="here"), out


@pytest.fixture(scope="module")
def library(released):
    """The same folder as the tokenizer's own library reads it."""
    return Tokenizer.from_file(str(released[2] / "tokenizer.json"))


def ids_of(tokenizer, style):
    encoded, _ = encode_prompts(tokenizer, ["2+2?"], style, max_tokens=200)
    return encoded.tokens[0, : encoded.lengths[0]].tolist()


def test_the_ids_of_a_native_prompt(released):
    kind, tokenizer, _ = released
    begin, end = BEGUN[kind]
    found = ids_of(tokenizer, NATIVE)
    assert found == [*begin, *ASKED_IDS, *end]
    # As the model's own template writes it, with thinking opened once and no second beginning.
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": ASKED}], add_generation_prompt=True, enable_thinking=True
    )["input_ids"]
    assert found == (rendered if kind == "r1" else [*rendered, 151_667, 198])
    assert "system" not in tokenizer.decode(found)


@pytest.mark.parametrize("question", ["2+2?", "Wieviel ist ½ + ⅓?\nKürze.", "f(x)=<x>\t|x|"])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "complete"])
def test_the_ids_of_a_whole_trace(released, library, question, cut):
    """As one text, written down here, is read by the tokenizer's own library."""
    kind, tokenizer, _ = released
    asked = f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    turns = {
        "r1": f"{thinking_world.R1_BEGIN}<｜User｜>{asked}<｜Assistant｜><think>\n",
        "qwen3": f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n<think>\n",
    }
    thinking = "2 and 2" if cut else "2 and 2 is 4\n</think>"
    natural = "\n\n**Final Answer**\n\\boxed{"
    forced = f"...\n\n...\n\n</think>{natural}"
    end = {"r1": thinking_world.R1_END, "qwen3": "<|im_end|>"}[kind]
    text = f"{turns[kind]}{thinking}{forced if cut else natural}4}}{end}"
    whole = library.encode(text, add_special_tokens=False)
    encoded, _ = encode_prompts(tokenizer, [question], NATIVE, max_tokens=200)
    parts = [thinking, NATIVE.forced_suffix if cut else NATIVE.natural_suffix, "4}", end]
    found = encoded.tokens[0, : encoded.lengths[0]].tolist()
    for part in parts:
        found += encode_text(tokenizer, part).tolist()
    assert found == whole.ids
    assert whole.ids.count(CLOSE[kind]) == 1


def test_what_is_read_adds_no_beginning_of_its_own(released):
    kind, tokenizer, _ = released
    whole = tokenizer("x")["input_ids"]
    assert len(whole) == (2 if kind == "r1" else 1)
    assert encode_text(tokenizer, "x").tolist() == whole[-1:]


def test_thinking_closes_with_one_id(released):
    kind, tokenizer, _ = released
    forced, natural = (
        encode_text(tokenizer, text).tolist()
        for text in (NATIVE.forced_suffix, NATIVE.natural_suffix)
    )
    assert forced.count(CLOSE[kind]) == 1 and CLOSE[kind] not in natural
    assert forced[forced.index(CLOSE[kind]) + 1 :] == natural
    table = compile_stop_string(tokenizer, "</think>", vocab_size=ROWS)
    assert match(table, [17, CLOSE[kind], 17]) == (1, 1)
    allowed = allowed_tokens(tokenizer, NATIVE, ROWS)
    added = thinking_world.ADDED[kind]
    legal = {"r1": {151_643, 151_649}, "qwen3": {151_643, 151_645, 151_668}}[kind]
    assert {number for number in added.values() if allowed[number]} == legal


def test_what_ends_a_turn_is_read_from_the_folder(released, tmp_path):
    kind, tokenizer, _ = released
    ends = {"r1": (151_643,), "qwen3": (151_645, 151_643)}[kind]
    assert tokenizer.turn_ends == ends and eos_ids(tokenizer, NATIVE) == tuple(sorted(ends))
    # The model's folder goes before the tokenizer's.
    thinking_world.small(kind).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text(json.dumps({"eos_token_id": 18}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 17}))
    other = load_tokenizer(tmp_path / "tokenizer", where="here", model=tmp_path)
    assert other.turn_ends == (17,) and 17 in eos_ids(other, NATIVE)


def text_of(tokenizer, style):
    head, tail = frame(tokenizer, style)
    return f"{head}2+2?{tail}"


R1, QWEN3 = thinking_world.small("r1"), thinking_world.small("qwen3")


def test_a_template_that_opens_thinking_is_not_opened_again():
    for style in (NATIVE, TAGS):
        assert text_of(R1, style).endswith("<｜Assistant｜><think>\n")
        assert text_of(R1, style).count("<think>\n") == 1
        assert text_of(QWEN3, style).endswith("<|im_start|>assistant\n<think>\n")
    assert (
        opener(R1, NATIVE) == "the chat template" and opener(QWEN3, NATIVE) == "the prompt format"
    )


def test_without_thinking_a_template_that_can_leaves_it_out():
    text = text_of(QWEN3, BOXED)
    assert text.startswith("<|im_start|>system\nPlease reason step by step")
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert opener(QWEN3, BOXED) == "no tag"


@pytest.mark.parametrize("name", ["boxed", "budget_solution"])
def test_thinking_that_a_format_would_never_close_is_refused(name):
    with pytest.raises(
        UserError,
        match=r"begins the thinking with <think>, but .* does not end it .*; set data.prompt_",
    ):
        frame(R1, FORMATS[name])


def test_native_needs_the_tags_as_tokens(qwen):
    with pytest.raises(
        UserError, match="has no token <think>, .*; set data.prompt_format=think_answer"
    ):
        frame(qwen, NATIVE)


def test_a_budget_in_words_stands_behind_the_request():
    told, _ = make_budget_prompts(R1, ["2+2?"], NATIVE, "Use {budget}.", largest=99, max_tokens=300)
    opened = R1.decode(told.opened.tokens[0])
    assert opened.endswith("within \\boxed{}.\n\nUse ")
    assert R1.decode(told.closing) == ".<｜Assistant｜><think>\n"


def test_prompts_are_shown_with_where_thinking_begins():
    questions = QuestionSet("mine", ["2+2?"], ["4"], np.ones(1, int), np.zeros(1, int), ["one"])
    lines = list(shown_prompts(resolve(Config()).task, NATIVE, questions, R1, count=1))
    assert (
        "thinking begins here, opened by the chat template, and continues up to </think>" in lines
    )
