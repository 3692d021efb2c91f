"""Tests the supervised examples of the warm-up, built from the traces of several kinds of data."""

import json
from pathlib import Path

import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.questions import splits
from bacr_jax.questions.loaders import own_tokenizer
from bacr_jax.training.sft_batches import SftBatches
from methods_world import load
from thinking_world import R1_END, small

SUMS = "gym:chain_sum?min_terms=2&max_terms=3&max_digits=1&size=200"
SETTINGS = (
    f"data.train={SUMS}", f"data.eval=['{SUMS}']", "data.prompt_format=characters",
    "warmup.steps=100", "warmup.batch_tokens=2000",
)  # fmt: skip


@pytest.fixture(scope="module")
def lessons_of(tmp_path_factory):
    def make(*more):
        config = load(tmp_path_factory.mktemp("run"), None, *SETTINGS, *more)
        tokenizer = own_tokenizer(config.data)
        task_data = build_task_data(resolve(config).task, tokenizer, len(tokenizer))
        return SftBatches(resolve(config).warmup, task_data), tokenizer

    return make


def examples(lessons, tokenizer, step):
    """Text of each row, and the text that is learned of it."""
    tokens, learned = lessons.batch(step)
    for row, mask in zip(tokens, learned):
        yield tokenizer.decode(row).replace("<pad>", ""), tokenizer.decode(row[mask])


def test_an_example_is_prompt_trace_and_answer_and_its_prompt_is_not_learned(lessons_of):
    lessons, tokenizer = lessons_of()
    cut = whole = 0
    for text, learned in (e for step in range(40, 60) for e in examples(lessons, tokenizer, step)):
        prompt, trace, answer = text.replace("</think>", "<think>").split("<think>")
        expression = prompt.removeprefix("<bos>")
        answer = answer.removeprefix("<answer>").removesuffix("</answer>")
        assert int(answer) == eval(expression)
        if "</think>" in learned:
            whole += 1
            assert trace.endswith(f"={answer}")
            assert learned == f"{trace}</think>{answer}</answer>"
        else:
            cut += 1
            assert learned == f"{trace}{answer}</answer>"
    assert 0.05 < cut / (cut + whole) < 0.15


def test_a_batch_is_a_function_of_the_step(lessons_of):
    lessons, _ = lessons_of()
    np.testing.assert_array_equal(lessons.batch(50)[0], lessons_of()[0].batch(50)[0])
    assert not np.array_equal(
        lessons.batch(50)[0], lessons.batch(51)[0][: len(lessons.batch(50)[0])]
    )


def styles_in(lessons, tokenizer, steps):
    marks = {"=": "at_once", ":": "steps", "?": "checks"}
    found = [
        marks.get(text.partition("<think>")[2][0])
        for step in steps
        for text, _ in examples(lessons, tokenizer, step)
    ]
    return {style: found.count(style) for style in marks.values()}


def test_the_longest_style_comes_first_and_then_all_by_their_weights(lessons_of):
    lessons, tokenizer = lessons_of()
    early = styles_in(lessons, tokenizer, range(20))
    assert early["checks"] > 0 and early["at_once"] == early["steps"] == 0
    # Sums of two terms have level 1, and sums of three terms have level 5.
    first = [text for text, _ in examples(lessons, tokenizer, 0)]
    assert all(len(text.partition("<think>")[0]) == len("<bos>1+2") for text in first)
    lessons, tokenizer = lessons_of("warmup.styles={at_once: 3, steps: 1}")
    late = styles_in(lessons, tokenizer, range(40, 140))
    assert late["checks"] == 0 and 2.4 < late["at_once"] / late["steps"] < 3.6


def test_prompts_tell_the_budget_where_it_is_told_in_words(lessons_of):
    lessons, tokenizer = lessons_of("conditioning.budget_input=prompt")
    told = [text.partition("<think>")[0] for text, _ in examples(lessons, tokenizer, 50)]
    assert {text.partition("~")[2] for text in told} <= {str(n) for n in range(4, 13)}


