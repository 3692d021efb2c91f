import copy
import dataclasses
import json

import numpy as np
import pytest

from bacr_jax.config import Config, DataConfig
from bacr_jax.errors import UserError
from bacr_jax.prompts import formats
from bacr_jax.prompts.formats import FORMATS, allowed_tokens, encode_prompts, encode_text, eos_ids

LEDGER, TAGS, BOXED = FORMATS["ledger"], FORMATS["think_answer"], FORMATS["boxed"]
# `native` needs tags that Qwen2.5 lacks (test_thinking_models.py).
CHATS = [style for style in FORMATS.values() if style.chat and style.name != "native"]
QWEN_VOCAB = 152_064


def texts_of(tokenizer, rows, starts, ends):
    return [tokenizer.decode(row[a:b]) for row, a, b in zip(rows, starts, ends)]


def wholes(tokenizer, encoded):
    return texts_of(tokenizer, encoded.tokens, np.zeros_like(encoded.lengths), encoded.lengths)


class TestLedger:
    def test_prompt_and_question_span(self, ledger_tokens):
        encoded, dropped = encode_prompts(ledger_tokens, ["4a2b3c1", "7a3"], LEDGER, max_tokens=64)
        assert wholes(ledger_tokens, encoded) == ["<bos>4a2b3c1<think>", "<bos>7a3<think>"]
        spans = texts_of(
            ledger_tokens, encoded.tokens, encoded.question_start, encoded.question_end
        )
        assert spans == ["4a2b3c1", "7a3"]
        # 3 + 2n tokens for n operations
        np.testing.assert_array_equal(encoded.lengths, [9, 5])
        assert encoded.tokens.dtype == np.int32
        assert not encoded.tokens[1, 5:].any()
        assert not len(dropped)

    def test_bridges_are_the_tags(self, ledger_tokens):
        spell = lambda ids: ledger_tokens.convert_ids_to_tokens(ids.tolist())
        assert spell(encode_text(ledger_tokens, LEDGER.forced_suffix)) == ["</think>", "<answer>"]
        assert spell(encode_text(ledger_tokens, LEDGER.natural_suffix)) == ["<answer>"]

    def test_padding_opening_tags_and_unused_ids_are_never_sampled(self, ledger_tokens):
        allowed = allowed_tokens(ledger_tokens, LEDGER, 32)
        spelled = set(ledger_tokens.convert_ids_to_tokens(np.flatnonzero(allowed).tolist()))
        assert spelled == {"</think>", "<answer>", "</answer>", *"0123456789+=abcde"}
        assert not allowed[27:].any()

    def test_the_closing_answer_tag_ends_the_turn(self, ledger_tokens):
        assert eos_ids(ledger_tokens, LEDGER) == (ledger_tokens.convert_tokens_to_ids("</answer>"),)


