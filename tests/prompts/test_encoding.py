import copy
import dataclasses
import json

import numpy as np
import pytest
import tokenizers

import hf_world
from bacr_jax.config import DataConfig
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import allowed_tokens, encode_prompts, encode_text, eos_ids, frame
from bacr_jax.prompts.formats import FORMATS, format_for

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
        with pytest.raises(UserError, match="contains the system message 0 times"):
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
        encoded, dropped = encode_prompts(qwen, questions, TAGS, max_tokens=256)
        assert encoded.tokens.shape == (500 - len(dropped), encoded.lengths.max())
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


class TestRefusals:
    def test_an_empty_question_by_its_row(self, ledger_tokens):
        with pytest.raises(UserError, match="question 1 is empty"):
            encode_prompts(ledger_tokens, ["4a2", " \n"], LEDGER, max_tokens=64)

    def test_text_the_tokenizer_can_not_write_by_its_row(self, ledger_tokens):
        with pytest.raises(UserError, match="question 1: .*'what'"):
            encode_prompts(ledger_tokens, ["4a2", "what"], LEDGER, max_tokens=64)

    @pytest.mark.parametrize("around", [None, ("", "")])
    def test_text_that_the_tokenizer_drops_by_its_row(self, ledger_tokens, around):
        deaf = copy.deepcopy(ledger_tokens)
        deaf.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("what", "")
        with pytest.raises(UserError, match="question 1: .*'what' to zero tokens"):
            encode_prompts(deaf, ["4a2", "what"], LEDGER, max_tokens=64, around=around)

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
        with pytest.raises(UserError, match="contains the question 0 times"):
            encode_prompts(qwen, ["4a2"], TAGS, max_tokens=64)


# In the manner of Llama 3: the date is said whether there is a system message or not.
DATED = """\
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif -%}
{{- '<|im_start|>system\\nToday: ' ~ date_string ~ '\\n' -}}
{%- if messages[0].role == 'system' %}{{- messages[0].content -}}{% endif -%}
{{- '<|im_end|>' -}}
{%- for m in messages if m.role == 'user' -%}
{{- '<|im_start|>' ~ m.content ~ '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_start|>' -}}"""
# What Qwen2.5's does with system messages.
QWEN25 = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}"""
PLAIN = QWEN25.partition("{%- endif -%}\n")[2]
# What begins every text is no system message.
JOINED = "<|im_end|>{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + PLAIN
SPECIAL = "<s>{% generation %}{% endgeneration %}" + PLAIN


def asked(train="math:x", **data):
    data["template_variables"] = FrozenMap(data.pop("variables", {}))
    return format_for(dataclasses.replace(DataConfig(), train=train, **data))


def templated(template):
    found = hf_world.chat_tokenizer()
    found.chat_template = template
    return found


@pytest.mark.parametrize("name", ["think_answer", "boxed"])
@pytest.mark.parametrize(
    ("template", "variables"),
    [(QWEN25, {}), (DATED, {"date_string": "1 May"}), (SPECIAL, {"x": 1})],
)
def test_ids_under_a_system_message_of_ones_own_are_the_templates(name, template, variables):
    tokenizer, system = templated(template), "Be brief.\n\nUse at most 'three' words."
    style = asked(prompt_format=name, system_prompt=system, variables=variables)
    encoded, _ = encode_prompts(tokenizer, ["2+2?", "user"], style, max_tokens=999)
    for question, row, length in zip(("2+2?", "user"), encoded.tokens, encoded.lengths):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )
        whole = tokenizer(text + style.think_open, add_special_tokens=False)["input_ids"]
        assert row[:length].tolist() == whole


def test_a_variable_changes_the_text_and_the_default_changes_nothing():
    tokenizer = templated(DATED)
    assert asked() is TAGS
    assert "26 Jul 2024" in frame(tokenizer, TAGS)[0]
    head, _ = frame(tokenizer, asked(variables={"date_string": "1 May"}))
    assert head == frame(tokenizer, TAGS)[0].replace("26 Jul 2024", "1 May")


@pytest.mark.parametrize("system", ["", " \n"])
def test_an_empty_system_prompt_means_no_system_message(system):
    for template in (PLAIN, NO_SYSTEM, JOINED):
        head, _ = frame(templated(template), asked(system_prompt=system))
        assert head == ("<|im_end|>" if template is JOINED else "<|im_start|>user\n")


def test_a_system_message_may_say_what_the_user_is_told_too():
    style = dataclasses.replace(BOXED, system="Box it.", after="\nBox it.")
    assert frame(templated(QWEN25), style)[1].startswith("\nBox it.<|im_end|>")


@pytest.mark.parametrize(
    ("template", "data", "says"),
    [
        (QWEN25, {"system_prompt": ""}, "default message 'You are Qwen.'; set data"),
        (DATED, {"system_prompt": ""}, "default message .*Today: 26 Jul 2024'; set data"),
        (
            NO_SYSTEM,
            {"system_prompt": "Be brief."},
            "can't be applied to a system and a user message",
        ),
        (
            QWEN25,
            {"variables": {"day": 1}},
            "template_variables.day: the chat template of the tokenizer does not use this",
        ),
        (
            DATED,
            {"variables": {"messages": "x"}},
            "variables.messages: bacr sets this variable for every prompt",
        ),
        (
            DATED,
            {"variables": {"add_generation_prompt": False}},
            "prompt: bacr sets this variable for every prompt",
        ),
        (
            DATED,
            {"variables": {"tokenize": True}},
            "tokenize: bacr sets this variable for every prompt, so",
        ),
        (
            DATED,
            {"variables": {"tools": "x"}},
            "variables.tools: bacr sets this variable for every prompt",
        ),
        (DATED, {"variables": {"enable_thinking": False}}, "set data.prompt_format=native for"),
        (
            DATED,
            {"train": "ledger", "system_prompt": "x"},
            "'ledger' does not use a chat template; leave",
        ),
        (
            DATED,
            {"train": "ledger", "variables": {"a": 1}},
            "variables={a: 1} has no effect, because the prompt format",
        ),
        (
            DATED,
            {"prompt_format": "characters", "system_prompt": ""},
            "does not use a chat template",
        ),
    ],
)
def test_what_a_template_can_not_be_told_is_one_line(template, data, says):
    with pytest.raises(UserError, match=says) as refusal:
        frame(templated(template), asked(**data))
    assert "\n" not in str(refusal.value)


LLAMA = """\
{%- for m in messages -%}
{{- '<|start|>' ~ m.role ~ '\\n' ~ m.content | trim ~ '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif -%}"""


def llama(template=LLAMA):
    """A tokenizer as Llama 3's first folder has it: the end that it names ends no turn."""
    found = hf_world.chat_tokenizer()
    found.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|eot|>"]})
    found.eos_token = "<|endoftext|>"
    found.turn_ends = (found.convert_tokens_to_ids("<|endoftext|>"),)
    found.chat_template = template
    return found


class TestEndsOfATurn:
    @pytest.mark.parametrize("style", [TAGS, BOXED], ids=lambda style: style.name)
    def test_the_token_with_which_the_template_ends_an_answer_is_one(self, style):
        tokenizer = llama()
        ends = set(tokenizer.convert_ids_to_tokens(list(eos_ids(tokenizer, style))))
        # The format names <|im_end|> for Qwen2.5.
        assert ends == {"<|endoftext|>", "<|im_end|>", "<|eot|>"}
        allowed = allowed_tokens(tokenizer, style, len(tokenizer))
        assert allowed[tokenizer.convert_tokens_to_ids("<|eot|>")]
        assert not allowed[tokenizer.convert_tokens_to_ids("<|start|>")]

    def test_what_only_begins_the_next_turn_is_none(self):
        mistral = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }} {{ eos_token }}"
            "{% else %}<|start|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
        )
        tokenizer = llama(mistral)
        ends = tokenizer.convert_ids_to_tokens(list(eos_ids(tokenizer, TAGS)))
        assert set(ends) == {"<|endoftext|>", "<|im_end|>"}

    def test_a_template_that_takes_no_answer_changes_nothing(self):
        tokenizer = llama("{{ raise_exception('no') if messages[-1].role == 'assistant' }}" + LLAMA)
        ends = tokenizer.convert_ids_to_tokens(list(eos_ids(tokenizer, TAGS)))
        assert set(ends) == {"<|endoftext|>", "<|im_end|>"}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 7 ** (10 ** 9) }}", "needs more than 2 s of CPU time"),
        ("{{ 'a' * 10 ** 10 }}", "needs more than 1,024 MiB of memory"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "is nested too deeply"),
        (
            {"rag": PLAIN, "tool_use": PLAIN},
            r"it has several chat templates \(rag, tool_use\), but none",
        ),
    ],
)
def test_a_template_that_can_not_be_rendered_is_refused_in_one_line(template, says):
    with pytest.raises(UserError, match=says) as caught:
        frame(templated(template), asked())
    assert len(caught.value.lines) == 1 and str(caught.value).startswith("tokenizer: ")