def test_prompts_of_a_style_hold_its_first_token(lessons_of):
    made = lessons, tokenizer = lessons_of()
    prompts, answers = lessons.opened("steps", 12)
    texts = [tokenizer.decode(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths)]
    assert len(answers) == len(texts) > 10 and all(text.endswith("<think>:") for text in texts)
    # The measured questions are held out, so that memorized answers do not count.
    taught = {text.partition("<think>")[0] for s in range(40) for text, _ in examples(*made, s)}
    assert taught.isdisjoint(text.partition("<think>")[0] for text in texts)


# Two complete questions, a question without a long trace, and a question without an answer.
TABLE = [
    {"question": "2+2?", "answer": "4", "long": "Two and two.\nIs 4.", "short": "4"},
    {"question": "1+2?", "answer": "3", "long": "", "short": "3"},
    {"question": "0/0?", "answer": "", "long": "None.", "short": "?"},
    {"question": "3+4?", "answer": "7", "long": "Three, and four.\nIs 7.", "short": "7"},
]
GSM8K = [{"question": "2+2?", "answer": "Two and two.\nIs <<2+2=4>>4.\n#### 4"}]


def table_lessons(tmp_path, rows, kind, tokens, *more):
    """Lessons of a table in the tokens and the chat template of a released model."""
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = f"{kind}:{tmp_path}/own.jsonl"
    settings = (f"data.train={spec}", f"data.eval=['{spec}']", "data.num_groups=1")
    model = ("model.tokenizer=here", "warmup.steps=10", "warmup.batch_tokens=2000")
    config = load(tmp_path, None, *settings, *model, *more)
    tokenizer = small(tokens)
    settings = resolve(config)
    task_data = build_task_data(settings.task, tokenizer, len(tokenizer))
    return SftBatches(settings.warmup, task_data), tokenizer


@pytest.mark.parametrize(
    ("tokens", "form", "opened", "end", "cut"),
    [
        ("qwen3", "think_answer", "<think>\n", "\n</think>\n<answer>\n4\n</answer>",
         "\n</think>\n<answer>\n4\n</answer>"),
        ("r1", "native", "<think>\n", "\n</think>\n\n**Final Answer**\n\\boxed{4}\n\n",
         "...\n\n...\n\n</think>\n\n**Final Answer**\n\\boxed{4}\n\n"),
    ],
)  # fmt: skip
def test_a_sets_own_solutions_are_taught_in_the_prompt_format(
    tmp_path, tokens, form, opened, end, cut
):
    lessons, tokenizer = table_lessons(
        tmp_path, GSM8K, "gsm8k", tokens, f"data.prompt_format={form}"
    )
    assert lessons.styles == ("solution",)
    solution = "Two and two.\nIs <<2+2=4>>4."
    written = [tokenizer.decode(row) for step in range(4) for row in lessons.batch(step)[0]]
    responses = [text.partition(opened)[2].rstrip(tokenizer.decode(0)) for text in written]
    whole = f"{solution}{end}"
    assert whole in responses and sum(text == whole for text in responses) > len(responses) / 2
    # The other traces were truncated, and end like a truncated trace in training.
    others = [text for text in responses if text != whole]
    assert others and all(text.endswith(cut) for text in others)
    assert all(solution.startswith(text.removesuffix(cut)) for text in others)


def test_columns_of_a_table_are_styles_and_rows_without_them_are_left_out(tmp_path):
    lessons, tokenizer = table_lessons(
        tmp_path, TABLE, "jsonl", "qwen3", "data.trace_column=[short, long]"
    )
    assert lessons.styles == ("short", "long")
    texts = [tokenizer.decode(row) for step in range(4, 8) for row in lessons.batch(step)[0]]
    asked = {text.partition("?")[0][-3:] for text in texts}
    assert asked == {"2+2", "3+4"}
    assert {text.partition("<think>\n")[2][0] for text in texts} >= {"4", "7", "T"}