class TestQwen:
    QUESTIONS = ("What is $1+1$?", "Solve \\[x^2 = 4\\]", "Wie groß ist 数 🙂?", "user")

    @pytest.mark.parametrize("style", [TAGS, BOXED], ids=lambda style: style.name)
    def test_prompt_is_the_tokenizers_own_template(self, qwen, style):
        encoded, _ = encode_prompts(qwen, self.QUESTIONS, style, max_tokens=512)
        for question, text in zip(self.QUESTIONS, wholes(qwen, encoded)):
            messages = [
                {"role": "system", "content": style.system},
                {"role": "user", "content": question + style.after},
            ]
            rendered = qwen.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            assert text == rendered + style.think_open

    def test_tokens_are_those_of_the_whole_text(self, qwen):
        encoded, _ = encode_prompts(qwen, self.QUESTIONS, TAGS, max_tokens=512)
        for row, length, text in zip(encoded.tokens, encoded.lengths, wholes(qwen, encoded)):
            assert row[:length].tolist() == qwen(text, add_special_tokens=False)["input_ids"]

    def test_exact_text_of_the_tag_format(self, qwen):
        encoded, _ = encode_prompts(qwen, [" 2+2? "], TAGS, max_tokens=512)
        assert wholes(qwen, encoded) == [
            "<|im_start|>system\nReason step by step between <think> and </think>, and write after "
            "it only the final answer between <answer> and </answer>.<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        ]

    def test_exact_text_of_the_boxed_format(self, qwen):
        encoded, _ = encode_prompts(qwen, ["2+2?"], BOXED, max_tokens=512)
        assert wholes(qwen, encoded) == [
            "<|im_start|>system\nPlease reason step by step, and put your final answer within "
            "\\boxed{}.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        ]

    @pytest.mark.parametrize("style", CHATS, ids=lambda style: style.name)
    def test_one_place_asks_for_one_form_of_answer(self, qwen, style):
        encoded, _ = encode_prompts(qwen, ["2+2?"], style, max_tokens=512)
        (text,) = wholes(qwen, encoded)
        asked = {"<answer>": text.count("<answer>"), "\\boxed{": text.count("\\boxed")}
        assert asked == {"<answer>": 0, "\\boxed{": 0} | {style.answer_open: 1}
        system, user = text.split("<|im_start|>user\n")
        assert "answer" in system and "answer" not in user
        # The template's own system message is "You are Qwen, created by Alibaba Cloud. ..."
        assert "Qwen" not in text and text.count("<|im_start|>system") == 1

    def test_a_template_that_drops_the_system_message_is_refused(self, qwen):
        other = copy.deepcopy(qwen)
        other.chat_template = "{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
        with pytest.raises(UserError, match="writes the system message 0 times"):
            encode_prompts(other, ["2+2?"], TAGS, max_tokens=512)

    @pytest.mark.parametrize("style", [TAGS, BOXED], ids=lambda style: style.name)
    def test_span_holds_the_question_and_at_most_a_blank_more(self, qwen, style):
        encoded, _ = encode_prompts(qwen, self.QUESTIONS, style, max_tokens=512)
        spans = texts_of(qwen, encoded.tokens, encoded.question_start, encoded.question_end)
        assert [span.strip() for span in spans] == list(self.QUESTIONS)

    def test_only_ends_of_the_turn_are_legal_markup(self, qwen):
        assert eos_ids(qwen, TAGS) == (151_643, 151_645)
        allowed = allowed_tokens(qwen, TAGS, QWEN_VOCAB)
        assert np.flatnonzero(allowed[151_643:]).tolist() == [0, 2]
        assert allowed[:151_643].all()

    @pytest.mark.parametrize("style", [TAGS, BOXED], ids=lambda style: style.name)
    def test_bridges_spell_their_text_with_legal_tokens(self, qwen, style):
        allowed = allowed_tokens(qwen, style, QWEN_VOCAB)
        for suffix in (style.forced_suffix, style.natural_suffix):
            ids = encode_text(qwen, suffix)
            assert qwen.decode(ids) == suffix
            assert allowed[ids].all()
            assert suffix.rstrip().endswith(style.answer_open)

    def test_all_of_math_fits_or_is_named(self, qwen, shared_data):
        rows = [json.loads(line) for line in (shared_data / "math/train.jsonl").open()][:500]
        questions = [row["problem"] for row in rows]
        encoded, dropped = encode_prompts(qwen, questions, TAGS, max_tokens=256, width=300)
        assert encoded.tokens.shape == (500 - len(dropped), 300)
        assert 0 < len(dropped) < 100
        assert encoded.lengths.max() <= 256
        kept = [q.strip() for i, q in enumerate(questions) if i not in set(dropped.tolist())]
        spans = texts_of(qwen, encoded.tokens, encoded.question_start, encoded.question_end)
        # a token that ends a question can hold what follows it
        assert all(span.startswith(question) for span, question in zip(spans, kept))
        assert all(len(span) <= len(question) + 2 for span, question in zip(spans, kept))


class TestBridgeAndTagTokens:
    def test_added_tags_of_a_reasoning_model_stay_legal(self, ledger_tokens):
        # The ledger's tags are added tokens, as <think> is in later models.
        allowed = allowed_tokens(ledger_tokens, LEDGER, 27)
        assert allowed[ledger_tokens.convert_tokens_to_ids("</think>")]
        assert not allowed[ledger_tokens.convert_tokens_to_ids("<think>")]


class TestFormatOfARun:
    @pytest.mark.parametrize(
        ("train", "name"),
        [("ledger", "ledger"), ("gsm8k:/data/x.jsonl", "think_answer"), ("math", "think_answer")],
    )
    def test_follows_the_training_set(self, train, name):
        config = Config(data=dataclasses.replace(DataConfig(), train=train))
        assert formats.format_for(config).name == name

    def test_unless_the_config_names_one(self):
        data = dataclasses.replace(DataConfig(), train="math:x", prompt_format="boxed")
        assert formats.format_for(Config(data=data)) is BOXED


class TestRefusals:
    def test_an_empty_question_by_its_row(self, ledger_tokens):
        with pytest.raises(UserError, match="question 1: .*empty"):
            encode_prompts(ledger_tokens, ["4a2", " \n"], LEDGER, max_tokens=64)

    def test_text_the_tokenizer_can_not_write_by_its_row(self, ledger_tokens):
        with pytest.raises(UserError, match="question 1: .*'what'"):
            encode_prompts(ledger_tokens, ["4a2", "what"], LEDGER, max_tokens=64)

    def test_no_question(self, ledger_tokens):
        with pytest.raises(UserError, match="no question"):
            encode_prompts(ledger_tokens, [], LEDGER, max_tokens=64)

    def test_every_prompt_too_long_says_how_long(self, ledger_tokens):
        with pytest.raises(UserError, match="max_prompt_tokens=4.*5 tokens or more"):
            encode_prompts(ledger_tokens, ["4a2", "4a2b1"], LEDGER, max_tokens=4)

    def test_too_long_prompts_are_left_out(self, ledger_tokens):
        encoded, dropped = encode_prompts(
            ledger_tokens, ["4a2b1c1", "5a2", "6a1b1"], LEDGER, max_tokens=7
        )
        np.testing.assert_array_equal(dropped, [0])
        assert wholes(ledger_tokens, encoded) == ["<bos>5a2<think>", "<bos>6a1b1<think>"]

    def test_a_tokenizer_without_a_chat_template(self, ledger_tokens):
        with pytest.raises(UserError, match="no chat template"):
            encode_prompts(ledger_tokens, ["4a2"], TAGS, max_tokens=64)

    def test_a_chat_template_that_loses_the_question(self, qwen, monkeypatch):
        monkeypatch.setattr(qwen, "chat_template", "{{ messages[0].content }}")
        with pytest.raises(UserError, match="writes the question 0 times"):
            encode_prompts(qwen, ["4a2"], TAGS, max_tokens=64)

    def test_a_width_below_the_longest_prompt(self, ledger_tokens):
        with pytest.raises(UserError, match="write 5"):
            encode_prompts(ledger_tokens, ["4a2"], LEDGER, max_tokens=64, width=4)


ANYTIME = "...\n\n...\n\n</think>\n\n**Final Answer**\n<answer>\n"


def test_another_closing_text_also_gives_what_follows_a_natural_close():
    data = dataclasses.replace(Config().data, train="math:x", closing_text=ANYTIME)
    style = formats.format_for(Config(data=data))
    assert style.forced_suffix == ANYTIME
    assert style.natural_suffix == "\n\n**Final Answer**\n<answer>\n"
    for same in formats.FORMATS.values():
        if same.chat:
            again = formats.with_closing_text(same, same.forced_suffix)
            assert again == same


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("think_answer", "\n<answer>\n", "must hold '</think>' once"),
        ("think_answer", "</think></think><answer>", "once"),
        ("think_answer", "\n</think>\n", "must end with '<answer>'"),
        ("think_answer", "<answer>\n</think>\n", "must end with '<answer>'"),
        ("think_answer", "\n</think>\n<answer> so", "must end with '<answer>'"),
        ("boxed", "\n\nAnswer: ", "which opens the answer"),
        ("ledger", "</think><answer>", "write null"),
    ],
)
def test_a_closing_text_without_its_parts_is_one_line(name, text, says):
    with pytest.raises(UserError) as refusal:
        formats.with_closing_text(formats.FORMATS[name], text)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)