def test_a_template_whose_variables_are_looked_for_is_not_computed_here():
    with pytest.raises(UserError, match="needs more than 2 s of CPU time"):
        frame(templated("{{ 7 ** (10 ** 9) }}"), asked(variables={"day": 1}))


def test_a_template_by_the_name_of_default_is_taken():
    tokenizer = templated({"default": PLAIN, "rag": "{{ 1 }}"})
    assert frame(tokenizer, TAGS) == frame(templated(PLAIN), TAGS)


def test_the_date_of_a_template_is_the_formats():
    tokenizer = templated("{{ strftime_now('%d %b %Y %H:%M') }}" + PLAIN)
    style = asked(prompt_date="2024-02-29")
    assert frame(tokenizer, style)[0].startswith("29 Feb 2024 00:00<|im_start|>")
    with pytest.raises(
        UserError, match=r"^data.prompt_date=2024-02-29 has no effect, .* format 'ledger'"
    ):
        asked("ledger", prompt_date="2024-02-29")


@pytest.mark.parametrize("template", [LLAMA, QWEN25], ids=["trims", "keeps"])
@pytest.mark.parametrize("system", ["Be brief.\n", "\n  Be brief.\n\nBe kind. \n", "Be brief."])
def test_a_template_may_trim_the_system_message(template, system):
    head, _ = frame(templated(template), asked(system_prompt=system))
    assert f"system\n{system.strip() if template is LLAMA else system}<|" in head


@pytest.mark.parametrize("message", ["''", "m.content ~ m.content", "m.content | upper"])
def test_a_template_that_changes_a_system_message_with_line_breaks_is_refused(message):
    template = LLAMA.replace("m.content | trim", message + " if m.role == 'system' else m.content")
    with pytest.raises(UserError, match="contains the system message [02] times"):
        frame(templated(template), asked(system_prompt="Be brief.\n"))