@pytest.mark.slow
def test_a_sentence_longer_than_its_question_fits(tmp_path):
    words = (
        "conditioning.prompt_text='Time is short, so keep your thinking within {budget} tokens.'"
    )
    lessons, tokenizer = table_lessons(
        tmp_path, GSM8K, "gsm8k", "qwen3", "conditioning.budget_input=prompt", words
    )
    texts = [tokenizer.decode(row) for step in range(4) for row in lessons.batch(step)[0]]
    assert texts and all("within " in text and "</answer>" in text for text in texts)


def test_a_mixture_teaches_the_sets_that_have_traces(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"problem": "5+5?", "solution": "#### 10"}\n')
    sets = f"data.train=['gsm8k:{tmp_path}/own.jsonl','jsonl:{tmp_path}/other.jsonl']"
    lessons, tokenizer = table_lessons(tmp_path, GSM8K, "gsm8k", "qwen3", sets)
    texts = [tokenizer.decode(row) for step in range(4) for row in lessons.batch(step)[0]]
    assert texts and all("2+2?" in text for text in texts)


@pytest.mark.parametrize(
    ("rows", "more", "fragment"),
    [
        (TABLE, (), "has no traces; set warmup.steps=0, or set data.trace_column to their column"),
        (TABLE, ("data.trace_column=lang",), "no column 'lang' with the trace; the columns are "
        "question"),
        (TABLE[1:3], ("data.trace_column=long",), "with an answer and a trace in each style "
        "\\(long\\), but .* set warmup.steps=0"),
    ],
)  # fmt: skip
def test_a_table_without_traces_is_refused(tmp_path, rows, more, fragment):
    with pytest.raises(UserError, match=fragment):
        table_lessons(tmp_path, rows, "jsonl", "qwen3", *more)


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        (("warmup.styles={step: 1}",), "'step' is not a trace style of"),
        (("warmup.batch_tokens=80", "data.train=gym:letter_counting", "data.num_groups=1"),
         "warmup.batch_tokens=80 is too small, because"),
    ],
)  # fmt: skip
def test_lessons_that_can_not_be_given_are_refused(lessons_of, settings, fragment):
    with pytest.raises(UserError, match=fragment):
        lessons_of(*settings)


GRADER = Path(__file__).parents[2] / "examples/own_data.py"
VERBATIM = ("data.answers=verbatim", f"grader={GRADER}:check")


def traced(**texts):
    """A table with one complete question, and one whose texts are replaced."""
    row = {"question": "2+2?", "answer": "4", "cot": "Two and two."}
    return [row, row | {"question": "3+3?"} | texts]


def table_of_characters(tmp_path, rows, *more):
    """Lessons of a table in the tokens of a small model."""
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = (f"data.train=jsonl:{path}", f"data.eval=['jsonl:{path}']", "data.num_groups=1")
    config = load(tmp_path, None, *SETTINGS, *sets, "data.trace_column=cot", *more)
    tokenizer = own_tokenizer(config.data)
    settings = resolve(config)
    task_data = build_task_data(settings.task, tokenizer, len(tokenizer))
    return SftBatches(settings.warmup, task_data), tokenizer


@pytest.mark.parametrize(
    ("tokens", "form"), [("qwen3", "native"), ("qwen3", "think_answer"), ("r1", "native")]
)
@pytest.mark.parametrize(
    ("texts", "what", "tag"),
    [
        ({"cot": "<think>\nSix.\n</think>\n\n6"}, "trace of jsonl-train-1 in the style cot",
         "<think>"),
        ({"cot": "Six.\n</think>\n\n6"}, "trace of jsonl-train-1 in the style cot", "</think>"),
        ({"cot": "Six.END"}, "trace of jsonl-train-1 in the style cot", "END"),
        ({"cot": "BEGINSix."}, "trace of jsonl-train-1 in the style cot", "BEGIN"),
        ({"answer": "6END"}, "answer of jsonl-train-1", "END"),
    ],
)  # fmt: skip
def test_texts_with_tags_or_control_tokens_are_refused(tmp_path, tokens, form, texts, what, tag):
    end, begin = {"qwen3": ("<|im_end|>", "<|im_start|>"), "r1": (R1_END, "<｜User｜>")}[tokens]
    spelled = lambda text: text.replace("END", end).replace("BEGIN", begin)
    rows = traced(**{name: spelled(text) for name, text in texts.items()})
    more = ("data.trace_column=cot", f"data.prompt_format={form}", *VERBATIM)
    with pytest.raises(UserError) as refusal:
        table_lessons(tmp_path, rows, "jsonl", tokens, *more)
    assert str(refusal.value) == (
        f"jsonl: the {what} contains {spelled(tag)!r}, which is a tag of the prompt format or a "
        "control token; write only the text between the tags"
    )


@pytest.mark.parametrize("tag", ["<think>", "</think>", "</answer>", "<bos>", "<pad>"])
def test_tags_of_a_small_model_are_refused(tmp_path, tag):
    with pytest.raises(UserError, match=f"jsonl-train-1 in the style cot contains '{tag}', which"):
        table_of_characters(tmp_path, traced(cot=f"3+3{tag}=6"))


def test_blank_lines_and_opening_answer_tags_are_taught(tmp_path):
    more = ("data.trace_column=cot", "data.prompt_format=native")
    rows = traced(cot="Three.\n\nAnd <answer> three, a<b>c.")
    lessons, tokenizer = table_lessons(tmp_path, rows, "jsonl", "qwen3", *more)
    texts = [tokenizer.decode(row) for step in range(4) for row in lessons.batch(step)[0]]
    assert any("And <answer> three, a<b>c.\n</think>" in text for text in texts)


@pytest.mark.parametrize("character", ["\n", "\t", "√", "😀"])
@pytest.mark.parametrize(
    ("column", "what"),
    [("cot", "the trace of jsonl-train-1 in the style cot"), ("answer", "the answer of jsonl-")],
)
def test_texts_that_the_characters_lack_are_refused(tmp_path, character, column, what):
    text = f"3+3{character}=6"
    with pytest.raises(UserError) as refusal:
        table_of_characters(tmp_path, traced(**{column: text}), *VERBATIM)
    assert str(refusal.value).startswith(f"jsonl: {what}")
    assert f"is {text!r}, which the tokenizer can't encode" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_traces_of_held_out_questions_are_checked_too(tmp_path):
    rows = [{"question": f"{i}+1", "answer": f"{i + 1}", "cot": "="} for i in range(40)]
    held_out = splits.held_out([row["question"] for row in rows], 256)
    assert 0 < held_out.sum() < len(rows)
    rows[int(np.flatnonzero(held_out)[0])]["cot"] = "√"
    with pytest.raises(UserError, match="which the tokenizer can't encode"):
        table_of_characters(tmp_path, rows)


def test_blanks_around_a_verbatim_answer_are_not_taught(tmp_path):
    lessons, tokenizer = table_of_characters(tmp_path, traced(answer=" 6 \n"), *VERBATIM)
    texts = [text for step in range(4) for text, _ in examples(lessons, tokenizer, step)]
    assert {text.partition("<answer>")[2] for text in texts} == {"4</answer>", "6</answer>"}


def test_the_digest_of_the_texts_depends_on_traces_and_answers(tmp_path):
    digest = lambda *rows: table_of_characters(tmp_path, rows)[0].texts_digest
    one, other = traced()
    assert digest(one, other) == digest(one, other)
    changed = [other | {"cot": "3 and 3."}, other | {"answer": "6"}, other | {"cot": ""}]
    assert len({digest(one, row) for row in (other, *changed)}) == 4
